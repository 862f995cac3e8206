"""Validators of the tensors that layers are called with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from massieu.checks import UserError, check_floating
from massieu.kernels.rows import arrange

__all__ = ["check_dtype", "check_measure", "check_tokens", "check_words", "is_plain"]


def check_tokens(x: Any, name: str, dim: int, *, sequences: bool = True) -> None:
    """Raise unless these are vectors, ``(batch, tokens, dim)``, or ``(..., dim)`` with ``sequences=False``."""
    masks = isinstance(x, Tensor) and x.dtype == torch.bool
    check_floating(x, name, "a mask goes in as log_weight" if masks else "embed word numbers first, or use .float()")
    if (sequences and x.dim() != 3) or x.shape[-1:] != (dim,):
        shape = "batch, tokens" if sequences else "..."
        fits = f"project it to size {dim}, or build the layer for size {x.shape[-1] if x.dim() else 1}"
        remedy = _axes_remedy(x, name, 3) if sequences and x.dim() != 3 else fits
        raise UserError(f"{name} must have shape ({shape}, {dim}), got {tuple(x.shape)}; {remedy}")


def check_dtype(x: Tensor, name: str, module: nn.Module) -> None:
    """Raise unless the tensor has the dtype of the module's weights, or autocast converts it."""
    if x.dtype == getattr(getattr(module, "weight", None), "dtype", None):  # the usual case, without the search below
        return
    dtype = next((weight.dtype for weight in module.parameters() if weight.is_floating_point()), x.dtype)
    if x.dtype == dtype:
        return
    # Autocast does not convert double.
    if torch.is_autocast_enabled(x.device.type) and torch.float64 not in (x.dtype, dtype):
        return
    raise UserError(
        f"{name} must have the dtype of the weights, {dtype}, got {x.dtype}; convert it or the layer with .to"
    )


def check_words(words: Any, vocabulary: int) -> None:
    """Raise unless these are word numbers of the vocabulary, ``(batch, tokens)``."""
    if not isinstance(words, Tensor):
        got = type(words).__name__
        raise UserError(f"inputs must be a tensor of word numbers, got {got}; convert it with torch.as_tensor")
    whole = words.dtype in (torch.int32, torch.int64)
    if not whole or words.dim() != 2:
        remedy = _axes_remedy(words, "inputs", 2) if whole else "convert them with .long()"
        got = f"{words.dtype} {tuple(words.shape)}"
        raise UserError(f"inputs must be word numbers of shape (batch, tokens), got {got}; {remedy}")
    if words.numel() and is_plain(words):
        least, most = torch.stack(words.aminmax()).tolist()
        if least < 0 or most >= vocabulary:
            raise UserError(
                f"inputs must be word numbers from 0 to {vocabulary - 1}, got {least} to {most}; build the model"
                " with a larger vocabulary, or put any word into the padding and pass lengths"
            )


def check_measure(query: Tensor, key: Tensor, log_weight: Any, lengths: Any) -> None:
    """Raise unless :func:`massieu.attend` accepts these log weights and lengths for these rows."""
    given = [x for x in (log_weight, lengths) if x is not None]
    if given and all(is_plain(x) for x in (query, *given) if isinstance(x, Tensor)):
        arrange(query, key, None, log_weight, sink=None, scale=1.0, causal=False, window=None, lengths=lengths)


def is_plain(tensor: Tensor) -> bool:
    """Return False where entries cannot be read: in a graph under construction or a transform of ``torch.func``."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        or tensor.is_meta
    )


def _axes_remedy(x: Tensor, name: str, axes: int) -> str:
    return f"for a single sequence pass {name}[None]" if x.dim() < axes else "flatten its leading axes into one"
