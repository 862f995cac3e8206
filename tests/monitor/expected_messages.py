"""Sentences on the logger of a watch."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator


@contextlib.contextmanager
def logs(match: str = "") -> Iterator[list[str]]:
    """Collect what is logged inside the block, and expect a sentence that matches; without one, silence."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("massieu.watch")
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
    assert any(re.search(match, each) for each in said) if match else not said, said
