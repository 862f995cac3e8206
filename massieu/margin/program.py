"""Programs of least norm whose constraints are dyads, and products with them that never hold their Gram matrix."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Program", "Solved", "one_thread", "scipy_module"]

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Product = Callable[[Floats], Floats]

ZERO = 1e-10
"""Constraints whose hull comes this near to zero, in units of their own size, are taken to contain it."""


@dataclass(frozen=True)
class Solved:
    """How a program ended: its weights and multipliers, bounds that hold whatever the solver did, and a certificate.

    Attributes:
        weights: shape ``(dim, query_dim)``; of the largest margin found where the program is not feasible.
        multipliers: shape ``(groups, slots)``.
        lower, upper: the least norm lies between them.
        feasible: weights with a positive margin were found.
        farkas: multipliers that show the opposite, or None.
        eps: no weights of norm one have a margin above it.
        converged: the bounds agree to the tolerance, or the certificate is as good as zero.
        products: Gram products spent.
    """

    weights: Floats
    multipliers: Floats
    lower: float
    upper: float
    feasible: bool
    farkas: Floats | None
    eps: float
    converged: bool
    products: int


class Program:
    r"""Least norm of W subject to :math:`\langle a_c, W z_g \rangle \ge 1`, or :math:`= 0` for some constraints.

    Each group has a query :math:`z_g` and constraints :math:`a_c z_g^\top`, so that a product with all of them costs
    two small matrix products and no Gram matrix is ever held:

    .. math:: A W = (\langle a_c, W z_g \rangle)_c, \qquad
        A^\top \lambda = \sum_g \Big(\sum_{c \in g} \lambda_c a_c\Big) z_g^\top.

    Args:
        rows: :math:`a_c`, shape ``(groups, slots, dim)``; anything where there is no constraint.
        queries: :math:`z_g`, shape ``(groups, query_dim)``.
        least: which slots ask for at least one, boolean, ``(groups, slots)``.
        equal: which slots ask for zero.
    """

    def __init__(self, rows: Floats, queries: Floats, least: Flags, equal: Flags) -> None:
        self.rows, self.queries, self.least = rows, queries, least
        sizes = np.linalg.norm(rows, axis=-1) * np.linalg.norm(queries, axis=-1)[:, None]
        self.equal = equal & (sizes > 0)  # zero equals zero
        self.index = np.flatnonzero(self.least | self.equal)
        self.free = self.equal.ravel()[self.index]
        # In units of each constraint's own size the Gram matrix has a unit diagonal.
        self.scale = 1.0 / np.where(sizes > 0, sizes, 1.0).ravel()[self.index]
        self.rewards = np.where(self.free, 0.0, self.scale)
        self.size = float(np.median(sizes[self.least])) if self.least.any() else 1.0
        self.size = self.size if self.size > 0 else 1.0
        self.products = 0

    def values(self, weights: Floats) -> Floats:
        """What the weights give to every constraint, shape ``(groups, slots)``."""
        return np.asarray(np.matmul(self.rows, (self.queries @ weights.T)[:, :, None])[:, :, 0])

    def adjoint(self, multipliers: Floats) -> Floats:
        """Constraints summed with multipliers, shape ``(dim, query_dim)``."""
        return np.asarray(np.matmul(multipliers[:, None, :], self.rows)[:, 0].T @ self.queries)

    def scatter(self, x: Floats) -> Floats:
        """Multipliers ``(groups, slots)`` from scaled ones, one for each constraint."""
        multipliers = np.zeros(self.least.shape)
        multipliers.ravel()[self.index] = x * self.scale
        return multipliers

    def select(self, multipliers: Floats) -> Floats:
        """Scaled multipliers, one for each constraint: the inverse of ``scatter``."""
        return np.asarray(multipliers.ravel()[self.index] / self.scale)

    def gather(self, values: Floats) -> Floats:
        """Scaled values, one for each constraint."""
        return values.ravel()[self.index] * self.scale

    def gram(self, x: Floats) -> Floats:
        """Gram matrix of the scaled constraints times a vector."""
        self.products += 1
        return self.gather(self.values(self.adjoint(self.scatter(x))))

    def margin(self, weights: Floats) -> float:
        """Least value over the constraints that ask for at least one, minus what is left of those that ask for zero."""
        values = self.values(weights)
        rest = float(np.abs(values[self.equal]).max()) if self.equal.any() else 0.0
        return float(values[self.least].min()) - rest if self.least.any() else np.inf

    def reward(self, multipliers: Floats) -> float:
        """Sum of the multipliers of the constraints that ask for at least one."""
        return float(multipliers[self.least].sum())

    def level(self, weights: Floats) -> Floats:
        """The weights without their part along the constraints that ask for zero."""
        return self.meet(weights, self.free) if self.free.any() else weights

    def meet(self, weights: Floats, chosen: Flags) -> Floats:
        """The nearest weights that give some constraints just what they ask for."""
        inside = np.flatnonzero(chosen)
        product = restricted(self.gram, inside, len(self.index))
        for _ in range(2):  # the second pass removes what rounding left
            part = np.zeros(len(self.index))
            off = (self.gather(self.values(weights)) - self.rewards)[inside]
            part[inside] = conjugate_gradient(product, off, steps=2 * len(inside) + 50)
            weights = weights - self.adjoint(self.scatter(part))
        return weights


def restricted(product: Product, inside: NDArray[np.intp], size: int) -> Product:
    """A product with vectors of a given size, on some of their entries alone."""

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
    """Within it, linear algebra runs on one thread: small products lose more to waiting than a second one gives."""
    return _controller().limit(limits=1, user_api="blas")  # type: ignore[no-any-return]


@cache
def _controller() -> Any:
    for module in ("optimize", "sparse.linalg"):
        scipy_module(module)  # brings a library of its own, which must be there to be limited
    return _imported("threadpoolctl").ThreadpoolController()


def scipy_module(name: str) -> Any:
    return _imported(f"scipy.{name}")


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.split(".")[0]
        raise ImportError(
            f"max-margin programs need {package}, which is not installed; pip install 'massieu[verify]'"
        ) from None
