"""Inputs of associations: sizes of patterns, inverse temperatures, and masks of torch (True is absent)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from massieu.checks import UserError, check_count, check_number
from massieu.nn.inputs import is_plain

__all__ = ["Sizes", "build_scaling", "check_presence", "expand_heads", "find_sizes", "log_weight_of", "split_input"]


class Sizes(NamedTuple):
    """Sizes of the inputs, of the association space and the values of one head; None where not needed."""

    state: int | None
    stored: int | None
    projection: int | None
    hidden: int | None
    pattern: int | None


def find_sizes(
    inputs: tuple[int | None, int | None, int | None],
    hidden_size: int | None,
    pattern_size: int | None,
    num_heads: int,
    *,
    statics: tuple[bool, bool, bool],
    connected: bool,
    needed: bool,
) -> Sizes:
    """Return all sizes, or raise if they do not fit.

    Args:
        inputs: sizes of states, stored patterns and projections.
        hidden_size: of the association space, or None.
        pattern_size: of the values, or None.
        num_heads: number of heads.
        statics: True for those of the three inputs that are not projected.
        connected: whether values go through the projection of the stored patterns first.
        needed: whether anything is projected or normalized.
    """
    state, stored, projection = inputs
    if needed and None in inputs:
        raise UserError(
            "input_size must be given unless all patterns are static, not normalized and not projected, got None;"
            " it is the size of the state patterns"
        )
    if connected and stored != projection:
        raise UserError(
            "pattern_projection_as_connected needs stored patterns and projections of one size, got"
            f" {stored} and {projection}; both go through one projection"
        )
    hidden = _hidden_size(state, stored, hidden_size, num_heads, statics)
    if statics[2]:
        pattern = hidden if connected and not statics[1] else projection
    else:
        pattern = hidden if pattern_size is None else pattern_size
    return Sizes(state, stored, projection, hidden, pattern)


def _hidden_size(
    state: int | None, stored: int | None, given: int | None, num_heads: int, statics: tuple[bool, bool, bool]
) -> int | None:
    """Size of the association space: that of the static patterns, or the given one."""
    fixed = {size for size, static in zip((state, stored), statics, strict=False) if static}
    if len(fixed) > 1 or (fixed and given is not None and given not in fixed):
        raise UserError(
            f"hidden_size must be the size of static patterns, got {given} with static patterns of"
            f" {', '.join(sorted(map(str, fixed)))}; leave it out, or project one of them"
        )
    if fixed:
        return fixed.pop()
    assert state is not None
    if given is None and state % num_heads:
        raise UserError(
            f"input_size must be a multiple of num_heads, got {state} and {num_heads}; or say hidden_size yourself"
        )
    return check_count(state // num_heads if given is None else given, "hidden_size")


def split_input(input: Any) -> Any:
    """Stored patterns, states and projections; one tensor serves as all three."""
    if isinstance(input, Tensor):
        return input, input, input
    if not isinstance(input, (tuple, list)) or len(input) != 3:
        got = f"{len(input)} of them" if isinstance(input, (tuple, list)) else type(input).__name__
        raise UserError(
            f"input must be a tensor, or stored patterns, states and projections, got {got}; pass one or all"
        )
    return input


def expand_heads(query: Tensor, key: Tensor, value: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values ``(batch or 1, heads or 1, patterns, size)`` with one batch size and one dtype."""
    if key.shape[-2] != value.shape[-2] or query.shape[-1] != key.shape[-1]:
        raise UserError(
            "stored and projection must have as many patterns, and static patterns one size, got"
            f" {key.shape[-2]} and {value.shape[-2]} patterns of size {key.shape[-1]}, states of {query.shape[-1]};"
            " give every stored pattern its value"
        )
    batches = {each.shape[0] for each in (query, key, value)} - {1}
    if len(batches) > 1:
        raise UserError(
            f"input must have one batch size, or one, got {', '.join(map(str, sorted(batches)))};"
            " give every entry its patterns"
        )
    batch = batches.pop() if batches else 1
    # Under autocast projected patterns are narrower than static ones.
    dtype = torch.promote_types(torch.promote_types(query.dtype, key.dtype), value.dtype)
    return (
        query.to(dtype).expand(batch, num_heads, -1, -1),
        key.to(dtype).expand(batch, -1, -1, -1),
        value.to(dtype).expand(batch, -1, -1, -1),
    )


