"""Documents in a column of a table: CSV, read from its beginning, and Parquet, by row groups."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator
from typing import IO, Any

from massieu.corpus.bad_records import RecordError
from massieu.corpus.opening import damage, needed
from massieu.corpus.records import LARGEST, MOST, Record, decoded, refused, too_large, without_column

__all__ = ["csv_rows", "parquet_rows", "row_group_ranges", "tab_rows"]

ROWS_AT_ONCE = 256  # rows of Parquet in memory
BUFFER = 1 << 18  # bytes of a column of Parquet read at once

OPEN = "quote never closed, with all rows after it"
HUGE = f"larger than {MOST}, with all rows after it"


class _TooLarge(Exception):  # noqa: N818  # a property of the row
    """A row has more bytes than a record may have."""


def csv_rows(
    file: IO[bytes], column: str, start: int = 0, stop: int | None = None, delimiter: str = ","
) -> Iterator[Record]:
    r"""Read all rows of a table from its beginning: fields in quotes may hold line ends.

    Example:
        >>> import io
        >>> file = io.BytesIO(b'id,text\n1,"two\nlines"\n2,one\n')
        >>> [(record.label, record.text(record.content)) for record in csv_rows(file, "text")]
        [('line 2', 'two\nlines'), ('line 4', 'one')]
    """
    csv.field_size_limit(max(2 * LARGEST, csv.field_size_limit()))  # the usual limit refuses documents of 128 kB
    # Bytes that are not UTF-8 become surrogates, which spoil their own row only.
    with io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="") as text:
        # Without strict=True a quote that is never closed silently takes the rest of the file for its field.
        lines = _Lines(text)
        rows = csv.reader(lines, delimiter=delimiter, strict=True)
        header = None
        for line, row in _rows(rows, lines):
            if isinstance(row, RecordError):
                yield Record(line, f"line {line}", row, refused)
                if header is None:
                    return
            elif header is not None:
                yield Record(line, f"line {line}", row, header)
            elif column in row:
                header = _field(row.index(column), len(row))
            else:
                lost = sum(1 for _ in _rows(rows, lines))  # rows without the column
                yield Record(line, f"line {line}", without_column(column, row, max(1, lost)), refused)
                return


class _Lines:
    """Lines of a table; raises :class:`_TooLarge` for a row that is larger than a record may be.

    Attributes:
        size: characters since the row began.
    """

    def __init__(self, text: IO[str]) -> None:
        self.text, self.size = text, 0

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        line = self.text.readline(LARGEST + 1)
        self.size += len(line)
        if self.size > LARGEST:
            raise _TooLarge
        if not line:
            raise StopIteration
        return line


def _rows(rows: Any, lines: _Lines) -> Iterator[tuple[int, list[str] | RecordError]]:
    """Rows that are not empty, or their errors, with the numbers of their first lines."""
    while True:
        line, lines.size = rows.line_num + 1, 0
        try:
            row = next(rows, None)
        except _TooLarge:  # the begin of the next row is unknown
            yield line, too_large(HUGE)
            return
        except csv.Error as error:
            remedy = "close its quotes, and write those inside of quotes twice"
            reason = OPEN if "end of data" in str(error) else "not CSV"
            yield line, RecordError(reason, "must have rows as CSV has them", f"is none ({error})", remedy)
            continue
        if row is None:
            return
        if row:
            yield line, row


def tab_rows(file: IO[bytes], column: str, start: int = 0, stop: int | None = None) -> Iterator[Record]:
    """Read rows with tabs between the fields and the quotes of CSV, as pandas and spreadsheets write them."""
    yield from csv_rows(file, column, delimiter="\t")


def parquet_rows(file: IO[bytes], column: str, start: int = 0, stop: int | None = None) -> Iterator[Record]:
    """Read the rows of the row groups from ``start`` until before ``stop``, numbered from 0 in the whole file."""
    number, end, label = 0, 1, "its end"
    try:
        table = _parquet(file)
        sizes = [table.metadata.row_group(group).num_rows for group in range(table.num_row_groups)]
        groups = range(len(sizes))[start:stop]
        number, end = sum(sizes[:start]), sum(sizes[: groups.stop])
        label = f"row {number}"
        bad = _no_strings(table.schema_arrow, column, end - number)
        if bad is not None:
            if number < end:
                yield Record(number, label, bad, refused)
            return
        for batch in table.iter_batches(ROWS_AT_ONCE, row_groups=[*groups], columns=[column], use_threads=False):
            for value in _values(batch.column(0)):
                yield Record(number, label, value, decoded)
                number += 1
                label = f"row {number}"
    except Exception as error:
        why = damage(error)
        if why is None:
            raise
        got = f"is damaged ({why})"
        bad = RecordError("damaged", "must be a whole Parquet file", got, "copy it again", count=max(1, end - number))
        yield Record(number, label, bad, refused)


def row_group_ranges(file: IO[bytes], column: str, size: int) -> list[tuple[int, int | None]]:
    """Return half-open ranges of row groups of Parquet, each with about ``size`` bytes of the column."""
    try:
        metadata = _parquet(file).metadata
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        held = [_size(group, column) for group in groups]
    except Exception as error:
        if damage(error) is None:
            raise
        return [(0, None)]  # reading it counts a bad record
    ranges: list[tuple[int, int | None]] = []
    begin, total = 0, 0
    for number, own in enumerate(held, 1):
        total += own
        if total >= size or number == len(held):
            ranges.append((begin, number))
            begin, total = number, 0
    return ranges


def _size(group: Any, column: str) -> int:
    """Bytes of a column in a row group."""
    columns = (group.column(number) for number in range(group.num_columns))
    return sum(own.total_uncompressed_size for own in columns if own.path_in_schema == column)


def _field(place: int, width: int) -> Callable[[list[str]], str]:
    def text(row: list[str]) -> str:
        if len(row) != width:
            expected = f"must have {width} fields in every row"
            raise RecordError("another number of fields", expected, f"has {len(row)}", "put commas into quotes")
        return decoded(row[place])

    return text


def _parquet(file: IO[bytes]) -> Any:
    return needed("pyarrow.parquet").ParquetFile(file, buffer_size=BUFFER, pre_buffer=False)


def _no_strings(schema: Any, column: str, rows: int) -> RecordError | None:
    """Error for a column that is missing or holds no strings."""
    types = needed("pyarrow.types")
    if column not in schema.names:
        return without_column(column, schema.names, rows)
    kind = schema.field(column).type
    kind = kind.value_type if types.is_dictionary(kind) else kind
    if any(check(kind) for check in (types.is_string, types.is_large_string, types.is_string_view)):
        return None
    expected = f'must hold strings in the column "{column}"'
    return RecordError("not a string", expected, f"is of type {kind}", "name another column with --column", count=rows)


def _values(array: Any) -> Iterator[object]:
    """Values of a column; bytes that are not UTF-8 become surrogates."""
    try:
        yield from array.to_pylist()
    except UnicodeDecodeError:
        for value in array.cast("binary").to_pylist():
            yield None if value is None else value.decode("utf-8", "surrogateescape")
