"""A forward pass of a model that is only looked at."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["evaluating", "moved", "run_model"]


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model without dropout and gradients, afterwards as it was."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


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
