"""Tables and facts of an inspection, from its partial result and the model."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from massieu import kernels
from massieu.checks import UserError
from massieu.corpus.batching import NO_TEXT, reads_shifted
from massieu.inspection.head_geometry import head_geometry
from massieu.inspection.layer_statistics import LayerSums
from massieu.inspection.layers import LayerObserver
from massieu.inspection.partial_result import FEWEST_DOCUMENTS, PartialResult
from massieu.inspection.reader import few_tokens
from massieu.inspection.result import Inspection
from massieu.models.evaluation import evaluating, moved
from massieu.models.fingerprint import model_fingerprint
from massieu.models.head_weights import HeadWeights, head_weights
from massieu.models.residual_stream import ResidualStream
from massieu.models.tokenization import check_known, share_note

__all__ = ["build_inspection"]


def build_inspection(
    partial: PartialResult, model: nn.Module, *, check: bool = True, stream: ResidualStream | None = None
) -> Inspection:
    """Tables and facts of an inspection; the experiments with derivatives run here.

    Args:
        partial: merged result of all shards of the text; it is not changed.
        model: the model that has read them. Weights and blocks are facts of the model, so no partial result holds them.
        check: whether to compare the model with the one that has read; False if it is known to be the same.
        stream: residual stream of the model; None to find it.

    Returns:
        The :class:`Inspection`, with the partial result.
    """
    if check and partial.identity.model != (own := model_fingerprint(model)):
        raise UserError(
            f"the model must be the one that has read the text, {partial.identity.name or 'a model'}"
            f" ({partial.identity.model[:12]}), but its configuration or its weights differ ({own[:12]});"
            " pass the same model, in the same dtype"
        )
    counts = partial.counts
    if counts.documents == counts.blank and counts.long:
        raise UserError(
            f"no document is left: all {counts.long} with text have more than {partial.identity.options['max_length']}"
            " tokens and were skipped; pass --long-documents cut"
        )
    if counts.documents == counts.blank:
        raise UserError(NO_TEXT)
    if counts.counted == 0:
        raise UserError(
            f"the text has no content tokens: all of its {counts.tokens} tokens are special ones;"
            " pass more text, or --special-tokens to count them"
        )
    check_known(counts.unknown, counts.counted, "the text")
    with evaluating(model):
        if check:
            _check_passages(partial, model)
        found, weights = _tables(partial, model, stream)
    widths = {each.query.shape[1] for each in weights if each.query is not None}
    found.facts = {
        "model": {**_model_facts(partial, model), "head_width": widths.pop() if len(widths) == 1 else None},
        "text": _text_facts(partial),
        "coverage": {
            "expected": len(partial.coverage.expected),
            "observed": len(partial.coverage.observed),
            "sentence": partial.coverage.sentence,
            "missing": partial.coverage.missing,
        },
        "versions": _versions(),
        "options": dict(partial.identity.options),
    }
    found.partial = partial
    return found


def _check_passages(partial: PartialResult, model: nn.Module) -> None:
    """Refuse passages that the model cannot read, such as those of a damaged file with tokens that it does not have."""
    for passage in partial.passages.kept:
        try:
            with torch.no_grad():
                model(**{name: moved(value, model) for name, value in passage.inputs.items()})
        except (IndexError, RuntimeError, TypeError, ValueError) as error:
            raise UserError(
                f"the model must read the passages that the partial result keeps, and it cannot"
                f" ({' '.join(str(error).split())[:80]}); the partial result is damaged, inspect again"
            ) from None


def _tables(
    partial: PartialResult, model: nn.Module, stream: ResidualStream | None
) -> tuple[Inspection, list[HeadWeights]]:
    import pandas

    heads, weights = partial.heads.table(), []
    layers, experiments = pandas.DataFrame(columns=["layer"]), pandas.DataFrame(columns=["experiment"])
    notes = [*_notes(partial, model), *sorted(partial.coverage.notes), *partial.heads.notes]
    idle = partial.coverage.idle
    if idle:
        notes.append(f"{len(idle)} attention modules did not run on this text: {', '.join(idle)}.")
    if partial.layers is not None and not partial.passages.kept:
        notes.append("no passage has finite tokens in every layer: the layers table and the experiments are left out")
    elif partial.layers is not None:
        few = few_tokens(partial.passages.kept[0].inputs, model)
        weights = head_weights(model, few)
        observer = LayerObserver(model, few, stream)
        observer.sums = partial.layers
        if partial.layers_by_passage is not None:
            observer.sums = LayerSums(partial.layers_by_passage.statistics, partial.layers.notes)
        fields = partial.passages.probe(model, observer.stream, by_passage=partial.by_passage)
        layers = observer.table(fields.table)
        geometry = head_geometry(weights, observer.input_covariances(weights))
        figures = geometry.heads.drop(columns=["name", "idempotency", "logit_sd"])  # these are experiments only
        heads = heads.merge(figures, on=["stack", "layer", "head"], how="left")
        experiments = geometry.experiments
        notes += [*geometry.notes, *observer.notes, *fields.notes]
    return Inspection(heads, layers, experiments, {}, notes), weights


def _notes(partial: PartialResult, model: nn.Module) -> list[str]:
    """Sentences on what was left out."""
    found = partial.bad_records.notes()
    if partial.counts.long and partial.identity.options.get("long_documents") == "skip":
        number, most = partial.counts.long, partial.identity.options["max_length"]
        which = "1 document beyond {} tokens was" if number == 1 else f"{number:,} documents beyond {{}} tokens were"
        found.append(f"{which.format(most)} skipped.")
    tokens, left = partial.counts.tokens, partial.counts.tokens - partial.counts.counted
    if left:
        found.append(
            f"Rows of special tokens are left out of every mean: {left} of {tokens} tokens. They are still attended to."
        )
    found += share_note(partial.counts.unknown, partial.counts.counted)
    if partial.by_passage:
        found.append(
            f"There are fewer than {FEWEST_DOCUMENTS} documents, so standard errors treat each passage as one draw;"
            " neighboring passages resemble each other, so the errors may be too small."
        )
    if partial.identity.options["reads"] == "text" and reads_shifted(model):
        found.append("The decoder reads the same text as the encoder, shifted by one token.")
    if len(partial.versions) > 1:
        found.append(f"The text was read by different versions: {'; '.join(sorted(partial.versions))}.")
    return found


def _text_facts(partial: PartialResult) -> dict[str, Any]:
    options, counts = partial.identity.options, partial.counts
    text = options["reads"] == "text"
    return {
        "source": ", ".join(sorted(partial.sources)) or ("texts" if text else "tensors"),
        "sha256": counts.sha256,
        "documents": counts.documents,
        "passages": counts.passages,
        "tokens": counts.tokens,
        "counted_tokens": counts.counted,
        "unknown_tokens": counts.unknown,
        "excluded": "padding" if options["special_tokens"] or not text else "padding and special tokens",
        "max_length": options["max_length"],
        "long_documents": counts.long,
        "unit": "passage" if partial.by_passage else "document",
        "bad_records": partial.bad_records.to_dict(),
    }


def _model_facts(partial: PartialResult, model: nn.Module) -> dict[str, Any]:
    config, name = getattr(model, "config", None), partial.identity.name

    def known(*names: str) -> Any:
        return next((getattr(config, each) for each in names if getattr(config, each, None) is not None), None)

    short = Path(name).name if name and Path(name).is_dir() else name
    return {
        "name": short or known("name_or_path") or type(model).__name__,
        "type": known("model_type"),
        "class": type(model).__name__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "layers": known("num_hidden_layers", "n_layer", "num_layers"),
        "heads": known("num_attention_heads", "n_head", "num_heads"),
        "hidden": known("hidden_size", "d_model", "n_embd"),
        "dtype": partial.identity.dtype,
        "attention": known("_attn_implementation"),
        "revision": partial.identity.revision,
        "fingerprint": partial.identity.model,
    }


def _versions() -> dict[str, str]:
    found = {"massieu": sys.modules["massieu"].__version__}
    for package in ("torch", "transformers"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return {**found, "python": platform.python_version(), "kernel": kernels.backend()}
