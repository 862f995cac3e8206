"""Reader: a model that reads shards of a text, each to a partial result of its own."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import itertools
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from massieu.checks import NotObservable, UserError
from massieu.corpus.batching import Batcher
from massieu.corpus.passages import Batch, given_batches
from massieu.corpus.shards import Document, Readable
from massieu.inspection.layers import LayerObserver
from massieu.inspection.options import Options
from massieu.inspection.partial_files import load_checkpoint, save_checkpoint
from massieu.inspection.partial_result import FEWEST_DOCUMENTS, Identity, PartialResult
from massieu.models.evaluation import evaluating, moved, run_model
from massieu.models.fingerprint import model_fingerprint, tokenizer_fingerprint
from massieu.models.origin import Origin
from massieu.models.residual_stream import ResidualStream
from massieu.taps import tap
from massieu.taps.sources import without_fast_path

__all__ = ["NotObservable", "Reader", "RemoteReader", "few_tokens", "read_shard"]

FEW_TOKENS = 16  # enough to see that observing changes nothing
TRIES = 8  # texts with a broken output before the model is called broken
ANY_TEXT = "Any text will do here: where the parts of a model are does not depend on what it reads."

_opened: dict[str, Reader] = {}


def read_shard(model: nn.Module, tokenizer: Any, shard: Readable, options: Options | None = None) -> PartialResult:
    """Read one shard; the partial result is the same in any process.

    To read several, make one :class:`Reader`, which examines the model once.

    Example:
        >>> from massieu import assets
        >>> from massieu.models.loading import load
        >>> from massieu.corpus.shards import Shard
        >>> model, tokenizer, *_ = load(str(assets.MODEL))
        >>> partial = read_shard(model, tokenizer, Shard.of_texts(("Call me Ishmael.",)), Options(experiments="heads"))
        >>> partial.counts.documents
        1
    """
    return Reader(model, tokenizer, options).read(shard)


class Reader:
    """A model that reads shards; the model is examined once and stays as it was.

    Args:
        model: the model.
        tokenizer: of the model; None if it reads tensors.
        options: reading options.
        name: name of the model.
        revision: of the model.
        origin: name by which other processes load the same model; None for a model that exists only here.

    Attributes:
        has_enough_documents: whether the whole text is known to have enough documents for standard errors by document;
            then nothing is kept for those by passage, which saves work for shards of a few long documents.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any | None,
        options: Options | None = None,
        *,
        name: str | None = None,
        revision: str | None = None,
        origin: Origin | None = None,
    ) -> None:
        self.model, self.tokenizer, self.options = model, tokenizer, options or Options()
        self.name, self.revision, self.origin = name, revision, origin
        self.has_enough_documents = False
        self._layers: LayerObserver | None = None
        self._ready = False
        self._fallback = True

    @functools.cached_property
    def batcher(self) -> Batcher:
        """Tokenizes and batches texts for the model."""
        return Batcher(self.model, self.tokenizer, **self.options.of_batches())

    @functools.cached_property
    def identity(self) -> Identity:
        """Identity of the partial results of texts."""
        options = {**self.options.result_affecting(), "max_length": self.batcher.longest, "reads": "text"}
        return self._identity(options, tokenizer_fingerprint(self.tokenizer))

    @property
    def stream(self) -> ResidualStream | None:
        """Residual stream of the model, once layers were read."""
        return None if self._layers is None else self._layers.stream

    def empty(self) -> PartialResult:
        """Partial result of no text."""
        return self._empty(self.identity)

    def read(self, shard: Readable, *, progress: Callable[[int, int], object] | None = None) -> PartialResult:
        """Partial result of one shard.

        Args:
            shard: range of a text.
            progress: called with the numbers of documents and tokens read so far.
        """
        partial = self.empty()
        documents = shard.read(partial.bad_records)
        first = list(itertools.islice(documents, FEWEST_DOCUMENTS))
        if self.has_enough_documents or len(first) >= FEWEST_DOCUMENTS:
            partial.drop_passages()
        with evaluating(self.model):
            if first and not self._ready:
                self._examine(next(self.batcher.batches([ANY_TEXT], cut=True), None))
            done = tokens = 0
            for batch in self.batcher.batches(_count_blank(itertools.chain(first, documents), partial), partial.counts):
                self._take(batch, partial)
                done = max(done, max(batch.documents) + 1)
                if progress is not None:
                    tokens += max((int(there.sum()) for there in batch.present.values()), default=0)
                    progress(done, tokens)
        partial.heads.close()
        return partial

    def read_tensors(
        self, inputs: Iterable[Mapping[str, Any]], *, progress: Callable[[int], object] | None = None
    ) -> PartialResult:
        """Partial result of batches of tensors, for a model without tokenizer; every sequence is a document."""
        options = {**self.options.result_affecting(), "max_length": None, "reads": "tensors"}
        partial = self._empty(self._identity(options, None))
        partial.drop_passages()
        with evaluating(self.model):
            for batch in given_batches(inputs):
                partial.counts.add(batch.keys)
                partial.counts.passages += len(batch.keys)
                self._take(batch, partial)
                if progress is not None:
                    progress(partial.counts.documents)
        partial.heads.close()
        # Without a tokenizer the tokens are counted by the rows of attention.
        rows = max((layer.rows for layer in partial.heads.layers.values()), default=0)
        partial.counts.tokens = partial.counts.counted = rows
        return partial

    def save(self, path: Path, partial: PartialResult, done: Collection[int], corpus: str) -> Path:
        """Write a checkpoint; see :class:`massieu.engine.fold.FoldTask`."""
        return save_checkpoint(path, partial, done, corpus)

    def load(self, path: Path, corpus: str, shards: int) -> tuple[PartialResult, set[int]]:
        """Read a checkpoint of this model, these options and these shards."""
        return load_checkpoint(path, self.identity, corpus, shards)

    def remote(self) -> RemoteReader:
        """Description by which another process makes the same reader."""
        if self.origin is None:
            raise UserError(
                "the engine dask needs a model that its workers can load by name, got one in memory or with a tokenizer"
                " of its own; save both to a folder and pass its name"
            )
        return RemoteReader(self.origin, self.options, self.identity, self.has_enough_documents)

    def _identity(self, options: dict[str, Any], tokenizer: str | None) -> Identity:
        first = next(self.model.parameters(), None)
        dtype = None if first is None else str(first.dtype).removeprefix("torch.")
        weights = model_fingerprint(self.model)
        return Identity(weights, tokenizer, options, name=self.name, revision=self.revision, dtype=dtype)

    def _empty(self, identity: Identity) -> PartialResult:
        partial = PartialResult.empty(identity)
        partial.versions = {
            f"massieu {sys.modules['massieu'].__version__}, torch {importlib.metadata.version('torch')}"
        }
        return partial

    def _take(self, batch: Batch, partial: PartialResult) -> None:
        """Run the model on one batch."""
        if not self._ready:
            self._examine(batch)
        inputs = {name: moved(value, self.model) for name, value in batch.inputs.items()}
        with contextlib.ExitStack() as stack:
            receive = functools.partial(partial.heads.receive, batch=batch)
            tapped = stack.enter_context(tap(self.model, receive, fallback=self._fallback, this_thread=True))
            if self._layers is not None and partial.layers is not None:
                self._layers.sums, self._layers.by_passage = partial.layers, partial.layers_by_passage
                stack.enter_context(self._layers.batch(batch.content, batch.keys, batch.present, batch.origins))
            try:
                run_model(self.model, inputs)
            except IndexError as error:
                raise _beyond(error) from error
        if self._layers is not None and partial.layers is not None:
            whole = [row for row in range(len(batch.keys)) if row not in self._layers.broken]
            partial.passages.offer(inputs, batch.content, batch.keys, batch.origins, whole)
        # A module that did not run, such as the vision encoder of a model that reads text, makes no mean wrong.
        coverage = tapped.coverage
        missing = [name for name in coverage.missing if name not in coverage.idle]
        if missing or not coverage.observed:
            raise NotObservable(
                f"{coverage.sentence}, so means over the model would be wrong; not observed:"
                f" {', '.join(missing) or 'any attention'}; massieu doctor MODEL lists its attention calls"
            )
        partial.coverage.merge(coverage)

    def _examine(self, batch: Batch | None) -> None:
        """Check that observing changes nothing, and find the layers, before anything is read."""
        if batch is None:  # the sentence has no token for this tokenizer; the first passage will do
            return
        with torch.no_grad(), without_fast_path():
            few, alone = self._finite(few_tokens(batch.inputs, self.model))
            with tap(self.model, lambda call: None, this_thread=True) as found:
                observed = _tensors(run_model(self.model, few))
        # Inside a tap a compiled model runs uncompiled, which changes its last digits.
        same = torch.allclose if found.compiled else torch.equal
        if not all(same(one, other) for one, other in zip(alone, observed, strict=True)):
            raise NotObservable("the model's output changes from run to run, or when it is observed; is dropout on?")
        self._fallback = bool(found.bypassed or found.missing)
        if self.options.experiments == "default":
            self._layers = LayerObserver(self.model, few)
        self._ready = True

    def _finite(self, inputs: dict[str, Any]) -> tuple[dict[str, Any], list[Tensor]]:
        """Inputs with a finite output, and that output: these inputs, or random tokens where a word is broken."""
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
    """First sequence of a batch, cut short if it is text, on the device of the model."""
    return {name: moved(_few(name, value), model) for name, value in inputs.items()}


