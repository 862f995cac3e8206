"""Progress on stderr: a bar of the library for notebooks and terminals, and the progress of a command."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from massieu.checks import UserError

__all__ = ["Progress", "command_progress", "progress_bar"]

Progress = Callable[[str, int, int], object]
"""Called with the name of the task, the amount done, and the total (0 if unknown)."""

DELAY = 2.0  # seconds until a bar appears that was not requested
PAUSE = 0.1  # seconds between two drawings of it
TOKENS = "tokens"  # task of a second count, reported beside the task in progress
COUNTED = {"reading": "documents", TOKENS: TOKENS}  # tasks with a rate, and its unit
LINE_PAUSE = 10.0  # seconds between two lines where there is no terminal


@contextlib.contextmanager
def progress_bar(progress: Progress | bool | None) -> Iterator[Progress | None]:
    """Yield the given function, or one that draws a bar on stderr; None if there is nothing to show."""
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

    def show(self, task: str, done: int, total: int) -> None:
        now = time.time()
        if task == TOKENS or now < self._begin + self._delay:
            return
        if self._line is None:
            from tqdm import tqdm  # type: ignore[import-untyped]

            self._line = tqdm(desc=task, leave=False, file=sys.stderr)
            self._line.start_t = self._begin
        new = done == total or self._line.desc != task
        self._line.n, self._line.total, self._line.desc = done, total or None, task
        if new or now > self._last + PAUSE:
            self._last = now
            self._line.refresh()

    def close(self) -> None:
        if self._line is not None:
            self._line.close()


def _is_watched() -> bool:
    """Return True in a terminal or a notebook, False in a pipe or a test."""
    if "PYTEST_CURRENT_TEST" in os.environ:
        return False
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return sys.stderr is not None and (hasattr(shell, "kernel") or sys.stderr.isatty())


@contextlib.contextmanager
def command_progress(quiet: bool, first: str = "loading") -> Iterator[Progress | None]:
    """Yield a function that draws a bar with the remaining time, or prints lines where stderr is no terminal."""
    if quiet:
        yield None
    elif sys.stderr.isatty():
        with _terminal_bar(first) as show:
            yield show
    else:
        yield _lines(first)


@contextlib.contextmanager
def _terminal_bar(first: str) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with RichProgress(*columns, console=Console(stderr=True), transient=True) as bar:
        rates, row = _Rates(), bar.add_task(first, total=None)

        def show(task: str, done: int, total: int) -> None:
            rate = rates.update(task, done)
            if task != TOKENS:
                bar.update(row, description=f"{task}{rate}", completed=done, total=total or None)

        yield show


def _lines(first: str) -> Progress:
    """Return a function that prints a line for every new task and, at times, one on its progress."""
    rates, begun, printed = _Rates(), {first}, time.perf_counter()
    print(f"{first} ...", file=sys.stderr, flush=True)

    def show(task: str, done: int, total: int) -> None:
        nonlocal printed
        rate = rates.update(task, done)
        if task == TOKENS:
            return
        if task not in begun:
            begun.add(task)
            print(f"{task} ...", file=sys.stderr, flush=True)
        elif time.perf_counter() - printed > LINE_PAUSE:
            printed = time.perf_counter()
            amount = f"{task}: {done:,} of {total:,}" if total else task
            print(f"{amount}{rate}{rates.remaining(task, total)} ...", file=sys.stderr, flush=True)

    return show


class _Rates:
    """Rates of the tasks since their first report."""

    def __init__(self) -> None:
        self._first: dict[str, tuple[float, int]] = {}
        self._last: dict[str, tuple[float, int]] = {}

    def update(self, task: str, done: int) -> str:
        """Take a report of a task, and return the rates in words."""
        self._last[task] = now = (time.perf_counter(), done)
        self._first.setdefault(task, now)
        rates = {unit: self._rate(name) for name, unit in COUNTED.items() if name in self._first and task in COUNTED}
        return "".join(f", {rate:,.{int(rate < 10)}f} {unit}/s" for unit, rate in rates.items() if rate)

    def _rate(self, task: str) -> float:
        """Return the rate per second; zero if unknown."""
        seconds, done = (new - old for new, old in zip(self._last[task], self._first[task], strict=True))
        return done / seconds if done > 0 and seconds > 0 else 0.0

    def remaining(self, task: str, total: int) -> str:
        """Return the remaining time in words; empty if unknown."""
        rate, done = self._rate(task), self._last[task][1]
        if not rate or done < min(50, total / 20) or not total:
            return ""  # too few steps for an estimate
        minutes, seconds = divmod(round(max(0, total - done) / rate), 60)
        hours, minutes = divmod(minutes, 60)
        return f", {hours}:{minutes:02}:{seconds:02} left"
