"""Limits of training: minimizers at growing radius, locally optimal selections, and the starts that lead to them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from massieu.checks import UserError, check_count, check_number, check_shape
from massieu.margin.conversions import as_generator
from massieu.margin.descent import Method, descend
from massieu.margin.gradients import Landscape, misalignment, size_of
from massieu.margin.problem import TokenSelection
from massieu.margin.program import Floats, one_thread, scipy_module
from massieu.margin.solver import MaxMargin, max_margin, rounded_up
from massieu.margin.trajectory import table

if TYPE_CHECKING:
    import pandas

__all__ = [
    "LocalOptimality",
    "RegularizationPath",
    "locally_optimal",
    "path_bound",
    "regularization_path",
    "selections_reached",
]

SMALL = 1e-4
"""Radii below this part of the norm of the max-margin solution are small: the loss is nearly linear within them."""
STATIONARY = 1e-6
"""A slope along the sphere, per norm of the max-margin solution, that counts as zero."""


@dataclass(frozen=True)
class RegularizationPath:
    """Weights of least loss at given norms.

    Attributes:
        table: one row for each radius: ``radius``; ``misalignment`` and ``correlation`` with the max-margin direction
            of the best tokens; ``bound``, proven for the misalignment; ``log_loss_gap`` above the best tokens;
            ``selects_best``; ``starts`` that ended within 1e-6 of the least ``log_loss_gap``; and the outcome of the
            kept one: ``residual``, its slope along the sphere over its natural size, ``converged`` if that is at most
            1e-6, and ``steps``.
        weights: shape ``(radii, dim, query_dim)``.
        selections: the tokens of highest logit, shape ``(radii, sequences)``.
        solution: the max-margin solution of the best tokens.
    """

    table: pandas.DataFrame
    weights: Tensor
    selections: Tensor
    solution: MaxMargin

    @property
    def message(self) -> str:
        """Outcome of the solver, a sentence."""
        residual, done = self.table["residual"].max(), int(self.table["converged"].sum())
        return f"{done} of {len(self.table)} minimizers are stationary: slope along the sphere at most {residual:.0e}"


@dataclass(frozen=True)
class LocalOptimality:
    """Local optimality of a selection: a necessary condition for descent to settle on it.

    Attributes:
        optimal: the selection is locally optimal.
        message: the reason, a sentence.
        offending: pairs of sequence and token: support tokens whose score is not below the selected one's.
        solution: the max-margin solution of the selection.
    """

    optimal: bool
    message: str
    offending: tuple[tuple[int, int], ...]
    solution: MaxMargin


def regularization_path(
    problem: TokenSelection,
    radii: Sequence[float],
    *,
    starts: int = 5,
    generator: torch.Generator | int = 0,
    max_steps: int = 2000,
) -> RegularizationPath:
    r"""Minimize the loss over weights of given norms.

    .. math:: W_R = \arg\min_{\|W\|_F = R} \log(L(W) - L^*)

    by L-BFGS over directions, from random starts, the max-margin direction and the minimizer of the last radius; the
    least is kept, without proof that it is the global one. On the sphere, not in the ball: at small radii the least
    loss of the ball may be inside. At radii below 1e-4 of the norm of the max-margin solution, where losses differ by
    rounding, directions opposite to the gradient are iterated instead, which is a contraction there.

    Args:
        problem: one with a unique best token in each sequence, which must be feasible.
        radii: positive norms, whose natural unit is the norm of the max-margin solution.
        starts: random starts at each radius.
        generator: of the starts, or a seed for one.
        max_steps: steps of L-BFGS allowed for each start.

    Source:
        Ataee Tarzanagh et al. 2023: the direction of the minimizer tends to the max-margin one.

    Example:
        >>> problem = massieu.margin.random_problem(3, 3, 6, kind="equal")
        >>> path = regularization_path(problem, [10.0, 100.0], starts=1)
        >>> far = path.table.iloc[-1]
        >>> bool(far.misalignment < far.bound), bool(far.misalignment < 0.01), bool(far.selects_best)
        (True, True, True)
    """
    radii = [check_number(radius, "radii", above=0) for radius in radii] if isinstance(radii, Iterable) else []
    if not radii:
        raise UserError("radii must be a list of positive numbers, at least one")
    check_count(starts, "starts", least=0)
    check_count(max_steps, "max_steps")
    best = _unique(problem)
    solution = _feasible(problem)
    draw, landscape = as_generator(generator), Landscape(problem)
    found = solution.weights
    rows, kept = [], []
    for radius in radii:
        drawn = torch.randn(starts, *problem.shape, generator=draw, dtype=torch.float64)
        with one_thread():
            ends = [
                _minimized(landscape, start, radius, solution, max_steps) for start in (solution.weights, found, *drawn)
            ]
        least, found, residual, steps = min(ends, key=lambda end: end[0])
        kept.append(found)
        apart = misalignment(found, solution.weights)
        rows.append(
            {
                "radius": radius,
                "misalignment": apart,
                "correlation": 1 - apart,
                "bound": path_bound(problem, radius, solution) if problem.linear else math.nan,
                "log_loss_gap": least,
                "selects_best": bool((problem.selected(found) == best).all()),
                "starts": sum(end[0] < least + 1e-6 for end in ends),
                "converged": residual <= STATIONARY,
                "residual": residual,
                "steps": steps,
            }
        )
    selections = torch.stack([problem.selected(one) for one in kept])
    return RegularizationPath(table(rows), torch.stack(kept), selections, solution)


def path_bound(problem: TokenSelection, radius: float, solution: MaxMargin | None = None) -> float:
    r"""Bound one minus the correlation of a minimizer of given norm with the max-margin direction.

    .. math:: 1 - \mathrm{corr}(W_R, W_{mm}) \le \frac{\|W_{mm}\|}{R}
        \log \frac{2 n (T - 1)\, b\, \Delta_{max}}{a\, \Delta_{min}}

    where :math:`-b \le \ell' \le -a` on the range of the scores, :math:`\Delta_{min}` is the least lead of a best token
    over the second and :math:`\Delta_{max}` the greatest over the last.

    Args:
        problem: one with scores, and a unique best token in each sequence.
        radius: R.
        solution: the max-margin solution, if already known.

    Source:
        Derived from :math:`\tfrac12 \min(1, e^{-m}) \le 1 - s_{best} \le (T - 1) e^{-m}` at margin m and the bound of
        :func:`massieu.margin.direction_bound`. It is of order 1/R; measured values fall like its square.

    Example:
        >>> problem = massieu.margin.random_problem(3, 3, 6, kind="equal", loss="linear")
        >>> bound = path_bound(problem, 100.0)
        >>> round(bound / max_margin(problem).lower * 100, 6) == round(math.log(2 * 3 * 2), 6)
        True
    """
    if not problem.linear:
        raise UserError("the bound is derived for scores or a linear head only; measure it by regularization_path")
    check_number(radius, "radius", above=0)
    best = _unique(problem)
    solution = _feasible(problem) if solution is None else solution
    scores = problem.scores[problem.present]
    lead = problem.scores.gather(1, best[:, None]) - problem.scores
    lead = lead[problem.present & ~problem.best]
    log_slopes = {
        "logistic": torch.nn.functional.logsigmoid(-scores),
        "exponential": -scores,
        "linear": torch.zeros_like(scores),
    }[problem.loss]
    log_ratio = float(log_slopes.max() - log_slopes.min() + lead.max().log() - lead.min().log())
    return solution.upper / radius * (math.log(2 * len(best) * (int(problem.lengths.max()) - 1)) + log_ratio)


def locally_optimal(problem: TokenSelection, selection: Tensor | Sequence[int]) -> LocalOptimality:
    """Check if a selection is locally optimal: its program is feasible, and its support tokens have lower scores.

    Tokens whose score is that of the selected one up to rounding are no rivals.

    Args:
        problem: one with scores or a head.
        selection: a token of each sequence, shape ``(sequences,)``.

    Source:
        The definition of Ataee Tarzanagh et al. 2023 as others report it.

    Example:
        >>> problem = massieu.margin.random_problem(4, 3, 12)
        >>> locally_optimal(problem, problem.selection()).optimal
        True
        >>> locally_optimal(problem, problem.scores.argmin(-1)).message
        'sequence 0 has support token 2, whose score is not below that of the selected token 0'
    """
    if problem.targets is not None:
        raise UserError("local optimality compares scores, but the problem has targets, whose loss has one minimum")
    solution = max_margin(problem, selection=selection, rivals="untied")
    if not solution.feasible:
        lead = "no weights select" if solution.feasible is False else "it is undecided if weights can select"
        message = f"{lead} these tokens: none of norm one has a margin above {rounded_up(solution.eps)}"
        return LocalOptimality(False, message, (), solution)
    chosen = solution.selection[:, None]
    pairs = (solution.support & (problem.scores >= problem.scores.gather(1, chosen))).nonzero().tolist()
    offending = tuple((int(i), int(t)) for i, t in pairs)
    message = "the program is feasible, and every support token has a lower score than the selected one"
    if offending:
        i, t = offending[0]
        message = (
            f"sequence {i} has support token {t}, whose score is not below that of the selected token {int(chosen[i])}"
        )
    return LocalOptimality(not offending, message, offending, solution)


def selections_reached(
    problem: TokenSelection,
    starts: Tensor | int = 20,
    *,
    deviation: float = 1.0,
    method: Method = "ngd",
    step: float = 0.5,
    steps: int = 1000,
    generator: torch.Generator | int = 0,
) -> pandas.DataFrame:
    """Descend from many starts and return the selections reached: the cones of initialization, sampled.

    Args:
        problem: one with scores or a head.
        starts: weights, shape ``(starts, dim, query_dim)``, or the number to draw with normal entries.
        deviation: standard deviation of the drawn entries.
        method, step, steps: of :func:`massieu.margin.descend`.
        generator: of the draws, or a seed for one.

    Returns:
        One row for each selection reached, the commonest first: ``selection``, a tuple; ``starts``, the indices of
        those that led there; ``share`` of them; ``saturated``, the share of those runs that ended so; ``best``, True
        for the best one; ``locally_optimal`` and ``message``; ``misalignment`` with the selection's own max-margin
        direction, median and, as ``misalignment_most``, largest.

    Example:
        >>> problem = massieu.margin.random_problem(4, 4, 8)
        >>> reached = selections_reached(problem, 3, steps=300)
        >>> round(float(reached.share.sum()), 9), bool(reached.locally_optimal.all())
        (1.0, True)
    """
    if not isinstance(starts, Tensor):
        count, draw = check_count(starts, "starts", remedy="or pass a tensor of weights"), as_generator(generator)
        starts = deviation * torch.randn(count, *problem.shape, generator=draw, dtype=torch.float64)
    check_shape(starts, "starts", "starts", *problem.shape)
    check_count(len(starts), "starts")
    groups: dict[tuple[int, ...], list[tuple[int, bool, Tensor]]] = {}
    for i, start in enumerate(starts):
        run = descend(problem, method, step=step, steps=steps, start=start, record=[steps], compare=False)
        end = (i, bool(run.history.saturated.iloc[-1]), run.weights)
        groups.setdefault(tuple(run.selection.tolist()), []).append(end)
    rows = [_cone(problem, selection, runs, len(starts)) for selection, runs in groups.items()]
    return table(sorted(rows, key=lambda row: -row["share"]))


def _cone(
    problem: TokenSelection, selection: tuple[int, ...], runs: list[tuple[int, bool, Tensor]], total: int
) -> dict[str, Any]:
    tokens = torch.tensor(selection)
    verdict = locally_optimal(problem, tokens)
    axis = verdict.solution.weights if verdict.solution.feasible else torch.full(problem.shape, torch.nan)
    apart = np.array([misalignment(run[2], axis) for run in runs])
    return {
        "selection": selection,
        "starts": tuple(run[0] for run in runs),
        "share": len(runs) / total,
        "saturated": sum(run[1] for run in runs) / len(runs),
        "best": bool(problem.best.gather(1, tokens[:, None]).all()),
        "locally_optimal": verdict.optimal,
        "message": verdict.message,
        "misalignment": float(np.median(apart)),
        "misalignment_most": float(apart.max()),
    }


def _unique(problem: TokenSelection) -> Tensor:
    """Return the best tokens; raise unless there is one in each sequence."""
    if (problem.best.sum(-1) > 1).any():
        other = "some scores are tied; see descend"
        if problem.targets is not None:
            other = "these targets share their mass; see finite_component"
        raise UserError(f"the path needs one best token in each sequence, but {other}")
    return problem.selection()


def _feasible(problem: TokenSelection) -> MaxMargin:
    solution = max_margin(problem)
    if not solution.feasible:
        raise UserError(
            "the best tokens must be selectable, but no weights were found that put them all first"
            f" (largest margin at norm one: at most {rounded_up(solution.eps)}); there is no direction to compare with"
        )
    return solution


def _minimized(
    landscape: Landscape, start: Tensor, radius: float, solution: MaxMargin, max_steps: int
) -> tuple[float, Tensor, float, int]:
    """Return the least log loss gap on the sphere from one start, its weights, their slope along it, and steps."""
    shape, best = start.shape, solution.selection
    # Values and slopes of the loss are of the order of the radius in units of the max-margin solution.
    unit = radius / solution.upper

    def slope_at(weights: Tensor) -> tuple[float, Floats]:
        """Return the log loss gap, and its gradient by the direction in this unit."""
        gap, gradient = landscape.gap(weights, best), landscape.gradient(weights)
        if gap.sign <= 0:
            raise UserError(
                "the loss must be least with attention on the best tokens, but weights with a lower one were found;"
                " the head prefers mixtures of tokens"
            )
        factor = math.exp(min(gradient.log_scale - gap.log, 700.0)) * solution.upper
        return gap.log, (gradient.matrix * factor).numpy().ravel()

    level = slope_at(torch.zeros_like(start))[0]

    def objective(flat: Floats) -> tuple[float, Floats]:
        size = float(np.linalg.norm(flat))
        direction = flat / size
        value, slope = slope_at(torch.from_numpy(direction).reshape(shape) * radius)
        return (value - level) / unit, (slope - (slope @ direction) * direction) / size

    first = (start / size_of(start)).numpy().ravel()
    if unit < SMALL:
        found, steps, moved = first, 0, math.inf
        while steps < max_steps and moved >= 1e-14:
            slope = slope_at(torch.from_numpy(found).reshape(shape) * radius)[1]
            before, found = found, -slope / (np.linalg.norm(slope) or 1.0)
            moved, steps = float(np.linalg.norm(found - before)), steps + 1
    else:
        options = {"maxiter": max_steps, "maxfun": 2 * max_steps, "maxcor": 30, "ftol": 1e-15, "gtol": 1e-9}
        end = scipy_module("optimize").minimize(objective, first, jac=True, method="L-BFGS-B", options=options)
        found, steps = end.x, int(end.nit)
    weights = torch.from_numpy(found).reshape(shape)
    weights = weights * (radius / weights.norm())
    return slope_at(weights)[0], weights, float(np.linalg.norm(objective(found)[1])), steps