def _few(name: str, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    text = name.endswith(("input_ids", "attention_mask", "position_ids"))
    return value[:1, :FEW_TOKENS] if text and value.dim() == 2 else value[:1]


def _other_tokens(name: str, value: Any, generator: torch.Generator) -> Any:
    """Random tokens in the place of token numbers; any other input unchanged."""
    if not name.endswith("input_ids") or not isinstance(value, Tensor) or value.is_floating_point():
        return value
    return torch.randint(int(value.max()) + 1, value.shape, generator=generator, dtype=value.dtype).to(value.device)


def _count_blank(documents: Iterable[Document], partial: PartialResult) -> Iterator[Document]:
    """Pass documents on and count those without text."""
    for document in documents:
        partial.counts.blank += not document.text.strip()
        yield document


def _tried(model: nn.Module, inputs: dict[str, Any]) -> Any:
    """Run a model for the first time; its errors are errors for the user."""
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


@dataclass(frozen=True)
class RemoteReader:
    """Description of a reader that travels to other processes.

    Attributes:
        origin: name by which the model is loaded.
        options: reading options.
        identity: of the partial results of the first process; a process with another one is refused.
        has_enough_documents: as in :class:`Reader`.
    """

    origin: Origin
    options: Options
    identity: Identity
    has_enough_documents: bool

    def open(self, place: str) -> Reader:
        """The reader in this process, which keeps the last model that it has loaded."""
        key = repr((self.origin, self.options, self.identity.model))  # a folder may hold another model by now
        if key not in _opened:
            _opened.clear()  # a worker has memory for one
            loaded = self.origin.load()
            name, revision = self.identity.name, self.identity.revision
            _opened[key] = Reader(loaded.model, loaded.tokenizer, self.options, name=name, revision=revision)
        reader = _opened[key]
        difference = self.identity.difference(reader.identity)
        if difference is not None:
            raise UserError(
                f"the worker {place} must have the model of the process that started the run,"
                f" but {difference}; give all machines the same files and the same versions"
            )
        reader.has_enough_documents = self.has_enough_documents
        return reader
