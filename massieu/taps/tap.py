"""Tap on a model: the context manager that captures its attention calls."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from massieu.kernels.graphs import call_eagerly
from massieu.taps import sources
from massieu.taps.calls import AttentionCall, Scores
from massieu.taps.coverage import Coverage
from massieu.taps.passes import Pass, frame, recomputes
from massieu.taps.structure import attention_modules, is_compiled, is_encoder_decoder, is_linear, named, template

__all__ = ["Tap", "tap"]

Receiver = Callable[[AttentionCall], object]


@contextlib.contextmanager
def tap(
    model: nn.Module,
    receive: Receiver,
    *,
    fallback: bool = True,
    gradients: bool = False,
    this_thread: bool = False,
) -> Iterator[Tap]:
    """Call ``receive`` with every attention call of the model inside the block.

    Outputs of the model stay the same to the last bit: its own functions and masks compute them. Observed are the
    attention interface of transformers, :func:`massieu.attend`, and elsewhere ``scaled_dot_product_attention`` in any
    module and softmax over the last axis of scores inside an attention module (see
    :func:`~massieu.taps.structure.attention_modules`): the softmax of a router is in none. The model is restored
    afterwards, also after an error.

    ``receive`` runs without autocast, and by default without gradients, once for each call; not for the
    recomputation of checkpointed layers. Inside the block, code compiled by ``torch.compile`` runs uncompiled and the
    fused path of ``nn.TransformerEncoder`` is off, which may change the last digits of their outputs.

    A tap observes the model in every thread, and ``receive`` runs in the thread of the pass: if threads share a model,
    it gets the calls of all of them unless ``this_thread`` is true.

    Args:
        model: any module.
        receive: called with each :class:`AttentionCall`.
        fallback: whether to observe more than the interface of transformers and :func:`massieu.attend`, which costs a
            few percent; not needed for a model whose ``Tap.bypassed`` was empty.
        gradients: whether ``receive`` runs with gradients where the model does, so that a loss can be computed from the
            tensors of the call. Inside layers under ``torch.utils.checkpoint`` with ``use_reentrant=True`` a model
            runs without.
        this_thread: whether to observe only passes in the thread that opens the tap.

    Example:
        >>> model = massieu.nn.Transformer(16, num_layers=2, num_heads=4, vocabulary=10)
        >>> calls = []
        >>> with massieu.taps.tap(model, calls.append) as observed:
        ...     _ = model(torch.tensor([[1, 2, 3]]))
        >>> observed.sentence, calls[1].name, calls[1].layer, calls[1].stack
        ('observed 2 of 2 attention modules', 'blocks.1.attention', 1, 'decoder')
    """
    found = Tap(model, receive, fallback, gradients, this_thread)
    with contextlib.ExitStack() as stack:
        stack.callback(found._close)
        # FlexAttention is compiled by itself and hardly runs otherwise.
        flex = "flex" in str(getattr(getattr(model, "config", None), "_attn_implementation", ""))
        sources.attach(found, uncompiled=not flex)
        stack.callback(sources.detach, found)
        found._enter(stack)
        yield found


class Tap:
    """An open tap: the attention modules of a model and which of them were observed.

    Attributes:
        observed: number of calls by path of the attention module, in the order of their first call.
        bypassed: paths of modules observed outside the interface of transformers, and the source of their calls.
        notes: sentences about changes to the model inside the tap.
        compiled: whether the model, or a part of it, is compiled.
    """

    def __init__(
        self,
        model: nn.Module,
        receive: Receiver,
        fallback: bool = True,
        gradients: bool = False,
        this_thread: bool = False,
    ) -> None:
        self.observed: dict[str, int] = {}
        self.bypassed: dict[str, str] = {}
        self.notes: list[str] = []
        self.compiled = is_compiled(model)
        if self.compiled:
            self.notes.append("the model is compiled; inside the tap it runs uncompiled: every call can be observed")
        self._receive = receive
        self._thread = threading.get_ident() if this_thread else None
        self._graph = _connected if gradients else torch.no_grad
        self._modules = attention_modules(model)
        self._paths = named(model)
        self._encoder_decoder = is_encoder_decoder(model, list(self._modules))
        self._stacks: dict[str, str] = {}
        self._layers: dict[str, dict[tuple[str, int], int]] = {}
        self._ran: set[str] = set()
        self._open = True
        self._pass = Pass()
        self._fallback = sources.Fallback(self) if fallback else None

    @property
    def expected(self) -> list[str]:
        """Paths of the attention modules of the model, in its order, and of others that were observed."""
        return [*self._modules, *(name for name in self.observed if name not in self._modules)]

    @property
    def coverage(self) -> Coverage:
        """Attention modules that ran and were observed so far."""
        linear = {name for name, module in self._modules.items() if is_linear(module) and name not in self.observed}
        return Coverage(self.expected, {*self.observed}, self._ran | {*self.observed}, linear, {*self.notes})

    @property
    def missing(self) -> list[str]:
        """Expected modules with softmax attention that were not observed."""
        return self.coverage.missing

    @property
    def idle(self) -> list[str]:
        """Expected modules that did not run."""
        return self.coverage.idle

    @property
    def sentence(self) -> str:
        """Number of attention modules observed, as a sentence."""
        return self.coverage.sentence

    def __repr__(self) -> str:
        return f"<{self.sentence}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return this tap: deep copies of the model keep its hooks, which do nothing once it is closed."""
        return self

    def observe(self, module: nn.Module | None, translate: sources.Translate, source: str) -> None:
        """Pass a call to the receiver if the module belongs to this model and the call is not a recomputation."""
        if recomputes() or self._elsewhere():
            return
        module = self._running(source) if module is None else module
        if module is None or module not in self._paths:
            return
        rows = next((running.rows for running in self._pass.frames if running.module is module), None)
        with sources.unobserved(), self._graph(), _full_precision():
            scores = translate(module, rows)
            if scores is not None:
                with torch.no_grad():
                    call = self._call(module, scores, source)
                self._receive(call)

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Register a module as running; needed where a tap is opened by a hook of that module."""
        if self._open:
            call_eagerly(self._push, module, args, kwargs, torch.compiler.is_compiling())

    def _elsewhere(self) -> bool:
        """Return whether passes of this thread are not observed."""
        return self._thread is not None and self._thread != threading.get_ident()

    def _running(self, source: str) -> nn.Module | None:
        running = [frame.module for frame in reversed(self._pass.frames)]
        attention = next((module for module in running if self._paths[module] in self._modules), None)
        return running[0] if attention is None and running and source != "softmax" else attention

    def _call(self, module: nn.Module, scores: Scores, source: str) -> AttentionCall:
        name = self._paths[module]
        number = self._pass.counts.get(name, 0)
        self._pass.counts[name] = number + 1
        self.observed[name] = self.observed.get(name, 0) + 1
        if source in ("softmax", "sdpa call"):
            self.bypassed[name] = source
        stack = self._stack(name, module, scores)
        batch, _, queries, _ = scores.shape
        known = self._pass.present(stack, batch, queries)
        scores = scores if known is None else replace(scores, present=known)
        layer = self._layer(stack, name, number)
        return AttentionCall(name=name, number=number, layer=layer, stack=stack, module=module, **vars(scores))

    def _stack(self, name: str, module: nn.Module, scores: Scores) -> str:
        """Stack of a call, decided once for all layers that differ by their number only."""
        group = template(name)
        if group not in self._stacks:
            crosses = any(frame.module is module and frame.crosses for frame in self._pass.frames)
            if crosses:
                self._stacks[group] = "cross"
            elif self._encoder_decoder:
                self._stacks[group] = "decoder" if "decoder" in name else "encoder"
            else:
                self._stacks[group] = "decoder" if _looks_back(module, scores) else "encoder"
        return self._stacks[group]

    def _layer(self, stack: str, name: str, number: int) -> int:
        """Number of a call in its stack, fixed: modules that differ by the number in their paths come first."""
        layers = self._layers.setdefault(stack, {})
        if (name, number) not in layers:
            group = [path for path in self.expected if template(path) == template(name)]
            for key in [*((path, 0) for path in group), (name, number)]:
                layers.setdefault(key, len(layers))
        return layers[name, number]

    def _enter(self, stack: contextlib.ExitStack) -> None:
        for module, name in self._paths.items():
            if name in self._modules or next(module.children(), None) is not None:
                before = module.register_forward_pre_hook(self.begin, with_kwargs=True, prepend=True)
                after = module.register_forward_hook(self._end, always_call=True)
                stack.callback(before.remove)
                stack.callback(after.remove)

    def _end(self, module: nn.Module, args: Any, result: Any) -> None:
        if self._open:
            call_eagerly(self._pop, module)

    def _push(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], compiling: bool) -> None:
        if recomputes() or self._elsewhere():
            return
        self._ran.add(self._paths[module])
        begins = self._pass.begin(frame(module, args, kwargs))
        # Inside compiled code a mode would be compiled too.
        if begins and self._fallback is not None and not compiling and not self._pass.in_fallback:
            self._pass.in_fallback = True
            self._fallback.__enter__()  # type: ignore[no-untyped-call]

    def _pop(self, module: nn.Module) -> None:
        if not recomputes():
            self._pass.end(module)
            if not self._pass.frames:
                self._leave()

    def _close(self) -> None:
        self._open = False
        self._leave()

    def _leave(self) -> None:
        self._pass.frames.clear()
        if self._fallback is not None and self._pass.in_fallback:
            self._pass.in_fallback = False
            self._fallback.__exit__(None, None, None)  # type: ignore[no-untyped-call]


def _connected() -> contextlib.AbstractContextManager[Any]:
    # Hooks of our own: a checkpointed layer counts the tensors it saves, and its second run is not observed.
    return saved_tensors_hooks(_itself, _itself)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _full_precision() -> contextlib.AbstractContextManager[Any]:
    if not torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("cuda"):
        return contextlib.nullcontext()
    stack = contextlib.ExitStack()
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            stack.enter_context(torch.autocast(device, enabled=False))
    return stack


def _looks_back(module: nn.Module, scores: Scores) -> bool:
    """Return whether queries see earlier keys only, according to the mask or, without one, to the module."""
    queries = scores.shape[2]
    if scores.causal or queries == 1 or getattr(module, "is_causal", None):
        return True
    seen = scores.scores if scores.query is None else scores.log_weight
    if seen is None or seen.shape[-2] != queries:
        return False
    if seen.dtype != torch.bool:
        # Some models hide atoms with a number that is only large enough.
        seen = seen > seen.amax(-1, keepdim=True) - 100
    return not bool(seen.reshape(-1, *seen.shape[-2:]).any(0).triu(seen.shape[-1] - queries + 1).any())
