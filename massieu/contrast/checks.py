"""What the losses check at their border, and how they end."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from massieu.checks import check_floating

__all__ = ["Reduction", "check_pairs", "check_temperature", "check_vectors", "reduce", "widened"]

Reduction = Literal["mean", "sum", "none"]


def check_vectors(tensor: Tensor, name: str, axis: str) -> None:
    """One sentence unless the tensor is floating-point of shape ``(..., axis, dim)``."""
    check_floating(tensor, name)
    if tensor.dim() < 2:
        raise ValueError(
            f"{name} must have shape (..., {axis}, dim), got {tuple(tensor.shape)};"
            f" for a single vector pass {name}[None]"
        )


def check_pairs(first: Tensor, second: Tensor, names: tuple[str, str]) -> None:
    """One sentence unless row i of one tensor can be the partner of row i of the other."""
    for tensor, name in zip((first, second), names, strict=True):
        check_vectors(tensor, name, "pairs")
    if first.shape != second.shape:
        raise ValueError(
            f"{names[0]} and {names[1]} must have the same shape (..., pairs, dim), got {tuple(first.shape)}"
            f" and {tuple(second.shape)}; give every row its partner"
        )


def check_temperature(temperature: float | Tensor) -> None:
    """One sentence unless the temperature is one positive number, learned or not."""
    number = isinstance(temperature, (int, float, Tensor)) and not isinstance(temperature, bool)
    if not number or (isinstance(temperature, Tensor) and temperature.numel() != 1):
        got = tuple(temperature.shape) if isinstance(temperature, Tensor) else type(temperature).__name__
        raise TypeError(f"temperature must be one number, got {got}; divide the query by temperatures of its own")
    value = float(temperature.detach() if isinstance(temperature, Tensor) else temperature)
    if not 0 < value < math.inf:
        raise ValueError(f"temperature must be positive and finite, got {value}; it divides all scores, 0.1 is common")


def widened(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in one dtype, float32 at least: a loss is a small difference of large scores."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return tuple(tensor.to(dtype) for tensor in tensors)


def reduce(loss: Tensor, reduction: Reduction) -> Tensor:
    """The losses of all rows as one number, or as they are."""
    if reduction == "none":
        return loss
    if reduction not in ("mean", "sum"):
        raise ValueError(f'reduction must be "mean", "sum" or "none", got {reduction!r}; "none" keeps one loss per row')
    if reduction == "mean" and not loss.numel():
        raise ValueError('reduction "mean" needs at least one row, got none; skip empty batches or pass "sum"')
    return loss.mean() if reduction == "mean" else loss.sum()
