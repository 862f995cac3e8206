"""How far a command is, on stderr."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

__all__ = ["progress_shown"]

PATIENCE = 10.0  # seconds between two lines on how far we are


@contextlib.contextmanager
def progress_shown(quiet: bool, first: str = "loading") -> Iterator[Callable[[str, int, int], object] | None]:
    """A bar on stderr with the time that is left where somebody can see it, else a line for everything that begins."""
    if quiet:
        yield None
        return
    if not sys.stderr.isatty():
        begun, said = {first}, [time.perf_counter()]
        print(f"{first} ...", file=sys.stderr, flush=True)

        def tell(what: str, done: int, total: int) -> None:
            if what not in begun:
                begun.add(what)
                print(f"{what} ...", file=sys.stderr, flush=True)
            elif time.perf_counter() - said[-1] > PATIENCE:
                said.append(time.perf_counter())
                print(f"{what}: {done} of {total} ..." if total else f"{what} ...", file=sys.stderr, flush=True)

        yield tell
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(first, total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total or None)
