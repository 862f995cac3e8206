"""What an engine is, and engines by their names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from massieu.checks import UserError
from massieu.corpus.shards import Shard, ShardGroup
from massieu.engine.checkpoints import Checkpoint
from massieu.inspection.partial_result import Part

if TYPE_CHECKING:
    from massieu.inspection.reader import Reader
    from massieu.models.loading import Loaded

__all__ = ["ENGINES", "Engine", "Origin", "Progress", "engine_named"]

ENGINES = ("local", "dask")

Progress = Callable[[int, int, float | None], object]
"""Called with the documents and tokens that were read, and which share of the text that is, if it is known."""


@dataclass(frozen=True)
class Origin:
    """How other processes load the same model.

    Attributes:
        name: as :func:`massieu.models.loading.load` takes it; None for the embedded model, wherever it lies.
        loading: further arguments of that function.
    """

    name: str | None
    loading: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, name: str | None, loading: dict[str, Any], revision: str | None = None) -> Origin:
        """By the name that was asked for and the revision that was found, a folder by its whole path.

        Example:
            >>> Origin.of("bert-base-uncased", {"dtype": "float32"}, revision="86b5e09")
            Origin(name='bert-base-uncased', loading=(('dtype', 'float32'), ('revision', '86b5e09')))
        """
        if name is not None and Path(name).expanduser().is_dir():
            name = str(Path(name).expanduser().resolve())
        elif revision is not None:
            loading = {**loading, "revision": revision}
        return cls(name, tuple(sorted(loading.items())))

    def load(self) -> Loaded:
        """The model."""
        from massieu import assets
        from massieu.models.loading import load

        return load(str(assets.MODEL) if self.name is None else self.name, **dict(self.loading))


class Engine(Protocol):
    """Maps a reader over the pieces of a text and merges what they give."""

    def read(
        self,
        reader: Reader,
        splits: Iterable[Shard | ShardGroup],
        *,
        many: bool = False,
        origin: Origin | None = None,
        checkpoint: Checkpoint | None = None,
        progress: Progress | None = None,
    ) -> Part:
        """What all pieces give together.

        Args:
            reader: the model, and how it reads.
            splits: pieces of the text.
            many: as in :meth:`~massieu.inspection.reader.Reader.read`.
            origin: how other processes load the model; None for one that is only here.
            checkpoint: where to write how far the reading has come; None for nowhere.
            progress: called while the text is read.
        """

    def map(
        self, function: Callable[[Any], Any], given: Iterable[Any], /, *, lost: Callable[[Any], Any] | None = None
    ) -> Iterator[Any]:
        """The function of each, in the order given.

        Args:
            function: what to do with each.
            given: what it is done with.
            lost: what to give, here, instead of what nobody could finish because it ends who takes it; None raises.
        """

    def close(self) -> None:
        """Give back what was taken for it, such as worker processes."""


def engine_named(name: str, **options: Any) -> Engine:
    """An engine by its name, one of :data:`ENGINES`.

    Args:
        name: "local" or "dask".
        **options: of :class:`~massieu.engine.Dask`.

    Example:
        >>> type(engine_named("local")).__name__
        'Local'
    """
    if name == "dask":
        from massieu.engine.cluster import Dask

        return Dask(**options)
    if name != "local":
        raise UserError(f"engine must be one of {', '.join(ENGINES)}, got {name!r}; local reads in this process")
    if given := sorted(option for option, value in options.items() if value is not None):
        raise UserError(f"{', '.join(given)} is for the engine dask, got the engine local; leave it out")
    from massieu.engine.local import Local

    return Local()
