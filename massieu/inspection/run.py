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

from massieu.checks import UserError
from massieu.corpus import Corpus, Document
from massieu.corpus.batching import check_texts
from massieu.engine import Checkpoint, Engine, Origin, engine_named
from massieu.inspection.options import Options
from massieu.inspection.partial_result import FEWEST_DOCUMENTS
from massieu.inspection.reader import NotObservable, Reader
from massieu.inspection.result import Inspection
from massieu.inspection.splits import TOGETHER, Piece, TextSplit, grouped, text_splits
from massieu.inspection.tables import finish
from massieu.models.loading import load
from massieu.outputs.progress import Progress, progress_bar

__all__ = ["NotObservable", "inspect_model"]

PIECES = 16
"""Into how many a text in memory is cut for several workers, if these are not too small or too large."""

FEWEST_TOGETHER = 32

CHEAP = 8 << 20
"""Bytes of text that are looked through before the model reads them: seconds, where reading takes minutes."""

LOOKED_AT = 32
"""Documents by which it is seen before reading whether the tokenizer knows the words of a text."""

OPENED = 8
"""Pieces of a corpus that these documents come from."""

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

    The text is read once, and nothing of the size of an attention matrix is kept. The model computes what it computes
    without us, which is checked on the first batch. Inspections of one model in several threads wait for each
    other, and passes of other threads do not count; a model that another thread trains meanwhile should be a copy.

    Args:
        model: a model, or what :func:`massieu.models.loading.load` understands; None for the embedded one.
        texts: the documents: a list, anything that gives them one by one, or a :class:`~massieu.inspection.Corpus` of
            files; None for the embedded ones.
        tokenizer: of the model, if it is handed over as a module.
        inputs: for a model without tokenizer, batches as dicts of tensors instead of ``texts``.
        batch_size: number of passages that the model reads at once; figures do not depend on it.
        max_length: number of tokens of a passage; None for the model's window.
        experiments: "default", or "heads" for the statistics of attention alone, which cost the least.
        rows: rows of each passage that are looked at whole, for the 90% mass and the range of scores; None for all.
        special_tokens: whether special tokens count as well.
        padding: the side on which shorter passages are filled up.
        long_documents: what to do with documents of more tokens than a passage: "cut" them into passages, "skip" and
            count them, or "error" to refuse them; None cuts if ``max_length`` is given, and refuses otherwise.
        source: what the text is called in the report.
        progress: None draws a bar in a terminal or a notebook after two seconds, True anywhere and at once, False
            never. A function is called with what is being done, how much of it is done, and of how much (0 if that is
            not known): "reading" counts documents, "tokens" the tokens in them, "experiments" comes last.
        engine: where the text is read: None or "local" in this process, "dask" by processes of this machine, or such as
            a :class:`massieu.engine.Dask`, which joins a cluster. Others than this process need a model by its name.
        checkpoint: a file that says how far the reading has come while it lasts; None for no such file. A
            :class:`~massieu.engine.Checkpoint` is left there at the end.
        resume: go on from that file, if it is there.
        **loading: of :func:`massieu.models.loading.load`, for a model by name.

    Returns:
        An :class:`Inspection` with the tables ``heads``, ``layers`` and ``experiments``.

    Example:
        >>> found = inspect_model(texts=["Call me Ishmael."], experiments="heads")
        >>> found.facts["heard"]["sentence"]
        'heard 5 of 5 attention modules'
    """
    begin = time.perf_counter()
    options = Options(batch_size, max_length, experiments, rows, special_tokens, padding, long_documents)
    unknown = sorted(set(loading) - set(LOADING))
    if unknown or (loading and isinstance(model, nn.Module)):
        names = ", ".join(unknown or loading)
        raise UserError(f"inspect_model does not know {names}; {', '.join(LOADING)} are for a model by name")
    name, revision, origin = None, None, None
    notes: list[str] = []
    asked = model
    if model is None:
        from massieu import assets

        model, name = str(assets.MODEL), "embedded"
    if texts is None and inputs is None:
        from massieu import assets

        texts, source = assets.documents(), source or "embedded text"
    check_texts(texts, inputs)
    if isinstance(model, str):
        loaded = load(model, **loading)
        if tokenizer is None:  # another one would not come along
            origin = Origin.of(None if asked is None else model, loading, loaded.revision)
        model, tokenizer, revision = loaded.model, tokenizer or loaded.tokenizer, loaded.revision
        name, notes = name or loaded.name, loaded.notes
        if tokenizer is None and inputs is None and loaded.tokenizer_fault is not None:
            raise UserError(f"texts need a tokenizer: {loaded.tokenizer_fault}")
    if experiments == "default" and any(parameter.is_meta for parameter in model.parameters()):
        raise UserError(
            "the experiments need all weights in memory, and parts of the model lie on disk;"
            ' pass --heads-only (experiments="heads"), or a device_map without disk'
        )
    reader = Reader(model, tokenizer, options, name=name, revision=revision)
    kept = Checkpoint(Path(checkpoint), resume) if isinstance(checkpoint, (str, Path)) else checkpoint
    if isinstance(checkpoint, Checkpoint) and resume:
        kept = dataclasses.replace(checkpoint, resume=True)
    if resume and kept is None:
        raise UserError("resume goes on from a checkpoint, got none; pass checkpoint=, or --out or --checkpoint")
    with progress_bar(progress) as tell:
        if inputs is not None:
            if engine is not None or kept is not None:
                raise UserError("an engine or a checkpoint needs texts, got inputs; leave it out, or pass texts")
            part = reader.read_tensors(inputs, progress=_teller(tell, None))
            if not part.counts.documents:
                raise UserError("inputs must hold at least one batch, got none; pass [{name of an argument: tensor}]")
        else:
            assert texts is not None
            report = _teller(tell, len(texts) if isinstance(texts, Sized) else None)
            splits, many = _splits(texts, fine=engine not in (None, "local") or kept is not None)
            chosen = engine_named(engine or "local") if engine is None or isinstance(engine, str) else engine
            if not callable(getattr(chosen, "read", None)):
                raise UserError(f"engine must be local, dask or an engine, got {type(engine).__name__}; pass Dask(...)")
            try:
                reader.reading.check_lengths(_cheap(texts))
                reader.reading.check_vocabulary(_some_texts(texts, splits))
                part = chosen.read(reader, splits, many=many, origin=origin, checkpoint=kept, progress=report)
            finally:
                if chosen is not engine:
                    chosen.close()
            if isinstance(texts, Corpus):
                texts.check(part.counts.documents + part.counts.long, part.faults)
                source = source or texts.name
        part.sources = {source} if source else set()
        if tell is not None and experiments == "default":
            tell("experiments", 0, 0)
        found = finish(part, model, check=False)
    found.notes = [*notes, *found.notes]
    found.facts |= {
        "options": {**options.of_figures(), "batch_size": batch_size, "padding": padding},
        "seconds": time.perf_counter() - begin,
        "peak_memory_mb": _peak_memory(),
    }
    if kept is not None and not isinstance(checkpoint, Checkpoint):
        kept.remove()
    return found


def _teller(progress: Progress | None, total: int | None) -> Callable[..., None] | None:
    """Tells how far the reading is: documents of how many, or of about how many, and tokens."""
    if progress is None:
        return None

    def tell(documents: int, tokens: int = 0, share: float | None = None) -> None:
        if tokens:
            progress("tokens", tokens, 0)
        about = round(documents / share) if share else 0
        progress("reading", documents, about if total is None else total)

    return tell


def _splits(texts: Iterable[str] | Corpus, *, fine: bool) -> tuple[Iterable[Piece], bool]:
    """The pieces of a text, and whether its first ones show that there are enough documents for standard errors."""
    if isinstance(texts, Corpus):
        pieces: Sequence[Piece] = grouped(texts.splits(), texts.split_bytes)
        some = itertools.islice((document for piece in pieces for document in piece.read()), FEWEST_DOCUMENTS)
        return pieces, len(list(some)) == FEWEST_DOCUMENTS
    if fine and isinstance(texts, Sequence):
        # Small enough for several workers, and for a checkpoint now and then; by the text alone, so that it is
        # the same when the run is resumed.
        size = min(TOGETHER, max(FEWEST_TOGETHER, len(texts) // PIECES))
        return list(text_splits(texts, size)), len(texts) >= FEWEST_DOCUMENTS
    cut = text_splits(texts)
    first = next(cut, TextSplit(()))
    return itertools.chain([first], cut), len(first.texts) >= FEWEST_DOCUMENTS


def _cheap(texts: Iterable[str] | Corpus) -> Iterable[Document]:
    """All documents, if reading them twice costs little; otherwise none."""
    if isinstance(texts, Corpus):
        return texts.documents() if texts.num_bytes <= CHEAP else ()
    if not isinstance(texts, Sequence) or sum(len(text) for text in texts if isinstance(text, str)) > CHEAP:
        return ()
    return (Document(text, f"text number {i}") for i, text in enumerate(texts, 1) if isinstance(text, str))


def _some_texts(texts: Iterable[str] | Corpus, pieces: Iterable[Piece]) -> list[str]:
    """A few documents from all over a text; none if it can be read only once."""
    if isinstance(texts, Sequence):
        return [text for text in _spread(texts, LOOKED_AT) if isinstance(text, str)]
    if not isinstance(texts, Corpus) or not isinstance(pieces, Sequence):
        return []
    chosen = _spread(pieces, OPENED)
    each = LOOKED_AT // max(1, len(chosen))
    return [document.text for piece in chosen for document in itertools.islice(piece.read(), each)]


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
