"""Tables as CSV that a spreadsheet opens without running anything."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas

__all__ = ["write_csv"]

FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""Beginnings of a cell that spreadsheets run as a formula."""


def write_csv(table: pandas.DataFrame, path: Path) -> None:
    """Write a table as CSV; a text that a spreadsheet would run as a formula begins with an apostrophe."""
    texts = table.select_dtypes(exclude="number").columns
    cells = table.assign(**{name: table[name].map(_inert) for name in texts})
    cells.rename(columns=_inert).to_csv(path, index=False)


def _inert(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA) else value
