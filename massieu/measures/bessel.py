"""Radial log normalizer of Bessel type for sphere, ball and box, stable for any order and argument."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from fractions import Fraction
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Radial", "radial"]


class Radial(NamedTuple):
    r"""A radial log normalizer :math:`g` and its first two derivatives in :math:`\kappa`."""

    value: Tensor
    r""":math:`g_\nu = \log I_\nu(\kappa) \kappa^{-\nu}`."""
    slope: Tensor
    r""":math:`A / \kappa` with :math:`A = g_\nu' = I_{\nu+1}(\kappa) / I_\nu(\kappa)`; variance across the mean."""
    curvature: Tensor
    r""":math:`A' = g_\nu''`; variance along the mean."""


# With these three numbers both expansions are exact to a few units of float64 rounding where they meet.
CUTOFF = 30.0
SERIES_TERMS = 70
DEBYE_TERMS = 16


def radial(order: float, square: Tensor) -> Radial:
    r""":math:`\log I_\nu(\kappa) \kappa^{-\nu}` and its derivatives as smooth functions of :math:`t = \kappa^2`.

    By the power series for small :math:`\sqrt{\nu^2 + \kappa^2}` and by Debye's uniform expansion for large.
    Neither subtracts nearly equal numbers. The usual Riccati equation for the curvature,
    :math:`A' = 1 - A^2 - (2\nu + 1) A / \kappa`, does: on the circle it keeps three digits at
    :math:`\kappa = 10^6` and none at :math:`10^8`.

    Args:
        order: :math:`\nu`, at least zero.
        square: :math:`t = \kappa^2`, float64, any shape.

    Returns:
        Value, slope and curvature, each of the shape of ``square`` and differentiable in it.

    Example:
        >>> radial(0.5, torch.zeros(1, dtype=torch.float64)).slope
        tensor([0.3333], dtype=torch.float64)
    """
    flat = square.flatten()
    far = order**2 + flat > CUTOFF**2
    # Each expansion gets only arguments in its range: a gradient of nan would spoil that of the other.
    near_origin = power_series(order, flat.masked_fill(far, 0.0))
    far_out = debye_expansion(order, flat.masked_fill(~far, CUTOFF**2))
    pairs = zip(near_origin, far_out, strict=True)
    return Radial(*(torch.where(far, outer, inner).reshape(square.shape) for inner, outer in pairs))


def power_series(order: float, square: Tensor) -> Radial:
    r"""Radial function by series of positive terms.

    .. math:: \frac{I_\nu(\kappa)}{\kappa^\nu} = \frac{F_\nu(t/4)}{2^\nu \Gamma(\nu+1)}, \qquad
              \frac A\kappa = \frac{F_{\nu+1}}{(2\nu+2) F_\nu}, \qquad
              A' = \frac{E_\nu}{(2\nu+2) F_\nu^2}

    .. math:: F_\nu(T) = \sum_j \frac{T^j}{j!\, (\nu+1)_j}, \qquad \frac{e_{j+1}}{e_j}
              = \frac{2 (2\nu+2j+1)}{(j+1)(2\nu+j+2)(\nu+j+2)} \ \text{ for } E_\nu(T) = \sum_j e_j T^j,\ e_0 = 1

    Source:
        DLMF 10.25.2. The series of :math:`A' I_\nu^2` follows from the Riccati equation when the products
        :math:`I_\nu^2`, :math:`I_{\nu+1}^2` and :math:`I_\nu I_{\nu+1}` are expanded by DLMF 10.31.3: the
        negative terms cancel exactly.
    """
    twice, j = 2 * order, torch.arange(SERIES_TERMS, dtype=square.dtype, device=square.device)
    ratios = [
        1 / ((j + 1) * (order + j + 1)),
        1 / ((j + 1) * (order + j + 2)),
        2 * (twice + 2 * j + 1) / ((j + 1) * (twice + j + 2) * (order + j + 2)),
    ]
    scaled, above, spread = nested_sum(torch.stack(ratios, dim=-1)[..., None], square / 4)
    return Radial(
        value=scaled.log() - order * math.log(2) - math.lgamma(order + 1),
        slope=above / scaled / (twice + 2),
        curvature=spread / scaled.square() / (twice + 2),
    )


def nested_sum(ratios: Tensor, point: Tensor) -> Tensor:
    r"""The series :math:`1 + r_0 T (1 + r_1 T (1 + \dots))`; ratios ``(terms, rows, 1)``, point ``(points,)``."""
    result = torch.ones_like(point)
    for ratio in reversed(ratios):
        result = 1 + ratio * point * result
    return result


def debye_expansion(order: float, square: Tensor) -> Radial:
    r"""Radial function by Debye's expansion, uniform in the order; for order zero it is Hankel's.

    .. math:: \log \frac{I_\nu(\kappa)}{\kappa^\nu} = R - \nu \log(\nu + R) - \tfrac12 \log 2\pi R + L, \qquad
              R = \sqrt{\nu^2 + \kappa^2}

    .. math:: \frac A\kappa = \frac1{\nu + R} + \frac{\dot L - 1/2}{R^2}, \qquad
              A' = \frac\nu{R (\nu + R)} + \frac{\kappa^2 \ddot L + (\nu^2 - \kappa^2) (\dot L - 1/2)}{R^4}

    Here :math:`L = \log \sum_n s_n R^{-n}`, with the coefficients of :func:`debye_coefficients`, and dots are
    derivatives in :math:`\log R`.

    Source:
        DLMF 10.41.3. The derivatives are ours.
    """
    length = (order**2 + square).sqrt()
    # The n-th term has degree -n in R, so n^i times it is its i-th derivative in -log R.
    rows = [[c, n * c, n**2 * c] for n, c in enumerate(debye_coefficients(order))]
    coefficients = torch.tensor(rows, dtype=square.dtype, device=square.device)
    total, first, second = polynomial(coefficients[..., None], 1 / length)
    log_slope = -first / total
    log_curvature = second / total - log_slope.square()
    reach, bend = order + length, log_curvature * square + (order**2 - square) * (log_slope - 0.5)
    return Radial(
        value=length - order * reach.log() - (2 * math.pi * length).log() / 2 + total.log(),
        slope=1 / reach + (log_slope - 0.5) / length**2,
        curvature=order / (length * reach) + bend / length**4,
    )


def polynomial(coefficients: Tensor, point: Tensor) -> Tensor:
    r""":math:`\sum_n c_n x^n` by Horner's rule; coefficients ``(terms, rows, 1)``, point ``(points,)``."""
    result = torch.zeros_like(point)
    for coefficient in reversed(coefficients):
        result = result * point + coefficient
    return result


