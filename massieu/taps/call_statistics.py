"""Statistics of the rows of an attention call: those of the weights, the mass on named keys, and mass counts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from massieu.kernels import visible, visible_count
from massieu.statistics import RowStatistics, mass_count, row_statistics
from massieu.taps import AttentionCall

__all__ = [
    "broken_rows",
    "call_statistics",
    "exact_rows",
    "num_atoms",
    "rows_stood_for",
    "sampled_positions",
    "sampled_rows",
    "scores_at",
]

LARGEST_BLOCK = 2**22  # scores in memory at once, for statistics that need them
MASS = 0.9


def exact_rows(call: AttentionCall) -> dict[str, Tensor]:
    r"""Return statistics of all rows without a weight matrix, each ``(batch, heads, queries)``, nan where undefined.

    Beside the row statistics: ``score_max`` :math:`= \log Z + \log \max_j p_j`, ``normalized_entropy``
    :math:`= H / \log N` with N the row's own number of keys, and the mass on named keys,
    :math:`p_j = e^{s_j - \log Z}`: the first of the sequence (for later rows), the row's own, the one before and, in an
    encoder, the one after.
    """
    statistics = call_statistics(call)
    log_z, entropy = statistics.log_normalizer, statistics.entropy
    assert statistics.score_variance is not None
    atoms = num_atoms(call).to(log_z.device)
    found = {
        "log_normalizer": log_z,
        "entropy": entropy,
        "normalized_entropy": torch.where(atoms > 1, entropy / atoms.double().log().to(entropy), torch.nan),
        "perplexity": statistics.perplexity,
        "effective_atoms": statistics.effective_atoms,
        "peak": statistics.peak,
        "score_mean": statistics.score_mean,
        "score_variance": statistics.score_variance,
        "score_max": log_z + statistics.peak.log(),
    }
    if call.stack != "cross":
        found |= {name: (score - log_z).exp() for name, score in _named_scores(call).items()}
    return found


def broken_rows(call: AttentionCall, rows: Mapping[str, Tensor]) -> Tensor:
    """Return a mask of the rows with keys and statistics that are not finite, boolean ``(batch, heads, queries)``.

    A score of nan or infinity breaks a row. A row that sees no key has no statistics and is not broken.

    Args:
        call: the attention call.
        rows: of :func:`exact_rows`.
    """
    broken = ~(rows["log_normalizer"] + rows["entropy"] + rows["score_variance"]).isfinite()
    return broken & (num_atoms(call) > 0).to(broken.device) if bool(broken.any()) else broken


def sampled_rows(call: AttentionCall, position: Tensor) -> dict[str, Tensor]:
    """Return statistics that need whole rows, for the rows at ``position`` ``(batch, rows)``: ``(batch, heads, rows)``.

    ``mass90`` counts the heaviest keys that hold nine tenths of the mass, ``mass90_share`` divides it by the row's own
    number of keys, ``atoms`` is that number, and ``score_range`` is the largest minus the smallest score of a key.
    Rows are computed in blocks, to limit memory.
    """
    rows = _block_rows(call)
    found = [_whole_rows(call, position[:, begin : begin + rows]) for begin in range(0, position.shape[1], rows)]
    return {name: torch.cat([each[name] for each in found], -1) for name in found[0]}


def call_statistics(call: AttentionCall) -> RowStatistics:
    r"""Return the statistics of all rows of a call, each field ``(batch, heads, queries)``, without a weight matrix.

    Those of the weights :math:`p_{ij} \propto e^{s_{ij} + \log h_{ij}}` that the model computes before dropout: mask,
    bias, window, softcap and sink are part of them. Differentiable if the call is part of a graph. A row with a
    score of nan or plus infinity has statistics of nan.

    Example:
        >>> model, calls = massieu.nn.Transformer(16, num_layers=1, num_heads=4, vocabulary=10), []
        >>> with massieu.taps.tap(model, calls.append):
        ...     _ = model(torch.tensor([[1, 2, 3]]))
        >>> call_statistics(calls[0]).entropy.shape
        torch.Size([1, 4, 3])
    """
    if call.scores is None and call.softcap is None:
        assert call.query is not None
        assert call.key is not None
        query, weight, sink = _with_numbers(call.query, call.log_weight, call.sink)
        return row_statistics(
            query, call.key, weight, scale=call.scale, causal=call.causal, window=call.window, sink=sink
        )
    found = []
    for scores in _score_blocks(call):
        query, key, weight, sink = _at_the_origin(scores, call.sink)
        found.append(row_statistics(query, key, weight, sink=sink))
    return RowStatistics(*(torch.cat(field, -1) for field in zip(*found, strict=True)))


def scores_at(call: AttentionCall, position: Tensor) -> Tensor:
    r"""Return the scores :math:`s_{ij} + \log h_{ij}` of some rows, minus infinity for hidden keys, without the sink.

    Args:
        call: the attention call.
        position: of the rows in each sequence, ``(batch, rows)``; a negative one means row zero.

    Returns:
        ``(batch, heads, rows, keys)``, at least float32.

    Example:
        >>> model, calls = massieu.nn.Transformer(16, num_layers=1, num_heads=4, vocabulary=10), []
        >>> with massieu.taps.tap(model, calls.append):
        ...     _ = model(torch.tensor([[1, 2, 3]]))
        >>> scores_at(calls[0], torch.tensor([[1]]))[0, 0, 0].isfinite()
        tensor([ True,  True, False])
    """
    if call.scores is not None:
        index = position.clamp_min(0).to(call.scores.device)[:, None, :, None]
        return _read(call.scores.take_along_dim(index, -2))
    assert call.query is not None
    assert call.key is not None
    exact = torch.promote_types(call.query.dtype, torch.float32)
    index = position.clamp_min(0).to(call.query.device)
    query = call.query.take_along_dim(index[:, None, :, None], -2).to(exact)
    batch, heads, rows, dim = query.shape
    key = call.key.to(exact)
    grouped = query.reshape(batch, key.shape[1], -1, dim)
    scores = (grouped @ key.mT).reshape(batch, heads, rows, -1) * call.scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if call.log_weight is not None and call.log_weight.dtype != torch.bool:
        scores = scores + _rows_of(call.log_weight, index).to(exact)
    return scores.masked_fill(~_present(call, index), -torch.inf) if _hides(call) else scores


def sampled_positions(lengths: Tensor, rows: int | None) -> Tensor:
    """Return up to ``rows`` positions of each sequence, ``(batch, rows)``, evenly over its length; -1 beyond its end.

    They depend on the length of the sequence alone, not on its batch.

    Example:
        >>> sampled_positions(torch.tensor([3, 8]), 4)
        tensor([[ 0,  1,  2, -1],
                [ 1,  3,  5,  7]])
    """
    longest = int(lengths.max())
    number = torch.arange(min(rows or longest, longest), device=lengths.device)
    taken = lengths.clamp_max(len(number))[:, None]
    position = ((2 * number + 1) * lengths[:, None]).div(2 * taken.clamp_min(1), rounding_mode="floor")
    return torch.where(number < taken, position, -1)


def rows_stood_for(counted: Tensor, taken: Tensor) -> Tensor:
    """Return the number of rows that each sampled row represents, ``(..., 1)``; zero where none was sampled.

    With these weights the sampled rows of a passage count as much as all of its rows, for any length.

    Args:
        counted: rows that count, boolean ``(..., queries)``.
        taken: sampled rows that count, boolean ``(..., rows)``.

    Example:
        >>> rows_stood_for(torch.ones(2, 6).bool(), torch.tensor([[True, True, True], [True, False, False]]))
        tensor([[2.],
                [6.]], dtype=torch.float64)
    """
    some = taken.sum(-1, keepdim=True)
    return torch.where(some > 0, counted.sum(-1, keepdim=True).double() / some, 0.0)


def num_atoms(call: AttentionCall) -> Tensor:
    """Return the number of keys that each row sees, a sink included, broadcasting to ``(batch, heads, queries)``."""
    *_, queries, atoms = call.shape
    if call.log_weight is None and call.scores is None:
        count = visible_count(queries, atoms, call.causal, call.window)
    elif call.scores is None:
        count = _present(call, torch.arange(queries)[None]).sum(-1)
    else:
        count = torch.cat([(block != -torch.inf).sum(-1) for block in _score_blocks(call)], -1)
    return count + (call.sink is not None)


def _whole_rows(call: AttentionCall, position: Tensor) -> dict[str, Tensor]:
    scores = scores_at(call, position)
    atoms, lowest = _count_and_lowest(scores, call)
    query, key, weight, sink = _at_the_origin(scores, call.sink)
    count = mass_count(query, key, weight, mass=MASS, sink=sink)
    total = atoms + (call.sink is not None)
    empty = (atoms == 0) | query[..., 0].isnan()
    return {
        "mass90": count.double().masked_fill(empty, torch.nan),
        "mass90_share": (count / total).masked_fill(empty, torch.nan),
        "atoms": total,
        "score_range": (scores.amax(-1) - lowest).masked_fill(empty, torch.nan),
    }


def _at_the_origin(scores: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Query, key, log weights and sink for given scores, as log weights of keys at the origin."""
    nothing = scores.new_zeros(1, 1)
    query, weight, sink = _with_numbers(nothing.expand(*scores.shape[:-1], 1), scores, sink)
    return query, nothing.expand(scores.shape[-1], 1), weight, sink


