"""Bad records: those that cannot be read, counted by reason, the first few with their places."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from massieu.accumulators.serialization import stored

__all__ = ["RecordError", "BadRecord", "BadRecords"]

SHOWN = 10  # bad records kept with their places
NAMED = 3  # of these, named in a sentence


class RecordError(Exception):
    """A record that cannot be read.

    Args:
        reason: two or three words, the same for all records of the kind.
        expected: content expected of the file, such as "must hold one JSON value a line".
        got: content of the record, such as "is none".
        remedy: instruction for the user.
        count: number of records concerned.
    """

    def __init__(self, reason: str, expected: str, got: str, remedy: str = "check it", *, count: int = 1) -> None:
        super().__init__(reason)
        self.reason, self.expected, self.got, self.remedy, self.count = reason, expected, got, remedy, count


@stored()
@dataclass(frozen=True, order=True)
class BadRecord:
    """Place of a record that could not be read, and the reason; ordered by file and position."""

    name: str
    position: int
    place: str
    reason: str
    sentence: str


@stored()
@dataclass
class BadRecords:
    """Bad records of a corpus: counts by reason, and the first few places.

    Merging is associative and does not depend on the order, so that any engine reports the same.

    Attributes:
        counts: number of records by reason.
        first: the first bad records by file and position.

    Example:
        >>> one, other = BadRecords(), BadRecords()
        >>> one.add(BadRecord("b.jsonl", 0, "b.jsonl:1", "not JSON", "line 1 of b.jsonl is not JSON"))
        >>> other.add(BadRecord("a.jsonl", 9, "a.jsonl:2", "not UTF-8", "line 2 of a.jsonl is not UTF-8"))
        >>> one.merge(other)
        >>> one.total, [bad.place for bad in one.first]
        (2, ['a.jsonl:2', 'b.jsonl:1'])
    """

    counts: dict[str, int] = field(default_factory=dict)
    first: list[BadRecord] = field(default_factory=list)

    @property
    def total(self) -> int:
        """Number of bad records."""
        return sum(self.counts.values())

    def add(self, bad: BadRecord, count: int = 1) -> None:
        """Count one more, or ``count`` of which this is the first."""
        self.merge(BadRecords({bad.reason: count}, [bad]))

    def merge(self, other: BadRecords) -> None:
        """Add the bad records of other shards."""
        for reason, count in other.counts.items():
            self.counts[reason] = self.counts.get(reason, 0) + count
        self.first = sorted({*self.first, *other.first})[:SHOWN]

    def notes(self) -> list[str]:
        """Return one sentence on the bad records, none without any."""
        if not self.total:
            return []
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(self.counts.items()))
        places = ", ".join(f"{bad.place} ({bad.reason})" for bad in self.first[:NAMED])
        records = "1 record" if self.total == 1 else f"{self.total:,} records"
        return [f"{records} of the text could not be read and did not count ({reasons}); the first: {places}."]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        first = [asdict(bad) for bad in self.first]
        return {"total": self.total, "reasons": dict(sorted(self.counts.items())), "first": first}
