"""Where a text is read: in this process, or elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from massieu.inspection.parts import Part
from massieu.inspection.reader import Reader
from massieu.inspection.splits import Piece

__all__ = ["Engine", "Local"]


class Engine(Protocol):
    """Maps a reader over the pieces of a text and merges what they give."""

    def read(
        self,
        reader: Reader,
        splits: Iterable[Piece],
        *,
        many: bool = False,
        progress: Callable[[int], object] | None = None,
    ) -> Part:
        """What all pieces give together.

        Args:
            reader: the model, and how it reads.
            splits: pieces of the text.
            many: as in :meth:`~massieu.inspection.reader.Reader.read`.
            progress: called with the number of documents that were seen so far.
        """


class Local:
    """Reads one piece after the other in this process; what is held does not grow with their number.

    Example:
        >>> from massieu import assets
        >>> from massieu.inspection.loading import load
        >>> from massieu.inspection.options import Options
        >>> from massieu.inspection.splits import text_splits
        >>> model, tokenizer, *_ = load(str(assets.MODEL))
        >>> reader = Reader(model, tokenizer, Options(experiments="heads"))
        >>> Local().read(reader, text_splits(["Call me", "Ishmael."], size=1)).counts.documents
        2
    """

    def read(
        self,
        reader: Reader,
        splits: Iterable[Piece],
        *,
        many: bool = False,
        progress: Callable[[int], object] | None = None,
    ) -> Part:
        """What all pieces give together."""
        merged = Part.empty(reader.identity)
        for split in splits:
            before = merged.counts.documents
            report = None if progress is None else (lambda done, before=before: progress(before + done))
            merged.merge(reader.read(split, many=many, progress=report))
        return merged
