"""How many threads torch has."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

__all__ = ["limited_threads"]


@contextlib.contextmanager
def limited_threads(most: int) -> Iterator[None]:
    """Inside, torch has so many threads at most; afterwards as many as before.

    Example:
        >>> with limited_threads(1):
        ...     torch.get_num_threads()
        1
    """
    before = torch.get_num_threads()
    torch.set_num_threads(min(most, before))
    try:
        yield
    finally:
        torch.set_num_threads(before)
