"""Records that cannot be read: counted by reason, the first few with their places."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from massieu.accumulators.serialization import stored

__all__ = ["BadRecord", "Fault", "Faults"]

SHOWN = 10  # faults that are kept with their places
NAMED = 3  # of these, how many a sentence names


class BadRecord(Exception):  # noqa: N818  # said of the record, and caught where it is counted
    """A record cannot be read.

    Args:
        reason: in two or three words, the same for all records of the kind.
        expected: what its file must be or hold, such as "must hold one JSON value a line".
        got: what is said of the record, such as "is none".
        remedy: what to do.
        count: how many records the reason holds for.
    """

    def __init__(self, reason: str, expected: str, got: str, remedy: str = "check it", *, count: int = 1) -> None:
        super().__init__(reason)
        self.reason, self.expected, self.got, self.remedy, self.count = reason, expected, got, remedy, count


@stored()
class Fault(NamedTuple):
    """Where a record was that could not be read, and why; faults sort by file and place in it."""

    name: str
    position: int
    place: str
    reason: str
    sentence: str


@stored()
@dataclass
class Faults:
    """What could not be read in a corpus: counts by reason, and the first few places.

    Merging is associative and does not depend on the order, so that any engine reports the same.

    Attributes:
        counts: how many records each reason holds for.
        first: the first faults by file and place.

    Example:
        >>> one, other = Faults(), Faults()
        >>> one.add(Fault("b.jsonl", 0, "b.jsonl:1", "not JSON", "line 1 of b.jsonl is not JSON"))
        >>> other.add(Fault("a.jsonl", 9, "a.jsonl:2", "not UTF-8", "line 2 of a.jsonl is not UTF-8"))
        >>> one.merge(other)
        >>> one.total, [fault.place for fault in one.first]
        (2, ['a.jsonl:2', 'b.jsonl:1'])
    """

    counts: dict[str, int] = field(default_factory=dict)
    first: list[Fault] = field(default_factory=list)

    @property
    def total(self) -> int:
        """How many records could not be read."""
        return sum(self.counts.values())

    def add(self, fault: Fault, count: int = 1) -> None:
        """Count one more, or several of which this is the first."""
        self.merge(Faults({fault.reason: count}, [fault]))

    def merge(self, other: Faults) -> None:
        """Add what was found in other splits."""
        for reason, count in other.counts.items():
            self.counts[reason] = self.counts.get(reason, 0) + count
        self.first = sorted({*self.first, *other.first})[:SHOWN]

    def notes(self) -> list[str]:
        """What to say about it: nothing, or one sentence."""
        if not self.total:
            return []
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(self.counts.items()))
        places = ", ".join(f"{fault.place} ({fault.reason})" for fault in self.first[:NAMED])
        records = "1 record" if self.total == 1 else f"{self.total:,} records"
        return [f"{records} of the text could not be read and did not count ({reasons}); the first: {places}."]

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        first = [fault._asdict() for fault in self.first]
        return {"total": self.total, "reasons": dict(sorted(self.counts.items())), "first": first}
