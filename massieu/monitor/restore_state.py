"""Forward passes without side effects: buffers, attributes and random numbers are restored."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["restored_state"]


@contextlib.contextmanager
def restored_state(model: nn.Module) -> Iterator[None]:
    """Restore the state of a model after the block, which runs without gradients.

    Restored are values and registrations of buffers, attributes of modules that are tensors or numbers, the random
    numbers of torch, Python and NumPy, generators of torch that modules hold as attributes (also in a list or a dict)
    and the casts of autocast. Other objects, lists that a pass appends to, and files are not restored.

    Example:
        >>> norm = torch.nn.BatchNorm1d(2)
        >>> with restored_state(norm):
        ...     _ = norm(torch.randn(5, 2) + 7)
        >>> norm.running_mean
        tensor([0., 0.])
    """
    modules = list(model.modules())
    # Modules of TorchScript store theirs elsewhere, and never assign them.
    buffers = [(module._buffers, dict(module._buffers)) for module in modules if isinstance(module._buffers, dict)]
    attributes = [(module, {k: x for k, x in vars(module).items() if _is_plain(x)}) for module in modules]
    tensors = [*model.buffers(), *(x for _, own in attributes for x in own.values() if isinstance(x, Tensor))]
    values = [(tensor, tensor.detach().clone()) for tensor in tensors]
    generators = [(generator, generator.get_state()) for generator in _generators(modules)]
    devices = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    numbers, others = random.getstate(), np.random.get_state()
    cached = torch.is_autocast_cache_enabled()
    # Some versions of torch keep a cast that was made without gradients, and use it in the pass that needs them.
    torch.set_autocast_cache_enabled(False)
    try:
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            yield
    finally:
        torch.set_autocast_cache_enabled(cached)
        random.setstate(numbers)
        np.random.set_state(others)
        for generator, state in generators:
            generator.set_state(state)
        for registered, before in buffers:
            if any(registered.get(name) is not value for name, value in before.items()) or len(registered) > len(
                before
            ):
                registered.clear()
                registered.update(before)
        for module, own in attributes:
            vars(module).update({name: x for name, x in own.items() if vars(module).get(name) is not x})
        with torch.no_grad():
            for tensor, value in values:
                # By value: batch norms write without a new version, and an unchanged tensor may be part of a graph.
                if not _is_same(tensor, value):
                    tensor.copy_(value)


def _is_plain(value: Any) -> bool:
    return isinstance(value, (bool, int, float, Tensor))


def _is_same(tensor: Tensor, value: Tensor) -> bool:
    return torch.equal(tensor, value) or (
        tensor.is_floating_point() and torch.allclose(tensor, value, rtol=0, atol=0, equal_nan=True)
    )


def _generators(modules: list[nn.Module]) -> Iterator[torch.Generator]:
    found: dict[int, torch.Generator] = {}
    for module in modules:
        for value in vars(module).values():
            inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
            found |= {id(x): x for x in (value, *inner) if isinstance(x, torch.Generator)}
    yield from found.values()
