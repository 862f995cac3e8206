"""What was read and heard, in numbers and names that add up in any order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from massieu.taps import Tap

__all__ = ["Counts", "Heard", "Overlap"]

SKETCHED = 1024
"""Documents that are remembered by their hashes, to see whether two runs have read the same ones."""

MODULUS = 1 << 256

ENOUGH = 30
"""Documents that a share needs to be more than chance."""


class Overlap(NamedTuple):
    """Which documents of two runs are in both, as far as it can be seen.

    Attributes:
        common: how many of those that were compared.
        compared: of the run that has fewer of them.
        whole: whether that is all of its documents.
    """

    common: int
    compared: int
    whole: bool

    @property
    def share(self) -> float:
        """Of the documents that were compared; none of none."""
        return self.common / max(1, self.compared)

    @property
    def known(self) -> bool:
        """Whether the share says something about all of the documents."""
        return self.whole or self.compared >= ENOUGH


@dataclass
class Counts:
    """How much was read, and a digest of it that depends neither on the order nor on how the text was split.

    Attributes:
        documents: how many, with those that are empty.
        blank: how many of them hold no text.
        passages: pieces that the model reads at once.
        tokens: of all passages, without padding.
        counted: tokens that are not special.
        long: documents with more tokens than a passage has, which were cut, or skipped and are not among ``documents``.
        unknown: tokens that stand for words that the tokenizer does not know.
        digest: sum of the SHA-256 hashes of the documents, modulo 2^256: it adds up in any order, and a document that
            occurs twice counts twice. It tells texts apart; it is no proof against someone who forges one.
        sketch: the smallest hashes of documents, 64 bits of each, ascending.

    Example:
        >>> one, other = Counts(), Counts()
        >>> one.add(["a" * 64, "b" * 64])
        >>> other.add(["b" * 64, "a" * 64])
        >>> one == other
        True
    """

    documents: int = 0
    blank: int = 0
    passages: int = 0
    tokens: int = 0
    counted: int = 0
    long: int = 0
    unknown: int = 0
    digest: int = 0
    sketch: list[int] = field(default_factory=list)

    def add(self, origins: Iterable[str]) -> None:
        """Count documents by their hashes, SHA-256 in hexadecimal digits."""
        hashes = [int(origin, 16) for origin in origins]
        self.documents += len(hashes)
        self.digest = (self.digest + sum(hashes)) % MODULUS
        self.sketch = _smallest(self.sketch, [number >> 192 for number in hashes])

    def merge(self, other: Counts) -> None:
        """Add what was read elsewhere."""
        for name in ("documents", "blank", "passages", "tokens", "counted", "long", "unknown"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.digest = (self.digest + other.digest) % MODULUS
        self.sketch = _smallest(self.sketch, other.sketch)

    @property
    def sha256(self) -> str:
        """The digest in hexadecimal digits."""
        return f"{self.digest:064x}"

    def shared(self, other: Counts) -> Overlap:
        """How many documents of one are in the other too.

        The smallest hashes are a sample of the documents, the same sample wherever they are read. Up to the smaller
        of the two largest ones both sketches are complete, so there they are compared. Of a run that is much smaller
        than the other, few or none lie there.

        Example:
            >>> one, other = Counts(sketch=[1, 3, 5, 8]), Counts(sketch=[3, 4, 5])
            >>> one.shared(other)
            Overlap(common=2, compared=3, whole=True)
        """
        full = [each.sketch[-1] for each in (self, other) if len(each.sketch) == SKETCHED]
        edge = min(full, default=1 << 64)
        mine, theirs = ({number for number in each.sketch if number <= edge} for each in (self, other))
        return Overlap(len(mine & theirs), min(len(mine), len(theirs)), whole=not full)


def _smallest(first: list[int], second: list[int]) -> list[int]:
    if len(first) == SKETCHED and all(number >= first[-1] for number in second):
        return first  # as nearly always, once many documents were read
    return sorted({*first, *second})[:SKETCHED]


@dataclass
class Heard:
    """Which attention modules of the model ran and were heard.

    Attributes:
        expected: paths of the attention modules, in the order of the model.
        heard: those that were heard.
        ran: those that ran.
        linear: those whose attention has no softmax.
        notes: sentences about how the model was heard.
    """

    expected: list[str] = field(default_factory=list)
    heard: set[str] = field(default_factory=set)
    ran: set[str] = field(default_factory=set)
    linear: set[str] = field(default_factory=set)
    notes: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, tap: Tap) -> Heard:
        """What a tap heard."""
        ran = set(tap.expected) - set(tap.idle)
        return cls(tap.expected, set(tap.observed), ran, set(tap.linear), set(tap.notes))

    def merge(self, other: Heard) -> None:
        """Add what was heard on other texts."""
        self.expected = [*self.expected, *(name for name in other.expected if name not in self.expected)]
        self.heard, self.ran = self.heard | other.heard, self.ran | other.ran
        self.linear, self.notes = self.linear | other.linear, self.notes | other.notes

    @property
    def missing(self) -> list[str]:
        """Modules that should have a softmax and were not heard."""
        return [name for name in self.expected if name not in self.heard and name not in self.linear]

    @property
    def idle(self) -> list[str]:
        """Modules that did not run."""
        return [name for name in self.expected if name not in self.ran]

    @property
    def sentence(self) -> str:
        """How many of the attention modules were heard."""
        sentence = f"observed {len(self.heard)} of {len(self.expected)} attention modules"
        linear = [name for name in self.expected if name in self.linear - self.heard]
        if linear:
            sentence += f"; {', '.join(linear)} without softmax"
        if self.idle:
            sentence += f"; {len(self.idle)} did not run"
        return sentence
