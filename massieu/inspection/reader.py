"""A model that reads pieces of a text, each into a part of its own."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from massieu.checks import NotObservable, UserError
from massieu.corpus.batching import Batcher
from massieu.corpus.passages import Batch, given_batches
from massieu.corpus.shards import Document, Shard, ShardGroup
from massieu.inspection.layers import LayerObserver
from massieu.inspection.options import Options
from massieu.inspection.partial_result import FEWEST_DOCUMENTS, Heard, Identity, Part
from massieu.models.evaluation import evaluating, moved, run_model
from massieu.models.fingerprint import model_fingerprint, tokenizer_fingerprint
from massieu.taps import tap
from massieu.taps.sources import without_fast_path

__all__ = ["NotObservable", "Reader", "few_tokens", "read_split"]

FEW_TOKENS = 16  # enough to see that listening changes nothing
TRIES = 8  # texts on which the output may be broken before the whole model is called so
ANY_TEXT = "Any text will do here: where the parts of a model are does not depend on what it reads."


def read_split(model: nn.Module, tokenizer: Any, split: Shard | ShardGroup, options: Options | None = None) -> Part:
    """What one piece of a text gives: the same part whoever reads it, and whenever.

    To read several, make one :class:`Reader`, which looks at the model once.

    Example:
        >>> from massieu import assets
        >>> from massieu.models.loading import load
        >>> from massieu.corpus.shards import Shard
        >>> model, tokenizer, *_ = load(str(assets.MODEL))
        >>> part = read_split(model, tokenizer, Shard.of_texts(("Call me Ishmael.",)), Options(experiments="heads"))
        >>> part.counts.documents
        1
    """
    return Reader(model, tokenizer, options).read(split)


class Reader:
    """A model that reads pieces of a text; the model is looked at once and stays as it was.

    Args:
        model: the model.
        tokenizer: of the model; None if it reads tensors.
        options: how the text is read.
        name: what the model is called.
        revision: of the model.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any | None,
        options: Options | None = None,
        *,
        name: str | None = None,
        revision: str | None = None,
    ) -> None:
        self.model, self.tokenizer, self.options = model, tokenizer, options or Options()
        self.name, self.revision = name, revision
        self._layers: LayerObserver | None = None
        self._ready = False
        self._fallback = True

    @functools.cached_property
    def batcher(self) -> Batcher:
        """Tokenizes and batches texts for the model."""
        return Batcher(self.model, self.tokenizer, **self.options.of_batches())

    @functools.cached_property
    def identity(self) -> Identity:
        """What the parts of texts have in common."""
        options = {**self.options.of_figures(), "max_length": self.batcher.longest, "reads": "text"}
        return self._identity(options, tokenizer_fingerprint(self.tokenizer))

    def read(
        self, split: Shard | ShardGroup, *, many: bool = False, progress: Callable[[int, int], object] | None = None
    ) -> Part:
        """What one piece of a text gives.

        Args:
            split: the piece.
            many: whether the whole text is known to have enough documents for standard errors by document; then
                nothing is kept for those by passage, which saves work for pieces of a few long documents.
            progress: called with the numbers of documents and tokens that were seen so far.
        """
        part = self._empty(self.identity)
        documents = split.read(part.faults)
        first = list(itertools.islice(documents, FEWEST_DOCUMENTS))
        if many or len(first) >= FEWEST_DOCUMENTS:
            part.forget_passages()
        with evaluating(self.model):
            if first and not self._ready:
                self._look(next(self.batcher.batches([ANY_TEXT], cut=True), None))
            done = tokens = 0
            for batch in self.batcher.batches(_unless_blank(itertools.chain(first, documents), part), part.counts):
                self._take(batch, part)
                done = max(done, max(batch.documents) + 1)
                if progress is not None:
                    tokens += max((int(there.sum()) for there in batch.present.values()), default=0)
                    progress(done, tokens)
        part.heads.close()
        return part

    def read_tensors(
        self, inputs: Iterable[Mapping[str, Any]], *, progress: Callable[[int], object] | None = None
    ) -> Part:
        """What batches of tensors give, for a model without tokenizer; every sequence is a document."""
        options = {**self.options.of_figures(), "max_length": None, "reads": "tensors"}
        part = self._empty(self._identity(options, None))
        part.forget_passages()
        with evaluating(self.model):
            for batch in given_batches(inputs):
                part.counts.add(batch.keys)
                part.counts.passages += len(batch.keys)
                self._take(batch, part)
                if progress is not None:
                    progress(part.counts.documents)
        part.heads.close()
        # Without a tokenizer nobody has counted the tokens.
        part.counts.tokens = part.counts.counted = max((layer.rows for layer in part.heads.layers.values()), default=0)
        return part

    def _identity(self, options: dict[str, Any], tokenizer: str | None) -> Identity:
        first = next(self.model.parameters(), None)
        dtype = None if first is None else str(first.dtype).removeprefix("torch.")
        weights = model_fingerprint(self.model)
        return Identity(weights, tokenizer, options, name=self.name, revision=self.revision, dtype=dtype)

    def _empty(self, identity: Identity) -> Part:
        part = Part.empty(identity)
        part.versions = {f"massieu {sys.modules['massieu'].__version__}, torch {importlib.metadata.version('torch')}"}
        return part

    def _take(self, batch: Batch, part: Part) -> None:
        """Run the model on one batch."""
        if not self._ready:
            self._look(batch)
        inputs = {name: moved(value, self.model) for name, value in batch.inputs.items()}
        with contextlib.ExitStack() as stack:
            receive = functools.partial(part.heads.receive, batch=batch)
            heard = stack.enter_context(tap(self.model, receive, fallback=self._fallback, this_thread=True))
            if self._layers is not None and part.layers is not None:
                self._layers.sums, self._layers.by_passage = part.layers, part.layers_by_passage
                stack.enter_context(self._layers.batch(batch.content, batch.keys, batch.present, batch.origins))
            try:
                run_model(self.model, inputs)
            except IndexError as error:
                raise _beyond(error) from error
        if self._layers is not None and part.layers is not None:
            whole = [row for row in range(len(batch.keys)) if row not in self._layers.broken]
            part.passages.offer(inputs, batch.content, batch.keys, batch.origins, whole)
        # A module that did not run, such as the vision part of a model that reads text, makes no mean wrong.
        missing = [name for name in heard.missing if name not in heard.idle]
        if missing or not heard.observed:
            raise NotObservable(
                f"{heard.sentence}, so means over the model would be wrong; not heard:"
                f" {', '.join(missing) or 'any attention'}; massieu doctor MODEL says what is in it"
            )
        part.heard.merge(Heard.of(heard))

    def _look(self, batch: Batch | None) -> None:
        """Before anything is read: that listening changes nothing, and where everything is."""
        if batch is None:  # a tokenizer to which the sentence is nothing; the first passage will do
            return
        with torch.no_grad(), without_fast_path():
            few, alone = self._finite(few_tokens(batch.inputs, self.model))
            with tap(self.model, lambda call: None, this_thread=True) as listening:
                heard = _tensors(run_model(self.model, few))
        # Inside a tap a compiled model runs uncompiled, which changes its last digits.
        same = torch.allclose if listening.compiled else torch.equal
        if not all(same(one, other) for one, other in zip(alone, heard, strict=True)):
            raise NotObservable("the model's output changes from run to run, or when it is heard; is dropout on?")
        self._fallback = bool(listening.bypassed or listening.missing)
        if self.options.experiments == "default":
            self._layers = LayerObserver(self.model, few)
        self._ready = True

    def _finite(self, inputs: dict[str, Any]) -> tuple[dict[str, Any], list[Tensor]]:
        """Inputs on which the output is finite, and that output: these, or random tokens where a word is broken."""
        generator = torch.Generator().manual_seed(0)
        for _ in range(TRIES):
            found = _tensors(_tried(self.model, inputs))
            if all(bool(x.isfinite().all()) for x in found if x.is_floating_point() and x.numel()):
                return inputs, found
            inputs = {name: _other_tokens(name, value, generator) for name, value in inputs.items()}
        raise NotObservable(
            "the output of the model is nan or infinite whatever the tokens are: its weights are damaged, or its dtype"
            " is too narrow; try --dtype float32 (dtype in Python), or save the weights again"
        )


