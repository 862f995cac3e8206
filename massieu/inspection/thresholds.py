"""Conditions on the tables of an inspection, such as ``median(entropy) by layer < 0.1``, for gates in CI.

A column alone means any head, or any layer for a column of layers: ``score_max > 1000`` holds if it holds for one head.
``mean``, ``median``, ``min`` and ``max`` of a column, and ``share`` of the heads that fulfill a comparison, are taken
over all heads of the model (all layers for a column of layers); ``by layer`` takes them over the heads of each layer,
and the condition holds if it holds for any layer. Values that are not numbers are left out.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from massieu.checks import UserError, did_you_mean
from massieu.inspection.quantities import GEOMETRY, QUANTITIES

if TYPE_CHECKING:
    from massieu.inspection.result import Inspection

__all__ = ["Inequality", "EXAMPLES", "Threshold", "check_heads_only", "crossings", "parse_threshold"]

EXAMPLES = ("median(entropy) by layer < 0.1", "share(entropy < 0.05) > 0.2")
"""Signs of collapsed attention: a layer in which half of the heads look at one token; a fifth of all heads that do."""

OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
AGGREGATES = ("mean", "median", "min", "max")
SHARE = "share"
COMPARISON = r"(<=|>=|<|>)\s*([^\s()<>]+)"
EXPRESSION = re.compile(
    rf"\s*(?:(?P<function>[a-z]\w*)\s*\(\s*)?(?P<column>[a-z]\w*)\s*(?P<inner>{COMPARISON}\s*)?(?P<end>\)\s*)?"
    rf"(?P<by>by\s+layer\s*)?(?P<outer>{COMPARISON})\s*"
)


@dataclass(frozen=True)
class Inequality:
    """A sign and a number."""

    sign: str
    bound: float

    def holds(self, value: Any) -> Any:
        """Return True where a value, or each of a column, is on this side of the bound."""
        return OPERATORS[self.sign](value, self.bound)

    def __str__(self) -> str:
        return f"{self.sign} {self.bound:g}"


@dataclass(frozen=True)
class Threshold:
    """A condition on a column.

    Attributes:
        column: the name of a quantity, or of its standard error.
        outer: what its value is compared with.
        function: the aggregate over heads or layers; None for every one of them.
        inner: the comparison whose share is taken, if the function is that.
        by_layer: whether the aggregate is taken over each layer.
    """

    column: str
    outer: Inequality
    function: str | None = None
    inner: Inequality | None = None
    by_layer: bool = False

    def __str__(self) -> str:
        inside = self.column if self.inner is None else f"{self.column} {self.inner}"
        subject = inside if self.function is None else f"{self.function}({inside})"
        return f"{subject}{' by layer' if self.by_layer else ''} {self.outer}"

    def value(self, numbers: Any) -> float:
        """The number that is compared, of a column of some heads or layers; nan if there are none."""
        numbers = numbers.dropna()
        if self.inner is not None:
            return float(self.inner.holds(numbers).mean()) if len(numbers) else math.nan
        return float(getattr(numbers, self.function or "mean")())


def parse_threshold(expression: str) -> Threshold:
    """A condition from its text.

    Example:
        >>> parse_threshold("median(entropy) by layer<0.1")
        Threshold(column='entropy', outer=Inequality(sign='<', bound=0.1), function='median', inner=None, by_layer=True)
        >>> print(parse_threshold("share( entropy<.05 )>0.2"))
        share(entropy < 0.05) > 0.2
    """
    match = EXPRESSION.fullmatch(expression)
    if match is None or bool(match["function"]) != bool(match["end"]) or (match["inner"] and not match["function"]):
        raise _no_condition(expression)
    inner = _comparison(match["inner"], expression) if match["inner"] else None
    outer = _comparison(match["outer"], expression)
    found = Threshold(match["column"], outer, match["function"], inner, match["by"] is not None)
    _check_function(found, expression)
    _check_column(found.column, QUANTITIES)
    _check_layers(found)
    return found


def _comparison(text: str, expression: str) -> Inequality:
    sign = "".join(letter for letter in text[:2] if letter in "<>=")
    try:
        bound = float(text[len(sign) :])
    except ValueError:
        bound = math.nan
    if not math.isfinite(bound):
        raise _no_condition(expression)
    return Inequality(sign, bound)


def _no_condition(expression: str) -> UserError:
    return UserError(
        "--fail-on must be a column, or mean, median, min, max or share of one, then <, <=, > or >=, and a number,"
        f" got {expression!r}; write {' or '.join(repr(example) for example in EXAMPLES)}"
    )


def _check_function(threshold: Threshold, expression: str) -> None:
    known, function = (*AGGREGATES, SHARE), threshold.function
    if function is not None and function not in known:
        near = did_you_mean(function, known)
        raise UserError(f"--fail-on knows {', '.join(known)}, got {function!r}{near} in {expression!r}")
    wrong = None
    if (function == SHARE) != (threshold.inner is not None):
        wrong = "--fail-on takes the share of a comparison and of nothing else, got"
    elif function == SHARE and not 0 <= threshold.outer.bound <= 1:
        wrong = f"a share is from 0 to 1, got {threshold.outer.bound:g} in"
    if wrong is not None:
        raise UserError(f"{wrong} {expression!r}; write {EXAMPLES[1]!r}")


def _check_column(column: str, known: Iterable[str], exactly: bool = False) -> None:
    known = list(known)
    if column not in known and (exactly or column.removesuffix("_se") not in known):
        usable = sorted(name for name in known if not name.endswith("_se") and name != "head_class")
        near = did_you_mean(column, usable)
        raise UserError(
            f"--fail-on names the column {column}, which no table has{near}; choose one of {', '.join(usable)}"
        )
    if column in QUANTITIES and QUANTITIES[column].scale == "class":
        raise UserError(f"--fail-on compares numbers, and {column} is a class; name a column of numbers")


def _check_layers(threshold: Threshold) -> None:
    if threshold.by_layer and threshold.function is None:
        raise UserError(
            f"--fail-on takes by layer for mean, median, min, max or share, got {str(threshold)!r};"
            f" write {EXAMPLES[0]!r}, or leave out by layer for any head"
        )
    if threshold.by_layer and QUANTITIES[threshold.column.removesuffix("_se")].table == "layers":
        plain = Threshold(threshold.column, threshold.outer)
        raise UserError(f"{threshold.column} has one value for a layer, got {str(threshold)!r}; write {str(plain)!r}")


def check_heads_only(thresholds: Iterable[Threshold]) -> None:
    """Refuse conditions on what the statistics of attention alone do not hold."""
    for threshold in thresholds:
        quantity = QUANTITIES[threshold.column.removesuffix("_se")]
        if quantity.table == "layers" or quantity.group == GEOMETRY:
            raise UserError(f"--heads-only does not measure {threshold.column} of --fail-on; leave out --heads-only")


def crossings(inspection: Inspection, thresholds: Iterable[Threshold]) -> list[str]:
    """One sentence for every head, layer or model that fulfills a condition."""
    found = []
    for threshold in thresholds:
        for place, numbers in _places(inspection, threshold):
            value = threshold.value(numbers)
            if threshold.outer.holds(value):
                found.append(f"{threshold}: {place} has {value:.4g}")
    return found


def _places(inspection: Inspection, threshold: Threshold) -> Iterator[tuple[str, Any]]:
    """Places where a condition may hold, in words, with the column there."""
    tables, column = {"head": inspection.heads, "layer": inspection.layers}, threshold.column
    where = next((name for name, table in tables.items() if column in table), None)
    if where is None or tables[where][column].dtype.kind not in "fiu":
        numbers = {name for table in tables.values() for name in table.select_dtypes("number")}
        _check_column(column, numbers - {"layer", "head"}, exactly=True)
    assert where is not None
    table = tables[where]
    if threshold.function is not None and not threshold.by_layer:
        yield "the model", table[column]
        return
    for (stack, layer), own in table.groupby(["stack", "layer"], sort=False):
        if threshold.by_layer or where == "layer":
            yield f"{stack} layer {layer}", own[column]
            continue
        for head, numbers in own.groupby("head", sort=False):
            yield f"{stack} layer {layer} head {head}", numbers[column]
