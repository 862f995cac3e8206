"""Inputs of kernels: rows of scores grouped by the keys that they share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from massieu.checks import UserError, check_floating

__all__ = ["Inputs", "Plan", "Rows", "arrange", "check_log_weight"]


@dataclass(frozen=True)
class Plan:
    """Scale of the scores of a call, and the atoms visible to each query.

    The queries are the last of the atoms: query ``i`` is at position ``i + atoms - queries``.
    """

    scale: float
    causal: bool
    window: int | None
    lengths: Tensor | None
    """Numbers of atoms present, int64, ``(batch, groups or 1)``."""
    weight_index: list[int] | None
    """For each entry of the batch, the entry of the first axis of ``log_weight``."""
    batch_axes: int
    """Number of leading axes of ``query`` that are those of the keys."""


class Inputs(NamedTuple):
    """Tensors of a call in the order of the arguments of kernels, and their plan."""

    query: Tensor
    """``(*batch, *groups, queries, dim)``: all groups share one key set."""
    key: Tensor
    """``(*batch, atoms, dim)``."""
    value: Tensor | None
    """``(*batch, atoms, value_dim)``, or None for statistics alone."""
    log_weight: Tensor | None
    """``(weights, groups or 1, queries or 1, atoms or 1)``, batch and groups as one axis each."""
    sink: Tensor | None
    """``(batch, groups)``, float64."""
    plan: Plan

    def flat(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Query, key and value with batch and groups as one axis each, copied where necessary."""
        query = self.flat_rows(self.query)
        batch = query.shape[0]
        value = None if self.value is None else self.value.reshape(batch, *self.value.shape[-2:])
        return query, self.key.reshape(batch, *self.key.shape[-2:]), value

    def flat_rows(self, tensor: Tensor) -> Tensor:
        """A tensor with the leading axes of the query as ``(batch, groups, queries, ...)``."""
        shape, axes = self.query.shape, self.plan.batch_axes
        return tensor.reshape(math.prod(shape[:axes]), math.prod(shape[axes:-2]), *tensor.shape[-2:])


@dataclass(frozen=True)
class Rows:
    """Inputs of a call, and the axes of the caller."""

    inputs: Inputs
    axes: tuple[int, ...]  # permutation of the leading axes: those of the keys first, then the shared ones
    lead: tuple[int, ...]  # leading shape, grouped heads still apart
    shape: tuple[int, ...]  # leading shape of the caller

    def restore(self, tensor: Tensor, *, tail: int) -> Tensor:
        """Return a result of a kernel with the caller's axes ``(..., queries, ...)``; the last ``tail`` stay."""
        rest = tensor.shape[tensor.dim() - tail :]
        if self.axes == tuple(range(len(self.axes))):
            return tensor.reshape(*self.shape, *rest)
        tensor = tensor.reshape(*(self.lead[i] for i in self.axes), *rest)
        inverse = sorted(range(len(self.axes)), key=self.axes.__getitem__)
        tensor = tensor.permute(*inverse, *range(len(inverse), tensor.dim()))
        return tensor.reshape(*self.shape, *rest)


