"""Inspect a transformer: the thermodynamics of its heads, the geometry of its weights, the tests of the theory."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from massieu.corpus import Corpus
    from massieu.inspection.merging import merge_runs
    from massieu.inspection.result import Inspection, read_inspection
    from massieu.inspection.run import NotObservable, inspect_model
    from massieu.inspection.selection_report import margin_report

__all__ = [
    "Corpus",
    "Inspection",
    "NotObservable",
    "inspect_model",
    "margin_report",
    "merge_runs",
    "read_inspection",
]

HOMES = {
    "Inspection": "result",
    "read_inspection": "result",
    "margin_report": "selection_report",
    "merge_runs": "merging",
}


def __getattr__(name: str) -> Any:
    if name == "Corpus":
        return importlib.import_module("massieu.corpus").Corpus
    if name in __all__:
        return getattr(importlib.import_module(f"massieu.inspection.{HOMES.get(name, 'run')}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
