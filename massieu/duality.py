"""From means back to natural parameters, and what the convex dual of the log normalizer gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from massieu.measures import Measure
from massieu.measures.measure import gradient

__all__ = ["Inversion", "Proximal", "bregman", "conjugate", "natural_from_mean", "natural_gradient", "prox"]

# A line search ends when the slope along the step has fallen below this share of its first value.
SLOPE_LEFT = 0.25
LINE_TRIALS = 40
# Corrections of a Newton step that use its Fisher matrix again: each costs a mean map, and they halve the steps.
CHORDS = 6
CHORD_GAIN = 0.95  # as long as each makes the next one shorter


@dataclass(frozen=True)
class Inversion:
    """How :func:`natural_from_mean` ended, for each mean; tensors have shape ``(..., queries)``."""

    natural: Tensor
    """The natural parameters found, ``(..., queries, dim)``."""
    converged: Tensor
    """Whether the last Newton step was below the tolerance."""
    residual: Tensor
    """Distance of the mean at ``natural`` from the mean asked for."""
    steps: Tensor
    """Newton steps taken, int64."""
    boundary: Tensor
    """The mean lies on the boundary of the hull, where ``natural`` diverges; the residual says how close it came."""
    outside: Tensor
    """A direction was found that separates the mean from the hull: no natural parameter has it."""
    unique: bool
    """False when the support spans fewer than dim directions; ``natural`` is then the solution of least norm."""

    @property
    def message(self) -> str:
        """What happened, in words."""
        total = self.converged.numel()
        parts = [f"{int(self.converged.sum())} of {total} converged in at most {int(self.steps.max())} steps"]
        if bool(self.outside.any()):
            first = tuple(self.outside.nonzero()[0].tolist())
            parts.append(
                f"means must lie in the convex hull of the support, got {int(self.outside.sum())} outside it,"
                f" the first at index {first}; project them onto the hull"
            )
        if bool(self.boundary.any()):
            parts.append(
                f"{int(self.boundary.sum())} means lie on the boundary of the hull, where natural is infinite;"
                " move them inwards for a finite one"
            )
        left = int((~(self.converged | self.boundary | self.outside)).sum())
        if left:
            parts.append(f"{left} did not settle within max_steps and {self.natural.dtype}; use more steps or float64")
        if not self.unique:
            parts.append("the support does not span the space, so natural is the solution of least norm")
        return "; ".join(parts)


class Proximal(NamedTuple):
    """How :func:`prox` ended; all but ``natural`` have shape ``(..., queries)``."""

    natural: Tensor
    log_determinant: Tensor
    r""":math:`\log\det(I + s \nabla^2 G)` at ``natural``: log volume by which residual attention expands there."""
    converged: Tensor
    residual: Tensor
    steps: Tensor


def natural_from_mean(
    measure: Measure, mean: Tensor, *, tolerance: float | None = None, max_steps: int = 50
) -> Inversion:
    r"""The natural parameter whose member of the family has the given mean: :math:`\eta = (\nabla G)^{-1}(\bar x)`.

    Damped Newton steps on the convex :math:`G(\eta) - \eta \cdot \bar x`, started at zero and confined to the
    directions of the affine span of the support, so that the solution of least norm is found where many exist.

    Args:
        measure: the family.
        mean: :math:`\bar x`, shape ``(..., queries, dim)``.
        tolerance: length of a Newton step, relative to one plus that of ``natural``, that counts as converged;
            taken from the dtype by default.
        max_steps: Newton steps at most.

    Returns:
        An :class:`Inversion`: the solution, and whether each mean was reached, on the boundary or outside the hull.

    Source:
        "A Probabilistic Interpretation of Transformers", eq. 6: the supremum is attained only for means in the
        relative interior of the convex hull of the support.

    Example:
        >>> from massieu import Hypercube
        >>> natural_from_mean(Hypercube(1), torch.tensor([[0.5]], dtype=torch.float64)).natural
        tensor([[0.5493]], dtype=torch.float64)
    """
    target = _checked_point(measure, mean, "mean")
    span = measure.affine_span().to(target)
    start = torch.zeros_like(target)
    origin = measure.mean(start)
    off = target - origin
    off = off - torch.einsum("...de,...e->...d", span, off)
    scale = target.norm(dim=-1) + origin.norm(dim=-1)
    astray = off.norm(dim=-1) > torch.finfo(target.dtype).eps ** 0.5 * scale
    found = _newton(measure, target, span=span, tolerance=tolerance, max_steps=max_steps, hopeless=astray)
    residual = (measure.mean(found.natural) - target).norm(dim=-1)
    rank = torch.linalg.matrix_rank(span)
    return Inversion(
        found.natural,
        found.converged & ~astray,
        residual,
        found.steps,
        found.boundary & ~astray,
        found.outside | astray,
        bool((rank == measure.dim).all()),
    )


def conjugate(measure: Measure, mean: Tensor) -> Tensor:
    r"""The convex dual :math:`G^*(\bar x) = \sup_\eta (\eta \cdot \bar x - G(\eta))`, shape ``(..., queries)``.

    Infinite outside the hull of the support; on its boundary, the value reached by :func:`natural_from_mean`.

    Example:
        >>> from massieu import Gaussian
        >>> conjugate(Gaussian(torch.zeros(1), torch.eye(1)), torch.tensor([[3.0]]))
        tensor([4.5000])
    """
    found = natural_from_mean(measure, mean)
    value = (found.natural * mean).sum(-1) - measure.log_normalizer(found.natural)
    return value.masked_fill(found.outside, torch.inf)


def bregman(potential: Measure | Callable[[Tensor], Tensor], first: Tensor, second: Tensor) -> Tensor:
    r"""Bregman divergence :math:`B_F(a, b) = F(a) - F(b) - \nabla F(b) \cdot (a - b)`, shape ``(..., queries)``.

    For a log normalizer, :math:`B_G(\eta_1, \eta_2) = KL(p_{\eta_2} \| p_{\eta_1})`, and for its dual
    :math:`B_{G^*}(m_1, m_2) = KL(p_{\eta_1} \| p_{\eta_2})`.

    Args:
        potential: F, a measure (for its log normalizer) or a function of ``(..., queries, dim)``.
        first: a, where the potential is evaluated, shape ``(..., queries, dim)``.
        second: b, where it is linearised, same shape.

    Source:
        "A Probabilistic Interpretation of Transformers", section 3.2, which prints the divergence for
        :math:`B_G` with its arguments exchanged.

    Example:
        >>> bregman(lambda x: x.square().sum(-1), torch.tensor([[3.0]]), torch.tensor([[1.0]]))
        tensor([4.])
    """
    function: Callable[[Tensor], Tensor]
    if isinstance(potential, Measure):
        function, slope = potential.log_normalizer, potential.mean(second)
    else:
        function, slope = potential, gradient(potential, second)
    return function(first) - function(second) - (slope * (first - second)).sum(-1)


def natural_gradient(measure: Measure, natural: Tensor) -> Tensor:
    r"""Natural gradient of the log normalizer, :math:`(\nabla^2 G)^{+} \nabla G`, shape ``(..., queries, dim)``.

    Its flow moves the mean as :math:`\dot m = m`: it grows by the factor e per unit of time, until it meets the
    boundary of the hull.

    Example:
        >>> from massieu import Gaussian
        >>> natural_gradient(Gaussian(torch.zeros(2), torch.eye(2)), torch.tensor([[1.0, 2.0]]))
        tensor([[1., 2.]])
    """
    return _Metric(measure.fisher(natural), measure.affine_span().to(natural)).solve(measure.mean(natural))


def prox(
    measure: Measure, point: Tensor, step: float = 1.0, *, tolerance: float | None = None, max_steps: int = 50
) -> Proximal:
    r"""The exact inverse of residual attention with given keys: the solution of :math:`\eta + s\, m(\eta) = y`.

    Since G is convex, :math:`\eta \mapsto \eta + s \nabla G(\eta)` is one-to-one for every s > 0 and its inverse is
    :math:`\mathrm{prox}_{sG}`, which never increases a distance.

    Args:
        measure: keys, or any other measure.
        point: y, shape ``(..., queries, dim)``.
        step: s, positive.
        tolerance: as in :func:`natural_from_mean`.
        max_steps: Newton steps at most.

    Source:
        Makes the link to monotone operators in section 2.3 of "A Probabilistic Interpretation of Transformers"
        constructive.

    Example:
        >>> from massieu import Gaussian
        >>> prox(Gaussian(torch.zeros(1), torch.eye(1)), torch.tensor([[3.0]]), step=2.0).natural
        tensor([[1.]])
    """
    if not step > 0:
        raise ValueError(f"step must be positive, got {step}; a step of zero is the identity")
    point = _checked_point(measure, point, "point")
    found = _newton(measure, point, weight=step, ridge=1.0, tolerance=tolerance, max_steps=max_steps)
    natural = found.natural
    residual = (natural + step * measure.mean(natural) - point).norm(dim=-1)
    jacobian = step * measure.fisher(natural) + torch.eye(measure.dim).to(natural)
    log_determinant = 2 * torch.linalg.cholesky(jacobian).diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return Proximal(natural, log_determinant, found.converged, residual, found.steps)


class _Found(NamedTuple):
    natural: Tensor
    converged: Tensor
    steps: Tensor
    boundary: Tensor
    outside: Tensor


def _newton(
    measure: Measure,
    target: Tensor,
    *,
    weight: float = 1.0,
    ridge: float = 0.0,
    span: Tensor | None = None,
    tolerance: float | None,
    max_steps: int,
    hopeless: Tensor | None = None,
) -> _Found:
    r"""Minimise :math:`w G(\eta) + \tfrac{r}{2} \|\eta\|^2 - \eta \cdot target` for every query at once."""
    tolerance = torch.finfo(target.dtype).eps ** 0.6 if tolerance is None else tolerance
    identity = torch.eye(measure.dim).to(target)
    span = identity if span is None else span

    def descent(natural: Tensor) -> Tensor:
        return target - weight * measure.mean(natural) - ridge * natural

    natural = torch.zeros_like(target)
    no = torch.zeros_like(target[..., 0], dtype=torch.bool)
    active = ~no if hopeless is None else ~hopeless
    converged, boundary, outside, stalled, steps = no.clone(), no.clone(), no.clone(), no, no.long()
    rounding = 2 * torch.finfo(target.dtype).eps * (target.norm(dim=-1) + measure.mean(natural).norm(dim=-1))
    with torch.no_grad():
        for _ in range(max_steps):
            slope = descent(natural)
            metric = _Metric(weight * measure.fisher(natural) + ridge * identity, span)
            direction = metric.solve(slope)
            if ridge == 0:
                flattest = metric.flattest
                on, off = _meets_boundary(measure, target, (natural, flattest, -flattest, direction))
                boundary |= active & on
                outside |= active & off
                active &= ~off
            small = direction.norm(dim=-1) <= tolerance * (1 + natural.norm(dim=-1))
            length = _line_search(measure, descent, natural, direction, slope, active)
            moved = _chords(measure, descent, metric, natural + length[..., None] * direction)
            natural = torch.where(active[..., None], moved, natural)
            steps += active
            converged |= active & small
            # A residual of rounding size twice in a row: the mean is too close to the boundary to gain more.
            exhausted = slope.norm(dim=-1) <= rounding
            active &= ~small & ~(exhausted & stalled)
            stalled = exhausted
            if not bool(active.any()):
                break
    return _Found(natural, converged & ~boundary, steps, boundary & ~outside, outside)


class _Metric:
    """A positive semidefinite matrix on the span: solves with it, and knows where it is flattest."""

    def __init__(self, matrix: Tensor, span: Tensor) -> None:
        largest = matrix.diagonal(dim1=-2, dim2=-1).amax(-1)[..., None, None]
        self.scale = largest.clamp(min=torch.finfo(matrix.dtype).tiny)
        self.span = span
        # Directions off the span get a curvature above all others: they stay out of solutions and are never flattest.
        off = torch.eye(matrix.shape[-1]).to(matrix) - span
        curvature, self.axes = torch.linalg.eigh(span @ (matrix / self.scale) @ span + (1 + matrix.shape[-1]) * off)
        self.curvature = curvature.clamp(min=torch.finfo(matrix.dtype).eps * curvature[..., -1:])

    @property
    def flattest(self) -> Tensor:
        axes: Tensor = self.axes
        return axes[..., 0]

    def solve(self, vector: Tensor) -> Tensor:
        """Solution of least norm."""
        vector = torch.einsum("...de,...e->...d", self.span, vector)
        inner = torch.einsum("...de,...d->...e", self.axes, vector) / self.curvature
        return torch.einsum("...de,...e->...d", self.axes, inner) / self.scale[..., 0]


def _meets_boundary(measure: Measure, mean: Tensor, directions: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Whether one of the directions shows the mean on the boundary of the hull, or outside of it.

    The hull lies below its support function, so that the distance of the mean from the boundary is at most the gap.
    """
    on = off = torch.zeros_like(mean[..., 0], dtype=torch.bool)
    rounding = 64 * torch.finfo(mean.dtype).eps
    for direction in directions:
        length = direction.norm(dim=-1)
        reach, height = measure.support_function(direction), (direction * mean).sum(-1)
        slack = rounding * (height.abs() + length * mean.norm(dim=-1))
        known = (length > 0) & torch.isfinite(reach)
        off = off | (known & (reach - height < -slack))
        on = on | (known & ((reach - height).abs() <= slack))
    return on & ~off, off


