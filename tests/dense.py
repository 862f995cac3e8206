"""Dense reference for kernels: float64, the whole matrix."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Dense(NamedTuple):
    output: Tensor
    log_normalizer: Tensor
    score_mean: Tensor
    entropy: Tensor
    score_variance: Tensor
    peak: Tensor
    collision: Tensor
    probability: Tensor
    largest_score: float


def dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_weight: Tensor | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: int | None = None,
    lengths: Tensor | None = None,
    sink: Tensor | None = None,
) -> Dense:
    """Attention over ``(batch, heads, queries, dim)`` and all statistics of its rows, by their definitions."""
    share = query.shape[1] // key.shape[1]
    key, value = (x.double().repeat_interleave(share, 1) for x in (key, value))
    scores = query.double() @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if log_weight is not None:
        scores = scores + log_weight.double()
    queries, atoms = scores.shape[-2:]
    here = torch.arange(queries)[:, None] + atoms - queries
    there = torch.arange(atoms)[None]
    hidden = torch.zeros(queries, atoms, dtype=torch.bool)
    if causal:
        hidden |= there > here
    if window is not None:
        hidden |= (there - here).abs() >= window
    scores = scores.masked_fill(hidden, -torch.inf)
    if lengths is not None:
        lengths = lengths.reshape(*lengths.shape, *(1,) * (4 - lengths.dim()))
        scores = scores.masked_fill(there >= lengths, -torch.inf)
    if sink is not None:  # one more atom, whose value is zero
        column = sink.double()[..., None, None].expand(*scores.shape[:3], 1)
        scores, value = torch.cat([scores, column], -1), torch.nn.functional.pad(value, (0, 0, 0, 1))
    # Rows without atoms are filled before they are differentiated: the gradient of their softmax would be nan.
    empty = (scores == -torch.inf).all(-1)
    scores = scores.masked_fill(empty[..., None], 0.0)
    log_normalizer = torch.logsumexp(scores, -1)
    probability = torch.softmax(scores, -1).masked_fill(empty[..., None], 0.0)
    finite = scores.masked_fill(scores == -torch.inf, 0.0)
    mean = (probability * finite).sum(-1)
    variance = (probability * (finite - mean[..., None]).square()).sum(-1)
    entropy = -(probability * probability.clamp(min=1e-300).log()).sum(-1)
    rows = (log_normalizer, mean, entropy, variance, probability.amax(-1), probability.square().sum(-1))
    rows = tuple(row.masked_fill(empty, torch.nan) for row in rows)
    return Dense(probability @ value, *rows, probability, float(finite.detach().abs().max()))
