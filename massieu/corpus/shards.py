"""Splits: pieces of a corpus that anyone can read alone, again and again, with the same result."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from massieu.checks import UserError
from massieu.corpus.bad_records import BadRecord, Fault, Faults
from massieu.corpus.columns import csv_rows, parquet_rows, tab_rows
from massieu.corpus.lines import json_lines, paragraph, paragraphs
from massieu.corpus.opening import Elsewhere, damage, needed, opened, unreadable
from massieu.corpus.records import Reader, Record, decoded, refused

__all__ = ["Document", "Split", "Wanted"]

READERS: dict[str, Reader] = {
    "text": paragraphs,
    "jsonl": json_lines,
    "csv": csv_rows,
    "tsv": tab_rows,
    "parquet": parquet_rows,
}
MAKERS: dict[type, Callable[[Any], str]] = {bytes: paragraph, type(None): decoded}  # of texts that are here
SPLIT_BYTES = 1 << 20
END = 2**63 - 1  # a position after all others


class Document(NamedTuple):
    """A text and where it came from: "corpus.jsonl:17", "corpus.jsonl:byte 2097160" or "part.parquet:row 12"."""

    text: str
    place: str


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is wanted of every file.

    Attributes:
        column: field of JSON or column of a table that holds the text.
        sample: share of the documents, or None for all of them.
        seed: which share.
        strict: whether a record that cannot be read is an error, rather than counted and skipped.
    """

    column: str = "text"
    sample: float | None = None
    seed: int = 0
    strict: bool = False

    def chooses(self, name: str, position: int) -> bool:
        """Whether the record that begins there is in the sample, by a hash of seed and place."""
        if self.sample is None:
            return True
        digest = hashlib.blake2b(f"{self.seed} {position} {name}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") < self.sample * 2.0**64


@dataclass(frozen=True, slots=True)
class Split:
    """A piece of a corpus, by reference or with its texts.

    Attributes:
        path: a path that opens the file, or a URL for people; empty if the texts are here.
        name: what the file is called in reports.
        format: text, jsonl, csv, tsv, parquet, or memory for texts that are here.
        start: first byte of text and jsonl, first row group of Parquet, number of the first text in memory.
        stop: where the next split begins; None for the end of the file.
        compression: extension, or empty.
        first: read no more than this number of documents; None for all.
        size: bytes of the file as it is stored, if known.
        texts: the documents; bytes are decoded by who reads them, and None is no document.
        numbers: of the texts, if they do not follow each other.
        wanted: what is wanted of every file.
        elsewhere: what opens the file if it is not on this machine.
        version: when the file was written, or another mark of its content; not in the key, so that copies are the same.

    Example:
        >>> split = Split("", "texts", "memory", texts=("Call me Ishmael.", "Some years ago"))
        >>> [document.place for document in split.read()]
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
    wanted: Wanted = Wanted()
    elsewhere: Elsewhere | None = field(default=None, repr=False)
    version: str = ""

    @property
    def key(self) -> str:
        """A name of the split that is the same wherever the files lie, and another if something else is wanted."""
        what = (self.name, self.format, self.start, self.stop, self.compression, self.first, self.size, self.wanted)
        digest = hashlib.sha256(repr(what).encode())
        for number, text in self._numbered():
            own = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
            digest.update(f"{number} {own is None}".encode() + hashlib.sha256(own or b"").digest())
        return digest.hexdigest()

    @property
    def num_bytes(self) -> int:
        """About how much it holds: its range of bytes, or the whole file where it has none."""
        if self.format == "memory":
            return sum(len(text or "") for text in self.texts)
        if self.format in ("text", "jsonl") and self.stop is not None:
            return self.stop - self.start
        return SPLIT_BYTES if self.size is None else self.size

    def read(self, faults: Faults | None = None) -> Iterator[Document]:
        """The documents of the split, in order; no more of the file is in memory than one document and a buffer.

        Args:
            faults: where records are counted that cannot be read and are skipped.

        Raises:
            ValueError: a record cannot be read, and ``strict`` was wanted; or the file cannot be opened, or not be read
                to its end.
        """
        left = self.first
        with contextlib.closing(self._records()) as records:
            for record in records:
                if left == 0:
                    return
                if record.text is not refused and not self.wanted.chooses(self.name, record.position):
                    continue
                try:
                    text = record.text(record.content)
                except BadRecord as bad:
                    fault = self._fault(record, bad)
                    if self.wanted.strict:
                        raise UserError(fault.sentence) from None
                    if faults is not None:
                        faults.add(fault, bad.count)
                    continue
                if text.strip() or self.format == "memory":
                    yield Document(text, self._place(record))
                    left = None if left is None else left - 1

    def _records(self) -> Generator[Record]:
        if self.format == "memory":
            for number, text in self._numbered():
                yield Record(number, f"document {number + 1}", text, MAKERS.get(type(text), str))
            return
        if self.format == "parquet":
            needed("pyarrow.parquet")
        with opened(self.path, self.compression, self.elsewhere) as file:
            try:
                yield from READERS[self.format](file, self.wanted.column, self.start, self.stop)
            except Exception as error:  # whatever the place raises; what is done with records is not inside
                why = damage(error) if self.compression else None
                if why is None:
                    raise unreadable(self.path, error) from error
                bad = BadRecord("damaged", "must be a whole file", f"is damaged ({why})", "copy it again")
                yield Record(END, "its end", bad, refused)

    def _numbered(self) -> Iterator[tuple[int, str | bytes | None]]:
        return zip(self.numbers, self.texts, strict=True) if self.numbers else enumerate(self.texts, self.start)

    def _place(self, record: Record) -> str:
        return f"{self.name}:{record.label.removeprefix('line ')}"

    def _fault(self, record: Record, bad: BadRecord) -> Fault:
        where = f"the line at {record.label}" if record.label.startswith("byte ") else record.label
        sentence = f"{self.name} {bad.expected}, and {where} {bad.got}; {bad.remedy}"
        return Fault(self.name, record.position, self._place(record), bad.reason, sentence)
