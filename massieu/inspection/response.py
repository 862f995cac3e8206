"""The output of a head predicted from means and covariances alone: attention to first order in the query."""

from __future__ import annotations

import torch
from torch import Tensor

from massieu.taps import AttentionCall

__all__ = ["linear_response", "response_r2"]

ROWS = 64
"""Queries that are looked at together, so that no matrix of queries x atoms is held."""


def linear_response(call: AttentionCall, key: Tensor) -> Tensor:
    r"""Attention to first order around the zero query.

    .. math:: \bar v + \mathrm{scale} \, \mathrm{Cov}_h(v, k) \, q = \sum_j h_j (1 + s_j - \bar s) v_j

    with mean and covariance over the atoms that the query sees, weighted by their log weights.

    Args:
        call: an attention call with query and value.
        key: keys to use in the place of the call's own, ``(batch, key_heads, atoms, dim)``.

    Returns:
        Shape ``(batch, heads, queries, value_dim)``, float64.

    Source:
        "A Probabilistic Interpretation of Transformers", Corollary 1, with values in the place of keys.
    """
    assert call.query is not None
    assert call.value is not None
    query, value = call.query.detach().double(), call.value.detach().double()
    repeat = query.shape[1] // key.shape[1]
    keys, values = (x.double().repeat_interleave(repeat, dim=1) for x in (key, value))
    found = []
    for start in range(0, query.shape[2], ROWS):
        rows = slice(start, min(start + ROWS, query.shape[2]))
        weight = _base_weights(call, rows, keys.shape[2]).to(query)
        score = call.scale * torch.einsum("bhqd,bhnd->bhqn", query[:, :, rows], keys)
        mean = (weight * score).sum(-1, keepdim=True)
        found.append(torch.einsum("bhqn,bhnv->bhqv", weight * (1 + score - mean), values))
    return torch.cat(found, dim=2)


def response_r2(predicted: Tensor, target: Tensor, sequence: Tensor, num_sequences: int) -> float:
    r"""Median over sentences and heads of :math:`R^2 = 1 - \sum_i |o_i - \hat o_i|^2 / \sum_i |o_i - \bar o|^2`.

    Args:
        predicted: shape ``(tokens, heads, dim)``.
        target: the same.
        sequence: number of the sentence of each token, ``(tokens,)``.
        num_sequences: how many there are.

    Example:
        >>> target = torch.tensor([[[0.0]], [[2.0]]])
        >>> response_r2(target + 0.5, target, torch.tensor([0, 0]), 1)
        0.75
    """
    target = target.double()
    sequence = sequence.to(target.device)
    zeros = target.new_zeros(num_sequences, *target.shape[1:])
    count = torch.bincount(sequence, minlength=num_sequences).clamp_min(1)
    mean = zeros.index_add(0, sequence, target) / count[:, None, None]
    spread = zeros[..., 0].index_add(0, sequence, (target - mean[sequence]).square().sum(-1))
    error = zeros[..., 0].index_add(0, sequence, (target - predicted).square().sum(-1))
    found = (1 - error / spread)[spread > 0]
    return float(found.median()) if len(found) else float("nan")


def _base_weights(call: AttentionCall, rows: slice, atoms: int) -> Tensor:
    """Weights of the atoms at the zero query, ``(batch, heads, rows, atoms)``, the sink's share left out."""
    assert call.query is not None
    batch, heads, queries = call.query.shape[:3]
    device = call.query.device
    log_weight = torch.zeros(batch, heads, rows.stop - rows.start, atoms, dtype=torch.float64, device=device)
    if call.log_weight is not None:
        given = call.log_weight.detach().expand(batch, heads, queries, atoms)[:, :, rows]
        log_weight = log_weight.masked_fill(~given, -torch.inf) if given.dtype == torch.bool else log_weight + given
    place = torch.arange(rows.start, rows.stop, device=device)[:, None] + atoms - queries
    atom = torch.arange(atoms, device=device)
    if call.causal:
        log_weight = log_weight.masked_fill(atom > place, -torch.inf)
    if call.window is not None:
        log_weight = log_weight.masked_fill((atom - place).abs() >= call.window, -torch.inf)
    total = log_weight.logsumexp(-1, keepdim=True)
    if call.sink is not None:
        total = torch.logaddexp(total, call.sink.detach().double()[:, None, None])
    return (log_weight - total).exp().nan_to_num(0.0)
