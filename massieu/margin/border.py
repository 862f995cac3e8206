"""What token selection takes in: tensors of any dtype, ragged rows and heads, checked once and held in float64."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["LARGEST", "floats", "head_of", "padded", "per_token", "sized", "whole_numbers"]

LARGEST = 1e60
"""Larger tokens and queries, and those below one over it, are refused: squares of their products would overflow."""


def floats(values: Any, name: str, axes: int) -> Tensor:
    """Finite real numbers in float64, with so many axes."""
    given: Tensor = torch.as_tensor(values)
    if given.dtype.is_complex:
        raise ValueError(f"{name} must be real, got {given.dtype}; take their real parts")
    if given.ndim != axes or 0 in given.shape:
        raise ValueError(f"{name} must be real with {axes} axes, none of them empty, got shape {tuple(given.shape)}")
    given = given.detach().double().cpu()
    if not given.isfinite().all():
        raise ValueError(f"{name} must be finite, but some are nan or infinite; remove those sequences")
    return given


def sized(values: Tensor, name: str) -> Tensor:
    """Each row along the first axis is zero, or of a size that can be squared."""
    sizes = values.flatten(1).abs().amax(-1)
    sizes = sizes[sizes > 0]
    if ((sizes > LARGEST) | (sizes < 1 / LARGEST)).any():
        worst = max(sizes.tolist(), key=lambda size: abs(torch.tensor(size).log().item()))
        raise ValueError(
            f"{name} must be zero or of a size between {1 / LARGEST:.0e} and {LARGEST:.0e}, got {worst:.0e};"
            " choose other units"
        )
    return values


def whole_numbers(values: Any, name: str, count: int) -> Tensor:
    """One whole number for each of some sequences, shape ``(count,)``; floats are taken where they are whole."""
    given: Tensor = torch.as_tensor(values).detach().cpu()
    if given.shape != (count,):
        raise ValueError(f"{name} must have shape ({count},), got {tuple(given.shape)}")
    if given.dtype.is_complex or (given != given.long()).any():
        raise ValueError(f"{name} must be whole numbers, got {given.tolist()}")
    return given.long()


def padded(tokens: Tensor | Sequence[Tensor], lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    """Tokens ``(sequences, length, dim)``, zero where absent, and which of them are present."""
    if isinstance(tokens, Tensor):
        if tokens.ndim != 3 or tokens.shape[-1] == 0 or len(tokens) == 0:
            raise ValueError(f"tokens must have shape (sequences, length, dim), got {tuple(tokens.shape)}")
        counts = [tokens.shape[1]] * len(tokens)
        if lengths is not None:
            counts = whole_numbers(lengths, "lengths", len(tokens)).tolist()
        if max(counts) > tokens.shape[1] or min(counts) < 0:
            raise ValueError(f"lengths must be one of at most {tokens.shape[1]} for each sequence, got {counts}")
        rows = [row[:count] for row, count in zip(tokens, counts, strict=True)]
    else:
        if lengths is not None:
            raise ValueError("lengths belong to one padded tensor of tokens; a list of sequences has its own")
        rows = [torch.as_tensor(row) for row in tokens]
        if not rows:
            raise ValueError("tokens must hold at least one sequence, got none")
    for i, row in enumerate(rows):
        if row.ndim != 2 or row.shape[-1] != rows[0].shape[-1]:
            raise ValueError(f"every sequence must have shape (length, dim), got {tuple(row.shape)} for sequence {i}")
        if len(row) < 2:
            count = "no token" if len(row) == 0 else "one token"
            raise ValueError(f"there must be tokens to select from, but sequence {i} has {count}; leave it out")
    rows = [floats(row, "tokens", 2) for row in rows]
    filled = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    if isinstance(tokens, Tensor):  # scores come in the shape of the tokens, even if no sequence fills it
        filled = torch.nn.functional.pad(filled, (0, 0, 0, tokens.shape[1] - filled.shape[1]))
    present = torch.tensor([len(row) for row in rows])[:, None]
    return sized(filled, "tokens"), torch.arange(filled.shape[1]) < present


def per_token(values: Tensor | Sequence[Tensor], name: str, present: Tensor) -> Tensor:
    """One number for each present token, shape ``(sequences, length)``, zero where there is none."""
    rows = [torch.as_tensor(row) for row in values]
    lengths, most = present.sum(-1).tolist(), present.shape[1]
    wanted = [most] * len(lengths) if isinstance(values, Tensor) else lengths
    off = [i for i, row in enumerate(rows) if i >= len(wanted) or row.shape != (wanted[i],)]
    if off or len(rows) != len(wanted):
        where = f", the {off[0]}th of shape {tuple(rows[off[0]].shape)}" if off else ""
        raise ValueError(
            f"{name} must have one number for each token, shape {(len(lengths), most)} or a list of rows;"
            f" got {len(rows)} rows{where}"
        )
    filled = torch.zeros(len(lengths), most, dtype=torch.float64)
    for i, row in enumerate(rows):
        if row.dtype.is_complex:
            raise ValueError(f"{name} must be real, got {row.dtype}; take their real parts")
        filled[i, : lengths[i]] = row.detach()[: lengths[i]]
    if not filled.isfinite().all():
        raise ValueError(f"{name} must be finite, but some are nan or infinite; remove those sequences")
    size = float(filled.abs().max())
    if size > LARGEST:
        raise ValueError(f"{name} must be at most {LARGEST:.0e} in size, got {size:.0e}; choose other units")
    return filled


def head_of(head: Any, dim: int) -> Any:
    """A head as a tensor ``(dim,)`` or ``(classes, dim)``, or a function; a module as a copy that computes in float64
    without dropout."""
    if isinstance(head, nn.Module):
        return deepcopy(head).double().cpu().eval().requires_grad_(False)
    if callable(head):
        return head
    head = torch.as_tensor(head)
    if head.ndim not in (1, 2) or head.shape[-1] != dim:
        raise ValueError(f"head must have shape ({dim},) or (classes, {dim}), got {tuple(head.shape)}")
    return floats(head, "head", head.ndim)