def arrange(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    log_weight: Tensor | None,
    *,
    sink: Tensor | float | None,
    scale: float,
    causal: bool,
    window: int | None,
    lengths: Tensor | int | None,
) -> Rows:
    """Check the arguments of a call and arrange them as :class:`Rows`.

    Query, key and value keep their strides: nothing is copied, whatever the order of their axes in memory.
    """
    query, key, value, log_weight, sink, lengths = map(_stored, (query, key, value, log_weight, sink, lengths))
    usual = log_weight is None and sink is None and lengths is None and _are_alike(query, key, value)
    if not usual:
        _check_tensors(query, key, value, log_weight)
    if not isinstance(causal, (bool, np.bool_)):
        got = type(causal).__name__
        raise UserError(f"causal must be True or False, got {got}; a mask of your own goes in as log_weight")
    if not isinstance(scale, Real) or not math.isfinite(scale):
        raise UserError(f"scale must be a finite number, got {scale!r}; multiply the query by a learned scale instead")
    if window is not None and (not isinstance(window, int) or window < 1):
        raise UserError(f"window must be a positive number of atoms, got {window!r}; pass None for no window")

    if usual:  # nothing to broadcast: what follows would take most of the time of a small call
        lead = tuple(query.shape[:-2])
        plan = Plan(float(scale), causal, window, lengths=None, weight_index=None, batch_axes=len(lead))
        return Rows(Inputs(query, key, value, None, None, plan), tuple(range(len(lead))), lead, lead)
    queries, atoms = query.shape[-2], key.shape[-2]
    key_shape = _key_shape(key, value)
    heads, query_shape = _grouped(tuple(query.shape[:-2]), key_shape)
    try:
        shape = np.broadcast_shapes(query_shape, key_shape)
    except ValueError:
        raise UserError(
            f"query and key must have leading axes that broadcast, got {tuple(query.shape[:-2])} and"
            f" {key_shape}; insert axes of size 1, or make the heads of query a multiple of those of key"
        ) from None
    rank = len(shape)
    key = _narrowed(key, key.dim() - 2)
    value = None if value is None else _narrowed(value, value.dim() - 2)
    stored = _key_shape(key, value)  # sizes of one where the axis is only expanded
    key_lead = (1,) * (rank - len(stored)) + stored
    if heads:
        shape = (*shape[:-1], query.shape[-3])
        lead = (*shape[:-1], heads, shape[-1] // heads)
        key_lead = (*key_lead, 1)
    else:
        lead = shape

    shared = [i for i, (own, full) in enumerate(zip(key_lead, lead, strict=True)) if own != full]
    distinct = [i for i in range(len(lead)) if i not in shared]
    axes = (*distinct, *shared)
    batch, groups = math.prod(lead[i] for i in distinct), math.prod(lead[i] for i in shared)

    def by_key(tensor: Tensor) -> Tensor:
        return tensor.expand(*stored, *tensor.shape[-2:]).reshape(*(lead[i] for i in distinct), *tensor.shape[-2:])

    query = query.expand(*shape, *query.shape[-2:]).reshape(*lead, *query.shape[-2:]).permute(*axes, -2, -1)
    weight, weight_index = _arrange_log_weight(log_weight, shape, lead, distinct, shared, queries, atoms)
    plan = Plan(
        scale=float(scale),
        causal=causal,
        window=window,
        lengths=_arrange_lengths(lengths, shape, lead, axes, batch, groups, atoms, query.device),
        weight_index=weight_index,
        batch_axes=len(distinct),
    )
    own_sink = _arrange_sink(sink, shape, lead, axes, batch, groups, query.device)
    inputs = Inputs(query, by_key(key), None if value is None else by_key(value), weight, own_sink, plan)
    return Rows(inputs, axes, lead, shape)


def check_log_weight(log_weight: Tensor, name: str = "log_weight") -> None:
    """Raise unless every log weight is finite or minus infinity."""
    # The largest one is nan if any is; no tensor of the size of the log weights is allocated.
    if log_weight.numel() and not float(log_weight.detach().amax()) < math.inf:
        raise UserError(
            f"{name} must be finite or minus infinity, got nan or plus infinity;"
            " a nan is often the logarithm of a negative weight, and an absent atom has weight minus infinity"
        )


def _stored(argument: Any) -> Any:
    """Return the argument; a copy with memory for a zero tensor of torch without any."""
    return argument.clone() if isinstance(argument, Tensor) and argument._is_zerotensor() else argument


def _are_alike(query: Tensor, key: Tensor, value: Tensor | None) -> bool:
    """Return True for tensors of one dtype and device that agree in all axes, none of them expanded."""
    value = key if value is None else value
    if not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)):
        return False
    return (
        query.dim() >= 2
        and query.is_floating_point()
        and query.dtype == key.dtype == value.dtype
        and query.device == key.device == value.device
        and query.shape[:-2] == key.shape[:-2] == value.shape[:-2]
        and query.shape[-1] == key.shape[-1]
        and key.shape[-2] == value.shape[-2]
        and 0 not in (*key.stride()[:-2], *value.stride()[:-2])
    )


