"""Limits of color scales, from the possible values of a quantity rather than from those of one model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Literal

__all__ = ["Limit", "color_limits", "row_length"]

Limit = float | Literal["length", "log length"] | None
DECADE = 10.0  # least ratio of the ends of a logarithmic scale


def row_length(heads: Mapping[str, Any]) -> float | None:
    """Return the number of keys of a typical row; None if unknown.

    It is the median of the column ``class_length``, or computed from entropy / normalized entropy, a mean of log N.

    Args:
        heads: the heads table, by columns.

    Example:
        >>> round(row_length({"entropy": [2.0, 1.0], "normalized_entropy": [0.5, 0.25]}), 1)
        54.6
    """
    lengths = [value for value in heads.get("class_length", ()) if _finite(value)]
    if lengths:
        return float(median(lengths))
    pairs = zip(heads.get("entropy", ()), heads.get("normalized_entropy", ()), strict=False)
    logs = [entropy / share for entropy, share in pairs if _finite(entropy) and _finite(share) and share > 0]
    return math.exp(median(logs)) if logs else None


def color_limits(
    values: Sequence[Any],
    scale: str,
    least: float | None = None,
    most: Limit = None,
    *,
    neutral: float | None = None,
    length: float | None = None,
) -> tuple[float, float]:
    """Return the values at both ends of a color scale; those of a logarithmic scale span at least a factor of ten.

    Args:
        values: of all heads that share the scale; missing and infinite values are ignored.
        scale: "sequential", "logarithmic" or "diverging".
        least: smallest possible value; if None, the values decide, but a sequential scale starts at zero if no value is
            negative.
        most: largest possible value; if None, the values decide.
        neutral: middle of a diverging scale.
        length: number of keys of a row, for the limits "length" and "log length".

    Example:
        >>> color_limits([3.44, 3.58], "sequential", 0.0, "log length", length=100.0)
        (0.0, 4.605170185988092)
        >>> color_limits([0.1, -0.2], "diverging", -1.0, 1.0, neutral=0.0)
        (-1.0, 1.0)
    """
    found = [float(value) for value in values if _finite(value)]
    largest = _resolved(most, length)
    if scale == "sequential" and least is None and min(found, default=0.0) >= 0:
        least = 0.0
    # A value beyond the typical length of a row must stay on the scale.
    low = min([*found, *([] if least is None else [least])], default=0.0)
    high = max([*found, *([] if largest is None else [largest])], default=1.0)
    if scale == "diverging":
        middle = neutral or 0.0
        reach = max(high - middle, middle - low) or 1.0
        return middle - reach, middle + reach
    if scale == "logarithmic" and low > 0:
        return _decade(low, high, fixed=least is not None)
    return low, high if high > low else low + 1.0


def _decade(low: float, high: float, fixed: bool) -> tuple[float, float]:
    wider = max(DECADE * low / high, 1.0)
    return (low, high * wider) if fixed else (low / math.sqrt(wider), high * math.sqrt(wider))


def _resolved(limit: Limit, length: float | None) -> float | None:
    if limit == "length":
        return length
    if limit == "log length":
        return math.log(length) if length else None
    return limit


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
