"""What the workers of a cluster do: read pieces of a text, and merge what others have read.

Both are pure. Whatever goes wrong in them travels as a value, so that the user hears the sentence that was said there.
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

from massieu.checks import NotObservable, UserError
from massieu.corpus.passages import TooLong
from massieu.corpus.shards import Shard, ShardGroup
from massieu.engine.engines import Origin
from massieu.inspection.options import Options
from massieu.inspection.partial_files import part_from_bytes, part_to_bytes
from massieu.inspection.partial_result import Identity, Part
from massieu.inspection.reader import Reader

__all__ = ["Failure", "Parcel", "Recipe", "TOPIC", "merge_parcels", "read_stretch"]

TOPIC = "massieu"
"""Under which workers tell the driver how far they are."""

OFTEN = 1.0  # seconds between two times that a worker tells it

_alone = threading.Lock()
_loaded: dict[str, Reader] = {}


@dataclass(frozen=True)
class Recipe:
    """What a worker must know to read.

    Attributes:
        run: a name of the run.
        origin: how to load the model.
        options: how to read.
        identity: what the driver's own model and options amount to; a worker with others is refused.
        many: as in :meth:`~massieu.inspection.reader.Reader.read`.
    """

    run: str
    origin: Origin
    options: Options
    identity: Identity
    many: bool


@dataclass(frozen=True)
class Failure:
    """What went wrong on a worker.

    Attributes:
        kind: the class of an error that is told in one sentence; None for any other, which is a defect.
        sentence: what it said.
        trace: where it came from.
    """

    kind: type[UserError] | None
    sentence: str
    trace: str


@dataclass(frozen=True)
class Parcel:
    """A part on its way between processes: the bytes of a file, so that opening it runs no code.

    Attributes:
        data: the file.
        seconds: how long reading took.

    Example:
        >>> part = Part.empty(Identity("a" * 64, None, {"rows": 32}))
        >>> Parcel.of(part, 0.0).open().identity == part.identity
        True
    """

    data: bytes | memoryview
    seconds: float

    @classmethod
    def of(cls, part: Part, seconds: float) -> Parcel:
        """Pack a part."""
        return cls(part_to_bytes(part), seconds)

    def open(self) -> Part:
        """The part."""
        return part_from_bytes(bytes(self.data))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Beside the pickle, where Dask sends it without making copies."""
        return Parcel, (pickle.PickleBuffer(self.data) if protocol >= 5 else bytes(self.data), self.seconds)

    def __sizeof__(self) -> int:  # the scheduler moves what is small
        return len(self.data)


def read_stretch(recipe: Recipe, stretch: Sequence[tuple[int, Shard | ShardGroup]]) -> Parcel | Failure:
    """What some pieces of the text give, read one after the other.

    Args:
        recipe: the model, and how it reads.
        stretch: the pieces with their numbers.
    """
    try:
        # Listening to attention is for one at a time; a worker of several threads gives all of them to the model.
        with _alone:
            begin = time.perf_counter()
            if (worker := _worker()) is not None:
                torch.set_num_threads(worker.state.nthreads)
            reader = _reader(recipe)
            merged = Part.empty(reader.identity)
            for number, split in stretch:
                merged.merge(reader.read(split, many=recipe.many, progress=_teller(recipe.run, number)))
        return Parcel.of(merged, time.perf_counter() - begin)
    except Exception as error:
        kind = next((kind for kind in (TooLong, NotObservable, UserError) if isinstance(error, kind)), None)
        return Failure(kind, str(error), traceback.format_exc())
    finally:
        _give_back()


def merge_parcels(parcels: Sequence[Parcel | Failure]) -> Parcel | Failure:
    """One parcel of several; if something went wrong in one of them, that."""
    good = []
    for parcel in parcels:
        if isinstance(parcel, Failure):
            return parcel
        good.append(parcel)
    try:
        merged = good[0].open()  # nobody else has it, so that others may be added to it
        for parcel in good[1:]:
            merged.merge(parcel.open())
        return Parcel.of(merged, sum(parcel.seconds for parcel in good))
    finally:
        _give_back()


def _give_back() -> None:
    """Memory that a task had goes back to the system at its end, so that what tasks before it left does not pile up."""
    with contextlib.suppress(OSError, AttributeError):  # another system, which has its own way
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _reader(recipe: Recipe) -> Reader:
    """The model of this process, loaded once."""
    key = repr((recipe.origin, recipe.options, recipe.identity.model))  # a folder may hold another model by now
    if key not in _loaded:
        _loaded.clear()  # a worker has memory for one
        loaded = recipe.origin.load()
        name, revision = recipe.identity.name, recipe.identity.revision
        _loaded[key] = Reader(loaded.model, loaded.tokenizer, recipe.options, name=name, revision=revision)
    reader = _loaded[key]
    difference = recipe.identity.difference(reader.identity)
    if difference is not None:
        worker = _worker()
        raise UserError(
            f"the worker {worker.address if worker else 'here'} must have the model of the process that asks it,"
            f" but {difference}; give all machines the same files and the same versions"
        )
    return reader


def _teller(run: str, number: int) -> Callable[[int, int], None]:
    """Tells the driver now and then how much of a piece was read."""
    worker, last = _worker(), [time.monotonic()]

    def tell(documents: int, tokens: int) -> None:
        if worker is not None and time.monotonic() - last[0] >= OFTEN:
            last[0] = time.monotonic()
            worker.log_event(TOPIC, [run, number, documents, tokens])

    return tell


def _worker() -> Any | None:
    """The worker that runs this; None if it is called by hand."""
    from distributed import get_worker

    try:
        return get_worker()
    except ValueError:
        return None
