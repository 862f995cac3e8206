"""The contextual map of Yun et al. 2019 in whole numbers: a stack of hardmax layers that shift one token at a time."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from massieu.nn.checks import check_count
from massieu.universal.multisets import multisets

__all__ = ["ShiftStack", "selective_shift", "shift_stack"]

EXACT = 2**53
"""Whole numbers below are exact in float64, in which a network would carry them."""


def selective_shift(numbers: Tensor, level: int, factor: int) -> Tensor:
    r"""One layer: tokens at a level move up by a multiple of the range of their sequence.

    .. math:: l_j \mapsto l_j + \rho \, (\max_k l_k - \min_k l_k) \, \mathbf 1[l_j = b]

    Two hardmax heads of size one give the maximum and the minimum.

    Args:
        numbers: :math:`l`, whole, shape ``(..., length)``.
        level: :math:`b`.
        factor: :math:`\rho`.

    Source:
        Yun et al. 2019, selective shift operation, in units of the grid's step.

    Example:
        >>> selective_shift(torch.tensor([[0, 1, 2]]), level=0, factor=3).tolist()
        [[6, 1, 2]]
    """
    if not isinstance(numbers, Tensor) or numbers.dtype != torch.int64:
        got = numbers.dtype if isinstance(numbers, Tensor) else type(numbers).__name__
        raise TypeError(f"numbers must be whole, a tensor of torch.int64, got {got}; convert it with .long()")
    reach = numbers.amax(-1, keepdim=True) - numbers.amin(-1, keepdim=True)
    return numbers + factor * reach * (numbers == level)


@dataclass(frozen=True)
class ShiftStack:
    """What the stack makes of all sequences without repeated tokens.

    Attributes:
        sequences: token numbers, sorted, ``(sequences, length)``.
        identifiers: after the stack, the same shape.
        layers: attention layers.
        consistent: whether permuting the tokens permutes the identifiers, tried on all orders, up to 24.
    """

    sequences: Tensor
    identifiers: Tensor
    layers: int
    consistent: bool

    @property
    def distinct(self) -> int:
        """How many identifiers there are; as many as entries if the stack is a contextual map."""
        return len(self.identifiers.unique())

    @property
    def gap(self) -> int:
        """The least distance between two that differ."""
        steps = self.identifiers.unique().diff()
        if not len(steps):
            raise ValueError("a gap is between two identifiers, got one; take more cells, or longer sequences")
        return int(steps.min())

    @property
    def largest(self) -> int:
        """The largest, which must stay below 2 ** 53 to be exact in float64."""
        return int(self.identifiers.max())


def shift_stack(grid: int, dim: int, length: int, *, duplicates: bool = False, factor: int | None = None) -> ShiftStack:
    r"""Shift every level of the grid in turn, then all tokens by a multiple of the maximum.

    A token is the number :math:`\sum_i k_i n^i` of its cell; :math:`n^d` layers with factor :math:`n^d`, then one that
    adds :math:`T n^{(T+1)d} \max_k l_k`.

    Args:
        grid: :math:`n`, cells along each axis.
        dim: :math:`d`, axes.
        length: :math:`T`, tokens of a sequence.
        duplicates: whether to pass sequences with repeated tokens too, which the proof leaves out: their sets alone
            are told apart.
        factor: of the layers that sweep the levels; :math:`n^d` by default, with smaller ones tokens may meet.

    Source:
        Yun et al. 2019. The last factor exceeds all numbers before it, so that sequences with different
        maxima cannot meet.

    Example:
        >>> stack = shift_stack(3, dim=1, length=2)
        >>> stack.identifiers.tolist()
        [[381, 385], [762, 770], [436, 440]]
        >>> stack.layers, stack.distinct, stack.gap, stack.consistent
        (4, 6, 4, True)
    """
    for value, name in ((grid, "grid"), (dim, "dim"), (length, "length")):
        check_count(value, name, "the stack needs cells, axes and tokens")
    cells = grid**dim
    factor = cells if factor is None else factor
    check_count(factor, "factor", "pass None for that of the proof")
    bound = (1 + length * cells ** (length + 1)) * max(cells, factor) ** (length + 1)
    if bound >= EXACT:
        raise ValueError(
            f"identifiers must stay below 2**53 to be exact, got up to {bound:.1e} for {cells} cells and length"
            f" {length}; take a coarser grid or shorter sequences"
        )
    if cells < length and not duplicates:
        raise ValueError(f"sequences without repeats need {length} cells, got {cells}; take a finer grid")
    rows = multisets(cells, length, duplicates=duplicates)
    found = _stack(rows, cells, length, factor)
    orders = itertools.islice(itertools.permutations(range(length)), 24)
    consistent = all(torch.equal(_stack(rows[:, order], cells, length, factor), found[:, order]) for order in orders)
    return ShiftStack(rows, found, cells + 1, consistent)


def _stack(numbers: Tensor, cells: int, length: int, factor: int) -> Tensor:
    for level in range(cells):
        numbers = selective_shift(numbers, level, factor)
    last: int = length * cells ** (length + 1)
    return numbers + last * numbers.amax(-1, keepdim=True)
