"""Roster of the workers of a cluster that can run this library."""

from __future__ import annotations

import asyncio
import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Any

from massieu.checks import UserError

if TYPE_CHECKING:
    from distributed import Client, KilledWorker

__all__ = ["WorkerRoster", "LostCluster", "ended_workers"]

ROUND = 5.0  # seconds between two looks at the workers
GLANCE = 0.2  # the same while answers are expected
ANSWER = 30.0  # seconds for an answer of the scheduler
ABSENCE = 60.0  # seconds without any worker
LOADING = 300.0  # seconds for the first worker to load the library; many may read it from one disk


class LostCluster(UserError):  # noqa: N818  # a state of the cluster
    """The scheduler or all of its workers are gone, or a task ends every worker that takes it."""

    exit_code = 4


class WorkerRoster:
    """The workers of a cluster.

    Attributes:
        client: the connection to its scheduler.
        workers: addresses of those that were present at the last look and have answered that they can run this library.
        silent: addresses of those that have not answered yet. One may still be loading the library; if it hangs,
            the scheduler gives its tasks to others after its ``worker-ttl``.
    """

    def __init__(self, client: Client) -> None:
        self.client, self.workers, self.silent = client, frozenset[str](), frozenset[str]()
        self._answers: dict[str, Future[Any]] = {}
        self._looked, self._seen, self._answered = -math.inf, time.monotonic(), time.monotonic()

    @property
    def address(self) -> str:
        """Address of the scheduler."""
        return str(getattr(self.client.scheduler, "address", "an unknown address"))

    def gather(self) -> None:
        """Wait for a worker, and a little longer for those that have not answered; raises as :meth:`look`."""
        end = math.inf
        while not self.workers or (self.silent and time.monotonic() < end):
            self.look()
            if self.workers:
                end = min(end, time.monotonic() + ROUND)
            if self.silent or not self.workers:
                time.sleep(GLANCE)

    def look(self) -> None:
        """Update the roster if the last look was some time ago.

        Raises:
            LostCluster: no worker was present for too long.
            ValueError: a worker cannot run this library.
        """
        now = time.monotonic()
        if now - self._looked < (GLANCE if self.silent or not self.workers else ROUND):
            return
        self._looked = now
        scheduler: Any = self.client.scheduler
        found = frozenset(self.client.sync(scheduler.ncores, callback_timeout=ANSWER))
        if found:
            self._seen = now
        elif now - self._seen > ABSENCE:
            raise LostCluster(f"all workers of the scheduler at {self.address} have been gone for {ABSENCE:.0f} s")
        self._ask(found)
        self.workers = frozenset(worker for worker in found if self._has_answered(worker))
        self.silent = found - self.workers
        if self.workers:
            self._answered = now
        elif found and now - self._answered > LOADING:
            raise LostCluster(f"no worker of the scheduler at {self.address} has answered for {LOADING:.0f} s")

    def close(self) -> None:
        """Cancel outstanding questions."""
        for answer in self._answers.values():
            answer.cancel()
        self._answers.clear()

    @contextlib.contextmanager
    def talking(self) -> Iterator[None]:
        """Context in which a lost connection is an error for the user."""
        from distributed.client import ClosedClientError

        try:
            yield
        except (CancelledError, ClosedClientError, OSError):  # an answer that does not come is an OSError too
            raise LostCluster(f"the scheduler at {self.address} is lost") from None

    def _ask(self, found: frozenset[str]) -> None:
        """Ask every new worker for its version before its first task: one that cannot open a task would end."""
        for worker in [worker for worker in self._answers if worker not in found]:
            self._answers.pop(worker).cancel()
        loop: Any = self.client.loop
        for worker in sorted(found - self._answers.keys()):
            asking: Any = self.client._run(_question(), workers=[worker], on_error="return")
            self._answers[worker] = asyncio.run_coroutine_threadsafe(asking, loop.asyncio_loop)

    def _has_answered(self, worker: str) -> bool:
        answer = self._answers[worker]
        if not answer.done():
            return False
        said = None if answer.cancelled() or answer.exception() else answer.result().get(worker)
        if not isinstance(said, str):  # lost meanwhile; it is asked again if it is still there
            del self._answers[worker]
            return False
        own = sys.modules["massieu"].__version__
        if said != own:
            raise UserError(
                f"the worker {worker} must have massieu {own} as this process has, got {said};"
                " give scheduler, workers and this process the same packages"
            )
        return True


def ended_workers(error: KilledWorker) -> str:
    """Part of a sentence on the workers that a task has ended."""
    count, last = error.allowed_failures + 1, error.last_worker.address
    return f"has ended {count} worker{'s' if count > 1 else ''}, the last at {last}; is memory short?"


def _question() -> Callable[[], str]:
    """Return a function that gives the version of this library; it is local, so that it travels by value."""

    def version() -> str:
        import importlib
        import sys

        try:
            importlib.import_module("massieu.engine.workers")  # what tasks are made of
        except Exception as error:
            return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        return str(sys.modules["massieu"].__version__)

    return version
