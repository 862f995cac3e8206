"""Token selection by trained heads: the problem that the rows of a layer pose, and the report of each head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from massieu.margin.problem import TokenSelection
from massieu.margin.report import selection_report

__all__ = ["BIAS", "NOT_ONE_MATRIX", "HeadRows", "ObservedRow"]

BIAS = "the query bias is a last column of W, with a one as the last entry of every query"
NOT_ONE_MATRIX = "scores are not x^T W z with one matrix (positions, a norm of queries and keys, or a cap)"


@dataclass(frozen=True)
class ObservedRow:
    """One row of all heads of a layer, observed in a model.

    Attributes:
        tokens: input of the key projection at the visible keys, shape ``(visible, dim)``.
        state: input of the query projection, shape ``(dim,)``.
        queries: shape ``(heads, head_dim)``.
        scores: shape ``(heads, visible)``.
        first: index of the first token of the passage among the visible ones; None if it is masked.
    """

    tokens: Tensor
    state: Tensor
    queries: Tensor
    scores: Tensor
    first: int | None


@dataclass(frozen=True)
class HeadRows:
    """Token selection by the heads of one layer at sampled rows.

    Attributes:
        problem: the visible tokens of each row and the query inputs, with a one at their end if there is a bias; scores
            are zero, because every head makes its own selection.
        selection: the visible token of highest weight, ``(heads, rows)``.
        peak: its weight, ``(heads, rows)``.
        first: True where it is the first token of the passage, ``(heads, rows)``.
        maps: W of every head, ``(heads, dim, query_dim)``.
        whole: True where :math:`x^T W z` are the head's scores, up to a constant of the row; ``(heads,)``.
        note: limits of these values, or None.
        rounding: tokens that differ by less than this part of their size may be the same.
    """

    problem: TokenSelection
    selection: Tensor
    peak: Tensor
    first: Tensor
    maps: Tensor
    whole: Tensor
    note: str | None
    rounding: float

    @classmethod
    def from_rows(
        cls,
        rows: Sequence[ObservedRow],
        query: Tensor,
        key: Tensor,
        scale: float,
        *,
        tolerance: float,
        rounding: float,
        note: str | None = None,
    ) -> HeadRows:
        """Build the problem from observed rows and the weights of the heads.

        Args:
            rows: in float64.
            query, key: weights, shape ``(heads, head_dim, dim)``.
            scale: factor of the inner products.
            tolerance: relative difference of scores that counts as rounding.
            rounding, note: as in the attributes.
        """
        query, key = query.detach().double().cpu(), key.detach().double().cpu()
        maps, states = scale * key.mT @ query, torch.stack([row.state for row in rows])
        queries = torch.stack([row.queries for row in rows])
        rest = queries - torch.einsum("hkd,nd->nhk", query, states)
        bias, least = rest.mean(0), tolerance * queries.abs().max()
        notes = [] if note is None else [note]
        if (rest - bias).abs().max() <= least and bias.abs().max() > least:
            column = scale * torch.einsum("hkd,hk->hd", key, bias)
            maps = torch.cat([maps, column[..., None]], -1)
            states = torch.cat([states, torch.ones(len(rows), 1, dtype=states.dtype)], -1)
            notes.append(BIAS)
        nothing = [torch.zeros(len(row.tokens)) for row in rows]
        problem = TokenSelection([row.tokens for row in rows], states, scores=nothing)
        chosen = torch.stack([row.scores.argmax(-1) for row in rows], 1)
        firsts = torch.tensor([-1 if row.first is None else row.first for row in rows])
        whole = [_same(problem.logits(w), [row.scores[h] for row in rows], tolerance) for h, w in enumerate(maps)]
        return cls(
            problem=problem,
            selection=chosen,
            peak=torch.stack([row.scores.softmax(-1).amax(-1) for row in rows], 1),
            first=chosen == firsts,
            maps=maps,
            whole=torch.stack(whole),
            note="; ".join(notes) or None,
            rounding=rounding,
        )

    def report(
        self, head: int, *, projection: Callable[[Tensor], Tensor] | None = None, generator: torch.Generator | int = 0
    ) -> dict[str, Any]:
        """Return the :class:`~massieu.margin.SelectionReport` of a head as a row of a table, with peak and sinks."""
        whole = bool(self.whole[head])
        values = asdict(
            selection_report(
                self.maps[head],
                self.problem,
                selection=self.selection[head],
                compared=whole,
                copies=self.rounding,
                projection=projection,
                generator=generator,
            )
        )
        notes = (self.note, None if whole else NOT_ONE_MATRIX, values.pop("note"))
        return {
            "rows": values.pop("rows"),
            "constraints": values.pop("constraints"),
            "peak": float(self.peak[head].mean()),
            "first_share": float(self.first[head].double().mean()),
            **values,
            "note": "; ".join(note for note in notes if note),
        }


def _same(logits: Tensor, scores: Sequence[Tensor], tolerance: float) -> Tensor:
    """Return True if logits are the scores, up to a constant in each row."""
    off, size = torch.zeros(()), torch.zeros(())
    for one, other in zip(logits, scores, strict=True):
        difference = one[: len(other)] - other
        off = torch.maximum(off, (difference - difference.mean()).abs().max())
        size = torch.maximum(size, (other - other.mean()).abs().max())
    return off <= tolerance * size
