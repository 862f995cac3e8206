"""Where training can go: minimizers at growing radius, selections that hold descent, and the starts that lead there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

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
"""A slope along the sphere, per norm of the max-margin solution, that counts as none."""


@dataclass(frozen=True)
class RegularizationPath:
    """Weights of least loss at given norms.

    Attributes:
        table: one row for each radius: ``radius``; ``misalignment`` and ``correlation`` with the max-margin direction
            of the best tokens; ``bound`` that is proven for the misalignment; ``log_loss_gap`` above the best tokens;
            ``selects_best``; ``starts`` that ended within 1e-6 of the least ``log_loss_gap``; ``converged``, whether
            the slope along the sphere vanishes at the one that was kept, to 1e-6 of its natural size.
        weights: shape ``(radii, dim, query_dim)``.
        selections: the tokens of highest logit, shape ``(radii, sequences)``.
        solution: the max-margin solution of the best tokens.
    """

    table: pandas.DataFrame
    weights: Tensor
    selections: Tensor
    solution: MaxMargin


@dataclass(frozen=True)
class LocalOptimality:
    """Whether a selection can hold descent, and why.

    Attributes:
        optimal: the verdict.
        reason: a sentence.
        offending: pairs of sequence and token: support tokens whose score is not below the selected one's.
        solution: the max-margin solution of the selection.
    """

    optimal: bool
    reason: str
    offending: tuple[tuple[int, int], ...]
    solution: MaxMargin


def regularization_path(
    problem: TokenSelection,
    radii: Sequence[float],
    *,
    starts: int = 5,
    generator: torch.Generator | int = 0,
    steps: int = 2000,
) -> RegularizationPath:
    r"""Minimize the loss over weights of given norms.

    .. math:: W_R = \arg\min_{\|W\|_F = R} \log(L(W) - L^*)

    by L-BFGS over directions, from random starts, the max-margin direction and the minimizer of the last radius; the
    least is kept, and nothing proves that it is the global one. On the sphere, not in the ball: at small radii the
    least loss of the ball may be inside. At radii below 1e-4 of the norm of the max-margin solution, where losses
    differ by rounding, directions opposite to the gradient are iterated instead, which is a contraction there.

    Args:
        problem: one with a unique best token in each sequence, which must be feasible.
        radii: positive norms, whose natural unit is the norm of the max-margin solution.
        starts: random ones at each radius.
        generator: of the starts, or a seed for one.
        steps: of L-BFGS at most, for each start.

    Source:
        Ataee Tarzanagh et al. 2023: the direction of the minimizer tends to the max-margin one.

    Example:
        >>> problem = massieu.margin.random_problem(3, 3, 6, kind="equal")
        >>> path = regularization_path(problem, [10.0, 100.0], starts=1)
        >>> far = path.table.iloc[-1]
        >>> bool(far.misalignment < far.bound), bool(far.misalignment < 0.01), bool(far.selects_best)
        (True, True, True)
    """
    if isinstance(radii, (int, float)):
        raise ValueError(f"radii must be a list of numbers, got {radii}; give [{radii}]")
    radii = [float(radius) for radius in radii]
    if not radii or not all(math.isfinite(radius) and radius > 0 for radius in radii):
        raise ValueError(f"radii must be positive numbers, at least one; got {radii}")
    if not isinstance(starts, Integral) or starts < 0:
        raise ValueError(f"starts must be a whole number and not negative, got {starts}")
    best = _unique(problem)
    solution = _feasible(problem)
    provable = problem.linear
    draw = torch.Generator().manual_seed(generator) if isinstance(generator, int) else generator
    landscape, rows = Landscape(problem), []
    found = solution.weights
    kept = []
    for radius in radii:
        drawn = torch.randn(starts, *problem.shape, generator=draw, dtype=torch.float64)
        with one_thread():
            ends = [
                _minimized(landscape, start, radius, solution, steps) for start in (solution.weights, found, *drawn)
            ]
        least, found, converged = min(ends, key=lambda end: end[0])
        kept.append(found)
        apart = misalignment(found, solution.weights)
        rows.append(
            {
                "radius": float(radius),
                "misalignment": apart,
                "correlation": 1 - apart,
                "bound": path_bound(problem, radius, solution) if provable else math.nan,
                "log_loss_gap": least,
                "selects_best": bool((problem.selected(found) == best).all()),
                "starts": sum(end[0] < least + 1e-6 for end in ends),
                "converged": converged,
            }
        )
    weights = torch.stack(kept)
    return RegularizationPath(table(rows), weights, torch.stack([problem.selected(one) for one in kept]), solution)


def path_bound(problem: TokenSelection, radius: float, solution: MaxMargin | None = None) -> float:
    r"""How far from the max-margin direction a minimizer of given norm can be, as one minus the correlation.

    .. math:: 1 - \mathrm{corr}(W_R, W_{mm}) \le \frac{\|W_{mm}\|}{R}
        \log \frac{2 n (T - 1)\, b\, \Delta_{max}}{a\, \Delta_{min}}

    where :math:`-b \le \ell' \le -a` on the range of the scores, :math:`\Delta_{min}` is the least lead of a best token
    over the second and :math:`\Delta_{max}` the greatest over the last.

    Args:
        problem: one with scores, and a unique best token in each sequence.
        radius: R.
        solution: the max-margin solution, if it is there already.

    Source:
        Derived from :math:`\tfrac12 \min(1, e^{-m}) \le 1 - s_{best} \le (T - 1) e^{-m}` at margin m and the bound of
        :func:`massieu.margin.direction_bound`. It is of order 1/R; what is measured falls like its square.

    Example:
        >>> problem = massieu.margin.random_problem(3, 3, 6, kind="equal", loss="linear")
        >>> bound = path_bound(problem, 100.0)
        >>> round(bound / max_margin(problem).lower * 100, 6) == round(math.log(2 * 3 * 2), 6)
        True
    """
    if not problem.linear:
        raise ValueError(
            "the bound is derived for scores or a linear head, but the loss is another; compare measured ones"
        )
    if not (math.isfinite(radius) and radius > 0):
        raise ValueError(f"radius must be a positive number, got {radius}")
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
    """Whether descent can stay with a selection: its program is feasible, and its support tokens have lower scores.

    Tokens whose score is that of the selected one up to rounding are no rivals: nothing is asked of them.

    Args:
        problem: one with scores or a head.
        selection: a token of each sequence, shape ``(sequences,)``.

    Source:
        The definition of Ataee Tarzanagh et al. 2023 as others report it.

    Example:
        >>> problem = massieu.margin.random_problem(4, 3, 12)
        >>> locally_optimal(problem, problem.selection()).optimal
        True
        >>> locally_optimal(problem, problem.scores.argmin(-1)).reason
        'sequence 0 has support token 2, whose score is not below that of the selected token 0'
    """
    if problem.targets is not None:
        raise ValueError("local optimality compares scores, but the problem has targets, whose loss has one minimum")
    solution = max_margin(problem, selection=selection, rivals="untied")
    if not solution.feasible:
        lead = "no weights select" if solution.feasible is False else "it is undecided if weights can select"
        reason = f"{lead} these tokens: none of norm one has a margin above {rounded_up(solution.eps)}"
        return LocalOptimality(False, reason, (), solution)
    chosen = solution.selection[:, None]
    pairs = (solution.support & (problem.scores >= problem.scores.gather(1, chosen))).nonzero().tolist()
    offending = tuple((int(i), int(t)) for i, t in pairs)
    reason = "the program is feasible, and every support token has a lower score than the selected one"
    if offending:
        i, t = offending[0]
        reason = (
            f"sequence {i} has support token {t}, whose score is not below that of the selected token {int(chosen[i])}"
        )
    return LocalOptimality(not offending, reason, offending, solution)


def selections_reached(
    problem: TokenSelection,
    starts: Tensor | int = 20,
    *,
    scale: float = 1.0,
    method: Method = "ngd",
    step: float = 0.5,
    steps: int = 1000,
    generator: torch.Generator | int = 0,
) -> pandas.DataFrame:
    """Which selection descent reaches from which start: the cones of initialization, sampled.

    Args:
        problem: one with scores or a head.
        starts: weights, shape ``(starts, dim, query_dim)``, or how many to draw with normal entries.
        scale: of the drawn entries.
        method, step, steps: of :func:`massieu.margin.descend`.
        generator: of the draws, or a seed for one.

    Returns:
        One row for each selection reached, the commonest first: ``selection``, a tuple; ``starts``, the indices of
        those that led there; ``share`` of them; ``saturated``, the share of those runs that ended so; ``best``, whether
        it is the best one; ``locally_optimal`` and ``reason``; ``misalignment`` with the selection's own max-margin
        direction, median and, as ``misalignment_most``, largest.

    Example:
        >>> problem = massieu.margin.random_problem(4, 4, 8)
        >>> reached = selections_reached(problem, 3, steps=300)
        >>> round(float(reached.share.sum()), 9), bool(reached.locally_optimal.all())
        (1.0, True)
    """
    if not isinstance(starts, Tensor):
        if not isinstance(starts, Integral) or starts < 1:
            raise ValueError(f"starts must be a whole number, at least one, or a tensor of weights; got {starts}")
        draw = torch.Generator().manual_seed(generator) if isinstance(generator, int) else generator
        starts = scale * torch.randn(int(starts), *problem.shape, generator=draw, dtype=torch.float64)
    if starts.ndim != 3 or tuple(starts.shape[1:]) != problem.shape or len(starts) == 0:
        raise ValueError(
            f"starts must have shape (starts, {problem.shape[0]}, {problem.shape[1]}), got {tuple(starts.shape)}"
        )
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
        "reason": verdict.reason,
        "misalignment": float(np.median(apart)),
        "misalignment_most": float(apart.max()),
    }


def _unique(problem: TokenSelection) -> Tensor:
    """The best tokens, of which there must be one in each sequence."""
    if problem.targets is not None and (problem.best.sum(-1) > 1).any():
        raise ValueError(
            "the path needs one best token in each sequence, but these targets share their mass; see finite_component"
        )
    if (problem.best.sum(-1) > 1).any():
        raise ValueError("the path needs one best token in each sequence, but some scores are tied; see descend")
    return problem.selection()


def _feasible(problem: TokenSelection) -> MaxMargin:
    solution = max_margin(problem)
    if not solution.feasible:
        raise ValueError(
            "the best tokens must be selectable, but no weights were found that put them all first"
            f" (largest margin at norm one: at most {rounded_up(solution.eps)}); there is no direction to compare with"
        )
    return solution


def _minimized(
    landscape: Landscape, start: Tensor, radius: float, solution: MaxMargin, steps: int
) -> tuple[float, Tensor, bool]:
    """The least log loss gap on the sphere that one start leads to, its weights, and whether it is stationary there."""
    shape, best = start.shape, solution.selection
    # What the loss sees is the radius in units of the max-margin solution: of that order are values and their slopes.
    unit = radius / solution.upper

    def slope_at(weights: Tensor) -> tuple[float, Floats]:
        """Log loss gap, and its gradient by the direction in this unit."""
        gap, gradient = landscape.gap(weights, best), landscape.gradient(weights)
        if gap.sign <= 0:
            raise ValueError(
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
        found = first
        for _ in range(steps):
            slope = slope_at(torch.from_numpy(found).reshape(shape) * radius)[1]
            before, found = found, -slope / (np.linalg.norm(slope) or 1.0)
            if np.linalg.norm(found - before) < 1e-14:
                break
    else:
        options = {"maxiter": steps, "maxfun": 2 * steps, "maxcor": 30, "ftol": 1e-15, "gtol": 1e-9}
        found = scipy_module("optimize").minimize(objective, first, jac=True, method="L-BFGS-B", options=options).x
    weights = torch.from_numpy(found).reshape(shape)
    weights = weights * (radius / weights.norm())
    return slope_at(weights)[0], weights, float(np.linalg.norm(objective(found)[1])) <= STATIONARY
