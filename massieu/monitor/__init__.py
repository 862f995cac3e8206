"""Watch a model while it trains: the thermodynamics of its attention, read now and then."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from massieu.monitor.flags import RULES, Rule
from massieu.monitor.logs import Log, read_log
from massieu.monitor.quantities import WATCHED
from massieu.monitor.reading import Flag, Place, Reading
from massieu.monitor.regularizers import Collected, collect, entropy_floor, logit_bound, z_loss
from massieu.monitor.sinks import open_sink
from massieu.monitor.watch_session import Watch, watch

if TYPE_CHECKING:
    from massieu.monitor.runs import Run, alarms, training_run

__all__ = [
    "Collected",
    "Flag",
    "Log",
    "Place",
    "RULES",
    "Reading",
    "Rule",
    "Run",
    "WATCHED",
    "Watch",
    "alarms",
    "collect",
    "entropy_floor",
    "logit_bound",
    "open_sink",
    "read_log",
    "training_run",
    "watch",
    "z_loss",
]


def __getattr__(name: str) -> Any:
    if name in __all__:  # the runs, whose layers and recipe nobody needs who watches a model
        return globals().setdefault(name, getattr(importlib.import_module("massieu.monitor.runs"), name))
    raise AttributeError(f"module 'massieu.monitor' has no attribute {name!r}")
