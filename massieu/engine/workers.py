"""Tasks of the workers of a cluster: read shards, and merge partial results of other workers.

Both are pure. An error inside travels as a value, so that the user reads the sentence that it carried there.
"""

from __future__ import annotations

import contextlib
import ctypes
import pickle
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from massieu.checks import UserError
from massieu.corpus import Readable
from massieu.engine.fold import Mergeable, RemoteTask

__all__ = ["Failure", "Packed", "TOPIC", "merge_packed", "read_shards"]

TOPIC = "massieu"
"""Topic of the messages in which workers report their progress to the driver."""

BETWEEN = 1.0  # seconds between two such messages

_alone = threading.Lock()


@dataclass(frozen=True)
class Failure:
    """Error on a worker.

    Attributes:
        kind: class of an error for the user; None for any other, which is a defect.
        sentence: its message.
        trace: its traceback.
    """

    kind: type[UserError] | None
    sentence: str
    trace: str


@dataclass(frozen=True)
class Packed:
    """Partial result on its way between processes: the bytes of a file, so that opening it runs no code.

    Attributes:
        kind: class of the partial result.
        data: the file.
        seconds: time that reading took.
    """

    kind: type[Mergeable]
    data: bytes | memoryview
    seconds: float

    @classmethod
    def of(cls, partial: Mergeable, seconds: float) -> Packed:
        """Pack a partial result."""
        return cls(type(partial), partial.to_bytes(), seconds)

    def open(self) -> Mergeable:
        """Unpack the partial result."""
        return self.kind.from_bytes(bytes(self.data))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Put the data beside the pickle, where Dask sends it without copies."""
        data = pickle.PickleBuffer(self.data) if protocol >= 5 else bytes(self.data)
        return Packed, (self.kind, data, self.seconds)

    def __sizeof__(self) -> int:  # the scheduler moves what is small
        return len(self.data)


def read_shards(run: str, remote: RemoteTask, stretch: Sequence[tuple[int, Readable]]) -> Packed | Failure:
    """Read shards one after the other and merge their partial results.

    Args:
        run: name of the run, for messages to its driver.
        remote: the task.
        stretch: shards with their numbers.
    """
    try:
        # One thread at a time taps attention; a worker of several threads gives all of them to the model.
        with _alone:
            begin = time.perf_counter()
            if (worker := _worker()) is not None:
                torch.set_num_threads(worker.state.nthreads)
            task = remote.open(worker.address if worker else "here")
            merged = task.empty()
            for number, shard in stretch:
                merged.merge(task.read(shard, progress=_reporter(run, number)))
        return Packed.of(merged, time.perf_counter() - begin)
    except Exception as error:
        kind = type(error) if isinstance(error, UserError) else None
        return Failure(kind, str(error), traceback.format_exc())
    finally:
        _release_memory()


def merge_packed(results: Sequence[Packed | Failure]) -> Packed | Failure:
    """Merge partial results into one; the first failure among them is the result if there is one."""
    good = []
    for result in results:
        if isinstance(result, Failure):
            return result
        good.append(result)
    try:
        merged = good[0].open()
        for result in good[1:]:
            merged.merge(result.open())
        return Packed.of(merged, sum(result.seconds for result in good))
    finally:
        _release_memory()


def _release_memory() -> None:
    """Return the memory of a task to the system at its end, so that leftovers of many tasks do not pile up."""
    with contextlib.suppress(OSError, AttributeError):  # another system, which has its own way
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _reporter(run: str, number: int) -> Callable[[int, int], None]:
    """Return a function that reports the progress of a shard to the driver now and then."""
    worker, last = _worker(), [time.monotonic()]

    def report(documents: int, tokens: int) -> None:
        if worker is not None and time.monotonic() - last[0] >= BETWEEN:
            last[0] = time.monotonic()
            worker.log_event(TOPIC, [run, number, documents, tokens])

    return report


def _worker() -> Any | None:
    """The Dask worker that runs this; None outside of one."""
    from distributed import get_worker

    try:
        return get_worker()
    except ValueError:
        return None
