"""Batches of a text: documents cut into passages for one model, put into batches, and counted."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from torch import nn

from massieu.checks import UserError
from massieu.corpus import Corpus, Document
from massieu.corpus.document_counts import DocumentCounts
from massieu.corpus.passages import Batch, Passage, passages, text_batches
from massieu.models.tokenization import check_known, encode, has_words, unknown_token

__all__ = ["NO_TEXT", "Batcher", "check_texts", "reads_shifted"]

BEGINNING = 2000
"""Characters of a document in which unknown words are counted."""

NO_TEXT = "texts must hold at least one document with some text, and all are empty; pass more text"


def check_texts(texts: object, inputs: Iterable[Mapping[str, Any]] | None) -> None:
    """Raise unless either texts or inputs are given, and the texts are a list of strings or a corpus."""
    if (texts is None) == (inputs is None):
        raise UserError("pass texts, or inputs for a model without tokenizer, and not both")
    if isinstance(texts, str):
        raise UserError("texts must be a list of strings, got a single string; pass [text]")
    if texts is not None and not isinstance(texts, (Iterable, Corpus)):
        raise UserError(f"texts must be strings, or a Corpus, got {type(texts).__name__}; pass a list of strings")
    if isinstance(texts, Sequence) and not any(isinstance(text, str) and text.strip() for text in texts):
        raise UserError(NO_TEXT)


class Batcher:
    """Tokenizes and batches documents for one model.

    Args:
        model: the model.
        tokenizer: of the model.
        batch_size: number of passages in a batch.
        max_length: tokens of a passage at most; None for the model's window.
        long_documents: treatment of documents of more tokens: "cut" into passages, "skip", or raise an "error".
        special_tokens: whether special tokens count.
        padding: the side on which shorter passages are filled up.

    Attributes:
        longest: tokens of the longest passage.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        *,
        batch_size: int,
        max_length: int | None,
        long_documents: Literal["error", "cut", "skip"],
        special_tokens: bool,
        padding: Literal["right", "left"],
    ) -> None:
        if tokenizer is None:
            raise UserError(
                "texts need a tokenizer, and the model came without one; save it in the folder of the model, or pass"
                " tokenizer=, or tensors as inputs=, in Python"
            )
        if not has_words(tokenizer):
            raise UserError(
                "texts need a tokenizer with a vocabulary, but the tokenizer knows no word; pass the one of the model"
            )
        window = _window(model, tokenizer)
        if max_length is not None and max_length > window:
            raise UserError(f"max_length must not exceed the {window} tokens that the model reads, got {max_length}")
        self.tokenizer, self.batch_size, self.long_documents = tokenizer, batch_size, long_documents
        self.special_tokens, self.padding = special_tokens, padding
        self.longest = window if max_length is None else max_length
        self._start = _start_token(model)
        self._positions = _first_position(model) if padding == "left" else None

    def batches(
        self, documents: Iterable[str | Document], counts: DocumentCounts | None = None, *, cut: bool | None = None
    ) -> Iterator[Batch]:
        """Return batches for the model.

        Args:
            documents: texts, with their places or without.
            counts: counts the passages of each batch.
            cut: whether to cut documents that are too long; None for ``long_documents``.
        """
        treatment = self.long_documents if cut is None else "cut" if cut else "error"
        found = passages(
            documents,
            self.tokenizer,
            self.longest,
            cut=treatment == "cut",
            skip=treatment == "skip",
            special_tokens=self.special_tokens,
            counts=counts,
        )
        pad = getattr(self.tokenizer, "pad_token_id", None)
        yield from text_batches(
            found if counts is None else _counted(found, counts),
            batch_size=self.batch_size,
            pad=0 if pad is None else pad,
            padding=self.padding,
            start_token=self._start,
            positions=self._positions,
        )

    def check_lengths(self, documents: Iterable[Document]) -> None:
        """Raise for the first document that is too long, if such documents are refused."""
        if self.long_documents == "error":
            # A character has at most four tokens where these are bytes, so that other documents fit.
            some = (document for document in documents if 4 * len(document.text) >= self.longest)
            for _ in passages(some, self.tokenizer, self.longest, cut=False):
                pass

    def check_vocabulary(self, texts: Sequence[str]) -> None:
        """Raise if more than a third of the tokens at the beginning of some texts are unknown words."""
        own = unknown_token(self.tokenizer)
        if own is None or not texts:
            return
        some = [text[:BEGINNING] for text in texts]
        ids = [token for each in encode(self.tokenizer, some, add_special_tokens=False)["input_ids"] for token in each]
        check_known(ids.count(own), len(ids), "the text" if len(texts) == 1 else f"{len(texts)} documents")


def reads_shifted(model: nn.Module) -> bool:
    """Return whether a decoder reads the same text as the encoder, shifted by one token."""
    return _start_token(model) is not None


def _counted(found: Iterable[Passage], counts: DocumentCounts) -> Iterator[Passage]:
    last = -1
    for passage in found:
        if passage.document != last:
            counts.add([passage.origin])
            last = passage.document
        counts.passages += 1
        counts.tokens += len(passage.ids)
        counts.counted += sum(passage.content)
        counts.unknown += passage.unknown
        yield passage


def _window(model: nn.Module, tokenizer: Any | None) -> int:
    """Largest number of tokens that the model reads at once."""
    config = getattr(model, "config", None)
    known = [getattr(config, name, None) for name in ("max_position_embeddings", "n_positions", "max_seq_len")]
    known += [getattr(tokenizer, "model_max_length", None)]
    sizes = [int(size) for size in known[:3] if isinstance(size, int) and 0 < size < 10**7]
    sizes = [size - _position_offset(model) for size in sizes]
    sizes += [int(size) for size in known[3:] if isinstance(size, int) and 0 < size < 10**7]
    return min(sizes, default=10**6)


def _position_offset(model: nn.Module) -> int:
    """Number of the first position: RoBERTa counts from the one after its padding."""
    offsets = [table.padding_idx for table in _position_tables(model).values()]
    return next((offset + 1 for offset in offsets if offset is not None), 0)


def _position_tables(model: nn.Module) -> dict[str, nn.Embedding]:
    named = model.named_modules()
    return {name: module for name, module in named if "position" in name and isinstance(module, nn.Embedding)}


def _first_position(model: nn.Module) -> int | None:
    """First of the ``position_ids`` if padding comes first; None for a model without learned positions."""
    if "position_ids" in inspect.signature(model.forward).parameters:
        return _position_offset(model)
    for name in _position_tables(model):
        raise UserError(f"padding=left would move the positions of this model ({name}), which takes none; use right")
    return None


def _start_token(model: nn.Module) -> int | None:
    config = getattr(model, "config", None)
    if not getattr(config, "is_encoder_decoder", False):
        return None
    start = getattr(config, "decoder_start_token_id", None)
    if start is None:
        start = getattr(config, "bos_token_id", None)
    if start is None:
        start = getattr(config, "pad_token_id", None) or 0
    if not isinstance(start, int):
        raise UserError(f"decoder_start_token_id of the model must be a token, got {start!r:.80}; correct config.json")
    return start
