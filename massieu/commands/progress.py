"""How far a command is, on stderr."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

__all__ = ["progress_shown"]

TOKENS = "tokens"  # what they are called by who counts them beside what is being done
PATIENCE = 10.0  # seconds between two lines on how far we are


@contextlib.contextmanager
def progress_shown(quiet: bool, first: str = "loading") -> Iterator[Callable[[str, int, int], object] | None]:
    """A bar on stderr with the time that is left where somebody can see it, else a line for everything that begins."""
    if quiet:
        yield None
        return
    rate = _Rate()
    if not sys.stderr.isatty():
        begun, said = {first}, [time.perf_counter()]
        print(f"{first} ...", file=sys.stderr, flush=True)

        def tell(what: str, done: int, total: int) -> None:
            if what == TOKENS:
                rate.add(done)
            elif what not in begun:
                begun.add(what)
                print(f"{what} ...", file=sys.stderr, flush=True)
            elif time.perf_counter() - said[-1] > PATIENCE:
                said.append(time.perf_counter())
                far = f"{what}: {done} of {total}" if total else what
                print(f"{far}{rate} ...", file=sys.stderr, flush=True)

        yield tell
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(first, total=None)

        def show(what: str, done: int, total: int) -> None:
            if what == TOKENS:
                rate.add(done)
            else:
                bar.update(task, description=f"{what}{rate}", completed=done, total=total or None)

        yield show


class _Rate:
    """Tokens per second since the first were counted, in words."""

    def __init__(self) -> None:
        self._first: tuple[float, int] | None = None
        self._last = (0.0, 0)

    def add(self, tokens: int) -> None:
        self._last = (time.perf_counter(), tokens)
        self._first = self._first or self._last

    def __str__(self) -> str:
        if self._first is None or self._last[0] == self._first[0]:
            return ""
        seconds, tokens = (new - old for new, old in zip(self._last, self._first, strict=True))
        return f", {tokens / seconds:,.0f} tokens/s"