def _with_numbers(
    query: Tensor, weight: Tensor | None, sink: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The same rows with finite log weights; the query of a row with nan or infinity becomes nan."""
    if weight is not None and weight.is_floating_point() and not bool(weight.detach().amax() < torch.inf):
        wrong = ~(weight < torch.inf)
        query, weight = query.masked_fill(wrong.any(-1, keepdim=True), torch.nan), weight.masked_fill(wrong, 0.0)
    if sink is not None and not bool(sink.detach().amax() < torch.inf):
        wrong = ~(sink < torch.inf)
        query, sink = query.masked_fill(wrong[:, None, None], torch.nan), sink.masked_fill(wrong, 0.0)
    return query, weight, sink


def _count_and_lowest(scores: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Number of keys that rows see, and the smallest score among them."""
    if not _hides(call):
        return torch.full(scores.shape[:-1], scores.shape[-1], device=scores.device), scores.amin(-1)
    present = scores != -torch.inf
    return present.sum(-1), scores.masked_fill(~present, torch.inf).amin(-1)


def _hides(call: AttentionCall) -> bool:
    """Return whether keys may be hidden from some rows."""
    return call.causal or call.window is not None or call.log_weight is not None or call.scores is not None


def _score_blocks(call: AttentionCall) -> Iterator[Tensor]:
    """Scores of the call in blocks of rows, minus infinity for hidden keys."""
    (batch, _, queries, _), rows = call.shape, _block_rows(call)
    for begin in range(0, queries, rows):
        yield scores_at(call, torch.arange(begin, min(begin + rows, queries))[None].expand(batch, -1))


def _block_rows(call: AttentionCall) -> int:
    batch, heads, _, atoms = call.shape
    return max(1, LARGEST_BLOCK // (batch * heads * atoms))


def _present(call: AttentionCall, position: Tensor) -> Tensor:
    """Mask of the keys that the rows at ``position`` see, broadcasting to ``(batch, heads, rows, keys)``."""
    *_, queries, atoms = call.shape
    own = (position + atoms - queries)[:, None, :, None]
    atom = torch.arange(atoms, device=position.device)
    seen = visible(own, atom, call.causal, call.window)
    if call.log_weight is not None:
        weight = _rows_of(call.log_weight, position.to(call.log_weight.device))
        own_mask = weight if weight.dtype == torch.bool else weight != -torch.inf
        seen = seen.to(weight.device) & own_mask
    return seen


def _rows_of(log_weight: Tensor, position: Tensor) -> Tensor:
    """The rows of a log weight that broadcasts, ``(batch or 1, heads or 1, rows or 1, keys or 1)``."""
    weight = _four_axes(log_weight)
    if weight.shape[-2] == 1:
        return weight
    if weight.shape[0] == 1:
        weight = weight.expand(position.shape[0], *weight.shape[1:])
    return weight.take_along_dim(position[:, None, :, None], -2)


def _named_scores(call: AttentionCall) -> dict[str, Tensor]:
    """Scores of the first key, the own one and its neighbors, ``(batch, heads, queries)``, nan where there is none."""
    _, _, queries, atoms = call.shape
    behind = atoms - queries  # keys before the first query
    first, last = _ends(call)
    own = torch.arange(queries, device=call.device) + behind
    later = own > first[:, None]
    before = _diagonal(call, behind - 1)
    found = {
        "sink_mass": (_score_of_first(call, first), later),
        "self_mass": (_diagonal(call, behind), own >= first[:, None]),
        "previous_mass": (torch.nn.functional.pad(before, (queries - before.shape[-1], 0)), later),
    }
    if call.stack == "encoder":  # the rows of a decoder do not see the next token
        after = _diagonal(call, behind + 1)
        found["next_mass"] = (torch.nn.functional.pad(after, (0, queries - after.shape[-1])), own < last[:, None])
    return {name: score.masked_fill(~there[:, None], torch.nan) for name, (score, there) in found.items()}


def _ends(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Positions of the first and the last key of each sequence, ``(batch,)``, without padding if that is known."""
    batch, _, queries, atoms = call.shape
    if call.present is None or atoms != queries:
        first = torch.zeros(batch, dtype=torch.long, device=call.device)
        return first, first + atoms - 1
    present = call.present.to(call.device, torch.uint8)
    return present.argmax(-1), atoms - 1 - present.flip(-1).argmax(-1)


def _diagonal(call: AttentionCall, offset: int) -> Tensor:
    """Scores of query ``i`` for key ``i + offset``, for the queries with such a key, ``(batch, heads, queries)``."""
    *_, queries, atoms = call.shape
    begin = max(0, -offset)
    count = min(queries - begin, atoms - begin - offset)
    if call.scores is not None:
        return _read(call.scores).diagonal(offset, -2, -1)[..., :count]
    assert call.query is not None
    assert call.key is not None
    query = call.query[..., begin : begin + count, :]
    key = call.key[..., begin + offset : begin + offset + count, :]
    score = _products(query, key, call)
    if offset != atoms - queries and call.window == 1:
        score = torch.full_like(score, -torch.inf)
    if call.log_weight is None:
        return score
    weight = _four_axes(call.log_weight)
    weight = weight.expand(*weight.shape[:2], queries, atoms).diagonal(offset, -2, -1)
    return _weighted(score, weight[..., :count])


def _score_of_first(call: AttentionCall, first: Tensor) -> Tensor:
    """Scores of one key of each sequence for all queries, ``(batch, heads, queries)``."""
    index = first[:, None, None, None]
    if call.scores is not None:
        return _read(call.scores.take_along_dim(index, -1).squeeze(-1))
    assert call.query is not None
    assert call.key is not None
    *_, queries, atoms = call.shape
    score = _products(call.query, call.key.take_along_dim(index, -2), call)
    if call.window is not None:
        own = torch.arange(queries, device=first.device) + atoms - queries
        seen = visible(own, first[:, None], call.causal, call.window)
        score = score.masked_fill(~seen[:, None], -torch.inf)
    if call.log_weight is None:
        return score
    weight = _four_axes(call.log_weight)
    weight = weight.expand(*weight.shape[:3], atoms).take_along_dim(index, -1).squeeze(-1)
    return _weighted(score, weight)


def _products(query: Tensor, key: Tensor, call: AttentionCall) -> Tensor:
    """Inner products of queries with one key each, or all with one, scaled and capped; at least float32."""
    exact = torch.promote_types(query.dtype, torch.float32)
    grouped = query.to(exact).unflatten(1, (key.shape[1], -1))
    key = key.to(exact)[:, :, None]
    products = (grouped @ key.mT).squeeze(-1) if key.shape[-2] == 1 else torch.linalg.vecdot(grouped, key)
    score: Tensor = products.flatten(1, 2) * call.scale
    return score if call.softcap is None else call.softcap * torch.tanh(score / call.softcap)


def _weighted(score: Tensor, weight: Tensor) -> Tensor:
    """Scores plus log weights, given as a mask or numbers; minus infinity for hidden keys."""
    if weight.dtype == torch.bool:
        return score.masked_fill(~weight, -torch.inf)
    return score + weight


def _read(scores: Tensor) -> Tensor:
    return scores.to(torch.promote_types(scores.dtype, torch.float32))


def _four_axes(log_weight: Tensor) -> Tensor:
    return log_weight.reshape((1,) * (4 - log_weight.dim()) + tuple(log_weight.shape))
