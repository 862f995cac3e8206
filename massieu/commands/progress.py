"""How far a command is, on stderr."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

__all__ = ["progress_shown"]

TOKENS = "tokens"  # what they are called by who counts them beside what is being done
COUNTED = {"reading": "documents", TOKENS: TOKENS}  # of what the pace is worth telling
PATIENCE = 10.0  # seconds between two lines on how far we are


@contextlib.contextmanager
def progress_shown(quiet: bool, first: str = "loading") -> Iterator[Callable[[str, int, int], object] | None]:
    """A bar on stderr with the time that is left where somebody can see it, else a line for everything that begins."""
    if quiet:
        yield None
        return
    paces: dict[str, _Pace] = {}

    def told(what: str, done: int) -> str:
        """How fast it goes, in words."""
        paces.setdefault(what, _Pace(done)).add(done)
        rates = {unit: paces[name].rate for name, unit in COUNTED.items() if name in paces and what in COUNTED}
        return "".join(f", {rate:,.{int(rate < 10)}f} {unit}/s" for unit, rate in rates.items() if rate)

    if not sys.stderr.isatty():
        begun, said = {first}, [time.perf_counter()]
        print(f"{first} ...", file=sys.stderr, flush=True)

        def tell(what: str, done: int, total: int) -> None:
            fast = told(what, done)
            if what == TOKENS:
                return
            if what not in begun:
                begun.add(what)
                print(f"{what} ...", file=sys.stderr, flush=True)
            elif time.perf_counter() - said[-1] > PATIENCE:
                said.append(time.perf_counter())
                far = f"{what}: {done:,} of {total:,}" if total else what
                print(f"{far}{fast}{paces[what].left(total)} ...", file=sys.stderr, flush=True)

        yield tell
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(first, total=None)

        def show(what: str, done: int, total: int) -> None:
            fast = told(what, done)
            if what != TOKENS:
                bar.update(task, description=f"{what}{fast}", completed=done, total=total or None)

        yield show


class _Pace:
    """How fast something is done, since it was first heard of."""

    def __init__(self, done: int) -> None:
        self._first = self._last = (time.perf_counter(), done)

    def add(self, done: int) -> None:
        self._last = (time.perf_counter(), done)

    @property
    def rate(self) -> float:
        """For each second; zero if nobody knows yet."""
        seconds, done = (new - old for new, old in zip(self._last, self._first, strict=True))
        return done / seconds if done > 0 and seconds > 0 else 0.0

    def left(self, total: int) -> str:
        """The time until all is done, in words; empty if nobody knows."""
        if not self.rate or self._last[1] < min(50, total / 20) or not total:
            return ""  # of few steps, which may differ, nobody can tell
        minutes, seconds = divmod(round(max(0, total - self._last[1]) / self.rate), 60)
        hours, minutes = divmod(minutes, 60)
        return f", {hours}:{minutes:02}:{seconds:02} left"
