"""What a sequence is to attention without positions: a token among others. How many there are, and all of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from massieu.checks import check_count

__all__ = ["Cost", "cost", "digits_of", "multisets", "sequences"]

LIMIT = 20_000
"""Identifiers that are built without being asked twice: a network for them has a few hundred thousand parameters."""

ROWS = 1_000_000
"""Multisets that are listed without being asked twice."""


@dataclass(frozen=True)
class Cost:
    """What a construction needs, known before it is built.

    Attributes:
        vocabulary: number of tokens, for a grid that of its cells.
        length: tokens of a sequence.
        identifiers: pairs of a token and the multiset around it, each of which gets a number of its own.
        parameters: entries of all weights and biases, many of them zero; 0 where they do not matter.
    """

    vocabulary: int
    length: int
    identifiers: int
    parameters: int

    def check(self, limit: int) -> None:
        """One sentence unless there are few enough identifiers."""
        check_count(limit, "limit", remedy="it is the number of identifiers that may be built", least=0)
        if self.identifiers > limit:
            raise ValueError(
                f"at most {limit} identifiers may be built, got {self}; take a coarser grid, fewer or"
                " shorter sequences, or a larger limit"
            )

    def __str__(self) -> str:
        known = f", {self.parameters} parameters" if self.parameters else ""
        return f"{self.vocabulary} tokens in sequences of {self.length}: {self.identifiers} identifiers{known}"


def cost(grid: int | tuple[int, ...], length: int, output_dim: int = 1) -> Cost:
    r"""What :func:`construct` would build, without building it.

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
    axes = axes_of(grid)
    check_count(length, "length", remedy="it is the number of tokens of a sequence")
    check_count(output_dim, "output_dim", remedy="it is the size of the values")
    length = int(length)
    vocabulary = math.prod(axes)
    identifiers = vocabulary * math.comb(vocabulary + length - 2, length - 1)
    digits = digits_of(identifiers)
    dim = max(len(axes), output_dim, digits)
    # Units of each net: two for a step along an axis, from cell to code, from identifier to digits; then the table.
    units = [2 * (sum(axes) - len(axes)), 2 * (identifiers - 1), digits, digits, identifiers]
    if len(axes) > 1:
        units.append(2 * (vocabulary - 1))
    parameters = 4 * dim + sum(max(width, 1) * (2 * dim + 1) + dim for width in units)
    return Cost(vocabulary, length, identifiers, parameters)


def axes_of(grid: int | tuple[int, ...]) -> tuple[int, ...]:
    """The cells along each axis."""
    axes = grid if isinstance(grid, (tuple, list)) else (grid,)
    for cells in axes:
        check_count(cells, "grid", remedy="it is the number of cells along an axis, as in (3, 3)")
    if not axes:
        raise ValueError("grid must have an axis, got none; (3, 3) divides the square into nine cells")
    return tuple(map(int, axes))


def digits_of(entries: int) -> int:
    """Binary digits that tell so many entries apart."""
    return max(1, (entries - 1).bit_length())


def multisets(vocabulary: int, length: int, *, duplicates: bool = True, limit: int = ROWS) -> Tensor:
    r"""All multisets of tokens, or all sets, each sorted, in the order of a dictionary.

    .. math:: \binom{|V| + T - 1}{T} \text{ multisets}, \qquad \binom{|V|}{T} \text{ sets}

    Args:
        vocabulary: :math:`|V|`, the tokens are 0 to :math:`|V| - 1`.
        length: :math:`T`, their number in a multiset; zero gives the empty one.
        duplicates: whether a token may be there more than once.
        limit: multisets that may be listed.

    Returns:
        Token numbers, shape ``(multisets, length)``.

    Example:
        >>> multisets(3, 2).tolist()
        [[0, 0], [0, 1], [0, 2], [1, 1], [1, 2], [2, 2]]
        >>> multisets(3, 2, duplicates=False).tolist()
        [[0, 1], [0, 2], [1, 2]]
    """
    check_count(vocabulary, "vocabulary", remedy="it is the number of tokens")
    check_count(length, "length", remedy="it is the number of tokens of a multiset", least=0)
    check_duplicates(duplicates)
    check_count(limit, "limit", remedy="it is the number of multisets that may be listed", least=0)
    number = math.comb(int(vocabulary + length - 1) if duplicates else int(vocabulary), int(length))
    if number > limit:
        raise ValueError(
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


def check_duplicates(duplicates: object) -> None:
    """One sentence unless this is yes or no."""
    if not isinstance(duplicates, bool):
        raise TypeError(f"duplicates must be True or False, got {duplicates!r}; it says whether a token may come twice")


def sequences(vocabulary: int, length: int) -> Tensor:
    """All sequences of tokens, shape ``(vocabulary ** length, length)``.

    Example:
        >>> sequences(2, 2).tolist()
        [[0, 0], [0, 1], [1, 0], [1, 1]]
    """
    numbers = torch.arange(vocabulary**length)
    powers = vocabulary ** torch.arange(length - 1, -1, -1)
    return numbers[:, None] // powers % vocabulary
