"""What torch's layers take: masks that are True where something is absent, and a beta for all heads or for each."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from massieu.nn.checks import is_plain

__all__ = ["build_scaling", "check_presence", "log_weight_of"]


def build_scaling(
    scaling: Any, num_heads: int, owner: nn.Module, device: torch.device | str | None, dtype: torch.dtype | None
) -> float | Tensor:
    """Beta as a number, or as a tensor ``(heads or 1,)`` that belongs to its owner: a parameter stays one."""
    if isinstance(scaling, (int, float)) and not isinstance(scaling, bool):
        if not math.isfinite(scaling) or scaling <= 0:
            raise ValueError(f"scaling must be positive and finite, got {scaling}; it is an inverse temperature")
        return float(scaling)
    if not isinstance(scaling, Tensor) or not scaling.is_floating_point():
        got = scaling.dtype if isinstance(scaling, Tensor) else type(scaling).__name__
        raise TypeError(f"scaling must be a number or a floating-point tensor, got {got}; pass one beta per head")
    if scaling.numel() not in (1, num_heads) or scaling.dim() > 1:
        raise ValueError(
            f"scaling must have shape () or ({num_heads},), got {tuple(scaling.shape)}; pass one beta per head"
        )
    if not bool((scaling.isfinite() & (scaling > 0)).all()):
        raise ValueError(f"scaling must be positive and finite, got {scaling.tolist()}; it holds inverse temperatures")
    flat = scaling.detach().reshape(-1).to(device=device, dtype=dtype)
    if isinstance(scaling, nn.Parameter):
        # The same parameter where it has the shape already, so that whoever made it still holds it.
        same = scaling.dim() == 1 and flat.dtype == scaling.dtype and flat.device == scaling.device
        kept = scaling if same else nn.Parameter(flat.clone(), scaling.requires_grad)
        owner.register_parameter("scaling", kept)
        return kept
    own = flat.clone()
    owner.register_buffer("scaling", own)
    return own


def log_weight_of(
    padding: Tensor | None, mask: Tensor | None, shape: tuple[int, int, int, int], like: Tensor
) -> Tensor | None:
    """Masks as torch has them, as log weights: boolean (True is present) if all are boolean, else numbers to add.

    Args:
        padding: ``(batch, atoms)``.
        mask: ``(queries, atoms)`` or ``(batch * heads, queries, atoms)``.
        shape: ``(batch, heads, queries, atoms)``.
        like: a tensor of the dtype and device of the scores.
    """
    batch, heads, queries, atoms = shape
    given = []
    if padding is not None:
        _check_mask(padding, "padding mask", ((batch, atoms),))
        given.append(padding[:, None, None])
    if mask is not None:
        _check_mask(mask, "association mask", ((queries, atoms), (batch * heads, queries, atoms)))
        given.append(mask if mask.dim() == 2 else mask.unflatten(0, (batch, heads)))
    if not given:
        return None
    if all(each.dtype == torch.bool for each in given):
        hidden = given[0] if len(given) == 1 else given[0] | given[1]
        return ~hidden
    numbers = [
        torch.zeros_like(each, dtype=like.dtype).masked_fill(each, -torch.inf)
        if each.dtype == torch.bool
        else each.to(like)
        for each in given
    ]
    return numbers[0] if len(numbers) == 1 else numbers[0] + numbers[1]


def check_presence(padding: Tensor, remedy: str) -> None:
    """One sentence if nothing is left of an entry of the batch; while a graph is made nobody can look."""
    if not is_plain(padding) or not padding.numel():
        return
    hidden = padding if padding.dtype == torch.bool else padding <= torch.finfo(padding.dtype).min / 2
    empty = hidden.all(1).nonzero()[:, 0].tolist()
    if empty:
        shown = ", ".join(map(str, empty[:5])) + (", ..." if len(empty) > 5 else "")
        raise ValueError(
            f"the padding mask must leave something in every entry of the batch, got nothing in {shown};"
            f" take these entries out, {remedy}"
        )


def _check_mask(mask: Any, name: str, shapes: tuple[tuple[int, ...], ...]) -> None:
    if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"the {name} must be a boolean or floating-point tensor, got {got}; convert it with .bool()")
    if tuple(mask.shape) not in shapes:
        wanted = " or ".join(map(str, shapes))
        raise ValueError(
            f"the {name} must have shape {wanted}, got {tuple(mask.shape)}; it is True where a pattern is absent"
        )
