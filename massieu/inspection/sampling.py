"""The few passages for experiments that need derivatives, the same ones however the text is batched."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from massieu.inspection.anatomy import Anatomy
from massieu.inspection.evaluation import moved
from massieu.inspection.fields import Fields, probe_fields
from massieu.inspection.moments import document_hash

__all__ = ["KeptPassage", "PassageSample"]

LONGEST = 128
"""Tokens of a passage that are kept: graphs of attention hold its matrices."""


@dataclass(frozen=True)
class KeptPassage:
    """A passage of the sample: what identifies it, arguments of a forward pass over it alone, which tokens count."""

    key: object
    inputs: dict[str, Any]
    content: dict[str, Tensor]


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

    def __init__(self, count: int = 4) -> None:
        self.count = count
        self._kept: dict[int, KeptPassage] = {}

    @property
    def kept(self) -> list[KeptPassage]:
        """The passages, in the order of their hashes."""
        return [self._kept[hashed] for hashed in sorted(self._kept)]

    @property
    def keys(self) -> list[object]:
        """What identifies the passages that were kept, in the order of their hashes."""
        return [passage.key for passage in self.kept]

    def keep(self, passage: KeptPassage) -> None:
        """Keep a passage, if it belongs into the sample."""
        self._kept[document_hash(passage.key)] = passage
        self._forget()

    def offer(
        self,
        inputs: Mapping[str, Any],
        content: Mapping[str, Tensor] | Tensor,
        keys: Sequence[object],
        rows: Iterable[int] | None = None,
    ) -> None:
        """Keep what belongs into the sample.

        Args:
            inputs: keyword arguments of a forward pass.
            content: boolean, ``(batch, tokens)``, or one for each stack; a stack without a mask counts whole.
            keys: what identifies the content of each row.
            rows: numbers of the rows that may be kept; None for all.
        """
        masks = {"": content} if isinstance(content, Tensor) else content
        for row in range(len(keys)) if rows is None else rows:
            key, hashed = keys[row], document_hash(keys[row])
            if len(self._kept) < self.count or hashed < max(self._kept):
                self.keep(_cut(inputs, masks, row, len(keys), key))

    def merge(self, other: PassageSample) -> None:
        """Add what another has kept."""
        self._kept |= other._kept
        self._forget()

    def probe(self, model: nn.Module, anatomy: Anatomy) -> Fields:
        """Mean over the passages of what :func:`probe_fields` finds in each, and its standard error."""
        import pandas

        found = []
        for passage in self.kept:
            content = passage.content.get("", passage.content)
            if any(bool(mask.any()) for mask in passage.content.values()) or not passage.content:
                inputs = {name: moved(value, model) for name, value in passage.inputs.items()}
                found.append(probe_fields(model, inputs, anatomy, content, [passage.key]))
        tables = [fields.table for fields in found if len(fields.table)]
        notes = list(dict.fromkeys(note for fields in found for note in fields.notes))
        if not tables:
            return Fields(pandas.DataFrame(columns=["stack", "layer"]), notes)
        by_layer = pandas.concat(tables).groupby(["stack", "layer"], sort=False)
        return Fields(by_layer.mean().join(by_layer.sem().add_suffix("_se")).reset_index(), notes)

    def _forget(self) -> None:
        self._kept = dict(sorted(self._kept.items())[: self.count])


def _cut(inputs: Mapping[str, Any], content: Mapping[str, Tensor], row: int, rows: int, key: object) -> KeptPassage:
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
    return KeptPassage(key, kept, masks)


def _columns(inputs: Mapping[str, Any], side: str, row: int) -> tuple[int, Tensor] | None:
    """How many columns a side of the model has, and which of them to keep; None if its inputs have no tokens."""
    mask = inputs.get(f"{side}attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        own = (x for name, x in inputs.items() if name.startswith("decoder_") == bool(side) and isinstance(x, Tensor))
        mask = next((torch.ones_like(x) for x in own if x.dim() == 2 and not x.is_floating_point()), None)
    return None if mask is None else (mask.shape[1], mask[row].nonzero()[:LONGEST, 0])


def _select(value: Any, columns: tuple[int, Tensor] | None) -> Any:
    if columns is None or not isinstance(value, Tensor) or value.dim() != 2 or value.shape[1] != columns[0]:
        return value
    return value[:, columns[1].to(value.device)]
