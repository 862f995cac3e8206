"""What users hand to the layers: tokens, words, measures, counts and names, each refused in one sentence."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from massieu.checks import check_floating
from massieu.kernels.rows import arrange
from massieu.measures import Measure

__all__ = [
    "check_activation",
    "check_count",
    "check_dtype",
    "check_measure",
    "check_tokens",
    "check_words",
    "is_plain",
    "unknown",
]


def check_tokens(x: Any, name: str, dim: int, *, sequences: bool = True) -> None:
    """One sentence unless these are vectors, ``(batch, tokens, dim)`` or without sequences ``(..., dim)``."""
    masks = isinstance(x, Tensor) and x.dtype == torch.bool
    check_floating(x, name, "a mask goes in as log_weight" if masks else "embed word numbers first, or use .float()")
    if (sequences and x.dim() != 3) or x.shape[-1:] != (dim,):
        shape = "batch, tokens" if sequences else "..."
        fits = f"project it to size {dim}, or build the layer for size {x.shape[-1] if x.dim() else 1}"
        remedy = _axes_remedy(x, name, 3) if sequences and x.dim() != 3 else fits
        raise ValueError(f"{name} must have shape ({shape}, {dim}), got {tuple(x.shape)}; {remedy}")


def check_dtype(x: Tensor, name: str, module: nn.Module) -> None:
    """One sentence unless the tensor has the dtype of the module's weights, or autocast will see to it."""
    if x.dtype == getattr(getattr(module, "weight", None), "dtype", None):  # most of the time, and soon
        return
    dtype = next((weight.dtype for weight in module.parameters() if weight.is_floating_point()), x.dtype)
    if x.dtype == dtype:
        return
    # Autocast leaves double alone.
    if torch.is_autocast_enabled(x.device.type) and torch.float64 not in (x.dtype, dtype):
        return
    raise TypeError(
        f"{name} must have the dtype of the weights, {dtype}, got {x.dtype}; convert it or the layer with .to"
    )


def check_words(words: Any, vocabulary: int) -> None:
    """One sentence unless these are word numbers of the vocabulary, ``(batch, tokens)``."""
    if not isinstance(words, Tensor):
        got = type(words).__name__
        raise TypeError(f"inputs must be a tensor of word numbers, got {got}; convert it with torch.as_tensor")
    whole = words.dtype in (torch.int32, torch.int64)
    if not whole or words.dim() != 2:
        remedy = _axes_remedy(words, "inputs", 2) if whole else "convert them with .long()"
        got = f"{words.dtype} {tuple(words.shape)}"
        raise ValueError(f"inputs must be word numbers of shape (batch, tokens), got {got}; {remedy}")
    if words.numel() and is_plain(words):
        least, most = torch.stack(words.aminmax()).tolist()
        if least < 0 or most >= vocabulary:
            raise ValueError(
                f"inputs must be word numbers from 0 to {vocabulary - 1}, got {least} to {most}; build the model"
                " with a larger vocabulary, or put any word into the padding and pass lengths"
            )


def check_measure(query: Tensor, key: Tensor, log_weight: Any, lengths: Any) -> None:
    """One sentence unless log weights and lengths are such as :func:`massieu.attend` takes for these rows."""
    given = [x for x in (log_weight, lengths) if x is not None]
    if given and all(is_plain(x) for x in (query, *given) if isinstance(x, Tensor)):
        arrange(query, key, None, log_weight, sink=None, scale=1.0, causal=False, window=None, lengths=lengths)


def check_activation(activation: Any, head_dim: int) -> None:
    """One sentence unless this is None or a measure on the space of a head."""
    if activation is None:
        return
    if not isinstance(activation, Measure):
        name = activation.__name__ if isinstance(activation, type) else type(activation).__name__
        raise TypeError(f"activation must be a massieu.Measure, got {name}; massieu.Hypercube(head_dim) is tanh")
    if activation.dim != head_dim or activation.batch_shape:
        raise ValueError(
            f"activation must be one measure of dimension head_dim = {head_dim}, got {activation!r} of dimension"
            f" {activation.dim} and batch {activation.batch_shape}; build it for the size of a head"
        )


def check_count(value: Any, name: str, remedy: str, least: int = 1) -> None:
    """One sentence unless this is a whole number that is large enough."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}; {remedy}")


def unknown(name: str, allowed: tuple[object, ...], got: object) -> NoReturn:
    """One sentence for an option that is none of those allowed."""
    raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {got!r}; check the spelling")


def is_plain(tensor: Tensor) -> bool:
    """Whether entries may be looked at: not while a graph is made, nor under a transform of ``torch.func``."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        or tensor.is_meta
    )


def _axes_remedy(x: Tensor, name: str, axes: int) -> str:
    return f"for a single sequence pass {name}[None]" if x.dim() < axes else "flatten its leading axes into one"
