"""Contextual map of Yun et al. 2019 in exact integers: a stack of hardmax layers with selective shifts."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from massieu.checks import UserError, check_count
from massieu.universal.multisets import multisets

__all__ = ["ShiftStack", "selective_shift", "shift_stack"]

EXACT = 2**53  # integers below are exact in float64, the type of a network's stream


def selective_shift(numbers: Tensor, level: int, factor: int) -> Tensor:
    r"""Return the tokens after one layer, which shifts those at a level by a multiple of the range of their sequence.

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
        raise UserError(f"numbers must be a tensor of torch.int64, got {got}; convert it with .long()")
    spread = numbers.amax(-1, keepdim=True) - numbers.amin(-1, keepdim=True)
    return numbers + factor * spread * (numbers == level)


@dataclass(frozen=True)
class ShiftStack:
    """Identifiers of all sequences without repeated tokens, after the stack.

    Attributes:
        sequences: token numbers, sorted, ``(sequences, length)``.
        identifiers: after the stack, of the same shape.
        layers: number of attention layers.
        consistent: True if permuting the tokens permutes the identifiers, tested on at most 24 orders.
    """

    sequences: Tensor
    identifiers: Tensor
    layers: int
    consistent: bool

    @property
    def distinct(self) -> int:
        """Number of distinct identifiers; all are distinct if the stack is a contextual map."""
        return len(self.identifiers.unique())

    @property
    def gap(self) -> int:
        """Least distance between two distinct identifiers."""
        gaps = self.identifiers.unique().diff()
        if not len(gaps):
            raise UserError("a gap is between two identifiers, got one; take more cells, or longer sequences")
        return int(gaps.min())

    @property
    def largest(self) -> int:
        """Largest identifier, below 2 ** 53."""
        return int(self.identifiers.max())


def shift_stack(grid: int, dim: int, length: int, *, duplicates: bool = False, factor: int | None = None) -> ShiftStack:
    r"""Return the identifiers after a shift of every level of the grid in turn, then of all tokens by the maximum.

    A token is the number :math:`\sum_i k_i n^i` of its cell; :math:`n^d` layers with factor :math:`n^d`, then one that
    adds :math:`T n^{(T+1)d} \max_k l_k`.

    Args:
        grid: :math:`n`, cells along each axis.
        dim: :math:`d`, axes.
        length: :math:`T`, tokens of a sequence.
        duplicates: include sequences with repeated tokens, which the proof excludes: only their sets get different
            identifiers.
        factor: of the shifts of levels; None for :math:`n^d`. With smaller factors identifiers may coincide.

    Source:
        Yun et al. 2019. The last factor exceeds all earlier numbers, so sequences with different maxima differ.

    Example:
        >>> stack = shift_stack(3, dim=1, length=2)
        >>> stack.identifiers.tolist()
        [[381, 385], [762, 770], [436, 440]]
        >>> stack.layers, stack.distinct, stack.gap, stack.consistent
        (4, 6, 4, True)
    """
    length = check_count(length, "length")
    cells = check_count(grid, "grid") ** check_count(dim, "dim")
    factor = cells if factor is None else check_count(factor, "factor", remedy="None is the factor of the proof")
    bound = (1 + length * cells ** (length + 1)) * max(cells, factor) ** (length + 1)
    if bound >= EXACT:
        raise UserError(
            f"identifiers must stay below 2**53 to be exact, got up to {bound:.1e} for {cells} cells and length"
            f" {length}; take a coarser grid or shorter sequences"
        )
    if cells < length and not duplicates:
        raise UserError(f"sequences without repeats need {length} cells, got {cells}; take a finer grid")
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