def _line_search(
    measure: Measure,
    descent: Callable[[Tensor], Tensor],
    natural: Tensor,
    direction: Tensor,
    slope: Tensor,
    active: Tensor,
) -> Tensor:
    """Step length that lets the slope along the direction fall, stays in the natural domain and may exceed one."""
    first = (direction * slope).sum(-1)
    low, high = torch.zeros_like(first), torch.full_like(first, torch.inf)
    length = torch.ones_like(first)
    open_ = active & (first > 0)
    for _ in range(LINE_TRIALS):
        trial = natural + length[..., None] * direction
        inside = measure.contains(trial)
        left = (direction * descent(torch.where(inside[..., None], trial, natural))).sum(-1)
        over = ~inside | ~torch.isfinite(left) | (left < 0)
        good = inside & torch.isfinite(left) & (left.abs() <= SLOPE_LEFT * first)
        open_ = open_ & ~good
        if not bool(open_.any()):
            break
        high = torch.where(open_ & over, length, high)
        low = torch.where(open_ & ~over, length, low)
        length = torch.where(open_, torch.where(torch.isinf(high), 2 * length, 0.5 * (low + high)), length)
    # Where the search ran out, the lower end is still a descent.
    return torch.where(open_, low, length)


def _chords(measure: Measure, descent: Callable[[Tensor], Tensor], metric: _Metric, natural: Tensor) -> Tensor:
    """Further steps with the Fisher matrix of the last one, as long as they get shorter."""
    direction = metric.solve(descent(natural))
    for _ in range(CHORDS):
        inside = measure.contains(natural + direction)
        trial = torch.where(inside[..., None], natural + direction, natural)
        following = metric.solve(descent(trial))
        better = following.norm(dim=-1) <= CHORD_GAIN * direction.norm(dim=-1)
        keep = (inside & better)[..., None]
        if not bool(keep.any()):
            break
        natural, direction = torch.where(keep, trial, natural), torch.where(keep, following, direction)
    return natural


def _checked_point(measure: Measure, point: Tensor, name: str) -> Tensor:
    point = measure.vectors(point, name)
    if not bool(torch.isfinite(point).all()):
        raise ValueError(f"{name} must be finite, got nan or infinity; remove those rows")
    return point
