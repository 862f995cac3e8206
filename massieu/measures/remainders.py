"""Remainders of exponentials, logarithms and log normalizers beyond first order, without cancellation."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["cumulant_remainder", "exp_remainder", "log_remainder", "mixture_remainder"]

# Below this a series is used: the plain difference would lose a factor 2 / |x| of accuracy or more.
NEAR = 0.5
EXP_TERMS = 17
LOG_TERMS = 18
# Rows whose exponential would exceed e^30 are shifted; the others use log1p, exact for small numbers.
SHIFTED = 30.0


def exp_remainder(x: Tensor) -> Tensor:
    r""":math:`e^x - 1 - x`, never negative, to a few units of rounding at any x.

    Example:
        >>> exp_remainder(torch.tensor(1e-10, dtype=torch.float64))
        tensor(5.0000e-21, dtype=torch.float64)
    """
    near = x.abs() < NEAR
    small, large = torch.where(near, x, 0.0), torch.where(near, 1.0, x)
    series = torch.ones_like(x)
    for term in range(EXP_TERMS, 2, -1):
        series = 1 + small / term * series
    return torch.where(near, 0.5 * small.square() * series, large.expm1() - large)


def log_remainder(x: Tensor) -> Tensor:
    r""":math:`x - \log(1 + x)`, never negative, to a few units of rounding at any x above minus one.

    Source:
        With :math:`s = x / (2 + x)` it is :math:`s x - 2 (s^3/3 + s^5/5 + \dots)`: Loader 2000, "Fast and accurate
        computation of binomial probabilities".

    Example:
        >>> log_remainder(torch.tensor(1e-10, dtype=torch.float64))
        tensor(5.0000e-21, dtype=torch.float64)
    """
    near = x.abs() < NEAR
    small, large = torch.where(near, x, 0.0), torch.where(near, 1.0, x)
    s = small / (2 + small)
    series = torch.zeros_like(x)
    for power in range(2 * LOG_TERMS + 1, 1, -2):
        series = 1 / power + s.square() * series
    return torch.where(near, s * (small - 2 * s.square() * series), large - large.log1p())


def cumulant_remainder(log_p: Tensor, exponent: Tensor) -> Tensor:
    r""":math:`\log E_p[e^t] - E_p[t]` over the last axis, never negative and without cancellation.

    With :math:`u = t - E_p[t]` it is :math:`\log(1 + E_p[e^u - 1 - u])`, a sum of positive terms.

    Args:
        log_p: logarithms of probabilities, shape ``(..., atoms)``; minus infinity means absent.
        exponent: t, finite, broadcasts to the same shape; adding a constant to a row changes nothing.

    Returns:
        Shape ``(...)``: the divergence of p from the distribution proportional to :math:`p e^t`.

    Example:
        >>> half = torch.full((2,), 0.5, dtype=torch.float64).log()
        >>> cumulant_remainder(half, torch.tensor([1e-9, -1e-9], dtype=torch.float64))  # log cosh
        tensor(5.0000e-19, dtype=torch.float64)
    """
    log_p, exponent = torch.broadcast_tensors(log_p, exponent)
    # Relative to the likeliest atom: where it has nearly all of the mass, its distance to the mean is below rounding.
    exponent = exponent - exponent.gather(-1, log_p.argmax(-1, keepdim=True))
    p = log_p.exp()
    u = exponent - (p * exponent).sum(-1, keepdim=True)
    tall = u > 1
    high, low = torch.where(tall, u, 1.0), torch.where(tall, 0.0, u)
    log_term = log_p + high + torch.log1p(-(1 + high) * torch.exp(-high))
    top = torch.where(tall, log_p + high, 0.0).detach().amax(-1, keepdim=True)
    top = torch.where(top > SHIFTED, top, 0.0)
    terms = torch.where(tall, torch.exp(log_term - top), p * exp_remainder(low) * torch.exp(-top))
    total, top = terms.sum(-1), top[..., 0]
    return torch.where(top > 0, top + torch.log(torch.exp(-top) + total), torch.log1p(total))


def mixture_remainder(log_share: Tensor, linear: Tensor, within: Tensor) -> Tensor:
    r"""Remainder of :math:`\log \sum_n w_n e^{G_n}` from those of the components, shape ``(...)``.

    Args:
        log_share: logarithms of the shares :math:`r_n` of the components, shape ``(..., components)``.
        linear: :math:`\delta \cdot m_n`, same shape.
        within: :math:`KL_n`, the remainders of the components, same shape.

    Returns:
        Shape ``(...)``.

    Example:
        >>> unit = torch.zeros(1, dtype=torch.float64)  # one component: the remainder is its own
        >>> mixture_remainder(unit, unit + 3.0, unit + 1e-20)
        tensor(1.0000e-20, dtype=torch.float64)
    """
    share = log_share.exp()
    return cumulant_remainder(log_share, linear + within) + (share * within).sum(-1)
