"""Documents between blank lines, or one JSON value in each line; any range of bytes can be read alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import IO

from massieu.corpus.bad_records import RecordError
from massieu.corpus.records import LARGEST, Record, decode_utf8, decoded

__all__ = ["json_lines", "paragraph", "paragraphs"]

BUFFER = 1 << 18  # bytes read at once of a line that belongs to the range before


def paragraphs(file: IO[bytes], column: str, start: int = 0, stop: int | None = None) -> Iterator[Record]:
    r"""Read the documents between blank lines that begin between two bytes.

    A document begins with the blank line right before it, the first one with the file, so that the text before
    ``start`` does not matter; the words of a document may lie beyond ``stop``.

    Example:
        >>> import io
        >>> file = io.BytesIO(b"one\n\ntwo,\nstill two\n\nthree")
        >>> [record.content for start in (0, 4) for record in paragraphs(file, "", start, start + 4)]
        [b'one\n', b'two,\nstill two\n']
    """
    end = float("inf") if stop is None else stop
    begins = start == 0
    parts: list[bytes] = []
    position, label, room = 0, "", 0
    for offset, number, line in _lines(file, start, end):
        if _is_blank(line):
            if parts:
                yield Record(position, label, b"".join(parts), paragraph)
                parts = []
            if offset >= end:
                return
            begins = True
        elif parts:
            parts.append(line[: max(0, room)])  # a document that is too large is truncated, and refused later
            room -= len(line)
        elif begins:
            position, label, parts, begins = offset, _label(offset, number), [line], False
            room = LARGEST + 1 - len(line)
        elif offset >= end:
            return
    if parts:
        yield Record(position, label, b"".join(parts), paragraph)


def json_lines(file: IO[bytes], column: str, start: int = 0, stop: int | None = None) -> Iterator[Record]:
    r"""Read the JSON lines that begin between two bytes, each a string or an object with a field that holds one.

    Example:
        >>> import io
        >>> file = io.BytesIO(b'"one"\n{"text": "two"}\n"three"')
        >>> [record.text(record.content) for record in json_lines(file, "text", 3, 7)]
        ['two']
    """
    end = float("inf") if stop is None else stop
    expected, remedy = f'must hold strings or objects with a field "{column}"', "name the field with --column"

    def text(content: bytes) -> str:
        line = decode_utf8(content)
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            raise RecordError("not JSON", "must hold one JSON value a line", "is none") from None
        if isinstance(value, dict):
            if column not in value:
                raise RecordError("without the field", expected, "does not", remedy)
            value = value[column]
        if not isinstance(value, str):
            raise RecordError("not a string", expected, "does not", remedy)
        return decoded(value)

    for offset, number, line in _lines(file, start, end):
        if offset >= end:
            return
        if line.strip():
            yield Record(offset, _label(offset, number), line, text)


def paragraph(content: bytes) -> str:
    """Decode a document between blank lines."""
    return decode_utf8(content).replace("\r\n", "\n").strip()


def _lines(file: IO[bytes], start: int, end: float) -> Iterator[tuple[int, int, bytes]]:
    """Lines that begin at ``start`` or later, as (offset, number or 0 if unknown, content).

    A line that is too large is truncated. There is no line at all if one goes on from before ``start`` until ``end``.
    """
    offset, number = start, 1
    if start:
        # From the byte before: if it ends a line, the next begins right at start.
        file.seek(start - 1)
        offset, number = start - 1, 0
        piece = b" "
        while piece and not piece.endswith(b"\n"):
            if offset >= end:
                return
            piece = file.readline(int(min(BUFFER, end - offset)))
            offset += len(piece)
    while line := file.readline(LARGEST + 1):
        yield offset, number, line
        offset += len(line)
        while len(line) > LARGEST and not line.endswith(b"\n"):
            line = file.readline(LARGEST + 1)
            offset += len(line)
        number += number > 0


def _is_blank(line: bytes) -> bool:
    stripped = line.strip()
    if not stripped or 0x1F < stripped[0] < 0x80:
        return not stripped
    return not stripped.decode("utf-8", "replace").strip()  # blanks beyond ASCII


def _label(offset: int, number: int) -> str:
    return f"line {number}" if number else f"byte {offset}"
