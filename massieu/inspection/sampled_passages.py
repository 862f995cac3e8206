"""The few passages for experiments that run the model again, the same ones however the text is batched."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from massieu.accumulators.moments import document_hash
from massieu.accumulators.serialization import stored
from massieu.inspection.fields import Fields, probe_fields, probe_responses
from massieu.inspection.response import Response, jackknife_error, response_r2
from massieu.models.evaluation import moved
from massieu.models.residual_stream import ResidualStream

if TYPE_CHECKING:
    import pandas

__all__ = ["KeptPassage", "PassageSample"]

KEPT = 32
"""Passages that are kept: each costs one forward pass, for the linear response."""

DIFFERENTIATED = 4
"""Passages among them on which the experiments with derivatives are run: these cost much more."""

LONGEST = 128
"""Tokens of a passage that are kept: graphs of attention hold its matrices."""


@stored()
@dataclass(frozen=True)
class KeptPassage:
    """A passage of the sample.

    Attributes:
        key: what identifies it.
        document: what identifies its document; of several documents with this passage the one with the smallest hash.
        inputs: arguments of a forward pass over it alone.
        content: by stack, which tokens count.
    """

    key: object
    document: object
    inputs: dict[str, Any]
    content: dict[str, Tensor]


@stored("count", "_kept")
class PassageSample:
    """The passages with the smallest hashes, alone and without padding.

    Args:
        count: how many.

    Example:
        >>> sample = PassageSample(2)
        >>> words = torch.arange(8).view(4, 2)
        >>> sample.offer({"input_ids": words}, {}, ["a", "b", "c", "d"])
        >>> other = PassageSample(2)
        >>> other.offer({"input_ids": words.flip(0)}, {}, ["d", "c", "b", "a"])
        >>> sample.keys == other.keys
        True
    """

    def __init__(self, count: int = KEPT) -> None:
        self.count = count
        self._kept: dict[int, KeptPassage] = {}

    @property
    def kept(self) -> list[KeptPassage]:
        """The passages, in the order of their hashes."""
        return [self._kept[hashed] for hashed in sorted(self._kept)]

    @property
    def keys(self) -> list[object]:
        """Keys of the sampled passages, in the order of their hashes."""
        return [passage.key for passage in self.kept]

    def keep(self, passage: KeptPassage) -> None:
        """Keep a passage, if it belongs into the sample."""
        hashed = document_hash(passage.key)
        twin = self._kept.get(hashed)
        if twin is None or document_hash(passage.document) < document_hash(twin.document):
            self._kept[hashed] = passage
        self._forget()

    def offer(
        self,
        inputs: Mapping[str, Any],
        content: Mapping[str, Tensor] | Tensor,
        keys: Sequence[object],
        documents: Sequence[object] | None = None,
        rows: Iterable[int] | None = None,
    ) -> None:
        """Keep what belongs into the sample.

        Args:
            inputs: keyword arguments of a forward pass.
            content: boolean, ``(batch, tokens)``, or one for each stack; a stack without a mask counts whole.
            keys: what identifies the content of each row.
            documents: what identifies the document of each row; None if each row is one.
            rows: numbers of the rows that may be kept; None for all.
        """
        masks = {"": content} if isinstance(content, Tensor) else content
        for row in range(len(keys)) if rows is None else rows:
            key, hashed = keys[row], document_hash(keys[row])
            if len(self._kept) < self.count or hashed <= max(self._kept):
                document = key if documents is None else documents[row]
                self.keep(_cut(inputs, masks, row, len(keys), key, document))

    def merge(self, other: PassageSample) -> None:
        """Add what another has kept."""
        for passage in other.kept:
            self.keep(passage)

    def probe(self, model: nn.Module, anatomy: ResidualStream, *, by_passage: bool = False) -> Fields:
        """Run the experiments on the passages.

        Args:
            model: the model.
            anatomy: of the model.
            by_passage: whether standard errors of the linear response treat a passage as one draw, not a document.

        Returns:
            Mean over a few passages of what :func:`probe_fields` finds in each, with its standard error, and the
            linear response over all of them.
        """
        import pandas

        filled = [own for own in self.kept if not own.content or any(bool(mask.any()) for mask in own.content.values())]
        found = [
            probe_fields(model, _inputs(passage, model), anatomy, _content(passage), [passage.key])
            for passage in filled[:DIFFERENTIATED]
        ]
        notes = list(dict.fromkeys(note for fields in found for note in fields.notes))
        responses = _responses(filled, model, anatomy, by_passage)
        tables = [fields.table for fields in found if len(fields.table)]
        if not tables:
            return Fields(responses, notes)
        by_layer = pandas.concat(tables).groupby(["stack", "layer"], sort=False)
        table = by_layer.mean().join(by_layer.sem().add_suffix("_se")).reset_index()
        return Fields(table.merge(responses, on=["stack", "layer"], how="outer"), notes)

    def _forget(self) -> None:
        self._kept = dict(sorted(self._kept.items())[: self.count])


def _inputs(passage: KeptPassage, model: nn.Module) -> dict[str, Any]:
    return {name: moved(value, model) for name, value in passage.inputs.items()}


def _content(passage: KeptPassage) -> Tensor | dict[str, Tensor]:
    return passage.content.get("", passage.content)


def _responses(
    passages: Sequence[KeptPassage], model: nn.Module, anatomy: ResidualStream, by_passage: bool
) -> pandas.DataFrame:
    """R² of the linear response in every block, and its standard error."""
    import pandas

    seen: dict[tuple[str, int], dict[str, list[tuple[Response, object]]]] = {}
    for passage in passages:
        draw = passage.key if by_passage else passage.document
        found = probe_responses(model, _inputs(passage, model), anatomy, _content(passage), passage.key)
        for place, columns in found.items():
            for name, response in columns.items():
                seen.setdefault(place, {}).setdefault(name, []).append((response, draw))
    rows = []
    for (stack, layer), by_name in seen.items():
        row: dict[str, Any] = {"stack": stack, "layer": layer}
        for name, pairs in by_name.items():
            responses, draws = zip(*pairs, strict=True)
            row |= {name: response_r2(responses), f"{name}_se": jackknife_error(responses, draws)}
        rows.append(row)
    return pandas.DataFrame(rows, columns=None if rows else ["stack", "layer"])


def _cut(
    inputs: Mapping[str, Any], content: Mapping[str, Tensor], row: int, rows: int, key: object, document: object
) -> KeptPassage:
    """One row of a batch, its first tokens without padding."""
    columns = {side: _columns(inputs, side, row) for side in ("", "decoder_")}
    paired = columns["decoder_"] is not None
    kept: dict[str, Any] = {}
    for name, value in inputs.items():
        own = value[row : row + 1].clone() if isinstance(value, Tensor) and value.shape[:1] == (rows,) else value
        own = _select(own, columns["decoder_" if name.startswith("decoder_") else ""])
        kept[name] = own.cpu() if isinstance(own, Tensor) else own
    sides = {stack: "decoder_" if paired and stack == "decoder" else "" for stack in content}
    masks = {stack: _select(mask[row : row + 1].clone(), columns[sides[stack]]) for stack, mask in content.items()}
    return KeptPassage(key, document, kept, masks)


def _columns(inputs: Mapping[str, Any], side: str, row: int) -> tuple[int, Tensor] | None:
    """Number of columns of a side of the model, and those to keep; None if its inputs have no tokens."""
    mask = inputs.get(f"{side}attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        own = (x for name, x in inputs.items() if name.startswith("decoder_") == bool(side) and isinstance(x, Tensor))
        mask = next((torch.ones_like(x) for x in own if x.dim() == 2 and not x.is_floating_point()), None)
    return None if mask is None else (mask.shape[1], mask[row].nonzero()[:LONGEST, 0])


def _select(value: Any, columns: tuple[int, Tensor] | None) -> Any:
    if columns is None or not isinstance(value, Tensor) or value.dim() != 2 or value.shape[1] != columns[0]:
        return value
    return value[:, columns[1].to(value.device)]
