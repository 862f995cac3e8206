"""Training and held-out texts, and the passages to inspect."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from massieu.checks import UserError

__all__ = ["SourceText", "excerpt", "read_documents", "split"]

PASSAGES_PER_TEXT = 4


class SourceText(NamedTuple):
    """Chapter of the novel, speech, or passage of one of them under its name."""

    name: str
    text: str

    @property
    def is_chapter(self) -> bool:
        return self.name.startswith("chapter")


def read_documents(moby: Path, speeches: Path, last_year: int) -> list[SourceText]:
    """Return the chapters in the order of the book, then the speeches by year."""
    chapters = sorted(moby.glob("chapter_*.txt"), key=lambda path: int(path.stem.split("_")[1]))
    messages = [path for path in sorted(speeches.glob("[0-9]*.txt")) if int(path.stem[:4]) <= last_year]
    if not chapters or not messages:
        raise UserError(
            f"expected chapter_*.txt in {moby} and YEAR_*.txt in {speeches}, found {len(chapters)} and {len(messages)};"
            " pass the data folders of the two unpacked packages"
        )
    return [SourceText(path.stem, clean(path.read_text(encoding="utf-8"))) for path in (*chapters, *messages)]


def clean(text: str) -> str:
    r"""Return text with straight quotes and hyphens, single spaces, and one blank line between paragraphs.

    Example:
        >>> clean(" “Aye,”  said\nhe.\n \n\nNo. ")
        '"Aye," said he.\n\nNo.'
    """
    # U+0002 occurs once in the speeches, between two words.
    text = text.translate(str.maketrans("’“”‑–\x02", '\'""-- '))
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text.strip()))


def split(documents: list[SourceText], every: int) -> tuple[list[SourceText], list[SourceText]]:
    """Return training and held-out documents; the latter are the middle ones of each run of ``every``.

    Example:
        >>> learned, held_out = split([SourceText(name, "") for name in "abcdef"], every=3)
        >>> [document.name for document in held_out], len(learned)
        (['b', 'e'], 4)
    """
    held_out = documents[every // 2 :: every]
    return [document for document in documents if document not in held_out], held_out


def excerpt(
    held_out: list[SourceText], learned: list[SourceText], count_tokens: Callable[[str], int], passages_of_each: int
) -> list[SourceText]:
    """Return passages to inspect, equally many of novel and speeches, spread evenly over the held-out documents.

    Passages that share twelve consecutive words with the training text (formulas of address, quotations) are excluded.
    """
    found = {document: list(passages(document.text, count_tokens)) for document in held_out}
    held_out_runs = {run for texts in found.values() for text in texts for run in word_runs(text)}
    shared = {run for document in learned for run in word_runs(document.text) if run in held_out_runs}
    chapters: list[SourceText] = []
    speeches: list[SourceText] = []
    for document, texts in found.items():
        fresh = [SourceText(document.name, text) for text in texts if shared.isdisjoint(word_runs(text))]
        (chapters if document.is_chapter else speeches).extend(spread(fresh, PASSAGES_PER_TEXT))
    return spread(chapters, passages_of_each) + spread(speeches, passages_of_each)


def spread(passages: list[SourceText], count: int) -> list[SourceText]:
    """Return at most ``count`` passages, at equal distances."""
    count = min(count, len(passages))
    return [passages[number * len(passages) // count] for number in range(count)]


def passages(text: str, count_tokens: Callable[[str], int], fewest: int = 160, most: int = 250) -> Iterator[str]:
    """Yield runs of whole sentences of ``fewest`` to ``most`` tokens, without overlap, each within one paragraph.

    Example:
        >>> list(passages("One. Two is longer. Three.", lambda text: len(text.split()), fewest=3, most=5))
        ['One. Two is longer.']
    """
    for paragraph in text.split("\n\n"):
        passage = ""
        for sentence in re.split(r"(?<=[.!?]) (?=[A-Z])", paragraph):
            passage = f"{passage} {sentence}".strip()
            length = count_tokens(passage)
            if fewest <= length <= most:
                yield passage
            if length >= fewest:
                passage = ""


def word_runs(text: str, length: int = 12) -> Iterator[tuple[str, ...]]:
    """Yield every run of ``length`` words, in lower case and without punctuation.

    Example:
        >>> list(word_runs("Call me Ishmael.", length=2))
        [('call', 'me'), ('me', 'ishmael')]
    """
    words = re.findall(r"[a-z]+", text.lower())
    return zip(*(words[start:] for start in range(length)), strict=False)
