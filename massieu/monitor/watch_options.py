"""Options of a watch, checked when they are given."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from massieu.checks import check_choice, check_count
from massieu.monitor.flags import EVALUATION_RULES, RULES, Flags, Rule
from massieu.monitor.log_sinks import TRACKERS, Sink, Tracker, open_sink
from massieu.monitor.quantities import check_quantities
from massieu.monitor.sums import PlaceSums

__all__ = ["Gather", "WatchOptions"]

Gather = Callable[[list[PlaceSums]], list[PlaceSums]]


@dataclass(frozen=True)
class WatchOptions:
    """The options of :func:`massieu.watch`, which explains each.

    Example:
        >>> WatchOptions.from_keywords({"every": 50}).every
        50
    """

    every: int = 100
    log: Any = None
    heads: bool = False
    quantities: Iterable[str] | Literal["all"] = "all"
    start: int = 0
    rules: Sequence[Rule] = RULES
    gather: Gather | None = None
    console: bool = True
    training: bool = True

    def __post_init__(self) -> None:
        check_count(self.every, "every", remedy="100 costs next to nothing")
        check_count(self.start, "start", least=0, remedy="a new run begins at 0")
        if not self.takes_all:
            object.__setattr__(self, "quantities", check_quantities(self.quantities))
        self.new_flags()

    @classmethod
    def from_keywords(cls, options: Mapping[str, Any], *excluded: str) -> WatchOptions:
        """Build the options of a caller that sets those ``excluded`` itself."""
        for name in options:
            check_choice(name, "an option", (field.name for field in fields(cls) if field.name not in excluded))
        return cls(**options)

    @property
    def takes_all(self) -> bool:
        """True if all quantities are computed."""
        return isinstance(self.quantities, str) and self.quantities == "all"

    @property
    def wanted(self) -> frozenset[str]:
        """Names of the quantities to compute."""
        # Weights do not change between passes outside training.
        return check_quantities(self.quantities) - (frozenset() if self.training else {"update_ratio"})

    @property
    def files(self) -> list[str]:
        """Paths among the logs."""
        return _paths(self.log)

    def logs_without(self, name: str) -> tuple[list[Any], bool]:
        """Return the logs except one by name, and whether that is among them."""
        logs = [] if self.log is None else _as_list(self.log)
        others = [log for log in logs if not (isinstance(log, str) and log == name)]
        return others, len(others) < len(logs)

    def new_flags(self) -> Flags:
        """Return flags by the rules, none of them raised."""
        return Flags(self.rules if self.training or self.rules is not RULES else EVALUATION_RULES, self.wanted)

    def new_sink(self) -> Sink | None:
        """Open the log; trackers get few series unless heads or quantities are named."""
        short = self.takes_all and not self.heads
        return None if self.log is None else open_sink(self.log, per_head=self.heads, short=short)


def _as_list(log: Any) -> list[Any]:
    return list(log) if isinstance(log, (list, tuple)) and not isinstance(log, Tracker) else [log]


def _paths(log: Any) -> list[str]:
    if isinstance(log, (str, os.PathLike)):
        return [] if str(log) in TRACKERS else [str(log)]
    return [path for each in log for path in _paths(each)] if isinstance(log, (list, tuple)) else []
