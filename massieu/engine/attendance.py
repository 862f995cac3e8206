"""Who is there: workers of a cluster that can run this library, and what to say when nobody is."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distributed import Client, KilledWorker

__all__ = ["Attendance", "LostCluster", "ended_workers"]

ROUND = 5.0  # seconds between two looks at who is there
ANSWER = 30.0  # seconds for an answer of the scheduler
ABSENCE = 60.0  # seconds without any worker
LOADING = 60.0  # seconds for a worker to load the library


class LostCluster(ValueError):  # noqa: N818  # a state of the cluster
    """The scheduler or all of its workers are gone, or a task ends every worker that takes it."""


class Attendance:
    """The workers of a cluster.

    Attributes:
        client: the connection to its scheduler.
        workers: addresses of those that were there at the last look, all of which can run this library.
    """

    def __init__(self, client: Client) -> None:
        self.client, self.workers = client, frozenset[str]()
        self._looked, self._seen = -math.inf, time.monotonic()

    @property
    def address(self) -> str:
        """Of the scheduler."""
        return str(getattr(self.client.scheduler, "address", "an unknown address"))

    def look(self) -> None:
        """See who is there, if the last look was some time ago.

        Raises:
            LostCluster: there has been no worker for too long.
            ValueError: a worker cannot run this library.
        """
        now = time.monotonic()
        if now - self._looked < ROUND:
            return
        self._looked = now
        scheduler: Any = self.client.scheduler
        found = frozenset(self.client.sync(scheduler.ncores, callback_timeout=ANSWER))
        if found:
            self._seen = now
        elif now - self._seen > ABSENCE:
            raise LostCluster(f"all workers of the scheduler at {self.address} have been gone for {ABSENCE:.0f} s")
        self._ask(sorted(found - self.workers))
        self.workers = found

    @contextlib.contextmanager
    def talking(self) -> Iterator[None]:
        """Inside, a connection that is lost is one sentence."""
        from distributed.client import ClosedClientError

        try:
            yield
        except (CancelledError, ClosedClientError, OSError):  # an answer that does not come is an OSError too
            raise LostCluster(f"the scheduler at {self.address} is lost") from None

    def _ask(self, new: Sequence[str]) -> None:
        """A worker that cannot open a task ends itself, so everyone is asked before the first."""
        if not new:
            return
        run: Any = self.client._run
        answers = self.client.sync(run, _question(), workers=new, on_error="return", callback_timeout=LOADING)
        own = sys.modules["massieu"].__version__
        for worker, answer in answers.items():
            if isinstance(answer, str) and answer != own:
                raise ValueError(
                    f"the worker {worker} must have massieu {own} as this process has, got {answer};"
                    " give scheduler, workers and this process the same packages"
                )


def ended_workers(error: KilledWorker) -> str:
    """What became of the workers that took a task, as a part of a sentence."""
    count, last = error.allowed_failures + 1, error.last_worker.address
    return f"has ended {count} worker{'s' if count > 1 else ''}, the last at {last}; is memory short?"


def _question() -> Callable[[], str]:
    """Which version of this library a worker has; inside, so that it travels by value."""

    def version() -> str:
        import importlib
        import sys

        try:
            importlib.import_module("massieu.engine.workers")  # what tasks are made of
        except Exception as error:
            return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        return str(sys.modules["massieu"].__version__)

    return version
