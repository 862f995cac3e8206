"""Folds over shards: read every shard and merge the partial results, here or on a cluster."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol, Self

from massieu.checks import UserError, check_choice
from massieu.corpus import DocumentCounts, Readable
from massieu.engine.checkpoints import Checkpoint

__all__ = ["ENGINES", "Engine", "Mergeable", "Progress", "RemoteTask", "FoldTask", "engine_named", "fold"]

ENGINES = ("local", "dask")

Progress = Callable[[int, int, float | None], object]
"""Called with the documents and tokens read so far, and the fraction of the text that they are, None if unknown."""


class Mergeable(Protocol):
    """Mergeable result of some shards."""

    @property
    def counts(self) -> DocumentCounts:
        """Documents and tokens read."""

    def merge(self, other: Self) -> None:
        """Add another partial result, which stays as it is."""

    def to_bytes(self) -> bytes:
        """Content of its file."""

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Inverse of :meth:`to_bytes`; runs no code from the data."""


class FoldTask(Protocol):
    """Computation over shards whose partial results merge, such as :class:`massieu.inspection.reader.Reader`."""

    def empty(self) -> Any:
        """Partial result of no shard."""

    def read(self, shard: Readable, *, progress: Callable[[int, int], object] | None = None) -> Any:
        """Partial result of one shard; ``progress`` is called with the documents and tokens read so far."""

    def save(self, path: Path, partial: Any, done: Collection[int], corpus: str) -> object:
        """Write a checkpoint atomically: a partial result, the numbers of its shards, the fingerprint of all shards."""

    def load(self, path: Path, corpus: str, shards: int) -> tuple[Any, set[int]]:
        """Read a checkpoint of this task and these shards; any other file is a :class:`~massieu.checks.UserError`."""

    def remote(self) -> RemoteTask:
        """Description of this task that can be sent to another process."""


class RemoteTask(Protocol):
    """Description of a task that travels to other processes, where it is opened."""

    def open(self, place: str) -> FoldTask:
        """The task in this process, which errors call ``place``; opening it again is cheap."""


class Engine(Protocol):
    """Runs a task over shards and merges the partial results."""

    def fold(
        self,
        task: FoldTask,
        shards: Iterable[Readable],
        *,
        checkpoint: Checkpoint | None = None,
        progress: Progress | None = None,
    ) -> Any:
        """Partial result of all shards.

        Args:
            task: reads a shard.
            shards: ranges of a text; with a checkpoint a sequence.
            checkpoint: file that says how far the fold has come; None for no file.
            progress: called while the text is read.
        """

    def map(
        self, function: Callable[[Any], Any], given: Iterable[Any], /, *, lost: Callable[[Any], Any] | None = None
    ) -> Iterator[Any]:
        """Values of a function, in the order given.

        Args:
            function: computes one value.
            given: its arguments.
            lost: value in the place of one whose computation ends every process that takes it; None raises.
        """

    def close(self) -> None:
        """Release what the engine has started, such as worker processes."""


def fold(
    task: FoldTask,
    shards: Iterable[Readable],
    *,
    engine: Engine | str | None = None,
    checkpoint: Checkpoint | None = None,
    progress: Progress | None = None,
) -> Any:
    """Partial result of all shards, on an engine that the caller owns, or on one by name that is closed at the end."""
    chosen = engine_named(engine or "local") if engine is None or isinstance(engine, str) else engine
    if not callable(getattr(chosen, "fold", None)):
        raise UserError(f"engine must be local, dask or an engine, got {type(engine).__name__}; pass Dask(...)")
    try:
        return chosen.fold(task, shards, checkpoint=checkpoint, progress=progress)
    finally:
        if chosen is not engine:
            chosen.close()


def engine_named(name: str, **options: Any) -> Engine:
    """Return an engine by its name, one of :data:`ENGINES`.

    Args:
        name: "local" or "dask".
        **options: of :class:`~massieu.engine.Dask`.

    Example:
        >>> type(engine_named("local")).__name__
        'Local'
    """
    check_choice(name, "engine", ENGINES)
    if name == "dask":
        from massieu.engine.cluster import Dask

        return Dask(**options)
    if given := sorted(option for option, value in options.items() if value is not None):
        raise UserError(f"{', '.join(given)} is for the engine dask, got the engine local; leave it out")
    from massieu.engine.local import Local

    return Local()
