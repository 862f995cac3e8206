"""The patterns of an association: their sizes when a layer is built, and their common shape when it is called."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from massieu.nn.checks import check_count

__all__ = ["Sizes", "expand_heads", "find_sizes", "split_input"]


class Sizes(NamedTuple):
    """Sizes of the inputs, of the association space and the values of one head; None where nothing asks for them."""

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
    """Complete the sizes, or say in one sentence why they do not fit.

    Args:
        inputs: sizes of states, stored patterns and projections.
        hidden_size: of the association space, as it was asked for.
        pattern_size: of the values, as it was asked for.
        num_heads: number of heads.
        statics: which of the three are not projected.
        connected: whether values go through the projection of the stored patterns first.
        needed: whether anything is projected or normalized, so that sizes must be known.
    """
    state, stored, projection = inputs
    if needed and None in inputs:
        raise ValueError(
            "input_size must be given unless all patterns are static, not normalized and not projected, got None;"
            " it is the size of the state patterns"
        )
    if connected and stored != projection:
        raise ValueError(
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
    """Size of the association space: that of the patterns that stay as they are, or the one that was given."""
    fixed = {size for size, static in zip((state, stored), statics, strict=False) if static}
    if len(fixed) > 1 or (fixed and given is not None and given not in fixed):
        raise ValueError(
            f"hidden_size must be the size of static patterns, got {given} with static patterns of"
            f" {', '.join(sorted(map(str, fixed)))}; leave it out, or project one of them"
        )
    if fixed:
        return fixed.pop()
    assert state is not None
    if given is None and state % num_heads:
        raise ValueError(
            f"input_size must be a multiple of num_heads, got {state} and {num_heads}; or say hidden_size yourself"
        )
    size = state // num_heads if given is None else given
    check_count(size, "hidden_size", "it is the size of the association space of one head")
    return size


def split_input(input: Any) -> Any:
    """Stored patterns, states and projections; one tensor serves as all three."""
    if isinstance(input, Tensor):
        return input, input, input
    if not isinstance(input, (tuple, list)) or len(input) != 3:
        got = f"{len(input)} of them" if isinstance(input, (tuple, list)) else type(input).__name__
        raise TypeError(
            f"input must be a tensor, or stored patterns, states and projections, got {got}; pass one or all"
        )
    return input


def expand_heads(query: Tensor, key: Tensor, value: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """The three, ``(batch or 1, heads or 1, patterns, size)``, with one batch size and one dtype."""
    if key.shape[-2] != value.shape[-2] or query.shape[-1] != key.shape[-1]:
        raise ValueError(
            "stored and projection must have as many patterns, and static patterns one size, got"
            f" {key.shape[-2]} and {value.shape[-2]} patterns of size {key.shape[-1]}, states of {query.shape[-1]};"
            " give every stored pattern its value"
        )
    batches = {each.shape[0] for each in (query, key, value)} - {1}
    if len(batches) > 1:
        raise ValueError(
            f"input must have one batch size, or one, got {', '.join(map(str, sorted(batches)))};"
            " give every entry its patterns"
        )
    batch = batches.pop() if batches else 1
    # Under autocast what was projected is narrower than what is static.
    dtype = torch.promote_types(torch.promote_types(query.dtype, key.dtype), value.dtype)
    return (
        query.to(dtype).expand(batch, num_heads, -1, -1),
        key.to(dtype).expand(batch, -1, -1, -1),
        value.to(dtype).expand(batch, -1, -1, -1),
    )
