"""Map alpha-entmax, a softmax that can be exactly zero, and its conjugate."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from massieu.checks import UserError, check_floating, check_number

__all__ = ["bregman", "check_alpha", "entmax", "tsallis_entropy"]

MAX_STEPS = 60
"""Halvings of an interval to the last digit; Newton needs fewer."""


def entmax(scores: Tensor, alpha: float) -> Tensor:
    r"""Return weights :math:`p_j = [(\alpha - 1) z_j - \tau]_+^{1/(\alpha - 1)}` that sum to one.

    They maximize :math:`p \cdot z + H_\alpha(p)` with :math:`H_\alpha` the entropy of Tsallis
    (:func:`tsallis_entropy`). At alpha 1 this is softmax, at 2 sparsemax. All weight is on one entry if and only if
    it leads by :math:`1/(\alpha - 1)`. Alpha 1.5 and 2 are exact by sorting, others are found by iteration; derivatives
    are those of the closed form.

    Args:
        scores: z, shape ``(..., atoms)``; minus infinity is an absent entry, and one in each row must be present.
        alpha: at least 1.

    Source:
        Peters, Niculae and Martins 2019.

    Example:
        >>> entmax(torch.tensor([1.0, 0.5, -1.0]), 2.0)
        tensor([0.7500, 0.2500, 0.0000])
    """
    check_floating(scores, "scores")
    alpha = check_alpha(alpha)
    if scores.dim() < 1 or not scores.shape[-1]:
        raise UserError(f"scores must have an atom on their last axis, got {tuple(scores.shape)}; weights sum to one")
    largest = scores.detach().amax(-1)  # nan if any is
    if not bool(torch.isfinite(largest).all()):
        got = "a row of minus infinities" if bool(largest.isneginf().any()) else "nan or plus infinity"
        raise UserError(f"scores must have a finite maximum in each row, got {got}; mask less, or rescale")
    if alpha == 1:
        return torch.softmax(scores, dim=-1)
    found: Tensor = _Entmax.apply(scores, alpha)  # type: ignore[no-untyped-call]
    return found


def tsallis_entropy(weight: Tensor, alpha: float) -> Tensor:
    r"""Return :math:`H_\alpha(p) = \sum_j (p_j - p_j^\alpha) / (\alpha (\alpha - 1))`, Shannon's entropy at alpha 1.

    Example:
        >>> tsallis_entropy(torch.tensor([0.5, 0.5]), 2.0)
        tensor(0.2500)
    """
    check_floating(weight, "weight")
    alpha = check_alpha(alpha)
    if alpha == 1:
        return -torch.xlogy(weight, weight).sum(-1)
    present = torch.where(weight > 0, weight, 1.0)
    # As a difference of logarithms: p and its power are nearly the same when alpha is near one.
    return -(present * torch.expm1((alpha - 1) * present.log())).sum(-1) / (alpha * (alpha - 1))


def bregman(weight: Tensor, start: Tensor, offsets: Tensor, alpha: float) -> Tensor:
    r"""Return :math:`\Omega(p) - \Omega(p_0) - z_0 \cdot (p - p_0)` with :math:`\Omega = -H_\alpha`, never negative.

    Term by term, without differences of entropies: it is exact to the last digits of p where p is close to
    :math:`p_0`.

    Args:
        weight: p, entmax of some scores, shape ``(..., atoms)``.
        start: :math:`p_0`, entmax of the offsets, broadcasting to p.
        offsets: :math:`z_0`, broadcasting to p.
        alpha: at least 1.
    """
    order = alpha - 1
    both = (weight > 0) & (start > 0)
    p, q = torch.where(both, weight, 1.0), torch.where(both, start, 1.0)
    near = (p - q).abs() < 0.5 * q
    logarithm = torch.where(near, torch.log1p(torch.where(near, (p - q) / q, 0.0)), p.log() - q.log())
    power = logarithm if order == 0 else torch.expm1(order * logarithm) / order
    inside = q**order * (p * power - (p - q)) / alpha
    # Depth below the threshold of the entries without weight at the start.
    top = offsets.argmax(-1, keepdim=True)
    gap = offsets - offsets.gather(-1, top)
    first, p = start.gather(-1, top), torch.where(weight > 0, weight, 1.0)
    depth = torch.where(weight > 0, gap + (first.log() if order == 0 else first**order / order), 0.0)
    alone = p * (p.log() - 1 - depth) if order == 0 else p * (p**order / (alpha * order) - depth)
    lost = start**alpha / alpha  # where no weight is left
    return torch.where(both, inside, torch.where(weight > 0, alone, lost)).sum(-1)


def check_alpha(alpha: Any) -> float:
    """Return a finite number of at least 1."""
    return check_number(alpha, "alpha", least=1, remedy="1 is softmax, 2 sparsemax")


class _Entmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, alpha: float) -> Tensor:
        gap = (scores.amax(-1, keepdim=True) - scores).double()
        solve = {1.5: _by_sorting_15, 2.0: _by_sorting_2}.get(alpha)
        weight = (_by_iteration(gap, alpha) if solve is None else solve(gap)).to(scores.dtype)
        ctx.save_for_backward(weight)
        ctx.alpha = alpha
        return weight

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        (slope,) = slopes
        share = torch.where(weight > 0, torch.where(weight > 0, weight, 1.0) ** (2 - ctx.alpha), 0.0)
        mean = (share * slope).sum(-1, keepdim=True) / share.sum(-1, keepdim=True)
        return share * (slope - mean), None


def _by_sorting_2(gap: Tensor) -> Tensor:
    falling = -gap.sort(-1).values
    count = torch.arange(1, gap.shape[-1] + 1, dtype=gap.dtype, device=gap.device)
    total = falling.cumsum(-1)
    inside = 1 + count * falling > total
    size = inside.sum(-1, keepdim=True)
    threshold = (total.gather(-1, size - 1) - 1) / size
    return (-gap - threshold).clamp_min(0.0)


def _by_sorting_15(gap: Tensor) -> Tensor:
    falling = -0.5 * gap.sort(-1).values
    # Entries far below the maximum are not in the support; clamped, their squares stay small.
    falling = falling.clamp_min(-2.0)
    count = torch.arange(1, gap.shape[-1] + 1, dtype=gap.dtype, device=gap.device)
    mean, square = falling.cumsum(-1) / count, falling.square().cumsum(-1) / count
    threshold = mean - ((1 - count * (square - mean.square())) / count).clamp_min(0.0).sqrt()
    size = (threshold <= falling).sum(-1, keepdim=True)
    weight = (-0.5 * gap - threshold.gather(-1, size - 1)).clamp_min(0.0).square()
    return weight / weight.sum(-1, keepdim=True)


def _by_iteration(gap: Tensor, alpha: float) -> Tensor:
    # In units in which alpha -> 1 is softmax: p = exp(log(1 - (alpha - 1)(gap + shift)) / (alpha - 1)).
    order = alpha - 1

    def weights(shift: Tensor) -> Tensor:
        used = order * (gap + shift)
        inside = used < 1
        return torch.where(inside, (torch.log1p(-torch.where(inside, used, 0.0)) / order).exp(), 0.0)

    low = torch.zeros_like(gap[..., :1])
    if alpha < 2:
        # The sum of weights is convex in the shift: Newton steps from the left never pass the root.
        for _ in range(MAX_STEPS):
            weight = weights(low)
            step = (weight.sum(-1, keepdim=True) - 1) / (weight ** (2 - alpha)).sum(-1, keepdim=True)
            low = low + step
            if not bool((step > torch.finfo(gap.dtype).eps * (1 + low)).any()):
                break
    else:
        high = torch.full_like(low, -math.expm1(-order * math.log(gap.shape[-1])) / order)
        for _ in range(MAX_STEPS):
            middle = 0.5 * (low + high)
            heavy = weights(middle).sum(-1, keepdim=True) >= 1
            low, high = torch.where(heavy, middle, low), torch.where(heavy, high, middle)
    weight = weights(low)
    return weight / weight.sum(-1, keepdim=True)
