"""Directed graphs on tokens, one bit for each pair."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from massieu.checks import UserError

__all__ = ["Edges", "Visible"]

Visible = Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.bool_]]
CHUNK = 1 << 24  # pairs unpacked at once
ONES = np.array([number.bit_count() for number in range(256)], dtype=np.uint8)


@dataclass(frozen=True, eq=False)
class Edges:
    """Directed graph on tokens: bit ``j`` of row ``k`` is set where token ``k`` sees token ``j``.

    Attributes:
        length: number of tokens T.
        bits: ``(T, words)`` of uint64, lowest bit first; bits from T on are zero.
    """

    length: int
    bits: NDArray[np.uint64]

    @classmethod
    def where(cls, length: int, visible: Visible) -> Edges:
        """Return the pairs for which ``visible(queries[:, None], atoms[None, :])`` is true.

        Example:
            >>> Edges.where(5, lambda query, atom: atom <= query).connections
            15
        """
        bits = np.zeros((length, -(-length // 64)), dtype=np.uint64)
        atoms = np.arange(length)[None]
        step = max(1, CHUNK // length)
        for start in range(0, length, step):
            rows = np.arange(start, min(start + step, length))[:, None]
            bits[rows[:, 0]] = pack(np.broadcast_to(visible(rows, atoms), (len(rows), length)))
        return cls(length, bits)

    @classmethod
    def of_mask(cls, mask: NDArray[np.bool_]) -> Edges:
        """Return the pairs for which a square matrix is true."""
        return cls(len(mask), pack(mask))

    @functools.cached_property
    def connections(self) -> int:
        """Number of edges, self-loops included."""
        return int(self.counts.sum())

    @functools.cached_property
    def counts(self) -> NDArray[np.int64]:
        """Number of tokens seen by each token, ``(T,)``."""
        counts: NDArray[np.int64] = ONES[self.bits.view(np.uint8)].sum(1, dtype=np.int64)
        return counts

    @functools.cached_property
    def has_self_loops(self) -> bool:
        """True if every token sees itself."""
        return bool(self.contains(np.arange(self.length), np.arange(self.length)).all())

    @functools.cached_property
    def is_causal(self) -> bool:
        """True if no token sees a later one."""
        return not np.any(self.bits & ~triangle(self.length).bits)

    def contains(self, queries: NDArray[np.int64], atoms: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return for each pair whether the query sees the atom; both arguments have the same shape."""
        words = self.bits[queries, atoms >> 6]
        found: NDArray[np.bool_] = (words >> (atoms & 63).astype(np.uint64) & np.uint64(1)).astype(bool)
        return found

    def unpack(self, rows: slice | NDArray[np.int64] = slice(None)) -> NDArray[np.bool_]:
        """Return rows as a boolean matrix."""
        packed = np.ascontiguousarray(self.bits[rows]).view(np.uint8)
        return np.unpackbits(packed, axis=1, count=self.length, bitorder="little").astype(bool)

    def mask(self) -> Tensor:
        """Return a boolean tensor ``(T, T)``, True where the query (row) sees the atom (column)."""
        return torch.from_numpy(self.unpack())

    def transpose(self) -> Edges:
        """Return the graph with every edge reversed."""
        return Edges.of_mask(self.unpack().T)

    def numbers(self) -> list[int]:
        """Return each row as one whole number, for fast set operations on bits."""
        return [int.from_bytes(row.tobytes(), "little") for row in self.bits.astype("<u8")]

    @functools.cached_property
    def lists(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Offsets of the rows, ``(T + 1,)``, and the atoms of all rows in one list (CSR)."""
        step = max(1, CHUNK // self.length)
        parts = [np.nonzero(self.unpack(slice(start, start + step)))[1] for start in range(0, self.length, step)]
        return np.concatenate([[0], self.counts.cumsum()]), np.concatenate(parts)

    def __or__(self, other: Edges) -> Edges:
        check_edges(other, self.length)
        return Edges(self.length, self.bits | other.bits)

    def __and__(self, other: Edges) -> Edges:
        check_edges(other, self.length)
        return Edges(self.length, self.bits & other.bits)

    def __repr__(self) -> str:
        return f"Edges(length={self.length}, connections={self.connections})"


def union(edges: Iterable[Edges]) -> Edges:
    return functools.reduce(operator.or_, edges)


def check_edges(edges: Any, length: int | None = None) -> None:
    """Raise unless these are edges, of the length if it is given."""
    if not isinstance(edges, Edges):
        raise UserError(f"edges must be Edges, got {type(edges).__name__}; of a pattern take pattern.at(length)")
    if length not in (None, edges.length):
        raise UserError(f"both must have the same number of tokens, got {length} and {edges.length}; use one length")


def triangle(length: int) -> Edges:
    """Return the causal graph: every token sees itself and all earlier tokens."""
    return Edges.where(length, lambda query, atom: atom <= query)


def pack(mask: NDArray[np.bool_]) -> NDArray[np.uint64]:
    """Pack rows of booleans into words of 64 bits."""
    packed = np.packbits(mask, axis=1, bitorder="little")
    return np.ascontiguousarray(np.pad(packed, ((0, 0), (0, -packed.shape[1] % 8)))).view(np.uint64)
