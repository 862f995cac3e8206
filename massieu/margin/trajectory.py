"""What a training run shows: norm, loss, margin and correlation with max-margin directions, step by step."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from massieu.margin.gradients import log_gap, misalignment
from massieu.margin.problem import TokenSelection
from massieu.margin.solver import MaxMargin, direction_bound, max_margin

if TYPE_CHECKING:
    import pandas

__all__ = ["Trajectory", "approached", "measured", "table"]

SATURATED = 0.999
"""Attention is saturated when every sequence gives more than this to one token."""


@dataclass(frozen=True)
class Trajectory:
    """A training run, measured at some of its steps.

    Attributes:
        weights: the last ones, shape ``(dim, query_dim)``; the product of the factors where there are some.
        factors: the last K ``(dim, rank)`` and Q ``(query_dim, rank)``, or None.
        history: one row for each measured step. ``step``; ``norm`` of the weights; ``loss``; ``loss_gap`` above the
            tokens of highest logit at that step (above their entropy for targets), which may be negative, and
            ``log_loss_gap``, which does not underflow; ``margin`` of the tokens selected in the end, over the norm;
            ``misalignment_selected`` and ``misalignment_best``, one minus the correlation with the max-margin direction
            of those tokens and of the best ones, to full precision, and both as ``correlation_``;
            ``correlation_bound``, the proven lower bound of ``correlation_selected`` (nan where the margin is not
            positive); ``tokens``, exp(entropy) of the attention maps, mean over the sequences; ``top``, their
            largest entry, mean; ``saturated``, whether one token has nearly all in every sequence; ``selects_best``,
            whether every token of highest logit is a best one.
        snapshots: the weights at the measured steps, shape ``(rows, dim, query_dim)``.
        selection: the tokens of highest logit in the end, shape ``(sequences,)``.
        local: the max-margin solution of the tokens selected in the end.
        best: that of the best tokens.
        finished: all steps were made with finite weights.
        ended: how the run ended, a sentence.
    """

    weights: Tensor
    factors: tuple[Tensor, Tensor] | None
    history: pandas.DataFrame
    snapshots: Tensor
    selection: Tensor
    local: MaxMargin
    best: MaxMargin
    finished: bool
    ended: str

    def misalignments(self, direction: Tensor) -> Tensor:
        """One minus the correlation with any direction at every measured step, shape ``(rows,)``."""
        return torch.tensor([misalignment(weights, direction) for weights in self.snapshots], dtype=torch.float64)


def approached(
    problem: TokenSelection, norm: str, selection: Tensor | None = None, best: MaxMargin | None = None
) -> MaxMargin:
    """The max-margin solution that descent towards the selected tokens, or towards the best ones, approaches."""
    several = problem.best.sum(-1) > 1
    if problem.targets is not None and several.any():
        return best if best is not None else max_margin(problem, norm=norm, ties="equal")
    if best is not None and not best.rivals.any():
        return best  # all tokens of all sequences are tied
    if selection is None or not several.any():
        return max_margin(problem, norm=norm, selection=selection)
    return _without_rivals_that_are_tied(problem, norm, selection)


def measured(
    problem: TokenSelection, step: int, weights: Tensor, local: MaxMargin, best: MaxMargin, norm: str
) -> dict[str, Any]:
    """A row of a trajectory's history."""
    size = float(weights.norm())
    attention = problem.attention(weights)
    gap = log_gap(problem, weights)
    top = attention.amax(-1)
    selected = problem.selected(weights)
    asked = size > 0 and bool(local.rivals.any())
    margin = _least(problem, weights, local) / size if asked else math.nan
    provable = asked and local.feasible and norm == "fro" and local.ties == "pick"
    bound = direction_bound(problem, weights, local) if provable else math.nan
    apart = [misalignment(weights, other.weights) if other.feasible else math.nan for other in (local, best)]
    return {
        "step": step,
        "norm": size,
        "loss": float(problem.objective(weights)),
        "loss_gap": gap.value,
        "log_loss_gap": gap.log,
        "margin": margin,
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


def _least(problem: TokenSelection, weights: Tensor, local: MaxMargin) -> float:
    """Least margin of the selected tokens over their rivals."""
    logits = problem.logits(weights)
    return float((logits.gather(1, local.selection[:, None]) - logits)[local.rivals].min())


def table(rows: list[dict[str, Any]]) -> pandas.DataFrame:
    """A table of the rows, which needs pandas."""
    try:
        import pandas
    except ImportError:
        raise ImportError(
            "tables of training runs need pandas, which is not installed; pip install 'massieu[verify]'"
        ) from None
    return pandas.DataFrame(rows)


def _without_rivals_that_are_tied(problem: TokenSelection, norm: str, selection: Tensor) -> MaxMargin:
    """The program of a selection in which best tokens that lost to another best one are not there."""
    chosen = torch.nn.functional.one_hot(selection, problem.tokens.shape[1]).bool()
    tied = problem.best & (problem.best & chosen).any(-1, keepdim=True)
    kept = problem.present & (chosen | ~tied)
    kept &= kept.sum(-1, keepdim=True) > 1  # all tied: nothing is asked of this sequence
    rows = kept.any(-1)
    few = TokenSelection(
        [tokens[there] for tokens, there in zip(problem.tokens[rows], kept[rows], strict=True)],
        problem.queries[rows],
        scores=[scores[there] for scores, there in zip(problem.scores[rows], kept[rows], strict=True)],
    )
    place = (kept.cumsum(-1) - 1).gather(1, selection[:, None])[:, 0]
    found = max_margin(few, norm=norm, selection=place[rows])

    def back(values: Tensor) -> Tensor:
        return torch.zeros(kept.shape, dtype=values.dtype).masked_scatter(kept, values[few.present])

    return replace(
        found,
        selection=selection,
        rivals=back(found.rivals),
        dual=back(found.dual),
        support=back(found.support),
        farkas=None if found.farkas is None else back(found.farkas),
    )
