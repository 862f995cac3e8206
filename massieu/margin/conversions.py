"""Conversion of arguments: tokens, scores and heads of any dtype, ragged ones too, to float64 tensors."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from massieu.checks import UserError, check_floating, check_shape

__all__ = ["as_double", "as_generator", "as_head", "check_sizes", "padded", "per_token", "whole_numbers"]

LARGEST = 1e60
"""Tokens and queries may be this large, and one over it small: squares of other products would overflow."""


def as_double(values: Any, name: str, *axes: int | str) -> Tensor:
    """Return finite real numbers in float64 on the CPU, with these axes, none of them empty."""
    given: Tensor = torch.as_tensor(values).detach().cpu()
    if not given.is_complex():
        given = given.double()
    check_floating(given, name, finite=True)
    check_shape(given, name, *axes)
    if not given.numel():
        raise UserError(f"{name} must not be empty, got shape {tuple(given.shape)}")
    return given


def check_sizes(values: Tensor, name: str) -> Tensor:
    """Return vectors whose products can be squared; raise if one of the first axis is too large or too small."""
    sizes = values.flatten(1).abs().amax(-1)
    sizes = sizes[sizes > 0]
    if ((sizes > LARGEST) | (sizes < 1 / LARGEST)).any():
        worst = float(sizes[sizes.log().abs().argmax()])
        raise UserError(
            f"{name} must be zero or of a size between {1 / LARGEST:.0e} and {LARGEST:.0e}, got {worst:.0e};"
            " choose other units"
        )
    return values


def whole_numbers(values: Any, name: str, count: int) -> Tensor:
    """Return one whole number for each of ``count`` sequences; floats may be whole too."""
    given: Tensor = torch.as_tensor(values).detach().cpu()
    check_shape(given, name, count)
    if given.is_complex() or (given != given.long()).any():
        raise UserError(f"{name} must be whole numbers, got {given.tolist()}")
    return given.long()


def padded(tokens: Tensor | Sequence[Tensor], lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return tokens ``(sequences, length, dim)``, zero where absent, and flags of those present."""
    if isinstance(tokens, Tensor):
        check_shape(tokens, "tokens", "sequences", "length", "dim")
        most, counts = tokens.shape[1], [tokens.shape[1]] * len(tokens)
        if lengths is not None:
            counts = whole_numbers(lengths, "lengths", len(tokens)).tolist()
        if not all(0 <= count <= most for count in counts):
            raise UserError(f"lengths must be one of at most {most} for each sequence, got {counts}")
        rows = [row[:count] for row, count in zip(tokens, counts, strict=True)]
    else:
        if lengths is not None:
            raise UserError("lengths belong to one padded tensor of tokens; a list of sequences has its own")
        rows = [torch.as_tensor(row) for row in tokens]
        most = max((len(row) for row in rows if row.ndim), default=0)
    if not rows:
        raise UserError("tokens must hold at least one sequence, got none")
    for i, row in enumerate(rows):
        check_shape(row, f"tokens[{i}]", "length", rows[0].shape[-1] if rows[0].ndim else "dim")
        if len(row) < 2:
            raise UserError(f"tokens must hold two tokens or more to select from, got {len(row)} in sequence {i}")
    filled = nn.utils.rnn.pad_sequence([as_double(row, "tokens", "length", "dim") for row in rows], batch_first=True)
    # Scores come in the shape of padded tokens, even if no sequence fills it.
    filled = nn.functional.pad(filled, (0, 0, 0, most - filled.shape[1]))
    present = torch.arange(most) < torch.tensor([len(row) for row in rows])[:, None]
    return check_sizes(filled, "tokens"), present


def per_token(values: Tensor | Sequence[Tensor], name: str, present: Tensor) -> Tensor:
    """Return one number for each present token, shape ``(sequences, length)``, zero where there is none."""
    rows = [torch.as_tensor(row) for row in values]
    lengths, most = present.sum(-1).tolist(), present.shape[1]
    wanted = [most] * len(lengths) if isinstance(values, Tensor) else lengths
    shapes = [tuple(row.shape) for row in rows]
    if shapes != [(count,) for count in wanted]:
        raise UserError(
            f"{name} must have one number for each token, shape {tuple(present.shape)} or a list of rows,"
            f" got {len(rows)} rows of shapes {sorted(set(shapes))}"
        )
    filled = torch.zeros(present.shape, dtype=torch.float64)
    for row, count, own in zip(filled, lengths, rows, strict=True):
        row[:count] = as_double(own[:count], name, count)
    size = float(filled.abs().max())
    if size > LARGEST:
        raise UserError(f"{name} must be at most {LARGEST:.0e} in size, got {size:.0e}; choose other units")
    return filled


def as_head(head: Any, dim: int) -> Any:
    """Return a head as a tensor ``(dim,)`` or ``(classes, dim)``, or a function; a module as a frozen float64 copy."""
    if isinstance(head, nn.Module):
        return deepcopy(head).double().cpu().eval().requires_grad_(False)
    if callable(head):
        return head
    head = torch.as_tensor(head)
    return as_double(head, "head", dim) if head.ndim == 1 else as_double(head, "head", "classes", dim)


def as_generator(generator: torch.Generator | int) -> torch.Generator:
    """Return the generator, or a new one with this seed."""
    return torch.Generator().manual_seed(generator) if isinstance(generator, int) else generator
