"""Best single layer of linear attention for in-context regression, in closed form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from massieu.checks import UserError, check_count, check_floating, check_number, check_shape
from massieu.context.constructed_layers import gradient_step_layer
from massieu.nn import LinearAttention

__all__ = [
    "FourthMoment",
    "IsotropicOptimum",
    "Optimum",
    "gaussian_moment",
    "independent_moment",
    "isotropic_optimum",
    "optimal_linear_attention",
    "sampled_moment",
]

FourthMoment = Callable[[Tensor], Tensor]
r"""A function from a symmetric matrix :math:`\Psi` to :math:`E[x x^\top \Psi \, x x^\top]`."""


@dataclass(frozen=True)
class Optimum:
    r"""Best matrix of a predictor :math:`\hat y = \frac1N \sum_i y_i x_i^\top A x`, and its loss.

    Attributes:
        matrix: :math:`A^*`, shape ``(dim, dim)``.
        loss: its expected squared error against :math:`w^\top x` without the noise.
        step: :math:`\eta^*`, the best size of a plain step of gradient descent, :math:`A = \eta I`.
        step_loss: the loss of that step, equal to ``loss`` only if the best matrix is a multiple of one.
        second_moment: :math:`G = E[z z^\top]` of :math:`z = \frac1N \sum_i y_i x_i`, shape ``(dim, dim)``.
        covariance: :math:`\Sigma`, shape ``(dim, dim)``.
        prior: :math:`\Psi`, shape ``(dim, dim)``.
        examples: :math:`N`.
    """

    matrix: Tensor
    loss: float
    step: float
    step_loss: float
    second_moment: Tensor
    covariance: Tensor
    prior: Tensor
    examples: int

    def loss_of(self, matrix: Tensor) -> Tensor:
        r"""Return the loss of other matrices :math:`A`, shape ``(..., dim, dim)``, as a tensor ``(...)``.

        .. math:: \mathrm{tr}(\Psi\Sigma) - 2 \, \mathrm{tr}(\Sigma\Psi\Sigma A) + \mathrm{tr}(A \Sigma A^\top G)
        """
        cross = self.covariance @ self.prior @ self.covariance
        square = torch.einsum("...ij,jk,...lk,li->...", matrix, self.covariance, matrix, self.second_moment)
        return (self.prior * self.covariance).sum() - 2 * torch.einsum("ij,...ji->...", cross, matrix) + square

    def layer(self) -> LinearAttention:
        """Return the optimum as a layer on tokens, as :func:`massieu.context.gradient_step_layer` with ``matrix``."""
        dim, dtype = len(self.matrix), self.matrix.dtype
        options = {"examples": self.examples, "preconditioner": self.matrix, "dtype": dtype}
        return gradient_step_layer(dim, 1, step=1.0, **options)  # type: ignore[arg-type]


def optimal_linear_attention(
    covariance: Tensor,
    prior: Tensor | None = None,
    *,
    noise: float = 0.0,
    examples: int,
    fourth_moment: FourthMoment | None = None,
) -> Optimum:
    r"""Return the best layer of linear attention for linear regression in a context, with its loss.

    Inputs have mean zero and covariance :math:`\Sigma`, tasks :math:`w` mean zero and covariance :math:`\Psi`, and
    :math:`y_i = w^\top x_i + \varepsilon_i` with noise of variance :math:`\sigma^2`. With
    :math:`z = \frac1N \sum_i y_i x_i` and :math:`G = E[z z^\top]` the predictor :math:`z^\top A x` is best where
    :math:`G A \Sigma = \Sigma\Psi\Sigma`,

    .. math:: A^* = G^{-1} \Sigma \Psi, \qquad
              G = \frac{N-1}{N} \Sigma\Psi\Sigma + \frac1N E[x x^\top \Psi \, x x^\top] + \frac{\sigma^2}{N} \Sigma

    For Gaussian inputs :math:`E[x x^\top \Psi \, x x^\top] = 2 \Sigma\Psi\Sigma + \mathrm{tr}(\Psi\Sigma) \Sigma`, so

    .. math:: A^* = \Bigl[ \tfrac{N+1}{N} \Psi\Sigma + \tfrac{\mathrm{tr}(\Psi\Sigma) + \sigma^2}{N} I \Bigr]^{-1} \Psi

    It is preconditioned gradient descent. Only second moments of tasks and noise matter, and of inputs the fourth.

    Args:
        covariance: :math:`\Sigma`, shape ``(dim, dim)``, positive definite.
        prior: :math:`\Psi`, shape ``(dim, dim)``, positive semidefinite; None for the identity.
        noise: :math:`\sigma`, the standard deviation of the noise.
        examples: :math:`N`.
        fourth_moment: :math:`\Psi \mapsto E[x x^\top \Psi \, x x^\top]` of inputs that are not Gaussian, such as
            :func:`independent_moment` or :func:`sampled_moment`.

    Source:
        Ahn et al. 2023, Theorem 1, and Zhang, Frei and Bartlett 2023 for :math:`\Psi = I` without noise; prior, noise
        and other inputs are derived here.

    Example:
        >>> found = optimal_linear_attention(torch.eye(10).double(), examples=20)
        >>> round(found.step, 6), round(found.loss, 6)  # 20 / 31 and 110 / 31
        (0.645161, 3.548387)
        >>> skewed = optimal_linear_attention(torch.diag(torch.tensor([4.0, 1.0, 0.25])).double(), examples=20)
        >>> skewed.loss < 0.7 * skewed.step_loss
        True
    """
    sigma = _covariance(covariance, "covariance", len(covariance) if isinstance(covariance, Tensor) else 0)
    psi = torch.eye(len(sigma)).to(sigma) if prior is None else _covariance(prior, "prior", len(sigma)).to(sigma)
    if torch.linalg.eigvalsh(sigma)[0] <= 0:
        raise UserError("covariance must be positive definite, got a singular one; drop the directions without inputs")
    check_count(examples, "examples")
    check_number(noise, "noise", least=0)
    spread = (fourth_moment or gaussian_moment(sigma))(psi).to(sigma)
    check_shape(spread, "the result of fourth_moment", *sigma.shape)
    cross = sigma @ psi @ sigma
    second = ((examples - 1) * cross + spread + noise**2 * sigma) / examples
    matrix = _solve(second, sigma @ psi)
    step = float(cross.trace() / (sigma * second).sum().clamp(min=torch.finfo(sigma.dtype).tiny))
    found = Optimum(matrix, 0.0, step, 0.0, second, sigma, psi, examples)
    losses = found.loss_of(torch.stack([matrix, step * torch.eye(len(sigma)).to(sigma)])).tolist()
    return Optimum(matrix, losses[0], step, losses[1], second, sigma, psi, examples)


class IsotropicOptimum(NamedTuple):
    """Best step size of descent and its loss."""

    step: float
    loss: float


def isotropic_optimum(
    dim: int, *, examples: int, noise: float = 0.0, variance: float = 1.0, prior: float = 1.0
) -> IsotropicOptimum:
    r"""Return the optimum for Gaussian inputs of covariance :math:`s^2 I` and tasks of covariance :math:`\psi I`.

    .. math:: \eta^* = \frac{N \psi}{(N + d + 1) s^2 \psi + \sigma^2}, \qquad
              \mathrm{loss} = d \psi s^2 (1 - s^2 \eta^*)

    Example:
        >>> isotropic_optimum(2, examples=5)
        IsotropicOptimum(step=0.625, loss=0.75)
    """
    check_count(dim, "dim")
    check_count(examples, "examples")
    check_number(noise, "noise", least=0)
    check_number(variance, "variance", above=0)
    check_number(prior, "prior", above=0)
    step = examples * prior / ((examples + dim + 1) * variance * prior + noise**2)
    return IsotropicOptimum(step, dim * prior * variance * (1 - variance * step))


def gaussian_moment(covariance: Tensor) -> FourthMoment:
    r"""Return the fourth moments of Gaussian inputs, :math:`2 \Sigma\Psi\Sigma + \mathrm{tr}(\Psi\Sigma) \Sigma`.

    Example:
        >>> gaussian_moment(torch.eye(1))(torch.eye(1))
        tensor([[3.]])
    """
    return lambda psi: 2 * covariance @ psi @ covariance + (psi * covariance).sum() * covariance


def independent_moment(variance: Tensor, fourth: Tensor) -> FourthMoment:
    r"""Return the fourth moments of inputs with independent coordinates of mean zero.

    The matrix :math:`2 \Sigma\Psi\Sigma + \mathrm{tr}(\Psi\Sigma) \Sigma` of a Gaussian, and on the diagonal
    :math:`(E x_i^4 - 3 \Sigma_{ii}^2) \Psi_{ii}`.

    Args:
        variance: :math:`E x_i^2`, shape ``(dim,)``.
        fourth: :math:`E x_i^4`, shape ``(dim,)``.

    Example:
        >>> signs = independent_moment(torch.ones(2), torch.ones(2))
        >>> signs(torch.eye(2))  # x x^T x x^T = 2 x x^T for a vector of two signs
        tensor([[2., 0.],
                [0., 2.]])
    """
    check_shape(variance, "variance", "dim")
    check_shape(fourth, "fourth", *variance.shape)
    if (fourth < variance.square() * (1 - 1e-6)).any():
        raise UserError("fourth must be at least the square of variance, got less; these are E[x^4] and E[x^2]")
    gaussian = gaussian_moment(torch.diag(variance))
    return lambda psi: gaussian(psi) + torch.diag((fourth - 3 * variance.square()) * psi.diagonal())


def sampled_moment(inputs: Tensor) -> FourthMoment:
    r"""Return the fourth moments of equally likely inputs: the mean of :math:`(x^\top \Psi x) x x^\top`.

    Args:
        inputs: shape ``(samples, dim)``.

    Example:
        >>> sampled_moment(torch.tensor([[1.0, 2.0]]))(torch.eye(2))
        tensor([[ 5., 10.],
                [10., 20.]])
    """
    check_shape(inputs, "inputs", "samples", "dim")
    check_count(len(inputs), "samples")

    def moment(psi: Tensor) -> Tensor:
        weight = (inputs @ psi.to(inputs) * inputs).sum(-1, keepdim=True)
        return (weight * inputs).mT @ inputs / len(inputs)

    return moment


def _solve(second: Tensor, right: Tensor) -> Tensor:
    """Return the solution of smallest norm: a singular prior may lead to a singular second moment."""
    values, vectors = torch.linalg.eigh((second + second.mT) / 2)
    kept = values > len(values) * torch.finfo(values.dtype).eps * values[-1]
    inverse: Tensor = (vectors * torch.where(kept, 1 / values, 0.0)) @ vectors.mT
    return inverse @ right


def _covariance(matrix: Tensor, name: str, dim: int) -> Tensor:
    check_floating(matrix, name)
    check_shape(matrix, name, dim or "dim", dim or "dim", remedy="pass variances as torch.diag(...)")
    check_count(dim, "dim")
    tolerance = 1e-6 * float(matrix.abs().max())
    if not torch.allclose(matrix, matrix.mT, rtol=0, atol=tolerance) or torch.linalg.eigvalsh(matrix)[0] < -tolerance:
        raise UserError(f"{name} must be symmetric and positive semidefinite, got a matrix that is not; see eigvalsh")
    return matrix
