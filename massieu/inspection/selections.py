"""Token selection as the heads of a model meet it: what they read, and which token they select, at sampled rows."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from massieu.checks import UserError
from massieu.corpus.batching import Batcher, check_texts
from massieu.corpus.passages import Batch, given_batches
from massieu.inspection.options import Options
from massieu.margin import TokenSelection
from massieu.models.evaluation import evaluating, moved, run_model
from massieu.models.head_weights import TOLERANCE, HeadWeights, each_layer
from massieu.models.loading import load
from massieu.taps import AttentionCall, tap
from massieu.taps.call_statistics import num_atoms, scores_at
from massieu.taps.passes import in_this_thread

__all__ = ["HeadRows", "each_sample", "head_rows", "some"]

BIAS = "the query bias is a last column of W, with a one as the last entry of every query"


@dataclass(frozen=True)
class HeadRows:
    """What the heads of one layer read and select at sampled query positions.

    Attributes:
        problem: the tokens that each query sees and the queries, with a one at their end if ``biased``; its scores
            are zero, because every head selects for itself.
        selection: the visible token of highest weight, ``(heads, rows)``.
        peak: its weight, ``(heads, rows)``.
        first: whether it is the first token of the passage, ``(heads, rows)``.
        maps: W of every head, ``(heads, dim, query_dim)``.
        whole: whether :math:`x^T W z` are the head's scores, up to a constant of the row; ``(heads,)``.
        note: what does not hold here, or None.
        rounding: tokens that differ by less than this part of their size may be the same.
    """

    problem: TokenSelection
    selection: Tensor
    peak: Tensor
    first: Tensor
    maps: Tensor
    whole: Tensor
    note: str | None
    rounding: float


def head_rows(
    model: nn.Module | str | None = None,
    texts: Sequence[str] | None = None,
    *,
    layer: int,
    rows: int = 32,
    tokenizer: Any | None = None,
    inputs: Iterable[Mapping[str, Any]] | None = None,
    max_length: int | None = None,
    seed: int = 0,
    **loading: Any,
) -> HeadRows:
    """The sample behind :func:`margin_report` for one layer: token selection as its heads meet it.

    Example:
        >>> model = massieu.nn.Transformer(8, num_layers=1, num_heads=2, vocabulary=9, positions=None)
        >>> sample = head_rows(model, layer=0, rows=4, inputs=[{"inputs": torch.arange(8)[None]}])
        >>> torch.equal(sample.problem.selected(sample.maps[1]), sample.selection[1])
        True
    """
    generator = torch.Generator().manual_seed(seed)
    wanted = (model, texts, tokenizer, inputs, [layer], rows, max_length, generator, loading)
    sample = next(sample for _, sample in each_sample(*wanted))
    if sample is None:
        raise UserError(f"what the keys of layer {layer} read could not be told; choose another layer")
    return sample


def each_sample(
    model: nn.Module | str | None,
    texts: Sequence[str] | None,
    tokenizer: Any | None,
    inputs: Iterable[Mapping[str, Any]] | None,
    layers: Sequence[int] | None,
    rows: int,
    max_length: int | None,
    generator: torch.Generator,
    loading: dict[str, Any],
) -> Iterator[tuple[HeadWeights, HeadRows | None]]:
    """The wanted layers one after the other, each with what it reads at the sampled positions."""
    from massieu import assets

    if not isinstance(rows, int) or rows < 1:
        raise UserError(f"rows must be a positive whole number, got {rows!r}; 32 is usual")
    if isinstance(model, nn.Module) and loading:
        raise UserError(f"{', '.join(loading)} are for a model by name; leave them out, or pass the name")
    if texts is None and inputs is None:
        texts = assets.documents()
    if not isinstance(model, nn.Module):
        loaded = load(model or str(assets.MODEL), **loading)
        model, tokenizer = loaded.model, tokenizer or loaded.tokenizer
    batches = _batches(model, tokenizer, texts, inputs, Options(max_length=max_length))
    if not batches:
        raise UserError("inputs must hold at least one batch, got none; pass [{name of an argument: tensor}]")
    sampled = _sampled(batches, rows, generator)
    with evaluating(model):
        seen = []
        for weights in each_layer(model, {name: moved(x, model) for name, x in batches[0].inputs.items()}):
            seen.append(weights.layer)
            if layers is None or weights.layer in layers:
                yield weights, _read(model, sampled, weights)
    if not seen:
        raise UserError("the model must have attention that can be observed, but none was")
    missing = sorted(set(layers or ()) - set(seen))
    if missing:
        raise UserError(f"layers must be some of 0 to {max(seen, default=0)}, got {missing[0]}; count from zero")


def _batches(
    model: nn.Module,
    tokenizer: Any | None,
    texts: Sequence[str] | None,
    inputs: Iterable[Mapping[str, Any]] | None,
    options: Options,
) -> list[Batch]:
    check_texts(texts, inputs)
    if texts is None:
        return list(given_batches(inputs or []))
    return list(Batcher(model, tokenizer, **options.of_batches()).batches(texts))


def some(values: Sequence[int] | None, name: str) -> list[int] | None:
    """Some layers or heads, or None for all."""
    if values is None:
        return None
    try:
        wanted = [operator.index(value) for value in values]
    except TypeError:
        wanted = []
    if not wanted or min(wanted) < 0:
        raise UserError(f"{name} must be a list of whole numbers from 0, or None for all, got {values!r}")
    return wanted


@dataclass(frozen=True)
class _Part:
    """Some sequences of a batch, and where in each of them rows are looked at, as shares of its length."""

    batch: Batch
    entries: list[int]
    shares: list[list[float]]

    @property
    def inputs(self) -> dict[str, Any]:
        size = len(self.batch.keys)

        def cut(x: Any) -> Any:
            return x[self.entries] if isinstance(x, Tensor) and x.dim() and x.shape[0] == size else x

        return {name: cut(x) for name, x in self.batch.inputs.items()}


def _sampled(batches: Sequence[Batch], rows: int, generator: torch.Generator) -> list[_Part]:
    """Rows spread over all sequences: as many in each, as far as they go, and the rest in some of them."""
    sizes = [len(batch.keys) for batch in batches]
    total = sum(sizes)
    counts = torch.full((total,), rows // total)
    counts[torch.randperm(total, generator=generator)[: rows % total]] += 1
    found = []
    for batch, part in zip(batches, counts.split(sizes), strict=True):
        entries = part.nonzero().flatten().tolist()
        # One offset for all rows of a sequence: as many different ones as it has.
        offsets = torch.rand(len(entries), generator=generator, dtype=torch.float64).tolist()
        counted = [int(part[entry]) for entry in entries]
        shares = [[(at + offset) / n for at in range(n)] for n, offset in zip(counted, offsets, strict=True)]
        if entries:
            found.append(_Part(batch, entries, shares))
    return found


@dataclass(frozen=True)
class _Row:
    """One query: tokens ``(visible, dim)``, itself, its scores ``(heads, visible)``, what the heads made of it."""

    tokens: Tensor
    query: Tensor
    scores: Tensor
    heard: Tensor
    first: int | None  # which of the visible tokens is the first one of the passage


def _read(model: nn.Module, sampled: Sequence[_Part], weights: HeadWeights) -> HeadRows | None:
    """Run the model on the sampled sequences and keep what one layer reads at the sampled rows."""
    if weights.query is None or weights.key is None or not weights.same_input:
        return None
    found: list[list[_Row] | None] = []
    states: list[Tensor] = []

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        place = weights.input_argument
        states[:] = [args[place] if isinstance(place, int) else kwargs[place]]

    handle = model.get_submodule(weights.input_module).register_forward_pre_hook(
        in_this_thread(enter), with_kwargs=True
    )
    try:
        for part in sampled:

            def receive(call: AttentionCall, part: _Part = part) -> None:
                if (call.stack, call.layer) == (weights.stack, weights.layer) and states:
                    found.append(_rows(call, states[0], part))

            with torch.no_grad(), tap(model, receive, this_thread=True):
                run_model(model, {name: moved(x, model) for name, x in part.inputs.items()})
    finally:
        handle.remove()
    rows = [row for some in found if some is not None for row in some]
    if rows or None in found or not found:
        return _together(rows, weights) if rows else None
    raise UserError(f"no row of {weights.name} sees two tokens; pass longer texts")


def _rows(call: AttentionCall, state: Tensor, part: _Part) -> list[_Row] | None:
    """The sampled rows of one call that see two tokens; None if tokens and keys cannot be matched."""
    if call.query is None or call.key is None:
        return None
    batch, _, queries, _ = call.query.shape
    if state.shape[:2] == (queries, batch) != (batch, queries):
        state = state.transpose(0, 1)
    if state.shape[:2] != (batch, queries) or call.key.shape[2] != queries:
        return None
    found = []
    size = len(part.batch.keys)
    counted = part.batch.counted(call.stack, size, queries)[part.entries]
    starts = part.batch.extent(call.stack, size, queries)[0][part.entries].tolist()
    seen = num_atoms(call).cpu().expand(batch, call.query.shape[1], queries).amin(1) >= 2
    for entry, shares in enumerate(part.shares):
        eligible = (counted[entry] & seen[entry]).nonzero().flatten().tolist()
        chosen = sorted({eligible[int(share * len(eligible))] for share in shares}) if eligible else []
        for at in chosen:
            position = torch.full((batch, 1), at)
            scores = scores_at(call, position)[entry, :, 0].double().cpu()
            visible = (scores > torch.finfo(torch.float32).min / 2).all(0).nonzero().flatten()
            place = (visible == starts[entry]).nonzero().flatten().tolist()
            own = state[entry].detach().double().cpu()
            heard = call.query[entry, :, at].detach().double().cpu()
            found.append(_Row(own[visible], own[at], scores[:, visible], heard, place[0] if place else None))
    return found


def _together(rows: Sequence[_Row], weights: HeadWeights) -> HeadRows:
    assert weights.query is not None
    assert weights.key is not None
    tolerance = TOLERANCE.get(weights.query.dtype, 1e-3)
    query, key = (x.detach().double().cpu() for x in (weights.query, weights.key))
    maps = weights.scale * key.mT @ query
    states = torch.stack([row.query for row in rows])
    rest = torch.stack([row.heard for row in rows]) - torch.einsum("hkd,nd->nhk", query, states)
    bias = rest.mean(0)
    size = torch.stack([row.heard for row in rows]).abs().max()
    constant = bool((rest - bias).abs().max() <= tolerance * size)
    biased = constant and bool(bias.abs().max() > tolerance * size)
    if biased:
        column = weights.scale * torch.einsum("hkd,hk->hd", key, bias)
        maps = torch.cat([maps, column[..., None]], -1)
        states = torch.cat([states, torch.ones(len(rows), 1, dtype=states.dtype)], -1)
    problem = TokenSelection(
        [row.tokens for row in rows], states, scores=[torch.zeros(len(row.tokens)) for row in rows]
    )
    chosen = torch.stack([row.scores.argmax(-1) for row in rows], 1)
    return HeadRows(
        problem,
        chosen,
        torch.stack([row.scores.softmax(-1).amax(-1) for row in rows], 1),
        torch.stack([row.scores.argmax(-1) == (-1 if row.first is None else row.first) for row in rows], 1),
        maps,
        torch.stack([_same(problem.logits(w), [row.scores[h] for row in rows], tolerance) for h, w in enumerate(maps)]),
        "; ".join(note for note in (weights.note, BIAS if biased else None) if note) or None,
        8 * torch.finfo(weights.query.dtype).eps,
    )


def _same(logits: Tensor, scores: Sequence[Tensor], tolerance: float) -> Tensor:
    """Whether logits are the scores, up to a constant in each row."""
    off, size = torch.zeros(()), torch.zeros(())
    for one, other in zip(logits, scores, strict=True):
        difference = one[: len(other)] - other
        off = torch.maximum(off, (difference - difference.mean()).abs().max())
        size = torch.maximum(size, (other - other.mean()).abs().max())
    return off <= tolerance * size
