"""Inspect a model: one pass over the text, all statistics at once."""

from __future__ import annotations

import dataclasses
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any, Literal, TypeVar

from torch import nn

from massieu import assets
from massieu.checks import NotObservable, UserError
from massieu.corpus import Corpus, Document, Readable
from massieu.corpus.batching import check_texts
from massieu.corpus.shards import TOGETHER, Shard, group_shards, text_shards
from massieu.engine import Checkpoint, Engine, fold
from massieu.inspection.options import Options
from massieu.inspection.partial_result import FEWEST_DOCUMENTS, PartialResult
from massieu.inspection.reader import Reader
from massieu.inspection.result import Inspection
from massieu.inspection.tables import build_inspection
from massieu.models.loading import load
from massieu.models.origin import Origin
from massieu.outputs.progress import Progress, progress_bar

__all__ = ["NotObservable", "inspect_model"]

SHARDS = 16
"""Shards of a text in memory for several workers, if these are neither too small nor too large."""

FEWEST_TOGETHER = 32

CHEAP = 8 << 20
"""Bytes of text that are checked before the model reads them: seconds, where reading takes minutes."""

CHECKED = 32
"""Documents on which the vocabulary of the tokenizer is checked before reading."""

OPENED = 8
"""Shards of a corpus that these documents come from."""

T = TypeVar("T")
LOADING = ("dtype", "device", "device_map", "revision", "trust_remote_code", "offline")


def inspect_model(
    model: nn.Module | str | None = None,
    texts: Iterable[str] | Corpus | None = None,
    *,
    tokenizer: Any | None = None,
    inputs: Iterable[Mapping[str, Any]] | None = None,
    batch_size: int = 16,
    max_length: int | None = None,
    experiments: Literal["default", "heads"] = "default",
    rows: int | None = 32,
    special_tokens: bool = False,
    padding: Literal["right", "left"] = "right",
    long_documents: Literal["error", "cut", "skip"] | None = None,
    source: str | None = None,
    progress: Progress | bool | None = None,
    engine: Engine | Literal["local", "dask"] | None = None,
    checkpoint: Checkpoint | str | Path | None = None,
    resume: bool = False,
    **loading: Any,
) -> Inspection:
    """Measure every attention head and every layer of a transformer on a text.

    The text is read once, and nothing of the size of an attention matrix is kept. The outputs of the model stay the
    same, which is checked on the first batch. Inspections of one model in several threads wait for each other, and
    passes of other threads do not count; copy a model that another thread trains meanwhile.

    Args:
        model: a model, or what :func:`massieu.models.loading.load` understands; None for the embedded one.
        texts: the documents: a list, anything that gives them one by one, or a :class:`~massieu.inspection.Corpus` of
            files; None for the embedded ones.
        tokenizer: of the model, if it is handed over as a module.
        inputs: for a model without tokenizer, batches as dicts of tensors instead of ``texts``.
        batch_size: number of passages that the model reads at once; results do not depend on it.
        max_length: number of tokens of a passage; None for the model's window.
        experiments: "default", or "heads" for the statistics of attention alone, which cost the least.
        rows: rows of each passage that are examined whole, for the 90% mass and the range of scores; None for all.
        special_tokens: whether special tokens count as well.
        padding: the side on which shorter passages are filled up.
        long_documents: what to do with documents of more tokens than a passage: "cut" them into passages, "skip" and
            count them, or "error" to refuse them; None cuts if ``max_length`` is given, and refuses otherwise.
        source: name of the text in the report.
        progress: None draws a bar in a terminal or a notebook after two seconds, True anywhere and at once, False
            never. A function is called with the name of the work, the amount done and the total (0 if unknown):
            "reading" counts documents, "tokens" the tokens in them, "experiments" comes last.
        engine: None or "local" to read in this process, "dask" for processes of this machine, or a
            :class:`massieu.engine.Dask`, which joins a cluster. Other processes need a model by its name.
        checkpoint: a file that says how far the reading has come while it lasts; None for no such file. A
            :class:`~massieu.engine.Checkpoint` is left there at the end.
        resume: go on from that file, if it is there.
        **loading: of :func:`massieu.models.loading.load`, for a model by name.

    Returns:
        An :class:`Inspection` with the tables ``heads``, ``layers`` and ``experiments``.

    Example:
        >>> found = inspect_model(texts=["Call me Ishmael."], experiments="heads")
        >>> found.facts["coverage"]["sentence"]
        'observed 5 of 5 attention modules'
    """
    begin = time.perf_counter()
    options = Options(batch_size, max_length, experiments, rows, special_tokens, padding, long_documents)
    if texts is None and inputs is None:
        texts, source = assets.documents(), source or "embedded text"
    check_texts(texts, inputs)
    reader, notes = _reader(model, tokenizer, options, loading, reads_text=inputs is None)
    kept = _checkpoint(checkpoint, resume)
    with progress_bar(progress) as report:
        if inputs is not None:
            if engine is not None or kept is not None:
                raise UserError("an engine or a checkpoint needs texts, got inputs; leave it out, or pass texts")
            partial = reader.read_tensors(inputs, progress=_reporter(report, None))
            if not partial.counts.documents:
                raise UserError("inputs must hold at least one batch, got none; pass [{name of an argument: tensor}]")
        else:
            assert texts is not None
            partial = _read_texts(reader, texts, engine, kept, report)
            source = source or (texts.name if isinstance(texts, Corpus) else None)
        partial.sources = {source} if source else set()
        if report is not None and experiments == "default":
            report("experiments", 0, 0)
        found = build_inspection(partial, reader.model, check=False, stream=reader.stream)
    found.notes = [*notes, *found.notes]
    found.facts |= {
        "options": {**options.result_affecting(), "batch_size": batch_size, "padding": padding},
        "seconds": time.perf_counter() - begin,
        "peak_memory_mb": _peak_memory(),
    }
    if kept is not None and not isinstance(checkpoint, Checkpoint):
        kept.remove()
    return found