def _check_tensors(query: Tensor, key: Tensor, value: Tensor | None, log_weight: Tensor | None) -> None:
    for name, axis, tensor in (("query", "queries", query), ("key", "atoms", key), ("value", "atoms", value)):
        if name == "value" and tensor is None:
            continue
        check_floating(tensor, name)
        assert tensor is not None
        if tensor.dim() < 2:
            raise UserError(
                f"{name} must have shape (..., {axis}, dim), got {tuple(tensor.shape)};"
                f" for a single vector pass {name}[{':, None' if name == 'value' else 'None'}]"
            )
    if log_weight is not None and getattr(log_weight, "dtype", None) != torch.bool:
        check_floating(log_weight, "log_weight", "for a mask of zeros and ones pass mask.bool()")
    if query.shape[-1] != key.shape[-1]:
        raise UserError(
            f"query and key must have the same last axis, got {query.shape[-1]} and {key.shape[-1]};"
            " project one onto the space of the other"
        )
    if value is not None:
        if value.shape[-2] != key.shape[-2]:
            raise UserError(
                f"key and value must have the same number of atoms, got {key.shape[-2]} and {value.shape[-2]};"
                " give every key its value"
            )
        try:
            np.broadcast_shapes(key.shape[:-2], value.shape[:-2])
        except ValueError:
            raise UserError(
                f"key and value must have leading axes that broadcast, got {tuple(key.shape[:-2])} and"
                f" {tuple(value.shape[:-2])}; insert axes of size 1 where they should broadcast"
            ) from None
    named = {"query": query, "key": key, "value": value}
    for what, remedy in (("dtype", "convert them to the widest"), ("device", "move them to one place")):
        found = {name: getattr(tensor, what) for name, tensor in named.items() if tensor is not None}
        if len(set(found.values())) > 1:
            got = ", ".join(f"{name} {own}" for name, own in found.items())
            raise UserError(f"query, key and value must share one {what}, got {got}; {remedy}")
    if log_weight is not None and log_weight.device != query.device:
        raise UserError(
            f"log_weight must be on the device of query, got {log_weight.device} and {query.device}; move it there"
        )


def _key_shape(key: Tensor, value: Tensor | None) -> tuple[int, ...]:
    shapes = [tuple(tensor.shape[:-2]) for tensor in (key, value) if tensor is not None]
    return np.broadcast_shapes(*shapes)


