"""Counts and digests of the documents read, which add up in any order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from massieu.accumulators.serialization import stored

__all__ = ["DocumentCounts", "Overlap"]

SKETCHED = 1024
"""Number of hashes kept to estimate the overlap of two runs."""

MODULUS = 1 << 256

ENOUGH = 30
"""Fewest documents of a meaningful share."""


class Overlap(NamedTuple):
    """Documents common to two runs, of those that were compared.

    Attributes:
        common: number of documents in both runs.
        compared: number of documents compared, in the run that has fewer of them.
        whole: whether that is all of its documents.
    """

    common: int
    compared: int
    whole: bool

    @property
    def share(self) -> float:
        """Share of the compared documents that are common."""
        return self.common / max(1, self.compared)

    @property
    def known(self) -> bool:
        """True if the share holds for all of the documents."""
        return self.whole or self.compared >= ENOUGH


@stored()
@dataclass
class DocumentCounts:
    """Counts of the text read, and a digest of it that is the same for any order and any shards.

    Attributes:
        documents: number of documents, empty ones included.
        blank: number of documents without text.
        passages: number of passages.
        tokens: tokens of all passages, without padding.
        counted: tokens that are not special.
        long: documents longer than a passage, which were cut, or skipped and are not among ``documents``.
        unknown: unknown-word tokens.
        digest: sum of the SHA-256 hashes of the documents, modulo 2^256: the order does not matter, and a document that
            occurs twice counts twice. It tells texts apart, but can be forged.
        sketch: the smallest hashes of documents, 64 bits of each, ascending.

    Example:
        >>> one, other = DocumentCounts(), DocumentCounts()
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
        """Count documents, given their SHA-256 hashes in hexadecimal digits."""
        hashes = [int(origin, 16) for origin in origins]
        self.documents += len(hashes)
        self.digest = (self.digest + sum(hashes)) % MODULUS
        self.sketch = _smallest(self.sketch, [number >> 192 for number in hashes])

    def merge(self, other: DocumentCounts) -> None:
        """Add the counts of other shards."""
        for name in ("documents", "blank", "passages", "tokens", "counted", "long", "unknown"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.digest = (self.digest + other.digest) % MODULUS
        self.sketch = _smallest(self.sketch, other.sketch)

    @property
    def sha256(self) -> str:
        """The digest in hexadecimal digits."""
        return f"{self.digest:064x}"

    def shared(self, other: DocumentCounts) -> Overlap:
        """Estimate the documents common to both, from the sketches.

        The smallest hashes are a sample of the documents, the same one in every run. Up to the smaller maximum of the
        two sketches both are complete and are compared. Of a run that is much smaller than the other, few or none lie
        there.

        Example:
            >>> one, other = DocumentCounts(sketch=[1, 3, 5, 8]), DocumentCounts(sketch=[3, 4, 5])
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
