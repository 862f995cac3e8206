"""A corpus by the files that hold it, or by its texts, and how it is cut into splits."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from massieu.checks import UserError
from massieu.corpus.bad_records import Faults
from massieu.corpus.columns import row_group_ranges
from massieu.corpus.files import File, find_files
from massieu.corpus.lines import paragraphs
from massieu.corpus.opening import needed, opened, unreadable
from massieu.corpus.shards import SPLIT_BYTES, Document, Split, Wanted

__all__ = ["Corpus"]

FEWEST_BYTES = 1 << 15
PIECES = 512
"""Into how many a small corpus is cut, so that several workers share it and checkpoints come often."""

NAMED = 8  # paths that the name of a corpus names


class Corpus:
    r"""Documents in files, each of which counts once.

    What a file holds is told by its extension: documents between blank lines (.txt, .text, .md, or none), one JSON
    value a line (.jsonl, .ndjson), a column of a table (.csv, .tsv, .parquet); all but the last also compressed (.gz,
    .bz2, .xz, .zst).

    A document belongs to the split in which it begins. Text and JSON lines are split after so many bytes, Parquet
    between row groups; CSV and compressed files are one split each, because nobody can begin in their middle. What can
    be read only once, such as standard input, is read here, and its splits hold its text.

    Args:
        paths: files, folders (with all below), wildcards, whatever fsspec opens, or "-" for standard input.
        column: field of JSON or column of a table that holds the text.
        limit: use the first documents of the corpus only, or of the sample.
        sample: use this share of the documents, chosen by a hash of the seed and of the place of each.
        seed: another one gives another sample.
        strict: raise at the first record that cannot be read, rather than count and skip it.
        split_bytes: size of a split; None for what suits the size of the corpus.

    Example:
        >>> import fsspec
        >>> with fsspec.open("memory://sea/whale.jsonl", "w") as file:
        ...     _ = file.write('"Call me Ishmael."\n{"text": "Some years ago"}\n{"text": 7}\n')
        >>> corpus = Corpus(["memory://sea"])
        >>> faults = Faults()
        >>> [tuple(document) for split in corpus.splits() for document in split.read(faults)]
        [('Call me Ishmael.', 'whale.jsonl:1'), ('Some years ago', 'whale.jsonl:2')]
        >>> faults.counts, faults.first[0].place
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
        split_bytes: int | None = None,
    ) -> None:
        self._want(Wanted(column, sample, seed, strict), limit, SPLIT_BYTES if split_bytes is None else split_bytes)
        named = [str(path) for path in ([paths] if isinstance(paths, (str, Path)) else paths)]
        self.files = find_files(named)
        if not self.files:
            raise UserError("a corpus needs at least one path, got none; pass files or folders")
        if split_bytes is None:
            share = sum(file.size or 0 for file in self.files) // PIECES
            self.split_bytes = min(SPLIT_BYTES, max(FEWEST_BYTES, share))
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
        split_bytes: int | None = None,
    ) -> Corpus:
        """A corpus of texts in memory; its splits hold those that are in the sample.

        None stands for a record without text, which is counted as one that cannot be read.

        Example:
            >>> corpus = Corpus.from_texts(["Call me Ishmael.", "Some years ago", "never mind"], limit=2)
            >>> [document.text for split in corpus.splits() for document in split.read()]
            ['Call me Ishmael.', 'Some years ago']
        """
        if isinstance(texts, str):
            raise UserError("texts must be a list of strings, got a single string; pass [text]")
        corpus = object.__new__(cls)
        corpus._want(Wanted("text", sample, seed, strict), limit, SPLIT_BYTES if split_bytes is None else split_bytes)
        corpus.files, corpus.name, corpus._texts = [], name, texts
        return corpus

    def _want(self, wanted: Wanted, limit: int | None, split_bytes: int) -> None:
        if limit is not None and (not isinstance(limit, int) or limit < 1):
            raise UserError(f"limit must be a positive whole number of documents, got {limit!r}; leave it out for all")
        if wanted.sample is not None and not 0 < wanted.sample <= 1:
            raise UserError(f"sample must be a share above 0 and at most 1, got {wanted.sample}; 0.01 is one in 100")
        if split_bytes < 1:
            raise UserError(f"split_bytes must be positive, got {split_bytes}; {SPLIT_BYTES} is usual")
        self.wanted, self.limit, self.split_bytes = wanted, limit, split_bytes
        self._texts: Iterable[str | None] = ()
        self._made: list[Split] | None = None

    def splits(self) -> Sequence[Split]:
        """All splits in the order of the corpus, the same at each call.

        Files are not read for it, beyond the footers of Parquet; with a ``limit`` they are, until there are enough
        documents.
        """
        if self._made is None:
            every = self._pieces()
            self._made = list(every if self.limit is None else _first(every, self.limit))
        return self._made

    @property
    def num_bytes(self) -> float:
        """Bytes of the text; infinite if that is not known before it is read, or if it is not on this machine."""
        splits = self.splits()
        known = all(s.format == "memory" or not (s.compression or s.elsewhere or s.format == "parquet") for s in splits)
        return sum(split.num_bytes for split in splits) if known else math.inf

    def documents(self) -> Iterator[Document]:
        """All documents in their order; those that cannot be read are skipped."""
        for split in self.splits():
            yield from split.read()

    def check(self, num_documents: int, faults: Faults) -> None:
        """One sentence if nothing was read."""
        if num_documents:
            return
        if faults.first:
            raise UserError(faults.first[0].sentence)
        if self.wanted.sample is not None:
            raise UserError(f"the sample must hold some text, and it is empty; raise {self.wanted.sample} or the seed")
        raise UserError(f"{self.name} must hold some text, and it is empty; pass a file with at least one sentence")

    def _pieces(self) -> Iterator[Split]:
        yield from self._carried(self.name, _strings(self._texts))
        for file in self.files:
            if file.pipe:
                yield from self._carried(file.name, _raw_paragraphs(file))
            else:
                whole = Split(file.path, file.name, file.format, compression=file.compression, size=file.size)
                whole = replace(whole, wanted=self.wanted, elsewhere=file.elsewhere, version=file.version)
                for start, stop in self._ranges(file):
                    yield replace(whole, start=start, stop=stop)

    def _ranges(self, file: File) -> list[tuple[int, int | None]]:
        if file.format == "parquet":
            needed("pyarrow.parquet")
            with opened(file.path, elsewhere=file.elsewhere) as table:
                try:
                    return row_group_ranges(table, self.wanted.column, self.split_bytes)
                except Exception as error:  # whatever the place raises
                    raise unreadable(file.path, error) from error
        if file.compression or file.size is None or file.format not in ("text", "jsonl"):
            return [(0, None)]
        starts = range(0, file.size, self.split_bytes)
        return [(start, min(start + self.split_bytes, file.size)) for start in starts]

    def _carried(self, name: str, texts: Iterable[str | bytes | None]) -> Iterator[Split]:
        """Splits that hold their texts; those that nobody wants are not kept."""
        chosen = ((number, text) for number, text in enumerate(texts) if self.wanted.chooses(name, number))
        held: dict[int, str | bytes | None] = {}
        size = 0
        for number, text in chosen:
            held[number] = text
            size += len(text or "")
            if size >= self.split_bytes:
                yield self._holding(name, held)
                held, size = {}, 0
        if held:
            yield self._holding(name, held)

    def _holding(self, name: str, held: dict[int, str | bytes | None]) -> Split:
        start = min(held)
        numbers = () if max(held) - start + 1 == len(held) else tuple(held)
        return Split("", name, "memory", start, texts=tuple(held.values()), numbers=numbers, wanted=self.wanted)


