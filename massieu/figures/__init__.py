"""Figures drawn with matplotlib from tables; those of the theory packages are loaded on first use.

Matplotlib is imported when a figure is drawn, and its global state is not changed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from massieu.figures.inspections import Described, head_map, layer_profile, save_figures, trajectory
from massieu.figures.training_panels import training_panels

if TYPE_CHECKING:
    from massieu.margin.figures import approach, selection_plane, starts_map
    from massieu.memory.figures import capacity_curve, energy_landscape, overlap_transition, retrieved_images
    from massieu.patterns.figures import connection_growth, pattern_reach
    from massieu.universal.figures import grid_error_curve, separation_curve

__all__ = [
    "Described",
    "approach",
    "capacity_curve",
    "connection_growth",
    "energy_landscape",
    "grid_error_curve",
    "head_map",
    "layer_profile",
    "overlap_transition",
    "pattern_reach",
    "retrieved_images",
    "save_figures",
    "selection_plane",
    "separation_curve",
    "starts_map",
    "training_panels",
    "trajectory",
]

_HOMES = ("margin", "memory", "patterns", "universal")


def __getattr__(name: str) -> Any:
    if name in __all__:
        for home in _HOMES:
            module = importlib.import_module(f"massieu.{home}.figures")
            if name in module.__all__:
                return globals().setdefault(name, getattr(module, name))
    raise AttributeError(f"module 'massieu.figures' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
