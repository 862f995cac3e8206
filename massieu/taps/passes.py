"""Forward passes: the running modules, and the padding of their tokens."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Frame", "Pass", "frame", "in_this_thread", "recomputes"]

CONTEXTS = ("key_value_states", "encoder_hidden_states", "cross_attention_states", "context", "memory")
TOKENS = ("input_ids", "inputs_embeds", "hidden_states", "inputs")


@dataclass(frozen=True)
class Frame:
    """A running module.

    Attributes:
        module: the module.
        crosses: whether its arguments hold other tokens to attend to.
        present: ``(batch, tokens)``, False for padding; None if unknown.
        decoder_present: the same for the tokens of the decoder, in a model with encoder and decoder tokens.
        has_decoder: whether it has both.
        rows: number of vectors in its first argument.
    """

    module: nn.Module
    crosses: bool
    present: Tensor | None
    decoder_present: Tensor | None
    has_decoder: bool
    rows: int | None


class Pass(threading.local):
    """Running modules, outermost first, and number of calls observed so far, in the forward pass of this thread."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.counts: dict[str, int] = {}
        self.in_fallback = False

    def begin(self, running: Frame) -> bool:
        """Enter a module; return whether a pass begins with it."""
        # No module runs inside itself: an earlier entry is left from an interrupted pass.
        self.end(running.module)
        self.frames.append(running)
        if len(self.frames) == 1:
            self.counts.clear()
        return len(self.frames) == 1

    def end(self, module: nn.Module) -> None:
        """Leave a module, and those inside it whose end was not reported."""
        place = next((i for i, running in enumerate(self.frames) if running.module is module), None)
        if place is not None:
            del self.frames[place:]

    def present(self, stack: str, batch: int, queries: int) -> Tensor | None:
        """Mask of the queries that are tokens, from the innermost module with that information."""
        for running in reversed(self.frames):
            known = running.decoder_present if running.has_decoder and stack != "encoder" else running.present
            if known is not None and known.shape == (batch, queries):
                return known
        return None


def recomputes() -> bool:
    """Return whether this is the second run of a checkpointed layer, inside the backward pass."""
    return torch._C._current_graph_task_id() != -1


def in_this_thread(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Restrict a hook to modules that run in the current thread.

    Example:
        >>> seen = []
        >>> hook = in_this_thread(seen.append)
        >>> thread = threading.Thread(target=hook, args=["there"])
        >>> thread.start(), thread.join(), hook("here")
        (None, None, None)
        >>> seen
        ['here']
    """
    own = threading.get_ident()

    @functools.wraps(hook)
    def only(*args: Any, **kwargs: Any) -> Any:
        return hook(*args, **kwargs) if threading.get_ident() == own else None

    return only


def frame(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Frame:
    """Return the running module of a forward call, with the padding of its tokens."""
    kind: Any = type(module)
    names = _parameters(kind)
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    crosses = any(isinstance(given.get(name), Tensor) for name in CONTEXTS)
    if isinstance(module, nn.MultiheadAttention):
        crosses = given.get("query") is not given.get("key")
    return Frame(
        module,
        crosses,
        _present(module, given),
        _masked(given.get("decoder_attention_mask"), _first(given, [f"decoder_{name}" for name in TOKENS])),
        "decoder_attention_mask" in names,
        _vectors(given.get(names[0])) if names else None,
    )


@functools.cache
def _parameters(kind: Any) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(kind.forward).parameters)[1:]
    except (TypeError, ValueError):
        return ()


def _present(module: nn.Module, given: dict[str, Any]) -> Tensor | None:
    if isinstance(module, nn.MultiheadAttention):
        return _unpadded(given.get("key_padding_mask"))
    if given.get("lengths") is not None and given.get("cache") is None:
        return _counted(given["lengths"], _first(given, ["inputs"]))
    return _masked(given.get("attention_mask"), _first(given, TOKENS))


def _vectors(tokens: Any) -> int | None:
    return tokens.numel() // tokens.shape[-1] if isinstance(tokens, Tensor) and tokens.dim() == 3 else None


def _masked(mask: Any, tokens: Tensor | None) -> Tensor | None:
    # With a cache, the mask also covers earlier tokens.
    if not isinstance(mask, Tensor) or mask.dim() != 2 or tokens is None or tokens.dim() < 2:
        return None
    count = tokens.shape[1]
    return mask[:, mask.shape[1] - count :] != 0 if 0 < count <= mask.shape[1] else None


def _counted(lengths: Tensor | int, tokens: Tensor | None) -> Tensor | None:
    if tokens is None:
        return None
    lengths = torch.as_tensor(lengths, device=tokens.device).reshape(-1, 1)
    return (torch.arange(tokens.shape[1], device=tokens.device) < lengths).expand(tokens.shape[0], -1)


def _unpadded(padding: Any) -> Tensor | None:
    if not isinstance(padding, Tensor):
        return None
    return ~padding if padding.dtype == torch.bool else padding == 0


def _first(given: dict[str, Any], names: list[str] | tuple[str, ...]) -> Tensor | None:
    return next((given[name] for name in names if isinstance(given.get(name), Tensor)), None)
