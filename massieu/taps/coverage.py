"""Coverage of a model by a tap: its attention modules, and those that ran and were observed."""

from __future__ import annotations

from dataclasses import dataclass, field

from massieu.accumulators.serialization import stored

__all__ = ["Coverage"]


@stored()
@dataclass
class Coverage:
    """Attention modules of a model, by path, and those that ran and were observed; coverages of two texts merge.

    Attributes:
        expected: attention modules, in the order of the model.
        observed: modules of which a call was observed.
        ran: modules that ran.
        linear: modules whose attention has no softmax.
        notes: sentences about changes to the model inside the tap.

    Example:
        >>> found = Coverage(["a", "b", "c"], observed={"a"}, ran={"a", "c"})
        >>> found.sentence, found.missing
        ('observed 1 of 3 attention modules; 1 did not run', ['b', 'c'])
    """

    expected: list[str] = field(default_factory=list)
    observed: set[str] = field(default_factory=set)
    ran: set[str] = field(default_factory=set)
    linear: set[str] = field(default_factory=set)
    notes: set[str] = field(default_factory=set)

    def merge(self, other: Coverage) -> None:
        """Add the coverage of another text."""
        self.expected = [*self.expected, *(name for name in other.expected if name not in self.expected)]
        self.observed, self.ran = self.observed | other.observed, self.ran | other.ran
        self.linear, self.notes = self.linear | other.linear, self.notes | other.notes

    @property
    def missing(self) -> list[str]:
        """Expected modules with softmax attention that were not observed."""
        return [name for name in self.expected if name not in self.observed and name not in self.linear]

    @property
    def idle(self) -> list[str]:
        """Expected modules that did not run."""
        return [name for name in self.expected if name not in self.ran]

    @property
    def sentence(self) -> str:
        """Number of attention modules observed, as a sentence."""
        sentence = f"observed {len(self.observed)} of {len(self.expected)} attention modules"
        linear = [name for name in self.expected if name in self.linear - self.observed]
        if linear:
            sentence += f"; {', '.join(linear)} without softmax"
        if self.idle:
            sentence += f"; {len(self.idle)} did not run"
        return sentence
