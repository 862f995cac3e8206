"""Attention that visits only what a pattern lists: blocks of queries with the atoms that any of them sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from massieu import statistics
from massieu.kernels.rows import arrange
from massieu.patterns.edges import Edges
from massieu.patterns.pattern import Pattern
from massieu.statistics import Attended, RowStatistics

__all__ = ["SparsePlan", "sparse_attend", "sparse_plan"]

BLOCK = 64


@dataclass(frozen=True, eq=False)
class Tiles:
    """Blocks of equal size: queries ``(blocks, rows)``, atoms ``(blocks, width)``, log weights or None for all zero."""

    queries: Tensor
    atoms: Tensor
    log_weight: Tensor | None


@dataclass(frozen=True, eq=False)
class SparsePlan:
    """How attention with a pattern goes about: which queries together, and which atoms they gather.

    Attributes:
        length: number of tokens.
        connections: pairs that count.
        visited: pairs that are computed; those in between are masked.
    """

    length: int
    connections: int
    visited: int
    tiles: tuple[Tiles, ...]
    place: Tensor

    @property
    def density(self) -> float:
        """Share of all pairs that is computed."""
        return self.visited / self.length**2

    def __repr__(self) -> str:
        return f"SparsePlan(length={self.length}, connections={self.connections}, visited={self.visited})"


def sparse_plan(pattern: Pattern | Edges, length: int | None = None, *, block: int = BLOCK) -> SparsePlan:
    """Cut a pattern into blocks of queries, each with all atoms that one of its queries sees.

    Queries that see more than a quarter of all tokens have blocks of their own. The others stay in their order, or are
    sorted by the first atom that they see, whichever visits fewer pairs.

    Args:
        pattern: a pattern, or its edges at a length.
        length: number of tokens, for a pattern.
        block: queries in a block.

    Example:
        >>> from massieu.patterns import global_window
        >>> plan = sparse_plan(global_window(16, 1), 4096)
        >>> plan.connections, plan.visited, round(plan.density, 3)
        (143054, 459696, 0.027)
    """
    if isinstance(pattern, Pattern):
        if length is None:
            raise ValueError("length must be given for a pattern, got None; it is the number of tokens")
        pattern = pattern.at(length)
    elif isinstance(pattern, Edges) and length not in (None, pattern.length):
        raise ValueError(
            f"edges are of {pattern.length} tokens, got length {length}; pass the pattern itself for others"
        )
    if not isinstance(pattern, Edges):
        got = type(pattern).__name__
        raise TypeError(
            f"pattern must be a Pattern or Edges, got {got}; of a schedule take one pattern, schedule[layer],"
            " and from_mask makes one of a boolean matrix"
        )
    if isinstance(block, bool) or not isinstance(block, (int, np.integer)) or block < 1:
        raise ValueError(f"block must be a positive whole number of queries, got {block!r}; 64 is usual")
    edges, tokens = pattern, np.arange(pattern.length)
    heavy = 4 * edges.counts > edges.length
    first = edges.unpack().argmax(1) if edges.length <= 1 << 14 else tokens
    light = tokens[~heavy]
    options = [
        _blocks(edges, [order, tokens[heavy]], block) for order in (light, light[first[light].argsort(kind="stable")])
    ]
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
    r"""Attention within a pattern, as ``attend(query, key, value, pattern.mask(length))``, visiting only its blocks.

    Blocks of queries gather the keys and values that they see and go through :func:`massieu.attend`, many blocks in one
    call. So statistics are exact, and gradients flow as there. It pays where a pattern is sparse and the sequence long:
    ``massieu bench patterns`` measures from which length on.

    Args:
        query: shape ``(..., tokens, dim)``.
        key: shape ``(..., tokens, dim)``, with as many tokens; heads may be grouped as in :func:`massieu.attend`.
        value: shape ``(..., tokens, value_dim)``.
        pattern: a pattern; or what :func:`sparse_plan` made of it, which saves planning again.
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
        if not isinstance(tensor, Tensor) or tensor.dim() < 2:
            got = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ValueError(f"{name} must be a tensor (..., tokens, dim), got {got}; pass {name}[None] for one token")
    length = query.shape[-2]
    plan = pattern if isinstance(pattern, SparsePlan) else sparse_plan(pattern, length)
    if not plan.length == length == key.shape[-2] == value.shape[-2]:
        raise ValueError(
            f"query, key and value must have as many tokens as the pattern, {plan.length}, got {length},"
            f" {key.shape[-2]} and {value.shape[-2]}; patterns are for self-attention"
        )
    # Axes and types are looked at here: below, all tensors have one more axis.
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
    """Queries of each block, and the atoms that one of them sees."""
    found = []
    for order in orders:
        for start in range(0, len(order), block):
            rows = order[start : start + block]
            seen = Edges(edges.length, np.bitwise_or.reduce(edges.bits[rows], axis=0, keepdims=True))
            found.append((rows, np.flatnonzero(seen.unpack()[0])))
    return found


def _padded(count: int) -> int:
    """A number of atoms, rounded up by at most a quarter, so that many blocks have the same and share a call."""
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
    weights = None
    if not mask.all():
        weights = torch.zeros(shape).masked_fill_(~torch.from_numpy(mask), -torch.inf)
    return Tiles(torch.from_numpy(queries), torch.from_numpy(atoms), weights)
