"""Inspect a transformer: the thermodynamics of its heads, the geometry of its weights, the tests of the theory."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from massieu.inspection.result import Inspection, read_inspection
    from massieu.inspection.run import NotObservable, inspect_model

__all__ = ["Inspection", "NotObservable", "inspect_model", "read_inspection"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        home = "result" if name in ("Inspection", "read_inspection") else "run"
        return getattr(importlib.import_module(f"massieu.inspection.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
