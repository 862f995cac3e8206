"""Max-margin token selection: weights of least norm that put the selected tokens' logits above all others."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, Context
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor

from massieu.checks import UserError, check_choice, check_count, check_number
from massieu.margin.frobenius import least_frobenius
from massieu.margin.nuclear import least_nuclear
from massieu.margin.problem import TokenSelection
from massieu.margin.program import CANCEL, RESOLUTION, Program, Solved, one_thread

__all__ = ["LeastNorm", "MaxMargin", "direction_bound", "least_norm", "max_margin", "rounded_up"]

ACTIVE = 1e-9
"""A multiplier above this part of the largest one belongs to an active constraint."""


@dataclass(frozen=True, repr=False)
class LeastNorm:
    """Weights of least norm with the bounds that certify them, or a certificate that none have a margin.

    Attributes:
        weights: shape ``(dim, query_dim)``; logits are X W z, and the least margin is one. Where the data are not
            feasible, weights whose margin is not positive.
        dual: multipliers of the constraints.
        lower, upper: certified bounds of the least norm.
        feasible: True if weights with a positive margin were found, False if ``farkas`` proves that there are none,
            None if undecided. None comes of too small ``max_steps``, or of data whose largest margin is below about
            1e-8 where every constraint has size one: rounding hides smaller ones from the solver.
        farkas: multipliers that prove that no weights have a margin, or None. They prove it up to rounding:
            constraints that cancel to 1e-15 of their own size count as cancelling.
        eps: upper bound of the margin of weights of norm one: norm of the constraints summed with the multipliers.
        converged: the bounds agree to the tolerance, or ``farkas`` is given.
        steps: steps of the solver, summed over all programs.
        products: Gram products spent, the unit of cost.
    """

    weights: Tensor
    dual: Tensor
    lower: float
    upper: float
    feasible: bool | None
    farkas: Tensor | None
    eps: float
    converged: bool
    steps: int
    products: int

    @property
    def margin(self) -> float:
        """Largest margin of weights of norm one: one over the norm of ``weights``."""
        return 1 / self.upper if self.upper > 0 else float("inf")

    @property
    def gap(self) -> float:
        """Relative distance of the bounds; infinite where the data are not feasible."""
        if not self.feasible:
            return float("inf")
        return self.upper / self.lower - 1 if self.upper > 0 else 0.0

    @property
    def residual(self) -> float:
        """The gap; ``eps`` where the data are not feasible."""
        return self.gap if self.feasible else self.eps

    @property
    def message(self) -> str:
        """Outcome of the solver, a sentence."""
        if self.upper == 0:
            return "no constraints: all tokens are tied"
        if self.feasible and self.converged:
            return f"solved: the bounds agree to {self.gap:.0e}"
        if self.feasible:
            return f"stopped early: feasible, but the bounds agree only to {self.gap:.0e}; raise max_steps"
        if self.feasible is False:
            return f"infeasible: constraints of size one cancel to less than {CANCEL:.0e}, so no weights have a margin"
        return (
            f"undecided: no margin was found, and none above {rounded_up(self.eps)} exists;"
            f" margins below {RESOLUTION:.0e} are not always resolved, so raise max_steps or rescale the data"
        )


@dataclass(frozen=True, repr=False)
class MaxMargin(LeastNorm):
    """Max-margin solution of token selection.

    Attributes:
        dual: shape ``(sequences, length)``; zero at selected and absent tokens, and of either sign at tokens that are
            to be equal to the selected one. Those of rivals sum to the squared Frobenius norm of ``weights``, or to the
            nuclear norm.
        farkas: of sum one over the rivals, the same shape, or None. If tied tokens were to be picked, those of the pick
            with the largest bound ``eps``.
        selection: the token of each sequence that is to win, shape ``(sequences,)``.
        rivals: the tokens that it is to exceed, boolean, shape ``(sequences, length)``.
        support: tokens whose constraint is active: multiplier not zero, or equality; the same shape.
        norm: "fro" or "nuc".
        ties: "pick" or "equal".
    """

    selection: Tensor
    rivals: Tensor
    support: Tensor
    norm: str
    ties: str

    def __repr__(self) -> str:
        (sequences, length), (dim, query_dim) = self.rivals.shape, self.weights.shape
        shown = [
            f"MaxMargin of {sequences} sequences of {length} tokens, weights {dim} by {query_dim}, norm {self.norm!r}"
        ]
        if self.feasible:
            shown += [
                f"margin {self.margin:.4g} of weights of norm one; the least norm lies between {self.lower:.6g} and"
                f" {self.upper:.6g}",
                f"{int(self.support.sum())} of {int(self.rivals.sum())} rivals are support tokens",
            ]
        return "\n".join((*shown, self.message))

    @property
    def direction(self) -> Tensor:
        """The weights over the norm that was minimized; zero without constraints."""
        size = torch.linalg.matrix_norm(self.weights, self.norm)
        return self.weights / size if size > 0 else self.weights


def max_margin(
    problem: TokenSelection,
    norm: str = "fro",
    *,
    ties: str = "pick",
    selection: Tensor | Sequence[int] | None = None,
    rivals: Tensor | str = "all",
    tolerance: float | None = None,
    max_steps: int = 6,
    limit: int = 1000,
) -> MaxMargin:
    r"""Weights of least norm under which every selected token's logit exceeds all others by one.

    .. math:: \min_W |W| \quad\text{subject to}\quad \langle x_{i\alpha_i} - x_{it}, W z_i \rangle \ge 1
        \quad\text{for all } t \ne \alpha_i.

    Where a sequence has several best tokens, ``ties`` sets their constraints. With "pick" one of them has to exceed all
    tokens that are not best, without constraints among them: a union of programs over the ways to pick, the right one
    for tied scores. With "equal" they have equal logits and all exceed the others, the right program for targets with
    several tokens. ``selection`` overrides both: the given token has to exceed its ``rivals``.

    Args:
        problem: tokens, queries and which tokens are best.
        norm: "fro" for the Frobenius norm, whose solution is unique, or "nuc" for the nuclear norm.
        ties: "pick" or "equal".
        selection: any token of each sequence, shape ``(sequences,)``, instead of the best.
        rivals: the tokens that a given selection has to exceed: "all" others; those "untied" with it, as in descent,
            which gains nothing between tokens of equal score; or flags ``(sequences, length)``.
        tolerance: on the relative gap between the bounds; by default 1e-10, or 1e-6 for the nuclear norm.
        max_steps: steps of the solver, each with twice the iterations of the last; of 100 iterations for the nuclear
            norm.
        limit: largest number of programs to solve for a union, which raises beyond it. Their number grows with the
            sequences whose pick matters, at worst as the product of their tied tokens.

    Source:
        Ataee Tarzanagh et al. 2023, "Transformers as support vector machines"; bounds and union are derived from the
        dual, for any multipliers :math:`\lambda \ge 0` and any W with margin m(W) > 0:
        :math:`1^\top\lambda / |A^\top\lambda| \le |W^*| \le |W| / m(W)`, with the dual norm on the left.

    Example:
        >>> tokens, query = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]]), torch.tensor([[1.0, 0.0]])
        >>> found = max_margin(TokenSelection(tokens, query, scores=torch.tensor([[1.0, 0.0]])))
        >>> found.weights
        tensor([[ 0.5000,  0.0000],
                [-0.5000,  0.0000]], dtype=torch.float64)
        >>> round(found.margin, 4), found.gap < 1e-9, found.support.tolist()
        (1.4142, True, [[False, True]])
    """
    check_choice(ties, "ties", ("pick", "equal"))
    check_count(limit, "limit")
    if selection is None:
        if not isinstance(rivals, str) or rivals != "all":
            raise UserError("rivals belong to a given selection; the best tokens have all others as rivals")
        chosen, lose = problem.best, problem.present & ~problem.best
    else:
        chosen = torch.nn.functional.one_hot(problem.picked(selection), problem.tokens.shape[1]).bool()
        lose = _rivals(problem, chosen, rivals)
    return _Search(problem, chosen, lose, norm, ties, tolerance, max_steps).run(limit)


def direction_bound(problem: TokenSelection, weights: Tensor, solution: MaxMargin) -> float:
    r"""A lower bound of the correlation between weights and the max-margin weights, from their margins alone.

    .. math:: \frac{\langle W, W^* \rangle}{|W| |W^*|} \ge \frac{m(W)}{|W|} \, |W^*|,

    since W / m(W) is feasible and W* the feasible point nearest to zero. The certified lower bound stands for |W*|, so
    the bound holds even if the solution is not exact; it is not positive where some margin is not.

    Args:
        problem: that the solution belongs to.
        weights: shape ``(dim, query_dim)``.
        solution: of ``max_margin`` for the Frobenius norm, feasible and without equalities.

    Source:
        Derived; the weights need not come from a solver.

    Example:
        >>> tokens, query = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]]), torch.tensor([[1.0, 0.0]])
        >>> problem = TokenSelection(tokens, query, scores=torch.tensor([[1.0, 0.0]]))
        >>> round(direction_bound(problem, torch.tensor([[1.0, 0.0], [0.0, 0.0]]), max_margin(problem)), 4)
        0.7071
    """
    if solution.norm != "fro" or not solution.feasible:
        raise UserError("solution must be feasible and of the Frobenius norm, where the bound is derived")
    if solution.rivals.shape != problem.present.shape or (solution.rivals & ~problem.present).any():
        raise UserError("solution must be one of this problem, but its tokens are others")
    if not solution.rivals.any():
        raise UserError("solution must have constraints, but all tokens are tied: there is no direction")
    others = problem.present & ~solution.rivals
    if solution.ties == "equal" and (others.sum(-1) > 1).any():
        raise UserError("solution must not have equal logits, which other weights do not have; use ties='pick'")
    weights = problem.as_weights(weights)
    if not weights.any():
        raise UserError("weights must not vanish: zero has no direction")
    logits = problem.logits(weights)
    values = logits.gather(1, solution.selection[:, None]) - logits
    size = weights.abs().max()  # so that squares do not overflow
    return float(values[solution.rivals].min() / size / (weights / size).norm()) * solution.lower


def _rivals(problem: TokenSelection, chosen: Tensor, rivals: Tensor | str) -> Tensor:
    """Return the tokens that selected ones have to exceed, as flags ``(sequences, length)``."""
    if isinstance(rivals, str):
        check_choice(rivals, "rivals", ("all", "untied"))
        tied = chosen if rivals == "all" else problem.tied(chosen.int().argmax(-1))
        return problem.present & ~tied
    flags = torch.as_tensor(rivals)
    if flags.shape != chosen.shape or flags.dtype != torch.bool or (flags & (chosen | ~problem.present)).any():
        raise UserError(
            f"rivals must be flags of shape {tuple(chosen.shape)}, false at selected and absent tokens,"
            f" got shape {tuple(flags.shape)} of {flags.dtype}"
        )
    return flags


class _Search:
    """Best-first search over partial picks: a sequence is decided only once the weights found without it fail it."""

    def __init__(
        self,
        problem: TokenSelection,
        alternatives: Tensor,
        rivals: Tensor,
        norm: str,
        ties: str,
        tolerance: float | None,
        max_steps: int,
    ) -> None:
        self.problem, self.alternatives, self.rivals, self.norm, self.ties = problem, alternatives, rivals, norm, ties
        self.tolerance, self.max_steps = tolerance, max_steps
        self.slack = default_tolerance(norm) if tolerance is None else tolerance
        self.steps = self.products = 0
        self.several = alternatives.sum(-1) > 1

    def run(self, limit: int) -> MaxMargin:
        undecided = self.several if self.ties == "pick" else torch.zeros_like(self.several)
        first = (self.alternatives.int().argmax(-1), undecided)
        order = count()  # tells programs of equal bounds apart
        queue: list[tuple[float, int, Solved, Tensor, Tensor]] = []
        failed: list[tuple[Solved, Tensor]] = []
        solved = 0

        def visit(selection: Tensor, undecided: Tensor) -> None:
            found = self.solve(selection, undecided)
            if found.feasible:
                heapq.heappush(queue, (found.lower, next(order), found, selection, undecided))
            else:
                failed.append((found, selection))

        visit(*first)
        while queue:
            _, _, found, selection, undecided = heapq.heappop(queue)
            selection, worst = self.complete(found, selection, undecided)
            if worst is None:
                return self.result(found, selection)
            for token in self.alternatives[worst].nonzero().flatten().tolist():
                solved += 1
                if solved >= limit:
                    raise UserError(
                        f"the best of all ways to pick from tied tokens must be found within {limit} programs, but"
                        f" {int(self.several.sum())} sequences are tied; call max_margin with a larger limit,"
                        " or with a selection"
                    )
                pick = selection.clone()
                pick[worst] = token
                left = undecided.clone()
                left[worst] = False
                visit(pick, left)
        # Every pick is covered by a program that failed, and the largest bound on their margins holds for all; the
        # outcome is undecided while one of them is.
        return self.result(*max(failed, key=lambda pair: (not pair[0].converged, pair[0].eps)))

    def solve(self, selection: Tensor, undecided: Tensor) -> Solved:
        """The program of the decided sequences."""
        problem = self.problem
        equal = self.alternatives.clone() if self.ties == "equal" else torch.zeros_like(self.alternatives)
        equal.scatter_(1, selection[:, None], False)
        least = self.rivals & ~undecided[:, None]
        arrays = (problem.differences(selection), problem.queries, least, equal)
        found = least_norm(arrays, self.norm, tolerance=self.tolerance, max_steps=self.max_steps)
        self.steps += found.steps
        self.products += found.products
        return found

    def complete(self, found: Solved, selection: Tensor, undecided: Tensor) -> tuple[Tensor, int | None]:
        """Give undecided sequences their best pick under the weights; also return the one that fails most, or None."""
        logits = self.problem.logits(torch.from_numpy(found.weights))
        top = logits.masked_fill(~self.alternatives, -torch.inf)
        rest = logits.masked_fill(~self.rivals, -torch.inf)
        selection = torch.where(undecided, top.argmax(-1), selection)
        slack = (top.amax(-1) - rest.amax(-1)).masked_fill(~undecided, torch.inf)
        least = float(slack.min())
        return selection, None if least >= 1 - self.slack else int(slack.argmin())

    def result(self, found: Solved, selection: Tensor) -> MaxMargin:
        fields, rivals = as_tensors(replace(found, steps=self.steps, products=self.products)), self.rivals
        dual = fields["dual"]
        equal = self.alternatives.scatter(1, selection[:, None], False) & (self.ties == "equal")
        support = (rivals & (dual > ACTIVE * dual[rivals].max())) | equal if rivals.any() else equal
        return MaxMargin(**fields, selection=selection, rivals=rivals, support=support, norm=self.norm, ties=self.ties)


def default_tolerance(norm: str) -> float:
    return 1e-10 if norm == "fro" else 1e-6


def least_norm(
    arrays: tuple[Tensor, Tensor, Tensor, Tensor], norm: str, *, tolerance: float | None, max_steps: int
) -> Solved:
    """Solve the program of these arrays (see :class:`~massieu.margin.program.Program`) on one thread."""
    check_choice(norm, "norm", ("fro", "nuc"))
    check_count(max_steps, "max_steps")
    tolerance = default_tolerance(norm) if tolerance is None else check_number(tolerance, "tolerance", above=0, below=1)
    program = Program(*(array.numpy() for array in arrays))
    solver = least_frobenius if norm == "fro" else least_nuclear
    with one_thread():
        return program.natural(solver(program, tolerance=tolerance, max_steps=max_steps))


def as_tensors(found: Solved) -> dict[str, Any]:
    """Return the fields of :class:`LeastNorm` of a solved program."""
    return {
        **{
            name: getattr(found, name)
            for name in ("lower", "upper", "feasible", "eps", "converged", "steps", "products")
        },
        "weights": torch.from_numpy(np.ascontiguousarray(found.weights)),
        "dual": torch.from_numpy(found.multipliers),
        "farkas": None if found.farkas is None else torch.from_numpy(found.farkas),
    }


def rounded_up(bound: float) -> str:
    """Return an upper bound with one digit, rounded up so that the text is an upper bound too.

    Example:
        >>> rounded_up(2.4985e-11), rounded_up(0.25), rounded_up(0.0)
        ('3e-11', '0.3', '0')
    """
    return f"{float(Context(prec=1, rounding=ROUND_CEILING).create_decimal_from_float(bound)):.1g}"
