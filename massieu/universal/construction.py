"""Construction of a network that realizes a permutation-equivariant function on a grid."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from massieu.checks import UserError, check_count, check_number
from massieu.universal.identifiers import ContextualMap, contextual_map
from massieu.universal.lookup import table
from massieu.universal.multisets import LIMIT, axes_of, cost, digits_of, multisets, sequences, strides_of
from massieu.universal.realization import Cases, Realization
from massieu.universal.staircases import staircase

__all__ = ["RAMP", "centers_of", "check_arguments", "construct", "equivariant_values", "values_of"]

RAMP = 2.0**-20
EXHAUSTIVE = 100_000  # most sequences of an exhaustive certificate


def construct(
    function: Callable[[Tensor], Tensor],
    grid: int | tuple[int, ...],
    length: int,
    *,
    ramp: float | None = None,
    steps: int = 100,
    limit: int = LIMIT,
    generator: torch.Generator | int = 0,
) -> Realization:
    r"""Return a network that maps every sequence of cells to the values of a function at their centers.

    .. math:: \mathrm{FF}_2 \circ (1 + \mathrm{attention}) \circ \mathrm{FF}_1

    The first net is a staircase that gives each cell a code, the head of :func:`contextual_map` adds a number for the
    other tokens, and the second net is a :func:`table` of the sorted identifiers. Sequences may contain a token twice.
    For a continuous function on the unit cube the error is of the order of the size of a cell, except in strips at the
    borders of cells: there the first net rises, and its values are arbitrary. Their share of the volume is at most
    ``length * dim * ramp``, so the error vanishes in :math:`L^p` for finite p only.

    Args:
        function: map of tensors ``(batch, length, dim)`` of float64 to ``(batch, length, output_dim)``; permuting
            tokens must permute values.
        grid: cells along each axis of the unit cube; a number for one axis.
        length: tokens of a sequence.
        ramp: width of the strips as a share of a cell; None for :math:`2^{-20}`, or twice the least safe width.
        steps: of the search for codes.
        limit: largest number of identifiers, see :func:`cost`.
        generator: of candidates for codes, or its seed.

    Returns:
        The network in float64; :meth:`Realization.certify` evaluates all sequences, also after ``.float()``. On one
        axis float32 needs wider strips: rounding at the default slope loses codes.

    Source:
        The form of Kajitsuka and Sato 2023, with searched codes.

    Example:
        >>> network = construct(lambda x: x * x.sum(1, keepdim=True), grid=4, length=2)
        >>> network(torch.tensor([[[0.3], [0.9]]], dtype=torch.float64)).flatten().tolist()
        [0.46875, 1.09375]
        >>> network.certify().holds
        True
    """
    axes, length = axes_of(grid), check_count(length, "length")
    cost(axes, length).check(limit)
    check_arguments(function, ramp)
    centers = centers_of(axes)
    cells = len(centers)
    contexts = multisets(cells, length - 1, limit=limit)
    own = torch.arange(cells).repeat_interleave(len(contexts))
    tokens = torch.cat([own[:, None], contexts.repeat(cells, 1)], 1)
    values = equivariant_values(function, centers[tokens])[:, 0]
    found = contextual_map(cells, length, steps=steps, limit=limit, generator=generator)
    ramp = _checked_ramp(ramp, axes, found)
    identifiers, order = found.identifiers().flatten().sort()
    dim = max(len(axes), values.shape[-1], digits_of(len(order)))

    def cases() -> Cases:
        exhaustive = cells**length <= EXHAUSTIVE
        inputs = centers[sequences(cells, length) if exhaustive else tokens]
        return Cases(inputs, function(inputs), exhaustive)

    return Realization(
        _encode(axes, found, dim, ramp),
        found.block(dim),
        table(dim, identifiers, values[order]),
        input_dim=len(axes),
        output_dim=values.shape[-1],
        length=length,
        margin=found.margin,
        cost=cost(axes, length, values.shape[-1]),
        cases=cases,
    )


def check_arguments(function: object, ramp: float | None) -> None:
    """Raise unless the function is callable, and the ramp None or a share of a cell."""
    if not callable(function):
        got = type(function).__name__
        raise UserError(f"function must be a function of tensors (batch, length, dim), got {got}; pass a function")
    if ramp is not None and check_number(ramp, "ramp", above=0) >= 1:
        raise UserError(f"ramp must be smaller than 1, a share of a cell, got {ramp}; take one such as 1e-5")


def centers_of(axes: tuple[int, ...]) -> Tensor:
    """Return the centers of all cells, ``(cells, dim)``."""
    numbers = torch.arange(math.prod(axes))
    places = [numbers // stride % cells for stride, cells in zip(strides_of(axes), axes, strict=True)]
    return torch.stack([(place.double() + 0.5) / cells for place, cells in zip(places, axes, strict=True)], -1)


def values_of(function: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    """Return the checked values ``(sequences, length, output_dim)`` of a function, in float64."""
    values = function(inputs)
    if not isinstance(values, Tensor) or values.dim() != 3 or values.shape[:2] != inputs.shape[:2]:
        got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        batch, length = inputs.shape[:2]
        raise UserError(f"function must return shape ({batch}, {length}, output_dim) for this batch, got {got}")
    if values.is_complex() or not values.shape[-1]:
        kind = "complex ones" if values.is_complex() else "none"
        raise UserError(f"function must return real numbers for every token, got {kind}; stack parts of complex ones")
    values = values.detach().double()
    if not values.isfinite().all():
        raise UserError("function must be finite on the centers of all cells, but is nan or infinite at some")
    return values


def equivariant_values(function: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    """Return the checked values of a function after a test of equivariance on some permutations."""
    values = values_of(function, inputs)
    for order in _orders(*inputs.shape[:2]):
        permuted, expected = (x.gather(1, order[..., None].expand_as(x)) for x in (inputs, values))
        apart = float((function(permuted).double() - expected).abs().max())
        if not apart <= 1e-9 * max(1.0, float(values.abs().max())):
            raise UserError(
                f"function must be permutation-equivariant, got values that change by {apart:.1e} with the order of"
                " the tokens; give tokens a coordinate for their position, and use memorize"
            )
    return values


def _orders(count: int, length: int) -> list[Tensor]:
    """Return permutations of every sequence: a shift and a swap, which generate all, and a random one."""
    tokens = torch.arange(length)
    swapped = torch.cat([tokens[:2].flip(0), tokens[2:]])
    drawn = torch.rand(count, length, generator=torch.Generator().manual_seed(0)).argsort(1)
    return [tokens.roll(1).expand(count, -1), swapped.expand(count, -1), drawn]


def _checked_ramp(ramp: float | None, axes: tuple[int, ...], found: ContextualMap) -> float:
    """Return the ramp, or a default; raise if rounding in the first net is as large as the gaps of the later nets."""
    rounding = 8 * torch.finfo(torch.float64).eps * max(axes)
    gap = float(found.identifiers().max()) * found.spread / 4 if len(axes) == 1 else 0.25 / len(found.codes)
    if ramp is None:
        ramp = max(RAMP, 2 * rounding / gap)
    if rounding / ramp > gap:
        raise UserError(
            f"ramp must be at least {rounding / gap:.1e} for these cells, got {ramp}; with narrower strips, rounding"
            " changes the codes in float64"
        )
    return ramp


def _encode(axes: tuple[int, ...], found: ContextualMap, dim: int, ramp: float) -> nn.Sequential:
    """Return a net from tokens to codes: one staircase on one axis, otherwise a second one after the cell number."""
    counts = torch.tensor(axes)
    axis = torch.arange(len(axes)).repeat_interleave(counts - 1)
    step = torch.cat([torch.arange(1, cells) for cells in axes])
    directions = torch.eye(dim, dtype=torch.float64)[axis]
    cells = counts[axis].double()
    if len(axes) == 1:
        heights, base = found.codes.diff()[:, None], found.codes[:1]
        return nn.Sequential(staircase(dim, directions, step / cells, ramp / cells, heights, base))
    stride = torch.tensor(strides_of(axes)).double()
    number = staircase(dim, directions, step / cells, ramp / cells, stride[axis][:, None], torch.zeros(1))
    edges = torch.arange(1, len(found.codes)) - 0.5
    ahead = torch.eye(dim, dtype=torch.float64)[:1].expand(len(edges), -1)
    codes = staircase(dim, ahead, edges, torch.full_like(edges, 0.5), found.codes.diff()[:, None], found.codes[:1])
    return nn.Sequential(number, codes)
