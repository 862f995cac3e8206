"""Inspect a model: one pass over the text, all statistics at once."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sized
from typing import Any, Literal

from torch import nn

from massieu.engine import Engine, Local
from massieu.inspection.corpus import Corpus
from massieu.inspection.finishing import finish
from massieu.inspection.loading import load
from massieu.inspection.options import Options
from massieu.inspection.parts import FEWEST_DOCUMENTS
from massieu.inspection.reader import NotObservable, Reader
from massieu.inspection.reading import check_texts
from massieu.inspection.result import Inspection
from massieu.inspection.splits import Piece, TextSplit, grouped, text_splits

__all__ = ["NotObservable", "inspect_model"]

LOADING = ("dtype", "device", "revision", "trust_remote_code", "offline")


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
    source: str | None = None,
    progress: Callable[[str, int, int], object] | None = None,
    engine: Engine | None = None,
    **loading: Any,
) -> Inspection:
    """Measure every attention head and every layer of a transformer on a text.

    The text is read once, and nothing of the size of an attention matrix is kept. The model computes what it computes
    without us, which is checked on the first batch.

    Args:
        model: a model, or what :func:`massieu.inspection.loading.load` understands; None for the embedded one.
        texts: the documents: a list, anything that gives them one by one, or a :class:`~massieu.inspection.Corpus` of
            files; None for the embedded ones.
        tokenizer: of the model, if it is handed over as a module.
        inputs: for a model without tokenizer, batches as dicts of tensors instead of ``texts``.
        batch_size: number of passages that the model reads at once; figures do not depend on it.
        max_length: cut documents into passages of so many tokens; None refuses those that exceed the model's window.
        experiments: "default", or "heads" for the statistics of attention alone, which cost the least.
        rows: rows of each passage that are looked at whole, for the 90% mass and the range of scores; None for all.
        special_tokens: whether special tokens count as well.
        padding: the side on which shorter passages are filled up.
        source: what the text is called in the report.
        progress: called with what is being done, how much of it is done, and of how much (0 if that is not known).
        engine: where the text is read; None for this process.
        **loading: ``dtype``, ``device``, ``revision``, ``trust_remote_code``, ``offline``, for a model by name.

    Returns:
        An :class:`Inspection` with the tables ``heads``, ``layers`` and ``experiments``.

    Example:
        >>> found = inspect_model(texts=["Call me Ishmael."], experiments="heads")
        >>> found.facts["heard"]["sentence"]
        'heard 5 of 5 attention modules'
    """
    begin = time.perf_counter()
    options = Options(batch_size, max_length, experiments, rows, special_tokens, padding)
    unknown = sorted(set(loading) - set(LOADING))
    if unknown or (loading and isinstance(model, nn.Module)):
        names = ", ".join(unknown or loading)
        raise TypeError(f"inspect_model does not know {names}; {', '.join(LOADING)} are for a model by name")
    name, revision, origin = None, None, None
    if model is None:
        from massieu import assets

        model, name = str(assets.MODEL), "embedded"
    if texts is None and inputs is None:
        from massieu import assets

        texts, source = assets.documents(), source or "embedded text"
    check_texts(texts, inputs)
    if isinstance(model, str):
        loaded, origin = load(model, **loading), (model, loading)
        model, tokenizer, revision = loaded.model, tokenizer or loaded.tokenizer, loaded.revision
        name = name or loaded.name
    reader = Reader(model, tokenizer, options, name=name, revision=revision, source=origin)
    total = len(texts) if isinstance(texts, Sized) else 0

    def report(done: int) -> None:
        if progress is not None:
            progress("reading", done, max(total, done) if inputs is not None else total)

    if inputs is not None:
        part = reader.read_tensors(inputs, progress=report)
        if not part.counts.documents:
            raise ValueError("inputs must hold at least one batch, got none; pass [{name of an argument: tensor}]")
    else:
        assert texts is not None
        splits, many = _splits(texts)
        part = (engine or Local()).read(reader, splits, many=many, progress=report)
        if isinstance(texts, Corpus):
            texts.check(part.counts.documents, part.faults)
            source = source or texts.name
    part.sources = {source} if source else set()
    if progress is not None and experiments == "default":
        progress("experiments", 0, 0)
    found = finish(part, model, check=False)
    found.facts |= {
        "options": {**options.of_figures(), "batch_size": batch_size, "padding": padding},
        "seconds": time.perf_counter() - begin,
        "peak_memory_mb": _peak_memory(),
    }
    return found


def _splits(texts: Iterable[str] | Corpus) -> tuple[Iterable[Piece], bool]:
    """The pieces of a text, and whether its first ones show that there are enough documents for standard errors."""
    if isinstance(texts, Corpus):
        pieces = grouped(texts.splits())
        some = itertools.islice((document for piece in pieces for document in piece.read()), FEWEST_DOCUMENTS)
        return pieces, len(list(some)) == FEWEST_DOCUMENTS
    cut = text_splits(texts)
    first = next(cut, TextSplit(()))
    return itertools.chain([first], cut), len(first.texts) >= FEWEST_DOCUMENTS


def _peak_memory() -> float | None:
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6