def _title(path: str) -> str:
    """What a path is called in a report: its last part, and "." by the name of the folder."""
    title = Path(path).name
    if title in ("", ".."):
        title = Path(path).resolve().name
    # A URL of a host alone may begin with a password; names of files may be no UTF-8.
    return (title or path).rpartition("@")[2].encode("utf-8", "replace").decode()


def _first(splits: Iterable[Split], limit: int) -> Iterator[Split]:
    """The splits that hold the first documents; the last of them says how many of its own."""
    for split in splits:
        found = sum(1 for _ in replace(split, first=limit).read())
        limit -= found
        yield replace(split, first=found) if limit == 0 else split
        if limit == 0:
            return


def _strings(texts: Iterable[str | None]) -> Iterator[str | None]:
    for number, text in enumerate(texts):
        if text is not None and not isinstance(text, str):
            got = type(text).__name__
            raise UserError(f"texts must be strings, got {got} at number {number}; pass a list of strings")
        yield text


def _raw_paragraphs(file: File) -> Iterator[bytes]:
    """Documents of what can be read only once, not yet decoded: who reads the split counts what is wrong with them."""
    if file.path == "-" and sys.stdin is None:
        raise UserError("- is standard input, which is closed; pass a file, or pipe a text into the command")
    with contextlib.nullcontext(sys.stdin.buffer) if file.path == "-" else opened(file.path) as source:
        for record in paragraphs(source, ""):
            yield record.content
