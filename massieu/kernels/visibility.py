"""Atoms that a row may see by causality and window, from their positions alone.

The queries are the last of the atoms: query ``i`` is at position ``i + atoms - queries``.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["offsets", "visible", "visible_count", "visible_range"]


def offsets(causal: bool, window: int | None) -> tuple[int | None, int | None]:
    """Return the least and the largest visible offset of an atom from its query; None for no limit.

    Example:
        >>> offsets(causal=True, window=3)
        (-2, 0)
    """
    reach = None if window is None else window - 1
    return None if reach is None else -reach, 0 if causal else reach


def visible(query: Tensor, atom: Tensor, causal: bool, window: int | None) -> Tensor:
    """Return True where the query at one position sees the atom at another; the positions broadcast.

    Example:
        >>> visible(torch.arange(3)[:, None], torch.arange(3), causal=True, window=2).int()
        tensor([[1, 0, 0],
                [1, 1, 0],
                [0, 1, 1]], dtype=torch.int32)
    """
    least, largest = offsets(causal, window)
    if largest is None:
        return torch.ones_like(atom, dtype=torch.bool)
    offset = atom - query
    return offset <= largest if least is None else (offset <= largest) & (offset >= least)


def visible_range(first: int, last: int, atoms: int, causal: bool, window: int | None) -> tuple[int, int]:
    """Return the range of the atoms that any query from position ``first`` to ``last`` sees; its end is excluded."""
    least, largest = offsets(causal, window)
    begin = 0 if least is None else max(0, first + least)
    end = atoms if largest is None else min(atoms, last + largest + 1)
    return begin, max(begin, end)


def visible_count(queries: int, atoms: int, causal: bool, window: int | None) -> Tensor:
    """Return the number of atoms that each query sees, int64 ``(queries,)``."""
    least, largest = offsets(causal, window)
    own = torch.arange(queries) + atoms - queries
    first = torch.zeros_like(own) if least is None else (own + least).clamp_min(0)
    last = torch.full_like(own, atoms - 1) if largest is None else (own + largest).clamp_max(atoms - 1)
    return (last - first + 1).clamp_min(0)
