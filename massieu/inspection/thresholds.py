"""Conditions such as ``entropy_min<0.1`` on the tables of an inspection, for whoever watches checkpoints in CI."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from massieu.checks import UserError
from massieu.inspection.quantities import GEOMETRY, QUANTITIES

if TYPE_CHECKING:
    from massieu.inspection.result import Inspection

__all__ = ["Threshold", "check_heads_only", "crossings", "parse_threshold"]

OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
EXPRESSION = re.compile(r"\s*([a-z]\w*)\s*(<=|>=|<|>)\s*(\S+)\s*")


@dataclass(frozen=True)
class Threshold:
    """A column, a comparison and a number."""

    column: str
    sign: str
    bound: float

    def __str__(self) -> str:
        return f"{self.column}{self.sign}{self.bound:g}"


def parse_threshold(expression: str) -> Threshold:
    """A condition from its text.

    Example:
        >>> str(parse_threshold("entropy_min < 0.1"))
        'entropy_min<0.1'
    """
    match = EXPRESSION.fullmatch(expression)
    try:
        if match is None or not math.isfinite(float(match[3])):
            raise ValueError
    except ValueError:
        raise UserError(
            f"--fail-on must be a column, <, <=, > or >=, and a number, got {expression!r}; write entropy_min<0.1"
        ) from None
    _check_column(match[1], QUANTITIES)
    if match[1] in QUANTITIES and QUANTITIES[match[1]].scale == "class":
        raise UserError(f"--fail-on compares numbers, and {match[1]} is a class; name a column of numbers")
    return Threshold(match[1], match[2], float(match[3]))


def _check_column(column: str, known: Iterable[str], exactly: bool = False) -> None:
    if column not in known and (exactly or column.removesuffix("_se") not in known):
        usable = (name for name in known if not name.endswith("_se") and name != "head_class")
        names = ", ".join(sorted(usable))
        raise UserError(f"--fail-on names the column {column}, which no table has; choose one of {names}")


def check_heads_only(thresholds: Iterable[Threshold]) -> None:
    """Refuse conditions on what the statistics of attention alone do not hold."""
    for threshold in thresholds:
        quantity = QUANTITIES[threshold.column.removesuffix("_se")]
        if quantity.table == "layers" or quantity.group == GEOMETRY:
            raise UserError(f"--heads-only does not measure {threshold.column} of --fail-on; leave out --heads-only")


def crossings(inspection: Inspection, thresholds: list[Threshold]) -> list[str]:
    """One sentence for every head or layer that fulfils a condition; what is not a number fulfils none."""
    found = []
    for threshold in thresholds:
        tables = {"head": inspection.heads, "layer": inspection.layers}
        where = next((name for name, table in tables.items() if threshold.column in table), None)
        if where is None or not str(tables[where][threshold.column].dtype).startswith(("float", "int")):
            numbers = {name for table in tables.values() for name in table.select_dtypes("number")}
            _check_column(threshold.column, numbers - {"layer", "head"}, exactly=True)
        assert where is not None
        for row in tables[where].to_dict("records"):
            if OPERATORS[threshold.sign](row[threshold.column], threshold.bound):
                head = f" head {row['head']}" if where == "head" else ""
                value = row[threshold.column]
                found.append(f"{threshold}: {row['stack']} layer {row['layer']}{head} has {value:.4g}")
    return found
