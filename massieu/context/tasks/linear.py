"""Functions that are linear in their parameters, and their logistic link."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from massieu.checks import UserError, check_count, check_number
from massieu.context.tasks.task import Parameters, Task, normal, root_of_covariance, uniform

__all__ = ["Linear", "Logistic", "NoisyLinear", "Quadratic", "SparseLinear"]


class Linear(Task):
    r"""Linear functions :math:`f(x) = \langle w, x \rangle`, :math:`w \sim N(0, \Psi)`, :math:`x \sim N(0, \Sigma)`.

    .. math:: E f^2 = \mathrm{tr}(\Psi \Sigma), \quad \text{by default } d

    Args:
        dim: d.
        noise: standard deviation of the noise.
        covariance: :math:`\Sigma`: a number, d variances or a matrix; the identity by default.
        prior: :math:`\Psi`, in the same forms.
        outputs: number of independent functions of one input in a task; None for targets without an axis of outputs.

    Example:
        >>> task = Linear(5, noise=0.5)
        >>> prompts = task.draw(100, 11, torch.Generator().manual_seed(0))
        >>> prompts.inputs.shape, prompts.targets.shape, task.signal
        (torch.Size([100, 11, 5]), torch.Size([100, 11]), 5.0)
        >>> w = prompts.parameters["weights"]
        >>> torch.allclose(torch.einsum("tnd,td->tn", prompts.inputs, w), prompts.answers, atol=1e-5)
        True
    """

    def __init__(
        self, dim: int, noise: float = 0.0, *, covariance: Any = None, prior: Any = None, outputs: int | None = None
    ):
        super().__init__(dim, noise)
        self._spread, self.covariance = root_of_covariance(covariance, "covariance", self.dim)
        self._prior_root, self.prior = root_of_covariance(prior, "prior", self.dim)
        self.outputs = None if outputs is None else check_count(outputs, "outputs")
        self._check_noise()

    @property
    def signal(self) -> float:
        return float((self.prior * self.covariance).sum())

    def draw_inputs(self, count: int, examples: int, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        return _spread(super().draw_inputs(count, examples, generator, dtype), self._spread)

    def draw_parameters(self, count: int, generator: torch.Generator, dtype: torch.dtype) -> Parameters:
        weights = _spread(normal((count, self.outputs or 1, self.dim), generator, dtype), self._prior_root).mT
        return {"weights": weights[..., 0] if self.outputs is None else weights}

    def values(self, inputs: Tensor, parameters: Parameters) -> Tensor:
        weights = parameters["weights"]
        return torch.einsum("tnd,td...->tn...", inputs, weights)


class NoisyLinear(Linear):
    r"""Noisy linear functions, whose Bayes predictor is ridge regression with ``penalty`` :math:`\sigma^2 / \psi^2`.

    As :class:`Linear`, with :math:`\Psi = \psi^2 I` and noise that is not zero: :math:`E f^2 = \psi^2\,
    \mathrm{tr}\,\Sigma`.

    Args:
        dim, noise, covariance: as for :class:`Linear`.
        scale: :math:`\psi`, the standard deviation of a weight.

    Example:
        >>> NoisyLinear(5, noise=0.5).penalty
        0.25
    """

    def __init__(self, dim: int, noise: float = 0.5, *, scale: float = 1.0, covariance: Any = None):
        noise = check_number(noise, "noise", above=0, remedy="without noise take the task linear")
        scale = check_number(scale, "scale", above=0)
        super().__init__(dim, noise, covariance=covariance, prior=scale**2)
        self.penalty = self.noise**2 / scale**2


class SparseLinear(Linear):
    r"""Linear functions with only ``nonzero`` weights, standard normal, at places drawn for each task.

    .. math:: E f^2 = \tfrac{k}{d} \mathrm{tr}\,\Sigma, \quad \text{by default } k

    Not d: the weights are not enlarged to compensate for the zeros.

    Args:
        dim, noise, covariance: as for :class:`Linear`.
        nonzero: k; by default 3, or d if that is less.

    Source:
        Garg et al. 2022, section 4.

    Example:
        >>> weights = SparseLinear(20).draw(2, 5, torch.Generator().manual_seed(0)).parameters["weights"]
        >>> (weights != 0).sum(-1)
        tensor([3, 3])
    """

    def __init__(self, dim: int, noise: float = 0.0, *, nonzero: int | None = None, covariance: Any = None):
        dim = check_count(dim, "dim")
        self.nonzero = min(3, dim) if nonzero is None else check_count(nonzero, "nonzero")
        if self.nonzero > dim:
            raise UserError(f"nonzero must be at most dim, {dim}, got {self.nonzero}; it counts the weights")
        super().__init__(dim, noise, covariance=covariance)

    @property
    def signal(self) -> float:
        return float(self.nonzero / self.dim * self.covariance.trace())

    def draw_parameters(self, count: int, generator: torch.Generator, dtype: torch.dtype) -> Parameters:
        weights = normal((count, self.dim), generator, dtype)
        ranks = uniform((count, self.dim), generator, dtype).argsort(-1).argsort(-1)
        return {"weights": weights * (ranks < self.nonzero)}


class Quadratic(Linear):
    r"""Sums of squares, :math:`f(x) = \sum_k w_k x_k^2 / \sqrt 3` with standard normal weights.

    .. math:: E f^2 = \textstyle\sum_k \Sigma_{kk}^2, \quad \text{by default } d

    Arguments as for :class:`Linear`.

    Source:
        Garg et al. 2022, their public code.

    Example:
        >>> Quadratic(20).signal
        20.0
    """

    def __init__(self, dim: int, noise: float = 0.0, *, covariance: Any = None):
        super().__init__(dim, noise, covariance=covariance)

    @property
    def signal(self) -> float:
        return float(self.covariance.diagonal().square().sum())

    def values(self, inputs: Tensor, parameters: Parameters) -> Tensor:
        return super().values(inputs.square() / 3**0.5, parameters)


class Logistic(Linear):
    r"""Labels :math:`y = \pm 1` with :math:`P(y = 1 \mid x) = \sigma(\langle w, x \rangle)`.

    The answers are the means :math:`f(x) = E[y \mid x] = \tanh(\langle w, x \rangle / 2)`. The noise is in the labels:
    :math:`E y^2 = 1`, of which :math:`E f^2` is the ``signal``.

    Args:
        dim, covariance: as for :class:`Linear`.
        scale: standard deviation of a weight; labels are less random the larger it is.

    Example:
        >>> Logistic(3).draw(1, 6, torch.Generator().manual_seed(1)).targets
        tensor([[-1.,  1.,  1., -1.,  1., -1.]])
    """

    def __init__(self, dim: int, *, scale: float = 1.0, covariance: Any = None):
        super().__init__(dim, covariance=covariance, prior=check_number(scale, "scale", above=0) ** 2)

    @property
    def signal(self) -> float:
        # Scores are centered normals given the input, with its length in the metric of the prior as scale: quadrature
        # over the normals, and a fixed sample of inputs.
        generator = torch.Generator().manual_seed(0)
        inputs = self.draw_inputs(1, 4096, generator, torch.float64)[0]
        scales = torch.einsum("nd,de,ne->n", inputs, self.prior, inputs).sqrt()
        nodes = torch.linspace(-8, 8, 401, dtype=torch.float64)
        weights = torch.softmax(-0.5 * nodes.square(), 0)
        return float((torch.tanh(0.5 * scales[:, None] * nodes).square() @ weights).mean())

    def values(self, inputs: Tensor, parameters: Parameters) -> Tensor:
        return torch.tanh(0.5 * super().values(inputs, parameters))

    def observe(self, clean: Tensor, generator: torch.Generator) -> Tensor:
        return torch.where(2 * uniform(clean.shape, generator, clean.dtype) - 1 < clean, 1.0, -1.0).to(clean)


def _spread(vectors: Tensor, root: Tensor | None) -> Tensor:
    """Map standard normal vectors to vectors with the covariance of the root."""
    return vectors if root is None else vectors @ root.mT.to(vectors)
