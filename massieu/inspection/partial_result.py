"""What some pieces of a text gave: sums and counts that merge, whoever read the pieces, in any order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from massieu.accumulators.serialization import stored
from massieu.checks import UserError
from massieu.corpus.bad_records import BadRecords
from massieu.corpus.document_counts import DocumentCounts
from massieu.inspection.heads import HeadStatistics
from massieu.inspection.layer_statistics import LayerSums
from massieu.inspection.sampled_passages import PassageSample
from massieu.taps import Tap

__all__ = ["FEWEST_DOCUMENTS", "Heard", "Identity", "Part", "SCHEMA", "merge_parts"]

SCHEMA = "massieu.part/4"
FEWEST_DOCUMENTS = 8  # with fewer, standard errors are taken by passage


@stored()
@dataclass(frozen=True)
class Identity:
    """What parts must have in common to be merged.

    Attributes:
        model: of :func:`~massieu.models.fingerprint.model_fingerprint`.
        tokenizer: of :func:`~massieu.models.fingerprint.tokenizer_fingerprint`; None where there is no text.
        options: those that figures depend on, by their names.
        schema: what a part consists of.
        name: what the model was called; it may differ, as do the folders of two machines.
        revision: of the model, if it has one.
        dtype: of its weights, to load it again.
    """

    model: str
    tokenizer: str | None
    options: Mapping[str, Any]
    schema: str = SCHEMA
    name: str | None = field(default=None, compare=False)
    revision: str | None = field(default=None, compare=False)
    dtype: str | None = field(default=None, compare=False)

    def difference(self, other: Identity) -> str | None:
        """In what another one differs, as the end of a sentence; None if in nothing.

        Example:
            >>> Identity("a" * 64, None, {"rows": 32}).difference(Identity("a" * 64, None, {"rows": None}))
            'the option rows is 32 in one and None in the other'
        """
        if self.schema != other.schema:
            return f"the schema is {self.schema} in one and {other.schema} in the other"
        for what in ("model", "tokenizer"):
            mine, theirs = getattr(self, what), getattr(other, what)
            if mine != theirs:
                names = (f"{each.name or 'a model'} ({str(own)[:12]})" for each, own in ((self, mine), (other, theirs)))
                return f"the {what} differs: {' and '.join(names)}"
        for option in sorted({*self.options, *other.options}):
            mine, theirs = self.options.get(option), other.options.get(option)
            if mine != theirs:
                return f"the option {option} is {mine} in one and {theirs} in the other"
        return None


@stored()
@dataclass
class Part:
    """What some pieces of a text gave.

    Attributes:
        identity: of which model, read how.
        counts: documents and tokens, and a digest of the text.
        heard: attention modules that were heard.
        heads: sums for the heads table.
        layers: sums for the layers table; None if only heads were looked at.
        layers_by_passage: the same with each passage as a document of its own, while there are so few documents that
            standard errors may have to be taken by passage.
        passages: the few on which experiments run the model again at the end.
        faults: records of the text that could not be read.
        sources: what the texts are called.
        versions: of massieu and torch that have read them.
    """

    identity: Identity
    counts: DocumentCounts
    heard: Heard
    heads: HeadStatistics
    layers: LayerSums | None
    layers_by_passage: LayerSums | None
    passages: PassageSample
    faults: BadRecords = field(default_factory=BadRecords)
    sources: set[str] = field(default_factory=set)
    versions: set[str] = field(default_factory=set)

    @classmethod
    def empty(cls, identity: Identity) -> Part:
        """A part of no text, which changes nothing where it is merged."""
        whole = identity.options.get("experiments") == "default"
        heads = HeadStatistics(identity.options.get("rows"), by_passage=True)
        layers, others = (LayerSums(), LayerSums()) if whole else (None, None)
        return cls(identity, DocumentCounts(), Heard(), heads, layers, others, PassageSample())

    @property
    def by_passage(self) -> bool:
        """Whether standard errors are taken by passage: there are too few documents, and it was kept."""
        return self.heads.by_passage

    def forget_passages(self) -> None:
        """Take standard errors by document from now on."""
        self.heads.forget_passages()
        self.layers_by_passage = None

    def identity_like(self, other: Identity) -> Identity:
        """Identity of this part, with the other treatment of long documents if it has none of them."""
        how = other.options.get("long_documents")
        if self.counts.long or how is None:
            return self.identity
        return replace(self.identity, options={**self.identity.options, "long_documents": how})

    def difference(self, other: Part) -> str | None:
        """In what another one differs so that they cannot be merged, as the end of a sentence; None if in nothing."""
        mine = self.identity_like(other.identity)
        return mine.difference(other.identity_like(mine))

    def __reduce__(self) -> tuple[Any, tuple[bytes]]:
        """As the bytes of its file, which are fewer than those of a pickle, and in one piece."""
        from massieu.inspection.partial_files import part_from_bytes, part_to_bytes

        return part_from_bytes, (part_to_bytes(self),)

    def merge(self, other: Part) -> None:
        """Add what other pieces gave; the other part stays as it is."""
        difference = self.difference(other)
        if difference is not None:
            raise UserError(
                f"parts must come from one model that reads in one way, but {difference}; merge those that agree"
            )
        self._check_heads(other)
        if other.counts.long:
            self.identity = self.identity_like(other.identity)
        self.counts.merge(other.counts)
        self.heard.merge(other.heard)
        self.passages.merge(other.passages)
        self.faults.merge(other.faults)
        self.sources, self.versions = self.sources | other.sources, self.versions | other.versions
        if self.counts.documents >= FEWEST_DOCUMENTS:
            self.forget_passages()
        self.heads.merge(other.heads)
        if self.layers is not None and other.layers is not None:
            self.layers.merge(other.layers)
        if not self.by_passage or other.layers_by_passage is None:
            self.layers_by_passage = None
        elif self.layers_by_passage is not None:
            self.layers_by_passage.merge(other.layers_by_passage)

    def _check_heads(self, other: Part) -> None:
        """Refuse sums of other numbers of heads, which torch would broadcast."""
        for row, layer in other.heads.layers.items():
            own = self.heads.layers.get(row, layer)
            if own.heads != layer.heads:
                raise UserError(
                    f"parts of one model must have the same heads, got {own.heads} and {layer.heads} in layer"
                    f" {row[1]} of the {row[0]}; one of them is damaged, inspect again"
                )


def merge_parts(parts: Iterable[Part]) -> Part:
    """One part of several, which stay as they are; in any order and any grouping the result is the same.

    DocumentCounts are the same to the last bit, sums to their rounding.

    Args:
        parts: at least one; they are taken one after the other, so that an iterator need not hold them all.
    """
    merged: Part | None = None
    for part in parts:
        if merged is None:
            merged = Part.empty(part.identity)
        merged.merge(part)
        del part  # before the next one is there
    if merged is None:
        raise UserError("merge_parts needs at least one part, got none; read some text first")
    return merged


@stored()
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