def _reader(
    model: nn.Module | str | None, tokenizer: Any, options: Options, loading: dict[str, Any], *, reads_text: bool
) -> tuple[Reader, list[str]]:
    """Reader of a model, which is loaded if it is a name, with notes on loading."""
    unknown = sorted(set(loading) - set(LOADING))
    if unknown or (loading and isinstance(model, nn.Module)):
        names = ", ".join(unknown or loading)
        raise UserError(f"inspect_model does not know {names}; {', '.join(LOADING)} are for a model by name")
    if isinstance(model, nn.Module):
        reader, notes = Reader(model, tokenizer, options), []
    else:
        loaded = load(str(assets.MODEL) if model is None else model, **loading)
        if tokenizer is None and reads_text and loaded.tokenizer_fault is not None:
            raise UserError(f"texts need a tokenizer: {loaded.tokenizer_fault}")
        # Another tokenizer would not travel to other processes.
        origin = Origin.of(model, loading, loaded.revision) if tokenizer is None else None
        name = "embedded" if model is None else loaded.name
        reader = Reader(
            loaded.model, tokenizer or loaded.tokenizer, options, name=name, revision=loaded.revision, origin=origin
        )
        notes = loaded.notes
    if options.experiments == "default" and any(parameter.is_meta for parameter in reader.model.parameters()):
        raise UserError(
            "the experiments need all weights in memory, and parts of the model lie on disk;"
            ' pass --heads-only (experiments="heads"), or a device_map without disk'
        )
    return reader, notes