@cache
def debye_coefficients(order: float) -> tuple[float, ...]:
    r"""The :math:`s_n` of :math:`\sum_k u_k(\nu/R) \nu^{-k} = \sum_n s_n R^{-n}`.

    A monomial :math:`p^n` of :math:`u_k` has :math:`n \ge k`, so no power of the order is negative.
    """
    result: defaultdict[int, Fraction] = defaultdict(Fraction)
    for k in range(DEBYE_TERMS + 1):
        for n, coefficient in debye_polynomial(k).items():
            result[n] += coefficient * Fraction(order) ** (n - k)
    return tuple(float(result[n]) for n in range(3 * DEBYE_TERMS + 1))


@cache
def debye_polynomial(k: int) -> Mapping[int, Fraction]:
    r"""The polynomial :math:`u_k(p)` as a map from powers to coefficients.

    .. math:: u_{k+1}(p) = \tfrac12 p^2 (1 - p^2) u_k'(p) + \tfrac18 \int_0^p (1 - 5 t^2)\, u_k(t)\, dt

    Source:
        DLMF 10.41.9.

    Example:
        >>> {n: str(c) for n, c in debye_polynomial(1).items()}
        {1: '1/8', 3: '-5/24'}
    """
    if k == 0:
        return {0: Fraction(1)}
    result: defaultdict[int, Fraction] = defaultdict(Fraction)
    for n, coefficient in debye_polynomial(k - 1).items():
        result[n + 1] += coefficient * (Fraction(n, 2) + Fraction(1, 8 * (n + 1)))
        result[n + 3] -= coefficient * (Fraction(n, 2) + Fraction(5, 8 * (n + 3)))
    return dict(result)
