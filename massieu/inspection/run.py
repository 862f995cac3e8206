"""Inspect a model: one pass over the text, all statistics at once."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from massieu import kernels
from massieu.inspection.batches import Batch
from massieu.inspection.evaluation import evaluating, moved, run_model
from massieu.inspection.head_geometry import head_geometry
from massieu.inspection.heads import HeadStatistics
from massieu.inspection.layers import LayerObserver
from massieu.inspection.loading import load
from massieu.inspection.reading import Reading
from massieu.inspection.result import Inspection
from massieu.inspection.sampling import PassageSample
from massieu.inspection.weights import HeadWeights, head_weights
from massieu.taps import Tap, tap

__all__ = ["NotObservable", "inspect_model"]

EXPERIMENTS = ("heads", "default")
LOADING = ("dtype", "device", "revision", "trust_remote_code", "offline")
FEW_TOKENS = 16  # enough to see that listening changes nothing


class NotObservable(RuntimeError):  # noqa: N818  # a state of the model, not a mistake
    """The attention of the model, or a part of it, cannot be seen."""


def inspect_model(
    model: nn.Module | str | None = None,
    texts: Sequence[str] | None = None,
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
    **loading: Any,
) -> Inspection:
    """Measure every attention head and every layer of a transformer on a text.

    The text is read once, and nothing of the size of an attention matrix is kept. The model computes what it computes
    without us, which is checked on the first batch.

    Args:
        model: a model, or what :func:`massieu.inspection.loading.load` understands; None for the embedded one.
        texts: the documents; None for the embedded ones.
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
        **loading: ``dtype``, ``device``, ``revision``, ``trust_remote_code``, ``offline``, for a model by name.

    Returns:
        An :class:`Inspection` with the tables ``heads``, ``layers`` and ``experiments``.

    Example:
        >>> found = inspect_model(texts=["Call me Ishmael."], experiments="heads")
        >>> found.facts["heard"]["sentence"]
        'heard 5 of 5 attention modules'
    """
    begin = time.perf_counter()
    if experiments not in EXPERIMENTS:
        raise ValueError(
            f"experiments must be one of {', '.join(EXPERIMENTS)}, got {experiments}; heads is the fastest"
        )
    if not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(f"batch_size must be a positive whole number, got {batch_size!r}; 16 is usual")
    unknown = sorted(set(loading) - set(LOADING))
    if unknown or (loading and isinstance(model, nn.Module)):
        names = ", ".join(unknown or loading)
        raise TypeError(f"inspect_model does not know {names}; {', '.join(LOADING)} are for a model by name")
    name, revision = None, None
    if model is None:
        from massieu import assets

        model, name = str(assets.MODEL), "embedded"
    if texts is None and inputs is None:
        from massieu import assets

        texts, source = assets.documents(), source or "embedded text"
    if isinstance(model, str):
        loaded = load(model, **loading)
        model, tokenizer, revision = loaded.model, tokenizer or loaded.tokenizer, loaded.revision
        name = name or loaded.name
    reading = Reading(model, tokenizer, texts, inputs, batch_size, max_length, special_tokens, padding)
    run = _Run(model, rows, experiments)
    with evaluating(model):
        for batch in reading.batches():
            run.read(batch)
            if progress is not None:
                progress("reading", reading.documents_done(batch), reading.documents)
        if run.tap is None:
            raise ValueError("inputs must hold at least one batch, got none; pass [{name of an argument: tensor}]")
        if inputs is not None:
            reading.tokens = reading.counted = max((layer.rows for layer in run.heads.layers.values()), default=0)
        if progress is not None and experiments == "default":
            progress("experiments", 0, 0)
        if reading.counted == 0:
            raise ValueError(
                f"the text has no content tokens: all of its {reading.tokens} tokens are special ones;"
                " pass more text, or --special-tokens to count them"
            )
        found = run.finish(reading.notes())
    options = {"batch_size": batch_size, "max_length": max_length, "rows": rows, "experiments": experiments}
    found.facts |= {
        "model": {**_model_facts(model, name, revision), "head_width": run.head_width()},
        "text": reading.facts(source),
        "heard": run.heard(),
        "versions": _versions(),
        "options": {**options, "padding": padding},
        "seconds": time.perf_counter() - begin,
        "peak_memory_mb": _peak_memory(),
    }
    return found


class _Run:
    """All that listens to the model while it reads."""

    def __init__(self, model: nn.Module, rows: int | None, experiments: str) -> None:
        self.model = model
        self.heads = HeadStatistics(rows)
        self.whole = experiments == "default"
        self.weights: list[HeadWeights] = []
        self.layers: LayerObserver | None = None
        self.passages = PassageSample()
        self.tap: Tap | None = None
        self.fallback = True

    def read(self, batch: Batch) -> None:
        """Run the model on one batch."""
        inputs = {name: moved(value, self.model) for name, value in batch.inputs.items()}
        if self.tap is None:
            self._first(inputs)
        with contextlib.ExitStack() as stack:
            receive = functools.partial(self.heads.receive, batch=batch)
            self.tap = stack.enter_context(tap(self.model, receive, fallback=self.fallback))
            if self.layers is not None:
                self.passages.offer(inputs, batch.content, batch.keys)
                stack.enter_context(self.layers.batch(batch.content, batch.keys, batch.present, batch.origins))
            try:
                run_model(self.model, inputs)
            except IndexError as error:
                raise ValueError(
                    f"the model cannot read these tokens ({error}); are there too many, or some beyond its vocabulary?"
                ) from error
        # A module that did not run, such as the vision part of a model that reads text, makes no mean wrong.
        missing = [name for name in self.tap.missing if name not in self.tap.idle]
        if missing or not self.tap.heard:
            raise NotObservable(
                f"{self.tap.sentence}, so means over the model would be wrong; not heard:"
                f" {', '.join(missing) or 'any attention'}; massieu doctor MODEL says what is in it"
            )

    def _first(self, inputs: dict[str, Any]) -> None:
        """On the first batch: that listening changes nothing, and where everything is."""
        few = {name: _few(name, value) for name, value in inputs.items()}
        with torch.no_grad(), _without_fast_path():
            alone = _tensors(_tried(self.model, few))
            if not all(bool(x.isfinite().all()) for x in alone if x.is_floating_point() and x.numel()):
                raise NotObservable(
                    "the model's output is not finite, so its weights are damaged or its dtype is too narrow"
                )
            with tap(self.model, lambda call: None) as listening:
                heard = _tensors(run_model(self.model, few))
        # Inside a tap a compiled model runs uncompiled, which changes its last digits.
        same = torch.allclose if listening.compiled else torch.equal
        if not all(same(one, other) for one, other in zip(alone, heard, strict=True)):
            raise NotObservable("the model's output changes from run to run, or when it is heard; is dropout on?")
        self.fallback = bool(listening.bypassed or listening.missing)
        if self.whole:
            self.weights = head_weights(self.model, few)
            self.layers = LayerObserver(self.model, few)

    def heard(self) -> dict[str, Any]:
        """What was heard, for the report."""
        assert self.tap is not None
        expected = len(self.tap.expected)
        found = {"expected": expected, "heard": len(self.tap.heard), "sentence": self.tap.sentence}
        return {**found, "missing": self.tap.missing}

    def head_width(self) -> int | None:
        """Dimensions of the queries, the same for all heads, if the weights were found."""
        widths = {each.query.shape[1] for each in self.weights if each.query is not None}
        return widths.pop() if len(widths) == 1 else None

    def finish(self, notes: list[str]) -> Inspection:
        """The tables; the facts come later."""
        import pandas

        assert self.tap is not None
        heads = self.heads.table()
        layers, experiments = pandas.DataFrame(), pandas.DataFrame()
        notes = [*notes, *self.tap.notes, *self.heads.notes]
        if self.tap.idle:
            notes.append(
                f"{len(self.tap.idle)} attention modules did not run on this text: {', '.join(self.tap.idle)}."
            )
        if self.layers is not None:
            fields = self.passages.probe(self.model, self.layers.anatomy)
            layers = self.layers.table(fields.table)
            geometry = head_geometry(self.weights, self.layers.input_covariances(self.weights))
            figures = geometry.heads.drop(columns=["name", "idempotency", "logit_sd"])  # these are experiments only
            heads = heads.merge(figures, on=["stack", "layer", "head"], how="left")
            experiments = geometry.experiments
            notes += [*geometry.notes, *self.layers.notes, *fields.notes]
        return Inspection(heads, layers, experiments, {}, notes)


@contextlib.contextmanager
def _without_fast_path() -> Iterator[None]:
    """Without the fused encoder layers of torch, which hide their attention and differ in the last digits."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


