"""Predictions for the operator without sampling: moments, finite numbers of tokens, cumulants."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from massieu.checks import UserError, check_count, check_number, check_shape
from massieu.measures import Measure
from massieu.measures.gaussian import checked_covariance
from massieu.measures.measure import as_parameter

__all__ = ["TokenLimit", "cumulant_amplification", "gaussian_moments", "rms_norm_moments", "token_limit"]


def gaussian_moments(
    location: Tensor, covariance: Tensor, A: Tensor | None = None, B: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    r"""Return mean and covariance of Gaussian tokens after residual attention over themselves, in the limit of many.

    .. math:: x \mapsto x + B\,(\mu + \Lambda A^\top x) = T x + B \mu, \qquad T = I + B \Lambda A^\top, \qquad
              \mu' = \mu + B \mu + B \Lambda A^\top \mu, \quad \Lambda' = T \Lambda T^\top

    The map is affine, so the tokens stay Gaussian and this may be repeated.

    Args:
        location: :math:`\mu`, shape ``(dim,)``.
        covariance: :math:`\Lambda`, shape ``(dim, dim)``.
        A: tokens i and j score :math:`x_i^\top A x_j`, shape ``(dim, dim)``; the identity by default.
        B: factor of the mean of the tokens, shape ``(dim, dim)``; the identity by default.

    Returns:
        :math:`\mu'` and :math:`\Lambda'`.

    Source:
        "A Probabilistic Interpretation of Transformers", Corollary 1, with weights and for the keys' own law.

    Example:
        >>> gaussian_moments(torch.tensor([1.0]), torch.tensor([[2.0]]))
        (tensor([4.]), tensor([[18.]]))
    """
    location = as_parameter(location, "location")
    check_shape(location, "location", "dim")
    covariance, _ = checked_covariance(covariance, (len(location), len(location)))
    identity = torch.eye(len(location)).to(covariance)
    score, output = (_square(matrix, name, identity) for matrix, name in ((A, "A"), (B, "B")))
    transfer = identity + output @ covariance @ score.mT
    return transfer @ location.to(covariance) + output @ location.to(covariance), transfer @ covariance @ transfer.mT


def rms_norm_moments(covariance: Tensor) -> Tensor:
    r"""Return the covariance of centered Gaussian tokens after an RMS norm, :math:`E[D\, z z^\top / |z|^2]`.

    .. math:: E[D z_i^2 / |z|^2] = D \int_0^\infty \frac{\lambda_i}{1 + 2 \lambda_i t}
              \prod_j (1 + 2 \lambda_j t)^{-1/2}\, dt

    in the eigenbasis of the covariance, where the other entries are zero. With :math:`t = e^y` the integrand is
    analytic in a strip and vanishes exponentially on both sides: the trapezoid rule is exact up to rounding. The result
    is not Gaussian, so that a closure by these moments is an approximation. No derivatives.

    Args:
        covariance: positive semidefinite and not zero, shape ``(..., dim, dim)``.

    Returns:
        Shape ``(..., dim, dim)``, with trace dim.

    Example:
        >>> rms_norm_moments(torch.diag(torch.tensor([4.0, 2.0, 1.0, 0.5, 0.1]))).diagonal()
        tensor([2.1082, 1.3860, 0.8641, 0.5122, 0.1295])
    """
    covariance = as_parameter(covariance, "covariance")
    if covariance.dim() < 2 or covariance.shape[-1] != covariance.shape[-2]:
        raise UserError(f"covariance must have shape (..., dim, dim), got {tuple(covariance.shape)}; make it square")
    values, vectors = torch.linalg.eigh(covariance.detach().double())
    largest = values[..., -1:]
    rounding = values.shape[-1] * torch.finfo(covariance.dtype).eps * largest.clamp_min(0)
    if bool((largest <= 0).any()) or bool((values < -rounding).any()):
        smallest = float(values.min())
        raise UserError(
            "covariance must be positive semidefinite and not zero, got one with smallest eigenvalue"
            f" {smallest:.3g} and largest {float(largest.max()):.3g}; check its sign"
        )
    # Only ratios count. Values below 1e-30 of the largest do not change the result.
    logs = (values / largest).clamp_min(1e-30).log() + math.log(2)
    grid = torch.arange(-45.0, 160.0, 0.25, dtype=logs.dtype, device=logs.device)  # log t
    softplus = torch.nn.functional.softplus(grid + logs[..., None])
    logarithm = grid + logs[..., None] - math.log(2) - softplus - 0.5 * softplus.sum(-2, keepdim=True)
    found = values.shape[-1] * 0.25 * logarithm.exp().sum(-1)
    moments: Tensor = (vectors * found[..., None, :]) @ vectors.mT
    return moments.to(covariance.dtype)


class TokenLimit(NamedTuple):
    """Error of attention over finitely many tokens against the mean map of their law.

    Attributes:
        bias: expected error to first order in 1 / tokens, shape ``(..., queries, dim)``.
        rmse: root mean square length of the error, to the same order, shape ``(..., queries)``.
        effective_sample_size: number of tokens of the tilted law with the same information, shape ``(..., queries)``.
    """

    bias: Tensor
    rmse: Tensor
    effective_sample_size: Tensor


def token_limit(measure: Measure, natural: Tensor, num_tokens: int) -> TokenLimit:
    r"""Return the error of attention over N tokens drawn from a law, as self-normalized importance sampling.

    .. math:: \mathrm{bias} = -\frac{\rho}{N} \delta, \qquad
              \mathrm{rmse}^2 = \frac{\rho}{N} (\mathrm{tr}\, C(2\eta) + |\delta|^2), \qquad
              \mathrm{ESS} = \frac{N}{\rho}, \qquad
              \rho = \frac{Z(2\eta) Z(0)}{Z(\eta)^2}, \quad \delta = m(2\eta) - m(\eta)

    For Gaussian keys :math:`\rho = e^{\eta^\top \Sigma \eta}`: the number of tokens must exceed the exponential of the
    dimension for typical queries of the equilibrium.

    Args:
        measure: the law h of the tokens, up to a factor.
        natural: :math:`\eta`, shape ``(..., queries, dim)``; twice of it must lie in the natural domain.
        num_tokens: N.

    Example:
        >>> token_limit(massieu.Gaussian(torch.zeros(1), torch.eye(1)), torch.ones(1, 1), 1000).rmse
        tensor([0.0737])
    """
    num_tokens = check_count(num_tokens, "num_tokens")
    natural = measure.expect(natural)
    double, none = 2 * natural, torch.zeros_like(natural)
    for point, name in ((double, "twice natural"), (none, "zero")):
        if not bool(measure.contains(point).all()):
            raise UserError(
                f"{name} must lie in {measure.domain}, got a {type(measure).__name__} where it does not;"
                " the weights of the tokens then have no finite variance"
            )
    log_ratio = measure.log_normalizer(double) - 2 * measure.log_normalizer(natural) + measure.log_normalizer(none)
    shift = measure.mean(double) - measure.mean(natural)
    variance = measure.fisher(double).diagonal(dim1=-2, dim2=-1).sum(-1)
    share = (log_ratio - math.log(num_tokens)).exp()
    return TokenLimit(-share[..., None] * shift, (share * (variance + shift.square().sum(-1))).sqrt(), 1 / share)


def cumulant_amplification(order: int, step: float, spread: float) -> float:
    r"""Return the growth factor of a small cumulant of the tokens in one step of attention and renormalization.

    .. math:: \kappa_k \mapsto (1 + k r)\, \kappa_k, \qquad r = \frac{s \sigma}{1 + s \sigma}, \qquad k \ge 3

    To first order around the Gaussian equilibrium of Theorem 1 with keys :math:`x = \sigma \eta` of variance
    :math:`\sigma` in one dimension. All factors exceed one and they grow with the order: the equilibrium is unstable.

    Args:
        order: k, at least three; renormalization sets the first two cumulants.
        step: s, not negative.
        spread: :math:`\sigma`, the variance of the keys, not negative.

    Example:
        >>> cumulant_amplification(4, step=1.0, spread=1.0)
        3.0
    """
    order = check_count(order, "order", least=3)
    strength = check_number(step, "step", least=0.0) * check_number(spread, "spread", least=0.0)
    return 1 + order * strength / (1 + strength)


def _square(matrix: Tensor | None, name: str, identity: Tensor) -> Tensor:
    if matrix is None:
        return identity
    matrix = as_parameter(matrix, name)
    check_shape(matrix, name, *identity.shape)
    return matrix.to(identity)
