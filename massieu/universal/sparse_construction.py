"""Construction of a network with sparse attention that realizes any function of a whole sequence on a grid."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from massieu.checks import UserError, check_count
from massieu.nn import Block, FeedForward, MeasureAttention
from massieu.patterns import Pattern, Schedule, reach
from massieu.patterns.pattern import as_schedule
from massieu.universal.construction import RAMP, centers_of, check_arguments, values_of
from massieu.universal.lookup import table
from massieu.universal.multisets import LIMIT, axes_of, digits_of, sequences, strides_of
from massieu.universal.realization import EPSILON, Cases
from massieu.universal.stacks import Stack
from massieu.universal.staircases import net

__all__ = ["construct_sparse"]


def construct_sparse(
    function: Callable[[Tensor], Tensor],
    grid: int | tuple[int, ...],
    length: int,
    pattern: Pattern | Schedule | Iterable[Pattern],
    *,
    layers: int | None = None,
    ramp: float = RAMP,
    limit: int = LIMIT,
) -> Stack:
    r"""Return a network with sparse attention that maps sequences of cells to the values of a function at centers.

    .. math:: \mathrm{FF}_2 \circ (1 + \mathrm{attention}_L) \circ \dots \circ (1 + \mathrm{attention}_1) \circ
              \mathrm{FF}_1

    Tokens carry positions, so the function may depend on order. The first net writes the number of a token's cell into
    a slot of its position. In each attention layer a token adds the mean of the slots of the tokens that it sees, so
    after L layers slot s of token i is :math:`c_s \, [(1 + A)^L]_{is}`, with the rows of A uniform on the pattern; the
    factor is positive for all pairs after full reach. The last nets divide by it, read the slots as digits, and look
    the value up. A layer has one score for each connection of the pattern, ``O(T)`` for
    :func:`massieu.patterns.star_ring`.

    Args:
        function: map of tensors ``(batch, length, dim)`` of float64 to ``(batch, length, output_dim)``.
        grid: cells along each axis of the unit cube; a number for one axis.
        length: T, tokens of a sequence.
        pattern: a pattern, or a schedule whose patterns layers use in turn.
        layers: L; None for the layers of full reach. With fewer, a token reads zero for tokens out of reach.
        ramp: width of the strips at borders of cells, as a share of a cell.
        limit: largest number of entries of the table, pairs of a sequence and a position.

    Returns:
        The network in float64; :meth:`Stack.certify` evaluates all sequences.

    Source:
        The form of Yun et al. 2020, "O(n) connections are expressive enough"; theirs has constant width and depth that
        grows with the grid, ours has width that grows with it and L layers of attention.

    Example:
        >>> from massieu.patterns import star_ring
        >>> first_times_last = lambda x: (x[:, :1] * x[:, -1:]).expand(-1, x.shape[1], -1)
        >>> network = construct_sparse(first_times_last, grid=2, length=6, pattern=star_ring())
        >>> network.certify(1e-9).holds
        True
    """
    axes, length = axes_of(grid), check_count(length, "length")
    check_count(limit, "limit", least=0)
    check_arguments(function, ramp)
    cells, schedule = math.prod(axes), as_schedule(pattern)
    entries = length * cells**length
    if entries > limit:
        raise UserError(
            f"at most {limit} entries may be built, got {entries} for {cells} cells in sequences of {length}; take a"
            " coarser grid, shorter sequences, or a larger limit"
        )
    depth = reach(schedule, length).layers if layers is None else layers
    if depth is None:
        raise UserError(
            f"every token must reach all others, got {schedule!r} on {length} tokens without full reach; take another"
            " pattern such as star_ring(), or pass layers"
        )
    check_count(depth, "layers", least=0)
    inputs = centers_of(axes)[sequences(cells, length)]
    values = values_of(function, inputs)
    dim = max(2 * length, len(axes) + length, values.shape[-1], digits_of(entries))
    blocks = [_mean_block(dim, length, schedule[layer]) for layer in range(depth)]
    shares = _shares(blocks, dim, length)
    digits = sequences(cells, length).double()
    reached = (shares > 0).double()
    numbers = torch.einsum("bs,is->bi", digits * float(cells) ** torch.arange(length), reached)
    keys = numbers + cells**length * torch.arange(length)
    entry, first = _first_of_each(keys.flatten())
    positions = torch.zeros(length, dim, dtype=torch.float64)
    positions[:, len(axes) : len(axes) + length] = torch.eye(length, dtype=torch.float64)

    def cases() -> Cases:
        return Cases(inputs, function(inputs), True)

    return Stack(
        [
            _encode(axes, length, dim, ramp),
            *blocks,
            _read(shares, cells, length, dim),
            table(dim, entry, values.flatten(0, 1)[first]),
        ],
        positions,
        input_dim=len(axes),
        output_dim=values.shape[-1],
        margin=1 / float(entry.max().clamp(min=1)) / EPSILON,
        cases=cases,
    )


def _encode(axes: tuple[int, ...], length: int, dim: int, ramp: float) -> FeedForward:
    """Return a net from (token, position) to (number of the cell in the slot of the position, position)."""
    up, bias, down = [], [], []
    eye = torch.eye(dim, dtype=torch.float64)
    strides = strides_of(axes)
    for place in range(length):
        here = eye[len(axes) + place]
        for axis, cells in enumerate(axes):
            for step in range(1, cells):
                for side in (0.5, -0.5):
                    # At any other position the bias is larger than the slope times any coordinate of the cube.
                    slope, push = cells / ramp, 2 * cells / ramp + 1
                    up.append(slope * eye[axis] + push * here)
                    bias.append(side - step / ramp - push)
                    down.append(math.copysign(strides[axis], side) * eye[place])
        up.append(here)
        bias.append(0.0)
        down.append(eye[length + place])
    return net(dim, torch.stack(up), torch.tensor(bias, dtype=torch.float64), torch.stack(down), torch.zeros(dim))


def _mean_block(dim: int, length: int, pattern: Pattern) -> Block:
    """Return attention with zero scores: every token adds the mean of the slots of the tokens that it sees."""
    attention = MeasureAttention(dim, 1, head_dim=length, bias=False, pattern=pattern, dtype=torch.float64)
    with torch.no_grad():
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj, attention.out_proj):
            assert projection is not None
            projection.weight.zero_()
        assert attention.v_proj is not None
        assert attention.out_proj is not None
        attention.v_proj.weight[:, :length] = torch.eye(length, dtype=torch.float64)
        attention.out_proj.weight[:length] = torch.eye(length, dtype=torch.float64)
    return Block(dim, attention, None, norm=None)


@torch.no_grad()
def _shares(blocks: list[Block], dim: int, length: int) -> Tensor:
    """Return the output of the layers for a one in the slot of each token, ``(tokens, slots)``."""
    stream = torch.eye(length, dim, dtype=torch.float64)[None]
    for block in blocks:
        stream = block(stream)
    return stream[0, :, :length]


def _read(shares: Tensor, cells: int, length: int, dim: int) -> FeedForward:
    """Return a net from slots and position to a number in coordinate zero, with one unit for each position."""
    digits = float(cells) ** torch.arange(length, dtype=torch.float64)
    weights = torch.where(shares > 0, digits / shares.clamp(min=1e-300), 0.0)
    # At another position, the largest input of a unit from the slots.
    most = (weights[:, None] * (cells - 1) * shares[None]).sum(-1).amax() + 1
    up = torch.nn.functional.pad(torch.cat([weights, most * torch.eye(length)], 1), (0, dim - 2 * length))
    base = torch.arange(length) * float(cells) ** length
    up[:, length : 2 * length] += torch.diag(base)
    bias = -most.expand(length)
    return net(dim, up, bias, torch.ones(length, 1), torch.zeros(1))


def _first_of_each(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct keys, increasing, and the index of the first occurrence of each."""
    found, inverse = keys.unique(return_inverse=True)
    first = torch.full((len(found),), len(keys)).scatter_reduce(0, inverse, torch.arange(len(keys)), "amin")
    return found, first
