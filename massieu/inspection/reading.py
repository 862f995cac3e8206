"""The text on its way to the model: what the model can read at once, and what is said about the text afterwards."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from torch import nn

from massieu.inspection.batches import Batch, Passage, given_batches, passages, text_batches

__all__ = ["Reading"]

FEWEST_DOCUMENTS = 8  # with fewer, standard errors are taken by passage


class Reading:
    """The text on its way to the model, and what is said about it afterwards."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any | None,
        texts: Sequence[str] | None,
        inputs: Iterable[Mapping[str, Any]] | None,
        batch_size: int,
        max_length: int | None,
        special_tokens: bool,
        padding: Literal["right", "left"],
    ) -> None:
        if (texts is None) == (inputs is None):
            raise ValueError("pass texts, or inputs for a model without tokenizer, and not both")
        if isinstance(texts, str):
            raise TypeError("texts must be a list of strings, got a single string; pass [text]")
        if texts is not None and not any(isinstance(text, str) and text.strip() for text in texts):
            raise ValueError("texts must hold at least one document with some text, and all are empty; pass more text")
        if texts is not None and tokenizer is None:
            raise ValueError(
                "texts need a tokenizer, and the model came without one; pass tokenizer=, or tensors as inputs="
            )
        self.model, self.tokenizer, self.texts, self.inputs = model, tokenizer, texts, inputs
        self.batch_size, self.special_tokens, self.padding = batch_size, special_tokens, padding
        if padding not in ("right", "left"):
            raise ValueError(f"padding must be right or left, got {padding!r}; right is usual")
        self.cut = max_length is not None
        self.longest = self._longest(max_length)
        self.documents = 0 if texts is None else len(texts)
        self.by_passage = texts is not None and self.documents < FEWEST_DOCUMENTS
        self.passages = self.tokens = self.counted = 0
        self.sequences = self._done = 0
        self._digest = hashlib.sha256()

    def _longest(self, wanted: int | None) -> int:
        window = _window(self.model, self.tokenizer)
        if wanted is None:
            return window
        if not isinstance(wanted, int) or wanted < 2:
            raise ValueError(f"max_length must be a whole number of at least 2, got {wanted!r}; 256 is usual")
        if wanted > window:
            raise ValueError(f"max_length must not exceed the {window} tokens that the model reads, got {wanted}")
        return wanted

    def batches(self) -> Iterator[Batch]:
        """Batches for the model, counted on their way."""
        for batch in self._batches():
            self.sequences += len(batch.documents)
            yield batch

    def _batches(self) -> Iterator[Batch]:
        if self.inputs is not None:
            for batch in given_batches(self.inputs):
                self.documents = batch.documents[-1] + 1
                for key in batch.keys:
                    self._digest.update(key.encode())
                yield batch
            return
        pad = getattr(self.tokenizer, "pad_token_id", None)
        yield from text_batches(
            self._passages(),
            batch_size=self.batch_size,
            pad=0 if pad is None else pad,
            padding=self.padding,
            start_token=_start_token(self.model),
            positions=_first_position(self.model) if self.padding == "left" else None,
        )

    def _passages(self) -> Iterator[Passage]:
        assert self.texts is not None
        options = {"cut": self.cut, "special_tokens": self.special_tokens}
        last = -1
        for passage in passages(self.texts, self.tokenizer, self.longest, **options):
            if passage.document != last:
                self._digest.update(passage.origin.encode())
                last = passage.document
            if self.by_passage:
                passage = Passage(self.passages, passage.ids, passage.content, 1, passage.key)
            self.passages += 1
            self.tokens += len(passage.ids)
            self.counted += sum(passage.content)
            yield passage

    def documents_done(self, batch: Batch) -> int:
        """How many documents the model has seen some of."""
        self._done = max(self._done, self.sequences if self.by_passage else max(batch.documents) + 1)
        return min(self.documents, self._done)

    def facts(self, source: str | None) -> dict[str, Any]:
        """What is said about the text."""
        return {
            "source": source or ("texts" if self.texts is not None else "tensors"),
            "sha256": self._digest.hexdigest(),
            "documents": self.documents,
            "passages": self.passages or self.sequences,
            "tokens": self.tokens,
            "counted_tokens": self.counted,
            "excluded": "padding" if self.special_tokens or self.texts is None else "padding and special tokens",
            "max_length": self.longest if self.texts is not None else None,
            "unit": "passage" if self.by_passage else "document",
        }

    def notes(self) -> list[str]:
        """What was left out, in sentences."""
        found = []
        left = self.tokens - self.counted
        if left:
            found.append(
                f"Rows of special tokens are left out of every mean: {left} of {self.tokens} tokens. They are still"
                " attended to."
            )
        if self.by_passage:
            found.append(
                f"There are fewer than {FEWEST_DOCUMENTS} documents, so standard errors treat each passage as one draw;"
                " neighbouring passages resemble each other, so the errors may be too small."
            )
        if _start_token(self.model) is not None and self.texts is not None:
            found.append("The decoder reads the same text as the encoder, shifted by one token.")
        return found


def _window(model: nn.Module, tokenizer: Any | None) -> int:
    """The largest number of tokens that the model reads at once."""
    config = getattr(model, "config", None)
    known = [getattr(config, name, None) for name in ("max_position_embeddings", "n_positions", "max_seq_len")]
    known += [getattr(tokenizer, "model_max_length", None)]
    sizes = [int(size) for size in known[:3] if isinstance(size, int) and 0 < size < 10**7]
    sizes = [size - _position_offset(model) for size in sizes]
    sizes += [int(size) for size in known[3:] if isinstance(size, int) and 0 < size < 10**7]
    return min(sizes, default=10**6)


def _position_offset(model: nn.Module) -> int:
    """The number of the first position: RoBERTa counts from the one after its padding."""
    offsets = [table.padding_idx for table in _position_tables(model).values()]
    return next((offset + 1 for offset in offsets if offset is not None), 0)


def _position_tables(model: nn.Module) -> dict[str, nn.Embedding]:
    named = model.named_modules()
    return {name: module for name, module in named if "position" in name and isinstance(module, nn.Embedding)}


def _first_position(model: nn.Module) -> int | None:
    """Where ``position_ids`` begin if padding comes first; None for a model without learned positions."""
    if "position_ids" in inspect.signature(model.forward).parameters:
        return _position_offset(model)
    for name in _position_tables(model):
        raise ValueError(f"padding=left would move the positions of this model ({name}), which takes none; use right")
    return None


def _start_token(model: nn.Module) -> int | None:
    config = getattr(model, "config", None)
    if not getattr(config, "is_encoder_decoder", False):
        return None
    start = getattr(config, "decoder_start_token_id", None)
    if start is None:
        start = getattr(config, "bos_token_id", None)
    return start if start is not None else (getattr(config, "pad_token_id", None) or 0)
