"""Open a tap on a model, and know what it heard."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from massieu.kernels.graphs import call_eagerly
from massieu.taps import sources as ears
from massieu.taps.calls import AttentionCall, Scores
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

    The model computes what it computes without the tap, to the last bit, from its own functions and masks. Listened to
    are the attention interface of transformers, :func:`massieu.attend`, and elsewhere
    ``scaled_dot_product_attention`` in any module and softmax over the last axis of scores inside an attention module
    (see :func:`~massieu.taps.structure.attention_modules`): the softmax of a router is in none. Afterwards everything
    is as before, whatever happened inside.

    ``receive`` runs without autocast, and without gradients unless you ask for them, once for each call; not for the
    recomputation of checkpointed layers. Inside the block, what ``torch.compile`` has compiled runs uncompiled and the
    fused path of ``nn.TransformerEncoder`` is off, which may change the last digits of their outputs.

    A tap observes the model in every thread, and ``receive`` runs in the thread of the pass: if threads share a model,
    also with an inspection, it gets the calls of all of them unless ``this_thread`` is true.

    Args:
        model: any module.
        receive: called with each :class:`AttentionCall`.
        fallback: whether to listen beside the interface of transformers and :func:`massieu.attend`, which costs a few
            percent; where ``Tap.bypassed`` was empty once, nothing is lost without it.
        gradients: whether ``receive`` runs with gradients where the model does, and every tensor of the call is part of
            its graph, so that what is computed from it can be part of a loss. Inside layers under
            ``torch.utils.checkpoint`` with ``use_reentrant=True`` a model runs without.
        this_thread: whether to observe only passes in the thread that opens the tap.

    Example:
        >>> model = massieu.nn.Transformer(16, num_layers=2, num_heads=4, vocabulary=10)
        >>> calls = []
        >>> with massieu.taps.tap(model, calls.append) as heard:
        ...     _ = model(torch.tensor([[1, 2, 3]]))
        >>> heard.sentence, calls[1].name, calls[1].layer, calls[1].stack
        ('heard 2 of 2 attention modules', 'blocks.1.attention', 1, 'decoder')
    """
    found = Tap(model, receive, fallback, gradients, this_thread)
    with contextlib.ExitStack() as stack:
        stack.callback(found._close)
        # FlexAttention is compiled by itself and hardly runs otherwise.
        flex = "flex" in str(getattr(getattr(model, "config", None), "_attn_implementation", ""))
        ears.open_(found, uncompiled=not flex)
        stack.callback(ears.close, found)
        found._enter(stack)
        yield found


class Tap:
    """What a tap heard.

    Attributes:
        heard: number of calls by path of the attention module, in the order of their first call.
        bypassed: paths of modules that were heard outside the interface of transformers, and where.
        notes: sentences about how the model was heard.
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
        self.heard: dict[str, int] = {}
        self.bypassed: dict[str, str] = {}
        self.notes: list[str] = []
        self.compiled = is_compiled(model)
        if self.compiled:
            self.notes.append("the model is compiled; inside the tap it runs uncompiled, so that every call is heard")
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
        self._fallback = ears.Fallback(self) if fallback else None

    @property
    def expected(self) -> list[str]:
        """Paths of the attention modules of the model, in its order, and of others that were heard."""
        return [*self._modules, *(name for name in self.heard if name not in self._modules)]

    @property
    def linear(self) -> list[str]:
        """Expected modules whose attention has no softmax."""
        return [name for name, module in self._modules.items() if is_linear(module) and name not in self.heard]

    @property
    def missing(self) -> list[str]:
        """Expected modules that were not heard, although their attention should have a softmax."""
        return [name for name in self.expected if name not in self.heard and name not in self.linear]

    @property
    def idle(self) -> list[str]:
        """Expected modules that did not run."""
        return [name for name in self._modules if name not in self._ran and name not in self.heard]

    @property
    def sentence(self) -> str:
        """How many of the attention modules were heard."""
        sentence = f"heard {len(self.heard)} of {len(self.expected)} attention modules"
        if self.linear:
            sentence += f"; {', '.join(self.linear)} without softmax"
        if self.idle:
            sentence += f"; {len(self.idle)} did not run"
        return sentence

    def __repr__(self) -> str:
        return f"<{self.sentence}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return this tap: deep copies of the model keep its hooks, which do nothing once it is closed."""
        return self

    def hear(self, module: nn.Module | None, translate: ears.Translate, place: str) -> None:
        """Hand a call to the receiver, if the module is one of this model and the call is not a recomputation."""
        if recomputes() or self._elsewhere():
            return
        module = self._running(place) if module is None else module
        if module is None or module not in self._paths:
            return
        rows = next((running.rows for running in self._pass.frames if running.module is module), None)
        with ears.unheard(), self._graph(), _full_precision():
            scores = translate(module, rows)
            if scores is not None:
                with torch.no_grad():
                    call = self._call(module, scores, place)
                self._receive(call)

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Say that a module runs already with these arguments: a tap that its own hook opens is too late to see it."""
        if self._open:
            call_eagerly(self._push, module, args, kwargs, torch.compiler.is_compiling())

    def _elsewhere(self) -> bool:
        """Whether this is a thread whose passes are not observed."""
        return self._thread is not None and self._thread != threading.get_ident()

    def _running(self, place: str) -> nn.Module | None:
        running = [frame.module for frame in reversed(self._pass.frames)]
        attention = next((module for module in running if self._paths[module] in self._modules), None)
        return running[0] if attention is None and running and place != "softmax" else attention

    def _call(self, module: nn.Module, scores: Scores, place: str) -> AttentionCall:
        name = self._paths[module]
        number = self._pass.counts.get(name, 0)
        self._pass.counts[name] = number + 1
        self.heard[name] = self.heard.get(name, 0) + 1
        if place in ("softmax", "sdpa call"):
            self.bypassed[name] = place
        stack = self._stack(name, module, scores)
        batch, _, queries, _ = _tensor(scores).shape
        known = self._pass.present(stack, batch, queries)
        scores = scores if known is None else scores._replace(present=known)
        return AttentionCall(name, number, self._layer(stack, name, number), stack, *scores, module=module)

    def _stack(self, name: str, module: nn.Module, scores: Scores) -> str:
        """One answer for all layers that differ by their number only, given at the first call."""
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
        """Layers of a stack keep their numbers: first those that differ by their number in the path, in its order."""
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
        if begins and self._fallback is not None and not compiling and not self._pass.listens:
            self._pass.listens = True
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
        if self._fallback is not None and self._pass.listens:
            self._pass.listens = False
            self._fallback.__exit__(None, None, None)  # type: ignore[no-untyped-call]


def _connected() -> contextlib.AbstractContextManager[Any]:
    # Hooks of our own: a checkpointed layer counts what it saves, and its second run is not heard.
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


def _tensor(scores: Scores) -> Tensor:
    found = scores.scores if scores.query is None else scores.query
    assert found is not None
    return found


def _looks_back(module: nn.Module, scores: Scores) -> bool:
    """Whether queries see earlier atoms only: by what was computed, else by what the module says of itself."""
    queries = _tensor(scores).shape[2]
    if scores.causal or queries == 1 or getattr(module, "is_causal", None):
        return True
    seen = scores.scores if scores.query is None else scores.log_weight
    if seen is None or seen.shape[-2] != queries:
        return False
    if seen.dtype != torch.bool:
        # Some models hide atoms with a number that is only large enough.
        seen = seen > seen.amax(-1, keepdim=True) - 100
    return not bool(seen.reshape(-1, *seen.shape[-2:]).any(0).triu(seen.shape[-1] - queries + 1).any())
