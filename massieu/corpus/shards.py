"""Shards: ranges of a corpus that can be read alone, anywhere, with the same result."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from massieu.checks import UserError
from massieu.corpus.bad_records import BadRecord, BadRecords, RecordError
from massieu.corpus.columns import csv_rows, parquet_rows, tab_rows
from massieu.corpus.lines import json_lines, paragraph, paragraphs
from massieu.corpus.opening import Elsewhere, damage, needed, opened, unreadable
from massieu.corpus.records import Record, RecordReader, decoded, refused

__all__ = ["Document", "RecordFilter", "Shard", "ShardGroup", "group_shards", "text_hash", "text_shards"]

READERS: dict[str, RecordReader] = {
    "text": paragraphs,
    "jsonl": json_lines,
    "csv": csv_rows,
    "tsv": tab_rows,
    "parquet": parquet_rows,
}
DECODERS: dict[type, Callable[[Any], str]] = {bytes: paragraph, type(None): decoded}  # of texts in memory
# Part of every key, and so of the fingerprints of corpora: it must not change.
KEY_OF_FILTER = "Wanted(column={0.column!r}, sample={0.sample!r}, seed={0.seed!r}, strict={0.strict!r})"
SHARD_BYTES = 1 << 20
END = 2**63 - 1  # a position after all others

TOGETHER = 512
"""Documents of a shard of texts in memory, which are sorted by length before they are put into batches."""


class Document(NamedTuple):
    """A text and its place, such as "corpus.jsonl:17", "corpus.jsonl:byte 2097160" or "part.parquet:row 12"."""

    text: str
    place: str


@dataclass(frozen=True, slots=True)
class RecordFilter:
    """Records of a file to read, and the treatment of bad ones.

    Attributes:
        column: field of JSON or column of a table that holds the text.
        sample: share of the documents, or None for all of them.
        seed: of the sample.
        strict: whether a bad record is an error, rather than counted and skipped.
    """

    column: str = "text"
    sample: float | None = None
    seed: int = 0
    strict: bool = False

    def chooses(self, name: str, position: int) -> bool:
        """Return whether a record is in the sample, by a hash of the seed and its place."""
        if self.sample is None:
            return True
        digest = hashlib.blake2b(f"{self.seed} {position} {name}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") < self.sample * 2.0**64


@dataclass(frozen=True, slots=True)
class Shard:
    """A range of a corpus, by reference or with its texts.

    Attributes:
        path: a path that opens the file, or a URL for people; empty for texts in memory.
        name: name of the file in reports; empty for a list of texts.
        format: text, jsonl, csv, tsv, parquet, or memory for texts in memory.
        start: first byte of text and jsonl, first row group of Parquet, number of the first text in memory.
        stop: start of the next shard; None for the end of the file.
        compression: extension, or empty.
        first: read no more than this number of documents; None for all.
        size: bytes of the file as stored, if known.
        texts: texts in memory; bytes are decoded when they are read, and None is a bad record.
        numbers: of the texts, if they are not consecutive.
        filter: the records to read.
        elsewhere: opens a file that is not on this machine.
        version: when the file was written, or another mark of its content; not in the key, so that copies are the same.

    Example:
        >>> shard = Shard("", "texts", "memory", texts=("Call me Ishmael.", "Some years ago"))
        >>> [document.place for document in shard.read()]
        ['texts:document 1', 'texts:document 2']
    """

    path: str
    name: str
    format: str
    start: int = 0
    stop: int | None = None
    compression: str = ""
    first: int | None = None
    size: int | None = None
    texts: tuple[str | bytes | None, ...] = field(default=(), repr=False)
    numbers: tuple[int, ...] = field(default=(), repr=False)
    filter: RecordFilter = RecordFilter()
    elsewhere: Elsewhere | None = field(default=None, repr=False)
    version: str = ""

    @classmethod
    def of_texts(cls, texts: Iterable[str], start: int = 0) -> Shard:
        """Return a shard of a list of texts, of which the first has the number ``start``.

        Example:
            >>> [document.place for document in Shard.of_texts(["a", "b"], start=7).read()]
            ['text number 8', 'text number 9']
        """
        return cls("", "", "memory", start, texts=tuple(texts))

    @property
    def key(self) -> str:
        """Hash of everything that decides about the documents except the folder of the files."""
        what = (self.name, self.format, self.start, self.stop, self.compression, self.first, self.size)
        digest = hashlib.sha256(f"{repr(what)[:-1]}, {KEY_OF_FILTER.format(self.filter)})".encode())
        for number, text in self._numbered():
            own = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
            digest.update(f"{number} {own is None}".encode() + hashlib.sha256(own or b"").digest())
        return digest.hexdigest()

    @property
    def num_bytes(self) -> int:
        """Approximate size: the range of bytes, or the whole file where there is none."""
        if self.format == "memory":
            return sum(len(text or "") for text in self.texts)
        if self.format in ("text", "jsonl") and self.stop is not None:
            return self.stop - self.start
        return SHARD_BYTES if self.size is None else self.size

    def read(self, bad_records: BadRecords | None = None) -> Iterator[Document]:
        """Read the documents in order, with one document and a buffer of the file in memory.

        Args:
            bad_records: counts the records that cannot be read and are skipped.

        Raises:
            UserError: a record cannot be read and the filter is strict, or the file cannot be read to its end.
        """
        left = self.first
        with contextlib.closing(self._records()) as records:
            for record in records:
                if left == 0:
                    return
                if record.text is not refused and not self.filter.chooses(self.name, record.position):
                    continue
                try:
                    text = record.text(record.content)
                except RecordError as error:
                    bad = self._bad_record(record, error)
                    if self.filter.strict:
                        raise UserError(bad.sentence) from None
                    if bad_records is not None:
                        bad_records.add(bad, error.count)
                    continue
                if text.strip() or self.format == "memory":
                    yield Document(text, self._place(record))
                    left = None if left is None else left - 1

    def _records(self) -> Generator[Record]:
        if self.format == "memory":
            for number, text in self._numbered():
                yield Record(number, f"document {number + 1}", text, DECODERS.get(type(text), str))
            return
        if self.format == "parquet":
            needed("pyarrow.parquet")
        with opened(self.path, self.compression, self.elsewhere) as file:
            try:
                yield from READERS[self.format](file, self.filter.column, self.start, self.stop)
            except Exception as error:  # any error of the file system; callers handle records outside of this block
                why = damage(error) if self.compression else None
                if why is None:
                    raise unreadable(self.path, error) from error
                bad = RecordError("damaged", "must be a whole file", f"is damaged ({why})", "copy it again")
                yield Record(END, "its end", bad, refused)

    def _numbered(self) -> Iterator[tuple[int, str | bytes | None]]:
        return zip(self.numbers, self.texts, strict=True) if self.numbers else enumerate(self.texts, self.start)

    def _place(self, record: Record) -> str:
        return (
            f"{self.name}:{record.label.removeprefix('line ')}" if self.name else f"text number {record.position + 1}"
        )

    def _bad_record(self, record: Record, error: RecordError) -> BadRecord:
        where = f"the line at {record.label}" if record.label.startswith("byte ") else record.label
        sentence = f"{self.name} {error.expected}, and {where} {error.got}; {error.remedy}"
        return BadRecord(self.name, record.position, self._place(record), error.reason, sentence)


class Readable(Protocol):
    """A range of a text that can be read alone, such as a :class:`Shard` or a :class:`ShardGroup`."""

    @property
    def key(self) -> str:
        """Hash of everything that decides about the documents."""

    @property
    def version(self) -> str:
        """Mark of the content of a file; empty if there is none."""

    def read(self, bad_records: BadRecords | None = None) -> Iterator[Document]:
        """Read the documents in order."""


@dataclass(frozen=True)
class ShardGroup:
    """Shards read as one, such as many small files: a batch then holds documents of several."""

    shards: tuple[Shard, ...]

    @property
    def key(self) -> str:
        """Hash of the shards in their order."""
        return hashlib.sha256("".join(shard.key for shard in self.shards).encode()).hexdigest()

    @property
    def version(self) -> str:
        """Versions of the shards."""
        return " ".join(shard.version for shard in self.shards)

    def read(self, bad_records: BadRecords | None = None) -> Iterator[Document]:
        """Read the documents in order; see :meth:`Shard.read`."""
        for shard in self.shards:
            yield from shard.read(bad_records)


def group_shards(shards: Iterable[Shard], num_bytes: int = SHARD_BYTES) -> Sequence[ShardGroup]:
    """Group neighboring shards of a corpus up to ``num_bytes`` each.

    Example:
        >>> small = [Shard("", "texts", "memory", number, texts=("a b",)) for number in range(5)]
        >>> [len(group.shards) for group in group_shards(small, num_bytes=6)]
        [2, 2, 1]
    """
    groups: list[list[Shard]] = []
    room = 0
    for shard in shards:
        if not groups or shard.num_bytes > room:
            groups.append([])
            room = num_bytes
        groups[-1].append(shard)
        room -= shard.num_bytes
    return [ShardGroup(tuple(group)) for group in groups]


def text_shards(texts: Iterable[str], size: int = TOGETHER) -> Iterator[Shard]:
    """Put every ``size`` texts into a shard, reading no further than the shard that is asked for.

    Example:
        >>> [len(shard.texts) for shard in text_shards(["a", "b", "c"], size=2)]
        [2, 1]
    """
    texts, start = iter(texts), 0
    while some := tuple(itertools.islice(texts, size)):
        for number, text in enumerate(some, start):
            check_text(text, number)
        yield Shard.of_texts(some, start)
        start += len(some)


def check_text(text: object, number: int) -> None:
    """Raise unless an element of a list of texts is a string."""
    if not isinstance(text, str):
        raise UserError(f"texts must be strings, got {type(text).__name__} at number {number}; pass a list of strings")


def text_hash(text: str) -> str:
    """SHA-256 of a document in hexadecimal digits; it depends on the text alone."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
