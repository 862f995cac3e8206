"""Messages on a logger: a warning could be turned into an error, which would end the training."""

from __future__ import annotations

import logging

from torch import nn

__all__ = ["error_summary", "log_message"]

LOGGER = logging.getLogger("massieu.watch")
LONGEST = 300  # characters of a message


def log_message(sentence: str) -> None:
    """Log a sentence; without handlers, Python prints it to stderr."""
    LOGGER.warning("%s", sentence)


def error_summary(error: BaseException) -> str:
    """Return the type of an error and the first line of its message.

    Example:
        >>> error_summary(ValueError("too large\\nby far")), error_summary(TimeoutError())
        ('ValueError: too large', 'TimeoutError')
    """
    if isinstance(error, KeyError) and isinstance(next(iter(error.args), None), nn.Module):
        # The hooks of the original run in its copies, whose modules have no entry.
        return f"a copy of {type(error.args[0]).__name__} was made and called inside the forward pass"
    first = next(iter(str(error).strip().splitlines()), "")
    words = first if len(first) <= LONGEST else f"{first[:LONGEST]}…"
    return f"{type(error).__name__}: {words}" if words else type(error).__name__
