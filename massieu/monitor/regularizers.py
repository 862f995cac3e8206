"""Penalties on attention for the loss: differentiable statistics of collected attention calls.

Collect the attention of a forward pass, and add penalties to the loss:

    with collect(model) as attention:
        loss = model(**batch).loss
    loss = loss + 0.1 * entropy_floor(attention, 1.0) + 1e-4 * z_loss(attention)
    loss.backward()
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from massieu.checks import UserError, check_number
from massieu.statistics import RowStatistics
from massieu.taps import AttentionCall, tap
from massieu.taps.call_statistics import call_statistics, num_atoms, scores_at

__all__ = ["Collected", "collect", "entropy_floor", "logit_bound", "z_loss"]

Statistics = RowStatistics | Sequence[RowStatistics]


@contextlib.contextmanager
def collect(model: nn.Module) -> Iterator[Collected]:
    """Collect every attention call of the model inside the block, connected to its graph.

    Results of the model do not change. Queries and keys stay in memory until the penalties are computed and the graph
    is freed, so open the block once for each forward pass, or call :meth:`Collected.clear`. Layers under
    ``torch.utils.checkpoint`` need ``use_reentrant=False``. Compiled models run uncompiled inside the block.

    Args:
        model: any module that :func:`massieu.taps.tap` can observe.

    Example:
        >>> model = massieu.nn.Transformer(16, num_layers=2, num_heads=4, vocabulary=10)
        >>> with massieu.monitor.collect(model) as attention:
        ...     _ = model(torch.tensor([[1, 2, 3]]))
        >>> attention
        <2 attention calls, 8 heads>
        >>> massieu.monitor.z_loss(attention).backward()
    """
    if not isinstance(model, nn.Module):
        raise UserError(f"model must be a torch module, got {type(model).__name__}; pass the model that you train")
    collected = Collected()
    with tap(model, collected._receive, gradients=True):
        yield collected


class Collected:
    """Attention calls of a forward pass, and their statistics.

    Attributes:
        calls: the observed calls, in order; their tensors are part of the model's graph.
    """

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []
        self._statistics: list[RowStatistics] = []
        self._has_graph: list[bool] = []

    @property
    def statistics(self) -> list[RowStatistics]:
        """Row statistics of every call, each field ``(batch, heads, queries)``; computed once, differentiable."""
        self._check()
        for call in self.calls[len(self._statistics) :]:
            with _full_precision(call):
                self._statistics.append(call_statistics(call))
        return self._statistics

    def clear(self) -> None:
        """Remove all collected calls."""
        self.calls.clear()
        self._statistics.clear()
        self._has_graph.clear()

    def __repr__(self) -> str:
        heads = sum(call.shape[1] for call in self.calls)
        return f"<{len(self.calls)} attention calls, {heads} heads>"

    def _receive(self, call: AttentionCall) -> None:
        self.calls.append(call)
        self._has_graph.append(torch.is_grad_enabled())

    def _check(self) -> None:
        if not self.calls:
            raise UserError(
                "no attention was observed; run the model's forward pass inside `with collect(model) as attention:`"
            )
        if torch.is_grad_enabled() and not all(self._has_graph):
            raise RuntimeError(
                "attention ran without gradients, so a penalty would have none; checkpoint layers with"
                " use_reentrant=False, and for the value alone compute it inside torch.no_grad()"
            )


def entropy_floor(attention: Collected | Statistics, floor: float, *, normalized: bool = False) -> Tensor:
    r"""Mean squared shortfall of the mean entropy of heads below a floor.

    .. math:: \frac1{|\mathcal H|} \sum_{h \in \mathcal H} \max\bigl(0,\; \mathrm{floor} - \bar H_h\bigr)^2, \qquad
              \bar H_h = \frac1{|R|} \sum_{i \in R} H(p_{hi})

    over all heads of all layers, and for each over its rows: those of padded tokens and those without visible keys do
    not count. If collected scores are nan, so is every penalty; in your own statistics, nan marks a row without keys.

    Args:
        attention: result of :func:`collect`, or row statistics of your own, with fields ``(..., heads, queries)``, such
            as ``attend(...).statistics``.
        floor: in nats; if normalized a share in (0, 1].
        normalized: take :math:`H / \log N` with N the number of visible keys of the row, over rows with more than one.
            Needs collected attention.

    Returns:
        A scalar, zero if every head is above the floor.

    Source:
        Entropy collapse: Zhai et al. 2023, "Stabilizing Transformer Training by Preventing Attention Entropy Collapse".

    Example:
        >>> query, key = torch.full((4, 1), 20.0), torch.tensor([[1.0], [0.0]])
        >>> sharp = massieu.row_statistics(query, key)
        >>> massieu.monitor.entropy_floor(sharp, floor=0.5)
        tensor(0.2500)
    """
    check_number(floor, "floor", above=0, remedy="it is in nats, or a share of the largest entropy if normalized")
    if normalized and floor > 1:
        raise UserError(f"a normalized floor must be in (0, 1], got {floor}; without normalized=True it is in nats")
    if normalized and not isinstance(attention, Collected):
        raise UserError(
            f"a normalized floor needs collected attention, got {type(attention).__name__}; pass the result of"
            " collect(model), or a floor in nats"
        )
    shortfalls: list[Tensor] = []
    for entropy, row in _rows(attention, "entropy"):
        if normalized:
            assert isinstance(attention, Collected)
            atoms = num_atoms(attention.calls[len(shortfalls)]).to(entropy.device)
            row = row & (atoms > 1)
            entropy = entropy / atoms.clamp_min(2).log().to(entropy)
        shortfalls.append((floor - _head_means(entropy, row)).clamp_min(0).square())
    return _mean(shortfalls)


def z_loss(attention: Collected | Statistics) -> Tensor:
    r"""Mean square of the log normalizers, which penalizes a common drift of the scores.

    .. math:: \frac1{|\mathcal H|} \sum_{h} \frac1{|R|} \sum_{i \in R} (\log Z_{hi})^2

    Softmax does not change when all scores of a row rise by the same number, but its numerical precision does.

    Args:
        attention: as in :func:`entropy_floor`.

    Returns:
        A scalar. With N keys and scores of zero it is :math:`(\log N)^2`.

    Source:
        Chowdhery et al. 2022, "PaLM", section 5, on the softmax of the output; here on that of attention.

    Example:
        >>> massieu.monitor.z_loss(massieu.row_statistics(torch.zeros(3, 2), torch.zeros(1, 2) + 5.0))
        tensor(0.)
    """
    return _mean([_head_means(log_z.square(), row) for log_z, row in _rows(attention, "log_normalizer")])


def logit_bound(attention: Collected, bound: float, *, sharpness: float = 8.0) -> Tensor:
    r"""Mean squared excess of the largest score of heads above a bound.

    .. math:: \frac1{|\mathcal H|} \sum_{h} \max\bigl(0,\; \max_{i \in R} M_{hi} - \mathrm{bound}\bigr)^2, \qquad
              M_{hi} = \frac1b \log \sum_j e^{b s_{hij}}

    with sharpness b. :math:`M` is a differentiable maximum from above: for a row with N keys
    :math:`\max_j s_j \le M \le \max_j s_j + \tfrac1b \log N`, and its gradient is the mean of those of the scores under
    attention at b times the inverse temperature. Scores include masks and biases, but not sinks.

    Args:
        attention: result of :func:`collect`.
        bound: largest score without a penalty.
        sharpness: b; larger is closer to the maximum, with a gradient on fewer keys.

    Returns:
        A scalar, zero if every score is below the bound by more than the gap.

    Source:
        Logit growth: Dehghani et al. 2023, "Scaling Vision Transformers to 22 Billion Parameters", section 2.

    Example:
        >>> model = massieu.nn.Transformer(16, num_layers=1, num_heads=4, vocabulary=10)
        >>> with massieu.monitor.collect(model) as attention:
        ...     _ = model(torch.tensor([[1, 2, 3]]))
        >>> massieu.monitor.logit_bound(attention, 50.0)
        tensor(0., grad_fn=<MeanBackward0>)
    """
    check_number(bound, "bound", above=0, remedy="it is the largest score without a penalty")
    check_number(sharpness, "sharpness", above=0, remedy="8 is usual")
    if not isinstance(attention, Collected):
        raise UserError(
            f"logit_bound needs queries and keys, got {type(attention).__name__}; pass the result of collect(model)"
        )
    attention._check()
    excesses = []
    for call in attention.calls:
        with _full_precision(call):
            largest = call_statistics(_sharpened(call, sharpness)).log_normalizer / sharpness
        largest = largest.masked_fill(~_counted(largest, call), -torch.inf)
        excesses.append((largest.amax((0, 2)) - bound).clamp_min(0).square())
    return _mean(excesses)


def _sharpened(call: AttentionCall, sharpness: float) -> AttentionCall:
    """Return the call at another inverse temperature, without its sink."""
    if call.softcap is not None:  # the cap comes before the temperature
        batch, _, queries, _ = call.shape
        scores = scores_at(call, torch.arange(queries)[None].expand(batch, -1))
        call = replace(call, scores=scores, softcap=None)
    weight = call.log_weight
    return replace(
        call,
        scale=sharpness * call.scale,
        log_weight=weight if weight is None or weight.dtype == torch.bool else sharpness * weight,
        scores=None if call.scores is None else sharpness * call.scores,
        sink=None,
    )


def _rows(attention: Collected | Statistics, name: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield one statistic of every call, ``(batch, heads, queries)``, and a mask of the rows that count."""
    if isinstance(attention, Collected):
        for call, found in zip(attention.calls, attention.statistics, strict=True):
            field = getattr(found, name)
            yield field, _counted(field, call)
        return
    many = [attention] if isinstance(attention, RowStatistics) else attention
    if not isinstance(many, Sequence) or not many or not all(isinstance(each, RowStatistics) for each in many):
        what = "nothing" if isinstance(many, Sequence) and not many else type(attention).__name__
        raise UserError(
            f"expected collected attention or row statistics, got {what}; use `with collect(model) as attention:`"
        )
    for each in many:
        field = getattr(each, name)
        field = field.reshape(-1, *field.shape[-2:]) if field.dim() > 1 else field.reshape(1, 1, -1)
        yield field, ~field.isnan()


def _counted(field: Tensor, call: AttentionCall) -> Tensor:
    """Return a mask of the rows of tokens with visible keys; rows of nan with visible keys count."""
    seen = ~field.isnan() & (field > -torch.inf)
    if not bool(seen.all()):
        seen = seen | (field.isnan() & (num_atoms(call) > 0).to(field.device))
    return seen if call.present is None else seen & call.present.to(field.device)[:, None]


def _head_means(field: Tensor, row: Tensor) -> Tensor:
    """Return means over the rows that count, ``(heads,)``, of the heads with such rows."""
    row = row.expand_as(field)
    count = row.sum((0, 2))
    # Filled before the sum: the gradient of a row that does not count is zero, not nan.
    total = field.masked_fill(~row, 0.0).sum((0, 2))
    return total[count > 0] / count[count > 0]


def _mean(heads: Sequence[Tensor]) -> Tensor:
    found = torch.cat(list(heads))
    return found.mean() if len(found) else found.sum()


def _full_precision(call: AttentionCall) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast(call.device.type, enabled=False)
