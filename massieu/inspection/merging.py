"""Merge inspections of different days and machines into one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from massieu import assets
from massieu.checks import UserError, visible
from massieu.corpus.document_counts import DocumentCounts, Overlap
from massieu.inspection.partial_files import load_partial
from massieu.inspection.partial_result import Identity, PartialResult
from massieu.inspection.result import Inspection
from massieu.inspection.tables import build_inspection
from massieu.models.loading import DTYPES, load

__all__ = ["merge_runs"]

SAME = 0.5
"""From this share of common documents on, two runs have read the same text."""


def merge_runs(runs: Sequence[str | Path], *, model: nn.Module | str | None = None, **loading: Any) -> Inspection:
    """One inspection of all the texts that several have read.

    Means, standard errors and fits are those of one run over all the texts. The experiments with derivatives and the
    geometry of the weights need the model: it is loaded again, and must be the same to the last bit of its weights.

    Args:
        runs: folders that ``massieu inspect --out`` wrote, or their ``partial.safetensors``.
        model: the model, or a name of it; None for the embedded model. A model that only the runs name is not
            loaded.
        **loading: as in :func:`massieu.models.loading.load`.

    Raises:
        ValueError: the runs are of different models or options, two of them have read the same text, or the model
            cannot be found.
    """
    begin = time.perf_counter()
    if len(runs) < 2:
        raise UserError(f"merge needs at least two runs, got {len(runs)}; name another folder")
    merged: PartialResult | None = None
    seen: list[tuple[str | Path, DocumentCounts]] = []
    identities: list[Identity] = []
    overlaps: list[Overlap] = []
    for run in runs:
        partial = load_partial(run)
        merged = PartialResult.empty(partial.identity) if merged is None else merged
        difference = merged.difference(partial)
        if difference is not None:
            raise UserError(
                f"runs must come from one model that reads in one way, but in {runs[0]} and {run} {difference};"
                " merge those that agree"
            )
        for other, counts in seen:
            overlaps.append(_overlap(other, counts, run, partial.counts))
        seen.append((run, partial.counts))
        identities.append(partial.identity)
        _add(merged, partial, run)
    assert merged is not None
    own, notes = _loaded(identities, model, loading)
    found = build_inspection(merged, own)
    found.notes = [*notes, *found.notes, _note(len(runs), overlaps)]
    found.facts |= {"runs": len(runs), "seconds": time.perf_counter() - begin}
    return found


def _add(merged: PartialResult, partial: PartialResult, run: str | Path) -> None:
    try:
        merged.merge(partial)
    except (AttributeError, LookupError, RuntimeError, TypeError) as error:
        raise UserError(
            f"the sums of {run} do not fit those of the runs before it ({' '.join(str(error).split())[:80]});"
            " one of them is damaged, inspect again"
        ) from error


def _overlap(one: str | Path, first: DocumentCounts, other: str | Path, second: DocumentCounts) -> Overlap:
    """Documents that two runs share; an error if both have read the same text."""
    found = first.shared(second)
    share = 1.0 if first.digest == second.digest else found.share if found.known else 0.0
    if share >= SAME:
        raise UserError(
            f"runs must have read different texts, but about {share:.0%} of the documents of {one} or {other} are in"
            " both and would count twice; leave one of the two out"
        )
    return found


def _note(runs: int, overlaps: Sequence[Overlap]) -> str:
    """Sentence on documents that count twice."""
    known, few = [each for each in overlaps if each.known], [each for each in overlaps if not each.known]
    sampled = [each.compared for each in known if not each.whole]
    how = f", by {min(sampled):,} or more documents that could be compared" if sampled else ""
    twice = max((each.share for each in known), default=0.0)
    said = []
    if twice:
        said.append(f"up to {twice:.1%} of the documents of one are in another and count twice{how}")
    elif known:
        said.append(f"no document was found in two of them{how}")
    if few:
        least = min(few, key=lambda each: each.compared)
        said.append(
            f"of a run that is much smaller than another, {least.compared} documents could be compared, too few to"
            f" tell whether some count twice; {sum(each.common for each in few)} were found in both"
        )
    return f"Merged from {runs} runs; {'; '.join(said)}."


def _loaded(
    identities: Sequence[Identity], model: nn.Module | str | None, loading: dict[str, Any]
) -> tuple[nn.Module, list[str]]:
    """The model that the user names, or the embedded one, and notes on its loading.

    Runs may come from others: a name in them loads nothing, neither a folder here nor an id elsewhere.
    """
    if isinstance(model, nn.Module):
        return model, []
    names = sorted({identity.name for identity in identities if identity.name})
    if model is None and names == ["embedded"]:
        model = str(assets.MODEL)
    if model is None and not names:
        raise UserError("these runs do not know where their model is, it was made in Python; name it with --model")
    if model is None:
        shown = [visible(name) for name in names]
        raise UserError(
            f"merge loads only a model that you name; the model of these runs was {', '.join(shown)[:300]}; if you"
            f" trust it, pass --model {shown[0][:200]}"
        )
    given = {name: value for name, value in loading.items() if value is not None and (name, value) != ("dtype", "auto")}
    recorded = {"dtype": identities[0].dtype} if identities[0].dtype in DTYPES else {}
    loaded = load(model, **{**recorded, **given})
    return loaded.model, loaded.notes