def few_tokens(inputs: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """The first sequence of a batch, cut short if it is text, where the model is."""
    return {name: moved(_few(name, value), model) for name, value in inputs.items()}


def _few(name: str, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    text = name.endswith(("input_ids", "attention_mask", "position_ids"))
    return value[:1, :FEW_TOKENS] if text and value.dim() == 2 else value[:1]


def _other_tokens(name: str, value: Any, generator: torch.Generator) -> Any:
    """Random tokens in place of token numbers; anything else as it is."""
    if not name.endswith("input_ids") or not isinstance(value, Tensor) or value.is_floating_point():
        return value
    return torch.randint(int(value.max()) + 1, value.shape, generator=generator, dtype=value.dtype).to(value.device)


def _unless_blank(documents: Iterable[Document], part: Part) -> Iterator[Document]:
    """The documents, those without text counted on their way."""
    for document in documents:
        part.counts.blank += not document.text.strip()
        yield document


def _tried(model: nn.Module, inputs: dict[str, Any]) -> Any:
    """The first run of a model; what goes wrong in it is one sentence."""
    try:
        return run_model(model, inputs)
    except IndexError as error:
        raise _beyond(error) from error
    except Exception as error:
        text = " ".join(str(error).split())[:160] or type(error).__name__
        raise UserError(
            f"the model cannot be run on {', '.join(inputs)} ({text});"
            " one that reads more than text takes inputs= in Python, with every argument that it needs"
        ) from error


def _beyond(error: IndexError) -> UserError:
    return UserError(
        f"the model cannot read these tokens ({error}): there are too many, or some are beyond its vocabulary;"
        " save the tokenizer that belongs to the model in its folder"
    )


def _tensors(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    values = result.values() if isinstance(result, Mapping) else result if isinstance(result, (list, tuple)) else ()
    return [tensor for value in values for tensor in _tensors(value)]
