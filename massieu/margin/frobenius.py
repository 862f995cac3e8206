"""Least Frobenius norm: L-BFGS-B on the dual, then conjugate gradients on the face that it finds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from massieu.margin.program import (
    CANCEL,
    RESOLUTION,
    Flags,
    Floats,
    Product,
    Program,
    Solved,
    conjugate_gradient,
    restricted,
    scipy_module,
)

__all__ = ["bounded", "face", "least_frobenius"]

DENSE = 2_000_000
"""Constraints of at most this many numbers are written out, where products alone have not sufficed."""


def least_frobenius(program: Program, *, tolerance: float, max_steps: int) -> Solved:
    r"""Solve a program for the Frobenius norm.

    The dual has one variable for each constraint, :math:`\max_\lambda 1^\top \lambda - \tfrac12 |A^\top \lambda|^2`
    with :math:`\lambda \ge 0` where the constraint is an inequality. Any :math:`\lambda` and any W with least margin
    m(W) > 0 bound the least norm, :math:`1^\top\lambda / |A^\top\lambda| \le |W^*| \le |W| / m(W)`. Where no margin is
    positive, the point nearest to zero in the hull of the constraints, each of size one, is sought instead, which is a
    problem of the same form: :math:`\min \tfrac12 |A^\top\lambda|^2 + \tfrac12 (1^\top\lambda - 1)^2`. The result is
    in the units of the program.
    """
    start = program.products
    if not program.least.any():
        weights = np.zeros((program.rows.shape[-1], program.queries.shape[-1]))
        return Solved(weights, np.zeros(program.least.shape), 0.0, 0.0, True, None, np.inf, True, 0, 0)
    if program.void.any():  # each of them proves alone, and without rounding, that there is no margin
        return _certified(program, program.void.ravel()[program.index].astype(float), tolerance, 0, start)
    right, ones = program.rewards, np.where(program.free, 0.0, 1.0)
    x = np.zeros(len(program.index))
    best: Solved | None = None

    def hull(x: Floats) -> Floats:
        return program.gram(x) + ones * float(ones @ x)

    for step in range(max_steps):
        effort = {"steps": 150 * 2**step, "tolerance": 1e-6 * 0.1**step}
        x = bounded(program.gram, right, program.free, x, **effort)
        if _leads(program, x):
            x = face(program.gram, right, program.free, x)
        else:  # perhaps the dual has no bound; the point of the hull nearest to zero always exists
            x = bounded(hull, ones, program.free, x / max(float(ones @ x), 1e-300), **effort)
            x = face(hull, ones, program.free, x)
        if step in (1, 2) and len(x) * program.rows.shape[-1] * program.queries.shape[-1] <= DENSE:
            x = _exact(program, right if _leads(program, x) else ones)
        found = _certified(program, x, tolerance, step + 1, start)
        if best is None or found.converged or _better(found, best):
            best = found
        if best.converged:
            return best
        # The best multiple: a nearest point p of the hull becomes p / |p|^2.
        x = x * float(right @ x) / max(float(x @ program.gram(x)), 1e-300)
    assert best is not None
    return replace(best, steps=max_steps)


def _leads(program: Program, x: Floats) -> bool:
    """Return True if the constraints summed with multipliers have a margin."""
    return program.margin(program.adjoint(program.scatter(x))) > 0


def bounded(product: Product, right: Floats, free: Flags, x: Floats, *, steps: int, tolerance: float) -> Floats:
    """Minimize half x'Hx - b'x by L-BFGS-B over x that is not negative, except where it is free."""
    optimize = scipy_module("optimize")

    def objective(x: Floats) -> tuple[float, Floats]:
        image = product(x)
        return 0.5 * float(x @ image) - float(right @ x), image - right

    options = {"maxiter": steps, "maxfun": 3 * steps, "maxcor": 20, "ftol": 0.0, "gtol": tolerance}
    bounds = optimize.Bounds(np.where(free, -np.inf, 0.0), np.inf)
    return np.asarray(optimize.minimize(objective, x, jac=True, method="L-BFGS-B", bounds=bounds, options=options).x)


def face(product: Product, right: Floats, free: Flags, x: Floats) -> Floats:
    """Solve Hx = b where x is positive or free; a variable that would become negative stops the step and leaves."""
    for _ in range(20):
        inside = np.flatnonzero((x > 0) | free)
        rest = (right - product(x))[inside]
        if not rest.any():
            return x
        step = np.zeros_like(x)
        steps = min(2 * len(inside), 300) + 20
        step[inside] = conjugate_gradient(restricted(product, inside, len(x)), rest, steps=steps, tolerance=1e-12)
        blocked = (x + step < 0) & ~free
        if not blocked.any():
            return x + step
        reach = np.divide(x, -step, out=np.full_like(x, np.inf), where=blocked)
        moved = x + reach.min() * step
        x = np.where(free | (moved > 1e-15 * moved.max()), moved, 0.0)
    return x


def _exact(program: Program, right: Floats) -> Floats:
    """Return the point of the hull nearest to zero by an active set, from all constraints written out."""
    rows = np.einsum("gsd,gq->gsdq", program.rows, program.queries).reshape(program.least.size, -1)[program.index]
    columns = np.vstack([rows.T, right])
    both = np.hstack([columns, -columns[:, program.free]])  # a free multiplier is the difference of two
    try:
        found, _ = scipy_module("optimize").nnls(both, np.append(np.zeros(len(columns) - 1), 1.0))
    except RuntimeError:  # too many steps
        return np.zeros(len(right))
    x = np.array(found[: len(right)])
    x[program.free] -= found[len(right) :]
    return x


def _better(found: Solved, than: Solved) -> bool:
    if found.feasible and than.feasible:
        return found.upper / found.lower < than.upper / than.lower
    return bool(found.feasible) or (not than.feasible and found.eps < than.eps)


def _certified(program: Program, x: Floats, tolerance: float, steps: int, start: int) -> Solved:
    """Return what multipliers prove: bounds of the least norm, or that no weights have a margin."""
    multipliers = program.scatter(x)
    combined = program.adjoint(multipliers)
    total, norm = program.reward(multipliers), float(np.linalg.norm(combined))
    eps = norm / total if total > 0 else np.inf
    weights = program.level(combined)
    margin = program.margin(weights)
    if margin > 0 and eps * np.linalg.norm(weights) > (1 + tolerance) * margin:
        # Large multipliers cancel in their sum; a correction of the weights themselves does not.
        closer = program.meet(weights, (x > 0) | program.free)
        if program.margin(closer) * np.linalg.norm(weights) > margin * np.linalg.norm(closer):
            weights, margin = closer, program.margin(closer)
    feasible: bool | None = True if program.separates(weights) else None
    if feasible is None and total > 0 and norm <= RESOLUTION * float(multipliers[program.least].sum()):
        closer = program.scatter(program.cancelled(x))
        weight = float(closer[program.least].sum())
        off = float(np.linalg.norm(program.adjoint(closer)))
        # Multipliers that keep their size while the constraints cancel prove that there is no margin.
        if weight >= 0.5 * float(multipliers[program.least].sum()) and off <= CANCEL * weight:
            feasible, multipliers, norm, total = False, closer, off, program.reward(closer)
            eps = norm / total
    upper = float(np.linalg.norm(weights)) / margin if feasible else np.inf
    lower = 1.0 / eps if eps > 0 else np.inf
    return Solved(
        weights=weights / margin if feasible else weights,
        multipliers=multipliers * (total / norm**2) if feasible else multipliers,
        lower=lower,
        upper=upper,
        feasible=feasible,
        farkas=multipliers if feasible is False else None,
        eps=eps,
        converged=feasible is False or (feasible is True and upper / lower - 1 <= tolerance),
        steps=steps,
        products=program.products - start,
    )
