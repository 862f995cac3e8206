"""Calls of the modules inside a model, recorded with entries of the tensors that have the shape of the stream."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from massieu.taps.passes import in_this_thread

__all__ = ["ModuleCall", "Recorder", "block_input", "hidden_tensors", "with_input"]

ENTRIES = 4096
"""Number of entries kept to recognize a tensor: sums of tensors are sums in every entry."""


def hidden_tensors(found: Any) -> Iterator[Tensor]:
    """Return the floating-point tensors with two or more axes in the arguments or the result of a module, in order."""
    if isinstance(found, Tensor):
        if found.is_floating_point() and found.dim() >= 2:
            yield found
    elif isinstance(found, Mapping):
        for value in found.values():
            yield from hidden_tensors(value)
    elif isinstance(found, (tuple, list)):
        for value in found:
            yield from hidden_tensors(value)


def block_input(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int | str, Tensor] | None:
    """Return place and value of the stream among the arguments of a block: the first tensor, positional ones first."""
    named: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    tensors = ((key, value) for key, value in named if isinstance(value, Tensor))
    return next(((key, value) for key, value in tensors if value.is_floating_point() and value.dim() >= 2), None)


def with_input(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], place: int | str, state: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a block with another stream at the place found by :func:`block_input`."""
    if isinstance(place, int):
        return (*args[:place], state, *args[place + 1 :]), dict(kwargs)
    return args, {**kwargs, place: state}


@dataclass
class ModuleCall:
    """One call of a module: its begin and end, and entries of its inputs and outputs of the stream's shape."""

    path: str
    module: nn.Module
    begin: int
    end: int = -1
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32


class Recorder:
    """Hooks on every module inside a candidate for a block.

    Attributes:
        clock: number of begins and ends of calls so far.
        calls: calls of these modules in the order of their begin.
        attention: paths of the attention modules.
        candidates: paths of the elements of lists of modules that contain attention.
    """

    def __init__(self, model: nn.Module) -> None:
        self.clock = 0
        self.calls: list[ModuleCall] = []
        self._open: list[ModuleCall] = []
        self._kept: dict[tuple[int, torch.device], Tensor] = {}
        modules = dict(model.named_modules())
        self.attention = {path for path, module in modules.items() if _is_attention(module)}
        lists = {path for path, module in modules.items() if isinstance(module, (nn.ModuleList, nn.Sequential))}
        elements = {path for path in modules if path.rpartition(".")[0] in lists and path.rpartition(".")[2].isdigit()}
        self.candidates = {path for path in elements if any(_inside(name, path) for name in self.attention)}
        self.modules = {
            path: module
            for path, module in modules.items()
            if path in self.candidates or any(_inside(path, candidate) for candidate in self.candidates)
        }

    @contextmanager
    def recording(self) -> Iterator[None]:
        with ExitStack() as stack:
            for path, module in self.modules.items():
                before = module.register_forward_pre_hook(in_this_thread(self._enter(path)), with_kwargs=True)
                after = module.register_forward_hook(in_this_thread(self._leave(path)))
                stack.callback(before.remove)
                stack.callback(after.remove)
            yield

    def _enter(self, path: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            call = ModuleCall(path, module, self._tick())
            stream = block_input(args, kwargs)
            if path in self.candidates and stream is not None:
                call.shape, call.dtype = tuple(stream[1].shape), stream[1].dtype
            self.calls.append(call)
            self._open.append(call)
            if call.shape and stream is not None:
                call.inputs = [self._entries(stream[1])]
            else:
                call.inputs = self._keep((args, kwargs))

        return hook

    def _leave(self, path: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            # A module that raised and was called again left its first call open: take the last one of this path.
            call = next(call for call in reversed(self._open) if call.path == path)
            del self._open[self._open.index(call) + 1 :]
            call.outputs = self._keep(output)
            call.end = self._tick()
            self._open.remove(call)

        return hook

    def _tick(self) -> int:
        self.clock += 1
        return self.clock

    def _keep(self, found: Any) -> list[Tensor]:
        shapes = [call.shape for call in self._open if call.shape]
        fits = (x for x in hidden_tensors(found) if any(_same_stream(x, shape) for shape in shapes))
        return [self._entries(x) for x in fits]

    def _entries(self, x: Tensor) -> Tensor:
        flat = x.detach().reshape(-1)
        key = (flat.numel(), flat.device)
        if key not in self._kept:
            generator = torch.Generator().manual_seed(flat.numel())
            self._kept[key] = torch.randperm(flat.numel(), generator=generator)[:ENTRIES].to(flat.device)
        return flat[self._kept[key]].double()


def _is_attention(module: nn.Module) -> bool:
    return re.search(r"attention|attn", type(module).__name__, re.IGNORECASE) is not None


def _inside(path: str, outer: str) -> bool:
    return path.startswith(outer + ".")


def _same_stream(x: Tensor, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor has the stream's shape, possibly with batch and tokens on one axis."""
    return x.shape[-1] == shape[-1] and x.numel() == torch.Size(shape).numel()
