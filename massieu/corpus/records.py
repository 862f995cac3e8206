"""What a reader of a file yields, and what all formats ask of a text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import IO, Any, NamedTuple, Protocol

from massieu.corpus.bad_records import BadRecord

__all__ = ["LARGEST", "MOST", "Reader", "Record", "decode_utf8", "decoded", "refused", "too_large", "without_column"]


LARGEST = 8 << 20
"""Bytes of the largest record: tokenizers need some 200 bytes of memory for each byte of a text."""

MOST = f"{LARGEST >> 20} MB"


class Record(NamedTuple):
    """A record before its text is looked for.

    Attributes:
        position: where it begins, the same however the file is split: a byte of the text (after decompression), a line
            of CSV, a row of Parquet.
        label: the same for people.
        content: what was read.
        text: makes the text from the content, or raises :class:`BadRecord`.
    """

    position: int
    label: str
    content: Any
    text: Callable[[Any], str]


class Reader(Protocol):
    """Records of an open file that begin between two places, in order; the rest of the file is not kept."""

    def __call__(self, file: IO[bytes], column: str, start: int, stop: int | None) -> Iterator[Record]: ...


def decode_utf8(content: bytes) -> str:
    """Text from bytes; a mark of the byte order before it is no part of it."""
    if len(content) > LARGEST:
        raise too_large()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise _not_utf8() from None


def decoded(value: object) -> str:
    """A string without halves of surrogate pairs, which no tokenizer takes."""
    if not isinstance(value, str):
        raise BadRecord("not a string", "must hold strings", "is none")
    if len(value) > LARGEST:
        raise too_large()
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise _not_utf8() from None
    return value


def refused(content: BadRecord) -> str:
    """The text of a record of which the reader knows that there is none."""
    raise content


def without_column(column: str, names: list[str], count: int = 1) -> BadRecord:
    """What is said of a table without the column."""
    got = f"has {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"
    return BadRecord("no such column", f'must have a column "{column}"', got, "name one with --column", count=count)


def too_large(reason: str = f"larger than {MOST}") -> BadRecord:
    """What is said of a record that is too large to be read."""
    return BadRecord(reason, f"must hold records of at most {MOST}", "is larger", "cut it into documents")


def _not_utf8() -> BadRecord:
    return BadRecord("not UTF-8", "must be a text file in UTF-8", "is not", "convert it, or pass another")
