"""A forward pass of a model that is only looked at, by one thread at a time."""

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
        """Whether both may not go on at once: they are of different threads and share a module."""
        return self.thread != other.thread and not self.modules.isdisjoint(other.modules)


_FREE = threading.Condition()
_USES: list[_Use] = []


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model without dropout and gradients, afterwards as it was.

    A second thread waits until the first one has left, also for a part of the model or a module that contains it: the
    hooks and the mode of the model are there once. What runs the model without this is not stopped.
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
    """What the model makes of the inputs, by name; without a cache of keys, which nobody would use."""
    names = inspect.signature(model.forward).parameters
    return model(**inputs, **({"use_cache": False} if "use_cache" in names else {}))


def moved(value: Any, model: nn.Module) -> Any:
    """A tensor where the model is, in the model's precision if it has one; anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    first = next(model.parameters(), None)
    if first is None:
        return value
    # Parts that lie on disk have no device; their hooks move what comes.
    device = value.device if first.is_meta else first.device
    return value.to(device, first.dtype if value.is_floating_point() else value.dtype)
