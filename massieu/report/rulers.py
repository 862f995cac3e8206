"""Position of a model between control and theory, for every quantity with a control and a prediction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from massieu.report.number_format import is_finite

__all__ = ["ABOUT_VERDICTS", "CONTROL", "THEORY", "Point", "Ruler", "beyond", "place", "rulers", "summary"]

CONSTRUCTED, BAND = "C47 constructed", "kurtosis_band"
CONTROL, THEORY = 20, 85  # per cent of the length of a track
EDGE = 0.8
ABOUT_VERDICTS = (
    "“fails” describes the theory on this model and is no fault of the model. A control that does worse than chance"
    " counts as chance."
)
"""Note below verdicts on predictions, in the terminal and on the page."""


class Point(NamedTuple):
    """One layer or head on a track: its share of the way from the control (0) to the theory (1), label and value."""

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
        predicted: the median of the prediction.
    """

    quantity: str
    points: list[Point]
    value: float
    control: float
    predicted: float

    @property
    def share(self) -> float:
        """Median of the shares."""
        return median(point.share for point in self.points)

    @property
    def clipped(self) -> tuple[int, int]:
        """Numbers of points beyond the left and beyond the right end of the track."""
        sides = [beyond(point.share) for point in self.points]
        return sides.count("low"), sides.count("high")


def rulers(inspection: Mapping[str, Any]) -> list[Ruler]:
    """Return a ruler for every quantity with a control and a prediction, from the tables, then the experiments."""
    found = []
    stacks = {row.get("stack") for row in inspection["heads"]}
    for name, quantity in inspection["quantities"].items():
        if quantity.get("predicted") is None or quantity["control"] == BAND:  # Gaussianity has a band instead
            continue
        rows = [
            (row.get(name), _control(row, quantity), quantity["predicted"], _label(row, stacks))
            for row in inspection[quantity["table"]]
        ]
        found.append(_ruler(name, rows))
    covered = {ruler.quantity for ruler in found if ruler is not None}
    for name in dict.fromkeys(row["quantity"] for row in inspection["experiments"]):
        # Heads built to fulfill the theory check the test, not the model.
        rows = [
            (row["value"], row["control"], row["predicted"], _label(row, stacks))
            for row in inspection["experiments"]
            if row["quantity"] == name and row["experiment"] != CONSTRUCTED
        ]
        if name in inspection["quantities"] and name not in covered:
            found.append(_ruler(name, rows))
    return [ruler for ruler in found if ruler is not None]


def summary(inspection: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the experiments by kind, stack and quantity, with the number of values and their medians."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in inspection["experiments"]:
        groups.setdefault((row["experiment"], row["stack"], row["quantity"]), []).append(row)
    return [
        dict(zip(("experiment", "stack", "quantity"), key, strict=True), count=len(rows))
        | {name: _median([row[name] for row in rows]) for name in ("value", "control", "predicted")}
        for key, rows in groups.items()
    ]


def place(share: float) -> float:
    """Return the position of a share on its track, in per cent of its length, clipped to the ends."""
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
    if is_finite(control) and is_finite(chance) and quantity["predicted"] > chance:
        return max(control, chance)
    return control


def _ruler(name: str, rows: list[tuple[Any, Any, Any, str]]) -> Ruler | None:
    """Return the ruler of rows ``(value, control, predicted, label)``; None if no row has all three values."""
    there = [row for row in rows if all(map(is_finite, row[:3])) and abs(row[2] - row[1]) > 1e-9]
    if not there:
        return None
    points = [
        Point((value - control) / (predicted - control), place, value) for value, control, predicted, place in there
    ]
    values, controls, predictions, _ = zip(*there, strict=True)
    return Ruler(name, points, median(values), median(controls), median(predictions))


def _median(values: list[Any]) -> float | None:
    known = [value for value in values if is_finite(value)]
    return median(known) if known else None


def _label(row: Mapping[str, Any], stacks: set[Any]) -> str:
    """Name a layer or head, with its stack if there are several."""
    head = f", head {row['head']}" if row.get("head") is not None else ""
    return f"{row.get('stack', '') if len(stacks) > 1 else ''} layer {row.get('layer')}{head}".strip()
