"""Checkpoints of a fold: its partial result so far, with the numbers of the shards in it, in one file."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from massieu.checks import UserError, check_number
from massieu.corpus import Readable
from massieu.corpus.passages import TooLong

if TYPE_CHECKING:
    from massieu.engine.fold import FoldTask, Mergeable

__all__ = ["Checkpoint", "CheckpointWarning", "Ledger", "draft_of"]

Stamp = tuple[int, int, int]
MOST_SHARDS = 1 << 31


def draft_of(path: Path) -> Path:
    """Path of a file while it is written; a kill leaves at most this file, which the next write replaces."""
    return path.with_name(f".{path.name}.part")


class CheckpointWarning(UserWarning):
    """A checkpoint could not be written; the run goes on without it."""


class NotWritten(UserError):  # noqa: N818  # a state of the disk
    """The file of a checkpoint cannot be written, such as on a full disk."""


@dataclass
class Checkpoint:
    """File that says how far a run has come.

    Attributes:
        path: the file; its folder is made when there is something to write.
        resume: go on from the file if it is there; no file of another run is written over or removed.
        seconds: between two times that it is written.
    """

    path: Path
    resume: bool = False
    seconds: float = 30.0
    _own: Stamp | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_number(self.seconds, "seconds", least=0, remedy="30 seconds between checkpoints are usual")
        if self.path.is_dir():
            raise UserError(f"a checkpoint must be a file, got the folder {self.path}; name a file in it")
        above = next(folder for folder in self.path.absolute().parents if folder.exists())
        if not above.is_dir() or not os.access(above, os.W_OK):
            raise UserError(f"the checkpoint {self.path} cannot be written below {above}; name a file elsewhere")

    @property
    def remedy(self) -> str:
        """End of a sentence on going on after an interruption; empty if there is no file."""
        before = self.resume and self._own is None and self.path.exists()  # it has not been opened yet
        if not before and not self._is_own:
            return ""
        return f"what was read is in {self.path}; the same command with --resume goes on from it"

    @contextlib.contextmanager
    def mentioned(self) -> Iterator[None]:
        """Context in which an interrupt mentions the file, if there is one."""
        try:
            yield
        except KeyboardInterrupt as interrupt:
            interrupt.args = interrupt.args or ((self.remedy,) if self.remedy else ())
            raise

    def load(self, task: FoldTask, corpus: str, shards: int) -> tuple[Any, set[int]]:
        """Partial result and numbers of the shards in the file, which belongs to this run from now on."""
        own = _stamp(self.path)
        found = task.load(self.path, corpus, shards)
        self._own = own
        return found

    def save(self, task: FoldTask, partial: Mergeable, done: Collection[int], corpus: str) -> None:
        """Write the file; an error if it cannot be written, or if another run has written it."""
        from safetensors import SafetensorError

        if self.path.exists() and not self._is_own:
            raise UserError(
                f"the checkpoint {self.path} was written by another run meanwhile;"
                " give each run a file of its own with --checkpoint"
            )
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            task.save(self.path, partial, done, corpus)
            self._own = _stamp(self.path)
        except (OSError, SafetensorError) as error:
            text = f"the checkpoint {self.path} cannot be written ({' '.join(str(error).split())})"
            raise NotWritten(f"{text}; make room there, or name a file elsewhere with --checkpoint") from None

    def remove(self) -> None:
        """Remove the file if this run wrote it: a finished run needs none."""
        if self._is_own:
            self.path.unlink(missing_ok=True)
            draft_of(self.path).unlink(missing_ok=True)

    @property
    def _is_own(self) -> bool:
        """True if the file exists as this run left it."""
        return self._own is not None and self._own == _stamp(self.path)


class Ledger:
    """Partial result of the shards read so far, with their numbers; each counts once.

    Args:
        task: reads a shard.
        shards: all shards of the text; with a checkpoint a sequence, whose order gives them numbers.
        checkpoint: file to write; None for none.
    """

    def __init__(self, task: FoldTask, shards: Iterable[Readable], checkpoint: Checkpoint | None = None) -> None:
        self.task, self.shards, self.checkpoint = task, shards, checkpoint
        self.partial, self.done = task.empty(), set[int]()
        self._saved, self._last = 0, time.monotonic()  # shards in the file, and the time it was written
        self._whole = True  # the partial result is that of the shards in done
        self._warned = False
        if checkpoint is None:
            return
        if not isinstance(shards, Sequence):
            raise UserError(
                "a checkpoint needs a text that can be read again, got one that comes one by one;"
                " pass a list of strings or a Corpus"
            )
        self._corpus = _fingerprint(shards)
        if not checkpoint.path.exists():
            return
        if checkpoint.resume:
            self.partial, self.done = checkpoint.load(task, self._corpus, len(shards))
            self._saved = len(self.done)
        elif self._is_ours(checkpoint.path):
            raise UserError(
                f"{checkpoint.path} says how far an unfinished run of the same has come;"
                " go on from it with --resume, or remove it to begin again"
            )
        else:
            raise UserError(
                f"{checkpoint.path} must not be there yet, got a file that is no checkpoint of this run;"
                " remove it, or name another file with --checkpoint"
            )

    def fraction(self, documents: int) -> float | None:
        """Estimated fraction of the text that these documents are; None if unknown."""
        if not isinstance(self.shards, Sequence) or not self.partial.counts.documents:
            return None
        expected = self.partial.counts.documents / len(self.done) * len(self.shards)
        return float(min(1.0, documents / expected))

    @property
    def remedy(self) -> str:
        """End of a sentence on going on after the run was broken off."""
        if self.checkpoint is None:
            return "nothing was kept; next time --out DIR or --checkpoint FILE keeps what was read"
        return self.checkpoint.remedy if self._saved else "nothing was written"

    def waiting(self) -> Iterator[tuple[int, Readable]]:
        """Shards that are unread at the time of the call, with their numbers."""
        before = set(self.done)
        return ((number, shard) for number, shard in enumerate(self.shards) if number not in before)

    def add(self, partial: Mergeable, numbers: Iterable[int]) -> None:
        """Merge the partial result of some shards, and write the file if it is time."""
        self._whole = False  # an interrupt may come in between
        self.partial.merge(partial)
        self.done.update(numbers)
        self._whole = True
        if self.checkpoint is not None and time.monotonic() - self._last >= self.checkpoint.seconds:
            self.keep()

    def keep(self) -> None:
        """Write the file; on a full disk the run goes on, with one warning."""
        try:
            self.save()
        except NotWritten as error:
            self._last = time.monotonic()
            if not self._warned:
                self._warned = True
                warnings.warn(f"{error}; the run goes on without it", CheckpointWarning, stacklevel=3)

    def save(self) -> None:
        """Write the file if there is one and a shard is new."""
        if self.checkpoint is not None and self._whole and len(self.done) > self._saved:
            self.checkpoint.save(self.task, self.partial, self.done, self._corpus)
            self._saved, self._last = len(self.done), time.monotonic()

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Context in which an interrupt writes the file and mentions it; other errors mention the file if there is one.

        At the end the file holds all shards if any was written.
        """
        try:
            yield
        except KeyboardInterrupt as interrupt:
            try:
                self.save()
                interrupt.args = (self.remedy,)
            except NotWritten as error:
                interrupt.args = (f"{error}; {self.remedy}" if self._saved else str(error),)
            raise
        except UserError as error:
            remedy = self.remedy
            if isinstance(error, TooLong):  # the same command would end here again
                remedy = remedy.replace("the same command with --resume", "with that option and --resume the run")
            if self._saved and remedy and remedy not in str(error):
                error.args = (f"{error}; {remedy}",)
            raise
        if self._saved:
            self.keep()

    def _is_ours(self, path: Path) -> bool:
        try:
            self.task.load(path, self._corpus, MOST_SHARDS)
        except UserError:  # of another run, or no checkpoint at all
            return False
        return True


def _stamp(path: Path) -> Stamp | None:
    """Identity of a file, different for another one written to its place; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _fingerprint(shards: Sequence[Readable]) -> str:
    """Hash of all shards in their order, and of the versions of their files."""
    digest = hashlib.sha256()
    for shard in shards:
        digest.update(f"{shard.key} {shard.version}".encode())
    return digest.hexdigest()
