"""Ridge regression on documents it was not fitted to, from moments alone."""

from __future__ import annotations

import torch
from torch import Tensor

from massieu.accumulators.moments import Moments
from massieu.accumulators.serialization import stored

__all__ = ["Regression", "held_out_r2"]

STRENGTHS = torch.logspace(-8, 3, 23, dtype=torch.float64)
"""Ridges that are tried, as multiples of the mean variance of the inputs."""

FREEDOM = 0.9
"""Largest share of the tokens that a fit may use up: beyond it, the score compares two zeros."""


@stored("inputs", "cross", "spread")
class Regression:
    """Moments of inputs and targets, enough to fit a linear map and to judge one.

    Example:
        >>> x = torch.randn(50, 2, dtype=torch.float64)
        >>> train, test = Regression(2, 1), Regression(2, 1)
        >>> train.update(x[:25], x[:25, :1] + 3)
        >>> test.update(x[25:], x[25:, :1] + 3)
        >>> round(held_out_r2(train, test), 4)
        1.0
    """

    def __init__(self, dim: int, target_dim: int) -> None:
        self.inputs = Moments(dim)
        self.cross = Moments(dim, target_dim)
        self.spread = 0.0
        """Sum of squared distances of the targets from their mean."""

    @property
    def count(self) -> int:
        """Number of tokens."""
        return self.cross.count

    def update(self, x: Tensor, y: Tensor) -> None:
        """Add inputs ``(tokens, dim)`` and targets ``(tokens, target_dim)``."""
        if not len(x):
            return
        seen = Regression(x.shape[1], y.shape[1])
        seen.inputs.update(x)
        seen.cross.update(x, y)
        seen.spread = float((y.double() - y.double().mean(0)).square().sum())
        self.merge(seen)

    def merge(self, other: Regression) -> None:
        """Add what another has seen."""
        if not other.count:
            return
        self.spread += other.spread
        if self.count:
            step = other.cross.other_mean - self.cross.other_mean
            weight = self.count * other.count / (self.count + other.count)
            self.spread += weight * float(step.square().sum())
        self.inputs.merge(other.inputs)
        self.cross.merge(other.cross)

    def copy(self) -> Regression:
        """The same moments, to be merged without changing these."""
        found = Regression(0, 0)
        found.inputs, found.cross, found.spread = self.inputs.copy(), self.cross.copy(), self.spread
        return found

    def with_targets(self, cross: Moments) -> Regression:
        """The same inputs, means and spread with the cross moments of other targets, such as shuffled ones."""
        found = Regression(0, 0)
        found.inputs, found.cross, found.spread = self.inputs, self.cross.with_scatter(cross.scatter), self.spread
        return found


def held_out_r2(train: Regression, test: Regression) -> float:
    r"""Share of the targets' variance that a linear map explains on tokens it was not fitted to.

    .. math:: R^2 = 1 - \frac{\sum_i |y_i - \bar y - W^\top (x_i - \bar x)|^2}{\sum_i |y_i - \bar y_{test}|^2}

    with :math:`W = (S_{xx} + \lambda I)^{-1} S_{xy}` and means of the training tokens. The ridge minimizes the
    generalized cross-validation score of the training tokens, so the test tokens have no say in it.

    Source:
        Golub, Heath and Wahba 1979, "Generalized cross-validation as a method for choosing a good ridge parameter".
    """
    if train.count < 2 or test.count < 2 or test.spread <= 0 or train.spread <= 0:
        return float("nan")
    spectrum, basis = torch.linalg.eigh(train.inputs.scatter)
    spectrum = spectrum.clamp_min(0)
    loading = basis.T @ train.cross.scatter
    ridges = STRENGTHS * spectrum.mean().clamp_min(torch.finfo(torch.float64).tiny)
    ridge = ridges[int(_validation_scores(spectrum, loading, ridges, train).argmin())]
    weight = basis @ (loading / (spectrum + ridge)[:, None])
    shift = (test.cross.other_mean - train.cross.other_mean) - weight.T @ (test.cross.mean - train.cross.mean)
    explained = 2 * (weight * test.cross.scatter).sum() - (weight * (test.inputs.scatter @ weight)).sum()
    residual = test.spread - float(explained) + test.count * float(shift.square().sum())
    return 1 - residual / test.spread


def _validation_scores(spectrum: Tensor, loading: Tensor, ridges: Tensor, train: Regression) -> Tensor:
    power = loading.square().sum(1)
    filtered = 1 / (spectrum + ridges[:, None])
    residual = train.spread - (power * (2 * filtered - spectrum * filtered.square())).sum(1)
    freedom = 1 + (spectrum * filtered).sum(1)
    score = residual.clamp_min(0) / (1 - freedom / train.count).square()
    return torch.where(freedom < FREEDOM * train.count, score, torch.inf)
