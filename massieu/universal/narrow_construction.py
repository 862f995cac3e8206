"""Construction of the network of Yun et al. 2019: two heads of size one, four ReLUs, depth that grows with the grid."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from massieu.checks import UserError, check_count, check_number
from massieu.nn import Block, MeasureAttention
from massieu.universal.construction import EXHAUSTIVE, centers_of, check_arguments, equivariant_values
from massieu.universal.multisets import LIMIT, axes_of, strides_of
from massieu.universal.realization import EPSILON, Cases
from massieu.universal.selective_shifts import shift_stack
from massieu.universal.stacks import Residual, Stack
from massieu.universal.staircases import net

__all__ = ["construct_narrow"]

SHARPNESS = 1600.0  # scores differ by at least half of it, so smaller weights underflow to zero in float64


def construct_narrow(
    function: Callable[[Tensor], Tensor],
    grid: int | tuple[int, ...],
    length: int,
    *,
    sharpness: float = SHARPNESS,
    ramp: float = 2.0**-10,
    limit: int = LIMIT,
) -> Stack:
    r"""Return a deep network of constant width that maps sequences of different cells to the values at their centers.

    Every layer is two softmax heads of size one with a residual connection, or a feed-forward net of four ReLUs with a
    residual connection. In order:

    1. one net for each cell of each axis, which flattens it to its number, and one more net;
    2. one attention layer for each cell, a selective shift of its tokens,

       .. math:: l_j \mapsto l_j + \rho \, (\max_k l_k - \min_k l_k) \, \mathbf 1[b - \tfrac12 < l_j < b + \tfrac12],

       the difference of two heads with scores :math:`s (l_j - b \pm \tfrac12) \, l_k`, which read the maximum where the
       first factor is positive and the minimum where it is negative; one more layer shifts all tokens;
    3. one net for each token of each set of cells, which maps its identifier to its value, and one that maps all other
       identifiers to a bounded number.

    Sequences that contain a cell twice are excluded, as in the proof: hardmax depends on sets only. Their share of the
    cube is at most :math:`\binom T2 / n^d`, so the network approximates in :math:`L^p` for finite p.

    Args:
        function: map of tensors ``(batch, length, dim)`` of float64 to ``(batch, length, output_dim)``; permuting
            tokens must permute values.
        grid: cells along each axis of the unit cube; a number for one axis.
        length: T, tokens of a sequence.
        sharpness: s, the finite factor in place of hardmax's infinity.
        ramp: width of the strips at borders of cells, as a share of a cell.
        limit: largest number of feed-forward layers for values.

    Returns:
        The network in float64; :meth:`Stack.certify` evaluates all sequences without repeated cells. Its identifiers
        are whole numbers up to a rounding far below their distance. They cancel in the values, whose error is machine
        epsilon times the largest: 1e-11 for (n, d, T) = (4, 1, 3), 1e-6 for (8, 1, 4).

    Source:
        Yun et al. 2019, theorem 2 and its proof: class :math:`\mathcal T^{2,1,4}`, with softmax and ReLU.

    Example:
        >>> network = construct_narrow(lambda x: x * x.sum(1, keepdim=True), grid=3, length=2)
        >>> len(network.layers), network.certify(1e-9).holds
        (15, True)
    """
    axes, length = axes_of(grid), check_count(length, "length", least=2)
    check_arguments(function, ramp)
    check_number(sharpness, "sharpness", above=0)
    cells = math.prod(axes)
    depth = length * math.comb(cells, length)
    if depth > limit:
        raise UserError(
            f"at most {limit} layers may be built for values, got {depth} for {cells} cells in sequences of {length};"
            " take a coarser grid, shorter sequences, or a larger limit"
        )
    stack = shift_stack(cells, 1, length)
    centers = centers_of(axes)
    values = equivariant_values(function, centers[stack.sequences])
    dim = max(len(axes), values.shape[-1])
    direction = torch.zeros(dim, dtype=torch.float64)
    direction[: len(axes)] = torch.tensor(strides_of(axes)).double()
    widest = float((values @ direction[: values.shape[-1]]).abs().max())
    if 2 * widest + 1 >= float(stack.identifiers.min()) / 2:
        raise UserError(f"values must be smaller than the identifiers, got up to {widest:.1e}; divide the function")
    order = [list(row) for row in itertools.permutations(range(cells), length)]
    chosen = order if len(order) <= EXHAUSTIVE else stack.sequences.tolist()

    def cases() -> Cases:
        inputs = centers[torch.tensor(chosen)]
        return Cases(inputs, function(inputs), len(order) <= EXHAUSTIVE, "without repeated cells")

    return Stack(
        [
            *(_flatten(dim, axis, cell, axes[axis], ramp) for axis in range(len(axes)) for cell in range(axes[axis])),
            _offset(dim, axes),
            *(_shift(direction, level, float(cells), sharpness) for level in range(cells)),
            _shift(direction, None, float(length * cells ** (length + 1)), sharpness),
            *_values(direction, stack.identifiers, stack.sequences, values, axes),
            _clear(direction, 2 * widest + 1),
        ],
        torch.zeros(length, dim),
        input_dim=len(axes),
        output_dim=values.shape[-1],
        margin=stack.gap / stack.largest / EPSILON,
        tolerance=8 * EPSILON * stack.largest,
        cases=cases,
    )


def _bump(dim: int, direction: Tensor, places: Tensor, left: Tensor, right: Tensor) -> Residual:
    """Return a net of four ReLUs that is zero outside of four places along a direction.

    It is linear from ``left`` to ``right``, ``(outputs,)`` each, between the inner places.
    """
    first, second, third, last = places.tolist()
    slopes = torch.stack([left / (second - first), (right - left) / (third - second), -right / (last - third)])
    bends = torch.diff(slopes, dim=0, prepend=torch.zeros_like(slopes[:1]), append=torch.zeros_like(slopes[:1]))
    return Residual(net(dim, direction.expand(4, -1), -places, bends, torch.zeros(len(left))))


def _flatten(dim: int, axis: int, cell: int, cells: int, ramp: float) -> Residual:
    """Return a net that maps a cell of an axis to its number minus that of cells, which is left of all cells."""
    eye = torch.eye(dim, dtype=torch.float64)
    half, number = ramp / 2, cell - cells
    shares = torch.tensor([0.0, half, 1 - half, 1.0], dtype=torch.float64)
    places = (cell + shares) / cells
    return _bump(dim, eye[axis], places, (number - places[1]) * eye[axis], (number - places[2]) * eye[axis])


def _offset(dim: int, axes: tuple[int, ...]) -> Residual:
    """Return a net that adds the number of cells, by biases alone."""
    base = torch.tensor(axes, dtype=torch.float64)
    return Residual(net(dim, torch.zeros(4, dim), torch.zeros(4), torch.zeros(4, len(axes)), base))


def _shift(direction: Tensor, level: int | None, factor: float, sharpness: float) -> Block:
    """Return two heads of size one that add a multiple of the range to tokens at a level, or of the maximum to all."""
    dim = len(direction)
    attention = MeasureAttention(dim, 2, head_dim=1, scale=1.0, dtype=torch.float64)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.zero_()
        assert attention.v_proj is not None
        assert attention.out_proj is not None
        for head, (edge, sign) in enumerate(((-0.5, 1.0), (0.5, -1.0))):
            attention.q_proj.weight[head] = sharpness * direction
            attention.q_proj.bias[head] = -sharpness * (edge + (0.0 if level is None else level))
            attention.k_proj.weight[head] = direction
            attention.v_proj.weight[head] = direction
            attention.out_proj.weight[0, head] = sign * factor
        if level is None:
            attention.out_proj.weight[0, 1] = 0.0
    return Block(dim, attention, None, norm=None)


def _clear(direction: Tensor, least: float) -> Residual:
    """Return a net that bounds unused identifiers, those of strips and of sequences with a cell twice."""
    up, bias = direction.expand(4, -1), -least * torch.tensor([0.75, 1.0, 1.0, 1.0], dtype=torch.float64)
    down = torch.zeros(4, len(direction), dtype=torch.float64)
    down[:2, 0] = torch.tensor([-4.0, 3.0])
    return Residual(net(len(direction), up, bias, down, torch.zeros(len(direction))))


def _values(
    direction: Tensor, identifiers: Tensor, rows: Tensor, values: Tensor, axes: tuple[int, ...]
) -> list[Residual]:
    """Return nets from identifiers to values, for the largest identifier first.

    A bump is exactly zero to its left, for later identifiers and for values; to its right four terms of the size of a
    squared identifier would have to cancel.
    """
    dim, found = len(direction), []
    numbers, order = identifiers.flatten().double().sort(descending=True)
    gap = float(-numbers.diff().max()) if len(numbers) > 1 else 1.0
    places = gap / 4 * torch.tensor([-1.0, -0.5, 0.5, 1.0], dtype=torch.float64)
    strides = strides_of(axes)
    cells, values = rows.flatten()[order], values.flatten(0, 1)[order]
    for number, cell, value in zip(numbers, cells, values, strict=True):
        change = torch.zeros(dim, dtype=torch.float64)
        change[: len(value)] = value
        for axis in range(1, len(axes)):
            change[axis] -= (int(cell) // strides[axis]) % axes[axis]
        # The first coordinate is the identifier minus the others; a slope of −1 also removes its rounding.
        rest = sum(strides[axis] * ((int(cell) // strides[axis]) % axes[axis]) for axis in range(1, len(axes)))
        change[0] -= number - rest
        tilt = torch.zeros_like(change)
        tilt[0] = places[2]
        found.append(_bump(dim, direction, number + places, change + tilt, change - tilt))
    return found
