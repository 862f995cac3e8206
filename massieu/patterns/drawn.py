"""The connections of patterns that are drawn at random."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from massieu.patterns.edges import Edges

__all__ = ["bigbird_edges", "regular_edges"]

SWAPS = 10  # attempts for each edge; a tenth of them leaves no trace of the circle


def bigbird_edges(width: int, num_global: int, num_random: int, seed: int, block: int, length: int) -> Edges:
    """A window, first tokens that see all, and random tokens, among blocks of tokens."""
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
    """A random graph of which every token has the same number of neighbors, and self-loops."""
    if degree >= length - 1:
        return Edges.where(length, lambda query, atom: query + atom >= 0)
    if degree % 2 and length % 2:
        raise ValueError(
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
    """Neighbors on a circle up to half the degree, and the opposite token if the degree is odd."""
    steps = [*range(1, degree // 2 + 1), *([length // 2] if degree % 2 else [])]
    ends = {(min(i, (i + step) % length), max(i, (i + step) % length)): None for step in steps for i in range(length)}
    mask = np.zeros((length, length), dtype=bool)
    for a, b in ends:
        mask[a, b] = mask[b, a] = True
    return mask, list(ends)
