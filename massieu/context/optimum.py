"""The best single layer of linear attention for in-context regression, in closed form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from massieu.checks import UserError, check_count, check_floating
from massieu.context.construction import gradient_step_layer
from massieu.context.descent import check_noise
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
r"""From a symmetric matrix :math:`\Psi` to :math:`E[x x^\top \Psi \, x x^\top]`."""


@dataclass(frozen=True)
class Optimum:
    r"""The best matrix of a predictor :math:`\hat y = \frac1N \sum_i y_i x_i^\top A x`, and what it leaves.

    Attributes:
        matrix: :math:`A^*`, shape ``(dim, dim)``.
        loss: its expected squared error against :math:`w^\top x` without the noise.
        step: :math:`\eta^*`, the best rate of a plain step of gradient descent, :math:`A = \eta I`.
        step_loss: the loss of that step, which only equals ``loss`` where the best matrix is a multiple of one.
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
        r"""The loss of other matrices :math:`A`, shape ``(..., dim, dim)``, as a tensor ``(...)``.

        .. math:: \mathrm{tr}(\Psi\Sigma) - 2 \, \mathrm{tr}(\Sigma\Psi\Sigma A) + \mathrm{tr}(A \Sigma A^\top G)
        """
        cross = self.covariance @ self.prior @ self.covariance
        square = torch.einsum("...ij,jk,...lk,li->...", matrix, self.covariance, matrix, self.second_moment)
        return (self.prior * self.covariance).sum() - 2 * torch.einsum("ij,...ji->...", cross, matrix) + square

    def layer(self) -> LinearAttention:
        """The optimum as a layer on tokens, as :func:`massieu.context.gradient_step_layer` with ``matrix``."""
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
    r"""The best layer of linear attention for linear regression in a context, with its loss.

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
    check_count(examples, "examples", remedy="it is the number of examples in the context")
    check_noise(noise)
    spread = (fourth_moment or gaussian_moment(sigma))(psi).to(sigma)
    if spread.shape != sigma.shape:
        got = tuple(spread.shape)
        raise UserError(
            f"fourth_moment must return shape {tuple(sigma.shape)}, got {got}; it maps matrices to matrices"
        )
    cross = sigma @ psi @ sigma
    second = ((examples - 1) * cross + spread + noise**2 * sigma) / examples
    matrix = _solve(second, sigma @ psi)
    step = float(cross.trace() / (sigma * second).sum().clamp(min=torch.finfo(sigma.dtype).tiny))
    found = Optimum(matrix, 0.0, step, 0.0, second, sigma, psi, examples)
    losses = found.loss_of(torch.stack([matrix, step * torch.eye(len(sigma)).to(sigma)])).tolist()
    return Optimum(matrix, losses[0], step, losses[1], second, sigma, psi, examples)


class IsotropicOptimum(NamedTuple):
    """The best rate of descent and its loss."""

    step: float
    loss: float


def isotropic_optimum(
    dim: int, *, examples: int, noise: float = 0.0, variance: float = 1.0, prior: float = 1.0
) -> IsotropicOptimum:
    r"""The optimum for Gaussian inputs of covariance :math:`s^2 I` and tasks of covariance :math:`\psi I`.

    .. math:: \eta^* = \frac{N \psi}{(N + d + 1) s^2 \psi + \sigma^2}, \qquad
              \mathrm{loss} = d \psi s^2 (1 - s^2 \eta^*)

    Example:
        >>> isotropic_optimum(2, examples=5)
        IsotropicOptimum(step=0.625, loss=0.75)
    """
    check_count(dim, "dim", remedy="it is the size of an input")
    check_count(examples, "examples", remedy="it is the number of examples in the context")
    check_noise(noise)
    for name, value in (("variance", variance), ("prior", prior)):
        if not 0 < value < float("inf"):
            raise UserError(f"{name} must be positive, got {value}; it is the variance of a coordinate")
    step = examples * prior / ((examples + dim + 1) * variance * prior + noise**2)
    return IsotropicOptimum(step, dim * prior * variance * (1 - variance * step))


def gaussian_moment(covariance: Tensor) -> FourthMoment:
    r"""Fourth moments of Gaussian inputs, :math:`2 \Sigma\Psi\Sigma + \mathrm{tr}(\Psi\Sigma) \Sigma`.

    Example:
        >>> gaussian_moment(torch.eye(1))(torch.eye(1))
        tensor([[3.]])
    """
    return lambda psi: 2 * covariance @ psi @ covariance + (psi * covariance).sum() * covariance


def independent_moment(variance: Tensor, fourth: Tensor) -> FourthMoment:
    r"""Fourth moments of inputs with independent coordinates of mean zero.

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
    if variance.dim() != 1 or variance.shape != fourth.shape:
        got = f"{tuple(variance.shape)} and {tuple(fourth.shape)}"
        raise UserError(f"variance and fourth must both have shape (dim,), got {got}; give a number per coordinate")
    if (fourth < variance.square() * (1 - 1e-6)).any():
        raise UserError("fourth must be at least the square of variance, got less; these are E[x^4] and E[x^2]")
    gaussian = gaussian_moment(torch.diag(variance))
    return lambda psi: gaussian(psi) + torch.diag((fourth - 3 * variance.square()) * psi.diagonal())


def sampled_moment(inputs: Tensor) -> FourthMoment:
    r"""Fourth moments of given inputs, each as likely as another: the mean of :math:`(x^\top \Psi x) x x^\top`.

    Args:
        inputs: shape ``(samples, dim)``.

    Example:
        >>> sampled_moment(torch.tensor([[1.0, 2.0]]))(torch.eye(2))
        tensor([[ 5., 10.],
                [10., 20.]])
    """
    if inputs.dim() != 2 or not len(inputs):
        raise UserError(f"inputs must have shape (samples, dim), got {tuple(inputs.shape)}; flatten leading axes")

    def moment(psi: Tensor) -> Tensor:
        weight = (inputs @ psi.to(inputs) * inputs).sum(-1, keepdim=True)
        return (weight * inputs).mT @ inputs / len(inputs)

    return moment


def _solve(second: Tensor, right: Tensor) -> Tensor:
    """The solution of smallest norm: a prior that leaves directions out may leave the second moment singular."""
    values, vectors = torch.linalg.eigh((second + second.mT) / 2)
    kept = values > len(values) * torch.finfo(values.dtype).eps * values[-1]
    inverse: Tensor = (vectors * torch.where(kept, 1 / values, 0.0)) @ vectors.mT
    return inverse @ right


def _covariance(matrix: Tensor, name: str, dim: int) -> Tensor:
    check_floating(matrix, name, "use .double()")
    if matrix.shape != (dim, dim) or not dim:
        wanted = f"({dim}, {dim})" if name == "prior" else "(dim, dim)"
        raise UserError(
            f"{name} must have shape {wanted}, got {tuple(matrix.shape)}; variances go in as torch.diag(...)"
        )
    tolerance = 1e-6 * float(matrix.abs().max())
    if not torch.allclose(matrix, matrix.mT, rtol=0, atol=tolerance) or torch.linalg.eigvalsh(matrix)[0] < -tolerance:
        raise UserError(f"{name} must be symmetric and positive semidefinite, got a matrix that is not; see eigvalsh")
    return matrix
