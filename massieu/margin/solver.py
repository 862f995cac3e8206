"""Max-margin token selection: the weights of least norm that put the selected tokens' logits above all others."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch
from torch import Tensor

from massieu.margin.minimum_norm import checked_tolerance, least_norm, sentence
from massieu.margin.problem import TokenSelection
from massieu.margin.program import Program, Solved

__all__ = ["MaxMargin", "direction_bound", "max_margin"]

ACTIVE = 1e-9
"""A multiplier above this part of the largest one belongs to an active constraint."""


@dataclass(frozen=True, repr=False)
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
        feasible: True if weights with a positive margin were found, False if ``farkas`` shows that there are none, None
            if neither was. None comes of too few ``rounds``, or of data whose largest margin is below about 1e-8 where
            every constraint has size one: rounding hides smaller ones from the solver.
        farkas: multipliers, of sum one over the rivals, that show that there are none, the same shape, or None. They
            show it up to rounding: constraints that cancel to 1e-15 of their own size count as cancelling. If tied
            tokens were to be picked, those of the pick that failed least.
        eps: no weights of norm one have a margin above it: norm of the constraints summed with the multipliers.
        converged: the bounds agree to the tolerance, or ``farkas`` is given; else feasible weights are not certified
            as the best, and without them nothing is decided.
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
    feasible: bool | None
    farkas: Tensor | None
    eps: float
    converged: bool
    products: int
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
        return "\n".join((*shown, self.ended))

    @property
    def ended(self) -> str:
        """How the solver ended, a sentence."""
        return sentence(self.feasible, self.converged, bool(self.rivals.any()), self.gap, self.eps)

    @property
    def gap(self) -> float:
        """Relative distance of the bounds; infinite where the data are not feasible."""
        if not self.feasible:
            return float("inf")
        return self.upper / self.lower - 1 if self.upper > 0 else 0.0

    @property
    def direction(self) -> Tensor:
        """The weights over their norm, the one that was minimized; zero where nothing was asked."""
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
    rounds: int = 6,
    limit: int = 1000,
) -> MaxMargin:
    r"""Weights of least norm under which every selected token's logit exceeds all others by one.

    .. math:: \min_W |W| \quad\text{subject to}\quad \langle x_{i\alpha_i} - x_{it}, W z_i \rangle \ge 1
        \quad\text{for all } t \ne \alpha_i.

    Where a sequence has several best tokens, ``ties`` says what is asked of them. With "pick" one of them has to exceed
    all tokens that are not best, and nothing is asked among them: a union of programs over the ways to pick, the right
    one for tied scores. With "equal" they have equal logits and all exceed the others, the right program for targets
    with several tokens. ``selection`` overrides both: the given token has to exceed its ``rivals``.

    Args:
        problem: tokens, queries and which tokens are best.
        norm: "fro" for the Frobenius norm, whose solution is unique, or "nuc" for the nuclear norm.
        ties: "pick" or "equal".
        selection: any token of each sequence, shape ``(sequences,)``, instead of the best.
        rivals: what a given selection has to exceed: "all" other tokens; those "untied" with it, which is what descent
            asks for, since nothing is gained between tokens of equal score; or flags ``(sequences, length)``.
        tolerance: on the relative gap between upper and lower bound.
        rounds: of the solver, each with twice the steps of the last.
        limit: programs to solve for a union before giving up with a sentence; their number grows with the sequences
            whose pick matters, at worst as the product of their tied tokens.

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
    tolerance = checked_tolerance(norm, tolerance, rounds)
    if ties not in ("pick", "equal"):
        raise ValueError(f"ties must be 'pick' or 'equal', got {ties!r}")
    if not isinstance(limit, int) or limit < 1:
        raise ValueError(f"limit must be at least one program, got {limit}")
    if selection is None:
        if not isinstance(rivals, str) or rivals != "all":
            raise ValueError("rivals belong to a given selection; the best tokens have all others as rivals")
        return _Search(problem, problem.best, problem.present & ~problem.best, norm, ties, tolerance, rounds).run(limit)
    chosen = torch.nn.functional.one_hot(problem.picked(selection), problem.tokens.shape[1]).bool()
    lose = _rivals(problem, chosen, rivals)
    return _Search(problem, chosen, lose, norm, ties, tolerance, rounds).run(limit)


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
    if solution.rivals.shape != problem.present.shape or (solution.rivals & ~problem.present).any():
        raise ValueError("solution must be one of this problem, but its tokens are others")
    if not solution.rivals.any():
        raise ValueError("solution must ask for something, but all tokens are tied: there is no direction")
    others = problem.present & ~solution.rivals
    if solution.ties == "equal" and (others.sum(-1) > 1).any():
        raise ValueError("solution must not ask for equal logits, which other weights do not have; use ties='pick'")
    weights = torch.as_tensor(weights).double()
    if weights.shape != problem.shape or not weights.any():
        raise ValueError(f"weights must have shape {problem.shape} and not vanish, got shape {tuple(weights.shape)}")
    logits = problem.logits(weights)
    values = logits.gather(1, solution.selection[:, None]) - logits
    size = weights.abs().max()  # so that squares do not overflow
    return float(values[solution.rivals].min() / size / (weights / size).norm()) * solution.lower


