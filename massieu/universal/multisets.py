"""Multisets of tokens, the inputs of attention without positions, and the cost of networks that tell them apart."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from massieu.checks import UserError, check_choice, check_count

__all__ = ["Cost", "axes_of", "cost", "digits_of", "multisets", "sequences", "strides_of"]

LIMIT = 20_000  # identifiers by default; a network for them has a few hundred thousand parameters
ROWS = 1_000_000  # multisets by default


@dataclass(frozen=True)
class Cost:
    """Size of a construction, known before it is built.

    Attributes:
        vocabulary: number of tokens; for a grid, of cells.
        length: tokens of a sequence.
        identifiers: pairs of a token and the multiset around it.
        parameters: entries of all weights and biases, many of them zero; 0 if unknown.
    """

    vocabulary: int
    length: int
    identifiers: int
    parameters: int

    def check(self, limit: int) -> None:
        """Raise if there are too many identifiers."""
        check_count(limit, "limit", least=0)
        if self.identifiers > limit:
            raise UserError(
                f"at most {limit} identifiers may be built, got {self}; take a coarser grid, fewer or"
                " shorter sequences, or a larger limit"
            )

    def __str__(self) -> str:
        known = f", {self.parameters} parameters" if self.parameters else ""
        return f"{self.vocabulary} tokens in sequences of {self.length}: {self.identifiers} identifiers{known}"


def cost(grid: int | tuple[int, ...], length: int, output_dim: int = 1) -> Cost:
    r"""Return the cost of :func:`construct` without building the network.

    .. math:: |V| \binom{|V| + T - 2}{T - 1} \text{ identifiers}, \qquad |V| = \prod_i n_i

    Args:
        grid: cells along each axis of the unit cube, :math:`n_i`; a number for one axis.
        length: :math:`T`, tokens of a sequence.
        output_dim: size of the values of the function.

    Example:
        >>> print(cost((3, 3), length=3, output_dim=2))
        9 tokens in sequences of 3: 405 identifiers, 23935 parameters
        >>> cost((10, 10), length=8).identifiers
        2437006780000
    """
    axes, length = axes_of(grid), check_count(length, "length")
    check_count(output_dim, "output_dim")
    vocabulary = math.prod(axes)
    identifiers = vocabulary * math.comb(vocabulary + length - 2, length - 1)
    digits = digits_of(identifiers)
    dim = max(len(axes), output_dim, digits)
    # Units of each net: two for a step along an axis and from identifier to digits, the table, from cell to code.
    units = [2 * (sum(axes) - len(axes)), 2 * (identifiers - 1), digits, digits, identifiers]
    if len(axes) > 1:
        units.append(2 * (vocabulary - 1))
    parameters = 4 * dim + sum(max(width, 1) * (2 * dim + 1) + dim for width in units)
    return Cost(vocabulary, length, identifiers, parameters)


def axes_of(grid: int | tuple[int, ...]) -> tuple[int, ...]:
    """Return the cells along each axis."""
    axes = grid if isinstance(grid, (tuple, list)) else (grid,)
    if not axes:
        raise UserError("grid must have an axis, got none; (3, 3) divides the square into nine cells")
    return tuple(check_count(cells, "grid", remedy="(3, 3) has three cells along each axis") for cells in axes)


def strides_of(axes: tuple[int, ...]) -> list[int]:
    """Return the factor of each axis in the number of a cell; the first axis counts fastest."""
    return [math.prod(axes[:axis]) for axis in range(len(axes))]


def digits_of(entries: int) -> int:
    """Return the number of binary digits of the largest index of an entry."""
    return max(1, (entries - 1).bit_length())


def multisets(vocabulary: int, length: int, *, duplicates: bool = True, limit: int = ROWS) -> Tensor:
    r"""Return all multisets of tokens, or all sets, each sorted, in lexicographic order.

    .. math:: \binom{|V| + T - 1}{T} \text{ multisets}, \qquad \binom{|V|}{T} \text{ sets}

    Args:
        vocabulary: :math:`|V|`; the tokens are 0 to :math:`|V| - 1`.
        length: :math:`T`, tokens in a multiset; zero gives the empty one.
        duplicates: allow a token more than once.
        limit: largest number of multisets.

    Returns:
        Token numbers, shape ``(multisets, length)``.

    Example:
        >>> multisets(3, 2).tolist()
        [[0, 0], [0, 1], [0, 2], [1, 1], [1, 2], [2, 2]]
        >>> multisets(3, 2, duplicates=False).tolist()
        [[0, 1], [0, 2], [1, 2]]
    """
    vocabulary, length = check_count(vocabulary, "vocabulary"), check_count(length, "length", least=0)
    check_choice(duplicates, "duplicates", (True, False))
    check_count(limit, "limit", least=0)
    number = math.comb(vocabulary + length - 1 if duplicates else vocabulary, length)
    if number > limit:
        raise UserError(
            f"at most {limit} multisets may be listed, got {number} of {length} out of {vocabulary} tokens; take fewer"
            " tokens, shorter ones, or a larger limit"
        )
    rows = torch.zeros(1, 0, dtype=torch.long)
    for place in range(length):
        least = rows[:, -1] + (not duplicates) if place else torch.zeros(1, dtype=torch.long)
        choices = vocabulary - least
        parent = torch.repeat_interleave(torch.arange(len(rows)), choices)
        offset = torch.arange(len(parent)) - (choices.cumsum(0) - choices)[parent]
        rows = torch.cat([rows[parent], (least[parent] + offset)[:, None]], 1)
    return rows


def sequences(vocabulary: int, length: int) -> Tensor:
    """Return all sequences of tokens, shape ``(vocabulary ** length, length)``.

    Example:
        >>> sequences(2, 2).tolist()
        [[0, 0], [0, 1], [1, 0], [1, 1]]
    """
    numbers = torch.arange(vocabulary**length)
    powers = vocabulary ** torch.arange(length - 1, -1, -1)
    return numbers[:, None] // powers % vocabulary
