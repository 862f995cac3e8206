"""Numbers of a page or a terminal as text; a missing or infinite value is a dash."""

from __future__ import annotations

import math
from typing import Any

__all__ = ["brief", "fixed", "is_finite", "small_number", "thousands"]


def is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def thousands(value: Any) -> str:
    """Return a count with thin spaces between thousands."""
    return "–" if value is None else f"{value:,}".replace(",", "\u2009") if isinstance(value, int) else str(value)


def fixed(value: float | None, digits: int = 2) -> str:
    """Return a number with fixed decimals and a true minus sign."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{round(value, digits) + 0.0:.{digits}f}".replace("-", "−")  # plus zero: no −0.00


def brief(value: float | None) -> str:
    """Return a number with three significant digits."""
    return "–" if value is None or not math.isfinite(value) else f"{value:.3g}".replace("-", "−")


def small_number(value: float, digits: int = 2) -> str:
    """Return a positive number with fixed decimals, or one significant digit where these would show zero."""
    return f"{value:.{digits}f}" if value >= 0.5 * 10**-digits or value == 0 else f"{value:.1g}"
