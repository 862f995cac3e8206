"""Token selection by the heads of a model on a text, compared with max-margin selections."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from massieu.checks import UserError, check_count
from massieu.corpus.batching import Batcher, check_texts
from massieu.corpus.passages import Batch, given_batches
from massieu.inspection.options import Options
from massieu.margin.head_rows import HeadRows, ObservedRow
from massieu.margin.report import span_projection
from massieu.models.evaluation import evaluating, moved, run_model
from massieu.models.head_weights import TOLERANCE, HeadWeights, each_layer
from massieu.models.loading import load
from massieu.taps import AttentionCall, tap
from massieu.taps.call_statistics import num_atoms, scores_at
from massieu.taps.passes import in_this_thread

if TYPE_CHECKING:
    import pandas

__all__ = ["NOT_READ", "head_rows", "margin_report"]

NOT_READ = "the inputs of the keys are unknown: there are no values"


def margin_report(
    model: nn.Module | str | None = None,
    texts: Sequence[str] | None = None,
    *,
    tokenizer: Any | None = None,
    inputs: Iterable[Mapping[str, Any]] | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    rows: int = 32,
    max_length: int | None = None,
    seed: int = 0,
    progress: Callable[[str, int, int], object] | None = None,
    **loading: Any,
) -> pandas.DataFrame:
    r"""Compare each head's selection of tokens with the max-margin one, on a sample of query positions.

    .. math:: \alpha_i = \arg\max_t x_{it}^\top W z_i, \qquad W = \mathrm{scale}\, W_K^\top W_Q, \qquad
        W_{mm} = \arg\min \|W\| \;\text{ s.t. }\; (x_{i\alpha_i} - x_{it})^\top W z_i \ge 1

    Tokens are the inputs of the key projection (after the norm) at the visible positions, the query is the input of the
    query projection, and the selected token is the one of highest attention weight. A query bias b adds
    :math:`\mathrm{scale}\, x^\top W_K^\top b`, which is one more column of W for a query with a one at its end; a key
    bias adds the same to all tokens. Absolute positions are part of the tokens. With rotary or relative positions
    scores are no :math:`x^\top W z`: then ``note`` says so, and only selection, feasibility and ``reproduced`` remain.

    Two controls: ``random_*`` is a random matrix with the head's singular values, against the max-margin solution of
    its own selection; ``shuffled_*`` is the head against that of tokens drawn at random, nan where no matrix selects
    those. The selection of a matrix is feasible by that matrix, and with a layer norm and no more rows than dimensions
    every selection is: ``feasible`` can be false where scores are not :math:`x^\top W z`, or where the matrix gives
    different tokens the same highest score. Copies of the selected token, as where a token occurs twice and positions
    have no effect, have no constraint.

    Args:
        model: as in :func:`~massieu.inspection.inspect_model`, and so are ``texts``, ``tokenizer``, ``inputs``,
            ``max_length``, ``progress`` and ``loading``.
        layers: numbers of layers, counted in each stack; None for all.
        heads: numbers of heads of every layer; None for all.
        rows: query positions, spread over the passages; those of one layer are held at a time.
        seed: of the sample and the controls.

    Returns:
        One row for each head: ``stack``, ``layer``, ``head``; ``rows`` and ``constraints``; ``peak``, the mean weight
        of the selected token; ``first_share``, the share of rows that select the first token of the passage (a sink);
        and the values of :class:`~massieu.margin.SelectionReport`, among them ``margin_ratio``, ``correlation`` and
        ``span_correlation``, with the controls and ``note``.

    Source:
        The slides' "attention as an SVM", applied to a trained model.

    Example:
        >>> model = massieu.nn.Transformer(8, num_layers=1, num_heads=2, vocabulary=9, positions=None)
        >>> found = margin_report(model, inputs=[{"inputs": torch.arange(8)[None]}], rows=4)
        >>> found[["head", "rows", "feasible", "reproduced"]].values.tolist()
        [[0, 4, True, 1.0], [1, 4, True, 1.0]]
    """
    import pandas

    layers, heads = _indices(layers, "layers"), _indices(heads, "heads")
    generator = torch.Generator().manual_seed(seed)
    found: list[dict[str, Any]] = []
    for weights, sample in _samples(model, texts, tokenizer, inputs, layers, rows, max_length, generator, loading):
        wanted = range(weights.heads) if heads is None else heads
        if max(wanted) >= weights.heads:
            raise UserError(f"heads must be some of 0 to {weights.heads - 1} in {weights.name}, got {wanted}")
        projection = None if sample is None else span_projection(sample.problem)
        for head in wanted:
            values: dict[str, Any] = {"note": "; ".join(filter(None, (NOT_READ, weights.note)))}
            if sample is not None:
                # A seed of its own, so that controls do not depend on the other heads.
                own = 1_000_000 * seed + 1_000 * weights.layer + head
                values = sample.report(head, projection=projection, generator=own)
            found.append({"stack": weights.stack, "layer": weights.layer, "head": head, **values})
            if progress is not None:
                progress(f"margins of layer {weights.layer}", head + 1, weights.heads)
    table = pandas.DataFrame(found)
    # The note is the last column, in any order of the first head.
    return table[[*(name for name in table.columns if name != "note"), "note"]]


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
    """Return the sample behind :func:`margin_report` for one layer.

    Example:
        >>> model = massieu.nn.Transformer(8, num_layers=1, num_heads=2, vocabulary=9, positions=None)
        >>> sample = head_rows(model, layer=0, rows=4, inputs=[{"inputs": torch.arange(8)[None]}])
        >>> torch.equal(sample.problem.selected(sample.maps[1]), sample.selection[1])
        True
    """
    generator = torch.Generator().manual_seed(seed)
    _, sample = next(_samples(model, texts, tokenizer, inputs, [layer], rows, max_length, generator, loading))
    if sample is None:
        raise UserError(f"the inputs of the keys of layer {layer} are unknown; choose another layer")
    return sample


def _samples(
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
    """Yield the weights of the layers and their sampled rows, None where the inputs of the keys are unknown."""
    from massieu import assets

    check_count(rows, "rows", remedy="32 is usual")
    if isinstance(model, nn.Module) and loading:
        raise UserError(f"{', '.join(loading)} are for a model by name; leave them out, or pass the name")
    if texts is None and inputs is None:
        texts = assets.documents()
    if not isinstance(model, nn.Module):
        loaded = load(model or str(assets.MODEL), **loading)
        model, tokenizer = loaded.model, tokenizer or loaded.tokenizer
    check_texts(texts, inputs)
    if texts is None:
        batches = list(given_batches(inputs or []))
    else:
        batches = list(Batcher(model, tokenizer, **Options(max_length=max_length).of_batches()).batches(texts))
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
        raise UserError(f"layers must be some of 0 to {max(seen)}, got {missing[0]}; count from zero")


def _indices(values: Sequence[int] | None, name: str) -> list[int] | None:
    """Return numbers of layers or heads as a list, None for all."""
    if values is None:
        return None
    if not isinstance(values, Iterable) or not list(values):
        raise UserError(f"{name} must be a list of whole numbers from 0, or None for all, got {values!r}")
    return [check_count(value, name, least=0, remedy="or pass None for all") for value in values]


@dataclass(frozen=True)
class _SampledBatch:
    """Sampled sequences of a batch, and the positions of their rows as shares of the length."""

    batch: Batch
    entries: list[int]
    shares: list[list[float]]

    @property
    def inputs(self) -> dict[str, Any]:
        size = len(self.batch.keys)

        def cut(x: Any) -> Any:
            return x[self.entries] if isinstance(x, Tensor) and x.dim() and x.shape[0] == size else x

        return {name: cut(x) for name, x in self.batch.inputs.items()}


def _sampled(batches: Sequence[Batch], rows: int, generator: torch.Generator) -> list[_SampledBatch]:
    """Spread the rows evenly over all sequences, the remainder at random."""
    sizes = [len(batch.keys) for batch in batches]
    total = sum(sizes)
    counts = torch.full((total,), rows // total)
    counts[torch.randperm(total, generator=generator)[: rows % total]] += 1
    found = []
    for batch, part in zip(batches, counts.split(sizes), strict=True):
        entries = part.nonzero().flatten().tolist()
        # One offset for all rows of a sequence, so that their positions differ as much as possible.
        offsets = torch.rand(len(entries), generator=generator, dtype=torch.float64).tolist()
        counted = [int(part[entry]) for entry in entries]
        shares = [[(at + offset) / n for at in range(n)] for n, offset in zip(counted, offsets, strict=True)]
        if entries:
            found.append(_SampledBatch(batch, entries, shares))
    return found


def _read(model: nn.Module, sampled: Sequence[_SampledBatch], weights: HeadWeights) -> HeadRows | None:
    """Run the model on the sampled sequences and keep the sampled rows of one layer."""
    if weights.query is None or weights.key is None or not weights.same_input:
        return None
    found: list[list[ObservedRow] | None] = []
    states: list[Tensor] = []

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        place = weights.input_argument
        states[:] = [args[place] if isinstance(place, int) else kwargs[place]]

    handle = model.get_submodule(weights.input_module).register_forward_pre_hook(
        in_this_thread(enter), with_kwargs=True
    )
    try:
        for part in sampled:

            def receive(call: AttentionCall, part: _SampledBatch = part) -> None:
                if (call.stack, call.layer) == (weights.stack, weights.layer) and states:
                    found.append(_rows(call, states[0], part))

            with torch.no_grad(), tap(model, receive, this_thread=True):
                run_model(model, {name: moved(x, model) for name, x in part.inputs.items()})
    finally:
        handle.remove()
    rows = [row for some in found if some is not None for row in some]
    if not rows:
        if None in found or not found:
            return None
        raise UserError(f"no row of {weights.name} sees two tokens; pass longer texts")
    dtype = weights.query.dtype
    return HeadRows.from_rows(
        rows,
        weights.query,
        weights.key,
        weights.scale,
        tolerance=TOLERANCE.get(dtype, 1e-3),
        rounding=8 * torch.finfo(dtype).eps,
        note=weights.note,
    )


def _rows(call: AttentionCall, state: Tensor, part: _SampledBatch) -> list[ObservedRow] | None:
    """Return the sampled rows of one call that see two tokens; None if tokens and keys do not match."""
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
        own = state[entry].detach().double().cpu()
        for at in chosen:
            scores = scores_at(call, torch.full((batch, 1), at))[entry, :, 0].double().cpu()
            visible = (scores > torch.finfo(torch.float32).min / 2).all(0).nonzero().flatten()
            place = (visible == starts[entry]).nonzero().flatten().tolist()
            query = call.query[entry, :, at].detach().double().cpu()
            found.append(ObservedRow(own[visible], own[at], query, scores[:, visible], place[0] if place else None))
    return found
