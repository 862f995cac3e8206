"""The driver's side of a run on a cluster: hand out pieces of the text, take what comes back, notice what is lost."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from massieu.checks import UserError
from massieu.corpus.shards import Shard, ShardGroup
from massieu.engine.checkpoints import Ledger
from massieu.engine.engines import Progress
from massieu.engine.worker_roster import ANSWER, Attendance, LostCluster, ended_workers
from massieu.engine.workers import TOPIC, Failure, Parcel, Recipe, merge_parcels, read_stretch

if TYPE_CHECKING:
    from distributed import Client, Future

__all__ = ["Drive"]

FAN_IN = 8  # parts that one merge takes
GROUPS = 2  # that are on their way at once, so that nobody waits for the last of one
PULSE = 0.5  # seconds between two looks at how far the workers are
CANCELLING = 5.0  # seconds for the scheduler to hear that nobody waits any more
LONGEST = 2**20  # pieces of a stretch
SHORTEST = 5.0  # seconds of work in a stretch, if there is a choice
BETWEEN = 30.0  # seconds of work in a stretch, if no checkpoint says

# Texts in memory travel with their tasks, about which Dask warns.
QUIETLY = {"distributed.admin.large-graph-warning-threshold": "1TB"}

Stretch = tuple[tuple[int, Shard | ShardGroup], ...]


class Drive:
    """A run over the pieces of a ledger that are not read yet.

    A task reads a stretch of pieces; a group of tasks, one for every worker, is merged on the workers by a tree, and
    the driver takes one part of it. Stretches are as long as the time between two checkpoints allows, and get shorter
    toward the end, so that the workers end together.

    Args:
        client: of the cluster.
        recipe: what the workers must know.
        ledger: what was read.
        progress: called while the text is read.
    """

    def __init__(self, client: Client, recipe: Recipe, ledger: Ledger, progress: Progress | None = None) -> None:
        self.client, self.recipe, self.ledger, self.progress = client, recipe, ledger, progress
        self._between = BETWEEN if ledger.checkpoint is None else ledger.checkpoint.seconds
        self._waiting = ledger.waiting()
        self._groups: dict[Future[Any], list[Stretch]] = {}
        self._underway: dict[int, tuple[int, int]] = {}  # documents and tokens of pieces that are being read
        self._pace = math.inf  # seconds that a piece takes
        self._attendance = Attendance(client)

    def run(self) -> None:
        """Read everything.

        Raises:
            LostCluster: nothing more can be expected from the cluster.
            UserError: what a worker has said about the text or the model.
            NotObservable: likewise.
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
        talking = self._attendance.talking
        with talking():
            self.client.subscribe_topic(TOPIC, self._heard)
            self._attendance.gather()
        while True:
            with talking():
                self._attendance.look()
            while len(self._groups) < GROUPS and (group := self._next_group()):
                with talking():
                    self._groups[self._submit(group)] = group
            with talking():
                finished = self._finished()
            if not self._groups:
                return
            for future in finished[:1]:  # the others when there is new work for those who gave this
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
        """How many pieces the next task reads."""
        longest = max(1, int(min(self._between / self._pace, LONGEST)))
        splits = self.ledger.splits
        if not isinstance(splits, Sequence):
            return longest
        left = len(splits) - len(self.ledger.done) - sum(len(s) for group in self._groups.values() for s in group)
        # What a stretch gives is packed, sent and merged whatever its length, so there should be few; and all alike.
        shortest = max(1, math.ceil(SHORTEST / self._pace))
        rounds = max(1, left // (shortest * self._workers))
        alike = math.ceil(left / (rounds * self._workers)) if self._pace < math.inf else 1
        return min(longest, max(1, alike, left // (2 * self._workers)))

    def _submit(self, group: list[Stretch]) -> Future[Any]:
        """One future of what a group gives, merged by a tree."""
        run, client = self.recipe.run, self.client
        level = [
            client.submit(read_stretch, self.recipe, stretch, key=f"read-{run}-{stretch[0][0]}", pure=False)
            for stretch in group
        ]
        for height in itertools.count(1):
            if len(level) == 1:
                break
            some = [level[begin : begin + FAN_IN] for begin in range(0, len(level), FAN_IN)]
            name = f"merge-{run}-{group[0][0][0]}-{height}"
            level = [client.submit(merge_parcels, each, key=f"{name}-{i}", pure=False) for i, each in enumerate(some)]
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
        """Add what a group gave."""
        with self._attendance.talking():
            if future.status == "error":
                raise self._failed(future.exception(timeout=ANSWER))
            try:
                found: Parcel | Failure = future.result(timeout=ANSWER)
            except TimeoutError:  # its worker was lost meanwhile, and another one works on it
                return
        group = self._groups.pop(future)
        future.release()  # at once: whoever holds what it gave waits for that, and a reference may live on in a cycle
        if isinstance(found, Failure):
            raise _as_said(found)
        numbers = [number for stretch in group for number, _ in stretch]
        self.ledger.add(found.open(), numbers)
        self._pace = found.seconds / len(numbers)
        for number in numbers:
            self._underway.pop(number, None)

    @property
    def _workers(self) -> int:
        return max(1, len(self._attendance.workers))

    def _heard(self, event: tuple[float, Any]) -> None:
        run, number, documents, tokens = event[1]
        if run == self.recipe.run and number not in self.ledger.done:
            self._underway[number] = (documents, tokens)

    def _report(self) -> None:
        if self.progress is not None:
            counts, underway = self.ledger.part.counts, list(self._underway.values())
            documents = counts.documents + sum(each[0] for each in underway)
            self.progress(documents, counts.tokens + sum(each[1] for each in underway), self.ledger.share(documents))

    def _failed(self, error: BaseException) -> Exception:
        """What to say of a task that has no result."""
        from distributed import KilledWorker

        if isinstance(error, KilledWorker):
            what, _, number = str(error.task).split("-")[:3]
            done = f"reading {_name(self.ledger.splits, int(number))}" if what == "read" else "merging"
            return LostCluster(f"{done} {ended_workers(error)} a smaller --batch-size or --max-length needs less")
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        return UserError(
            f"the cluster cannot run massieu ({text});"
            " its scheduler and its workers need the same packages as this process"
        )

    def _end(self) -> None:
        self._attendance.close()
        with contextlib.suppress(Exception):  # nobody is there any more
            self.client.unsubscribe_topic(TOPIC)
            if self._groups:
                self.client.sync(self.client._cancel, list(self._groups), callback_timeout=CANCELLING)
        self._groups.clear()


def _as_said(failure: Failure) -> Exception:
    """The error of a worker, as if it had been raised here."""
    if failure.kind is not None:
        return failure.kind(failure.sentence)
    return RuntimeError(f"a worker failed, which should not happen:\n{failure.trace}")


def _name(splits: Iterable[Shard | ShardGroup], number: int) -> str:
    """What to call a piece in a sentence."""
    split: Any = splits[number] if isinstance(splits, Sequence) else None
    split = getattr(split, "shards", [split])[0]
    if not hasattr(split, "path"):
        return f"piece {number + 1} of the text"
    end = "its end" if split.stop is None else split.stop
    return f"{split.name} from {split.start} to {end}"