def _tried(model: nn.Module, inputs: dict[str, Any]) -> Any:
    """The first run of a model; what goes wrong in it is one sentence."""
    try:
        return run_model(model, inputs)
    except Exception as error:
        text = " ".join(str(error).split())[:160] or type(error).__name__
        raise ValueError(
            f"the model cannot be run on {', '.join(inputs)} ({text});"
            " one that reads more than text takes inputs= in Python, with every argument that it needs"
        ) from error


def _tensors(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    values = result.values() if isinstance(result, Mapping) else result if isinstance(result, (list, tuple)) else ()
    return [tensor for value in values for tensor in _tensors(value)]


def _few(name: str, value: Any) -> Any:
    """The first sequence of a batch, cut short if it is text."""
    if not isinstance(value, Tensor):
        return value
    text = name.endswith(("input_ids", "attention_mask", "position_ids"))
    return value[:1, :FEW_TOKENS] if text and value.dim() == 2 else value[:1]


def _model_facts(model: nn.Module, name: str | None, revision: str | None) -> dict[str, Any]:
    config = getattr(model, "config", None)

    def known(*names: str) -> Any:
        return next((getattr(config, each) for each in names if getattr(config, each, None) is not None), None)

    first = next(model.parameters(), None)
    short = Path(name).name if name and Path(name).is_dir() else name
    return {
        "name": short or known("name_or_path") or type(model).__name__,
        "type": known("model_type"),
        "class": type(model).__name__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "layers": known("num_hidden_layers", "n_layer", "num_layers"),
        "heads": known("num_attention_heads", "n_head", "num_heads"),
        "hidden": known("hidden_size", "d_model", "n_embd"),
        "dtype": None if first is None else str(first.dtype).removeprefix("torch."),
        "attention": known("_attn_implementation"),
        "revision": revision,
    }


def _versions() -> dict[str, str]:
    found = {"massieu": sys.modules["massieu"].__version__}
    for package in ("torch", "transformers"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return {**found, "python": platform.python_version(), "kernel": kernels.backend()}


def _peak_memory() -> float | None:
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6
