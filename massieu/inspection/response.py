"""The output of a head predicted from means and covariances alone: attention to first order in the query."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from massieu.kernels import visible
from massieu.taps import AttentionCall

__all__ = ["Response", "jackknife_error", "linear_response", "response_r2"]

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


@dataclass(frozen=True)
class Response:
    """Sums over the tokens of one passage from which the :math:`R^2` of a prediction follows.

    Attributes:
        count: number of tokens.
        mean: mean output of each head, ``(heads, dim)``.
        spread: sum of squared distances of the outputs from their mean, ``(heads,)``.
        error: sum of squared distances of the outputs from the predictions, ``(heads,)``.
    """

    count: int
    mean: Tensor
    spread: Tensor
    error: Tensor

    @classmethod
    def of(cls, predicted: Tensor, target: Tensor) -> Response:
        """Sums of predictions and outputs, both ``(tokens, heads, dim)``."""
        predicted, target = predicted.double().cpu(), target.double().cpu()
        mean = target.mean(0)
        return cls(len(target), mean, (target - mean).square().sum((0, 2)), (target - predicted).square().sum((0, 2)))


def response_r2(passages: Sequence[Response]) -> float:
    r"""Median over heads of :math:`R^2 = 1 - \sum_i |o_i - \hat o_i|^2 / \sum_i |o_i - \bar o|^2`.

    Both sums run over the tokens of all passages, and :math:`\bar o` is the mean of the head over them. Heads whose
    output is constant do not count.

    Example:
        >>> target = torch.tensor([[[0.0]], [[2.0]]])
        >>> response_r2([Response.of(target + 0.5, target)])
        0.75
    """
    count = torch.tensor([passage.count for passage in passages], dtype=torch.float64)
    means = torch.stack([passage.mean for passage in passages])
    mean = torch.einsum("p,phd->hd", count / count.sum(), means)
    between = torch.einsum("p,phd->h", count, (means - mean).square())
    spread = between + torch.stack([passage.spread for passage in passages]).sum(0)
    error = torch.stack([passage.error for passage in passages]).sum(0)
    found = (1 - error / spread)[spread > 0]
    return float(found.median()) if len(found) else float("nan")


def jackknife_error(passages: Sequence[Response], draws: Sequence[object]) -> float:
    r"""Standard error of :func:`response_r2` by what changes when one draw is left out.

    .. math:: \mathrm{se}^2 = \frac{n - 1}{n} \sum_d (R^2_{-d} - \overline{R^2_{-\cdot}})^2

    Args:
        passages: all passages.
        draws: name of the draw that each passage belongs to, such as its document; nan if there is only one.

    Source:
        Efron and Stein 1981, "The jackknife estimate of variance".
    """
    names = list(dict.fromkeys(draws))
    if len(names) < 2:
        return float("nan")
    pairs = list(zip(passages, draws, strict=True))
    others = [response_r2([own for own, draw in pairs if draw != name]) for name in names]
    left = torch.tensor(others, dtype=torch.float64)
    return float(((len(names) - 1) * left.var(correction=0)).sqrt())


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
    log_weight = log_weight.masked_fill(~visible(place, atom, call.causal, call.window), -torch.inf)
    total = log_weight.logsumexp(-1, keepdim=True)
    if call.sink is not None:
        total = torch.logaddexp(total, call.sink.detach().double()[:, None, None])
    return (log_weight - total).exp().nan_to_num(0.0)
