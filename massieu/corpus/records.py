"""Records of files, and the checks of their texts common to all formats."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import IO, Any, NamedTuple, Protocol

from massieu.corpus.bad_records import RecordError

__all__ = [
    "LARGEST",
    "MOST",
    "RecordReader",
    "Record",
    "decode_utf8",
    "decoded",
    "refused",
    "too_large",
    "without_column",
]


LARGEST = 8 << 20
"""Bytes of the largest record: tokenizers need some 200 bytes of memory for each byte of a text."""

MOST = f"{LARGEST >> 20} MB"


class Record(NamedTuple):
    """A raw record and the function that extracts its text.

    Attributes:
        position: begin of the record, the same for all shards: a byte of the text (after decompression), a line of CSV,
            a row of Parquet.
        label: the position in words.
        content: raw content.
        text: extracts the text from the content, or raises :class:`RecordError`.
    """

    position: int
    label: str
    content: Any
    text: Callable[[Any], str]


class RecordReader(Protocol):
    """Reader of the records of an open file that begin between two positions, in order."""

    def __call__(self, file: IO[bytes], column: str, start: int, stop: int | None) -> Iterator[Record]: ...


def decode_utf8(content: bytes) -> str:
    """Decode bytes without their byte order mark."""
    if len(content) > LARGEST:
        raise too_large()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise _not_utf8() from None


def decoded(value: object) -> str:
    """Return a string; raise for another type, surrogates and too many characters."""
    if not isinstance(value, str):
        raise RecordError("not a string", "must hold strings", "is none")
    if len(value) > LARGEST:
        raise too_large()
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise _not_utf8() from None
    return value


def refused(content: RecordError) -> str:
    """Raise the error that a reader found in place of a text."""
    raise content


def without_column(column: str, names: list[str], count: int = 1) -> RecordError:
    """Return the error for a table without the column."""
    got = f"has {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"
    return RecordError("no such column", f'must have a column "{column}"', got, "name one with --column", count=count)


def too_large(reason: str = f"larger than {MOST}") -> RecordError:
    """Return the error for a record that is too large."""
    return RecordError(reason, f"must hold records of at most {MOST}", "is larger", "cut it into documents")


def _not_utf8() -> RecordError:
    return RecordError("not UTF-8", "must be a text file in UTF-8", "is not", "convert it, or pass another")
