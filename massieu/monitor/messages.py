"""Sentences for the person who trains, on a logger: a warning may be an error, which would end the training."""

from __future__ import annotations

import logging

from torch import nn

__all__ = ["cause", "tell"]

LOGGER = logging.getLogger("massieu.watch")
LONGEST = 300  # characters of a message


def tell(sentence: str) -> None:
    """Log a sentence; without handlers, Python prints it to stderr."""
    LOGGER.warning("%s", sentence)


def cause(error: BaseException) -> str:
    """The kind of an error and the first line of its message.

    Example:
        >>> cause(ValueError("too large\\nby far")), cause(TimeoutError())
        ('ValueError: too large', 'TimeoutError')
    """
    if isinstance(error, KeyError) and isinstance(next(iter(error.args), None), nn.Module):
        # Copies share the hooks of their original, which do not know them.
        return f"a copy of {type(error.args[0]).__name__} was made and called inside the forward pass"
    first = next(iter(str(error).strip().splitlines()), "")
    words = first if len(first) <= LONGEST else f"{first[:LONGEST]}…"
    return f"{type(error).__name__}: {words}" if words else type(error).__name__
