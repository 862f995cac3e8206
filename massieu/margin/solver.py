"""Max-margin token selection: the weights of least norm that put the selected tokens' logits above all others."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch
from torch import Tensor

from massieu.margin.frobenius import least_frobenius
from massieu.margin.nuclear import least_nuclear
from massieu.margin.problem import TokenSelection
from massieu.margin.program import Program, Solved, one_thread

__all__ = ["MaxMargin", "direction_bound", "max_margin"]

ACTIVE = 1e-9
"""A multiplier above this part of the largest one belongs to an active constraint."""


@dataclass(frozen=True)
class MaxMargin:
    """A max-margin solution with the bounds that certify it, or a certificate that there is none.

    Attributes:
        weights: shape ``(dim, query_dim)``; logits are X W z, and the least margin is one. Where the data are not
            feasible, weights whose margin is not positive.
        selection: the token of each sequence that is to win, shape ``(sequences,)``.
        rivals: the tokens that it is to exceed, boolean, shape ``(sequences, length)``.
        dual: multipliers, shape ``(sequences, length)``; zero at selected and absent tokens, and of either sign at
            tokens that are to be equal to the selected one. Those of rivals sum to the squared Frobenius norm of
            ``weights``, or to the nuclear norm.
        support: tokens whose constraint is active: multiplier not zero, or equality; the same shape.
        margin: largest margin of weights of norm one, which is one over the norm of ``weights``.
        lower, upper: the least norm lies between them, whatever the solver did.
        feasible: weights with a positive margin were found.
        farkas: multipliers, of sum one over the rivals, that show that there are none, the same shape, or None.
        eps: no weights of norm one have a margin above it: norm of the constraints summed with ``farkas``.
        converged: the bounds agree to the tolerance, or eps is zero up to rounding.
        products: Gram products spent.
        norm: "fro" or "nuc".
        ties: "pick" or "equal".
    """

    weights: Tensor
    selection: Tensor
    rivals: Tensor
    dual: Tensor
    support: Tensor
    margin: float
    lower: float
    upper: float
    feasible: bool
    farkas: Tensor | None
    eps: float
    converged: bool
    products: int
    norm: str
    ties: str

    @property
    def gap(self) -> float:
        """Relative distance of the bounds; infinite where the data are not feasible."""
        if not self.feasible:
            return float("inf")
        return self.upper / self.lower - 1 if self.upper > 0 else 0.0

    @property
    def direction(self) -> Tensor:
        """The weights over their norm, the one that was minimised; zero where nothing was asked."""
        size = torch.linalg.matrix_norm(self.weights, self.norm)
        return self.weights / size if size > 0 else self.weights


def max_margin(
    problem: TokenSelection,
    *,
    norm: str = "fro",
    ties: str = "pick",
    selection: Tensor | None = None,
    tolerance: float | None = None,
    rounds: int = 6,
    limit: int = 1000,
) -> MaxMargin:
    r"""Weights of least norm under which every selected token's logit exceeds all others by one.

    .. math:: \min_W |W| \quad\text{subject to}\quad \langle x_{i\alpha_i} - x_{it}, W z_i \rangle \ge 1
        \quad\text{for all } t \ne \alpha_i.

    Where a sequence has several best tokens, ``ties`` says what is asked of them. With "pick" one of them has to exceed
    all tokens that are not best, and nothing is asked among them: a union of programs over the ways to pick, the right
    one for tied scores. With "equal" they have equal logits and all exceed the others, the right program for targets
    with several tokens. ``selection`` overrides both: the given token has to exceed every other one.

    Args:
        problem: tokens, queries and which tokens are best.
        norm: "fro" for the Frobenius norm, whose solution is unique, or "nuc" for the nuclear norm.
        ties: "pick" or "equal".
        selection: any token of each sequence, shape ``(sequences,)``, instead of the best.
        tolerance: on the relative gap between upper and lower bound.
        rounds: of the solver, each with twice the steps of the last.
        limit: programs to solve for a union before giving up.

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
    if norm not in ("fro", "nuc"):
        raise ValueError(f"norm must be 'fro' or 'nuc', got {norm!r}")
    if ties not in ("pick", "equal"):
        raise ValueError(f"ties must be 'pick' or 'equal', got {ties!r}")
    tolerance = (1e-10 if norm == "fro" else 1e-6) if tolerance is None else tolerance
    if tolerance <= 0 or rounds < 1 or limit < 1:
        raise ValueError(
            f"tolerance must be positive, rounds and limit at least one, got {tolerance}, {rounds} and {limit}"
        )
    alternatives = problem.best
    if selection is not None:
        alternatives = _chosen(problem, selection)
    with one_thread():
        search = _Search(problem, alternatives, norm, ties, tolerance, rounds)
        return search.run(limit)


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
        raise ValueError("solution must be feasible and of the Frobenius norm, where the bound is derived")
    others = problem.present & ~solution.rivals
    if solution.ties == "equal" and (others.sum(-1) > 1).any():
        raise ValueError("solution must not ask for equal logits, which other weights do not have; use ties='pick'")
    weights = torch.as_tensor(weights).double()
    if weights.shape != problem.shape or not weights.any():
        raise ValueError(f"weights must have shape {problem.shape} and not vanish, got shape {tuple(weights.shape)}")
    logits = problem.logits(weights)
    values = logits.gather(1, solution.selection[:, None]) - logits
    return float(values[solution.rivals].min() / weights.norm()) * solution.lower


