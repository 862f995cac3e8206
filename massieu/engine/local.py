"""The engine of this process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from massieu.corpus.shards import Shard, ShardGroup
from massieu.engine.checkpoints import Checkpoint, Ledger
from massieu.engine.engines import Origin, Progress
from massieu.inspection.partial_result import Part
from massieu.inspection.reader import Reader

__all__ = ["Local"]


class Local:
    """Reads one piece after the other in this process; what is held does not grow with their number.

    Example:
        >>> from massieu import assets
        >>> from massieu.models.loading import load
        >>> from massieu.inspection.options import Options
        >>> from massieu.corpus.shards import text_shards
        >>> model, tokenizer, *_ = load(str(assets.MODEL))
        >>> reader = Reader(model, tokenizer, Options(experiments="heads"))
        >>> Local().read(reader, text_shards(["Call me", "Ishmael."], size=1)).counts.documents
        2
    """

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
        """What all pieces give together; see :class:`~massieu.engine.Engine`."""
        ledger = Ledger(reader.identity, splits, checkpoint)

        def report(documents: int = 0, tokens: int = 0) -> None:
            if progress is not None:
                counts = ledger.part.counts
                documents, tokens = counts.documents + documents, counts.tokens + tokens
                progress(documents, tokens, ledger.share(documents))

        with ledger.kept():
            for number, split in ledger.waiting():
                ledger.add(reader.read(split, many=many, progress=report), [number])
                report()
        return ledger.part

    def map(
        self, function: Callable[[Any], Any], given: Iterable[Any], /, *, lost: Callable[[Any], Any] | None = None
    ) -> Iterator[Any]:
        """The function of each, in the order given; what ends this process is not survived."""
        return map(function, given)

    def close(self) -> None:
        """Nothing was taken."""
