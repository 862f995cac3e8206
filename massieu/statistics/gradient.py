"""Gradients of attention and its statistics: closed forms over tiles, the dense form for second derivatives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from massieu import kernels
from massieu.kernels import LN2, LOG2E, Inputs, Plan, Slope

__all__ = ["Attention", "MassCount"]

Grads = tuple[Tensor | None, ...]  # of the output and of the six statistics, in their order


class _Function(torch.autograd.Function):
    @classmethod
    def apply(cls, *arguments: Any) -> Any:
        # Function.apply of torch binds the arguments to their names, which takes as long as a small kernel.
        if torch._C._are_functorch_transforms_active():
            return super().apply(*arguments)  # type: ignore[no-untyped-call]
        return super(torch.autograd.Function, cls).apply(*arguments)  # type: ignore[misc]


class Attention(_Function):
    """Output, the fields of ``RowStatistics`` and the moments of arranged rows, with closed-form gradients."""

    @staticmethod
    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor | None,
        log_weight: Tensor | None,
        sink: Tensor | None,
        plan: Plan,
        level: int,
    ) -> tuple[Tensor | None, ...]:
        output, fields, moments, _ = kernels.forward(Inputs(query, key, value, log_weight, sink, plan), level)
        exposed = torch.promote_types(query.dtype, torch.float32)
        fields = tuple(x if x is None or x.dtype == exposed else x.to(exposed) for x in fields)
        if output is not None and output.dtype != query.dtype:
            output = output.to(query.dtype)
        return (output, *fields, moments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        *tensors, ctx.plan, _ = inputs
        out, _, _, _, variance, peak, collision, moments = output
        ctx.mark_non_differentiable(moments, *(() if peak is None else (peak,)))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, out, moments, variance, collision)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        # Only second derivatives need a node for the first.
        solve = Gradient.apply if torch.is_grad_enabled() else Gradient.forward
        found = solve(*ctx.saved_tensors, *grads[:7], ctx.plan, ctx.needs_input_grad[3:5])
        return (*found, None, None)


class MassCount(_Function):
    """Mass counts of arranged rows, without gradients."""

    @staticmethod
    def forward(
        query: Tensor, key: Tensor, value: None, log_weight: Tensor | None, sink: Tensor | None, plan: Plan, mass: float
    ) -> Tensor:
        return kernels.mass_count(Inputs(query, key, value, log_weight, sink, plan), mass)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        return (None,) * 7


class Gradient(_Function):
    """Gradients of :class:`Attention` by tiles; their own gradients are those of the dense form."""

    @staticmethod
    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor | None,
        log_weight: Tensor | None,
        sink: Tensor | None,
        output: Tensor | None,
        *rest: Any,
    ) -> tuple[Tensor | None, ...]:
        *tensors, plan, (want_log_weight, want_sink) = rest
        moments, variance, collision, *grads = tensors
        slope, grad_output = _slope(tuple(grads), _used(variance, grads[4]), _used(collision, grads[6])), grads[0]
        inputs = Inputs(query, key, value, log_weight, sink, plan)
        found = kernels.backward(inputs, moments, slope, output, grad_output, want_log_weight=want_log_weight)
        grad_sink = None
        if want_sink and sink is not None:
            flat = (None if x is None else inputs.flat_rows(x) for x in (_used(output, grad_output), grad_output))
            grad_sink = _sink_gradient(sink, moments, slope, *flat)
        return (*found, grad_sink)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        ctx.plan, ctx.wanted = inputs[16:]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:5], *inputs[9:16])

    @staticmethod
    def backward(ctx: Any, *second: Tensor | None) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            # Views are nodes of their own: gradients stop there where one input depends on another.
            leaves = [
                x if x is None else x.view_as(x) if x.requires_grad else x.detach().requires_grad_()
                for x in ctx.saved_tensors
            ]
            query, key, value, log_weight, sink, *grads = leaves
            assert query is not None
            assert key is not None
            inputs = Inputs(query, key, value, log_weight, sink, ctx.plan)
            first = _dense_backward(inputs, tuple(grads), *ctx.wanted)
        pairs = [(x, g) for x, g in zip(first, second, strict=True) if x is not None and g is not None]
        wanted = [x for x in leaves if x is not None]
        outputs, incoming = zip(*pairs, strict=True) if pairs else ((), ())
        found = iter(
            torch.autograd.grad(outputs, wanted, incoming, create_graph=torch.is_grad_enabled(), allow_unused=True)
            if pairs
            else [None] * len(wanted)
        )
        spread = [None if x is None else next(found) for x in leaves]
        return (*spread[:5], *[None] * 4, *spread[5:], None, None)


def _slope(grads: Grads, variance: Tensor | None, collision: Tensor | None) -> Slope:
    r"""Coefficients of the score gradient from the gradients in statistics.

    With :math:`c_j = s_j - E[s]` the rows differentiate as :math:`\partial \log Z = p`,
    :math:`\partial E = p (1 + c)`, :math:`\partial H = -p c`, :math:`\partial Var = p (c^2 + 2 c - Var)` and
    :math:`\partial C = 2 p (p - C)`.
    """
    _, to_log_z, to_mean, to_entropy, to_variance, _, to_collision = grads
    constant, linear = to_log_z, to_mean
    quadratic = weight = None
    if to_mean is not None:
        constant = to_mean if constant is None else constant + to_mean
    if to_entropy is not None:
        linear = -to_entropy if linear is None else linear - to_entropy
    if to_variance is not None and variance is not None:
        constant = -variance * to_variance if constant is None else constant - variance * to_variance
        linear = 2 * to_variance if linear is None else linear + 2 * to_variance
        quadratic = to_variance
    if to_collision is not None and collision is not None:
        constant = -2 * collision * to_collision if constant is None else constant - 2 * collision * to_collision
        weight = 2 * to_collision
    return Slope(constant, linear, quadratic, weight)


def _used(result: Tensor | None, coming: Tensor | None) -> Tensor | None:
    """Return a result with zeros where its gradient is zero: nan times zero would be nan."""
    return result if result is None or coming is None else result.masked_fill(coming == 0, 0.0)


def _sink_gradient(
    sink: Tensor, moments: Tensor, slope: Slope, output: Tensor | None, grad_output: Tensor | None
) -> Tensor:
    """Gradient in the score of the sink, an atom with value zero, summed over the queries."""
    score = sink.unsqueeze(-1)
    maximum, total, *offset = moments.double().unbind()
    weight = torch.exp2(LOG2E * score - maximum) / total
    slopes = torch.zeros_like(weight)
    if output is not None and grad_output is not None:
        slopes -= torch.einsum("bgqv,bgqv->bgq", grad_output.double(), output.double())
    if slope.constant is not None:
        slopes += slope.constant
    if offset:
        centered = score - LN2 * (maximum + offset[0])
        for power, coefficient in ((centered, slope.linear), (centered.square(), slope.quadratic)):
            if coefficient is not None:
                slopes += coefficient * power
    if slope.weight is not None:
        slopes += slope.weight * weight
    # A sink of weight zero, or a row without atoms, has none.
    return torch.where(weight > 0, weight * slopes, 0.0).sum(-1)


def _dense_backward(inputs: Inputs, grads: Grads, want_log_weight: bool, want_sink: bool) -> tuple[Tensor | None, ...]:
    """Gradients by differentiable operations on the whole matrix, for second derivatives."""
    (query, key, value), (log_weight, sink, plan) = inputs.flat(), inputs[3:]
    own, working = query.dtype, torch.promote_types(query.dtype, torch.float32)
    hidden = kernels.hidden(query, key, log_weight, plan)
    query, key = query.to(working), key.to(working)
    value = None if value is None else value.to(working)
    scores = plan.scale * torch.einsum("bgqd,bnd->bgqn", query, key)
    index = torch.tensor(plan.weight_index or [], dtype=torch.long, device=query.device)
    if log_weight is not None:
        scores = scores + log_weight[index].masked_fill(log_weight[index] == -torch.inf, 0.0)
    if sink is not None:  # one more atom: its key and its value are zero
        column = sink.to(working)[..., None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
        hidden = torch.cat([hidden, column == -torch.inf], -1)
        key = torch.nn.functional.pad(key, (0, 0, 0, 1))
        value = None if value is None else torch.nn.functional.pad(value, (0, 0, 0, 1))
    scores = scores.masked_fill(hidden, -torch.inf)
    empty = hidden.all(-1, keepdim=True)
    weight = torch.softmax(scores.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0)
    scores = scores.masked_fill(hidden, 0.0)
    centered = (scores - (weight * scores).sum(-1, keepdim=True)).masked_fill(hidden, 0.0)
    variance, collision = (weight * centered.square()).sum(-1), weight.square().sum(-1)
    slope = _slope(grads, variance, collision)

    slopes = torch.zeros_like(weight)
    ones = torch.ones_like(weight)
    for power, coefficient in zip((ones, centered, centered.square(), weight), slope, strict=True):
        if coefficient is not None:
            slopes = slopes + coefficient[..., None] * power
    to_output, grad_value = grads[0], None
    if to_output is not None and value is not None:
        coming = inputs.flat_rows(to_output).to(working)
        output = torch.einsum("bgqn,bnv->bgqv", weight, value)
        slopes = slopes + torch.einsum("bgqv,bnv->bgqn", coming, value) - (coming * output).sum(-1, keepdim=True)
        grad_value = torch.einsum("bgqn,bgqv->bnv", weight, coming)
    slopes = (weight * slopes).masked_fill(hidden, 0.0)
    grad_query = plan.scale * torch.einsum("bgqn,bnd->bgqd", slopes, key)
    grad_key = plan.scale * torch.einsum("bgqn,bgqd->bnd", slopes, query)
    grad_sink = slopes[..., -1].sum(-1).to(sink.dtype) if want_sink and sink is not None else None
    if sink is not None:
        slopes, grad_key = slopes[..., :-1], grad_key[:, :-1]
        grad_value = None if grad_value is None else grad_value[:, :-1]
    grad_log_weight = None
    if want_log_weight and log_weight is not None:
        shared = [axis for axis in (1, 2, 3) if log_weight.shape[axis] == 1]
        summed = slopes.sum(shared, keepdim=True) if shared else slopes
        grad_log_weight = torch.zeros_like(log_weight).index_add(0, index, summed.to(log_weight.dtype))
    found = (
        None if grad is None or like is None else grad.to(own).reshape(like.shape)
        for grad, like in zip((grad_query, grad_key, grad_value), inputs[:3], strict=True)
    )
    return (*found, grad_log_weight, grad_sink)
