"""Torch kernel: an online softmax over tiles of scores, with the moments of each row.

Scores are in base 2 (``exp2`` costs half of ``exp`` on a CPU) and their moments are taken about the running maximum:
with scores near 3000 the plain float32 variance is wrong by more than its own value. Row sums are float64, since one
row may have a million atoms, and so are large scores. No tensor of size queries x atoms is kept beyond its tile.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from massieu.kernels.blocks import (
    ABSENT,
    LN2,
    LOG2E,
    TILE_BYTES,
    TILE_ROWS,
    QueryBlock,
    add_log_weights,
    blocks,
    compute_dtype,
    group_parts,
    scaled_queries,
    slices,
    tile_shape,
)
from massieu.kernels.results import Best, Found, Gradients, Slope
from massieu.kernels.rows import Inputs, Plan

__all__ = ["backward", "best", "forward", "mass_count"]


def forward(inputs: Inputs, level: int) -> Found:
    """Compute output and row statistics: all at level 2, no variance and no collision at level 1, none at level 0."""
    (query, key, value), (log_weight, sink, plan) = inputs.flat(), inputs[3:]
    dtype = compute_dtype(query, key, plan)
    shape = query.shape[:3]
    out = None if value is None else query.new_zeros(*shape, value.shape[-1], dtype=dtype)
    rows = query.new_full(((2, 3, 5)[level], *shape), torch.nan, dtype=dtype)
    for part, own, weights, visible in group_parts(query, log_weight, plan, TILE_ROWS):
        into = None if out is None else out[:, part]
        own_sink = None if sink is None else sink[:, part]
        _forward(own, key, value, weights, own_sink, visible, level, rows[:, :, part], into)
    out = None if out is None else out.view(*inputs.query.shape[:-1], out.shape[-1])
    return Found(out, _statistics(rows) if level else (None,) * 6, rows[:3])


def _statistics(rows: Tensor) -> tuple[Tensor | None, ...]:
    """Fields of ``RowStatistics`` from sums in base 2 about the maximum."""
    maximum, total, offset, *powers = rows
    log_total, peak = total.log(), total.reciprocal()
    log_normalizer = LN2 * maximum + log_total
    variance, collision = (LN2**2 * powers[0], powers[1]) if powers else (None, None)
    # The entropy is never negative: the total is at least one, and no score lies above the maximum.
    return log_normalizer, LN2 * (maximum + offset), log_total - LN2 * offset, variance, peak, collision


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    log_weight: Tensor | None,
    sink: Tensor | None,
    plan: Plan,
    level: int,
    rows: Tensor,
    out: Tensor | None,
) -> None:
    dtype = rows.dtype
    batch, groups, _, _ = query.shape
    height, width, depth = tile_shape(query, key, plan, dtype)
    buffers = query.new_empty(2, depth * groups * height * width, dtype=dtype)
    for entries in slices(0, batch, depth):
        for block in blocks(query, key, plan, entries, height):
            scaled = scaled_queries(query, plan, block, dtype)
            sums = RowSums(scaled, None if value is None else value.shape[-1], level)
            if sink is not None:
                sums.absorb_sink(sink[entries])
            for atoms in slices(block.first_atom, block.last_atom, width):
                score, weight = tile_buffers(buffers, scaled, atoms)
                torch.bmm(scaled, transposed(key[entries, atoms], dtype), out=score)
                add_log_weights(score, log_weight, plan, block, atoms, query, key)
                sums.absorb(score, weight, None if value is None else value[entries, atoms].to(dtype))
            sums.store(rows, out, block)


class RowSums:
    """Maximum and sums of 2^u, 2^u u, 2^u u^2, 4^u and 2^u v over the atoms so far, for a block of rows.

    In place and stacked: small operations would otherwise take as long as the arithmetic of a tile.
    """

    def __init__(self, scaled: Tensor, value_dim: int | None, level: int) -> None:
        shape, kinds = scaled.shape[:2], (1, 2, 4)[level]
        self.level = level
        self.maximum = scaled.new_full(shape, 2 * ABSENT)
        self.tile = scaled.new_empty(kinds, *shape)
        self.sums = scaled.new_zeros(kinds, *shape, dtype=torch.float64)
        self.out = None if value_dim is None else scaled.new_zeros(*shape, value_dim)

    def absorb_sink(self, sink: Tensor) -> None:
        """Begin with an atom at the origin of value zero; one log weight per group, ``(entries, groups)``."""
        log_weight = sink.mul(LOG2E).clamp(min=ABSENT).to(self.maximum.dtype)
        self.maximum = log_weight.repeat_interleave(self.maximum.shape[1] // sink.shape[1], 1)
        self.sums[0] = 1.0
        if self.level == 2:
            self.sums[3] = 1.0

    def absorb(self, score: Tensor, weight: Tensor, value: Tensor | None) -> None:
        """Add a tile of base-2 scores; the tile is overwritten."""
        maximum = torch.maximum(self.maximum, score.amax(-1))
        drop = self.maximum.double().sub_(maximum)
        decay = torch.exp2(drop)
        self.maximum = maximum
        torch.exp2(score.sub_(maximum.unsqueeze(-1)), out=weight)
        if self.out is not None and value is not None:
            self.out.mul_(decay.to(weight.dtype).unsqueeze(-1)).baddbmm_(weight, value)
        torch.sum(weight, -1, out=self.tile[0])
        if self.level == 2:
            torch.linalg.vector_norm(weight, dim=-1, out=self.tile[3]).square_()
        if self.level >= 1:
            torch.sum(weight.mul_(score), -1, out=self.tile[1])
        if self.level == 2:
            torch.sum(weight.mul_(score), -1, out=self.tile[2])
        self._move(drop, decay)
        self.sums += self.tile

    def _move(self, drop: Tensor, decay: Tensor) -> None:
        """Re-expand the sums about the new maximum: it moved by ``-drop``, and with it every u."""
        if self.level == 2:
            self.sums[2].addcmul_(drop, self.sums[1])
        if self.level >= 1:
            self.sums[1].addcmul_(drop, self.sums[0])
        if self.level == 2:
            self.sums[2].addcmul_(drop, self.sums[1])
            self.sums[3] *= decay
        self.sums *= decay

    def store(self, rows: Tensor, out: Tensor | None, block: QueryBlock) -> None:
        """Write moments and outputs of the block; rows without atoms have nan and zero."""
        total, found = self.sums[0], [self.maximum, self.sums[0]]
        if self.level >= 1:
            offset = self.sums[1] / total
            found.append(offset)
        if self.level == 2:
            found += [(self.sums[2] / total - offset.square()).clamp_(min=0), self.sums[3] / total.square()]
        empty = self.maximum < 0.5 * ABSENT
        some_empty = bool(empty.any())
        for row, result in zip(rows, found, strict=True):
            into = row[block.batch, :, block.queries]
            into.copy_((result.masked_fill(empty, torch.nan) if some_empty else result).view(into.shape))
        if out is not None and self.out is not None:
            into = out[block.batch, :, block.queries]
            result = self.out.div_(total.to(self.out.dtype).unsqueeze(-1))
            into.copy_((result.masked_fill_(empty.unsqueeze(-1), 0.0) if some_empty else result).view(into.shape))


def backward(
    inputs: Inputs,
    moments: Tensor,
    slope: Slope,
    output: Tensor | None,
    grad_output: Tensor | None,
    *,
    want_log_weight: bool,
) -> Gradients:
    """Gradients in query, key, value and log weight; scores are recomputed, tile by tile."""
    (query, key, value), log_weight, plan = inputs.flat(), inputs.log_weight, inputs.plan
    dtype = compute_dtype(query, key, plan)
    grad_query, grad_key = query.new_zeros(query.shape, dtype=dtype), key.new_zeros(key.shape, dtype=dtype)
    grad_value = None if value is None else value.new_zeros(value.shape, dtype=dtype)
    grad_weight = None
    if want_log_weight and log_weight is not None:
        grad_weight = log_weight.new_zeros(log_weight.shape, dtype=dtype)
    constant = slope.constant
    output, grad_output = (None if x is None else inputs.flat_rows(x) for x in (output, grad_output))
    if output is not None and grad_output is not None:
        through = -(grad_output.to(dtype) * output.to(dtype)).sum(-1)
        constant = through if constant is None else constant + through
    maximum, total, *offset = moments.unbind()
    empty = total.isnan()
    per_row = [
        None if row is None else row.to(dtype).masked_fill(empty, 0.0)
        for row in (maximum, total.reciprocal(), offset[0] if offset else None, constant, *slope[1:])
    ]
    for part, own, weights, visible in group_parts(query, log_weight, plan, TILE_ROWS):
        own_weights = grad_weight[:, part] if grad_weight is not None and grad_weight.shape[1] > 1 else grad_weight
        _backward(
            (own, key, value, weights),
            visible,
            [None if row is None else row[:, part] for row in per_row],
            None if grad_output is None else grad_output[:, part],
            (grad_query[:, part], grad_key, grad_value, own_weights),
        )
    grad_key.mul_(LN2)  # the scaled query has the factor log2(e)
    return Gradients(
        grad_query.to(query.dtype).view(inputs.query.shape),
        grad_key.to(key.dtype).view(inputs.key.shape),
        None if inputs.value is None or grad_value is None else grad_value.to(query.dtype).view(inputs.value.shape),
        None if log_weight is None or grad_weight is None else grad_weight.to(log_weight.dtype),
    )


def _backward(
    inputs: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    plan: Plan,
    per_row: list[Tensor | None],
    grad_output: Tensor | None,
    grads: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
) -> None:
    query, key, value, log_weight = inputs
    grad_query, grad_key, grad_value, grad_weight = grads
    dtype = grad_query.dtype
    height, width, depth = tile_shape(query, key, plan, dtype)
    buffers = query.new_empty(3, depth * query.shape[1] * height * width, dtype=dtype)
    for entries in slices(0, query.shape[0], depth):
        for block in blocks(query, key, plan, entries, height):
            cut = (entries, slice(None), block.queries)
            scaled = scaled_queries(query, plan, block, dtype)
            coming = None if grad_output is None else grad_output[cut].to(dtype).flatten(1, 2)
            maximum, inverse, *coefficients = (
                None if row is None else row[cut].flatten(1, 2).unsqueeze(-1) for row in per_row
            )
            assert maximum is not None
            assert inverse is not None
            collected = torch.zeros_like(scaled)
            for atoms in slices(block.first_atom, block.last_atom, width):
                score, weight, slopes = tile_buffers(buffers, scaled, atoms)
                keys = key[entries, atoms].to(dtype)
                torch.bmm(scaled, transposed(keys, dtype), out=score)
                add_log_weights(score, log_weight, plan, block, atoms, query, key)
                torch.exp2(score.sub_(maximum), out=weight).mul_(inverse)
                if coming is not None and value is not None and grad_value is not None:
                    torch.bmm(coming, transposed(value[entries, atoms], dtype), out=slopes)
                    grad_value[entries, atoms].baddbmm_(weight.mT, coming)
                else:
                    slopes.zero_()
                _add_slope(slopes, score, weight, *coefficients)
                slopes.mul_(weight)
                collected.baddbmm_(slopes, keys)
                grad_key[entries, atoms].baddbmm_(slopes.mT, scaled)
                if grad_weight is not None:
                    _add_weight_gradient(grad_weight, slopes, plan, block, atoms, query)
            into = grad_query[cut]
            into.copy_(collected.mul_(plan.scale).view(into.shape))


def _add_slope(
    slopes: Tensor,
    score: Tensor,
    weight: Tensor,
    offset: Tensor | None = None,
    constant: Tensor | None = None,
    linear: Tensor | None = None,
    quadratic: Tensor | None = None,
    collision: Tensor | None = None,
) -> None:
    if constant is not None:
        slopes.add_(constant)
    if offset is not None and linear is not None:
        # Atoms that are absent, or too light to matter, must not overflow the square.
        centered = score.clamp_(min=-5000.0).sub_(offset).mul_(LN2)
        slopes.addcmul_(centered, linear)
        if quadratic is not None:
            slopes.addcmul_(centered.square_(), quadratic)
    if collision is not None:
        slopes.addcmul_(weight, collision)


def _add_weight_gradient(
    grad: Tensor, slopes: Tensor, plan: Plan, block: QueryBlock, atoms: slice, query: Tensor
) -> None:
    """Add the slopes of one tile, summed over the axes of size one of the log weight."""
    assert plan.weight_index is not None
    own = grad[:, :, block.queries if grad.shape[2] > 1 else slice(None), atoms if grad.shape[3] > 1 else slice(None)]
    tile = slopes.view(slopes.shape[0], query.shape[1], -1, slopes.shape[-1])
    for axis in (1, 2, 3):
        if grad.shape[axis] == 1:
            tile = tile.sum(axis, keepdim=True)
    own.index_add_(0, torch.tensor(plan.weight_index[block.batch], device=grad.device), tile)


def best(inputs: Inputs, top: int) -> Best:
    """Return the atoms of the ``top`` highest scores of every row, without the sink."""
    (query, key, _), (log_weight, _, plan) = inputs.flat(), inputs[3:]
    dtype = compute_dtype(query, key, plan)
    score = query.new_full((*query.shape[:3], top), -torch.inf, dtype=torch.float64)
    atom = torch.full_like(score, -1, dtype=torch.int64)
    for part, own, weights, visible in group_parts(query, log_weight, plan, TILE_ROWS):
        _best(own, key, weights, visible, dtype, score[:, part], atom[:, part])
    return Best(score, atom)


def _best(
    query: Tensor, key: Tensor, log_weight: Tensor | None, plan: Plan, dtype: torch.dtype, score: Tensor, atom: Tensor
) -> None:
    top = score.shape[-1]
    height, width, depth = tile_shape(query, key, plan, dtype)
    for entries in slices(0, query.shape[0], depth):
        for block in blocks(query, key, plan, entries, height):
            cut = (entries, slice(None), block.queries)
            scaled = scaled_queries(query, plan, block, dtype)
            held, of = score[cut].flatten(1, 2), atom[cut].flatten(1, 2)
            for atoms in slices(block.first_atom, block.last_atom, width):
                tile = torch.bmm(scaled, transposed(key[entries, atoms], dtype))
                add_log_weights(tile, log_weight, plan, block, atoms, query, key)
                tile = tile.double().mul_(LN2).masked_fill_(tile < 0.5 * ABSENT, -torch.inf)
                index = torch.arange(atoms.start, atoms.stop, device=key.device).expand_as(tile)
                index = index.masked_fill(tile == -torch.inf, -1)
                # Stable, with earlier atoms first: of equal scores the earlier atom is kept.
                held, order = torch.cat([held, tile], -1).sort(dim=-1, descending=True, stable=True)
                held, order = held[..., :top], order[..., :top]
                of = torch.cat([of, index], -1).gather(-1, order)
            for whole, own in ((score, held), (atom, of)):
                whole[cut].copy_(own.reshape(whole[cut].shape))


def mass_count(inputs: Inputs, mass: float) -> Tensor:
    """Number of the heaviest atoms that hold the given mass, ``(batch, groups, queries)``, int64."""
    (query, key, _), (log_weight, sink, plan) = inputs.flat(), inputs[3:]
    dtype = compute_dtype(query, key, plan)
    count = query.new_zeros(query.shape[:3], dtype=torch.int64)
    most = max(1, TILE_BYTES // (max(key.shape[1], 1) * dtype.itemsize))  # rows in one tile
    for part, own, weights, visible in group_parts(query, log_weight, plan, most):
        own_sink = None if sink is None else sink[:, part]
        _mass_count(own, key, weights, own_sink, visible, mass, max(1, most // own.shape[1]), dtype, count[:, part])
    return count


def _mass_count(
    query: Tensor,
    key: Tensor,
    log_weight: Tensor | None,
    sink: Tensor | None,
    plan: Plan,
    mass: float,
    height: int,
    dtype: torch.dtype,
    count: Tensor,
) -> None:
    for entries in slices(0, query.shape[0], 1):
        for block in blocks(query, key, plan, entries, height):
            if block.last_atom == block.first_atom and sink is None:
                continue
            reach = slice(block.first_atom, block.last_atom)
            score = torch.bmm(scaled_queries(query, plan, block, dtype), transposed(key[entries, reach], dtype))
            add_log_weights(score, log_weight, plan, block, reach, query, key)
            if sink is not None:
                own = sink[entries].mul(LOG2E).clamp(min=ABSENT).to(dtype)
                score = torch.cat([score, own.repeat_interleave(score.shape[1] // own.shape[1], 1)[..., None]], -1)
            maximum = score.amax(-1, keepdim=True)
            present = maximum > 0.5 * ABSENT
            weight = torch.exp2(score.sub_(maximum))
            held = weight.sort(-1, descending=True).values.cumsum(-1, dtype=torch.float64)
            # Equal weights often meet the mass exactly (9 of 10 atoms at 0.9): rounding must not add one more.
            needed = held[..., -1:] * mass * (1 - 16 * torch.finfo(dtype).eps)
            into = count[entries, :, block.queries]
            into.copy_(((held < needed).sum(-1, keepdim=True).add_(1) * present).view(into.shape))


def transposed(tile: Tensor, dtype: torch.dtype) -> Tensor:
    """Return keys or values as contiguous ``(entries, dim, atoms)``: products with them are a third faster."""
    return tile.to(dtype).mT.contiguous()


def tile_buffers(buffers: Tensor, scaled: Tensor, atoms: slice) -> list[Tensor]:
    """Preallocated buffers, cut to this tile."""
    shape = (*scaled.shape[:2], atoms.stop - atoms.start)
    return [buffer[: math.prod(shape)].view(shape) for buffer in buffers]
