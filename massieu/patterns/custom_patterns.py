"""Patterns from a given mask or list of edges, for one length."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from massieu.checks import UserError, check_count
from massieu.patterns.edges import Edges
from massieu.patterns.pattern import Pattern, causal_name

__all__ = ["from_edges", "from_mask"]


def from_mask(mask: Any, *, name: str = "mask", self_loops: bool = True, causal: bool = False) -> Pattern:
    """Return a pattern for one length from a boolean matrix, true where the query (row) sees the atom (column).

    Args:
        mask: tensor or array, ``(T, T)``.
        name: shown in reports.
        self_loops: add missing self-loops.
        causal: leave out later tokens.

    Example:
        >>> from_mask(torch.tensor([[0, 1], [0, 0]], dtype=torch.bool)).mask(2)
        tensor([[ True,  True],
                [False,  True]])
    """
    matrix = mask.detach().cpu().numpy() if isinstance(mask, torch.Tensor) else np.asarray(mask)
    if matrix.dtype != bool or matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.size:
        raise UserError(
            f"mask must be boolean and square, (tokens, tokens), got {matrix.dtype} {matrix.shape}; compare scores with"
            " a number, or write mask > -inf"
        )
    rule = functools.partial(_fixed_length, Edges.of_mask(matrix))
    return Pattern(causal_name(name, causal), rule, causal, self_loops)


def from_edges(
    edges: Iterable[tuple[int, int]],
    length: int,
    *,
    name: str = "edges",
    self_loops: bool = True,
    causal: bool = False,
) -> Pattern:
    """Return a pattern for one length from pairs (query, atom) of which the first sees the second.

    Example:
        >>> from_edges([(0, 2), (2, 1)], 3).mask(3).int()
        tensor([[1, 0, 1],
                [0, 1, 0],
                [0, 1, 1]], dtype=torch.int32)
    """
    length = check_count(length, "length")
    expected = f"edges must be pairs (query, atom) of positions from 0 to {length - 1}"
    try:
        pairs = np.asarray(list(edges))
    except (TypeError, ValueError):
        raise UserError(f"{expected}, got {edges!r}; pass a list of pairs") from None
    pairs = pairs if pairs.size else np.zeros((0, 2), dtype=int)
    if pairs.ndim != 2 or pairs.shape[1] != 2 or pairs.dtype.kind not in "iu":
        raise UserError(f"{expected}, got {pairs.dtype} {pairs.shape}; pass a list of pairs")
    if pairs.size and (pairs.min() < 0 or pairs.max() >= length):
        raise UserError(f"{expected}, got {pairs.min()} to {pairs.max()}; count from zero")
    mask = np.zeros((length, length), dtype=bool)
    mask[pairs[:, 0], pairs[:, 1]] = True
    return from_mask(mask, name=name, self_loops=self_loops, causal=causal)


def _fixed_length(edges: Edges, length: int) -> Edges:
    if length != edges.length:
        raise UserError(f"the pattern was given for {edges.length} tokens, got {length}; make one for that length")
    return edges