def build_scaling(
    scaling: Any, num_heads: int, owner: nn.Module, device: torch.device | str | None, dtype: torch.dtype | None
) -> float | Tensor:
    """Beta as a number, or as a tensor ``(heads or 1,)`` registered with its owner: a parameter stays one."""
    if isinstance(scaling, (int, float)) and not isinstance(scaling, bool):
        return check_number(scaling, "scaling", above=0)
    if not isinstance(scaling, Tensor) or not scaling.is_floating_point():
        got = scaling.dtype if isinstance(scaling, Tensor) else type(scaling).__name__
        raise UserError(f"scaling must be a number or a floating-point tensor, got {got}; pass one beta per head")
    if scaling.numel() not in (1, num_heads) or scaling.dim() > 1:
        raise UserError(
            f"scaling must have shape () or ({num_heads},), got {tuple(scaling.shape)}; pass one beta per head"
        )
    if not bool((scaling.isfinite() & (scaling > 0)).all()):
        raise UserError(f"scaling must be positive and finite, got {scaling.tolist()}; it holds inverse temperatures")
    flat = scaling.detach().reshape(-1).to(device=device, dtype=dtype)
    if isinstance(scaling, nn.Parameter):
        # The same object where the shape fits, so that the caller's optimizer still holds it.
        same = scaling.dim() == 1 and flat.dtype == scaling.dtype and flat.device == scaling.device
        kept = scaling if same else nn.Parameter(flat.clone(), scaling.requires_grad)
        owner.register_parameter("scaling", kept)
        return kept
    own = flat.clone()
    owner.register_buffer("scaling", own)
    return own


def log_weight_of(
    padding: Tensor | None, mask: Tensor | None, shape: tuple[int, int, int, int], like: Tensor
) -> Tensor | None:
    """Log weights of masks of torch: boolean (True is present) if all are boolean, else numbers to add.

    Args:
        padding: ``(batch, atoms)``.
        mask: ``(queries, atoms)`` or ``(batch * heads, queries, atoms)``.
        shape: ``(batch, heads, queries, atoms)``.
        like: a tensor of the dtype and device of the scores.
    """
    batch, heads, queries, atoms = shape
    given = []
    if padding is not None:
        _check_mask(padding, "padding mask", ((batch, atoms),))
        given.append(padding[:, None, None])
    if mask is not None:
        _check_mask(mask, "association mask", ((queries, atoms), (batch * heads, queries, atoms)))
        given.append(mask if mask.dim() == 2 else mask.unflatten(0, (batch, heads)))
    if not given:
        return None
    if all(each.dtype == torch.bool for each in given):
        hidden = given[0] if len(given) == 1 else given[0] | given[1]
        return ~hidden
    numbers = [
        torch.zeros_like(each, dtype=like.dtype).masked_fill(each, -torch.inf)
        if each.dtype == torch.bool
        else each.to(like)
        for each in given
    ]
    return numbers[0] if len(numbers) == 1 else numbers[0] + numbers[1]


def check_presence(padding: Tensor, remedy: str) -> None:
    """Raise if every pattern of an entry of the batch is absent; not checked while a graph is made."""
    if not is_plain(padding) or not padding.numel():
        return
    hidden = padding if padding.dtype == torch.bool else padding <= torch.finfo(padding.dtype).min / 2
    empty = hidden.all(1).nonzero()[:, 0].tolist()
    if empty:
        shown = ", ".join(map(str, empty[:5])) + (", ..." if len(empty) > 5 else "")
        raise UserError(
            f"the padding mask must leave something in every entry of the batch, got nothing in {shown};"
            f" take these entries out, {remedy}"
        )


def _check_mask(mask: Any, name: str, shapes: tuple[tuple[int, ...], ...]) -> None:
    if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise UserError(f"the {name} must be a boolean or floating-point tensor, got {got}; convert it with .bool()")
    if tuple(mask.shape) not in shapes:
        wanted = " or ".join(map(str, shapes))
        raise UserError(
            f"the {name} must have shape {wanted}, got {tuple(mask.shape)}; it is True where a pattern is absent"
        )