def _chosen(problem: TokenSelection, selection: Tensor) -> Tensor:
    """A selection as flags ``(sequences, length)``."""
    selection = torch.as_tensor(selection)
    shape = (len(problem.tokens),)
    inside = selection.shape == shape and bool(((selection >= 0) & (selection < problem.lengths)).all())
    if selection.shape != shape or selection.dtype.is_floating_point or not inside:
        raise ValueError(
            f"selection must be the index of a token for each of the {shape[0]} sequences, got {selection.tolist()}"
        )
    return torch.nn.functional.one_hot(selection.long(), problem.tokens.shape[1]).bool()


class _Search:
    """Best first over partial picks: a sequence is decided only once the weights found without it fail it."""

    def __init__(
        self, problem: TokenSelection, alternatives: Tensor, norm: str, ties: str, tolerance: float, rounds: int
    ) -> None:
        self.problem, self.alternatives, self.norm, self.ties = problem, alternatives, norm, ties
        self.tolerance, self.rounds, self.products = tolerance, rounds, 0
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
                    raise ValueError(
                        f"the best of all ways to pick from tied tokens must be found within {limit} programs, but"
                        f" {int(self.several.sum())} sequences are tied; raise limit, or give a selection"
                    )
                pick = selection.clone()
                pick[worst] = token
                left = undecided.clone()
                left[worst] = False
                visit(pick, left)
        # Every pick is covered by a program that failed, and the largest bound on their margins holds for all.
        return self.result(*max(failed, key=lambda pair: pair[0].eps))

    def solve(self, selection: Tensor, undecided: Tensor) -> Solved:
        """The program of the decided sequences."""
        problem = self.problem
        equal = self.alternatives.clone() if self.ties == "equal" else torch.zeros_like(self.alternatives)
        equal.scatter_(1, selection[:, None], False)
        least = problem.present & ~self.alternatives & ~undecided[:, None]
        arrays = (problem.differences(selection), problem.queries, least, equal)
        program = Program(*(array.numpy() for array in arrays))
        solver = least_frobenius if self.norm == "fro" else least_nuclear
        found = solver(program, tolerance=self.tolerance, rounds=self.rounds)
        self.products += found.products
        return found

    def complete(self, found: Solved, selection: Tensor, undecided: Tensor) -> tuple[Tensor, int | None]:
        """Give undecided sequences their best pick under the weights; which of them fails most, if one does."""
        logits = self.problem.logits(torch.from_numpy(found.weights))
        top = logits.masked_fill(~self.alternatives, -torch.inf)
        rest = logits.masked_fill(self.alternatives, -torch.inf)
        selection = torch.where(undecided, top.argmax(-1), selection)
        slack = (top.amax(-1) - rest.amax(-1)).masked_fill(~undecided, torch.inf)
        least = float(slack.min())
        return selection, None if least >= 1 - self.tolerance else int(slack.argmin())

    def result(self, found: Solved, selection: Tensor) -> MaxMargin:
        dual, rivals = torch.from_numpy(found.multipliers), self.problem.present & ~self.alternatives
        equal = self.alternatives.scatter(1, selection[:, None], False) & (self.ties == "equal")
        weights = torch.from_numpy(np.ascontiguousarray(found.weights))
        size = float(torch.linalg.matrix_norm(weights, self.norm))
        return MaxMargin(
            weights=weights,
            selection=selection,
            rivals=rivals,
            dual=dual,
            support=(rivals & (dual > ACTIVE * dual[rivals].max())) | equal if rivals.any() else equal,
            margin=1 / size if found.feasible and size > 0 else float("inf") if found.feasible else 0.0,
            lower=found.lower,
            upper=found.upper,
            feasible=found.feasible,
            farkas=None if found.farkas is None else torch.from_numpy(found.farkas),
            eps=found.eps,
            converged=found.converged,
            products=self.products,
            norm=self.norm,
            ties=self.ties,
        )
