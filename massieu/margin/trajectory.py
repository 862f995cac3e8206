"""Record of a training run: norm, loss, margin and correlation with max-margin directions, step by step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from massieu.checks import UserError, optional_package
from massieu.margin.gradients import Landscape, misalignment, size_of
from massieu.margin.graph import GraphMargin
from massieu.margin.problem import TokenSelection
from massieu.margin.solver import MaxMargin, direction_bound, max_margin

if TYPE_CHECKING:
    import pandas

__all__ = ["RunReference", "Trajectory", "best_solution", "comparison", "measured", "table"]

SATURATED = 0.999
"""Attention is saturated when one token of every sequence has more weight than this."""


@dataclass(frozen=True, repr=False)
class Trajectory:
    """Training run, measured at some of its steps.

    Misalignment is one minus correlation: see :func:`massieu.margin.misalignment`.

    Attributes:
        weights: the last ones, shape ``(dim, query_dim)``; the product of the factors where there are some.
        factors: the last K ``(dim, rank)`` and Q ``(query_dim, rank)``, or None.
        history: one row for each measured step. ``step``; ``norm`` of the weights, Frobenius; ``loss``; ``loss_gap``
            above the tokens of highest logit at that step (above their entropy for targets), which may be negative, and
            ``log_loss_gap``, which does not underflow; ``margin`` of the tokens selected in the end, or of those with
            mass in the targets, over the norm that the max-margin solutions minimize; ``misalignment_selected`` and
            ``misalignment_best`` with the max-margin direction of the tokens selected in the end and of the best ones,
            to full precision, and both as ``correlation_``; ``correlation_bound``, the proven lower bound of
            ``correlation_selected`` (nan where the margin is not positive); ``tokens``, exp(entropy) of the attention
            maps, mean over the sequences; ``top``, their largest entry, mean; ``saturated``, True if one token has
            nearly all weight in every sequence; ``selects_best``, True if every token of highest logit is a best one.
            Columns that need a missing max-margin solution are nan.
        snapshots: the weights at the measured steps, shape ``(rows, dim, query_dim)``.
        selection: the tokens of highest logit in the end, shape ``(sequences,)``.
        compared: the max-margin solutions to compare with.
        finished: all steps were made with finite weights.
        converged: the run stopped because the loss can fall no further: zero gradient, or the least loss. Most runs
            end with ``finished`` instead, since the weights diverge.
        residual: norm of the last gradient by the weights; zero where it underflows.
        steps: steps made.
        message: outcome of the run, a sentence.
    """

    weights: Tensor
    factors: tuple[Tensor, Tensor] | None
    history: pandas.DataFrame
    snapshots: Tensor
    selection: Tensor
    compared: RunReference
    finished: bool
    converged: bool
    residual: float
    steps: int
    message: str

    def __repr__(self) -> str:
        last = self.history.iloc[-1]
        return (
            f"Trajectory({len(self.history)} rows to step {last.step}: norm {last.norm:.4g}, loss {last.loss:.4g},"
            f" misalignment {last.misalignment_selected:.2g} with its own selection and {last.misalignment_best:.2g}"
            f" with the best; {self.message})"
        )

    @property
    def local(self) -> MaxMargin | GraphMargin:
        """Max-margin solution of the tokens selected in the end; raises if the run was not compared with it."""
        return _there(self.compared.local)

    @property
    def best(self) -> MaxMargin | GraphMargin:
        """Max-margin solution of the best tokens, or the one given."""
        return _there(self.compared.best)

    def misalignments(self, direction: Tensor) -> Tensor:
        """Return the misalignment with any direction at every measured step, shape ``(rows,)``."""
        return torch.tensor([misalignment(weights, direction) for weights in self.snapshots], dtype=torch.float64)


@dataclass(frozen=True)
class RunReference:
    """Max-margin solutions that the steps of a run are compared with.

    Attributes:
        winners: the tokens whose margin is measured, boolean, shape ``(sequences, length)``.
        rivals: the tokens that they are to exceed, the same shape.
        local: max-margin solution of the tokens selected in the end, or None.
        best: max-margin solution of the best tokens, or None.
        norm: "fro" or "nuc".
    """

    winners: Tensor
    rivals: Tensor
    local: MaxMargin | GraphMargin | None
    best: MaxMargin | GraphMargin | None
    norm: str


def best_solution(problem: TokenSelection, norm: str, limit: int) -> MaxMargin | None:
    """Return the max-margin solution of the best tokens, or None if it needs more programs than the limit."""
    several = bool((problem.best.sum(-1) > 1).any())
    if problem.targets is not None and several:
        return max_margin(problem, norm=norm, ties="equal")
    if not several:
        return max_margin(problem, norm=norm)
    try:
        return max_margin(problem, norm=norm, limit=limit)
    except UserError:  # too many ways to pick from tied tokens
        return None


def comparison(
    problem: TokenSelection,
    selection: Tensor,
    ties: Tensor,
    best: MaxMargin | GraphMargin | None,
    norm: str,
    compare: bool,
) -> RunReference:
    """Return the solutions to compare a run with that ended with a selection, with these tokens tied for first."""
    if problem.targets is not None and (ties.sum(-1) > 1).any():
        return RunReference(ties, problem.present & ~ties, best, best, norm)
    chosen = torch.nn.functional.one_hot(selection, problem.tokens.shape[1]).bool()
    rivals = problem.present & ~problem.tied(selection)
    local = max_margin(problem, norm=norm, selection=selection, rivals=rivals) if compare else None
    return RunReference(chosen, rivals, local, best, norm)


@torch.no_grad()
def measured(landscape: Landscape, step: int, weights: Tensor, compared: RunReference) -> dict[str, Any]:
    """Return a row of the history."""
    problem, local = landscape.problem, compared.local
    attention = problem.attention(weights)
    gap = landscape.gap(weights)
    top = attention.amax(-1)
    selected = problem.selected(weights)
    size = size_of(weights, compared.norm)
    defined = 0 < size < math.inf and bool(compared.rivals.any())
    bound = math.nan
    if defined and isinstance(local, MaxMargin) and (local.norm, local.ties, local.feasible) == ("fro", "pick", True):
        bound = direction_bound(problem, weights / size, local)
    apart = [
        misalignment(weights, other.weights) if other is not None and other.feasible else math.nan
        for other in (local, compared.best)
    ]
    return {
        "step": step,
        "norm": size_of(weights),
        "loss": float(problem.objective(weights)),
        "loss_gap": gap.value,
        "log_loss_gap": gap.log,
        "margin": _least(problem.logits(weights / size), compared) if defined else math.nan,
        "misalignment_selected": apart[0],
        "misalignment_best": apart[1],
        "correlation_selected": 1 - apart[0],
        "correlation_best": 1 - apart[1],
        "correlation_bound": bound,
        "tokens": float(torch.special.entr(attention).sum(-1).exp().mean()),
        "top": float(top.mean()),
        "saturated": bool((top > SATURATED).all()),
        "selects_best": bool(problem.best.gather(1, selected[:, None]).all()),
    }


def table(rows: list[dict[str, Any]]) -> pandas.DataFrame:
    """Return the rows as a table of pandas."""
    return optional_package("pandas", "a table of training runs", "verify").DataFrame(rows)


def _least(logits: Tensor, compared: RunReference) -> float:
    """Return the least margin of the winners over their rivals."""
    lowest = logits.masked_fill(~compared.winners, torch.inf).amin(-1)
    return float((lowest - logits.masked_fill(~compared.rivals, -torch.inf).amax(-1)).min())


def _there(solution: MaxMargin | GraphMargin | None) -> MaxMargin | GraphMargin:
    if solution is None:
        raise UserError(
            "there is no max-margin solution that this run was compared with: it was left out, or not found among the"
            " ways to pick from tied tokens; train with compare=True and a larger limit, or give the solution"
        )
    return solution
