"""Attention that computes only the blocks of a pattern: queries, and the atoms that any of them sees."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from massieu import statistics
from massieu.checks import UserError, check_count, check_floating
from massieu.kernels.rows import arrange
from massieu.patterns.edges import Edges
from massieu.patterns.pattern import Pattern
from massieu.statistics import Attended, RowStatistics

__all__ = ["SparsePlan", "sparse_attend", "sparse_plan"]

BLOCK = 64


@dataclass(frozen=True, eq=False)
class Tiles:
    """Blocks of equal size: queries ``(blocks, rows)``, atoms ``(blocks, width)``, log weights; None if all zero."""

    queries: Tensor
    atoms: Tensor
    log_weight: Tensor | None


@dataclass(frozen=True, eq=False)
class SparsePlan:
    """Blocks of queries of a pattern, each with the atoms that it gathers.

    Attributes:
        length: number of tokens.
        connections: edges of the pattern.
        visited: pairs that are computed; those outside the pattern are masked.
        tiles: blocks, by size.
        place: position of each token in the concatenated blocks.
    """

    length: int
    connections: int
    visited: int
    tiles: tuple[Tiles, ...] = field(repr=False)
    place: Tensor = field(repr=False)

    @property
    def density(self) -> float:
        """Computed pairs as a share of all pairs."""
        return self.visited / self.length**2


def sparse_plan(pattern: Pattern | Edges, length: int | None = None, *, block: int = BLOCK) -> SparsePlan:
    """Return a pattern cut into blocks of queries, each with all atoms that one of its queries sees.

    Queries that see more than a quarter of all tokens form separate blocks. The others keep their order, or are sorted
    by the first atom that they see, whichever visits fewer pairs.

    Args:
        pattern: a pattern, or its edges at a length.
        length: number of tokens; required for a pattern.
        block: queries in a block.

    Example:
        >>> from massieu.patterns import global_window
        >>> plan = sparse_plan(global_window(16, 1), 4096)
        >>> plan.connections, plan.visited, round(plan.density, 3)
        (143054, 459696, 0.027)
    """
    if isinstance(pattern, Pattern):
        if length is None:
            raise UserError("length must be given for a pattern, got None; it is the number of tokens")
        pattern = pattern.at(length)
    if not isinstance(pattern, Edges):
        got = type(pattern).__name__
        raise UserError(
            f"pattern must be a Pattern or Edges, got {got}; of a schedule take one pattern, schedule[layer],"
            " and from_mask makes one of a boolean matrix"
        )
    if length not in (None, pattern.length):
        raise UserError(f"edges are for {pattern.length} tokens, got length {length}; pass the pattern itself")
    block = check_count(block, "block", remedy="64 is usual")
    edges, tokens = pattern, np.arange(pattern.length)
    heavy = 4 * edges.counts > edges.length
    first = edges.unpack().argmax(1) if edges.length <= 1 << 14 else tokens
    light = tokens[~heavy]
    orders = (light, light[first[light].argsort(kind="stable")])
    options = [_blocks(edges, [order, tokens[heavy]], block) for order in orders]
    blocks = min(options, key=lambda each: sum(len(rows) * _padded(len(atoms)) for rows, atoms in each))
    groups: dict[tuple[int, int], list[tuple[NDArray[np.int64], NDArray[np.int64]]]] = {}
    for rows, atoms in blocks:
        groups.setdefault((len(rows), min(_padded(len(atoms)), edges.length)), []).append((rows, atoms))
    tiles = tuple(_tiles(edges, own, width) for (_, width), own in groups.items())
    order = torch.cat([each.queries.reshape(-1) for each in tiles])
    return SparsePlan(
        length=edges.length,
        connections=edges.connections,
        visited=sum(each.queries.numel() * each.atoms.shape[1] for each in tiles),
        tiles=tiles,
        place=order.argsort(),
    )


def sparse_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern | Edges | SparsePlan,
    *,
    scale: float | None = None,
    sink: Tensor | float | None = None,
    statistics: Literal["full", "light"] | None = "full",
) -> Attended:
    r"""Return ``attend(query, key, value, pattern.mask(length))``, computed on the blocks of the pattern only.

    Blocks of queries gather the keys and values that they see and go through :func:`massieu.attend`, many blocks in one
    call, so statistics and gradients are exact. It is faster for sparse patterns and long sequences: ``massieu bench
    patterns`` measures from which length on.

    Args:
        query: shape ``(..., tokens, dim)``.
        key: shape ``(..., tokens, dim)``; heads may be grouped as in :func:`massieu.attend`.
        value: shape ``(..., tokens, value_dim)``.
        pattern: a pattern, or its :func:`sparse_plan`, which saves planning again.
        scale: factor of the inner products; one over the square root of dim by default.
        sink: log weight of one more atom at the origin, one per head.
        statistics: ``"full"``, ``"light"`` or None.

    Returns:
        The output and the statistics of :func:`massieu.attend`.

    Example:
        >>> from massieu.patterns import star_ring
        >>> query, key, value = torch.randn(3, 2, 100, 8, generator=torch.Generator().manual_seed(0))
        >>> output = sparse_attend(query, key, value, star_ring()).output
        >>> torch.allclose(output, massieu.attend(query, key, value, star_ring().mask(100)).output, atol=1e-6)
        True
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_floating(tensor, name)
        if tensor.dim() < 2:
            raise UserError(f"{name} must have shape (..., tokens, dim), got {tuple(tensor.shape)}; pass {name}[None]")
    length = query.shape[-2]
    plan = pattern if isinstance(pattern, SparsePlan) else sparse_plan(pattern, length)
    if not plan.length == length == key.shape[-2] == value.shape[-2]:
        raise UserError(
            f"query, key and value must have as many tokens as the pattern, {plan.length}, got {length},"
            f" {key.shape[-2]} and {value.shape[-2]}; patterns are for self-attention"
        )
    # Axes and types are checked here: below, all tensors have one more axis.
    options: dict[str, Any] = {"sink": sink, "causal": False, "window": None, "lengths": None}
    arrange(query[..., :1, :], key[..., :1, :], value[..., :1, :], None, scale=1.0, **options)
    axes = max(query.dim(), key.dim(), value.dim())
    query, key, value = (each[(None,) * (axes - each.dim())] for each in (query, key, value))
    found = [_attend_tiles(tiles, query, key, value, scale, sink, statistics) for tiles in plan.tiles]
    place = plan.place.to(query.device)
    output = torch.cat([each.output.movedim(0, -3).flatten(-3, -2) for each in found], -2).index_select(-2, place)
    if statistics is None:
        return Attended(output, None)
    fields = zip(*(each.statistics for each in found if each.statistics is not None), strict=True)
    joined: list[Any] = [_joined(field, place) for field in fields]
    return Attended(output, RowStatistics(*joined))


