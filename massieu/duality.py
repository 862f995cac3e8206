"""Convex duality of the log normalizer: natural parameters from means, divergences, proximal maps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from massieu.checks import UserError, check_count, check_number
from massieu.measures import Measure
from massieu.measures.measure import check_pair, gradient

__all__ = ["Inversion", "Proximal", "bregman", "conjugate", "natural_from_mean", "natural_gradient", "prox"]

# A line search ends when the slope along the step has fallen below this share of its first value.
SLOPE_LEFT = 0.25
LINE_TRIALS = 40
LONGEST = 1024.0
FARTHEST = 100.0
# Corrections of a Newton step with the same Fisher matrix: each takes a mean map, and they halve the steps.
CHORDS = 6
CHORD_SURE = 0.1


@dataclass(frozen=True, repr=False)
class Inversion:
    """Outcome of :func:`natural_from_mean` for each mean, with a :attr:`message`.

    Attributes:
        natural: natural parameters, ``(..., queries, dim)``; nan where the mean is outside the hull.
        converged: the last Newton step was below the tolerance, and rounding determines ``natural`` and its mean,
            ``(..., queries)``.
        residual: distance of the mean at ``natural`` from the given mean, ``(..., queries)``.
        steps: Newton steps, int64, ``(..., queries)``.
        boundary: the mean lies on the boundary of the hull, where no finite natural parameter has it; ``natural`` has a
            mean at the distance ``residual``, ``(..., queries)``.
        outside: a direction separates the mean from the hull: no natural parameter has it, ``(..., queries)``.
        undecided: not converged, and the measure has no finite support function there to tell whether the mean is
            outside, ``(..., queries)``.
        unique: False when the support spans fewer than dim directions; ``natural`` is then the solution of least norm.
    """

    natural: Tensor
    converged: Tensor
    residual: Tensor
    steps: Tensor
    boundary: Tensor
    outside: Tensor
    undecided: Tensor
    unique: bool

    @property
    def message(self) -> str:
        """Outcome as a sentence."""
        parts = [convergence_message(self.converged, self.steps, "means")]
        if bool(self.outside.any()):
            first = tuple(self.outside.nonzero()[0].tolist())
            parts.append(
                f"means must lie in the convex hull of the support, got {int(self.outside.sum())} outside it,"
                f" the first at index {first}; move them toward the mean at the start of the search, which is inside"
            )
        if bool(self.boundary.any()):
            parts.append(
                f"{int(self.boundary.sum())} on the boundary of the hull, where natural is infinite;"
                " move them inwards for a finite one"
            )
        left = int((~(self.converged | self.boundary | self.outside)).sum())
        if left:
            parts.append(f"{left} did not converge within max_steps, or lie too close to the boundary for the dtype")
        if bool(self.undecided.any()):
            parts.append(
                f"whether {int(self.undecided.sum())} of these lie outside the hull is unknown:"
                " write support_function on the measure"
            )
        if not self.unique:
            parts.append("the support does not span the space, so natural is the solution of least norm")
        return "; ".join(parts)

    def __repr__(self) -> str:
        return f"Inversion({self.message}; natural of shape {tuple(self.natural.shape)})"


class Proximal(NamedTuple):
    r"""Outcome of :func:`prox`.

    Attributes:
        natural: the solution, ``(..., queries, dim)``.
        log_determinant: :math:`\log\det(I + s \nabla^2 G)` at ``natural``, the log volume by which residual attention
            expands there, ``(..., queries)``.
        converged: the last Newton step was below the tolerance, ``(..., queries)``.
        residual: distance of :math:`\eta + s\,m(\eta)` from the point, ``(..., queries)``.
        steps: Newton steps taken, int64, ``(..., queries)``.
    """

    natural: Tensor
    log_determinant: Tensor
    converged: Tensor
    residual: Tensor
    steps: Tensor

    @property
    def message(self) -> str:
        """Outcome as a sentence."""
        return convergence_message(self.converged, self.steps, "points")


def natural_from_mean(
    measure: Measure,
    mean: Tensor,
    *,
    start: float | Tensor | None = None,
    tolerance: float | None = None,
    max_steps: int = 50,
) -> Inversion:
    r"""Natural parameter of the member of a family with the given mean, :math:`\eta = (\nabla G)^{-1}(\bar x)`.

    Damped Newton steps on the convex :math:`G(\eta) - \eta \cdot \bar x`, confined to the directions of the affine span
    of the support, so that from zero the solution of least norm is found where many exist. Lengths are measured in
    standard deviations of the family: scaling the support scales the solution and changes no outcome. Differentiable in
    ``mean`` and in the parameters of the measure, by the implicit function theorem.

    Args:
        measure: the family.
        mean: :math:`\bar x`, shape ``(..., queries, dim)``.
        start: first natural parameter, a number, ``(dim,)`` or the shape of ``mean``; that of the measure by default.
        tolerance: length of a Newton step that counts as converged, both in the largest standard deviations met on the
            way, relative to one plus the length of ``natural`` in these, and in those of the member found.
        max_steps: largest number of Newton steps.

    Source:
        "A Probabilistic Interpretation of Transformers", eq. 6: the supremum is attained only for means in the
        relative interior of the convex hull of the support.

    Example:
        >>> from massieu import Hypercube
        >>> natural_from_mean(Hypercube(1), torch.tensor([[0.5]], dtype=torch.float64)).natural
        tensor([[0.5493]], dtype=torch.float64)
    """
    target, eps = _checked_point(measure, mean, "mean")
    with torch.no_grad():
        begin = measure.interior(target, start)
        span = measure.affine_span(None if start is None else begin).to(target)
        origin = measure.mean(begin)
        off = target - origin
        off = off - torch.einsum("...de,...e->...d", span, off)
        astray = off.norm(dim=-1) > 256 * eps * (target.norm(dim=-1) + origin.norm(dim=-1))
        unique = bool((torch.linalg.matrix_rank(span) == measure.dim).all())
    problem = _Problem(measure, target, begin, 1.0, 0.0, None if unique else span, eps)
    found = _newton(problem, tolerance, max_steps, skip=astray)
    outside = found.outside | astray
    with torch.no_grad():
        residual = (measure.mean(found.natural) - target).norm(dim=-1)
        unknown = measure.support_function(found.natural - begin).isinf()
    return Inversion(
        found.natural.masked_fill(outside[..., None], torch.nan).to(mean.dtype),
        found.converged & ~astray,
        residual.to(mean.dtype),
        found.steps,
        found.boundary & ~astray,
        outside,
        unknown & ~(found.converged | found.boundary | outside),
        unique,
    )


def conjugate(measure: Measure, mean: Tensor) -> Tensor:
    r"""Convex dual :math:`G^*(\bar x) = \sup_\eta (\eta \cdot \bar x - G(\eta))`, shape ``(..., queries)``.

    Infinite outside the hull of the support; on its boundary, the value reached by :func:`natural_from_mean`.

    Example:
        >>> from massieu import Gaussian
        >>> conjugate(Gaussian(torch.zeros(1), torch.eye(1)), torch.tensor([[3.0]]))
        tensor([4.5000])
    """
    found = natural_from_mean(measure, mean.detach())
    inside = measure.interior(found.natural)
    natural = torch.where(found.outside[..., None], inside, found.natural)  # held fixed: it is the gradient
    value = (natural * mean).sum(-1) - measure.log_normalizer(natural)
    return value.masked_fill(found.outside, torch.inf)


def bregman(potential: Measure | Callable[[Tensor], Tensor], first: Tensor, second: Tensor) -> Tensor:
    r"""Bregman divergence :math:`B_F(a, b) = F(a) - F(b) - \nabla F(b) \cdot (a - b)`, shape ``(..., queries)``.

    For a log normalizer, :math:`B_G(\eta_1, \eta_2) = KL(p_{\eta_2} \| p_{\eta_1})`, and for its dual
    :math:`B_{G^*}(m_1, m_2) = KL(p_{\eta_1} \| p_{\eta_2})`.

    For a measure it is :meth:`massieu.Measure.divergence`, which is exact for close points. For a function the
    difference is uncertain by some units of rounding of :math:`|F|`, and for close points it consists of rounding.

    Args:
        potential: F, a measure (for its log normalizer) or a function of ``(..., queries, dim)``.
        first: a, where the potential is evaluated, shape ``(..., queries, dim)``.
        second: b, where it is linearized, same shape.

    Source:
        "A Probabilistic Interpretation of Transformers", section 3.2, which prints the divergence for
        :math:`B_G` with its arguments exchanged.

    Example:
        >>> bregman(lambda x: x.square().sum(-1), torch.tensor([[3.0]]), torch.tensor([[1.0]]))
        tensor([4.])
    """
    check_pair(first, second)
    if isinstance(potential, Measure):
        return potential.divergence(second, first)
    slope = gradient(potential, second)
    return potential(first) - potential(second) - (slope * (first - second)).sum(-1)


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
    r"""Exact inverse of residual attention with given keys: the solution of :math:`\eta + s\, m(\eta) = y`.

    Since G is convex, :math:`\eta \mapsto \eta + s \nabla G(\eta)` is one-to-one for every s > 0 and its inverse is
    :math:`\mathrm{prox}_{sG}`, which never increases a distance.

    Args:
        measure: keys, or any other measure.
        point: y, shape ``(..., queries, dim)``.
        step: s, positive.
        tolerance: as in :func:`natural_from_mean`.
        max_steps: largest number of Newton steps.

    Source:
        Makes the link to monotone operators in section 2.3 of "A Probabilistic Interpretation of Transformers"
        constructive.

    Example:
        >>> from massieu import Gaussian
        >>> prox(Gaussian(torch.zeros(1), torch.eye(1)), torch.tensor([[3.0]]), step=2.0).natural
        tensor([[1.]])
    """
    step = check_number(step, "step", above=0, remedy="a step of zero is the identity")
    target, eps = _checked_point(measure, point, "point")
    problem = _Problem(measure, target, measure.interior(target), step, 1.0, None, eps)
    found = _newton(problem, tolerance, max_steps)
    with torch.no_grad():
        residual = problem.descent(found.natural).norm(dim=-1)
    root = torch.linalg.cholesky(problem.curvature(found.natural))
    log_determinant = 2 * root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    results = (found.natural, log_determinant, found.converged, residual, found.steps)
    return Proximal(*(x.to(point.dtype) if x.is_floating_point() else x for x in results))


def convergence_message(converged: Tensor, steps: Tensor, name: str) -> str:
    """Number of converged problems and of their steps, as a sentence."""
    most = int(steps.max()) if steps.numel() else 0
    return f"{int(converged.sum())} of {converged.numel()} {name} converged, in at most {most} steps"


@dataclass(frozen=True)
class _Problem:
    r"""Minimize :math:`w G(\eta) + \tfrac{r}{2} \|\eta\|^2 - \eta \cdot target` for every query at once, in float64."""

    measure: Measure
    target: Tensor
    start: Tensor
    weight: float
    ridge: float
    span: Tensor | None  # directions to stay in, None for all
    eps: float  # relative rounding of the target

    def objective(self, natural: Tensor) -> Tensor:
        quadratic = 0.5 * self.ridge * natural.square().sum(-1)
        return self.weight * self.measure.log_normalizer(natural) + quadratic - (natural * self.target).sum(-1)

    def descent(self, natural: Tensor) -> Tensor:
        """Minus the gradient."""
        return self.target - self.weight * self.measure.mean(natural) - self.ridge * natural

    def deviation(self, metric: _Metric) -> Tensor:
        """Standard deviations of the coordinates of x where the curvature was taken; its root where a ridge adds."""
        return metric.diagonal.sqrt() / math.sqrt(self.weight)

    def curvature(self, natural: Tensor) -> Tensor:
        return self.weight * self.measure.fisher(natural) + self.ridge * torch.eye(self.measure.dim).to(natural)


class _Found(NamedTuple):
    natural: Tensor
    converged: Tensor
    steps: Tensor
    boundary: Tensor
    outside: Tensor


def _newton(problem: _Problem, tolerance: float | None, max_steps: int, *, skip: Tensor | None = None) -> _Found:
    check_count(max_steps, "max_steps", remedy="twelve are enough inside the hull")
    target = problem.target.detach()
    exact = torch.finfo(target.dtype).eps
    tolerance = exact**0.6 if tolerance is None else tolerance
    natural = problem.start.detach().clone()
    no = torch.zeros_like(target[..., 0], dtype=torch.bool)
    active = ~no if skip is None else ~skip
    converged, boundary, outside, steps = no.clone(), no.clone(), no.clone(), no.long()
    with torch.no_grad():
        spread = torch.zeros_like(target)
        rounding = 8 * (target.abs() + problem.weight * problem.measure.mean(natural).abs())
        last = torch.full_like(target[..., 0], torch.inf)
        for _ in range(max_steps):
            slope = problem.descent(natural)
            metric = _Metric(problem.curvature(natural), problem.span)
            direction = metric.solve(slope)
            # A Fisher matrix of rounding noise gives no direction.
            active &= torch.isfinite(direction).all(-1)
            direction = direction.masked_fill(~active[..., None], 0.0)
            spread = torch.maximum(spread, problem.deviation(metric))
            unit = _filled(spread)
            if problem.ridge == 0:
                # Near the boundary the Newton direction turns to the face that the mean lies on.
                on, off = _meets_boundary(problem, (natural, direction), unit)
                boundary |= active & on
                outside |= active & off
                active &= ~off
            reach = (direction * unit).norm(dim=-1) / (1 + (natural * unit).norm(dim=-1))
            noise = _Noise(metric, natural, rounding, problem.weight)
            decrement = ((direction * slope).sum(-1).clamp(min=0) / problem.weight).sqrt()
            small = (reach <= tolerance) & (decrement <= (exact * noise.decrement).clamp(min=tolerance))
            # Far out on a flat side a full step would leave nothing to compare.
            direction = direction / (reach / FARTHEST).clamp(min=1)[..., None]
            length = _line_search(problem, natural, direction, slope, active)
            moved = _chords(problem, metric, natural, length[..., None] * direction)
            natural = torch.where(active[..., None], moved, natural)
            steps += active
            converged |= active & small
            # A residual of rounding size that no longer falls: the mean is too close to the boundary to gain more.
            # Scores round too, in proportion to their size, and what is left of the Fisher matrix then leads astray.
            size = (slope / unit).norm(dim=-1)
            scores = 1 + (natural * unit).norm(dim=-1) * (1 + (target / unit).norm(dim=-1) / problem.weight)
            lost = size <= problem.eps * scores * (rounding / unit).norm(dim=-1)
            active &= ~small & ~(lost & (boundary | (size >= last)))
            last = size
            if not bool(active.any()):
                break
        # Rounding of the mean and of natural must leave both determined.
        blur = noise.natural(unit) / (1 + (natural * unit).norm(dim=-1))
        converged &= ~boundary & (problem.eps * blur <= problem.eps**0.3)
        if problem.ridge == 0:
            converged &= problem.eps * noise.decrement <= problem.eps**0.2
    return _Found(_attached(problem, natural, converged), converged, steps, boundary & ~outside, outside)


class _Noise:
    """Uncertainty of a natural parameter by rounding, in units of the relative rounding."""

    def __init__(self, metric: _Metric, natural: Tensor, rounding: Tensor, weight: float) -> None:
        self.inverse = metric.inverse_diagonal().sqrt()
        #: Rounding of the mean, in standard deviations.
        self.mean = (rounding * self.inverse).sum(-1)
        #: Rounding of mean and natural parameter, in standard deviations: the least useful Newton decrement.
        self.decrement = (self.mean + (natural.abs() * metric.unit).sum(-1)) / math.sqrt(weight)

    def natural(self, unit: Tensor) -> Tensor:
        """Change of the natural parameter by the rounding of the mean, in the given units."""
        moved: Tensor = self.mean * (self.inverse * unit).norm(dim=-1)
        return moved


def _filled(spread: Tensor) -> Tensor:
    """Standard deviations as units of length; the largest of the others, or one, where they are zero."""
    largest = spread.amax(-1, keepdim=True)
    return torch.where(spread > 0, spread, torch.where(largest > 0, largest, 1.0))


def _attached(problem: _Problem, natural: Tensor, converged: Tensor) -> Tensor:
    """Attach derivatives to the solution, if tracked, by two Newton steps that leave its value."""
    if not problem.descent(natural).requires_grad:
        return natural
    identity = torch.eye(problem.measure.dim).to(natural)
    attached = natural
    for _ in range(2):
        curvature = torch.where(converged[..., None, None], problem.curvature(attached), identity)
        step = _Metric(curvature, problem.span).solve(problem.descent(attached))
        attached = attached + torch.where(converged[..., None], step, 0.0)
    return attached


class _Metric:
    """Factors of a positive semidefinite matrix on the span."""

    def __init__(self, matrix: Tensor, span: Tensor | None) -> None:
        self.span = span
        self.diagonal = matrix.diagonal(dim1=-2, dim2=-1).clamp(min=0)
        if span is not None:
            # Off the span the identity at the scale of the matrix, so that the solution there is zero.
            largest = matrix.diagonal(dim1=-2, dim2=-1).amax(-1)[..., None, None]
            largest = torch.where(largest > 0, largest, 1.0)  # a single atom has no covariance
            matrix = span @ matrix @ span + largest * (torch.eye(matrix.shape[-1]).to(matrix) - span)
        # Unit diagonal: coordinates of very different scale do not spoil each other.
        self.unit = matrix.diagonal(dim1=-2, dim2=-1).clamp(min=torch.finfo(matrix.dtype).tiny).sqrt()
        whole = matrix / (self.unit[..., :, None] * self.unit[..., None, :])
        self.factor, failed = torch.linalg.cholesky_ex(whole)
        if bool(failed.any()):
            curvature, axes = torch.linalg.eigh(whole[failed > 0].nan_to_num())
            floor = matrix.shape[-1] * torch.finfo(matrix.dtype).eps
            lifted = curvature.clamp(min=floor).sqrt().unsqueeze(-1) * axes.mT
            self.factor = self.factor.clone()
            self.factor[failed > 0] = torch.linalg.qr(lifted).R.mT

    def solve(self, vector: Tensor) -> Tensor:
        """Solution of least norm."""
        if self.span is not None:
            vector = torch.einsum("...de,...e->...d", self.span, vector)
        return torch.cholesky_solve((vector / self.unit)[..., None], self.factor)[..., 0] / self.unit

    def inverse_diagonal(self) -> Tensor:
        """Diagonal of the inverse on the span."""
        inverse = torch.cholesky_inverse(self.factor) / (self.unit[..., :, None] * self.unit[..., None, :])
        if self.span is not None:
            inverse = self.span @ inverse @ self.span
        return inverse.diagonal(dim1=-2, dim2=-1).clamp(min=0)


def _meets_boundary(problem: _Problem, directions: tuple[Tensor, ...], unit: Tensor) -> tuple[Tensor, Tensor]:
    """Return whether one of the directions shows the mean on the boundary of the hull, or outside of it.

    The hull lies below its support function, so that the distance of the mean from the boundary is at most the gap,
    all in the given units of length.
    """
    mean = problem.target
    on = off = torch.zeros_like(mean[..., 0], dtype=torch.bool)
    for direction in directions:
        length = (direction * unit).norm(dim=-1)
        direction = direction / length.clamp(min=torch.finfo(mean.dtype).tiny)[..., None]
        reach, height = problem.measure.support_function(direction), (direction * mean).sum(-1)
        slack = 64 * problem.eps * (height.abs() + (mean / unit).norm(dim=-1))
        known = (length > 0) & torch.isfinite(reach)
        off = off | (known & (reach - height < -slack))
        on = on | (known & ((reach - height).abs() <= slack))
    return on & ~off, off


def _line_search(problem: _Problem, natural: Tensor, direction: Tensor, slope: Tensor, active: Tensor) -> Tensor:
    """Step length in the natural domain that reduces the slope along the direction; it may exceed one."""
    first = (direction * slope).sum(-1)
    low, high = torch.zeros_like(first), torch.full_like(first, torch.inf)
    length = torch.ones_like(first)
    searching = active & (first > 0)
    for trial_number in range(LINE_TRIALS):
        trial = natural + length[..., None] * direction
        inside = problem.measure.contains(trial)
        left = (direction * problem.descent(torch.where(inside[..., None], trial, natural))).sum(-1)
        over = ~inside | ~torch.isfinite(left) | (left < 0)
        searching = searching & ~(inside & (left.abs() <= SLOPE_LEFT * first))
        if not bool(searching.any()):
            break
        high = torch.where(searching & over, length, high)
        low = torch.where(searching & ~over, length, low)
        longer = torch.where(torch.isinf(high), 2 * length, _between(low, high, trial_number))
        # For a mean on the boundary the step would grow without bound.
        length = torch.where(searching & (longer <= LONGEST), longer, length)
    # Where the trials were not enough, the lower end is still a descent.
    return torch.where(searching, low, length)


def _between(low: Tensor, high: Tensor, trial: int) -> Tensor:
    """A length between the two: their mean, or far below after many trials without a lower bound."""
    below = high * 0.5 ** max(1.0, 1.5 ** (trial - 8))
    middle = torch.where(high > 16 * low, (low * high).sqrt(), 0.5 * (low + high))
    return torch.where(low > 0, middle, below)


def _chords(problem: _Problem, metric: _Metric, natural: Tensor, step: Tensor) -> Tensor:
    """Take the step and further ones with the same Fisher matrix, while they get shorter and lower the objective."""
    natural = natural + step
    direction = metric.solve(problem.descent(natural))
    direction = torch.where((direction.norm(dim=-1) < step.norm(dim=-1))[..., None], direction, 0.0)
    value = problem.objective(natural)
    for _ in range(CHORDS):
        inside = problem.measure.contains(natural + direction)
        trial = torch.where(inside[..., None], natural + direction, natural)
        following, next_value = metric.solve(problem.descent(trial)), problem.objective(trial)
        ratio = following.norm(dim=-1) / direction.norm(dim=-1)
        # Close to the solution the objective is constant to rounding, but the steps shrink fast.
        keep = inside & ((ratio <= CHORD_SURE) | ((ratio < 1) & (next_value < value)))
        if not bool(keep.any()):
            break
        natural = torch.where(keep[..., None], trial, natural)
        direction = torch.where(keep[..., None], following, direction)
        value = torch.where(keep, next_value, value)
    return natural


def _checked_point(measure: Measure, point: Tensor, name: str) -> tuple[Tensor, float]:
    """Return the point in float64, and the relative rounding of its own dtype."""
    if not hasattr(measure, "vectors"):
        got = type(measure).__name__
        raise UserError(f"the first argument must be a Measure, got {got}; the order is (measure, {name})")
    point = measure.vectors(point, name)
    if not bool(torch.isfinite(point).all()):
        raise UserError(f"{name} must be finite, got nan or infinity; remove those rows")
    return point.double(), torch.finfo(point.dtype).eps
