"""Engine of this process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from massieu.corpus import Readable
from massieu.engine.checkpoints import Checkpoint, Ledger
from massieu.engine.fold import FoldTask, Progress

__all__ = ["Local"]


class Local:
    """Reads one shard after the other in this process; its memory does not grow with their number.

    Example:
        >>> from massieu import assets
        >>> from massieu.corpus.shards import text_shards
        >>> from massieu.inspection.options import Options
        >>> from massieu.inspection.reader import Reader
        >>> from massieu.models.loading import load
        >>> model, tokenizer, *_ = load(str(assets.MODEL))
        >>> reader = Reader(model, tokenizer, Options(experiments="heads"))
        >>> Local().fold(reader, text_shards(["Call me", "Ishmael."], size=1)).counts.documents
        2
    """

    def fold(
        self,
        task: FoldTask,
        shards: Iterable[Readable],
        *,
        checkpoint: Checkpoint | None = None,
        progress: Progress | None = None,
    ) -> Any:
        """Partial result of all shards; see :class:`~massieu.engine.Engine`."""
        ledger = Ledger(task, shards, checkpoint)

        def report(documents: int = 0, tokens: int = 0) -> None:
            if progress is not None:
                counts = ledger.partial.counts
                documents, tokens = counts.documents + documents, counts.tokens + tokens
                progress(documents, tokens, ledger.fraction(documents))

        with ledger.kept():
            for number, shard in ledger.waiting():
                ledger.add(task.read(shard, progress=report), [number])
                report()
        return ledger.partial

    def map(
        self, function: Callable[[Any], Any], given: Iterable[Any], /, *, lost: Callable[[Any], Any] | None = None
    ) -> Iterator[Any]:
        """Values of a function, in the order given; what ends this process ends the map."""
        return map(function, given)

    def close(self) -> None:
        """No-op: nothing was started."""