def _rivals(problem: TokenSelection, chosen: Tensor, rivals: Tensor | str) -> Tensor:
    """The tokens that selected ones have to exceed, as flags ``(sequences, length)``."""
    if isinstance(rivals, str):
        if rivals not in ("all", "untied"):
            raise ValueError(f"rivals must be 'all', 'untied' or flags for all tokens, got {rivals!r}")
        tied = chosen if rivals == "all" else problem.tied(chosen.int().argmax(-1))
        return problem.present & ~tied
    flags = torch.as_tensor(rivals)
    if flags.shape != chosen.shape or flags.dtype != torch.bool or (flags & (chosen | ~problem.present)).any():
        raise ValueError(
            f"rivals must be flags of shape {tuple(chosen.shape)}, false at selected and absent tokens,"
            f" got shape {tuple(flags.shape)} of {flags.dtype}"
        )
    return flags


class _Search:
    """Best first over partial picks: a sequence is decided only once the weights found without it fail it."""

    def __init__(
        self,
        problem: TokenSelection,
        alternatives: Tensor,
        rivals: Tensor,
        norm: str,
        ties: str,
        tolerance: float,
        rounds: int,
    ) -> None:
        self.problem, self.alternatives, self.rivals, self.norm, self.ties = problem, alternatives, rivals, norm, ties
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
                        f" {int(self.several.sum())} sequences are tied; call max_margin with a larger limit,"
                        " or with a selection"
                    )
                pick = selection.clone()
                pick[worst] = token
                left = undecided.clone()
                left[worst] = False
                visit(pick, left)
        # Every pick is covered by a program that failed, and the largest bound on their margins holds for all; nothing
        # is shown while one of them is undecided.
        return self.result(*max(failed, key=lambda pair: (not pair[0].converged, pair[0].eps)))

    def solve(self, selection: Tensor, undecided: Tensor) -> Solved:
        """The program of the decided sequences."""
        problem = self.problem
        equal = self.alternatives.clone() if self.ties == "equal" else torch.zeros_like(self.alternatives)
        equal.scatter_(1, selection[:, None], False)
        least = self.rivals & ~undecided[:, None]
        arrays = (problem.differences(selection), problem.queries, least, equal)
        program = Program(*(array.numpy() for array in arrays))
        found = least_norm(program, self.norm, tolerance=self.tolerance, rounds=self.rounds)
        self.products += found.products
        return found

    def complete(self, found: Solved, selection: Tensor, undecided: Tensor) -> tuple[Tensor, int | None]:
        """Give undecided sequences their best pick under the weights; which of them fails most, if one does."""
        logits = self.problem.logits(torch.from_numpy(found.weights))
        top = logits.masked_fill(~self.alternatives, -torch.inf)
        rest = logits.masked_fill(~self.rivals, -torch.inf)
        selection = torch.where(undecided, top.argmax(-1), selection)
        slack = (top.amax(-1) - rest.amax(-1)).masked_fill(~undecided, torch.inf)
        least = float(slack.min())
        return selection, None if least >= 1 - self.tolerance else int(slack.argmin())

    def result(self, found: Solved, selection: Tensor) -> MaxMargin:
        dual, rivals = torch.from_numpy(found.multipliers), self.rivals
        equal = self.alternatives.scatter(1, selection[:, None], False) & (self.ties == "equal")
        weights = torch.from_numpy(np.ascontiguousarray(found.weights))
        return MaxMargin(
            weights=weights,
            selection=selection,
            rivals=rivals,
            dual=dual,
            support=(rivals & (dual > ACTIVE * dual[rivals].max())) | equal if rivals.any() else equal,
            margin=1 / found.upper if found.upper > 0 else float("inf"),
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
