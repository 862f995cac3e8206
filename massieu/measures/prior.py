"""Conjugate priors over natural parameters as intrinsic measures."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from massieu.checks import UserError, check_choice
from massieu.measures.elementary import as_coordinates
from massieu.measures.measure import Measure, as_parameter

__all__ = ["ConjugatePrior"]

Likelihood = Literal["categorical", "poisson"]


class ConjugatePrior(Measure):
    r"""Conjugate prior of a likelihood with log normalizer :math:`G_0`, a measure on its parameters :math:`\theta`.

    .. math:: h(\theta) = e^{\xi \cdot \theta - \nu G_0(\theta) - A(\xi, \nu)}, \qquad
              G(x) = A(\xi + x, \nu) - A(\xi, \nu)

    The natural parameter of this family is an observed statistic x, and the mean map gives the expected
    :math:`\theta`. For "categorical" :math:`\theta` holds the log odds of the first cells against the last,
    :math:`A = \sum_k \log \Gamma(\xi_k) + \log \Gamma(\nu - \sum_k \xi_k) - \log \Gamma(\nu)`, a Dirichlet seen in
    log odds. For "poisson" it holds log rates, :math:`A = \sum_i \log \Gamma(\xi_i) - \xi_i \log \nu`, the log of a
    Gamma. Tilting by x keeps :math:`\nu`, so it is not Bayes' rule: see :meth:`observe`.

    Args:
        likelihood: "categorical" or "poisson".
        statistic: :math:`\xi`, positive, a number or ``(dim,)``; below ``count`` in sum if categorical.
        count: :math:`\nu`, positive, the number of observations with the weight of the prior.

    Source:
        "A Probabilistic Interpretation of Transformers", section 4; Diaconis and Ylvisaker 1979 for the prior.

    Example:
        >>> beta = ConjugatePrior("categorical", statistic=2.0, count=5.0)
        >>> beta.mean(torch.tensor([[0.0], [1.0]]))
        tensor([[-0.5000],
                [ 0.5000]])
    """

    reference = "lebesgue"

    def __init__(self, likelihood: Likelihood, statistic: float | Tensor, count: float | Tensor) -> None:
        check_choice(likelihood, "likelihood", get_args(Likelihood))
        self.likelihood = likelihood
        (self.statistic,) = as_coordinates(statistic=statistic)
        self.count = as_parameter(count, "count", positive=True)
        self.dim = len(self.statistic)
        self.domain = f"natural > -statistic = {(-self.statistic).tolist()}"
        if self.count.dim() > 0:
            raise UserError(
                f"count must be one number, got shape {tuple(self.count.shape)}; all coordinates are observed together"
            )
        if likelihood == "categorical":
            total = self.statistic.sum()
            if not bool(total < self.count):
                raise UserError(
                    f"count must exceed the sum of statistic, {total.item()}, got {self.count.item()};"
                    " the last cell holds what is left"
                )
            self.domain += f" with sum below count - sum(statistic) = {(self.count - total).item()}"

    def observe(self, observation: float | Tensor) -> ConjugatePrior:
        r"""Return the Bayes posterior :math:`(\xi + x, \nu + 1)` after one observation with statistic x, ``(dim,)``.

        Tilting by x gives :math:`(\xi + x, \nu)` instead, without counting the observation.

        Example:
            >>> prior = ConjugatePrior("poisson", statistic=2.0, count=1.0)
            >>> prior.observe(4.0).mean(torch.zeros(1, 1)), prior.mean(torch.tensor([[4.0]]))
            (tensor([[1.0130]]), tensor([[1.7061]]))
        """
        x = torch.as_tensor(observation).to(self.statistic)
        x = x[None] if x.dim() == 0 else x
        one_draw = x.shape == (self.dim,) and bool((x >= 0).all())
        if not one_draw or (self.likelihood == "categorical" and not bool(x.sum() <= 1)):
            raise UserError(
                f"observation must be the statistic of one {self.likelihood} draw, of shape ({self.dim},),"
                f" got {x.tolist()}; call observe once per draw"
            )
        return ConjugatePrior(self.likelihood, self.statistic + x, self.count + 1)

    def log_normalizer(self, natural: Tensor) -> Tensor:
        natural = self.expect(natural)
        statistic = self.statistic.to(natural)
        return self._log_partition(statistic + natural) - self._log_partition(statistic)

    def mean(self, natural: Tensor) -> Tensor:
        r""":math:`\psi(\xi + x)` less :math:`\psi` of the last cell or :math:`\log \nu`, ``(..., queries, dim)``."""
        tilted = self._tilted(natural)
        if self.likelihood == "poisson":
            return _digamma(tilted) - self.count.to(tilted).log()
        return _digamma(tilted) - _digamma(self._last(tilted))

    def fisher(self, natural: Tensor) -> Tensor:
        r""":math:`\mathrm{diag}\, \psi'(\xi + x)`, if categorical plus :math:`\psi'` of the last cell everywhere."""
        tilted = self._tilted(natural)
        diagonal = torch.diag_embed(_trigamma(tilted))
        return diagonal if self.likelihood == "poisson" else diagonal + _trigamma(self._last(tilted))[..., None]

    def expected_log_density(self, natural: Tensor) -> Tensor:
        r""":math:`\xi \cdot m - \nu E[G_0(\theta)] - A(\xi, \nu)`, shape ``(..., queries)``."""
        tilted = self._tilted(natural)
        statistic, count = self.statistic.to(tilted), self.count.to(tilted)
        if self.likelihood == "poisson":
            energy = tilted.sum(-1)
        else:
            energy = count * (_digamma(count) - _digamma(self._last(tilted)))[..., 0]
        return (statistic * self.mean(natural)).sum(-1) - energy - self._log_partition(statistic)

    def contains(self, natural: Tensor) -> Tensor:
        r"""True where :math:`\xi + x` is positive, that of the last cell of a categorical likelihood too."""
        tilted = self.statistic.to(natural) + natural
        inside = (tilted > 0).all(-1)
        return inside if self.likelihood == "poisson" else inside & (self._last(tilted) > 0)[..., 0]

    def _draw(self, natural: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
        r"""Draws of :math:`\theta`: logs of Gamma variables, shape ``(count, ..., queries, dim)``."""
        tilted = self._tilted(natural)
        draws = _log_gamma_draws(tilted, count, generator)
        if self.likelihood == "poisson":
            return draws - self.count.to(tilted).log()
        return draws - _log_gamma_draws(self._last(tilted), count, generator)

    def _tilted(self, natural: Tensor) -> Tensor:
        natural = self.expect(natural)
        return self.statistic.to(natural) + natural

    def _last(self, statistic: Tensor) -> Tensor:
        """Remainder of ``count`` for the last cell, with a trailing axis of size one."""
        return self.count.to(statistic) - statistic.sum(-1, keepdim=True)

    def _log_partition(self, statistic: Tensor) -> Tensor:
        count = self.count.to(statistic)
        cells = torch.lgamma(statistic).sum(-1)
        if self.likelihood == "poisson":
            return cells - statistic.sum(-1) * count.log()
        return cells + torch.lgamma(self._last(statistic))[..., 0] - torch.lgamma(count)


def _digamma(x: Tensor) -> Tensor:
    # Autograd differentiates torch.digamma to torch.polygamma(1), with a relative error of 5e-10 near one and none
    # for large arguments: psi(x) = psi(x + 16) - sum_{i < 16} 1 / (x + i).
    steps = torch.arange(16).to(x)
    return torch.digamma(x + 16) - (x[..., None] + steps).reciprocal().sum(-1)


def _trigamma(x: Tensor) -> Tensor:
    trigamma: Tensor = torch.special.zeta(2.0, x)
    return trigamma


def _log_gamma_draws(shape: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
    # G(a) = G(a + 1) U^(1/a) in law; for small a the draw itself underflows and its logarithm does not.
    shape = shape.expand(count, *shape.shape)
    uniform = torch.rand(shape.shape, dtype=shape.dtype, device=shape.device, generator=generator)
    return torch._standard_gamma(shape + 1, generator=generator).log() + torch.log1p(-uniform) / shape
