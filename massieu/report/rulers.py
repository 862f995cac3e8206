"""How far a model stands between the control and what the theory predicts, for every quantity that has both."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

__all__ = ["ABOUT_VERDICTS", "CONTROL", "THEORY", "Point", "Ruler", "beyond", "place", "rulers", "summary"]

CONSTRUCTED, BAND = "C47 constructed", "kurtosis_band"
CONTROL, THEORY = 20, 85  # per cent of the length of a track
EDGE = 0.8
ABOUT_VERDICTS = (
    "“fails” describes the theory on this model and is no fault of the model. A control that does worse than chance"
    " counts as chance."
)
"""What a reader of verdicts on predictions has to know, in the terminal and on the page."""


class Point(NamedTuple):
    """One layer or head on a track: its share of the way from the control (0) to the theory (1), place and value."""

    share: float
    label: str
    value: float


@dataclass(frozen=True)
class Ruler:
    """One prediction: the points of a model between its control (0) and the theory (1).

    Attributes:
        quantity: the name of the column.
        points: every layer or head.
        value: the median measured.
        control: the median of the control.
        predicted: what the theory asks for.
    """

    quantity: str
    points: list[Point]
    value: float
    control: float
    predicted: float

    @property
    def share(self) -> float:
        """How far the median has come from the control to the theory."""
        return median(point.share for point in self.points)

    @property
    def clipped(self) -> tuple[int, int]:
        """How many points lie beyond the left and beyond the right end of the track."""
        sides = [beyond(point.share) for point in self.points]
        return sides.count("low"), sides.count("high")


def rulers(inspection: Mapping[str, Any]) -> list[Ruler]:
    """A ruler for every quantity with a control and a prediction, from the tables and then from the experiments."""
    found = []
    stacks = {row.get("stack") for row in inspection["heads"]}
    for name, quantity in inspection["quantities"].items():
        if quantity.get("predicted") is None or quantity["control"] == BAND:  # Gaussianity is a band, not a way to go
            continue
        rows = [
            (row.get(name), _control(row, quantity), quantity["predicted"], _label(row, stacks))
            for row in inspection[quantity["table"]]
        ]
        found.append(_ruler(name, rows))
    covered = {ruler.quantity for ruler in found if ruler is not None}
    for name in dict.fromkeys(row["quantity"] for row in inspection["experiments"]):
        # Heads that were built to fulfill the theory are a check of the test and say nothing about the model.
        rows = [
            (row["value"], row["control"], row["predicted"], _label(row, stacks))
            for row in inspection["experiments"]
            if row["quantity"] == name and row["experiment"] != CONSTRUCTED
        ]
        if name in inspection["quantities"] and name not in covered:
            found.append(_ruler(name, rows))
    return [ruler for ruler in found if ruler is not None]


def summary(inspection: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The experiments by kind, stack and quantity, with the number of figures and their medians."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in inspection["experiments"]:
        groups.setdefault((row["experiment"], row["stack"], row["quantity"]), []).append(row)
    return [
        dict(zip(("experiment", "stack", "quantity"), key, strict=True), count=len(rows))
        | {name: _median([row[name] for row in rows]) for name in ("value", "control", "predicted")}
        for key, rows in groups.items()
    ]


def place(share: float) -> float:
    """Return where a share stands on its track, in per cent of its length; the ends catch what lies beyond."""
    return round(min(max(CONTROL + (THEORY - CONTROL) * share, EDGE), 100 - EDGE), 1)


def beyond(share: float) -> str:
    """Return the side on which a share leaves its track, "low" or "high", or an empty string.

    Example:
        >>> beyond(-3.0), beyond(0.5), beyond(1.5)
        ('low', '', 'high')
    """
    at = CONTROL + (THEORY - CONTROL) * share
    return "low" if at < 0 else "high" if at > 100 else ""


def _control(row: Mapping[str, Any], quantity: Mapping[str, Any]) -> Any:
    """Return the control of a row; chance where there is none or where it does worse than chance."""
    control, chance = row.get(quantity["control"], quantity["neutral"]), quantity["neutral"]
    if _known(control) and _known(chance) and quantity["predicted"] > chance:
        return max(control, chance)
    return control


def _ruler(name: str, rows: list[tuple[Any, Any, Any, str]]) -> Ruler | None:
    """The ruler of rows ``(value, control, predicted, place)``; None if none of them has all three figures."""
    there = [row for row in rows if all(map(_known, row[:3])) and abs(row[2] - row[1]) > 1e-9]
    if not there:
        return None
    points = [
        Point((value - control) / (predicted - control), place, value) for value, control, predicted, place in there
    ]
    values, controls, predictions, _ = zip(*there, strict=True)
    return Ruler(name, points, median(values), median(controls), median(predictions))


def _median(values: list[Any]) -> float | None:
    known = [value for value in values if _known(value)]
    return median(known) if known else None


def _known(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _label(row: Mapping[str, Any], stacks: set[Any]) -> str:
    """Name a layer or head; its stack only where there are several."""
    head = f", head {row['head']}" if row.get("head") is not None else ""
    return f"{row.get('stack', '') if len(stacks) > 1 else ''} layer {row.get('layer')}{head}".strip()
