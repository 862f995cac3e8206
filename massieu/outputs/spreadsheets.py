"""Tables as CSV files whose cells a spreadsheet does not execute."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas

__all__ = ["write_csv"]

FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""First characters of a cell that spreadsheets execute as a formula."""


def write_csv(table: pandas.DataFrame, path: Path) -> None:
    """Write a table as CSV; a text that a spreadsheet would execute gets an apostrophe in front."""
    texts = table.select_dtypes(exclude="number").columns
    cells = table.assign(**{name: table[name].map(_inert) for name in texts})
    cells.rename(columns=_inert).to_csv(path, index=False)


def _inert(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA) else value
