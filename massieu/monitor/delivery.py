"""Delivery of readings to the log at the end of their step, with the values recorded by then."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

from torch import Tensor

from massieu.checks import UserError
from massieu.monitor.log_sinks import Sink
from massieu.monitor.reading import Reading, is_recordable

__all__ = ["Delivery"]


class Delivery:
    """Queue of one reading, which is written at the end of its step.

    Args:
        sink: the log, or None.

    Example:
        >>> seen = []
        >>> delivery = Delivery(massieu.monitor.open_sink(seen.append))
        >>> delivery.put(Reading(100, ()))
        >>> delivery.record({"loss": torch.tensor(2.5)})
        >>> len(seen)
        0
        >>> delivery.flush()
        >>> seen[0].recorded
        {'loss': 2.5}
    """

    def __init__(self, sink: Sink | None) -> None:
        self._sink = sink
        self._pending: Reading | None = None
        self._recorded: dict[str, float | Tensor] = {}

    def put(self, reading: Reading) -> None:
        """Keep a reading until the next call of :meth:`flush`."""
        self.flush()
        self._pending = reading

    def record(self, values: Mapping[str, Any]) -> None:
        """Store the latest number of each name for the pending reading or the next one."""
        self._recorded |= {_name(name): _scalar(name, value) for name, value in values.items()}

    def fill(self) -> None:
        """Add the recorded values to the pending reading."""
        if self._pending is not None:
            self._pending.recorded.update({name: _number(value) for name, value in self._recorded.items()})

    def flush(self) -> None:
        """Write the pending reading to the log."""
        if self._pending is None:
            return
        self.fill()
        reading, self._pending = self._pending, None
        self._recorded.clear()
        if self._sink is not None:
            self._sink(reading)

    def close(self) -> None:
        """Write the pending reading and close the log."""
        self.flush()
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.close()


def _name(name: str) -> str:
    if not is_recordable(name):
        raise UserError(
            "a recorded value must have a name of letters, digits and _ that is neither step nor flags, got"
            f" {name!r}; write record(loss=2.5)"
        )
    return name


def _number(value: float | Tensor) -> float:
    try:
        return float(value)
    except Exception:  # a failed device, which ends the training anyway
        return math.nan


def _scalar(name: str, value: Any) -> float | Tensor:
    """Return the number; one on a device stays there, since reading it would make the training wait."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return value.detach().clone()
    if isinstance(value, Real):
        return float(value)
    got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    raise UserError(f"{name} must be a number or a tensor with one, got {got}; write record({name}={name}.mean())")
