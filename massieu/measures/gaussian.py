"""Gaussian measures and their mixtures: continuous keys."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from massieu.checks import UserError
from massieu.measures.measure import Measure, as_log_weight, as_parameter
from massieu.measures.remainders import mixture_remainder
from massieu.statistics import probabilities

__all__ = ["Gaussian", "GaussianMixture"]


class Gaussian(Measure):
    r"""A normal density, :math:`h = N(\mu, \Sigma)`: its mean map is affine.

    .. math:: G(\eta) = \mu \cdot \eta + \tfrac12 \eta^\top \Sigma \eta, \qquad m(\eta) = \mu + \Sigma \eta

    Args:
        location: :math:`\mu`, shape ``(dim,)``.
        covariance: :math:`\Sigma`, symmetric positive definite, shape ``(dim, dim)``.

    Source:
        "A Probabilistic Interpretation of Transformers", Corollary 1.

    Example:
        >>> Gaussian(torch.ones(2), 2 * torch.eye(2)).mean(torch.tensor([[1.0, 0.0]]))
        tensor([[3., 1.]])
    """

    reference = "lebesgue"

    def __init__(self, location: Tensor, covariance: Tensor) -> None:
        self.location = as_parameter(location, "location")
        if self.location.dim() != 1 or not len(self.location):
            raise UserError(f"location must have shape (dim,), got {tuple(self.location.shape)}; flatten it")
        self.dim = self.location.shape[0]
        self.covariance, self._root = checked_covariance(covariance, (self.dim, self.dim))

    def log_normalizer(self, natural: Tensor) -> Tensor:
        natural = self.expect(natural)
        return natural @ self.location.to(natural) + 0.5 * self._square(natural)

    def mean(self, natural: Tensor) -> Tensor:
        natural = self.expect(natural)
        return self.location.to(natural) + natural @ self.covariance.to(natural)

    def fisher(self, natural: Tensor) -> Tensor:
        natural = self.expect(natural)
        return self.covariance.to(natural).expand(*natural.shape, self.dim)

    def remainder(self, natural: Tensor, step: Tensor) -> Tensor:
        r""":math:`\tfrac12 \delta^\top \Sigma \delta`, the same at any :math:`\eta`."""
        return 0.5 * self._square(step + torch.zeros_like(self.expect(natural)))

    def expected_log_density(self, natural: Tensor) -> Tensor:
        natural = self.expect(natural)
        half_log_det = self._root.diagonal().log().sum().to(natural)
        return -0.5 * (self.dim * (1 + math.log(2 * math.pi)) + self._square(natural)) - half_log_det

    def _draw(self, natural: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
        mean = self.mean(natural)
        noise = torch.randn(count, *mean.shape, dtype=mean.dtype, device=mean.device, generator=generator)
        return mean + noise @ self._root.to(mean).mT

    def _square(self, natural: Tensor) -> Tensor:
        return ((natural @ self.covariance.to(natural)) * natural).sum(-1)


class GaussianMixture(Measure):
    r"""A weighted sum of normal densities, :math:`h = \sum_n w_n N(\mu_n, \Sigma_n)`; exact.

    .. math:: G(\eta) = \log \sum_n w_n e^{g_n(\eta)}, \quad
              g_n(\eta) = \mu_n \cdot \eta + \tfrac12 \eta^\top \Sigma_n \eta, \quad
              m(\eta) = \sum_n r_n (\mu_n + \Sigma_n \eta), \quad r_n \propto w_n e^{g_n(\eta)}

    Args:
        log_weight: :math:`\log w_n`, shape ``(components,)``; the weights need not sum to one.
        locations: :math:`\mu_n`, shape ``(components, dim)``.
        covariances: :math:`\Sigma_n`, shape ``(components, dim, dim)``, or ``(dim, dim)`` shared by all.

    Source:
        "A Probabilistic Interpretation of Transformers", Propositions 2 and 3. In eq. 4 of the appendix the
        ":math:`\nabla_\eta \log`" before the softmax average must go: shared covariances give
        :math:`\Sigma \eta` plus attention over the locations.

    Example:
        >>> mixture = GaussianMixture(torch.zeros(2), torch.tensor([[-1.0], [1.0]]), torch.eye(1))
        >>> mixture.mean(torch.tensor([[0.5]]))
        tensor([[0.9621]])
    """

    def __init__(self, log_weight: Tensor, locations: Tensor, covariances: Tensor) -> None:
        self.locations = as_parameter(locations, "locations")
        if self.locations.dim() != 2:
            raise UserError(
                f"locations must have shape (components, dim), got {tuple(self.locations.shape)}; stack them"
            )
        components, self.dim = self.locations.shape
        self.log_weight = as_log_weight(log_weight, components, flat=True).expand(components)
        covariances, root = checked_covariance(covariances, (components, self.dim, self.dim))
        self.covariances = covariances.expand(components, self.dim, self.dim)
        self._roots = root.expand_as(self.covariances)

    def log_normalizer(self, natural: Tensor) -> Tensor:
        return torch.logsumexp(self.log_weight.to(natural) + self._exponents(natural), -1)

    def mean(self, natural: Tensor) -> Tensor:
        share, means = self._components(natural)
        return torch.einsum("...qn,...qnd->...qd", share, means)

    def fisher(self, natural: Tensor) -> Tensor:
        share, means = self._components(natural)
        centered = means - torch.einsum("...qn,...qnd->...qd", share, means)[..., None, :]
        within = torch.einsum("...qn,nde->...qde", share, self.covariances.to(natural))
        return within + (share[..., None] * centered).mT @ centered

    def remainder(self, natural: Tensor, step: Tensor) -> Tensor:
        r"""Sum of :math:`\tfrac12 \delta^\top \Sigma_n \delta` within the components and of that between them."""
        _, means = self._components(natural)
        within = 0.5 * torch.einsum("...qd,nde,...qe->...qn", step, self.covariances.to(natural), step)
        log_share = torch.log_softmax(self.log_weight.to(natural) + self._exponents(natural), -1)
        return mixture_remainder(log_share, (means * step[..., None, :]).sum(-1), within)

    def lower_bound(self, natural: Tensor) -> Tensor:
        r"""Jensen's bound of Proposition 3, :math:`\sum_n w_n g_n(\eta) \le G(\eta)`, for weights that sum to one.

        The gap is :math:`KL(w \| r(\eta))`. The source omits the condition on the weights; the bound needs it.
        """
        return self._exponents(natural) @ self._unit_weights(natural)

    def lower_bound_gradient(self, natural: Tensor) -> Tensor:
        r"""Gradient of :meth:`lower_bound`, :math:`\sum_n w_n (\mu_n + \Sigma_n \eta)`: affine, without softmax."""
        weights = self._unit_weights(natural)
        return torch.einsum("n,...qnd->...qd", weights, self._components(natural)[1])

    def _draw(self, natural: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
        share, means = self._components(natural)
        drawn = torch.multinomial(share.flatten(0, -2), count, replacement=True, generator=generator)
        drawn = drawn.reshape(*share.shape[:-1], count)
        location = torch.take_along_dim(means, drawn[..., None], dim=-2)
        noise = torch.randn(location.shape, dtype=means.dtype, device=means.device, generator=generator)
        spread = torch.einsum("...de,...e->...d", self._roots.to(means)[drawn], noise)
        return (location + spread).movedim(-2, 0)

    def _exponents(self, natural: Tensor) -> Tensor:
        natural = self.expect(natural)
        square = torch.einsum("...qd,nde,...qe->...qn", natural, self.covariances.to(natural), natural)
        return natural @ self.locations.to(natural).mT + 0.5 * square

    def _components(self, natural: Tensor) -> tuple[Tensor, Tensor]:
        share = probabilities(self._exponents(natural), self.log_weight.to(natural))
        means = self.locations.to(natural) + torch.einsum("nde,...qe->...qnd", self.covariances.to(natural), natural)
        return share, means

    def _unit_weights(self, natural: Tensor) -> Tensor:
        weights = self.log_weight.exp()
        total = float(weights.detach().sum())
        if abs(total - 1) > 64 * torch.finfo(weights.dtype).eps * len(weights):
            raise UserError(
                f"the lower bound needs weights that sum to one, got the sum {total:.6g};"
                " subtract log_weight.logsumexp(0) from log_weight, or use the exact log_normalizer"
            )
        return weights.to(natural)


def checked_covariance(covariance: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return a covariance of the given shape, or of its last two axes, and its Cholesky factor."""
    covariance = as_parameter(covariance, "covariance")
    if covariance.shape not in (torch.Size(shape), torch.Size(shape[-2:])):
        shapes = " or ".join(dict.fromkeys((str(shape), str(shape[-2:]))))
        raise UserError(
            f"covariance must have shape {shapes}, got {tuple(covariance.shape)};"
            " for independent coordinates pass torch.diag(variances)"
        )
    scale = covariance.abs().amax()
    if bool((covariance - covariance.mT).abs().amax() > 1e-6 * scale):
        raise UserError(
            "covariance must be symmetric, got one that is not; use (C + C.mT) / 2 if only rounding differs"
        )
    root, info = torch.linalg.cholesky_ex(covariance)
    if bool((info != 0).any()):
        smallest = float(torch.linalg.eigvalsh(covariance.detach()).min())
        raise UserError(
            f"covariance must be positive definite, got a smallest eigenvalue of {smallest:.3g};"
            " add a small multiple of the identity"
        )
    return covariance, root
