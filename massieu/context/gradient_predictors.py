"""Predictors by gradient descent from zero on the examples: one step, several, and with moving inputs (GD++)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from massieu.checks import check_count, check_number
from massieu.context.predictors import Predictor, prefix_moments, prefix_sums
from massieu.context.step_sizes import Schedule, StepSizes, optimal_step_sizes
from massieu.context.tasks.task import root_of_covariance

__all__ = ["GradientDescent", "GradientDescentPlus", "GradientStep", "TunedDescent", "best_step_size"]


def best_step_size(length: int, dim: int, *, covariance: Any = None, prior: Any = None, noise: float = 0.0) -> float:
    r"""Return the step size with which one step from zero on N examples predicts best, for normal inputs.

    .. math:: \eta^* = \frac{N\, \mathrm{tr}(\Sigma\Psi\Sigma)}
              {(N+1)\, \mathrm{tr}(\Sigma^2\Psi\Sigma) + (\mathrm{tr}(\Psi\Sigma) + \sigma^2)\, \mathrm{tr}\, \Sigma^2}

    It is the minimum of the loss of one linear attention layer over multiples of the identity; for :math:`\Sigma = I`,
    :math:`\Psi = \psi^2 I` it is :math:`N / (N + d + 1 + \sigma^2/\psi^2)`.

    Args:
        length: N.
        dim: d.
        covariance: :math:`\Sigma` of the inputs: a number, variances or a matrix.
        prior: :math:`\Psi` of the weights, in the same forms.
        noise: :math:`\sigma`, a standard deviation.

    Example:
        >>> round(best_step_size(20, 10), 6)  # 20 / 31
        0.645161
    """
    length, dim = check_count(length, "length", least=0), check_count(dim, "dim")
    noise = check_number(noise, "noise", least=0)
    (_, spread), (_, weights) = (
        root_of_covariance(given, name, dim) for given, name in ((covariance, "covariance"), (prior, "prior"))
    )
    product = spread @ weights @ spread
    power = float((weights * spread).sum()) + noise**2
    curvature = (length + 1) * (spread * product).sum() + power * spread.square().sum()
    # Both are zero where the weights lie in directions without inputs: then all step sizes are equally good.
    return float(length * product.trace() / curvature.clamp_min(torch.finfo(curvature.dtype).tiny))


class GradientStep(Predictor):
    r"""One step of gradient descent from zero with the best step size for each number of examples.

    .. math:: \hat w = \tfrac{\eta^*}{i} \textstyle\sum_{j<i} y_j x_j

    Normalized by d, its error for isotropic inputs and weights is :math:`(d+1)/(i+d+1)`.

    Args:
        covariance: of the inputs, as for :func:`best_step_size`.
        prior: of the weights, likewise.
        noise: standard deviation of the noise.

    Example:
        >>> from massieu.context import Prompts
        >>> prompts = Prompts.of(torch.ones(1, 2, 1), torch.ones(1, 2))
        >>> GradientStep()(prompts)  # step size 1 / 3
        tensor([[0.0000, 0.3333]])
    """

    def __init__(self, *, covariance: Any = None, prior: Any = None, noise: float = 0.0):
        self.setting = {"covariance": covariance, "prior": prior, "noise": noise}

    def predict(self, inputs: Tensor, targets: Tensor, queries: Tensor, lengths: list[int]) -> Tensor:
        sizes = [best_step_size(length, inputs.shape[-1], **self.setting) / max(length, 1) for length in lengths]
        moments = prefix_moments(inputs, targets, lengths)
        return torch.einsum("l,tld,tldo->tlo", torch.tensor(sizes).to(inputs), queries, moments)


class GradientDescent(Predictor):
    r"""Steps of gradient descent from zero on :math:`L(w) = \frac{1}{2i} \sum_{j<i} (\langle w, x_j \rangle - y_j)^2`.

    Args:
        steps: number of steps.
        step_size: of each step; None for the inverse of the largest curvature of each prefix, which always descends.

    Example:
        >>> from massieu.context import Prompts
        >>> prompts = Prompts.of(torch.ones(1, 2, 1), torch.ones(1, 2))
        >>> GradientDescent(2, step_size=0.5)(prompts)
        tensor([[0.0000, 0.7500]])
    """

    def __init__(self, steps: int, step_size: float | None = None):
        self.steps = check_count(steps, "steps", least=0)
        self.step_size = None if step_size is None else check_number(step_size, "step_size", above=0)

    def predict(self, inputs: Tensor, targets: Tensor, queries: Tensor, lengths: list[int]) -> Tensor:
        counts = torch.tensor(lengths).clamp_min(1).to(inputs)[:, None, None]
        found = []
        for chunk, grams, moments in prefix_sums(inputs, targets, lengths):
            curvature, slope = grams / counts, moments / counts
            step_size = _inverse_of_largest(curvature) if self.step_size is None else self.step_size
            weights = torch.zeros_like(slope)
            for _ in range(self.steps):
                weights = weights + step_size * (slope - curvature @ weights)
            found.append(torch.einsum("tld,tldo->tlo", queries[chunk], weights))
        return torch.cat(found)


class GradientDescentPlus(Predictor):
    r"""Steps of GD++: each step also moves the inputs, which improves the curvature for the next steps.

    .. math:: x \leftarrow (I - \gamma S) x, \qquad S = \tfrac1i \textstyle\sum_{j<i} x_j x_j^\top
              \text{ of the current } x

    The inputs of step k are :math:`T_k x` with a polynomial :math:`T_k` in the first S, so that a step adds
    :math:`\eta\, T_k^2 (b - S w_k)` to the weights, where :math:`b = \frac1i \sum_{j<i} y_j x_j`.

    Args:
        steps: number of steps.
        step_size: :math:`\eta`.
        curvature: :math:`\gamma`; with 0 it is :class:`GradientDescent`.

    Source:
        von Oswald et al. 2022.

    Example:
        >>> from massieu.context import Prompts
        >>> prompts = Prompts.of(torch.ones(1, 2, 1), torch.ones(1, 2))
        >>> GradientDescentPlus(2, step_size=0.5, curvature=0.5)(prompts)  # 1/2, and (1 - 1/2) / 8 more
        tensor([[0.0000, 0.5625]])
    """

    def __init__(self, steps: int, step_size: float, curvature: float):
        self.steps = check_count(steps, "steps", least=0)
        self.step_size = check_number(step_size, "step_size", above=0)
        self.curvature = check_number(curvature, "curvature", least=0)

    def predict(self, inputs: Tensor, targets: Tensor, queries: Tensor, lengths: list[int]) -> Tensor:
        counts = torch.tensor(lengths).clamp_min(1).to(inputs)[:, None, None]
        found = []
        for chunk, grams, moments in prefix_sums(inputs, targets, lengths):
            first, slope = grams / counts, moments / counts
            moved = torch.eye(inputs.shape[-1]).to(inputs).expand_as(first)
            weights = torch.zeros_like(slope)
            for _ in range(self.steps):
                weights = weights + self.step_size * moved @ (moved @ (slope - first @ weights))
                moved = moved - self.curvature * (moved @ first @ moved) @ moved
            found.append(torch.einsum("tld,tldo->tlo", queries[chunk], weights))
        return torch.cat(found)


class TunedDescent(Predictor):
    r"""Steps of gradient descent, or of GD++, with the best step size after each number of examples.

    Args:
        steps: number of steps.
        noise: standard deviation of the noise, in units of that of a weight.
        moving: move the inputs, as in GD++, with the best curvature, unless that is negative.
        samples: contexts for :func:`massieu.context.step_sizes.optimal_step_sizes`.
        seed: draws these.

    Example:
        >>> from massieu.context import error_curve, task_named
        >>> prompts = task_named("linear", dim=5).draw(2000, 11, torch.Generator().manual_seed(0))
        >>> found = error_curve(prompts, {"GD": TunedDescent(3), "GD++": TunedDescent(3, moving=True)}, [10])
        >>> found.error.round(1).tolist()
        [0.8, 0.2]
    """

    def __init__(self, steps: int, noise: float = 0.0, *, moving: bool = False, samples: int = 2000, seed: int = 0):
        self.steps = check_count(steps, "steps")
        self.samples = check_count(samples, "samples")
        self.noise, self.moving = check_number(noise, "noise", least=0), moving
        self.seed = check_count(seed, "seed", least=0)
        self._cache: dict[tuple[int, int], StepSizes] = {}

    def sizes(self, length: int, dim: int) -> StepSizes:
        """Return the step sizes after ``length`` examples, with the outcome of their search."""
        if (length, dim) not in self._cache:
            found = self._search(length, dim, "curvature" if self.moving else "shared")
            kept = found.curvature >= 0
            self._cache[length, dim] = found if kept else self._search(length, dim, "shared")
        return self._cache[length, dim]

    def predict(self, inputs: Tensor, targets: Tensor, queries: Tensor, lengths: list[int]) -> Tensor:
        found = queries.new_zeros(*queries.shape[:2], targets.shape[-1])
        for place, length in enumerate(lengths):
            if length:
                best = self.sizes(length, inputs.shape[-1])
                descent = GradientDescentPlus(self.steps, best.step_sizes[0], best.curvature)
                given = (inputs[:, :length], targets[:, :length], queries[:, place : place + 1])
                found[:, place : place + 1] = descent.predict(*given, [length])
        return found

    def _search(self, length: int, dim: int, schedule: Schedule) -> StepSizes:
        generator = torch.Generator().manual_seed(self.seed)
        options: dict[str, Any] = {"noise": self.noise, "samples": self.samples, "generator": generator}
        return optimal_step_sizes(dim, examples=length, layers=self.steps, schedule=schedule, **options)


def _inverse_of_largest(curvature: Tensor) -> Tensor:
    """Return one over the largest eigenvalue of each matrix; 0 without examples."""
    largest = torch.linalg.eigvalsh(curvature)[..., -1:, None]
    return torch.where(largest > 0, 1 / largest, 0.0)
