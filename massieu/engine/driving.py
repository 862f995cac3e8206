"""Driver of a fold on a cluster: submit shards, merge the results that come back, notice lost workers."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from massieu.checks import UserError
from massieu.corpus import Readable
from massieu.engine.checkpoints import Ledger
from massieu.engine.fold import Progress, RemoteTask
from massieu.engine.worker_roster import ANSWER, LostCluster, WorkerRoster, ended_workers
from massieu.engine.workers import TOPIC, Failure, Packed, merge_packed, read_shards

if TYPE_CHECKING:
    from distributed import Client, Future

__all__ = ["Drive"]

FAN_IN = 8  # partial results that one merge takes
GROUPS = 2  # groups of tasks under way at once, so that no worker is idle while the last task of a group runs
PULSE = 0.5  # seconds between two looks at the progress of the workers
CANCELLING = 5.0  # seconds for the scheduler to cancel tasks
LONGEST = 2**20  # shards of a stretch
SHORTEST = 5.0  # seconds of work in a stretch, if there is a choice
BETWEEN = 30.0  # seconds of work in a stretch without a checkpoint

# Texts in memory travel with their tasks, about which Dask warns.
QUIETLY = {"distributed.admin.large-graph-warning-threshold": "1TB"}

Stretch = tuple[tuple[int, Readable], ...]


class Drive:
    """Run over the shards of a ledger that are not read yet.

    A task reads a stretch of shards; a group of tasks, one for every worker, is merged on the workers by a tree, and
    the driver takes one partial result of it. Stretches are as long as the time between two checkpoints allows, and
    get shorter toward the end, so that the workers end together.

    Args:
        client: of the cluster.
        remote: the task for the workers.
        ledger: what was read.
        progress: called while the text is read.
    """

    def __init__(self, client: Client, remote: RemoteTask, ledger: Ledger, progress: Progress | None = None) -> None:
        self.client, self.remote, self.ledger, self.progress = client, remote, ledger, progress
        self.run_name = os.urandom(4).hex()
        self._between = BETWEEN if ledger.checkpoint is None else ledger.checkpoint.seconds
        self._waiting = ledger.waiting()
        self._groups: dict[Future[Any], list[Stretch]] = {}
        self._underway: dict[int, tuple[int, int]] = {}  # documents and tokens of shards that are being read
        self._pace = math.inf  # seconds that a shard takes
        self._roster = WorkerRoster(client)

    def run(self) -> None:
        """Read everything.

        Raises:
            LostCluster: the scheduler or all workers are gone.
            UserError: error of a worker about the text or the model.
        """
        import dask

        try:
            with dask.config.set(QUIETLY):
                self._run()
        except LostCluster as lost:
            self.ledger.keep()
            raise LostCluster(f"{lost}; {self.ledger.remedy}") from None
        finally:
            self._end()

    def _run(self) -> None:
        talking = self._roster.talking
        with talking():
            self.client.subscribe_topic(TOPIC, self._receive)
            self._roster.gather()
        while True:
            with talking():
                self._roster.look()
            while len(self._groups) < GROUPS and (group := self._next_group()):
                with talking():
                    self._groups[self._submit(group)] = group
            with talking():
                finished = self._finished()
            if not self._groups:
                return
            for future in finished[:1]:  # the others after new work for the workers of this one
                self._take(future)
            self._report()

    def _next_group(self) -> list[Stretch]:
        group = []
        for _ in range(self._workers):
            stretch = tuple(itertools.islice(self._waiting, self._length()))
            if not stretch:
                break
            group.append(stretch)
        return group

    def _length(self) -> int:
        """Number of shards that the next task reads."""
        longest = max(1, int(min(self._between / self._pace, LONGEST)))
        shards = self.ledger.shards
        if not isinstance(shards, Sequence):
            return longest
        left = len(shards) - len(self.ledger.done) - sum(len(s) for group in self._groups.values() for s in group)
        # Every result is packed, sent and merged whatever the length of its stretch, so stretches are few and alike.
        shortest = max(1, math.ceil(SHORTEST / self._pace))
        rounds = max(1, left // (shortest * self._workers))
        alike = math.ceil(left / (rounds * self._workers)) if self._pace < math.inf else 1
        return min(longest, max(1, alike, left // (2 * self._workers)))

    def _submit(self, group: list[Stretch]) -> Future[Any]:
        """Return one future of the merged result of a group."""
        run, client = self.run_name, self.client
        level = [
            client.submit(read_shards, run, self.remote, stretch, key=f"read-{run}-{stretch[0][0]}", pure=False)
            for stretch in group
        ]
        for height in itertools.count(1):
            if len(level) == 1:
                break
            some = [level[begin : begin + FAN_IN] for begin in range(0, len(level), FAN_IN)]
            name = f"merge-{run}-{group[0][0][0]}-{height}"
            level = [client.submit(merge_packed, each, key=f"{name}-{i}", pure=False) for i, each in enumerate(some)]
        return level[0]

    def _finished(self) -> list[Future[Any]]:
        from distributed import wait

        if not self._groups:
            return []
        try:
            with self.client.as_current():
                return list(wait(list(self._groups), timeout=PULSE, return_when="FIRST_COMPLETED").done)
        except TimeoutError:
            return []

    def _take(self, future: Future[Any]) -> None:
        """Add the result of a group."""
        with self._roster.talking():
            if future.status == "error":
                raise self._failed(future.exception(timeout=ANSWER))
            try:
                found: Packed | Failure = future.result(timeout=ANSWER)
            except TimeoutError:  # its worker was lost meanwhile, and another one works on it
                return
        group = self._groups.pop(future)
        future.release()  # at once: its worker keeps the result until then, and a reference may live on in a cycle
        if isinstance(found, Failure):
            raise _as_said(found)
        numbers = [number for stretch in group for number, _ in stretch]
        self.ledger.add(found.open(), numbers)
        self._pace = found.seconds / len(numbers)
        for number in numbers:
            self._underway.pop(number, None)

    @property
    def _workers(self) -> int:
        return max(1, len(self._roster.workers))

    def _receive(self, event: tuple[float, Any]) -> None:
        run, number, documents, tokens = event[1]
        if run == self.run_name and number not in self.ledger.done:
            self._underway[number] = (documents, tokens)

    def _report(self) -> None:
        if self.progress is not None:
            counts, underway = self.ledger.partial.counts, list(self._underway.values())
            documents = counts.documents + sum(each[0] for each in underway)
            self.progress(documents, counts.tokens + sum(each[1] for each in underway), self.ledger.fraction(documents))

    def _failed(self, error: BaseException) -> Exception:
        """Return the error of a task without a result."""
        from distributed import KilledWorker

        if isinstance(error, KilledWorker):
            what, _, number = str(error.task).split("-")[:3]
            done = f"reading {_name(self.ledger.shards, int(number))}" if what == "read" else "merging"
            return LostCluster(f"{done} {ended_workers(error)} a smaller --batch-size or --max-length needs less")
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        return UserError(
            f"the cluster cannot run massieu ({text});"
            " its scheduler and its workers need the same packages as this process"
        )

    def _end(self) -> None:
        self._roster.close()
        with contextlib.suppress(Exception):  # the scheduler is gone
            self.client.unsubscribe_topic(TOPIC)
            if self._groups:
                self.client.sync(self.client._cancel, list(self._groups), callback_timeout=CANCELLING)
        self._groups.clear()


def _as_said(failure: Failure) -> Exception:
    """Return the error of a worker as if it had been raised here."""
    if failure.kind is not None:
        return failure.kind(failure.sentence)
    return RuntimeError(f"a worker failed, which should not happen:\n{failure.trace}")


def _name(shards: Iterable[Readable], number: int) -> str:
    """Name of a shard in a sentence."""
    shard: Any = shards[number] if isinstance(shards, Sequence) else None
    shard = getattr(shard, "shards", [shard])[0]
    if not getattr(shard, "path", ""):
        return f"shard {number + 1} of the text"
    end = "its end" if shard.stop is None else shard.stop
    return f"{shard.name} from {shard.start} to {end}"
