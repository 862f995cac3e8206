"""Usual values: medians and ranges of the quantities of reference models, beside those of an inspection."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from massieu.report.number_format import is_finite

__all__ = ["FILE", "Spread", "Usual", "reference", "usual"]

FILE = Path(__file__).with_name("assets") / "reference.json"


class Spread(NamedTuple):
    """Median, smallest and largest value over the heads or layers of a model."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Usual:
    """A quantity of an inspection beside that of the reference models.

    Attributes:
        quantity: name of the column.
        own: of the inspected model.
        others: of every reference model by its name; None where it has no value.
        lies: "within" if the median of the inspected model lies between the smallest and the largest value of the
            trained reference models, else "below" or "above".
    """

    quantity: str
    own: Spread
    others: dict[str, Spread | None]
    lies: str


@cache
def reference() -> dict[str, Any]:
    """Return the usual values of the reference models.

    Example:
        >>> [model["name"] for model in reference()["models"]][:2]
        ['embedded', 'MiniLM-L6']
    """
    document: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return document


def usual(inspection: Mapping[str, Any]) -> list[Usual]:
    """Return the quantities shared by the inspection and a reference model, in the order of the inspection."""
    models = reference()["models"]
    found = []
    for name, quantity in inspection["quantities"].items():
        own = _spread([row.get(name) for row in inspection[quantity["table"]]])
        others = {model["name"]: _stored(model["values"].get(name)) for model in models}
        trained = [
            spread for model in models if model["kind"] == "trained" and (spread := others[model["name"]]) is not None
        ]
        if own is not None and trained:
            found.append(Usual(name, own, others, _lies(own.median, trained)))
    return found


def _lies(value: float, trained: Sequence[Spread]) -> str:
    if value < min(spread.low for spread in trained):
        return "below"
    return "above" if value > max(spread.high for spread in trained) else "within"


def _stored(values: Sequence[float] | None) -> Spread | None:
    return None if values is None else Spread(*values)


def _spread(values: Sequence[Any]) -> Spread | None:
    known = [value for value in values if is_finite(value)]
    return Spread(median(known), min(known), max(known)) if known else None
