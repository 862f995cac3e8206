"""Fixed points of attention, found by Anderson acceleration and differentiated implicitly."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from massieu.checks import UserError, check_count, check_number, optional_package
from massieu.dynamics.maps import check_cloud, hopfield_step

__all__ = ["FixedPoints", "fixed_points"]

ACCELERATED_STEPS = 20
"""Accelerated steps in a row: far from a fixed point they may diverge."""

SUFFICIENT_FALL = 0.1
"""Accelerated steps are kept if they lower the residual to this share."""


@dataclass(frozen=True)
class FixedPoints:
    r"""Fixed points of an iteration, and the outcome of the search for every row.

    Attributes:
        state: shape ``(..., queries, dim)``; rows that converged carry derivatives.
        converged: the residual is below the tolerance, shape ``(..., queries)``.
        residual: :math:`|f(\xi) - \xi|`, shape ``(..., queries)``.
        steps: iterations, the plain ones included, shape ``(..., queries)``.
        regime: the iterated map, with frozen or moving keys, in one sentence.
    """

    state: Tensor
    converged: Tensor
    residual: Tensor
    steps: Tensor
    regime: str

    @property
    def message(self) -> str:
        """The outcome, in a sentence."""
        worst, most = (float(x.max()) if x.numel() else 0.0 for x in (self.residual, self.steps))
        rows = f"{int(self.converged.sum())} of {self.converged.numel()} rows converged"
        return f"{rows} after at most {most:.0f} steps; the largest residual is {worst:.2g}"


def fixed_points(
    function: Callable[[Tensor], Tensor] | tuple[Tensor, float],
    start: Tensor,
    *,
    tolerance: float | None = None,
    max_steps: int = 500,
    memory: int = 5,
    plain_steps: int = 10,
) -> FixedPoints:
    r"""Solve :math:`f(\xi) = \xi` from a start, with derivatives in all parameters of f.

    Plain steps lead into a basin, Anderson acceleration (scipy's) shortens the rest. Derivatives do not pass through
    the iteration: at the fixed point :math:`d\xi = (I - J)^{-1}\, \partial f`, and a backward pass solves the
    transposed system by GMRES, with the memory of a single step.

    Args:
        function: f, which keeps the shape and dtype of the start; or ``(patterns, beta)`` for the retrieval of a
            Hopfield memory, :math:`f(\xi) = \sum_j p_j x_j` with fixed patterns, where every row is searched by itself.
            A function is taken as one joint system, since it may let tokens see each other.
        start: shape ``(..., queries, dim)``.
        tolerance: a row has converged when :math:`|f(\xi) - \xi|` is at most this share of :math:`1 + |\xi|`; by
            default the resolution of the dtype of the start.
        max_steps: iterations at most.
        memory: number of past steps in Anderson acceleration; 0 iterates plainly.
        plain_steps: steps before the first acceleration, doubled before each further one. Acceleration may lead to
            another fixed point than plain iteration, even to one that repels.

    Source:
        Bai et al. 2019, "Deep equilibrium models", for the implicit derivative. The solver is scipy's because
        torchdeq had a single release, in 2023.

    Example:
        >>> found = fixed_points((torch.eye(2), 4.0), torch.tensor([[0.9, 0.1], [0.5, 0.5]]))
        >>> found.state, found.converged
        (tensor([[0.9787, 0.0213],
                [0.5000, 0.5000]]), tensor([True, True]))
    """
    check_cloud(start, "start")
    max_steps, memory = check_count(max_steps, "max_steps"), check_count(memory, "memory", least=0)
    plain_steps = check_count(plain_steps, "plain_steps", least=0)
    eps = torch.finfo(start.dtype).eps
    tolerance = 8 * eps**0.85 if tolerance is None else check_number(tolerance, "tolerance", least=0.0)
    apply, regime = _iteration(function)
    state = start.detach().clone()
    with torch.no_grad():
        image = apply(state)
        if image.shape != state.shape or image.dtype != state.dtype:
            raise UserError(
                f"function must return shape {tuple(state.shape)} and {state.dtype}, got {tuple(image.shape)} and"
                f" {image.dtype}; a fixed point needs a map of the space into itself"
            )
        search = _AndersonSearch(tolerance, max_steps, memory, plain_steps)
        if callable(function) or not memory:
            state, steps = search.jointly(apply, state)
        else:
            state, steps = search.by_rows(function, state)
        residual = (apply(state) - state).norm(dim=-1)
        converged = residual.isfinite() & (residual <= tolerance * (1 + state.norm(dim=-1)))
    return FixedPoints(_attach(apply, state, converged), converged, residual, steps, regime)


def _iteration(function: Any) -> tuple[Callable[[Tensor], Tensor], str]:
    if callable(function):
        name = getattr(function, "__name__", type(function).__name__)
        return function, f"iteration of {name}, all rows as one system"
    if not isinstance(function, tuple) or len(function) != 2:
        got = type(function).__name__
        raise UserError(f"function must be a pair (patterns, beta) or callable, got {got}; wrap it in a function")
    patterns, beta = function
    check_cloud(patterns, "patterns", least=1)
    beta = check_number(beta, "beta")
    regime = f"attention without residual at beta {beta:g} over {patterns.shape[-2]} frozen keys, not causal"
    return (lambda state: hopfield_step(state, patterns, beta=beta)), regime


@dataclass(frozen=True)
class _AndersonSearch:
    """Plain steps and Anderson acceleration by scipy in turns, up to the tolerance of every row."""

    tolerance: float
    max_steps: int
    memory: int
    plain_steps: int

    def jointly(self, apply: Callable[[Tensor], Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        """Iterate all rows at once, in acceleration as one system; return the state and the steps of every row."""
        steps, left = torch.zeros(state.shape[:-1], dtype=torch.long), self.max_steps
        plain = self.plain_steps if self.memory else left
        while left > 0:
            state, moving = self.iterate(apply, state, min(left, plain))
            steps, left = steps + moving, left - plain
            if left <= 0 or not state.numel() or self.excess(apply(state), state) <= 1:
                break
            state, taken = self.accelerate(apply, state, min(left, ACCELERATED_STEPS))
            steps, left = steps + taken, left - taken
            plain *= 2  # less acceleration after a failed one
        return state, steps

    def by_rows(self, pair: tuple[Tensor, float], state: Tensor) -> tuple[Tensor, Tensor]:
        """Iterate every row by itself, over the patterns of its own batch."""
        patterns, beta = pair
        patterns = patterns.detach().expand(*state.shape[:-2], *patterns.shape[-2:])
        steps = torch.zeros(state.shape[:-1], dtype=torch.long)
        for index in np.ndindex(*state.shape[:-1]):
            apply = functools.partial(hopfield_step, patterns=patterns[index[:-1]], beta=beta)
            row, taken = self.jointly(apply, state[index][None])
            state[index], steps[index] = row[0], taken[0]
        return state, steps

    def iterate(self, apply: Callable[[Tensor], Tensor], state: Tensor, most: int) -> tuple[Tensor, Tensor]:
        """Take plain steps; return the state and the number of steps of each row."""
        steps = torch.zeros(state.shape[:-1], dtype=torch.long)
        for _ in range(most):
            moved = apply(state)
            moving = (moved - state).norm(dim=-1) > self.tolerance * (1 + state.norm(dim=-1))
            if not bool(moving.any()):
                break
            steps, state = steps + moving.cpu(), moved
        return state, steps

    def excess(self, moved: Tensor, state: Tensor) -> float:
        """Return the largest residual of a row, in units of the tolerated one."""
        allowed = self.tolerance * (1 + state.norm(dim=-1))
        return float(((moved - state).norm(dim=-1) / allowed.clamp_min(torch.finfo(state.dtype).tiny)).max())

    def accelerate(self, apply: Callable[[Tensor], Tensor], state: Tensor, most: int) -> tuple[Tensor, int]:
        """Return the state of least residual if it fell sufficiently, else the old one; and the number of steps."""
        sizes: list[float] = []
        best = state

        def residual(point: Any) -> Any:
            nonlocal best
            trial = torch.from_numpy(np.ascontiguousarray(point)).to(state).reshape(state.shape)
            moved = apply(trial)
            sizes.append(self.excess(moved, trial))
            if sizes[-1] <= min(sizes):
                best = trial
            if sizes[-1] <= 1 or not np.isfinite(sizes[-1]):
                raise _Stop
            return (moved - trial).reshape(-1).double().cpu().numpy()

        # With alpha one the first step is a plain one. More history than unknowns has no use.
        history = {"M": min(self.memory, state.numel()), "alpha": 1.0, "w0": 0.01}
        options = {"maxiter": most, "fatol": 0.0, "line_search": None, "jac_options": history}
        start = state.reshape(-1).double().cpu().numpy()
        root, warning = _scipy("optimize").root, _scipy("linalg").LinAlgWarning
        with warnings.catch_warnings(), contextlib.suppress(_Stop, np.linalg.LinAlgError):
            warnings.simplefilter("ignore", warning)  # steps of very different size, as they should be
            root(residual, start, method="anderson", options=options)
        # A small fall may be the way back to a repelling point, from which the plain steps led away.
        fell = min(sizes) <= max(1.0, SUFFICIENT_FALL * sizes[0])
        return (best if fell else state), max(1, len(sizes) - 1)


class _Stop(Exception):  # noqa: N818  # not an error: the only way to stop scipy
    """The search has converged, or left the finite numbers."""


def _attach(apply: Callable[[Tensor], Tensor], state: Tensor, converged: Tensor) -> Tensor:
    """Attach implicit derivatives to the rows of the state that converged."""
    outer = apply(state)
    if not outer.requires_grad:
        return state
    point = state.clone().requires_grad_()
    image = apply(point)
    mask = converged[..., None]

    def solve(slope: Tensor | None) -> Tensor | None:
        if slope is None:  # a derivative that is not needed
            return None
        if torch.is_grad_enabled():
            raise RuntimeError(
                "fixed_points has first derivatives only, got a backward pass with create_graph=True;"
                " unroll the iteration for second ones"
            )

        def transposed(vector: Any) -> Any:
            cotangent = torch.from_numpy(np.asarray(vector)).to(state).reshape(state.shape)
            (pulled,) = torch.autograd.grad(image, point, cotangent, retain_graph=True)
            return (cotangent - torch.where(mask, pulled, 0.0)).reshape(-1).double().cpu().numpy()

        return torch.where(mask, _gmres(transposed, torch.where(mask, slope, 0.0)), 0.0)

    outer.register_hook(solve)
    # The value is the state itself; only the derivative is that of the image.
    return state + (outer - outer.detach())


def _gmres(operator: Callable[[Any], Any], right: Tensor) -> Tensor:
    linalg = _scipy("sparse.linalg")
    flat = right.reshape(-1).double().cpu().numpy()
    system = linalg.LinearOperator((len(flat), len(flat)), matvec=operator, dtype=flat.dtype)
    tolerance = 4 * torch.finfo(right.dtype).eps
    found, info = linalg.gmres(system, flat, rtol=tolerance, atol=0.0, restart=min(50, len(flat)), maxiter=20)
    error = np.linalg.norm(operator(found) - flat)
    if info and error > torch.finfo(right.dtype).eps ** 0.5 * np.linalg.norm(flat):
        raise RuntimeError(
            f"the derivative of the fixed point must solve a linear system, got a residual of {error:.3g};"
            " the fixed point is nearly degenerate, so change beta or differentiate an unrolled iteration"
        )
    return torch.from_numpy(found).to(right).reshape(right.shape)


def _scipy(module: str) -> Any:
    return optional_package(f"scipy.{module}", "fixed_points with memory > 0, or with derivatives,", "verify")
