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
    nan in every field: average with ``nanmean``. Half-precision inputs give float32 statistics, and scores that may
    exceed 1000 are computed in float64 whatever comes in.

    Attributes:
        log_normalizer: :math:`\log Z = \log \sum_j e^{s_j}`.
        score_mean: :math:`E[s] = \sum_j p_j s_j`.
        entropy: :math:`H = \log Z - E[s]`, in nats.
        score_variance: :math:`Var[s]`, the heat capacity at temperature one; None in light statistics.
        peak: :math:`\max_j p_j`, without gradient.
        collision: :math:`\sum_j p_j^2`; None in light statistics.
    """

    log_normalizer: Tensor
    score_mean: Tensor
    entropy: Tensor
    score_variance: Tensor | None
    peak: Tensor
    collision: Tensor | None

    @property
    def perplexity(self) -> Tensor:
        r""":math:`e^H`, the number of equally likely atoms with the same entropy."""
        return self.entropy.exp()

    @property
    def effective_atoms(self) -> Tensor:
        r""":math:`1 / \sum_j p_j^2`, the effective sample size of the row."""
        if self.collision is None:
            raise ValueError('effective_atoms needs full statistics, got light ones; pass statistics="full"')
        return self.collision.reciprocal()


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
    log_weight from the output and from every statistic but the peak. Second derivatives (``create_graph=True``) are
    exact too, but hold the whole matrix of weights.

    For ``scaled_dot_product_attention(query, key, value, attn_mask, is_causal=True, enable_gqa=True)`` write
    ``attend(query, key, value, log_weight, causal=True).output``; there is no dropout on the weights.

    Args:
        query: shape ``(..., queries, dim)``, in a model ``(batch, heads, queries, dim)``.
        key: shape ``(..., atoms, dim)``. Leading axes of size 1 broadcast against those of ``query`` without a copy; on
            the last of them (the heads) ``query`` may also have a multiple of the size, as in grouped-query attention.
        value: shape ``(..., atoms, value_dim)``.
        log_weight: :math:`\log h`, whatever is added to the scores (mask, padding, ALiBi, bias), broadcasting to
            ``(..., queries, atoms)``. Minus infinity means absent, and so does anything below half of the most
            negative number of its dtype, or below -3e14. A boolean mask is True where the atom is present.
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
    if value is None:
        raise TypeError("value must be a floating-point tensor, got NoneType; for statistics alone use row_statistics")
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
    if not isinstance(mass, (int, float)) or not 0 < mass <= 1:
        got = mass if isinstance(mass, (int, float)) else type(mass).__name__
        raise ValueError(f"mass must be a number in (0, 1], got {got}; 0.9 asks for nine tenths of the attention")
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
        exposed = torch.promote_types(query.dtype, torch.float32)
        fields = (None if x is None else x.to(exposed) for x in _thermal(moments))
        # The collision is a statistic already; returned twice, it could not be marked as differentiable.
        return (None if output is None else output.to(query.dtype), *fields, *moments[:4])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        *tensors, ctx.plan, _ = inputs
        peak, moments = output[5], output[7:]
        ctx.mark_non_differentiable(peak, *(x for x in moments if x is not None))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, output[0], *moments, output[6])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        found = _Gradient.apply(*ctx.saved_tensors, *grads[:7], ctx.plan, ctx.needs_input_grad[3])  # type: ignore[no-untyped-call]
        return (*found, None, None)


class _Gradient(torch.autograd.Function):
    """The gradients of :class:`_Attention`, by tiles; their own gradients are those of the dense form."""

    @staticmethod
    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor | None,
        log_weight: Tensor | None,
        out: Tensor | None,
        *rest: Any,
    ) -> tuple[Tensor | None, ...]:
        *tensors, plan, want_log_weight = rest
        moments, grads = Moments(*tensors[:5]), tuple(tensors[5:])
        variance = None if moments.spread is None else LN2**2 * moments.spread
        slope = _slope(grads, moments.total, out, variance, moments.collision)
        return kernels.backward(
            query, key, value, log_weight, plan, moments, slope, grads[0], want_log_weight=want_log_weight
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        ctx.plan, ctx.want_log_weight = inputs[17:]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:4], *inputs[10:17])

    @staticmethod
    def backward(ctx: Any, *second: Tensor | None) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            # Views are nodes of their own: an input that depends on another is not followed back to it.
            leaves = [
                x if x is None else x.view_as(x) if x.requires_grad else x.detach().requires_grad_()
                for x in ctx.saved_tensors
            ]
            query, key, value, log_weight, *grads = leaves
            assert query is not None
            assert key is not None
            first = _dense_backward(query, key, value, log_weight, ctx.plan, tuple(grads), ctx.want_log_weight)
        pairs = [(x, g) for x, g in zip(first, second, strict=True) if x is not None and g is not None]
        wanted = [x for x in leaves if x is not None]
        outputs, incoming = zip(*pairs, strict=True) if pairs else ((), ())
        found = iter(
            torch.autograd.grad(outputs, wanted, incoming, create_graph=torch.is_grad_enabled(), allow_unused=True)
            if pairs
            else [None] * len(wanted)
        )
        spread = [None if x is None else next(found) for x in leaves]
        return (*spread[:4], *[None] * 6, *spread[4:], None, None)


def _thermal(moments: Moments) -> tuple[Tensor | None, ...]:
    """The fields of :class:`RowStatistics`, from sums in base 2 about the maximum."""
    log_total, peak = moments.total.log(), moments.total.reciprocal()
    log_normalizer = LN2 * moments.maximum + log_total
    if moments.offset is None:
        return log_normalizer, None, None, None, peak, None
    mean = LN2 * (moments.maximum + moments.offset)
    # Never negative: the total is at least one, and no score lies above the maximum.
    entropy = log_total - LN2 * moments.offset
    variance = None if moments.spread is None else LN2**2 * moments.spread
    return log_normalizer, mean, entropy, variance, peak, moments.collision


def _slope(
    grads: tuple[Tensor | None, ...],
    like: Tensor,
    out: Tensor | None,
    variance: Tensor | None,
    collision: Tensor | None,
) -> Slope:
    r"""Coefficients of the score gradient.

    With :math:`c_j = s_j - E[s]` the rows differentiate as :math:`\partial \log Z = p`,
    :math:`\partial E = p (1 + c)`, :math:`\partial H = -p c`, :math:`\partial Var = p (c^2 + 2 c - Var)`,
    :math:`\partial C = 2 p (p - C)` and :math:`\partial o = p (v - o)`.
    """
    to_output, to_log_z, to_mean, to_entropy, to_variance, _, to_collision = grads[:7]
    constant = torch.zeros_like(like)
    linear = quadratic = weight = None
    if to_output is not None and out is not None:
        constant = constant - (to_output.to(like.dtype) * out.to(like.dtype)).sum(-1)
    if to_log_z is not None:
        constant = constant + to_log_z
    if to_mean is not None:
        constant = constant + to_mean
        linear = to_mean
    if to_entropy is not None:
        linear = -to_entropy if linear is None else linear - to_entropy
    if to_variance is not None and variance is not None:
        constant = constant - variance * to_variance
        linear = 2 * to_variance if linear is None else linear + 2 * to_variance
        quadratic = to_variance
    if to_collision is not None and collision is not None:
        constant = constant - 2 * collision * to_collision
        weight = 2 * to_collision
    return Slope(constant, linear, quadratic, weight)


def _dense_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    log_weight: Tensor | None,
    plan: Plan,
    grads: tuple[Tensor | None, ...],
    want_log_weight: bool,
) -> tuple[Tensor | None, ...]:
    """The gradients as plain differentiable operations on the whole matrix, for second derivatives."""
    own, working = query.dtype, torch.promote_types(query.dtype, torch.float32)
    hidden = kernels.hidden(query, key, log_weight, plan)
    query, key = query.to(working), key.to(working)
    value = None if value is None else value.to(working)
    scores = plan.scale * torch.einsum("bgqd,bnd->bgqn", query, key)
    index = torch.tensor(plan.weight_index or [], dtype=torch.long, device=query.device)
    if log_weight is not None:
        scores = scores + log_weight[index].masked_fill(log_weight[index] == -torch.inf, 0.0)
    weight = probabilities(scores.masked_fill(hidden, -torch.inf))
    centred = scores - (weight * scores.masked_fill(hidden, 0.0)).sum(-1, keepdim=True)
    centred = centred.masked_fill(hidden, 0.0)
    out = None if value is None else torch.einsum("bgqn,bnv->bgqv", weight, value)
    variance, collision = (weight * centred.square()).sum(-1), weight.square().sum(-1)
    slope = _slope(grads, variance, out, variance, collision)

    slopes = slope.constant[..., None].expand_as(weight)
    for power, coefficient in ((centred, slope.linear), (centred.square(), slope.quadratic), (weight, slope.weight)):
        if coefficient is not None:
            slopes = slopes + coefficient[..., None] * power
    to_output = grads[0]
    grad_value = None
    if to_output is not None and value is not None:
        slopes = slopes + torch.einsum("bgqv,bnv->bgqn", to_output.to(working), value)
        grad_value = torch.einsum("bgqn,bgqv->bnv", weight, to_output.to(working)).to(own)
    slopes = (weight * slopes).masked_fill(hidden, 0.0)
    grad_query = plan.scale * torch.einsum("bgqn,bnd->bgqd", slopes, key)
    grad_key = plan.scale * torch.einsum("bgqn,bgqd->bnd", slopes, query)
    grad_log_weight = None
    if want_log_weight and log_weight is not None:
        shared = [axis for axis in (1, 2, 3) if log_weight.shape[axis] == 1]
        summed = slopes.sum(shared, keepdim=True) if shared else slopes
        grad_log_weight = torch.zeros_like(log_weight).index_add(0, index, summed.to(log_weight.dtype))
    return grad_query.to(own), grad_key.to(own), grad_value, grad_log_weight