def _grouped(query_shape: tuple[int, ...], key_shape: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """Number of key heads when several query heads share each of them (else 0), and the shape to broadcast."""
    if query_shape and key_shape:
        heads, own = query_shape[-1], key_shape[-1]
        if 1 < own < heads and heads % own == 0:
            return own, (*query_shape[:-1], own)
    return 0, query_shape


def _narrowed(tensor: Tensor, axes: int) -> Tensor:
    """Return the tensor with its first expanded axes narrowed to one entry, which shows that keys are shared.

    Not for a leaf: the gradients of its entries would not be summed.
    """
    for axis in range(0 if tensor.requires_grad and tensor.is_leaf else axes):
        if tensor.shape[axis] > 1 and tensor.stride(axis) == 0:
            tensor = tensor.narrow(axis, 0, 1)
    return tensor


def _arrange_log_weight(
    log_weight: Tensor | None,
    shape: tuple[int, ...],
    lead: tuple[int, ...],
    distinct: list[int],
    shared: list[int],
    queries: int,
    atoms: int,
) -> tuple[Tensor | None, list[int] | None]:
    if log_weight is None:
        return None, None
    full = (*shape, queries, atoms)
    sizes = (1,) * (len(full) - log_weight.dim()) + tuple(log_weight.shape)
    if len(sizes) > len(full) or any(own not in (1, whole) for own, whole in zip(sizes, full, strict=False)):
        raise UserError(
            f"log_weight must broadcast to {full} = (..., queries, atoms), got {tuple(log_weight.shape)};"
            " insert axes of size 1 where it should broadcast, as in mask[:, None, None, :] for padding"
        )
    weight = _narrowed(log_weight, log_weight.dim())
    weight = weight.reshape((1,) * (len(full) - weight.dim()) + tuple(weight.shape))
    if weight.dtype == torch.bool:
        weight = torch.zeros(weight.shape, device=weight.device).masked_fill_(~weight, -torch.inf)
    check_log_weight(weight)
    if len(lead) > len(shape):
        own_heads = weight.shape[-3]
        split = lead[-2:] if own_heads > 1 else (1, 1)
        weight = weight.reshape(*weight.shape[:-3], *split, *weight.shape[-2:])
    own = weight.shape[: len(lead)]
    weight = weight.permute(*distinct, *shared, -2, -1)
    if any(own[i] > 1 for i in shared):
        weight = weight.expand(*(own[i] for i in distinct), *(lead[i] for i in shared), *weight.shape[-2:])
    weights, groups = math.prod(own[i] for i in distinct), math.prod(weight.shape[len(distinct) : -2])
    index = np.arange(weights).reshape([own[i] for i in distinct])
    index = np.broadcast_to(index, [lead[i] for i in distinct])
    return weight.reshape(weights, groups, *weight.shape[-2:]), index.ravel().tolist()


def _arrange_sink(
    sink: Tensor | float | None,
    shape: tuple[int, ...],
    lead: tuple[int, ...],
    axes: tuple[int, ...],
    batch: int,
    groups: int,
    device: torch.device,
) -> Tensor | None:
    if sink is None:
        return None
    if not isinstance(sink, Tensor):
        if not isinstance(sink, (int, float, np.number)) or isinstance(sink, bool):
            got = type(sink).__name__
            raise UserError(
                f"sink must be a number or a floating-point tensor, got {got}; pass one log weight per head"
            )
        sink = torch.as_tensor(float(sink), dtype=torch.float64)
    check_floating(sink, "sink")
    check_log_weight(sink, "sink")
    sizes = (1,) * (len(shape) - sink.dim()) + tuple(sink.shape)
    if len(sizes) > len(shape) or any(own not in (1, whole) for own, whole in zip(sizes, shape, strict=True)):
        raise UserError(
            f"sink must broadcast to the leading axes {shape}, got {tuple(sink.shape)};"
            " pass one log weight per head, shape (heads,)"
        )
    sink = sink.to(device=device, dtype=torch.float64).expand(shape)
    return sink.reshape(lead).permute(axes).reshape(batch, groups)


def _arrange_lengths(
    lengths: Tensor | int | None,
    shape: tuple[int, ...],
    lead: tuple[int, ...],
    axes: tuple[int, ...],
    batch: int,
    groups: int,
    atoms: int,
    device: torch.device,
) -> Tensor | None:
    if lengths is None:
        return None
    lengths = torch.as_tensor(lengths, device=device)
    if lengths.is_floating_point() or lengths.is_complex() or lengths.dtype == torch.bool:
        raise UserError(f"lengths must hold whole numbers, got {lengths.dtype}; convert it with .long()")
    if lengths.dim() > len(shape) or any(
        own not in (1, whole) for own, whole in zip(lengths.shape, shape, strict=False)
    ):
        raise UserError(
            f"lengths must match the leading axes {shape} from the left, got {tuple(lengths.shape)};"
            " pass one length per batch entry, shape (batch,)"
        )
    if lengths.numel() and not bool(((lengths >= 0) & (lengths <= atoms)).all()):
        raise UserError(
            f"lengths must lie between 0 and the number of atoms {atoms}, got {lengths.min()} to {lengths.max()};"
            " count the atoms that are present"
        )
    lengths = lengths.long().reshape((*lengths.shape, *(1,) * (len(shape) - lengths.dim())))
    lengths = lengths.expand(shape).reshape(lead).permute(axes).reshape(batch, groups)
    # A plan is no argument of an autograd function, which alone unwraps what torch.func.grad follows.
    while torch._C._functorch.is_gradtrackingtensor(lengths):
        lengths = torch._C._functorch.get_unwrapped(lengths)
    return lengths
