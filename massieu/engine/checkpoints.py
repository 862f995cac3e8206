"""How far a run has come: what was read, which pieces of the text that was, and a file that says both."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import time
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from massieu.checks import UserError
from massieu.corpus.passages import TooLong
from massieu.corpus.shards import Shard, ShardGroup
from massieu.inspection.partial_files import draft_of, load_checkpoint, save_checkpoint
from massieu.inspection.partial_result import Identity, Part

__all__ = ["Checkpoint", "CheckpointWarning", "Ledger"]

Stamp = tuple[int, int, int]


class CheckpointWarning(UserWarning):
    """A checkpoint could not be written, and the run goes on."""


class NotWritten(UserError):  # noqa: N818  # a state of the disk
    """The file of a checkpoint cannot be written, such as on a full disk."""


@dataclass
class Checkpoint:
    """Where to write how far a run has come.

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
        if not 0 <= self.seconds < math.inf:
            got = self.seconds
            raise UserError(f"seconds between checkpoints must be finite and not negative, got {got}; 30 is usual")
        if self.path.is_dir():
            raise UserError(f"a checkpoint must be a file, got the folder {self.path}; name a file in it")
        above = next(folder for folder in self.path.absolute().parents if folder.exists())
        if not above.is_dir() or not os.access(above, os.W_OK):
            raise UserError(f"the checkpoint {self.path} cannot be written below {above}; name a file elsewhere")

    @property
    def remedy(self) -> str:
        """What to do with it after the run was broken off, as the end of a sentence; empty if it is not there."""
        before = self.resume and self._own is None and self.path.exists()  # it has not been opened yet
        if not before and not self._is_own:
            return ""
        return f"what was read is in {self.path}; the same command with --resume goes on from it"

    @contextlib.contextmanager
    def mentioned(self) -> Iterator[None]:
        """Inside, an interrupt says that the file is there, if it is."""
        try:
            yield
        except KeyboardInterrupt as interrupt:
            interrupt.args = interrupt.args or ((self.remedy,) if self.remedy else ())
            raise

    def load(self, identity: Identity, corpus: str, splits: int) -> tuple[Part, set[int]]:
        """How far the run had come that wrote the file, which belongs to this one from now on."""
        own = _stamp(self.path)
        found = load_checkpoint(self.path, identity, corpus, splits)
        self._own = own
        return found

    def save(self, part: Part, done: Collection[int], corpus: str) -> None:
        """Write the file; one sentence if it cannot be written, or if another run has."""
        from safetensors import SafetensorError

        if self.path.exists() and not self._is_own:
            raise UserError(
                f"the checkpoint {self.path} was written by another run meanwhile;"
                " give each run a file of its own with --checkpoint"
            )
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            save_checkpoint(self.path, part, done, corpus)
            self._own = _stamp(self.path)
        except (OSError, SafetensorError) as error:
            text = f"the checkpoint {self.path} cannot be written ({' '.join(str(error).split())})"
            raise NotWritten(f"{text}; make room there, or name a file elsewhere with --checkpoint") from None

    def remove(self) -> None:
        """Remove the file, if this run wrote it: nobody goes on from a run that is finished."""
        if self._is_own:
            self.path.unlink(missing_ok=True)
            draft_of(self.path).unlink(missing_ok=True)

    @property
    def _is_own(self) -> bool:
        """Whether the file is there and as this run left it."""
        return self._own is not None and self._own == _stamp(self.path)


class Ledger:
    """What was read so far, as one part, with the numbers of its pieces; each counts once.

    Args:
        identity: of the run.
        splits: all pieces of the text; with a checkpoint they must be a sequence, whose order gives them numbers.
        checkpoint: where to write it; None for nowhere.

    Example:
        >>> from massieu.corpus.shards import text_shards
        >>> ledger = Ledger(Identity("a" * 64, None, {"rows": 32}), list(text_shards(["Call", "me"], size=1)))
        >>> ledger.add(Part.empty(ledger.part.identity), [0])
        >>> [number for number, split in ledger.waiting()]
        [1]
    """

    def __init__(
        self, identity: Identity, splits: Iterable[Shard | ShardGroup], checkpoint: Checkpoint | None = None
    ) -> None:
        self.splits, self.checkpoint = splits, checkpoint
        self.part, self.done = Part.empty(identity), set[int]()
        self._saved, self._last = 0, time.monotonic()  # pieces that are in the file, and since when
        self._whole = True  # the part is that of the pieces which are done
        self._warned = False
        if checkpoint is None:
            return
        if not isinstance(splits, Sequence):
            raise UserError(
                "a checkpoint needs a text that can be read again, got one that comes one by one;"
                " pass a list of strings or a Corpus"
            )
        self._corpus = _fingerprint(splits)
        if not checkpoint.path.exists():
            return
        if checkpoint.resume:
            self.part, self.done = checkpoint.load(identity, self._corpus, len(splits))
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

    def share(self, documents: int) -> float | None:
        """About which share of the text so many documents are; None if nobody knows."""
        if not isinstance(self.splits, Sequence) or not self.part.counts.documents:
            return None
        expected = self.part.counts.documents / len(self.done) * len(self.splits)
        return min(1.0, documents / expected)

    @property
    def remedy(self) -> str:
        """What to do after the run was broken off, as the end of a sentence."""
        if self.checkpoint is None:
            return "nothing was kept; next time --out DIR or --checkpoint FILE keeps what was read"
        return self.checkpoint.remedy if self._saved else "nothing was written"

    def waiting(self) -> Iterator[tuple[int, Shard | ShardGroup]]:
        """The pieces that were not read when this was called, with their numbers."""
        before = set(self.done)
        return ((number, split) for number, split in enumerate(self.splits) if number not in before)

    def add(self, part: Part, numbers: Iterable[int]) -> None:
        """Add what some pieces gave, and write the file if it is time."""
        self._whole = False  # an interrupt may come in between
        self.part.merge(part)
        self.done.update(numbers)
        self._whole = True
        if self.checkpoint is not None and time.monotonic() - self._last >= self.checkpoint.seconds:
            self.keep()

    def keep(self) -> None:
        """Write the file as :meth:`save` does; on a full disk the run goes on, with one warning."""
        try:
            self.save()
        except NotWritten as error:
            self._last = time.monotonic()
            if not self._warned:
                self._warned = True
                warnings.warn(f"{error}; the run goes on without it", CheckpointWarning, stacklevel=3)

    def save(self) -> None:
        """Write the file, if there is one and something is new."""
        if self.checkpoint is not None and self._whole and len(self.done) > self._saved:
            self.checkpoint.save(self.part, self.done, self._corpus)
            self._saved, self._last = len(self.done), time.monotonic()

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Inside, an interrupt writes the file first and says so; at the end it is complete if it was begun.

        Other errors say where the file is that was written before them.
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
            load_checkpoint(path, self.part.identity, self._corpus)
        except ValueError:  # of another run, or no checkpoint: nobody goes on from it
            return False
        return True


def _stamp(path: Path) -> Stamp | None:
    """What tells this file from another that was written to its place; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _fingerprint(splits: Sequence[Shard | ShardGroup]) -> str:
    """A hash of all pieces in their order, and of when their files were written."""
    digest = hashlib.sha256()
    for split in splits:
        digest.update(f"{split.key} {split.version}".encode())
    return digest.hexdigest()
