"""Corpus of files or of texts in memory, and its cut into shards."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from massieu.checks import UserError, check_count
from massieu.corpus.bad_records import BadRecords
from massieu.corpus.columns import row_group_ranges
from massieu.corpus.files import File, find_files
from massieu.corpus.lines import paragraphs
from massieu.corpus.opening import needed, opened, unreadable
from massieu.corpus.shards import SHARD_BYTES, Document, RecordFilter, Shard, check_text

__all__ = ["Corpus"]

FEWEST_BYTES = 1 << 15
SHARDS = 512
"""Shards of a small corpus, so that several workers share it and checkpoints come often."""

NAMED = 8  # paths in the name of a corpus


class Corpus:
    r"""Documents in files, each counted once.

    The extension of a file gives its format: documents between blank lines (.txt, .text, .md, or none), one JSON
    value a line (.jsonl, .ndjson), a column of a table (.csv, .tsv, .parquet); all but the last also compressed (.gz,
    .bz2, .xz, .zst).

    A document belongs to the shard in which it begins. Text and JSON lines are cut every ``shard_bytes``, Parquet
    between row groups; CSV and compressed files are one shard each, since they can be read from their beginning only.
    Standard input and pipes can be read only once: they are read here, and their shards hold the text.

    Args:
        paths: files, folders (searched to the bottom), wildcards, URLs of fsspec, or "-" for standard input.
        column: field of JSON or column of a table that holds the text.
        limit: use the first documents of the corpus only, or of the sample.
        sample: use this share of the documents, chosen by a hash of the seed and of the place of each.
        seed: of the sample.
        strict: raise at the first bad record, rather than count and skip it.
        shard_bytes: size of a shard; None for a size that suits the corpus.

    Example:
        >>> import fsspec
        >>> with fsspec.open("memory://sea/whale.jsonl", "w") as file:
        ...     _ = file.write('"Call me Ishmael."\n{"text": "Some years ago"}\n{"text": 7}\n')
        >>> corpus = Corpus(["memory://sea"])
        >>> bad_records = BadRecords()
        >>> [tuple(document) for shard in corpus.shards() for document in shard.read(bad_records)]
        [('Call me Ishmael.', 'whale.jsonl:1'), ('Some years ago', 'whale.jsonl:2')]
        >>> bad_records.counts, bad_records.first[0].place
        ({'not a string': 1}, 'whale.jsonl:3')
    """

    def __init__(
        self,
        paths: str | Path | Sequence[str | Path],
        column: str = "text",
        *,
        limit: int | None = None,
        sample: float | None = None,
        seed: int = 0,
        strict: bool = False,
        shard_bytes: int | None = None,
    ) -> None:
        self._set(RecordFilter(column, sample, seed, strict), limit, shard_bytes)
        named = [str(path) for path in ([paths] if isinstance(paths, (str, Path)) else paths)]
        self.files = find_files(named)
        if not self.files:
            raise UserError("a corpus needs at least one path, got none; pass files or folders")
        if shard_bytes is None:
            share = sum(file.size or 0 for file in self.files) // SHARDS
            self.shard_bytes = min(SHARD_BYTES, max(FEWEST_BYTES, share))
        titles = list(dict.fromkeys(_title(path) for path in named))
        self.name = ", ".join([*titles[:NAMED], *["..."] * (len(titles) > NAMED)])

    @classmethod
    def from_texts(
        cls,
        texts: Iterable[str | None],
        name: str = "texts",
        *,
        limit: int | None = None,
        sample: float | None = None,
        seed: int = 0,
        strict: bool = False,
        shard_bytes: int | None = None,
    ) -> Corpus:
        """Return a corpus of texts in memory; its shards hold those in the sample, and None is a bad record.

        Example:
            >>> corpus = Corpus.from_texts(["Call me Ishmael.", "Some years ago", "never mind"], limit=2)
            >>> [document.text for document in corpus.documents()]
            ['Call me Ishmael.', 'Some years ago']
        """
        if isinstance(texts, str):
            raise UserError("texts must be a list of strings, got a single string; pass [text]")
        corpus = object.__new__(cls)
        corpus._set(RecordFilter("text", sample, seed, strict), limit, shard_bytes)
        corpus.files, corpus.name, corpus._texts = [], name, texts
        return corpus

    def _set(self, filter: RecordFilter, limit: int | None, shard_bytes: int | None) -> None:
        self.limit = limit if limit is None else check_count(limit, "limit", remedy="leave it out for all documents")
        if filter.sample is not None and not 0 < filter.sample <= 1:
            raise UserError(f"sample must be a share above 0 and at most 1, got {filter.sample}; 0.01 is one in 100")
        self.shard_bytes = SHARD_BYTES if shard_bytes is None else check_count(shard_bytes, "shard_bytes")
        self.filter = filter
        self._texts: Iterable[str | None] = ()
        self._shards: list[Shard] | None = None

    def shards(self) -> Sequence[Shard]:
        """Return all shards in the order of the corpus, the same at each call.

        Files are not read for it, beyond the footers of Parquet; with a ``limit`` they are read up to the last
        document.
        """
        if self._shards is None:
            every = self._cut()
            self._shards = list(every if self.limit is None else _first(every, self.limit))
        return self._shards

    @property
    def num_bytes(self) -> float:
        """Bytes of the text; infinite if unknown before it is read, or if the files are not on this machine."""
        shards = self.shards()
        known = all(s.format == "memory" or not (s.compression or s.elsewhere or s.format == "parquet") for s in shards)
        return sum(shard.num_bytes for shard in shards) if known else math.inf

    def documents(self) -> Iterator[Document]:
        """Read all documents in order; bad records are skipped."""
        for shard in self.shards():
            yield from shard.read()

    def check(self, num_documents: int, bad_records: BadRecords) -> None:
        """Raise if nothing was read."""
        if num_documents:
            return
        if bad_records.first:
            raise UserError(bad_records.first[0].sentence)
        if self.filter.sample is not None:
            raise UserError(f"the sample must hold some text, and it is empty; raise {self.filter.sample} or the seed")
        raise UserError(f"{self.name} must hold some text, and it is empty; pass a file with at least one sentence")

    def _cut(self) -> Iterator[Shard]:
        yield from self._in_memory(self.name, _strings(self._texts))
        for file in self.files:
            if file.pipe:
                yield from self._in_memory(file.name, _raw_paragraphs(file))
            else:
                whole = Shard(file.path, file.name, file.format, compression=file.compression, size=file.size)
                whole = replace(whole, filter=self.filter, elsewhere=file.elsewhere, version=file.version)
                for start, stop in self._ranges(file):
                    yield replace(whole, start=start, stop=stop)

    def _ranges(self, file: File) -> list[tuple[int, int | None]]:
        if file.format == "parquet":
            needed("pyarrow.parquet")
            with opened(file.path, elsewhere=file.elsewhere) as table:
                try:
                    return row_group_ranges(table, self.filter.column, self.shard_bytes)
                except Exception as error:  # any error of the file system
                    raise unreadable(file.path, error) from error
        if file.compression or file.size is None or file.format not in ("text", "jsonl"):
            return [(0, None)]
        starts = range(0, file.size, self.shard_bytes)
        return [(start, min(start + self.shard_bytes, file.size)) for start in starts]

    def _in_memory(self, name: str, texts: Iterable[str | bytes | None]) -> Iterator[Shard]:
        """Shards that hold the texts of the sample."""

        def shard() -> Shard:
            start = min(held)
            numbers = () if max(held) - start + 1 == len(held) else tuple(held)
            return Shard("", name, "memory", start, texts=tuple(held.values()), numbers=numbers, filter=self.filter)

        held: dict[int, str | bytes | None] = {}
        size = 0
        for number, text in enumerate(texts):
            if self.filter.chooses(name, number):
                held[number] = text
                size += len(text or "")
            if size >= self.shard_bytes:
                yield shard()
                held, size = {}, 0
        if held:
            yield shard()


def _title(path: str) -> str:
    """Name of a path in a report: its last part, and for "." the name of the folder."""
    title = Path(path).name
    if title in ("", ".."):
        title = Path(path).resolve().name
    # A URL of a host alone may begin with a password; names of files may be no UTF-8.
    return (title or path).rpartition("@")[2].encode("utf-8", "replace").decode()


def _first(shards: Iterable[Shard], limit: int) -> Iterator[Shard]:
    """The shards of the first documents; the last one is limited to its share of them."""
    for shard in shards:
        found = sum(1 for _ in replace(shard, first=limit).read())
        limit -= found
        yield replace(shard, first=found) if limit == 0 else shard
        if limit == 0:
            return


def _strings(texts: Iterable[str | None]) -> Iterator[str | None]:
    for number, text in enumerate(texts):
        if text is not None:
            check_text(text, number)
        yield text


def _raw_paragraphs(file: File) -> Iterator[bytes]:
    """Documents of a pipe, not yet decoded, so that bad ones are counted when the shard is read."""
    if file.path == "-" and sys.stdin is None:
        raise UserError("- is standard input, which is closed; pass a file, or pipe a text into the command")
    with contextlib.nullcontext(sys.stdin.buffer) if file.path == "-" else opened(file.path) as source:
        for record in paragraphs(source, ""):
            yield record.content
