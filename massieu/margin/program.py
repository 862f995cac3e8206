"""Programs of least norm with rank-one constraints, and products with them that never hold their Gram matrix."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from massieu.checks import optional_package

__all__ = ["Program", "Solved", "one_thread", "scipy_module"]

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Product = Callable[[Floats], Floats]

CANCEL = 1e-15
"""Constraints of size one that sum to less than this part of their multipliers cancel: the rest is rounding."""

RESOLUTION = 1e-8
"""Margins of constraints of size one below this may stay undecided: the hull is found by least squares, whose residual
is the square of the margin, and rounding hides values below the square root of 1e-16."""

ROUNDING = 1e-12
"""Rounding of values of size one."""


@dataclass(frozen=True)
class Solved:
    """Solution of a program as arrays; the attributes are those of :class:`~massieu.margin.solver.LeastNorm`.

    Attributes:
        weights: shape ``(dim, query_dim)``; of the largest margin found where the program is not feasible.
        multipliers: shape ``(groups, slots)``.
    """

    weights: Floats
    multipliers: Floats
    lower: float
    upper: float
    feasible: bool | None
    farkas: Floats | None
    eps: float
    converged: bool
    steps: int
    products: int


class Program:
    r"""Least norm of W subject to :math:`\langle a_c, W z_g \rangle \ge 1`, or :math:`= 0` for some constraints.

    Rows and queries are held with size one and weights in units of one over the smallest constraint, so that the bound
    of a constraint is :math:`b_c \le 1`, whatever the units of the data; ``natural`` undoes this.

    Each group has a query :math:`z_g` and constraints :math:`a_c z_g^\top`, so that a product with all of them costs
    two small matrix products and no Gram matrix is ever held:

    .. math:: A W = (\langle a_c, W z_g \rangle)_c, \qquad
        A^\top \lambda = \sum_g \Big(\sum_{c \in g} \lambda_c a_c\Big) z_g^\top.

    Args:
        rows: :math:`a_c`, shape ``(groups, slots, dim)``; arbitrary where there is no constraint.
        queries: :math:`z_g`, shape ``(groups, query_dim)``.
        least: the slots of inequalities, boolean, ``(groups, slots)``.
        equal: the slots of equalities.

    Attributes:
        bounds: :math:`b_c`, shape ``(groups, slots)``.
        rewards: the same of the constraints alone, zero for equalities.
        free: equalities among the constraints alone, whose multipliers may be negative.
        void: inequalities whose row is zero, as of twins: no weights meet them.
    """

    def __init__(self, rows: Floats, queries: Floats, least: Flags, equal: Flags) -> None:
        self.rows, row_sizes = _units(rows)
        self.queries, query_sizes = _units(queries)
        sizes = row_sizes * query_sizes[:, None]
        self.least, self.equal = least, equal & (sizes > 0)  # zero equals zero
        self.void = least & (sizes == 0)  # zero is never at least one
        self.index = np.flatnonzero(self.least | self.equal)
        self.free = self.equal.ravel()[self.index]
        own = sizes[self.least & (sizes > 0)]
        self.size = float(own.min()) if own.size else 1.0
        # The smallest constraint has the largest bound in these units; one without size cannot be met.
        self.bounds = self.size / np.where(sizes > 0, sizes, self.size)
        # Bounds below rounding are raised to it, which costs nothing; margins and certificates take the exact ones.
        self.rewards = np.where(self.free, 0.0, np.maximum(self.bounds.ravel()[self.index], ROUNDING))
        self.products = 0

    def values(self, weights: Floats) -> Floats:
        """Return the value of every constraint under the weights, shape ``(groups, slots)``."""
        return np.asarray(np.matmul(self.rows, (self.queries @ weights.T)[:, :, None])[:, :, 0])

    def adjoint(self, multipliers: Floats) -> Floats:
        """Return the constraints summed with multipliers, shape ``(dim, query_dim)``."""
        return np.asarray(np.matmul(multipliers[:, None, :], self.rows)[:, 0].T @ self.queries)

    def scatter(self, x: Floats) -> Floats:
        """Return multipliers ``(groups, slots)`` from those of the constraints alone."""
        multipliers = np.zeros(self.least.shape)
        multipliers.ravel()[self.index] = x
        return multipliers

    def select(self, values: Floats) -> Floats:
        """Return the values of the constraints alone: the inverse of ``scatter``."""
        return np.asarray(values.ravel()[self.index])

    def gram(self, x: Floats) -> Floats:
        """Return the Gram matrix of the constraints times a vector."""
        self.products += 1
        return self.select(self.values(self.adjoint(self.scatter(x))))

    def margin(self, weights: Floats) -> float:
        """Return the least value of the inequalities over their bound, minus the largest error of the equalities."""
        if not self.least.any():
            return np.inf
        values = self.values(weights)
        rest = np.abs(values[self.equal] / self.bounds[self.equal]).max() if self.equal.any() else 0.0
        return float((values[self.least] / self.bounds[self.least]).min() - rest)

    def separates(self, weights: Floats) -> bool:
        """Return True if the weights have a positive margin by more than rounding."""
        if self.margin(weights) <= 0:
            return False
        return bool(self.values(weights)[self.least].min(initial=np.inf) > CANCEL * np.linalg.norm(weights))

    def cancelled(self, x: Floats) -> Floats:
        """Return the multipliers nearest to given ones under which the constraints in use cancel, as far as they can.

        Multipliers from a solver leave a residual of its tolerance. Where the constraints in use are dependent, a small
        correction removes it; where they are independent, nothing but zero cancels.
        """
        linalg, inside = scipy_module("sparse.linalg"), np.flatnonzero((x > 0) | self.free)
        size = self.rows.shape[-1] * self.queries.shape[-1]

        def spread(part: Floats) -> Floats:
            full = np.zeros(len(x))
            full[inside] = part
            return self.adjoint(self.scatter(full)).ravel()

        def back(flat: Floats) -> Floats:
            weights = flat.reshape(self.rows.shape[-1], self.queries.shape[-1])
            return self.select(self.values(weights))[inside]

        operator = linalg.LinearOperator((size, len(inside)), matvec=spread, rmatvec=back, dtype=float)
        part = x[inside]
        for _ in range(3):  # each pass removes the rounding of the last
            part = part - linalg.lsmr(operator, spread(part), atol=1e-16, btol=1e-16, maxiter=4 * len(inside))[0]
        found = np.zeros(len(x))
        found[inside] = np.where(self.free[inside], part, np.maximum(part, 0.0))
        return found

    def reward(self, multipliers: Floats) -> float:
        """Return the sum of the multipliers times the bounds."""
        return float((multipliers * self.bounds)[self.least].sum())

    def natural(self, found: Solved) -> Solved:
        """Return a result in the units of the data; multipliers of a certificate sum to one over the inequalities."""
        shown = None if found.farkas is None else found.farkas * self.bounds
        return replace(
            found,
            weights=found.weights / self.size,
            multipliers=found.multipliers * self.bounds / self.size / self.size,
            lower=found.lower / self.size,
            upper=found.upper / self.size,
            farkas=None if shown is None else shown / shown[self.least].sum(),
            eps=found.eps * self.size,
        )

    def level(self, weights: Floats) -> Floats:
        """Return the weights without their part along the equalities."""
        return self.meet(weights, self.free) if self.free.any() else weights

    def meet(self, weights: Floats, chosen: Flags) -> Floats:
        """Return the nearest weights that give some constraints exactly their bounds."""
        inside = np.flatnonzero(chosen)
        product = restricted(self.gram, inside, len(self.index))
        for _ in range(2):  # the second pass removes the rounding of the first
            part = np.zeros(len(self.index))
            off = (self.select(self.values(weights)) - self.rewards)[inside]
            part[inside] = conjugate_gradient(product, off, steps=2 * len(inside) + 50)
            weights = weights - self.adjoint(self.scatter(part))
        return weights


def _units(vectors: Floats) -> tuple[Floats, Floats]:
    """Return the vectors scaled to size one, zero ones excepted, and their sizes."""
    largest = np.abs(vectors).max(-1, initial=0.0)
    units = vectors / np.where(largest > 0, largest, 1.0)[..., None]
    sizes = np.sqrt(np.einsum("...d,...d->...", units, units))
    units /= np.where(sizes > 0, sizes, 1.0)[..., None]
    return units, sizes * largest


def restricted(product: Product, inside: NDArray[np.intp], size: int) -> Product:
    """Restrict a product with vectors of a given size to some of their entries."""

    def part(values: Floats) -> Floats:
        full = np.zeros(size)
        full[inside] = values
        return product(full)[inside]

    return part


def conjugate_gradient(product: Product, right: Floats, *, steps: int, tolerance: float = 1e-14) -> Floats:
    """Solve a positive semidefinite system through its products; zero where it has no solution."""
    linalg = scipy_module("sparse.linalg")
    operator = linalg.LinearOperator((len(right), len(right)), matvec=product, dtype=right.dtype)
    with np.errstate(all="ignore"):  # a singular system without solution divides by zero
        found, _ = linalg.cg(operator, right, rtol=tolerance, atol=0.0, maxiter=steps)
    return np.asarray(found) if np.isfinite(found).all() else np.zeros_like(right)


def one_thread() -> AbstractContextManager[Any]:
    """Limit linear algebra to one thread: small products lose more to waiting than a second thread gains."""
    return _controller().limit(limits=1, user_api="blas")  # type: ignore[no-any-return]


@cache
def _controller() -> Any:
    for module in ("optimize", "sparse.linalg"):
        scipy_module(module)  # loads a library of its own, which must be there to be limited
    return _package("threadpoolctl").ThreadpoolController()


def scipy_module(name: str) -> Any:
    return _package(f"scipy.{name}")


def _package(module: str) -> Any:
    return optional_package(module, "a max-margin program", "verify")
