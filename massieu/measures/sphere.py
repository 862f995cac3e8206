"""Measures on the sphere, the ball and the box, with one radial function of Bessel type."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from massieu.checks import UserError, check_count
from massieu.measures.bessel import Radial, radial
from massieu.measures.measure import Measure, as_parameter

__all__ = ["Ball", "Box", "Sphere"]


class Sphere(Measure):
    r"""Surface measure of the unit sphere in :math:`\mathbb R^D`: attention over normalized keys.

    .. math:: G(\eta) = \tfrac D2 \log 2\pi + \log \frac{I_\nu(\kappa)}{\kappa^\nu}, \qquad
              m(\eta) = \frac{I_{\nu+1}(\kappa)}{I_\nu(\kappa)} \frac{\eta}{\kappa}, \qquad
              \kappa = \|\eta\|, \quad \nu = \tfrac D2 - 1

    Its members are the von Mises-Fisher distributions. The measure is rotation invariant, so the mean is
    parallel to :math:`\eta`.

    Args:
        dim: :math:`D`, the dimension of the space around the sphere, at least 2.

    Source:
        Mardia and Jupp, Directional Statistics, 2000, section 9.3; there h is the uniform probability.

    Example:
        >>> Sphere(3).mean(torch.tensor([[0.0, 0.0, 1.0]]))  # coth(1) - 1
        tensor([[0.0000, 0.0000, 0.3130]])
    """

    reference = "surface"

    def __init__(self, dim: int) -> None:
        self.dim = check_count(dim, "dim", least=2)

    def log_normalizer(self, natural: Tensor) -> Tensor:
        natural = self.expect(natural)
        value = self.profile(natural.double()).value + self.dim / 2 * math.log(2 * math.pi)
        return value.to(natural.dtype)

    def mean(self, natural: Tensor) -> Tensor:
        natural = self.expect(natural)
        eta = natural.double()
        return (eta * self.profile(eta).slope[..., None]).to(natural.dtype)

    def fisher(self, natural: Tensor) -> Tensor:
        r""":math:`\tfrac A\kappa (1 - u u^\top) + A' u u^\top`, :math:`u = \eta / \kappa`; one matrix per query."""
        natural = self.expect(natural)
        eta = natural.double()
        _, slope, curvature = self.profile(eta)
        square = eta.square().sum(-1, keepdim=True)
        # At the origin slope and curvature agree, and u is arbitrary: zero keeps the gradient finite.
        unit = eta / square.where(square > 0, 1.0).sqrt()
        along = unit[..., :, None] * unit[..., None, :]
        across = torch.eye(self.dim).to(eta) - along
        return (slope[..., None, None] * across + curvature[..., None, None] * along).to(natural.dtype)

    def support_function(self, direction: Tensor) -> Tensor:
        r""":math:`\|u\|`, shape ``(..., queries)``."""
        length: Tensor = torch.linalg.vector_norm(self.expect(direction), dim=-1)
        return length

    @torch.no_grad()
    def _draw(self, natural: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
        r"""Exact draws :math:`x = w u + \sqrt{1 - w^2}\, \tau`, shape ``(count, ..., queries, dim)``.

        The cosine :math:`w` comes from :func:`cosine_gap`, :math:`\tau` is uniform on the unit sphere
        orthogonal to :math:`u = \eta/\kappa`.
        """
        natural = self.expect(natural)
        eta = natural.double()
        kappa = torch.linalg.vector_norm(eta, dim=-1, keepdim=True)
        pole = torch.eye(self.dim)[0].to(eta)
        unit = torch.where(kappa > 0, eta / kappa, pole)
        gap = cosine_gap(kappa.expand(count, *kappa.shape), self.dim, generator)
        noise = torch.randn(count, *eta.shape, dtype=eta.dtype, device=eta.device, generator=generator)
        tangent = normalize(noise - (noise * unit).sum(-1, keepdim=True) * unit, dim=-1)
        return ((1 - gap) * unit + (gap * (2 - gap)).sqrt() * tangent).to(natural.dtype)

    def profile(self, eta: Tensor) -> Radial:
        """Radial function of this sphere at the length of each natural parameter."""
        return radial(self.dim / 2 - 1, eta.square().sum(-1))


class Ball(Measure):
    r"""Lebesgue measure on the ball of radius :math:`R` in :math:`\mathbb R^D`.

    .. math:: G(\eta) = \tfrac D2 \log 2\pi + D \log R + \log \frac{I_{D/2}(R\kappa)}{(R\kappa)^{D/2}}, \qquad
              \kappa = \|\eta\|

    The projection of a sphere: the surface measure of the unit sphere in :math:`\mathbb R^{D+2}`, without its last two
    coordinates, is :math:`2\pi` times Lebesgue measure on the unit ball.

    Args:
        dim: :math:`D`, at least 1.
        radius: :math:`R`, a positive number.

    Source:
        Archimedes, On the Sphere and Cylinder, for :math:`D = 1`.

    Example:
        >>> Ball(2).log_normalizer(torch.zeros(1, 2)).exp()  # the area of the disc
        tensor([3.1416])
    """

    reference = "lebesgue"

    def __init__(self, dim: int, radius: float | Tensor = 1.0) -> None:
        self.dim = check_count(dim, "dim")
        self.radius = as_parameter(radius, "radius", positive=True)
        if self.radius.dim():
            raise UserError(
                f"radius of Ball must be one number, got shape {tuple(self.radius.shape)}; for one per axis use Box"
            )
        self.sphere = Sphere(dim + 2)

    def log_normalizer(self, natural: Tensor) -> Tensor:
        r""":math:`G(\eta) = G_{sphere}(R\eta, 0, 0) + D \log R - \log 2\pi`, shape ``(..., queries)``."""
        eta, radius = self.lift(natural)
        constant = self.dim * radius.log() - math.log(2 * math.pi)
        return (self.sphere.log_normalizer(eta) + constant).to(natural.dtype)

    def mean(self, natural: Tensor) -> Tensor:
        r""":math:`m(\eta) = R\, m_{sphere}(R\eta, 0, 0)` in the first D coordinates, ``(..., queries, dim)``."""
        eta, radius = self.lift(natural)
        return (radius * self.sphere.mean(eta)[..., :-2]).to(natural.dtype)

    def fisher(self, natural: Tensor) -> Tensor:
        r""":math:`R^2 \nabla^2 G_{sphere}(R\eta, 0, 0)` in the first D coordinates, ``(..., queries, dim, dim)``."""
        eta, radius = self.lift(natural)
        return (radius**2 * self.sphere.fisher(eta)[..., :-2, :-2]).to(natural.dtype)

    def support_function(self, direction: Tensor) -> Tensor:
        r""":math:`R \|u\|`, shape ``(..., queries)``."""
        length: Tensor = torch.linalg.vector_norm(self.expect(direction), dim=-1)
        return self.radius.to(direction) * length

    @torch.no_grad()
    def _draw(self, natural: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
        """Exact draws: those of the sphere without their last two coordinates, ``(count, ..., queries, dim)``."""
        eta, radius = self.lift(natural)
        return (radius * self.sphere.sample(eta, count, generator)[..., :-2]).to(natural.dtype)

    def lift(self, natural: Tensor) -> tuple[Tensor, Tensor]:
        r""":math:`(R\eta, 0, 0)`, the natural parameter on the sphere, and the radius, both in float64."""
        eta = self.expect(natural).double()
        radius = self.radius.to(eta)
        return pad(radius * eta, (0, 2)), radius


class Box(Measure):
    r"""Lebesgue measure on the box :math:`\prod_i [-a_i, a_i]`: bounded keys with independent coordinates.

    .. math:: G(\eta) = \sum_i \log \frac{2 \sinh a_i \eta_i}{\eta_i}, \qquad
              m_i(\eta) = a_i \coth a_i \eta_i - \frac 1{\eta_i}

    Each axis is a ball of dimension one: the radial function has order one half and is smooth at zero.

    Args:
        dim: dimension of the box, at least 1.
        half_width: :math:`a`, positive, one number or shape ``(dim,)``.

    Source:
        Langevin 1905 for the mean of one axis.

    Example:
        >>> Box(2, half_width=3.0).mean(torch.tensor([[0.0, 1.0]]))  # 0 and 3 coth(3) - 1
        tensor([[0.0000, 2.0149]])
    """

    reference = "lebesgue"

    def __init__(self, dim: int, half_width: float | Tensor = 1.0) -> None:
        self.dim = check_count(dim, "dim")
        self.half_width = as_parameter(half_width, "half_width", positive=True)
        if self.half_width.shape not in ((), (dim,)):
            raise UserError(
                f"half_width of Box must be one number or have shape ({dim},), got {tuple(self.half_width.shape)};"
                " pass one entry per axis"
            )

    def log_normalizer(self, natural: Tensor) -> Tensor:
        eta, width = self.scale(natural)
        axes = radial(0.5, (width * eta).square()).value + width.log() + math.log(2 * math.pi) / 2
        return axes.sum(-1).to(natural.dtype)

    def mean(self, natural: Tensor) -> Tensor:
        eta, width = self.scale(natural)
        return (width**2 * eta * radial(0.5, (width * eta).square()).slope).to(natural.dtype)

    def fisher(self, natural: Tensor) -> Tensor:
        r"""Diagonal, :math:`\eta_i^{-2} - a_i^2 / \sinh^2 (a_i \eta_i)`, shape ``(..., queries, dim, dim)``."""
        eta, width = self.scale(natural)
        variance = width**2 * radial(0.5, (width * eta).square()).curvature
        return torch.diag_embed(variance).to(natural.dtype)

    def support_function(self, direction: Tensor) -> Tensor:
        r""":math:`\sum_i a_i |u_i|`, shape ``(..., queries)``."""
        return (self.half_width.to(direction) * self.expect(direction).abs()).sum(-1)

    @torch.no_grad()
    def _draw(self, natural: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
        """Exact draws, each axis by its inverse distribution function, ``(count, ..., queries, dim)``."""
        eta, width = self.scale(natural)
        uniform = torch.rand(count, *eta.shape, dtype=eta.dtype, device=eta.device, generator=generator)
        # Distance from the favored face, as a share of the edge: exponential, cut off at one.
        rate = 2 * width * eta.abs()
        share = torch.where(rate > 0, -torch.log1p(uniform * torch.expm1(-rate)) / rate, uniform)
        draws = width * (1 - 2 * share)
        return torch.where(eta < 0, -draws, draws).to(natural.dtype)

    def scale(self, natural: Tensor) -> tuple[Tensor, Tensor]:
        """Natural parameter and half widths in float64."""
        eta = self.expect(natural).double()
        return eta, self.half_width.to(eta)


def cosine_gap(kappa: Tensor, dim: int, generator: torch.Generator | None) -> Tensor:
    r"""Draw :math:`1 - w`, where :math:`w = \cos(x, \eta)` under von Mises-Fisher, of the shape of ``kappa``.

    .. math:: p(w) \propto e^{\kappa w} (1 - w^2)^{(D-3)/2}

    Source:
        Ulrich 1984 with the correction of Wood 1994. They draw the cosine; its distance from one keeps its digits for
        large :math:`\kappa`.
    """
    half = (dim - 1) / 2
    shape, flat = kappa.shape, kappa.flatten()
    squeeze = half / (flat + (flat.square() + half**2).sqrt())
    peak = 2 * squeeze / (1 + squeeze)  # where density over proposal is largest
    result = torch.empty_like(flat)
    pending = torch.arange(len(flat), device=flat.device)
    while len(pending):
        k, b, top = flat[pending], squeeze[pending], peak[pending]
        left, right = (torch._standard_gamma(torch.full_like(k, half), generator=generator) for _ in range(2))
        # left / (left + right) is the beta variable of the paper.
        gap = 2 * b * left / (right + b * left)
        log_ratio = k * (top - gap) + 2 * half * ((top + (1 - top) * gap) / (top * (2 - top))).log()
        uniform = torch.rand(len(k), dtype=k.dtype, device=k.device, generator=generator)
        accepted = ~(uniform.log() > log_ratio)  # so that nan ends the loop
        result[pending[accepted]] = gap[accepted]
        pending = pending[~accepted]
    return result.reshape(shape)
