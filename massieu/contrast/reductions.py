"""Reductions of the losses of rows to one number, and the dtype of these losses."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from massieu.checks import UserError, check_choice

__all__ = ["Reduction", "reduce", "widened"]

Reduction = Literal["mean", "sum", "none"]


def widened(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors in one dtype, float32 at least: a loss is a small difference of large scores."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return tuple(tensor.to(dtype) for tensor in tensors)


def reduce(loss: Tensor, reduction: Reduction) -> Tensor:
    """Reduce the losses of all rows to one number; "none" keeps them."""
    check_choice(reduction, "reduction", get_args(Reduction))
    if reduction == "none":
        return loss
    if reduction == "mean" and not loss.numel():
        raise UserError('reduction "mean" needs at least one row, got none; skip empty batches or pass "sum"')
    return loss.mean() if reduction == "mean" else loss.sum()
