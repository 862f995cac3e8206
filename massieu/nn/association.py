"""Iterated association: states that settle among stored patterns, each row on its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from massieu import statistics
from massieu.kernels.graphs import call_eagerly

__all__ = ["Gradient", "Settled", "association", "association_weights", "attend_eagerly", "settle"]

Gradient = Literal["unroll", "implicit"]


class Settled(NamedTuple):
    r"""States after some updates; the other fields have their shape without the last axis.

    Attributes:
        state: :math:`\xi`, shape ``(..., queries, dim)``.
        converged: whether the last update moved the state by no more than the tolerance.
        residual: distance of the last update; infinite where there was none.
        steps: number of updates.
    """

    state: Tensor
    converged: Tensor
    residual: Tensor
    steps: Tensor


def association(
    state: Tensor, stored: Tensor, value: Tensor, beta: Tensor | float, log_weight: Tensor | None, sink: float | None
) -> Tensor:
    """Attention of states to stored patterns; beta is a number, or a tensor that broadcasts to the states."""
    # Under autocast beta is wider than the patterns.
    query = (beta * state).to(stored.dtype)
    return attend_eagerly(query, stored, value, log_weight, scale=1.0, sink=sink, statistics=None).output


def association_weights(
    state: Tensor, stored: Tensor, beta: Tensor | float, log_weight: Tensor | None, sink: float | None
) -> Tensor:
    """Weights of an association as a matrix, ``(..., states, stored)``, without a column for the sink."""
    scores = torch.einsum("...qd,...nd->...qn", (beta * state).to(stored.dtype), stored)
    if log_weight is not None and log_weight.dtype == torch.bool:
        log_weight = torch.zeros_like(log_weight, dtype=scores.dtype).masked_fill(~log_weight, -torch.inf)
    if log_weight is not None:
        scores = scores + log_weight
    if sink is not None:
        scores = torch.cat([scores, torch.full_like(scores[..., :1], sink)], -1)
    return statistics.probabilities(scores)[..., : stored.shape[-2]]


def settle(
    update: Callable[[Tensor], Tensor], start: Tensor, *, steps: int, tolerance: float, gradient: Gradient = "unroll"
) -> Settled:
    r"""Iterate an update until every row is at rest; rows stop one by one and do not depend on their batch.

    ``"unroll"`` differentiates every step. ``"implicit"`` differentiates the fixed point of converged rows,
    :math:`d\xi = (I - J)^{-1} \partial f`, in the memory of one step; they no longer depend on their start. Rows that
    did not converge are differentiated as if unrolled.

    Args:
        update: f, a map of states whose Jacobian in every row is symmetric, as that of a Hopfield memory is.
        start: shape ``(..., queries, dim)``.
        steps: largest number of updates.
        tolerance: a row is at rest when an update moves it by no more than this.
        gradient: see above.
    """
    if gradient == "unroll":
        return _iterate(update, start, steps, tolerance)
    with torch.no_grad():
        settled = _iterate(update, start, steps, tolerance)
    if not torch.is_grad_enabled():
        return settled
    whole = bool(settled.converged.all())
    # The start stays in the graph, with derivative zero: distributed training needs a gradient for every parameter.
    other = start if whole else _iterate(update, start, steps, tolerance).state
    at_rest = _attach(update, settled.state, settled.converged)
    return settled._replace(state=torch.where(settled.converged[..., None], at_rest, other))


def _iterate(update: Callable[[Tensor], Tensor], state: Tensor, steps: int, tolerance: float) -> Settled:
    residual = torch.full(state.shape[:-1], torch.inf, dtype=state.dtype, device=state.device)
    taken = torch.zeros_like(residual, dtype=torch.int64)
    moving = torch.ones_like(residual, dtype=torch.bool)
    for _ in range(steps):
        moved = update(state)
        residual = torch.where(moving, torch.linalg.vector_norm((moved - state).detach(), dim=-1), residual)
        state = torch.where(moving[..., None], moved, state)
        taken = taken + moving
        moving = moving & (residual > tolerance)
        if not bool(moving.any()):
            break
    return Settled(state, residual <= tolerance, residual, taken)


def _attach(update: Callable[[Tensor], Tensor], state: Tensor, converged: Tensor) -> Tensor:
    """The state with the derivative of the fixed point in everything that the update depends on."""
    outer = update(state)
    if not outer.requires_grad:
        return state
    point = state.clone().requires_grad_()
    image = update(point)
    mask = converged[..., None]

    def solve(slope: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            raise RuntimeError(
                'gradient="implicit" has first derivatives only, got a backward pass with create_graph=True;'
                ' build the layer with gradient="unroll"'
            )

        def pull(vector: Tensor) -> Tensor:
            (pulled,) = torch.autograd.grad(image, point, vector, retain_graph=True)
            return vector - pulled

        return _conjugate_gradients(pull, torch.where(mask, slope, 0.0))

    outer.register_hook(solve)
    # The value is the state itself; only the derivative is that of the image.
    return state + (outer - outer.detach())


def _conjugate_gradients(operator: Callable[[Tensor], Tensor], right: Tensor) -> Tensor:
    """Solve for every row; I - J is positive definite where the energy has a minimum."""
    # In units of the largest entry: the squares of small gradients would vanish in single precision.
    unit = right.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(right.dtype).tiny)
    found, rest, direction = torch.zeros_like(right), right / unit, right / unit
    size = start = (rest * rest).sum(-1, keepdim=True)
    eps = torch.finfo(right.dtype).eps
    for _ in range(2 * right.shape[-1] + 10):
        active = size > (8 * eps) ** 2 * start
        if not bool(active.any()):
            break
        image = operator(direction)
        curvature = (direction * image).sum(-1, keepdim=True)
        active = active & (curvature > 0)
        length = torch.where(active, size / torch.where(active, curvature, 1.0), 0.0)
        found, rest = found + length * direction, rest - length * image
        new = (rest * rest).sum(-1, keepdim=True)
        direction = rest + torch.where(active, new / torch.where(active, size, 1.0), 0.0) * direction
        size = new
    unsolved = size > eps * start
    if bool(unsolved.any()):
        raise RuntimeError(
            f"the derivative of a fixed point needs a minimum of the energy, got {int(unsolved.sum())} rows at a saddle"
            ' or nearly degenerate; change scaling, or build the layer with gradient="unroll"'
        )
    return found * unit


def attend_eagerly(*tensors: Any, **options: Any) -> statistics.Attended:
    """:func:`massieu.attend`, with a graph break in compiled models: the kernel is no torch operation."""
    return call_eagerly(_attend, *tensors, **options)


def _attend(*tensors: Any, **options: Any) -> statistics.Attended:
    # Looked up in its module at every call: taps replace it there.
    return statistics.attend(*tensors, **options)
