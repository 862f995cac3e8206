"""How far a model stands between the control and what the theory predicts, for every quantity that has both."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

__all__ = ["Ruler", "place", "rulers", "summary"]

CONSTRUCTED = "X2 constructed"


@dataclass(frozen=True)
class Ruler:
    """One prediction: the points of a model between its control (0) and the theory (1).

    Attributes:
        quantity: the name of the column.
        points: ``(share, label)`` of every layer or head; a share of 0 is the control, 1 the prediction.
        value: the median measured.
        control: the median of the control.
        predicted: what the theory asks for.
    """

    quantity: str
    points: list[tuple[float, str]]
    value: float
    control: float
    predicted: float

    @property
    def share(self) -> float:
        """How far the median has come from the control to the theory."""
        return median(share for share, _ in self.points)


def rulers(inspection: Mapping[str, Any]) -> list[Ruler]:
    """A ruler for every quantity with a control and a prediction, from the tables and then from the experiments."""
    found = []
    for name, quantity in inspection["quantities"].items():
        if quantity.get("predicted") is None or name == "kurtosis":  # Gaussianity is a band, not a way to go
            continue
        rows = [
            (row.get(name), row.get(quantity["control"], quantity["neutral"]), quantity["predicted"], _label(row))
            for row in inspection[quantity["table"]]
        ]
        found.append(_ruler(name, rows))
    covered = {ruler.quantity for ruler in found if ruler is not None}
    for name in dict.fromkeys(row["quantity"] for row in inspection["experiments"]):
        # Heads that were built to fulfil the theory are a check of the test and say nothing about the model.
        rows = [
            (row["value"], row["control"], row["predicted"], _label(row))
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
    """Where a share stands on a track that has the control at 20 % and the theory at 85 %; the ends catch the rest."""
    return round(min(max(20 + 65 * share, 0.8), 99.2), 2)


def _ruler(name: str, rows: list[tuple[Any, Any, Any, str]]) -> Ruler | None:
    """The ruler of rows ``(value, control, predicted, place)``; None if none of them has all three figures."""
    there = [row for row in rows if all(map(_known, row[:3])) and abs(row[2] - row[1]) > 1e-9]
    if not there:
        return None
    points = [((value - control) / (predicted - control), place) for value, control, predicted, place in there]
    values, controls, predictions, _ = zip(*there, strict=True)
    return Ruler(name, points, median(values), median(controls), median(predictions))


def _median(values: list[Any]) -> float | None:
    known = [value for value in values if _known(value)]
    return median(known) if known else None


def _known(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _label(row: Mapping[str, Any]) -> str:
    head = f", head {row['head']}" if row.get("head") is not None else ""
    return f"{row.get('stack', '')} layer {row.get('layer')}{head}".strip()
