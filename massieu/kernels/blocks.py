"""Tiles of scores, and the log weights that are added to each of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from massieu.kernels.rows import Plan
from massieu.kernels.visibility import offsets, visible_range

__all__ = [
    "ABSENT",
    "QueryBlock",
    "add_log_weights",
    "blocks",
    "compute_dtype",
    "group_parts",
    "hidden",
    "is_absent",
    "masked_log_weight",
    "scaled_queries",
    "slices",
    "tile_shape",
]

LN2 = math.log(2.0)
LOG2E = 1.0 / LN2

# An absent atom scores this much instead of minus infinity, so that no tile ever computes inf - inf.
# Its square is still finite in float32.
ABSENT = -1e15

# Beyond this float32 rounds scores, and with them weights, by more than 1e-4; a product in float64 costs twice.
LARGE_SCORE = 1000.0

# Small enough for the scores to stay in cache between the passes over them, large enough to pay for the passes.
TILE_BYTES = 4 << 20
TILE_ROWS = 512
TILE_ATOMS = 256


class QueryBlock(NamedTuple):
    """A block of queries of a few batch entries, and the atoms visible from any of them."""

    batch: slice
    queries: slice
    first_atom: int
    last_atom: int


def slices(start: int, stop: int, step: int) -> Iterator[slice]:
    """Yield consecutive slices that cover a range."""
    for first in range(start, stop, step):
        yield slice(first, min(first + step, stop))


def group_parts(
    query: Tensor, log_weight: Tensor | None, plan: Plan, most: int
) -> Iterator[tuple[slice, Tensor, Tensor | None, Plan]]:
    """Yield the queries in parts of at most ``most`` groups, with their log weights and lengths."""
    for part in slices(0, query.shape[1], most):
        weights, lengths = log_weight, plan.lengths
        if weights is not None and weights.shape[1] > 1:
            weights = weights[:, part]
        if lengths is not None and lengths.shape[1] > 1:
            lengths = lengths[:, part]
        yield part, query[:, part], weights, replace(plan, lengths=lengths)


def blocks(query: Tensor, key: Tensor, plan: Plan, entries: slice, height: int) -> Iterator[QueryBlock]:
    """Yield all blocks of queries of these batch entries, each with the range of atoms visible from its rows."""
    queries, atoms = query.shape[2], key.shape[1]
    longest = atoms if plan.lengths is None else int(plan.lengths[entries].max())
    for rows in slices(0, queries, height):
        behind = atoms - queries
        reach = visible_range(rows.start + behind, rows.stop - 1 + behind, longest, plan.causal, plan.window)
        yield QueryBlock(entries, rows, *reach)


def tile_shape(query: Tensor, key: Tensor, plan: Plan, dtype: torch.dtype) -> tuple[int, int, int]:
    """Queries per block, atoms per tile and batch entries per tile, such that a tile has about TILE_BYTES."""
    batch, groups, queries, _ = query.shape
    atoms = max(key.shape[1], 1)
    numbers = TILE_BYTES // dtype.itemsize
    # Scores beyond the diagonal are wasted work, so that a tile must be small in a short causal sequence.
    largest = max(TILE_ATOMS, atoms // 4) if plan.causal else atoms
    rows = groups * max(1, min(queries, largest, TILE_ROWS // groups))
    depth = max(1, min(batch, numbers // (rows * TILE_ATOMS)))
    width = max(TILE_ATOMS, numbers // (rows * depth) // TILE_ATOMS * TILE_ATOMS)
    return rows // groups, min(width, largest, atoms), depth


def compute_dtype(query: Tensor, key: Tensor, plan: Plan) -> torch.dtype:
    """Return float64 for float64 inputs and for scores that may exceed LARGE_SCORE, else float32."""
    if query.dtype == torch.float64:
        return torch.float64
    if not query.numel() or not key.numel():
        return torch.float32
    longest = [float(torch.linalg.vector_norm(x.detach(), dim=-1, dtype=torch.float32).max()) for x in (query, key)]
    return torch.float64 if abs(plan.scale) * longest[0] * longest[1] > LARGE_SCORE else torch.float32


def scaled_queries(query: Tensor, plan: Plan, block: QueryBlock, dtype: torch.dtype) -> Tensor:
    """Return the queries of a block, ``(entries, groups * queries, dim)``, scaled for base-2 scores."""
    return (query[block.batch, :, block.queries].to(dtype) * (plan.scale * LOG2E)).flatten(1, 2)


def add_log_weights(
    score: Tensor, log_weight: Tensor | None, plan: Plan, block: QueryBlock, atoms: slice, query: Tensor, key: Tensor
) -> None:
    """Add log weights to a tile of base-2 scores, and ABSENT for atoms hidden by the plan."""
    groups, queries, total = query.shape[1], query.shape[2], key.shape[1]
    height, width = block.queries.stop - block.queries.start, atoms.stop - atoms.start
    tile = score.view(score.shape[0], groups, height, width)
    if log_weight is not None:
        tile.add_(_log_weight_tile(log_weight, plan, block, atoms, score.dtype))
    # Distance of the first atom of the tile from the position of its first query.
    shift = atoms.start - (block.queries.start + total - queries)
    least, largest = offsets(plan.causal, plan.window)
    if largest is not None and shift + width > largest + 1:
        tile.add_(score.new_full((height, width), ABSENT).triu_(largest + 1 - shift))
    if least is not None and shift <= height - 2 + least:
        tile.add_(score.new_full((height, width), ABSENT).tril_(least - 1 - shift))
    if plan.lengths is not None:
        lengths = plan.lengths[block.batch]
        if atoms.stop > int(lengths.min()):
            place = torch.arange(atoms.start, atoms.stop, device=score.device)
            tile.add_((place >= lengths[..., None, None]).to(score.dtype), alpha=ABSENT)


def _log_weight_tile(log_weight: Tensor, plan: Plan, block: QueryBlock, atoms: slice, dtype: torch.dtype) -> Tensor:
    assert plan.weight_index is not None
    tile = log_weight[
        :,
        :,
        block.queries if log_weight.shape[2] > 1 else slice(None),
        atoms if log_weight.shape[3] > 1 else slice(None),
    ]
    index = plan.weight_index[block.batch]
    if min(index) == max(index):
        tile = tile[index[0] : index[0] + 1]
    elif index == list(range(index[0], index[0] + len(index))):
        tile = tile[index[0] : index[-1] + 1]
    else:
        tile = tile[index]
    return masked_log_weight(tile).to(dtype).mul(LOG2E).clamp_(min=ABSENT)


def masked_log_weight(log_weight: Tensor) -> Tensor:
    """Return log weights with minus infinity for the most negative numbers of a dtype, with which models mask."""
    least = torch.finfo(log_weight.dtype).min / 2
    return log_weight if least < ABSENT else log_weight.masked_fill(log_weight <= least, -torch.inf)


def is_absent(log_weight: Tensor) -> Tensor:
    """Return True where an atom of this log weight is absent."""
    return masked_log_weight(log_weight) * LOG2E < 0.5 * ABSENT


def hidden(query: Tensor, key: Tensor, log_weight: Tensor | None, plan: Plan) -> Tensor:
    """Return True where an atom is absent for a query, ``(batch, groups, queries, atoms)``, as one large tile."""
    batch, groups, queries, _ = query.shape
    score = query.new_zeros(batch, groups * queries, key.shape[1], dtype=torch.float32)
    everything = QueryBlock(slice(0, batch), slice(0, queries), 0, key.shape[1])
    with torch.no_grad():
        add_log_weights(score, log_weight, plan, everything, slice(0, key.shape[1]), query, key)
    return score.view(batch, groups, queries, key.shape[1]) < 0.5 * ABSENT
