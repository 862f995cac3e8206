"""Forward passes without training, by one thread at a time."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["evaluating", "moved", "run_model"]


@dataclass(frozen=True, eq=False)
class _Use:
    """A thread that evaluates some modules."""

    thread: int
    modules: frozenset[nn.Module]

    def excludes(self, other: _Use) -> bool:
        """Return whether both cannot run at once: their threads differ and they share a module."""
        return self.thread != other.thread and not self.modules.isdisjoint(other.modules)


_FREE = threading.Condition()
_USES: list[_Use] = []


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Turn off dropout and gradients inside the block.

    A second thread waits until the first one has left, also for a part of the model or a module that contains it, since
    they share hooks and mode. Passes outside of this block are not stopped.
    """
    with _alone(model):
        training = [module for module in model.modules() if module.training]
        model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for module in training:
                module.training = True


@contextlib.contextmanager
def _alone(model: nn.Module) -> Iterator[None]:
    """Wait for the evaluations of other threads that share modules with this one."""
    own = _Use(threading.get_ident(), frozenset(model.modules()))
    with _FREE:
        _FREE.wait_for(lambda: not any(own.excludes(each) for each in _USES))
        _USES.append(own)
    try:
        yield
    finally:
        with _FREE:
            _USES.remove(own)
            _FREE.notify_all()


def run_model(model: nn.Module, inputs: dict[str, Any]) -> Any:
    """Return the output of the model for inputs by name, without a cache of keys."""
    names = inspect.signature(model.forward).parameters
    return model(**inputs, **({"use_cache": False} if "use_cache" in names else {}))


def moved(value: Any, model: nn.Module) -> Any:
    """Return a tensor on the device of the model and in its precision; any other value as it is."""
    if not isinstance(value, Tensor):
        return value
    first = next(model.parameters(), None)
    if first is None:
        return value
    # Parts on disk have no device; their hooks move the inputs.
    device = value.device if first.is_meta else first.device
    return value.to(device, first.dtype if value.is_floating_point() else value.dtype)
