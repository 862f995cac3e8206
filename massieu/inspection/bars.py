"""A progress bar for inspections in notebooks and terminals."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from massieu.checks import UserError

__all__ = ["Progress", "progress_bar"]

Progress = Callable[[str, int, int], object]
"""Called with what is being done, how much of it is done, and of how much (0 if that is not known)."""

DELAY = 2.0
"""Seconds until a bar that nobody asked for appears."""

PAUSE = 0.1
"""Seconds between two drawings of it."""


@contextlib.contextmanager
def progress_bar(progress: Progress | bool | None) -> Iterator[Progress | None]:
    """The function itself, or one that draws a bar on stderr; None where nothing is to be shown."""
    if progress is not None and not isinstance(progress, bool) and not callable(progress):
        got = type(progress).__name__
        raise UserError(f"progress must be True, False, None or a function, got {got}; leave it out for a bar")
    if callable(progress):
        yield progress
        return
    if progress is False or (progress is None and not _is_watched()):
        yield None
        return
    bar = _Bar(0.0 if progress else DELAY)
    try:
        yield bar.show
    finally:
        bar.close()


class _Bar:
    """A line of text that is drawn over: unlike widgets it needs nothing installed in a notebook."""

    def __init__(self, delay: float) -> None:
        self._begin = self._last = time.time()
        self._delay = delay
        self._line: Any = None

    def show(self, what: str, done: int, total: int) -> None:
        now = time.time()
        if what == "tokens" or now < self._begin + self._delay:
            return
        if self._line is None:
            from tqdm import tqdm  # type: ignore[import-untyped]

            self._line = tqdm(desc=what, leave=False, file=sys.stderr)
            self._line.start_t = self._begin
        new = done == total or self._line.desc != what
        self._line.n, self._line.total, self._line.desc = done, total or None, what
        if new or now > self._last + PAUSE:
            self._last = now
            self._line.refresh()

    def close(self) -> None:
        if self._line is not None:
            self._line.close()


def _is_watched() -> bool:
    """Whether somebody sees stderr: in a terminal or a notebook, not in a pipe or a test."""
    if "PYTEST_CURRENT_TEST" in os.environ:
        return False
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return sys.stderr is not None and (hasattr(shell, "kernel") or sys.stderr.isatty())