def _attend_tiles(
    tiles: Tiles, query: Tensor, key: Tensor, value: Tensor, scale: float | None, sink: Any, level: Any
) -> Attended:
    log_weight = tiles.log_weight
    if log_weight is not None:  # (blocks, rows, width) to the axes of the queries
        shape = (log_weight.shape[0], *[1] * (query.dim() - 2), *log_weight.shape[1:])
        log_weight = log_weight.to(query.device).reshape(shape)
    # Blocks come first, so that heads stay the last of the leading axes.
    own, keys, values = (
        _gathered(tensor, index) for tensor, index in ((query, tiles.queries), (key, tiles.atoms), (value, tiles.atoms))
    )
    return statistics.attend(own, keys, values, log_weight, scale=scale, sink=sink, statistics=level)


def _gathered(tensor: Tensor, index: Tensor) -> Tensor:
    """``(..., tokens, dim)`` to ``(blocks, ..., rows, dim)``."""
    found = tensor.index_select(-2, index.reshape(-1).to(tensor.device))
    cut: Tensor = found.unflatten(-2, tuple(index.shape))
    return cut.movedim(-3, 0)


def _joined(field: tuple[Tensor | None, ...], place: Tensor) -> Tensor | None:
    parts = [part.movedim(0, -2).flatten(-2) for part in field if part is not None]
    return torch.cat(parts, -1).index_select(-1, place) if parts else None


def _blocks(
    edges: Edges, orders: list[NDArray[np.int64]], block: int
) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Return the queries of each block, and the atoms that at least one of them sees."""
    found = []
    for order in orders:
        for start in range(0, len(order), block):
            rows = order[start : start + block]
            seen = Edges(edges.length, np.bitwise_or.reduce(edges.bits[rows], axis=0, keepdims=True))
            found.append((rows, np.flatnonzero(seen.unpack()[0])))
    return found


def _padded(count: int) -> int:
    """Round up a number of atoms by at most a quarter, so that more blocks share a call."""
    step = max(4, 1 << max(0, count.bit_length() - 3))
    return -(-count // step) * step


def _tiles(edges: Edges, blocks: list[tuple[NDArray[np.int64], NDArray[np.int64]]], width: int) -> Tiles:
    queries = np.stack([rows for rows, _ in blocks])
    atoms = np.zeros((len(blocks), width), dtype=np.int64)
    present = np.zeros((len(blocks), 1, width), dtype=bool)
    for number, (_, seen) in enumerate(blocks):
        atoms[number, : len(seen)] = seen
        present[number, :, : len(seen)] = True
    shape = (*queries.shape, width)
    mask = edges.contains(*(np.broadcast_to(each, shape) for each in (queries[:, :, None], atoms[:, None]))) & present
    weights = None if mask.all() else torch.zeros(shape).masked_fill_(~torch.from_numpy(mask), -torch.inf)
    return Tiles(torch.from_numpy(queries), torch.from_numpy(atoms), weights)
