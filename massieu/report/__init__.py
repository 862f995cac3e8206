"""Self-contained HTML pages of inspections: ``render`` of one, ``compare`` of several side by side."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from massieu.report.pages import compare, render

__all__ = ["SCHEMA", "compare", "render"]

SCHEMA = "massieu.inspection/2"
"""Schema of ``inspection.json``, which pages are made from."""


def __getattr__(name: str) -> Any:
    if name in ("compare", "render"):
        return getattr(importlib.import_module("massieu.report.pages"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
