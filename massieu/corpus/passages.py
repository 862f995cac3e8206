"""Passages of documents, and batches of passages of similar length."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from massieu.checks import UserError
from massieu.corpus.document_counts import DocumentCounts
from massieu.corpus.records import LARGEST
from massieu.corpus.shards import Document, check_text, text_hash
from massieu.models.tokenization import encode, unknown_token

__all__ = ["Batch", "Passage", "TooLong", "given_batches", "passages", "text_batches"]

SORTED_TOGETHER = 32  # batches whose passages are sorted by length together


class TooLong(UserError):  # noqa: N818  # a property of the document
    """A document has more tokens than the model reads."""


@dataclass(frozen=True)
class Passage:
    """At most max_length tokens of a document."""

    document: int
    ids: list[int]
    content: list[bool]  # False for special tokens
    parts: int  # number of passages of the document
    origin: str  # hash of the text of the document
    unknown: int = 0  # number of unknown-word tokens

    @property
    def key(self) -> str:
        """Hash of the tokens."""
        return hashlib.sha256(repr(self.ids).encode()).hexdigest()


@dataclass(frozen=True)
class Batch:
    """Inputs of one forward pass, and masks of the tokens that count.

    Attributes:
        inputs: arguments of the model.
        content: by stack, ``(batch, tokens)``, False for padding and excluded tokens; no entry: all count.
        present: by stack, ``(batch, tokens)``, False for padding; no entry: no padding.
        documents: number of the document of each sequence.
        parts: number of sequences of that document.
        keys: hash of the tokens of each sequence.
        origins: hash of the text of its document.
    """

    inputs: dict[str, Any]
    content: dict[str, Tensor]
    present: dict[str, Tensor]
    documents: list[int]
    parts: list[int]
    keys: list[str]
    origins: list[str]

    def counted(self, stack: str, rows: int, queries: int) -> Tensor:
        """Mask of the rows of a call that count, ``(rows, queries)``; rows of cross attention are decoder tokens."""
        return _fitting(self.content, stack, rows, queries)

    def extent(self, stack: str, rows: int, queries: int) -> tuple[Tensor, Tensor]:
        """First token of each sequence after its padding, and number of its tokens."""
        present = _fitting(self.present, stack, rows, queries)
        return present.to(torch.uint8).argmax(-1), present.sum(-1)


def _fitting(masks: Mapping[str, Tensor], stack: str, rows: int, queries: int) -> Tensor:
    """Mask of a stack; all true without one of that shape, as for the patches of an image."""
    mask = masks.get("decoder" if stack == "cross" else stack)
    return mask if mask is not None and mask.shape == (rows, queries) else torch.ones(rows, queries, dtype=torch.bool)


def passages(
    documents: Iterable[str | Document],
    tokenizer: Any,
    longest: int,
    *,
    cut: bool,
    skip: bool = False,
    special_tokens: bool = False,
    counts: DocumentCounts | None = None,
) -> Iterator[Passage]:
    """Tokenize documents into passages of at most ``longest`` tokens; a longer document is cut, skipped, or refused.

    Longer documents are counted in ``counts.long``.
    """
    # Special tokens spelled out in a text count as special too; an unknown word is still a word.
    unknown = unknown_token(tokenizer)
    marks_text = {*tokenizer.all_special_ids} - {unknown}
    for number, document in enumerate(documents):
        text, place = document if isinstance(document, Document) else (document, f"text number {number + 1}")
        check_text(text, number)
        if len(text) > LARGEST:
            raise UserError(
                f"{place} has {len(text):,} characters, and a document may have {LARGEST:,}; cut it into several"
            )
        encoded = encode(tokenizer, text, add_special_tokens=True, return_special_tokens_mask=True)
        ids = encoded["input_ids"]
        if len(ids) > longest:
            if not cut and not skip:
                raise TooLong(
                    f"{place} has {len(ids)} tokens, but the model reads at most {longest}; pass --long-documents cut"
                    " (long_documents in Python) to cut such texts into passages, or skip to leave them out"
                )
            if counts is not None:
                counts.long += 1
            if skip:
                continue
            parts = _cut(text, tokenizer, longest)
        else:
            parts = [(ids, encoded["special_tokens_mask"])]
        origin = text_hash(text)
        for own, marks in parts:
            special = zip(own, marks, strict=True)
            content = [special_tokens or not (mark or token in marks_text) for token, mark in special]
            yield Passage(number, list(own), content, len(parts), origin, sum(token == unknown for token in own))


def _cut(text: str, tokenizer: Any, longest: int) -> list[tuple[list[int], list[int]]]:
    """Tokens and special-token masks of the passages of a long text, each with special tokens around it."""
    room = longest - tokenizer.num_special_tokens_to_add()
    if room < 1:
        raise UserError(f"max_length must leave room for words beside special tokens, got {longest}; 256 is usual")
    if tokenizer.is_fast:
        options = {"truncation": True, "max_length": longest, "return_special_tokens_mask": True}
        encoded = encode(tokenizer, text, return_overflowing_tokens=True, **options)
        return list(zip(encoded["input_ids"], encoded["special_tokens_mask"], strict=True))
    # Tokenizers written in Python drop the tokens beyond max_length.
    words = encode(tokenizer, text, add_special_tokens=False)["input_ids"]
    parts = []
    for begin in range(0, len(words), room):
        own = words[begin : begin + room]
        parts.append((tokenizer.build_inputs_with_special_tokens(own), tokenizer.get_special_tokens_mask(own)))
    return parts


def text_batches(
    source: Iterable[Passage],
    *,
    batch_size: int,
    pad: int,
    padding: Literal["right", "left"] = "right",
    start_token: int | None = None,
    positions: int | None = None,
) -> Iterator[Batch]:
    """Put passages of similar length into batches.

    Args:
        pad: token for padding.
        padding: the side on which shorter sequences are filled.
        start_token: first token of the decoder in an encoder-decoder model, which then reads the text shifted by one.
        positions: pass ``position_ids`` that count from this number at the first token of each sequence.
    """
    source = iter(source)
    while some := list(itertools.islice(source, batch_size * SORTED_TOGETHER)):
        some = [passage for passage in some if passage.ids]
        some.sort(key=lambda passage: len(passage.ids))
        for begin in range(0, len(some), batch_size):
            yield _batch(some[begin : begin + batch_size], pad, padding == "left", start_token, positions)


def _batch(some: list[Passage], pad: int, left: bool, start_token: int | None, positions: int | None) -> Batch:
    lengths = torch.tensor([len(passage.ids) for passage in some])
    longest = int(lengths.max())
    start = longest - lengths if left else torch.zeros_like(lengths)

    def filled(rows: Sequence[Sequence[int]], value: int) -> Tensor:
        full = torch.full((len(rows), longest), value)
        for row, own, begin in zip(full, rows, start.tolist(), strict=True):
            row[begin : begin + len(own)] = torch.tensor(own)
        return full

    mask = filled([[1] * len(passage.ids) for passage in some], 0)
    content = filled([passage.content for passage in some], 0).bool()
    inputs: dict[str, Any] = {"input_ids": filled([passage.ids for passage in some], pad), "attention_mask": mask}
    if positions is not None:
        inputs["position_ids"] = (mask.cumsum(-1) - 1 + positions).clamp_min(0)
    counted = {"encoder": content, "decoder": content}
    present = dict.fromkeys(counted, mask.bool())
    if start_token is not None:
        inputs["decoder_input_ids"] = filled([[start_token, *passage.ids[:-1]] for passage in some], pad)
        inputs["decoder_attention_mask"] = mask
        counted["decoder"] = filled([[False, *passage.content[:-1]] for passage in some], 0).bool()
    documents, parts = [passage.document for passage in some], [passage.parts for passage in some]
    keys, origins = [passage.key for passage in some], [passage.origin for passage in some]
    return Batch(inputs, counted, present, documents, parts, keys, origins)


def given_batches(inputs: Iterable[Mapping[str, Any]]) -> Iterator[Batch]:
    """Return batches of given tensors; every sequence is a document, and all tokens but the padding count."""
    first = 0
    if isinstance(inputs, (Tensor, Mapping, str)):
        got = type(inputs).__name__
        raise UserError(f"inputs must be a list of batches, got one {got}; pass [{{name of an argument: tensor}}]")
    for number, given in enumerate(inputs):
        if not isinstance(given, Mapping):
            got = type(given).__name__
            raise UserError(
                f"inputs must be dicts from the arguments of the model to tensors, got {got} at number {number};"
                " pass [{name of an argument: tensor}]"
            )
        tensors = [value for value in given.values() if isinstance(value, Tensor) and value.dim() > 0]
        if not tensors:
            got = ", ".join(given) or "nothing"
            raise UserError(
                f"inputs must hold tensors with a batch axis, got {got} at number {number}; pass dicts of them"
            )
        size = tensors[0].shape[0]
        content = {}
        for stack, name in (("encoder", "attention_mask"), ("decoder", "decoder_attention_mask")):
            mask = given.get(name, given.get("attention_mask") if "decoder_input_ids" not in given else None)
            if isinstance(mask, Tensor) and mask.dim() == 2:
                content[stack] = mask.bool().cpu()
        keys = [_content_key(given, entry) for entry in range(size)]
        documents = list(range(first, first + size))
        first += size
        yield Batch(dict(given), content, content, documents, [1] * size, keys, keys)


def _content_key(given: Mapping[str, Any], entry: int) -> str:
    """Hash of one sequence without its padding."""
    digest = hashlib.sha256()
    mask = given.get("attention_mask")
    for name in sorted(given):
        value = given[name]
        if isinstance(value, Tensor) and value.dim() > 0:
            own = value[entry]
            if isinstance(mask, Tensor) and value.shape[:2] == mask.shape:
                own = own[mask[entry].bool()]
            digest.update(f"{name} {tuple(own.shape)}".encode())
            digest.update(own.detach().cpu().double().numpy().tobytes())
    return digest.hexdigest()
