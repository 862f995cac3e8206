"""Observation of one forward pass: attention calls, outputs of projections, hidden states behind blocks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from massieu.models.module_calls import hidden_tensors
from massieu.models.projections import Seen, is_projection, score_sizes
from massieu.monitor.messages import error_summary
from massieu.monitor.reading import Place
from massieu.monitor.sums import PlaceSums, add_call, add_tokens, present_rows
from massieu.taps import AttentionCall, Tap, tap
from massieu.taps.passes import recomputes
from massieu.taps.structure import attention_modules, named

__all__ = ["Observation"]

INSIDE = ("observe", "_push", "_pop")  # methods of a tap that run inside the model
WEIGHTS = frozenset({"qk_norm", "qk_size"})
STREAM = frozenset({"token_cosine", "effective_rank"})


class Observation:
    """Sums of the forward pass between the creation of this object and :meth:`close`.

    An error inside the pass is stored in ``failure``, and the pass goes on.

    Args:
        model: the model.
        wanted: names of quantities.
        vectors: results of the power iterations of earlier readings by place, updated here.
        places: those of earlier readings, which keep their stack: scores of nan do not show a decoder.
        fallback: whether to observe outside of attention interfaces too, as in :func:`massieu.taps.tap`.

    Attributes:
        sums: by stack and layer.
        failure: summary of the first error inside the pass; empty if there was none.
        tap: the tap on the model.
    """

    def __init__(
        self,
        model: nn.Module,
        wanted: frozenset[str],
        vectors: dict[tuple[str, int], Tensor],
        places: Iterable[Place] = (),
        *,
        fallback: bool = True,
    ) -> None:
        self.sums: dict[tuple[str, int], PlaceSums] = {}
        self.failure = ""
        self._open = True
        self._wanted, self._vectors, self._places = wanted, vectors, {place.name: place for place in places}
        self._seen: dict[nn.Module, list[Seen]] = {}
        self._ended: dict[nn.Module, list[tuple[PlaceSums, Tensor]]] = {}
        self._blocks: dict[str, nn.Module] = {}
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as stack:
            self.tap: Tap = stack.enter_context(tap(model, self._receive, fallback=fallback))
            for name in INSIDE:
                setattr(self.tap, name, self._careful(getattr(self.tap, name)))
                stack.callback(vars(self.tap).pop, name)
            attention = attention_modules(model)
            if wanted & WEIGHTS:
                for module in attention.values():
                    for part in filter(is_projection, module.modules()):
                        stack.callback(part.register_forward_hook(self._careful(self._keep(module))).remove)
            if wanted & STREAM:
                modules = {path: module for module, path in named(model).items()}
                self._blocks = {path: modules[_block(path, modules)] for path in attention}
                for block in dict.fromkeys(self._blocks.values()):
                    stack.callback(block.register_forward_hook(self._careful(self._end_block)).remove)
            self._stack = stack.pop_all()

    def begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Enter the model, which runs already: its own first hook registers the hooks of the tap too late for it."""
        self.tap.begin(model, args, kwargs)

    def close(self) -> None:
        """Remove the hooks, and stop those in copies of the model."""
        self._stack.close()
        self._open = False
        self._seen.clear()
        self._ended.clear()

    def _careful(self, call: Callable[..., object]) -> Callable[..., None]:
        """Wrap a call that runs inside the model: its first error is stored, not raised."""

        def careful(*args: Any) -> None:
            try:
                if self._open:
                    call(*args)
            except Exception as error:
                # As text: an exception keeps the tensors of its frames.
                self.failure = self.failure or error_summary(error)

        return careful

    def _receive(self, call: AttentionCall) -> None:
        if 0 in call.shape:  # an empty batch
            return
        name = f"{call.name}[{call.number}]" if call.number else call.name
        place = self._places.get(name, Place(call.stack, call.layer, name, 0))
        place = place._replace(heads=call.shape[1])  # a module may be replaced by one with other heads
        key = (place.stack, place.layer)
        sums = self.sums.setdefault(key, PlaceSums(place))
        add_call(sums, call, self._wanted)
        if self._wanted & WEIGHTS:
            found, vector = score_sizes(call, self._seen.pop(call.module, []), self._vectors.get(key))
            sums.known |= found
            if vector is not None:
                self._vectors[key] = vector
            elif found:  # weights with nan: the next reading begins anew
                self._vectors.pop(key, None)
        block = self._blocks.get(call.name)
        if block is not None:
            self._ended.setdefault(block, []).append((sums, present_rows(call)))

    def _keep(self, owner: nn.Module) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, Tensor) and not recomputes():
                self._seen.setdefault(owner, []).append(Seen(module, output.detach()))

        return hook

    def _end_block(self, block: nn.Module, args: Any, output: Any) -> None:
        tokens = next(hidden_tensors(output), None)
        if tokens is None or recomputes():
            return
        tokens = tokens.detach()
        tokens = tokens[None] if tokens.dim() == 2 else tokens
        if any(getattr(part, "batch_first", True) is False for part in block.modules()):
            tokens = tokens.transpose(0, 1)
        with torch.no_grad(), torch.autocast(tokens.device.type, enabled=False):
            for sums, present in self._ended.pop(block, []):
                # Models of images may go from windows to images in between: tokens then match no rows.
                if tokens.dim() == 3 and present.shape == tokens.shape[:2]:
                    add_tokens(sums, tokens, present, self._wanted)


def _block(path: str, modules: Mapping[str, nn.Module]) -> str:
    """Return the path of an attention module's block: the innermost module around it with a number for a name.

    Example:
        >>> _block("h.3.attn", {"h.3": None})
        'h.3'
    """
    parts = path.split(".")
    paths = [".".join(parts[: end + 1]) for end, part in enumerate(parts) if part.isdigit()]
    return next((found for found in reversed(paths) if found in modules), path)
