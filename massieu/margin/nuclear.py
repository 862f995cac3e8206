"""Least nuclear norm: alternating directions on the dual, whose constraint is a spectral norm of at most one."""

from __future__ import annotations

import numpy as np

from massieu.margin.frobenius import bounded, least_frobenius
from massieu.margin.program import Floats, Program, Solved

__all__ = ["least_nuclear"]

ITERATIONS = 100
"""Iterations of a step."""

RELAXATION = 1.6
"""Factor that lengthens moves of alternating directions."""


def least_nuclear(program: Program, *, tolerance: float, max_steps: int) -> Solved:
    r"""Solve a program for the nuclear norm.

    .. math:: \max_{\lambda \ge 0} 1^\top\lambda \quad\text{subject to}\quad A^\top\lambda = Y, \; |Y|_{op} \le 1.

    Of the two blocks, the multipliers solve a quadratic program with the Gram products of the Frobenius norm, and Y is
    a projection that clips singular values. The scaled multiplier of the equation is the primal solution, and bounds
    follow as for the Frobenius norm: :math:`1^\top\lambda / |A^\top\lambda|_{op} \le |W^*|_* \le |W|_* / m(W)`.
    The solution need not be unique. A step has 100 iterations.
    """
    start = program.products
    first = least_frobenius(program, tolerance=1e-6, max_steps=6)
    if not first.feasible or not program.least.any():
        return first
    state = _Bounds(program, first)
    x = program.select(first.multipliers) / np.linalg.norm(program.adjoint(first.multipliers), 2)
    image, primal = program.adjoint(program.scatter(x)), first.weights
    penalty = float(np.linalg.norm(primal) / np.linalg.norm(image))
    clipped = clip(image)
    for iteration in range(ITERATIONS * max_steps):
        steps = 1 + iteration // ITERATIONS
        right = program.rewards / penalty + program.select(program.values(clipped - primal / penalty))
        accuracy = 0.1 * min(state.gap, 0.1) * float(program.rewards.max()) / penalty
        x = bounded(program.gram, right, program.free, x, steps=100, tolerance=accuracy)
        image = program.adjoint(program.scatter(x))
        state.below(program.scatter(x), image)
        state.above(primal + penalty * (image - clipped))  # meets the constraints as well as x is exact
        relaxed = RELAXATION * image + (1 - RELAXATION) * clipped
        before, clipped = clipped, clip(relaxed + primal / penalty)
        primal = primal + penalty * (relaxed - clipped)
        state.above(primal)
        if state.gap <= tolerance:
            break
        off, moved = np.linalg.norm(image - clipped), np.linalg.norm(clipped - before)
        penalty *= 2.0 if off > 5 * moved else 0.5 if moved > 5 * off else 1.0
    return Solved(
        weights=state.weights,
        multipliers=state.multipliers,
        lower=state.lower,
        upper=state.upper,
        feasible=True,
        farkas=None,
        eps=1 / state.lower,
        converged=state.gap <= tolerance,
        steps=steps,
        products=program.products - start,
    )


class _Bounds:
    """Best multipliers and weights so far, with the bounds that they certify."""

    def __init__(self, program: Program, first: Solved) -> None:
        self.program, self.lower, self.upper = program, 0.0, np.inf
        self.below(first.multipliers, program.adjoint(first.multipliers))
        self.above(first.weights)

    @property
    def gap(self) -> float:
        return self.upper / self.lower - 1

    def below(self, multipliers: Floats, image: Floats) -> None:
        size = float(np.linalg.norm(image, 2))
        bound = self.program.reward(multipliers) / size if size > 0 else 0.0
        if bound > self.lower:
            self.lower, self.multipliers = bound, multipliers / size

    def above(self, weights: Floats) -> None:
        weights = self.program.level(weights)
        margin = self.program.margin(weights)
        bound = float(np.linalg.norm(weights, "nuc")) / margin if margin > 0 else np.inf
        if bound < self.upper:
            self.upper, self.weights = bound, weights / margin


def clip(matrix: Floats) -> Floats:
    """Return the nearest matrix whose singular values are at most one."""
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    return np.asarray((left * np.minimum(values, 1.0)) @ right)