def _checkpoint(checkpoint: Checkpoint | str | Path | None, resume: bool) -> Checkpoint | None:
    if resume and checkpoint is None:
        raise UserError("resume goes on from a checkpoint, got none; pass checkpoint=, or --out or --checkpoint")
    if isinstance(checkpoint, Checkpoint) and resume:
        return dataclasses.replace(checkpoint, resume=True)
    return Checkpoint(Path(checkpoint), resume) if isinstance(checkpoint, (str, Path)) else checkpoint


def _read_texts(
    reader: Reader,
    texts: Iterable[str] | Corpus,
    engine: Engine | str | None,
    checkpoint: Checkpoint | None,
    report: Progress | None,
) -> PartialResult:
    """Partial result of all shards of a text."""
    shards, reader.has_enough_documents = _shards(texts, fine=engine not in (None, "local") or checkpoint is not None)
    reader.batcher.check_lengths(_cheap(texts))
    reader.batcher.check_vocabulary(_some_texts(texts, shards))
    total = len(texts) if isinstance(texts, Sized) else None
    partial: PartialResult = fold(
        reader, shards, engine=engine, checkpoint=checkpoint, progress=_reporter(report, total)
    )
    if isinstance(texts, Corpus):
        texts.check(partial.counts.documents + partial.counts.long, partial.bad_records)
    return partial


def _reporter(progress: Progress | None, total: int | None) -> Callable[..., None] | None:
    """Return a function that reports documents, of a known or an estimated total, and tokens."""
    if progress is None:
        return None

    def report(documents: int, tokens: int = 0, fraction: float | None = None) -> None:
        if tokens:
            progress("tokens", tokens, 0)
        estimate = round(documents / fraction) if fraction else 0
        progress("reading", documents, estimate if total is None else total)

    return report


def _shards(texts: Iterable[str] | Corpus, *, fine: bool) -> tuple[Iterable[Readable], bool]:
    """Shards of a text, and whether the first ones show that there are enough documents for standard errors."""
    if isinstance(texts, Corpus):
        groups = group_shards(texts.shards(), texts.shard_bytes)
        some = itertools.islice((document for group in groups for document in group.read()), FEWEST_DOCUMENTS)
        return groups, len(list(some)) == FEWEST_DOCUMENTS
    if fine and isinstance(texts, Sequence):
        # Small enough for several workers, and for a checkpoint now and then; by the text alone, so that the shards
        # are the same when the run is resumed.
        size = min(TOGETHER, max(FEWEST_TOGETHER, len(texts) // SHARDS))
        return list(text_shards(texts, size)), len(texts) >= FEWEST_DOCUMENTS
    cut = text_shards(texts)
    first = next(cut, Shard.of_texts(()))
    return itertools.chain([first], cut), len(first.texts) >= FEWEST_DOCUMENTS


def _cheap(texts: Iterable[str] | Corpus) -> Iterable[Document]:
    """All documents, if reading them twice costs little; otherwise none."""
    if isinstance(texts, Corpus):
        return texts.documents() if texts.num_bytes <= CHEAP else ()
    if not isinstance(texts, Sequence) or sum(len(text) for text in texts if isinstance(text, str)) > CHEAP:
        return ()
    return (Document(text, f"text number {i}") for i, text in enumerate(texts, 1) if isinstance(text, str))


def _some_texts(texts: Iterable[str] | Corpus, shards: Iterable[Readable]) -> list[str]:
    """A few documents at equal distances in a text; none if it can be read only once."""
    if isinstance(texts, Sequence):
        return [text for text in _spread(texts, CHECKED) if isinstance(text, str)]
    if not isinstance(texts, Corpus) or not isinstance(shards, Sequence):
        return []
    chosen = _spread(shards, OPENED)
    each = CHECKED // max(1, len(chosen))
    return [document.text for shard in chosen for document in itertools.islice(shard.read(), each)]


def _spread(every: Sequence[T], count: int) -> Sequence[T]:
    """At most ``count`` elements at equal distances."""
    return every[:: -(-len(every) // count) or 1]


def _peak_memory() -> float | None:
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6
