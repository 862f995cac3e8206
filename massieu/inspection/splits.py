"""Pieces of a text that can be read alone, by anyone, with the same result, and texts in memory as such pieces."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from massieu.checks import UserError
from massieu.corpus.bad_records import Faults
from massieu.corpus.shards import SPLIT_BYTES, Document, Split

__all__ = ["Group", "Piece", "TextSplit", "grouped", "text_hash", "text_splits"]

TOGETHER = 512
"""Documents of a split of texts in memory: as many as are sorted by length before they are put into batches."""


def text_hash(text: str) -> str:
    """A name of a document that depends on its text alone: SHA-256 in hexadecimal digits."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


class Piece(Protocol):
    """A piece of a text, such as :class:`~massieu.corpus.Split`; reading it again gives the same."""

    @property
    def key(self) -> str:
        """A name that is the same wherever it is read."""

    @property
    def version(self) -> str:
        """What tells a file from another one of the same name and size; empty if nothing does."""

    def read(self, faults: Faults | None = None) -> Iterator[Document]:
        """The documents in their order; what cannot be read is counted among the faults."""


@dataclass(frozen=True)
class TextSplit:
    """Documents that are in memory.

    Args:
        texts: the documents.
        first: how many came before them.

    Example:
        >>> [document.place for document in TextSplit(("a", "b"), first=7).read()]
        ['text number 8', 'text number 9']
    """

    texts: tuple[str, ...] = field(repr=False)
    first: int = 0

    @property
    def key(self) -> str:
        """A name that depends on the texts and on how many came before."""
        digest = hashlib.sha256(str(self.first).encode())
        for text in self.texts:
            digest.update(text_hash(text).encode())
        return digest.hexdigest()

    @property
    def version(self) -> str:
        """The key knows the texts."""
        return ""

    def read(self, faults: Faults | None = None) -> Iterator[Document]:
        """The documents, in their order."""
        for number, text in enumerate(self.texts, self.first):
            yield Document(text, f"text number {number + 1}")


def text_splits(texts: Iterable[str], size: int = TOGETHER) -> Iterator[TextSplit]:
    """Cut texts into splits of so many documents each, reading no further than the split that is asked for.

    Example:
        >>> [len(split.texts) for split in text_splits(["a", "b", "c"], size=2)]
        [2, 1]
    """
    texts, first = iter(texts), 0
    while some := tuple(itertools.islice(texts, size)):
        for number, text in enumerate(some, first):
            if not isinstance(text, str):
                raise UserError(
                    f"texts must be strings, got {type(text).__name__} at number {number}; pass a list of strings"
                )
        yield TextSplit(some, first)
        first += len(some)


@dataclass(frozen=True)
class Group:
    """Splits that are read as one piece, such as many small files: a batch then holds documents of several."""

    splits: tuple[Split, ...]

    @property
    def key(self) -> str:
        """A name that depends on the splits and their order."""
        return hashlib.sha256("".join(split.key for split in self.splits).encode()).hexdigest()

    @property
    def version(self) -> str:
        """Those of the splits."""
        return " ".join(split.version for split in self.splits)

    def read(self, faults: Faults | None = None) -> Iterator[Document]:
        """The documents, in their order."""
        for split in self.splits:
            yield from split.read(faults)


def grouped(splits: Iterable[Split], num_bytes: int = SPLIT_BYTES) -> Sequence[Group]:
    """Neighboring splits of a corpus together, as long as they hold no more than so many bytes.

    Example:
        >>> small = [Split("", "texts", "memory", number, texts=("a b",)) for number in range(5)]
        >>> [len(group.splits) for group in grouped(small, num_bytes=6)]
        [2, 2, 1]
    """
    groups: list[list[Split]] = []
    room = 0
    for split in splits:
        own = split.num_bytes
        if not groups or own > room:
            groups.append([])
            room = num_bytes
        groups[-1].append(split)
        room -= own
    return [Group(tuple(group)) for group in groups]
