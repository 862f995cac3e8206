"""Edges of each pattern family at a length."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from massieu.checks import UserError
from massieu.patterns.edges import Edges

__all__ = [
    "bigbird_edges",
    "dilated_edges",
    "full_edges",
    "global_window_edges",
    "last_of_block_edges",
    "multiple_edges",
    "near_edges",
    "own_block_edges",
    "power_edges",
    "regular_edges",
    "ring_edges",
    "star_edges",
]

SWAPS = 10  # attempts for each edge; a tenth of them leaves no trace of the circle


def full_edges(length: int) -> Edges:
    return Edges.where(length, lambda query, atom: query + atom >= 0)


def dilated_edges(width: int, step: int, length: int) -> Edges:
    width, step = min(width, length), min(step, length)  # larger ones are equivalent, but may overflow 64 bits
    return _by_distance(length, lambda distance: (distance % step == 0) & (distance <= width * step))


def star_edges(hub: int, length: int) -> Edges:
    if hub >= length:
        raise UserError(f"hub must be one of {length} tokens, from 0 to {length - 1}, got {hub}; the default is 0")
    return Edges.where(length, lambda query, atom: (query == hub) | (atom == hub))


def ring_edges(hubs: int, length: int) -> Edges:
    """Return a ring of all tokens but the first ``hubs``, which see all and are seen by all."""
    around = max(1, length - hubs)

    def visible(query: NDArray[np.int64], atom: NDArray[np.int64]) -> NDArray[np.bool_]:
        distance = (query - atom) % around
        seen: NDArray[np.bool_] = (distance <= 1) | (distance == around - 1) | (query < hubs) | (atom < hubs)
        return seen

    return Edges.where(length, visible)


def _stride(stride: int | None, length: int) -> int:
    # Strides beyond twice the length are equivalent, but may overflow 64 bits.
    return max(1, math.isqrt(length)) if stride is None else min(stride, 2 * length + 2)


def near_edges(stride: int | None, length: int) -> Edges:
    return dilated_edges(_stride(stride, length) // 2, 1, length)


def multiple_edges(stride: int | None, length: int) -> Edges:
    size = _stride(stride, length)
    return Edges.where(length, lambda query, atom: (query - atom) % size == 0)


def own_block_edges(stride: int | None, length: int) -> Edges:
    size = _stride(stride, length)
    return Edges.where(length, lambda query, atom: query // size == atom // size)


def last_of_block_edges(stride: int | None, length: int) -> Edges:
    size = _stride(stride, length)
    return Edges.where(length, lambda query, atom: (query == atom) | (atom % size == size - 1))


def global_window_edges(width: int, num_global: int, length: int) -> Edges:
    return Edges.where(
        length, lambda query, atom: (np.abs(query - atom) <= width) | (query < num_global) | (atom < num_global)
    )


def power_edges(length: int) -> Edges:
    return _by_distance(length, lambda distance: distance & (distance - 1) == 0)  # zero too


def _by_distance(length: int, visible: Callable[[NDArray[np.int64]], NDArray[np.bool_]]) -> Edges:
    return Edges.where(length, lambda query, atom: visible(np.abs(query - atom)))


def bigbird_edges(width: int, num_global: int, num_random: int, seed: int, block: int, length: int) -> Edges:
    """Return a window, global tokens and random tokens, among blocks of tokens."""
    block = min(block, length)
    blocks = -(-length // block)
    generator = np.random.default_rng(seed)
    drawn = np.zeros((blocks, blocks), dtype=bool)
    for row in drawn:
        row[generator.choice(blocks, min(num_random, blocks), replace=False)] = True

    def visible(query: NDArray[np.int64], atom: NDArray[np.int64]) -> NDArray[np.bool_]:
        query, atom = query // block, atom // block
        near: NDArray[np.bool_] = np.abs(query - atom) <= width
        return near | (query < num_global) | (atom < num_global) | drawn[query, atom]

    return Edges.where(length, visible)


def regular_edges(degree: int, seed: int, length: int) -> Edges:
    """Return a random graph with the same number of neighbors for every token, and self-loops."""
    if degree >= length - 1:
        return full_edges(length)
    if degree % 2 and length % 2:
        raise UserError(
            f"degree times length must be even, got {degree} and {length}; an edge has two ends: add or drop a token"
        )
    mask, ends = _circle(degree, length)
    generator = np.random.default_rng(seed)
    attempts = SWAPS * len(ends)
    picks, turns = generator.integers(0, max(1, len(ends)), (attempts, 2)).tolist(), generator.random(attempts) < 0.5
    for (first, second), turn in zip(picks, turns.tolist(), strict=True):
        (a, b), (c, d) = ends[first], ends[second]
        c, d = (d, c) if turn else (c, d)
        if len({a, b, c, d}) == 4 and not mask[a, d] and not mask[c, b]:
            mask[a, b] = mask[b, a] = mask[c, d] = mask[d, c] = False
            mask[a, d] = mask[d, a] = mask[c, b] = mask[b, c] = True
            ends[first], ends[second] = (a, d), (c, b)
    np.fill_diagonal(mask, True)
    return Edges.of_mask(mask)


def _circle(degree: int, length: int) -> tuple[NDArray[np.bool_], list[tuple[int, int]]]:
    """Connect neighbors on a circle up to half the degree, and opposite tokens if the degree is odd."""
    steps = [*range(1, degree // 2 + 1), *([length // 2] if degree % 2 else [])]
    ends = {(min(i, (i + step) % length), max(i, (i + step) % length)): None for step in steps for i in range(length)}
    mask = np.zeros((length, length), dtype=bool)
    for a, b in ends:
        mask[a, b] = mask[b, a] = True
    return mask, list(ends)
