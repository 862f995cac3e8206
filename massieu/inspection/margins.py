"""How far the tokens that trained heads select are from a max-margin selection, each figure beside its control."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from massieu.checks import UserError
from massieu.inspection.selections import each_sample, some
from massieu.margin.report import random_head, selection_report, span_projection

if TYPE_CHECKING:
    import pandas

__all__ = ["margin_report", "random_head", "span_projection"]

NOT_ONE_MATRIX = "scores are not x^T W z with one matrix (positions, a norm of queries and keys, or a cap)"
NOT_READ = "what the keys read could not be told: nothing is reported"


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
    r"""How far each head's selection of tokens is from the max-margin one, on a sample of query positions.

    .. math:: \alpha_i = \arg\max_t x_{it}^\top W z_i, \qquad W = \mathrm{scale}\, W_K^\top W_Q, \qquad
        W_{mm} = \arg\min \|W\| \;\text{ s.t. }\; (x_{i\alpha_i} - x_{it})^\top W z_i \ge 1

    Tokens are what the keys read (after the norm) at the positions that a query sees, the query is what it reads
    itself, and the selected token is the one of highest attention weight. A query bias b adds
    :math:`\mathrm{scale}\, x^\top W_K^\top b`, which is one more column of W for a query with a one at its end; a key
    bias adds the same to all tokens. Absolute positions are part of the tokens. With rotary or relative positions
    scores are no :math:`x^\top W z`: then ``note`` says so, and only selection, feasibility and ``reproduced`` remain.

    Two controls: ``random_*`` is a random matrix with the head's singular values, against the max-margin solution of
    its own selection; ``shuffled_*`` is the head against that of tokens drawn at random, nan where no matrix selects
    those. What a matrix selects is feasible by that matrix, and with a layer norm and no more rows than dimensions
    everything is: ``feasible`` can be false where scores are not :math:`x^\top W z`, or where the matrix gives
    different tokens the same highest score; ``note`` says so. Copies of the selected token, as where a token occurs
    twice and positions are not told apart, are not asked to lose.

    Args:
        model: as in :func:`~massieu.inspection.inspect_model`, and so are ``texts``, ``tokenizer``, ``inputs``,
            ``max_length``, ``progress`` and ``loading``.
        layers: which, counted in each stack; None for all.
        heads: which of every layer; None for all.
        rows: query positions, spread over the passages. What one layer reads there is held at a time.
        seed: of the sample and the controls.

    Returns:
        One row for each head: ``stack``, ``layer``, ``head``; ``rows`` and ``constraints``; ``peak``, the mean weight
        of the selected token; ``first_share``, how often that is the first one of the passage (a sink);
        and the figures of :class:`~massieu.margin.SelectionReport`, among them ``margin_ratio``, ``correlation`` and
        ``span_correlation``, with the controls and ``note``.

    Source:
        The slides' "attention as an SVM", asked of a trained model.

    Example:
        >>> model = massieu.nn.Transformer(8, num_layers=1, num_heads=2, vocabulary=9, positions=None)
        >>> found = margin_report(model, inputs=[{"inputs": torch.arange(8)[None]}], rows=4)
        >>> found[["head", "rows", "feasible", "reproduced"]].values.tolist()
        [[0, 4, True, 1.0], [1, 4, True, 1.0]]
    """
    import pandas

    layers, heads = some(layers, "layers"), some(heads, "heads")
    generator = torch.Generator().manual_seed(seed)
    found: list[dict[str, Any]] = []
    for weights, sample in each_sample(model, texts, tokenizer, inputs, layers, rows, max_length, generator, loading):
        wanted = list(range(weights.heads)) if heads is None else heads
        if max(wanted) >= weights.heads:
            raise UserError(f"heads must be some of 0 to {weights.heads - 1} in {weights.name}, got {wanted}")
        projection = None if sample is None else span_projection(sample.problem)
        for head in wanted:
            place = {"stack": weights.stack, "layer": weights.layer, "head": head}
            if sample is None:
                found.append({**place, "note": "; ".join(filter(None, (NOT_READ, weights.note)))})
            else:
                whole = bool(sample.whole[head])
                figures = asdict(
                    selection_report(
                        sample.maps[head],
                        sample.problem,
                        selection=sample.selection[head],
                        compared=whole,
                        copies=sample.rounding,
                        projection=projection,
                        # Of its own, so that controls do not depend on which other heads are asked for.
                        seed=1_000_000 * seed + 1_000 * weights.layer + head,
                    )
                )
                notes = (sample.note, None if whole else NOT_ONE_MATRIX, figures.pop("note"))
                found.append(
                    {
                        **place,
                        "rows": figures.pop("rows"),
                        "constraints": figures.pop("constraints"),
                        "peak": float(sample.peak[head].mean()),
                        "first_share": float(sample.first[head].double().mean()),
                        **figures,
                        "note": "; ".join(note for note in notes if note),
                    }
                )
            if progress is not None:
                progress(f"margins of layer {weights.layer}", head + 1, weights.heads)
    table = pandas.DataFrame(found)
    # The sentence comes last, wherever the first head had it.
    return table[[*(name for name in table.columns if name != "note"), "note"]]
