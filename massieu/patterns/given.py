"""Patterns that users give, for one length."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from massieu.patterns.edges import Edges
from massieu.patterns.pattern import Pattern

__all__ = ["check_count", "from_edges", "from_mask", "named"]


def from_mask(mask: Any, *, name: str = "mask", self_loops: bool = True, causal: bool = False) -> Pattern:
    """A pattern for one length, from a boolean matrix that is true where the query (row) sees the atom (column).

    Args:
        mask: tensor or array, ``(T, T)``.
        name: for people.
        self_loops: whether to let every token see itself; otherwise the matrix is taken as it is.
        causal: later tokens are left out.

    Example:
        >>> from_mask(torch.tensor([[0, 1], [0, 0]], dtype=torch.bool)).mask(2)
        tensor([[ True,  True],
                [False,  True]])
    """
    matrix = mask.detach().cpu().numpy() if isinstance(mask, torch.Tensor) else np.asarray(mask)
    if matrix.dtype != bool or matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.size:
        raise ValueError(
            f"mask must be boolean and square, (tokens, tokens), got {matrix.dtype} {matrix.shape}; compare scores with"
            " a number, or write mask > -inf"
        )
    rule = functools.partial(_given, Edges.of_mask(matrix))
    return Pattern(named(name, causal), rule, causal, self_loops)


def from_edges(
    edges: Iterable[tuple[int, int]],
    length: int,
    *,
    name: str = "edges",
    self_loops: bool = True,
    causal: bool = False,
) -> Pattern:
    """A pattern for one length, from pairs (query, atom) of which the first sees the second.

    Example:
        >>> from_edges([(0, 2), (2, 1)], 3).mask(3).int()
        tensor([[1, 0, 1],
                [0, 1, 0],
                [0, 1, 1]], dtype=torch.int32)
    """
    check_count(length, "length", 1, "it is the number of tokens")
    try:
        pairs = np.asarray(list(edges))
    except (TypeError, ValueError):
        raise ValueError(
            f"edges must be pairs of positions from 0 to {length - 1}, got {edges!r}; they are (query, atom)"
        ) from None
    pairs = pairs.reshape(0, 2).astype(int) if not pairs.size else pairs
    whole = pairs.ndim == 2 and pairs.shape[1] == 2 and pairs.dtype.kind in "iu"
    if not whole or (pairs.size and (pairs.min() < 0 or pairs.max() >= length)):
        got = f"{pairs.min()} to {pairs.max()}" if whole else f"{pairs.dtype} {pairs.shape}"
        raise ValueError(f"edges must be pairs of positions from 0 to {length - 1}, got {got}; they are (query, atom)")
    mask = np.zeros((length, length), dtype=bool)
    mask[pairs[:, 0], pairs[:, 1]] = True
    return from_mask(mask, name=name, self_loops=self_loops, causal=causal)


def named(name: str, causal: bool) -> str:
    """The name of a pattern, or of its causal half."""
    return f"causal {name}" if causal else name


def check_count(value: Any, name: str, least: int, remedy: str) -> None:
    """One sentence unless this is a whole number that is large enough."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}; {remedy}")


def _given(edges: Edges, length: int) -> Edges:
    if length != edges.length:
        raise ValueError(f"the pattern was given for {edges.length} tokens, got {length}; give one for that length")
    return edges
