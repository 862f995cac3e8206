"""Partial result of an inspection: sums and counts of some shards that merge, read by any process in any order."""

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
from massieu.taps.coverage import Coverage

__all__ = ["FEWEST_DOCUMENTS", "Identity", "PartialResult", "SCHEMA", "merge_partials"]

SCHEMA = "massieu.partial/5"
FEWEST_DOCUMENTS = 8  # with fewer, standard errors are taken by passage


@stored()
@dataclass(frozen=True)
class Identity:
    """Model and options that partial results must share to be merged.

    Attributes:
        model: of :func:`~massieu.models.fingerprint.model_fingerprint`.
        tokenizer: of :func:`~massieu.models.fingerprint.tokenizer_fingerprint`; None for a model that reads tensors.
        options: options that affect results, by name.
        schema: of the file of a partial result.
        name: name of the model; it may differ, as do the folders of two machines.
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
        """First difference to another identity, as the end of a sentence; None if there is none.

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
class PartialResult:
    """Mergeable partial result of an inspection.

    Attributes:
        identity: model and options.
        counts: documents and tokens, and a digest of the text.
        coverage: attention modules that were observed.
        heads: sums for the heads table.
        layers: sums for the layers table; None if only heads were inspected.
        layers_by_passage: the same with each passage as a document of its own, while there are too few documents for
            standard errors by document.
        passages: sampled passages on which experiments run the model again at the end.
        bad_records: records of the text that could not be read.
        sources: names of the texts.
        versions: of massieu and torch that have read them.
    """

    identity: Identity
    counts: DocumentCounts
    coverage: Coverage
    heads: HeadStatistics
    layers: LayerSums | None
    layers_by_passage: LayerSums | None
    passages: PassageSample
    bad_records: BadRecords = field(default_factory=BadRecords)
    sources: set[str] = field(default_factory=set)
    versions: set[str] = field(default_factory=set)

    @classmethod
    def empty(cls, identity: Identity) -> PartialResult:
        """Partial result of no text, the neutral element of :meth:`merge`."""
        whole = identity.options.get("experiments") == "default"
        heads = HeadStatistics(identity.options.get("rows"), by_passage=True)
        layers, others = (LayerSums(), LayerSums()) if whole else (None, None)
        return cls(identity, DocumentCounts(), Coverage(), heads, layers, others, PassageSample())

    @property
    def by_passage(self) -> bool:
        """True if standard errors are taken by passage, since there are too few documents."""
        return self.heads.by_passage

    def drop_passages(self) -> None:
        """Take standard errors by document from now on."""
        self.heads.drop_passages()
        self.layers_by_passage = None

    def identity_like(self, other: Identity) -> Identity:
        """Identity of this partial result, with the other treatment of long documents if it holds none of them."""
        treatment = other.options.get("long_documents")
        if self.counts.long or treatment is None:
            return self.identity
        return replace(self.identity, options={**self.identity.options, "long_documents": treatment})

    def difference(self, other: PartialResult) -> str | None:
        """First difference that forbids merging, as the end of a sentence; None if there is none."""
        mine = self.identity_like(other.identity)
        return mine.difference(other.identity_like(mine))

    def to_bytes(self) -> bytes:
        """Content of its file, in which it travels between processes."""
        from massieu.inspection.partial_files import partial_to_bytes

        return partial_to_bytes(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> PartialResult:
        """Inverse of :meth:`to_bytes`; runs no code from the data."""
        from massieu.inspection.partial_files import partial_from_bytes

        return partial_from_bytes(data)

    def __reduce__(self) -> tuple[Any, tuple[bytes]]:
        """Pickle as the bytes of the file, which are fewer than those of a pickle."""
        return PartialResult.from_bytes, (self.to_bytes(),)

    def merge(self, other: PartialResult) -> None:
        """Add the partial result of other shards, which stays as it is."""
        difference = self.difference(other)
        if difference is not None:
            raise UserError(
                "partial results must come from one model with the same options, but"
                f" {difference}; merge those that agree"
            )
        self._check_heads(other)
        if other.counts.long:
            self.identity = self.identity_like(other.identity)
        self.counts.merge(other.counts)
        self.coverage.merge(other.coverage)
        self.passages.merge(other.passages)
        self.bad_records.merge(other.bad_records)
        self.sources, self.versions = self.sources | other.sources, self.versions | other.versions
        if self.counts.documents >= FEWEST_DOCUMENTS:
            self.drop_passages()
        self.heads.merge(other.heads)
        if self.layers is not None and other.layers is not None:
            self.layers.merge(other.layers)
        if not self.by_passage or other.layers_by_passage is None:
            self.layers_by_passage = None
        elif self.layers_by_passage is not None:
            self.layers_by_passage.merge(other.layers_by_passage)

    def _check_heads(self, other: PartialResult) -> None:
        """Refuse sums of other numbers of heads, which torch would broadcast."""
        for row, layer in other.heads.layers.items():
            own = self.heads.layers.get(row, layer)
            if own.heads != layer.heads:
                raise UserError(
                    f"partial results of one model must have the same heads, got {own.heads} and {layer.heads} in layer"
                    f" {row[1]} of the {row[0]}; one of them is damaged, inspect again"
                )


def merge_partials(partials: Iterable[PartialResult]) -> PartialResult:
    """Merge partial results, which stay as they are; order and grouping do not matter.

    Counts are the same to the last bit, sums to their rounding.

    Args:
        partials: at least one; an iterator need not hold them all.
    """
    merged: PartialResult | None = None
    for partial in partials:
        if merged is None:
            merged = PartialResult.empty(partial.identity)
        merged.merge(partial)
        del partial  # before the next one is read
    if merged is None:
        raise UserError("merge_partials needs at least one partial result, got none; read some text first")
    return merged
