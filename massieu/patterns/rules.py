"""The connections of each family at a length."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from massieu.patterns.edges import Edges

__all__ = [
    "dilated_edges",
    "full_edges",
    "global_window_edges",
    "last_of_block_edges",
    "multiple_edges",
    "near_edges",
    "own_block_edges",
    "power_edges",
    "ring_edges",
    "star_edges",
]


def full_edges(length: int) -> Edges:
    return Edges.where(length, lambda query, atom: query + atom >= 0)


def dilated_edges(width: int, step: int, length: int) -> Edges:
    width, step = min(width, length), min(step, length)  # more is the same, and might not fit into 64 bits

    def visible(query: NDArray[np.int64], atom: NDArray[np.int64]) -> NDArray[np.bool_]:
        away = np.abs(query - atom)
        seen: NDArray[np.bool_] = (away % step == 0) & (away <= width * step)
        return seen

    return Edges.where(length, visible)


def star_edges(hub: int, length: int) -> Edges:
    if hub >= length:
        raise ValueError(f"hub must be one of {length} tokens, from 0 to {length - 1}, got {hub}; the default is 0")
    return Edges.where(length, lambda query, atom: (query == hub) | (atom == hub))


def ring_edges(hubs: int, length: int) -> Edges:
    """A ring of all tokens but the first ``hubs``, which see all and are seen by all."""
    around = max(1, length - hubs)

    def visible(query: NDArray[np.int64], atom: NDArray[np.int64]) -> NDArray[np.bool_]:
        away = (query - atom) % around
        seen: NDArray[np.bool_] = (away <= 1) | (away == around - 1) | (query < hubs) | (atom < hubs)
        return seen

    return Edges.where(length, visible)


def _stride(stride: int | None, length: int) -> int:
    return max(1, math.isqrt(length)) if stride is None else min(stride, 2 * length + 2)  # beyond, all are the same


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
    def visible(query: NDArray[np.int64], atom: NDArray[np.int64]) -> NDArray[np.bool_]:
        away = np.abs(query - atom)
        seen: NDArray[np.bool_] = away & (away - 1) == 0  # zero too
        return seen

    return Edges.where(length, visible)
