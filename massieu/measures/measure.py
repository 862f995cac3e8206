"""Intrinsic measures: a log normalizer and all that follows from it."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from massieu.checks import UserError, check_count, check_floating
from massieu.kernels.rows import check_log_weight

__all__ = [
    "Measure",
    "as_integer",
    "as_log_weight",
    "as_parameter",
    "check_pair",
    "common_batch",
    "gradient",
    "row_space",
]

# Fisher matrices for a divergence without a closed form; half as many tell how well it is known.
NODES = 12


class Measure(abc.ABC):
    r"""Intrinsic measure :math:`h` of an exponential family; abstract.

    .. math:: p_\eta(dx) = e^{x \cdot \eta - G(\eta)}\, h(dx), \qquad
              G(\eta) = \log Z(\eta) = \log \int e^{x \cdot \eta}\, h(dx)

    A new measure defines :attr:`dim` and :meth:`log_normalizer`; the mean map is its gradient and the Fisher matrix its
    Hessian. Where Z is not finite everywhere it also defines :meth:`contains`, the same in words as :attr:`domain` and,
    if zero lies outside, an interior point as :attr:`start`. Methods take ``natural`` of shape ``(..., queries, dim)``,
    compute in its dtype, and return one value, vector or matrix per query.

    Source:
        "A Probabilistic Interpretation of Transformers", eq. 1 to 6. Three of its statements are corrected
        here: :math:`\nabla^2 G` is the *centered* second moment, :math:`G^* = -H - E[\log h]` (the printed
        parenthesis changes the sign of the last term), and the Bregman divergence of :math:`G` is the
        Kullback-Leibler divergence with its arguments *exchanged*.

    Example:
        >>> class Geometric(Measure):  # counting measure on 0, 1, 2, ...
        ...     dim = 1
        ...     domain = "natural < 0"
        ...     start = -1.0
        ...     def contains(self, natural):
        ...         return natural[..., 0] < 0
        ...     def log_normalizer(self, natural):
        ...         return -torch.log(-torch.expm1(natural[..., 0]))
        >>> Geometric().mean(torch.tensor([[0.5]]).log())
        tensor([[1.]])
        >>> massieu.natural_from_mean(Geometric(), torch.tensor([[1.0]])).natural.exp()
        tensor([[0.5000]])
    """

    dim: int
    """Dimension of the space of the measure."""

    batch_shape: tuple[int, ...] = ()
    """Leading axes of the parameters, which broadcast against those of ``natural``."""

    reference: str = "intrinsic"
    """Reference measure of :meth:`entropy`: "counting", "lebesgue", "surface", or "intrinsic" (h itself)."""

    domain: str = "all of R^dim"
    """The natural domain in words, for error messages."""

    start: float | Tensor = 0.0
    """An interior point of the natural domain, a number or ``(dim,)``, where searches begin."""

    @abc.abstractmethod
    def log_normalizer(self, natural: Tensor) -> Tensor:
        r""":math:`G(\eta) = \log \int e^{x \cdot \eta} h(dx)`, shape ``(..., queries)``."""

    def mean(self, natural: Tensor) -> Tensor:
        r""":math:`m(\eta) = \nabla G(\eta) = E_{p_\eta}[x]`, shape ``(..., queries, dim)``."""
        return gradient(self._potential, self.expect(natural))

    def fisher(self, natural: Tensor) -> Tensor:
        r""":math:`\nabla^2 G(\eta) = E[x x^\top] - m m^\top`, a covariance, shape ``(..., queries, dim, dim)``."""
        natural = self.expect(natural)

        def coordinate(axis: int) -> Callable[[Tensor], Tensor]:
            return lambda eta: self.mean(eta)[..., axis]

        return torch.stack([gradient(coordinate(axis), natural) for axis in range(self.dim)], dim=-2)

    def conjugate(self, natural: Tensor) -> Tensor:
        r""":math:`G^*(m(\eta)) = \eta \cdot m(\eta) - G(\eta) = KL(p_\eta \| h)`, shape ``(..., queries)``.

        For :math:`G^*` at a given mean see :func:`massieu.duality.conjugate`.
        """
        eta = self.expect(natural).double()  # a difference of large numbers
        return ((eta * self.mean(eta)).sum(-1) - self._potential(eta)).to(natural.dtype)

    def expected_log_density(self, natural: Tensor) -> Tensor:
        r""":math:`E_{p_\eta}[\log h(x)]`, the density of h taken against :attr:`reference`; zero if that is h."""
        return torch.zeros_like(self.expect(natural)[..., 0])

    def entropy(self, natural: Tensor) -> Tensor:
        r""":math:`H(p_\eta) = -G^*(m(\eta)) - E_{p_\eta}[\log h]` against :attr:`reference`, ``(..., queries)``.

        Shannon entropy when the reference is "counting", differential entropy when it is "lebesgue", and
        :math:`-KL(p_\eta \| h)` when it is "intrinsic".
        """
        eta = self.expect(natural).double()
        return (-self.conjugate(eta) - self.expected_log_density(eta)).to(natural.dtype)

    def divergence(self, first: Tensor, second: Tensor) -> Tensor:
        r""":math:`KL(p_{first} \| p_{second})`, shape ``(..., queries)``.

        It equals :math:`B_G(second, first)`: section 3.2 of the paper exchanges the arguments. It is never negative and
        exact for close members: see :meth:`remainder`.
        """
        start, end = self.expect(first).double(), self.expect(second).double()
        check_pair(start, end)
        return self.remainder(start, end - start).to(first.dtype)

    def remainder(self, natural: Tensor, step: Tensor) -> Tensor:
        r""":math:`G(\eta + \delta) - G(\eta) - \delta \cdot m(\eta) = KL(p_\eta \| p_{\eta + \delta})`.

        The difference as written cancels for short steps. Points and most families have a form that does not; others
        use :math:`\int_0^1 (1 - s)\, \delta^\top \nabla^2 G(\eta + s \delta)\, \delta\, ds` where it is more exact.

        Args:
            natural: :math:`\eta`, shape ``(..., queries, dim)``, in float64.
            step: :math:`\delta`, broadcasts to the same shape; :math:`\eta + \delta` lies in the domain too.

        Returns:
            One number per query, shape ``(..., queries)``.

        Example:
            >>> from massieu import Gaussian
            >>> unit = Gaussian(torch.zeros(1), torch.eye(1))
            >>> unit.remainder(torch.ones(1, 1).double(), torch.full((1, 1), 1e-12).double())
            tensor([5.0000e-25], dtype=torch.float64)
        """
        potentials = self._potential(natural + step), self._potential(natural + torch.zeros_like(step))
        linear = (step * self.mean(natural)).sum(-1)
        difference = potentials[0] - potentials[1] - linear
        with torch.no_grad():
            size = potentials[0].abs() + potentials[1].abs() + linear.abs()
            rounding = torch.finfo(size.dtype).eps * size
            fewer = self._integrated_metric(natural, step, NODES // 2)
        integral = self._integrated_metric(natural, step, NODES)
        better = (integral - fewer).abs() <= rounding
        return torch.where(better, integral, difference).clamp(min=0)

    def _integrated_metric(self, natural: Tensor, step: Tensor, nodes: int) -> Tensor:
        """Integral of :meth:`remainder` by the rule of Gauss and Legendre."""
        total = torch.zeros_like((natural + step)[..., 0])
        for place, weight in zip(*np.polynomial.legendre.leggauss(nodes), strict=True):
            s = (1 + float(place)) / 2
            metric = self.fisher(natural + s * step)
            square = (torch.einsum("...d,...de->...e", step, metric) * step).sum(-1)
            total = total + float(weight) / 2 * (1 - s) * square
        return total

    def tilt(self, natural: Tensor) -> Measure:
        r"""Return the probability measure :math:`p_\eta` as an intrinsic measure (Proposition 1b)."""
        from massieu.measures.compose import Tilted

        return Tilted(self, natural)

    def contains(self, natural: Tensor) -> Tensor:
        """True for natural parameters in the natural domain, where Z is finite; ``(..., queries)``."""
        return torch.ones_like(natural[..., 0], dtype=torch.bool)

    def sample(self, natural: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw ``count`` independent points from each member, shape ``(count, ..., queries, dim)``."""
        return self._draw(self.expect(natural), check_count(count, "count", least=0), generator)

    def _draw(self, natural: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
        raise NotImplementedError(
            f"{type(self).__name__} has no exact sampler; expected a measure with one, such as Points or Gaussian"
        )

    def support_function(self, direction: Tensor) -> Tensor:
        r""":math:`\sup \{u \cdot x : x \in \mathrm{supp}\, h\}`, shape ``(..., queries)``; infinite if not known.

        The recession function of G: it separates means outside the hull of the support.
        """
        return torch.full_like(direction[..., 0], torch.inf)

    def affine_span(self, at: Tensor | None = None) -> Tensor:
        """Projector on the directions of the affine span of the support, broadcasts to ``(..., queries, dim, dim)``.

        The identity for a minimal family, whose mean map is one-to-one.

        Args:
            at: natural parameters ``(..., queries, dim)`` inside of the domain, of which the covariance at the first is
                taken; the start of the measure by default.
        """
        if at is None or not at.numel():
            at = self.interior(torch.zeros(1, self.dim, dtype=torch.float64))
        covariance = self.fisher(at[..., :1, :].double())
        # The rank is that of the correlations: coordinates of very different scale are no less independent.
        deviation = covariance.diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt()
        inverse = torch.where(deviation > 0, deviation.reciprocal(), 0.0)
        spread, axes = torch.linalg.eigh(inverse[..., :, None] * covariance * inverse[..., None, :])
        kept = spread > self.dim * torch.finfo(spread.dtype).eps * spread[..., -1:]
        return row_space((deviation[..., :, None] * axes * kept[..., None, :]).mT, kept.sum(-1, keepdim=True))

    def interior(self, like: Tensor, start: float | Tensor | None = None) -> Tensor:
        """Return ``start``, or that of this measure, for each query of a tensor ``(..., queries, dim)``; or raise."""
        own = start is None
        point = torch.as_tensor(self.start if start is None else start).to(like)
        name, remedy = type(self).__name__, f"give {type(self).__name__} a start, a point inside" if own else "move it"
        try:
            point = point.expand(like.shape)
        except RuntimeError:
            raise UserError(
                f"start of {name} must be a number or broadcast to {tuple(like.shape)}, got {tuple(point.shape)};"
                f" one point of shape ({self.dim},) serves all"
            ) from None
        inside = self.contains(point) & torch.isfinite(point).all(-1)
        if not bool(inside.all()):
            raise UserError(f"start of {name} must lie in {self.domain}, got {point[~inside][0].tolist()}; {remedy}")
        finite = torch.isfinite(self._potential(point))
        if not bool(finite.all()):
            raise UserError(
                f"log_normalizer of {name} must be finite at the start of a search, got none at"
                f" {point[~finite][0].tolist()}; where it is not finite everywhere, write contains and domain, and"
                f" {remedy}"
            )
        return point

    def _potential(self, natural: Tensor) -> Tensor:
        """Log normalizer; raise unless it has one value per query."""
        value = self.log_normalizer(natural)
        if value.shape != natural.shape[:-1]:
            raise UserError(
                f"log_normalizer of {type(self).__name__} must map {tuple(natural.shape)} to one value per query,"
                f" {tuple(natural.shape[:-1])}, got {tuple(value.shape)}; sum over the last axis alone, or index it"
            )
        return value

    def vectors(self, tensor: Tensor, name: str) -> Tensor:
        """Return a tensor of shape ``(..., queries, dim)`` expanded to the batch of this measure, or raise."""
        if not isinstance(getattr(self, "dim", None), int):
            got = repr(self.dim) if hasattr(self, "dim") else "none"
            raise UserError(
                f"dim of {type(self).__name__} must be a whole number, got {got};"
                " write dim = 1 (or the length of natural) in the class, or set it in __init__"
            )
        check_floating(tensor, name)
        if tensor.dim() < 2 or tensor.shape[-1] != self.dim:
            raise UserError(
                f"{name} of {type(self).__name__} must have shape (..., queries, {self.dim}),"
                f" got {tuple(tensor.shape)};"
                + (f" for a single vector pass {name}[None]" if tensor.dim() == 1 else " check its last axis")
            )
        try:
            batch = np.broadcast_shapes(tensor.shape[:-2], self.batch_shape)
        except ValueError:
            raise UserError(
                f"{name} must have leading axes that broadcast against {self.batch_shape} of {type(self).__name__},"
                f" got {tuple(tensor.shape[:-2])}; insert axes of size 1 where they should broadcast"
            ) from None
        return tensor.expand(*batch, *tensor.shape[-2:])

    def expect(self, natural: Tensor) -> Tensor:
        """Return ``natural`` as :meth:`vectors`, or raise unless all of it lies in the natural domain."""
        natural = self.vectors(natural, "natural")
        inside = self.contains(natural)
        if not bool(inside.all()):
            raise UserError(
                f"natural of {type(self).__name__} must lie in {self.domain}, got {natural[~inside][0].tolist()};"
                " elsewhere the normalizer is infinite; check with contains(natural)"
            )
        return natural

    def __repr__(self) -> str:
        return f"{type(self).__name__}(dim={getattr(self, 'dim', '?')})"


def gradient(function: Callable[[Tensor], Tensor], point: Tensor) -> Tensor:
    """Gradient of a function from ``(..., queries, dim)`` to ``(..., queries)``, each query on its own."""
    # A graph of the gradient is kept only if the point or the parameters of the function require gradients.
    keep = torch.is_grad_enabled() and (point.requires_grad or function(point.detach()).requires_grad)
    with torch.enable_grad():
        leaf = point if point.requires_grad else point.detach().requires_grad_()
        value = function(leaf).sum()
        if not value.requires_grad:
            return torch.zeros_like(point)
        (result,) = torch.autograd.grad(value, leaf, create_graph=keep, materialize_grads=True)
    return result


def row_space(matrix: Tensor, rank: Tensor) -> Tensor:
    """Projector on the space of the rows of a matrix ``(..., rows, dim)`` of known rank, ``(..., 1)``."""
    _, _, axes = torch.linalg.svd(matrix, full_matrices=False)
    axes = axes * (torch.arange(axes.shape[-2], device=axes.device) < rank)[..., None]
    projector: Tensor = axes.mT @ axes
    return torch.where((rank == matrix.shape[-1])[..., None], torch.eye(matrix.shape[-1]).to(projector), projector)


def check_pair(first: Tensor, second: Tensor) -> None:
    """Raise unless the shapes of two arguments broadcast."""
    try:
        np.broadcast_shapes(first.shape, second.shape)
    except ValueError:
        raise UserError(
            f"first and second must have shapes that broadcast, got {tuple(first.shape)} and {tuple(second.shape)};"
            " pair every point with one other"
        ) from None


def common_batch(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape to which leading axes broadcast, or raise."""
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError:
        got = " and ".join(str(tuple(shape)) for shape in shapes)
        raise UserError(f"parameters must have leading axes that broadcast, got {got}; insert axes of size 1") from None


def as_parameter(value: Any, name: str, *, positive: bool = False) -> Tensor:
    """Return a finite floating-point parameter tensor; Python numbers become float64."""
    try:
        tensor = value if isinstance(value, Tensor) else torch.as_tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        got = type(value).__name__
        raise UserError(f"{name} must be numbers or a floating-point tensor, got {got}; pass a tensor") from None
    check_floating(tensor, name)
    if not bool(torch.isfinite(tensor).all()):
        bad = tensor[~torch.isfinite(tensor)]
        raise UserError(f"{name} must be finite, got {bad.numel()} entries such as {bad[0].item()}; remove them")
    if positive and not bool((tensor > 0).all()):
        raise UserError(f"{name} must be positive, got {tensor.min().item():.6g}; check its sign and units")
    return tensor


def as_log_weight(value: Any, components: int, *, flat: bool = False) -> Tensor:
    """Return log weights whose last (or, if flat, only) axis is that of the components, one present in each row."""
    check_floating(value, "log_weight", "take the logarithm of the weights")
    check_log_weight(value)
    tensor: Tensor = value
    if tensor.dim() < 1 or (flat and tensor.dim() > 1) or tensor.shape[-1] not in (1, components):
        raise UserError(
            f"log_weight must have {components} entries on its {'only' if flat else 'last'} axis,"
            f" got shape {tuple(tensor.shape)};"
            " give every component its weight"
        )
    if bool(tensor.isneginf().all(-1).any()):
        raise UserError("log_weight must leave one component in each row, got a row of minus infinities; mask less")
    return tensor


def as_integer(value: Any, name: str, *, least: int) -> int:
    """Return an integer of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UserError(f"{name} must be an integer of at least {least}, got {value!r}; pass a Python int")
    return value
