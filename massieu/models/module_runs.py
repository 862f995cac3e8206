"""Runs of single modules with leaves of autograd for their tokens and for the output of their attention."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from massieu.taps import AttentionCall, tap
from massieu.taps.passes import in_this_thread

__all__ = ["RunningModule", "ModuleRun", "at_rest", "observe_calls", "run_module", "seeded", "short_inputs"]


class RunningModule(NamedTuple):
    """A running module and its arguments."""

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def tensors(self) -> dict[int | str, Tensor]:
        """Return the floating-point arguments by place; nested ones, such as rotary tables, are no tokens."""
        arguments: dict[Any, Any] = {**dict(enumerate(self.args)), **self.kwargs}
        tensors = {place: x for place, x in arguments.items() if isinstance(x, Tensor) and x.dim() > 1}
        return {place: x for place, x in tensors.items() if x.is_floating_point()}

    def run(self, changed: Mapping[int | str, Tensor]) -> None:
        """Call the module with some arguments changed, and without caches."""
        # A cache would be extended by every run, and return keys that do not depend on these tokens.
        args = [changed.get(place, None if _is_cache(x) else x) for place, x in enumerate(self.args)]
        self.module(*args, **{name: changed.get(name, None if _is_cache(x) else x) for name, x in self.kwargs.items()})


def _is_cache(x: object) -> bool:
    return hasattr(x, "get_seq_length") and hasattr(x, "update")


def observe_calls(
    model: nn.Module, inputs: Mapping[str, Any] | Tensor
) -> list[tuple[AttentionCall, tuple[RunningModule, ...]]]:
    """Return every attention call of one pass, with the modules running at that time, the outermost first."""
    running: list[RunningModule] = []
    observed: list[tuple[AttentionCall, tuple[RunningModule, ...]]] = []
    with contextlib.ExitStack() as hooks:
        for name, module in model.named_modules():

            def enter(module: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                running.append(RunningModule(name, module, args, kwargs))

            def leave(*_: Any) -> None:
                running.pop()

            hooks.callback(module.register_forward_pre_hook(in_this_thread(enter), with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(in_this_thread(leave), always_call=True).remove)
        with torch.no_grad(), tap(model, lambda call: observed.append((call, tuple(running))), this_thread=True):
            model(**inputs) if isinstance(inputs, Mapping) else model(inputs)
    return observed


@dataclass
class ModuleRun:
    """One run of a module, with leaves of autograd for its tokens and for the output of its attention."""

    tokens: dict[int | str, Tensor]
    call: AttentionCall | None = None
    heads: Tensor | None = None
    outputs: list[Tensor] = field(default_factory=list)

    def parts(self, token: int) -> list[Tensor]:
        """Return query, key and value of a token, ``(heads, head_dim)``."""
        assert self.call is not None
        return [x[0, :, token] for x in (self.call.query, self.call.key, self.call.value) if x is not None]


def run_module(frame: RunningModule, target: nn.Module, tokens: Mapping[int | str, Tensor], noise: float) -> ModuleRun:
    """Run a module with other tokens and noise added to its heads; keep the outputs that depend on either."""
    # One leaf per tensor, so that queries and keys of the same tokens depend on the same leaf.
    leaves = {id(x): x.detach().clone().requires_grad_() for x in tokens.values()}
    run = ModuleRun({place: leaves[id(x)] for place, x in tokens.items()})

    def receive(call: AttentionCall) -> None:
        if call.module is not target or run.call is not None:
            return
        with torch.enable_grad():
            query, key, value = (None if x is None else _in_graph(x) for x in (call.query, call.key, call.value))
            run.call = replace(call, query=query, key=key, value=value)
            if call.output is not None:
                run.heads = noise * torch.randn(call.output.shape, generator=seeded()).to(call.output)
                _add(call.output, run.heads.requires_grad_())

    def keep(_: nn.Module, __: Any, result: Any) -> None:
        if run.call is not None:
            tensors = result if isinstance(result, (tuple, list)) else (result,)
            run.outputs.extend(x for x in tensors if isinstance(x, Tensor) and x.requires_grad)

    with contextlib.ExitStack() as stack:
        for module in frame.module.modules():
            stack.callback(module.register_forward_hook(in_this_thread(keep)).remove)
        stack.enter_context(torch.enable_grad())
        stack.enter_context(tap(frame.module, receive, this_thread=True))
        frame.run(run.tokens)
    return run


def _in_graph(x: Tensor) -> Tensor:
    """The same entries as part of the graph: the tensors of a call are views made without gradients."""
    base = x._base
    if x.grad_fn is not None or base is None or not base.requires_grad:
        return x
    views = (base, base.transpose(1, 2)) if base.dim() > 2 else (base,)
    return next(
        (view for view in views if _coincide(view, x)), base.as_strided(x.shape, x.stride(), x.storage_offset())
    )


def _add(output: Tensor, heads: Tensor) -> None:
    """Add a term to the output of the attention function."""
    # In place, since the model continues with this tensor or with one that shares its entries.
    base = output if output._base is None else output._base
    if _coincide(base, output):
        base.add_(heads)
    elif base.dim() == 4 and _coincide(base.transpose(1, 2), output):
        base.add_(heads.transpose(1, 2))
    else:
        _in_graph(output).add_(heads)


def _coincide(first: Tensor, second: Tensor) -> bool:
    places = ((x.shape, x.stride(), x.storage_offset()) for x in (first, second))
    return next(places) == next(places)


def short_inputs(inputs: Mapping[str, Any] | Tensor) -> Mapping[str, Any] | Tensor:
    """Return the first two tokens of the first text without padding; inputs without tokens keep all but the batch."""
    if isinstance(inputs, Tensor):
        return inputs[:1, :2] if inputs.dim() == 2 and not inputs.is_floating_point() else inputs[:1]
    # Arguments that are one tensor stay one, as in self-attention.
    cut: dict[int, Any] = {id(x): short_inputs(x) for x in inputs.values() if isinstance(x, Tensor) and x.dim()}
    found = {name: cut.get(id(x), x) for name, x in inputs.items()}
    return {name: torch.ones_like(x) if name.endswith("attention_mask") else x for name, x in found.items()}


@contextlib.contextmanager
def at_rest(model: nn.Module) -> Iterator[None]:
    """Turn off dropout, compilation and inference mode inside the block."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.inference_mode(False), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module in training:
            module.training = True


def seeded() -> torch.Generator:
    """Return a new generator with a fixed seed."""
    return torch.Generator().manual_seed(0)
