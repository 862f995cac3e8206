"""An attention row as a distribution: the one place where scores are exponentiated."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from massieu import kernels
from massieu.kernels import Moments, Plan, Rows, Slope

__all__ = ["Attended", "RowStatistics", "attend", "mass_count", "probabilities", "row_statistics"]

LN2 = math.log(2.0)


class RowStatistics(NamedTuple):
    r"""What one attention row is as a distribution; every field has shape ``(..., queries)``.

    With scores :math:`s_j` (log weights included) and weights :math:`p_j = e^{s_j} / Z`. A row without atoms has
    nan in every field. Half-precision inputs give float32 statistics. ``peak`` carries no gradient.
    """

    log_normalizer: Tensor
    r""":math:`\log Z = \log \sum_j e^{s_j}`."""
    score_mean: Tensor
    r""":math:`E[s] = \sum_j p_j s_j`."""
    entropy: Tensor
    r""":math:`H = \log Z - E[s]`, in nats; the perplexity is its exponential."""
    score_variance: Tensor | None
    r""":math:`Var[s]`, the heat capacity at temperature one; None in light statistics."""
    peak: Tensor
    r""":math:`\max_j p_j`."""
    collision: Tensor | None
    r""":math:`\sum_j p_j^2`, one over the effective number of atoms; None in light statistics."""


class Attended(NamedTuple):
    """What attention returns: the output, and its row statistics when they were asked for."""

    output: Tensor
    statistics: RowStatistics | None


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_weight: Tensor | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: int | None = None,
    lengths: Tensor | int | None = None,
    statistics: Literal["full", "light"] | None = "full",
) -> Attended:
    r"""Softmax attention with the statistics of every row, in one differentiable pass over tiles.

    .. math:: o_i = \sum_j p_{ij} v_j, \qquad p_{ij} \propto e^{s_{ij}}, \qquad
              s_{ij} = \mathrm{scale} \, \langle q_i, k_j \rangle + \log h_{ij}

    Nothing of size queries x atoms outlives one tile, forward or backward. Gradients flow to query, key, value and
    log_weight from the output and from every statistic but the peak; they can be taken once.

    Args:
        query: shape ``(..., queries, dim)``.
        key: shape ``(..., atoms, dim)``. Leading axes broadcast against those of ``query`` and are never copied; on
            the last of them (the heads) ``query`` may also have a multiple of the size, as in grouped-query attention.
        value: shape ``(..., atoms, value_dim)``.
        log_weight: :math:`\log h`, whatever is added to the scores (mask, padding, ALiBi, bias), broadcasting to
            ``(..., queries, atoms)``. Minus infinity means absent, and so does anything below half of the most
            negative number of its dtype.
        scale: factor of the inner products; one over the square root of dim by default.
        causal: query ``i`` sees the atoms up to its own position ``i + atoms - queries``: with a cache, queries are
            the last atoms. (``scaled_dot_product_attention`` aligns them with the first.)
        window: a query sees only atoms less than ``window`` positions away, on both sides or, if causal, behind it.
        lengths: number of atoms present, from the first; matches the leading axes from the left, so ``(batch,)``
            serves ``(batch, heads, queries, dim)``.
        statistics: "full", "light" (no variance, no collision) or None.

    Returns:
        The output, ``(..., queries, value_dim)``, zero for a row without atoms, and its :class:`RowStatistics`.

    Source:
        "A Probabilistic Interpretation of Transformers", eq. 3 and 5; log weights are its intrinsic measure.

    Example:
        >>> query, key, value = torch.zeros(3, 2), torch.eye(2), torch.eye(2)
        >>> attended = attend(query, key, value)
        >>> attended.output[0], attended.statistics.entropy[0].exp()
        (tensor([0.5000, 0.5000]), tensor(2.))
    """
    if statistics not in ("full", "light", None):
        raise ValueError(f'statistics must be "full", "light" or None, got {statistics!r}; "full" costs little more')
    scale = _default_scale(query) if scale is None else scale
    rows = kernels.arrange(query, key, value, log_weight, scale=scale, causal=causal, window=window, lengths=lengths)
    level = {"full": 2, "light": 1, None: 0}[statistics]
    output, found = _solve(rows, level)
    assert output is not None
    return Attended(output, found if level else None)


def row_statistics(
    natural: Tensor,
    support: Tensor,
    log_weight: Tensor | None = None,
    *,
    scale: float = 1.0,
    causal: bool = False,
    window: int | None = None,
    lengths: Tensor | int | None = None,
) -> RowStatistics:
    """Statistics of the rows without the output; arguments as in :func:`attend`, but scores are not scaled.

    Example:
        >>> row_statistics(torch.zeros(1, 2), torch.randn(5, 2)).collision
        tensor([0.2000])
    """
    rows = kernels.arrange(
        natural, support, None, log_weight, scale=scale, causal=causal, window=window, lengths=lengths
    )
    return _solve(rows, 2)[1]


def mass_count(
    query: Tensor,
    key: Tensor,
    mass: float = 0.9,
    log_weight: Tensor | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: int | None = None,
    lengths: Tensor | int | None = None,
) -> Tensor:
    r"""The smallest number of atoms that together hold the given mass of the row, int64 ``(..., queries)``.

    Arguments as in :func:`attend`. A row without atoms counts zero.

    Source:
        Ramsauer et al. 2020, section 3: heads are classed by this number at mass 0.9.

    Example:
        >>> mass_count(torch.zeros(1, 2), torch.randn(10, 2), mass=0.9)
        tensor([9])
    """
    if not 0 < mass <= 1:
        raise ValueError(f"mass must lie in (0, 1], got {mass}; 0.9 asks for nine tenths of the attention")
    scale = _default_scale(query) if scale is None else scale
    rows = kernels.arrange(query, key, None, log_weight, scale=scale, causal=causal, window=window, lengths=lengths)
    with torch.no_grad():
        return rows.restore(kernels.mass_count(rows.query, rows.key, rows.log_weight, rows.plan, float(mass)))


def probabilities(scores: Tensor, log_weight: Tensor | None = None) -> Tensor:
    r"""The weights :math:`p_{ij} = e^{s_{ij}} / Z_i` themselves, for small problems that need all of them.

    Args:
        scores: shape ``(..., queries, atoms)``.
        log_weight: broadcasts to the same shape; minus infinity means absent.

    Returns:
        Weights of the same shape; a row without atoms is zero.

    Example:
        >>> probabilities(torch.tensor([[0.0, 0.0]]), torch.tensor([0.0, -torch.inf]))
        tensor([[1., 0.]])
    """
    if log_weight is not None:
        scores = scores + log_weight
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    return torch.softmax(scores.masked_fill(empty, 0.0), dim=-1).masked_fill(empty, 0.0)


def _default_scale(query: Tensor) -> float:
    shape = getattr(query, "shape", None)
    return float(shape[-1]) ** -0.5 if shape and shape[-1] else 1.0


def _solve(rows: Rows, level: int) -> tuple[Tensor | None, RowStatistics]:
    tensors = (rows.query, rows.key, rows.value, rows.log_weight)
    found = _Attention.apply(*tensors, rows.plan, level)  # type: ignore[no-untyped-call]
    output, *fields = (None if x is None else rows.restore(x) for x in found[:7])
    return output, RowStatistics(*fields)  # type: ignore[arg-type]  # a level that leaves fields out is not named


class _Attention(torch.autograd.Function):
    """Output, the fields of :class:`RowStatistics` and the moments of arranged rows, with closed-form gradients."""

    @staticmethod
    def forward(
        query: Tensor, key: Tensor, value: Tensor | None, log_weight: Tensor | None, plan: Plan, level: int
    ) -> tuple[Tensor | None, ...]:
        output, moments = kernels.forward(query, key, value, log_weight, plan, level)
        # The collision is a statistic already; returned twice, it could not be marked as differentiable.
        return (None if output is None else output.to(query.dtype), *_thermal(moments), *moments[:4])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        *tensors, ctx.plan, _ = inputs
        peak, moments = output[5], output[7:]
        ctx.mark_non_differentiable(peak, *(x for x in moments if x is not None))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, output[0], *moments, output[6])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, value, log_weight, out, *saved = ctx.saved_tensors
        moments = Moments(*saved)
        slope = _slope(moments, out, grads)
        gradients = kernels.backward(
            query, key, value, log_weight, ctx.plan, moments, slope, grads[0], want_log_weight=ctx.needs_input_grad[3]
        )
        return (*gradients, None, None)


def _thermal(moments: Moments) -> tuple[Tensor | None, ...]:
    """The fields of :class:`RowStatistics`, from sums in base 2 about the maximum."""
    log_total, peak = moments.total.log(), moments.total.reciprocal()
    log_normalizer = LN2 * moments.maximum + log_total
    if moments.offset is None:
        return log_normalizer, None, None, None, peak, None
    mean = LN2 * (moments.maximum + moments.offset)
    entropy = (log_total - LN2 * moments.offset).clamp(min=0)
    variance = None if moments.spread is None else LN2**2 * moments.spread
    return log_normalizer, mean, entropy, variance, peak, moments.collision


def _slope(moments: Moments, out: Tensor | None, grads: tuple[Tensor | None, ...]) -> Slope:
    r"""Coefficients of the score gradient.

    With :math:`c_j = s_j - E[s]` the rows differentiate as :math:`\partial \log Z = p`,
    :math:`\partial E = p (1 + c)`, :math:`\partial H = -p c`, :math:`\partial Var = p (c^2 + 2 c - Var)`,
    :math:`\partial C = 2 p (p - C)` and :math:`\partial o = p (v - o)`.
    """
    to_output, to_log_z, to_mean, to_entropy, to_variance, _, to_collision = grads[:7]
    dtype = moments.total.dtype
    constant = torch.zeros_like(moments.total)
    if to_output is not None and out is not None:
        constant -= torch.linalg.vecdot(to_output.to(dtype), out.to(dtype))
    linear = quadratic = weight = None
    if to_log_z is not None:
        constant += to_log_z
    if to_mean is not None:
        constant += to_mean
        linear = to_mean
    if to_entropy is not None:
        linear = -to_entropy if linear is None else linear - to_entropy
    if to_variance is not None and moments.spread is not None:
        constant -= LN2**2 * moments.spread * to_variance
        linear = 2 * to_variance if linear is None else linear + 2 * to_variance
        quadratic = to_variance
    if to_collision is not None and moments.collision is not None:
        constant -= 2 * moments.collision * to_collision
        weight = 2 * to_collision
    return Slope(constant, linear, quadratic, weight)
