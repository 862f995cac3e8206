"""Elementary measures with independent coordinates: Hypercube, Gamma, Poisson, Laplace."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from massieu.checks import UserError, check_count
from massieu.measures.measure import Measure, as_parameter
from massieu.measures.remainders import cumulant_remainder, exp_remainder, log_remainder

__all__ = ["Gamma", "Hypercube", "Laplace", "Poisson"]


class Hypercube(Measure):
    r"""Counting measure on the corners :math:`\{-1, 1\}^d`: the spins of the mean-field Ising model.

    .. math:: G(\eta) = \sum_i \log 2 \cosh \eta_i, \qquad m(\eta) = \tanh \eta

    Args:
        dim: number of spins, positive.

    Source:
        MacKay 2003, "Information Theory, Inference, and Learning Algorithms", section 33.2.

    Example:
        >>> Hypercube(2).mean(torch.tensor([[0.0, 1.0]]))
        tensor([[0.0000, 0.7616]])
    """

    reference = "counting"

    def __init__(self, dim: int) -> None:
        self.dim = check_count(dim, "dim")

    def log_normalizer(self, natural: Tensor) -> Tensor:
        natural = self.expect(natural)
        return torch.logaddexp(natural, -natural).sum(-1)

    def mean(self, natural: Tensor) -> Tensor:
        return self.expect(natural).tanh()

    def fisher(self, natural: Tensor) -> Tensor:
        r""":math:`\mathrm{diag}(1 - \tanh^2 \eta)`, shape ``(..., queries, dim, dim)``."""
        natural = self.expect(natural)
        # 1 - tanh^2 as a product: the difference has no correct digit left beyond |natural| = 19 in float64.
        return torch.diag_embed(4 * torch.sigmoid(2 * natural) * torch.sigmoid(-2 * natural))

    def remainder(self, natural: Tensor, step: Tensor) -> Tensor:
        r"""Sum over spins of :math:`\log E[e^u]`, :math:`u = (x - \tanh \eta)\, \delta`."""
        natural, step = torch.broadcast_tensors(self.expect(natural), step)
        log_p = torch.nn.functional.logsigmoid(torch.stack([2 * natural, -2 * natural], -1))
        return cumulant_remainder(log_p, torch.stack([step, -step], -1)).sum(-1)

    def _draw(self, natural: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
        up = torch.sigmoid(2 * self.expect(natural))
        return 2 * torch.bernoulli(up.expand(count, *up.shape), generator=generator) - 1

    def support_function(self, direction: Tensor) -> Tensor:
        r""":math:`\sum_i |u_i|`, shape ``(..., queries)``."""
        return direction.abs().sum(-1)


class Gamma(Measure):
    r"""The Gamma density with shape :math:`k` and scale :math:`\theta`, in each coordinate.

    .. math:: h(x) = \prod_i \frac{x_i^{k_i - 1} e^{-x_i / \theta_i}}{\Gamma(k_i)\, \theta_i^{k_i}}, \qquad
              G(\eta) = -\sum_i k_i \log(1 - \theta_i \eta_i), \qquad
              m_i(\eta) = \frac{k_i \theta_i}{1 - \theta_i \eta_i}

    Z is finite for :math:`\eta_i < 1 / \theta_i` only. A tilt is a Gamma again, with scale
    :math:`\theta / (1 - \theta \eta)`.

    Args:
        shape: :math:`k`, positive, a number or ``(dim,)``.
        scale: :math:`\theta`, positive, a number or ``(dim,)``.

    Source:
        "A Probabilistic Interpretation of Transformers", eq. 2, without the domain.

    Example:
        >>> Gamma(shape=2.0, scale=0.5).mean(torch.tensor([[0.0], [1.0]]))
        tensor([[1.],
                [2.]])
    """

    reference = "lebesgue"

    def __init__(self, shape: float | Tensor, scale: float | Tensor) -> None:
        self.shape, self.scale = as_coordinates(shape=shape, scale=scale)
        self.dim = len(self.scale)
        self.domain = f"natural < 1/scale = {(1 / self.scale).tolist()}"

    def log_normalizer(self, natural: Tensor) -> Tensor:
        natural = self.expect(natural)
        return -(self.shape.to(natural) * torch.log1p(-self.scale.to(natural) * natural)).sum(-1)

    def mean(self, natural: Tensor) -> Tensor:
        natural = self.expect(natural)
        return self.shape.to(natural) * self._tilted_scale(natural)

    def fisher(self, natural: Tensor) -> Tensor:
        r""":math:`\mathrm{diag}(k \theta^2 / (1 - \theta \eta)^2)`, shape ``(..., queries, dim, dim)``."""
        natural = self.expect(natural)
        return torch.diag_embed(self.shape.to(natural) * self._tilted_scale(natural).square())

    def remainder(self, natural: Tensor, step: Tensor) -> Tensor:
        r""":math:`\sum_i k_i (x - \log(1 + x))` at :math:`x = -\theta_i \delta_i / (1 - \theta_i \eta_i)`."""
        natural = self.expect(natural)
        return (self.shape.to(natural) * log_remainder(-self._tilted_scale(natural) * step)).sum(-1)

    def expected_log_density(self, natural: Tensor) -> Tensor:
        r""":math:`E[\log h]` from :math:`E[\log x] = \psi(k) + \log \frac{\theta}{1 - \theta \eta}`."""
        natural = self.expect(natural)
        shape, scale, tilted = self.shape.to(natural), self.scale.to(natural), self._tilted_scale(natural)
        power = (shape - 1) * (torch.digamma(shape) + tilted.log()) - shape * tilted / scale
        return (power - torch.lgamma(shape) - shape * scale.log()).sum(-1)

    def contains(self, natural: Tensor) -> Tensor:
        return (self.scale.to(natural) * natural < 1).all(-1)

    def _draw(self, natural: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
        scale = self._tilted_scale(self.expect(natural))
        shape = self.shape.to(scale).expand(count, *scale.shape)
        return scale * torch._standard_gamma(shape, generator=generator)

    def support_function(self, direction: Tensor) -> Tensor:
        """Zero where no coordinate is positive and infinite elsewhere, shape ``(..., queries)``."""
        return _orthant_support(direction)

    def _tilted_scale(self, natural: Tensor) -> Tensor:
        scale = self.scale.to(natural)
        return scale / (1 - scale * natural)


class Poisson(Measure):
    r"""The Poisson law with rate :math:`\lambda`, in each coordinate.

    .. math:: h(x) = \prod_i \frac{\lambda_i^{x_i} e^{-\lambda_i}}{x_i!}, \qquad
              G(\eta) = \sum_i \lambda_i (e^{\eta_i} - 1), \qquad m(\eta) = \lambda e^\eta

    The entropy is relative to h, because :math:`E[\log x!]` has no closed form.

    Args:
        rate: :math:`\lambda`, positive, a number or ``(dim,)``.

    Source:
        Brown 1986, "Fundamentals of Statistical Exponential Families", chapter 1.

    Example:
        >>> Poisson(rate=3.0).mean(torch.tensor([[0.0], [1.0]]))
        tensor([[3.0000],
                [8.1548]])
    """

    def __init__(self, rate: float | Tensor) -> None:
        (self.rate,) = as_coordinates(rate=rate)
        self.dim = len(self.rate)

    def log_normalizer(self, natural: Tensor) -> Tensor:
        natural = self.expect(natural)
        return (self.rate.to(natural) * natural.expm1()).sum(-1)

    def mean(self, natural: Tensor) -> Tensor:
        natural = self.expect(natural)
        return self.rate.to(natural) * natural.exp()

    def fisher(self, natural: Tensor) -> Tensor:
        r""":math:`\mathrm{diag}(\lambda e^\eta)`, shape ``(..., queries, dim, dim)``."""
        return torch.diag_embed(self.mean(natural))

    def remainder(self, natural: Tensor, step: Tensor) -> Tensor:
        r""":math:`\sum_i \lambda_i e^{\eta_i} (e^{\delta_i} - 1 - \delta_i)`, shape ``(..., queries)``."""
        return (self.mean(natural) * exp_remainder(step)).sum(-1)

    def _draw(self, natural: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
        rate = self.mean(natural)
        return torch.poisson(rate.expand(count, *rate.shape), generator=generator)

    def support_function(self, direction: Tensor) -> Tensor:
        """Zero where no coordinate is positive and infinite elsewhere, shape ``(..., queries)``."""
        return _orthant_support(direction)


class Laplace(Measure):
    r"""The Laplace density with scale :math:`b`, centered at zero, in each coordinate.

    .. math:: h(x) = \prod_i \frac{e^{-|x_i| / b_i}}{2 b_i}, \qquad
              G(\eta) = -\sum_i \log(1 - b_i^2 \eta_i^2), \qquad
              m_i(\eta) = \frac{2 b_i^2 \eta_i}{1 - b_i^2 \eta_i^2}

    Z is finite for :math:`|\eta_i| < 1 / b_i` only. A tilt is the difference of two exponential variables with
    means :math:`b / (1 - b \eta)` and :math:`b / (1 + b \eta)`.

    Args:
        scale: :math:`b`, positive, a number or ``(dim,)``.

    Source:
        Kotz, Kozubowski and Podgorski 2001, "The Laplace Distribution and Generalizations", chapter 3.

    Example:
        >>> Laplace(scale=1.0).mean(torch.tensor([[0.0], [0.5]]))
        tensor([[0.0000],
                [1.3333]])
    """

    reference = "lebesgue"

    def __init__(self, scale: float | Tensor) -> None:
        (self.scale,) = as_coordinates(scale=scale)
        self.dim = len(self.scale)
        self.domain = f"|natural| < 1/scale = {(1 / self.scale).tolist()}"

    def log_normalizer(self, natural: Tensor) -> Tensor:
        natural = self.expect(natural)
        return -torch.log1p(-(self.scale.to(natural) * natural).square()).sum(-1)

    def mean(self, natural: Tensor) -> Tensor:
        natural = self.expect(natural)
        right, left = self._sides(natural)
        return 2 * natural * right * left

    def fisher(self, natural: Tensor) -> Tensor:
        r"""Diagonal of :math:`b^2 (1 - b \eta)^{-2} + b^2 (1 + b \eta)^{-2}`, shape ``(..., queries, dim, dim)``."""
        right, left = self._sides(self.expect(natural))
        return torch.diag_embed(right.square() + left.square())

    def remainder(self, natural: Tensor, step: Tensor) -> Tensor:
        """Remainders of both exponential parts, as in :class:`Gamma`, shape ``(..., queries)``."""
        right, left = self._sides(self.expect(natural))
        return (log_remainder(-right * step) + log_remainder(left * step)).sum(-1)

    def expected_log_density(self, natural: Tensor) -> Tensor:
        r""":math:`-\sum_i \log 2 b_i + E|x_i| / b_i`, shape ``(..., queries)``."""
        natural = self.expect(natural)
        scale, (right, left) = self.scale.to(natural), self._sides(natural)
        # E|x| = (right^2 + left^2) / (right + left), and right + left = 2 right left / scale.
        return -(torch.log(2 * scale) + (right / left + left / right) / 2).sum(-1)

    def contains(self, natural: Tensor) -> Tensor:
        return (self.scale.to(natural) * natural.abs() < 1).all(-1)

    def _draw(self, natural: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
        right, left = self._sides(self.expect(natural))
        first, second = (torch.empty_like(side.expand(count, *side.shape)) for side in (right, left))
        first.exponential_(generator=generator)
        second.exponential_(generator=generator)
        return right * first - left * second

    def _sides(self, natural: Tensor) -> tuple[Tensor, Tensor]:
        """Means of the positive and of the negative exponential part."""
        scale = self.scale.to(natural)
        return scale / (1 - scale * natural), scale / (1 + scale * natural)


def as_coordinates(**parameters: Any) -> list[Tensor]:
    """Positive parameters, one entry per coordinate, broadcast to one common shape ``(dim,)``."""
    tensors = [as_parameter(value, name, positive=True) for name, value in parameters.items()]
    shapes = [tuple(tensor.shape) for tensor in tensors]
    lengths = {tensor.numel() for tensor in tensors} - {1}
    if any(len(shape) > 1 for shape in shapes) or len(lengths) > 1 or 0 in lengths:
        raise UserError(
            f"{' and '.join(parameters)} must be numbers or tensors of one shape (dim,),"
            f" got {' and '.join(map(str, shapes))}; one measure holds one parameter per coordinate"
        )
    return [tensor.expand(max(lengths, default=1)) for tensor in tensors]


def _orthant_support(direction: Tensor) -> Tensor:
    return torch.full_like(direction[..., 0], torch.inf).masked_fill((direction <= 0).all(-1), 0.0)
