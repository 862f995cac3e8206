"""What constructions come to as grids become finer and vocabularies larger."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from massieu.nn.checks import check_count
from massieu.universal.boltzmann import boltz_gap, theorem_spacing
from massieu.universal.construction import construct
from massieu.universal.identifiers import contextual_map
from massieu.universal.multisets import LIMIT

__all__ = ["GridError", "SeparationGap", "grid_errors", "separation_gaps"]


class GridError(NamedTuple):
    """How far a construction on a grid is from its function at random points: root mean square, and at most."""

    cells: int
    mean_square: float
    largest: float


class SeparationGap(NamedTuple):
    """The least distance between two contexts of a token as a share of the largest code.

    ``theorem`` is that of :func:`boltz_gap`, the best that the theorem's spacing can do; ``searched`` that of
    :func:`contextual_map`.
    """

    vocabulary: int
    theorem: float
    searched: float


def grid_errors(
    function: Callable[[Tensor], Tensor],
    grids: Iterable[int],
    length: int,
    *,
    dim: int = 1,
    ramp: float | None = None,
    points: int = 5000,
    rounds: int = 30,
    seed: int = 0,
) -> list[GridError]:
    """Errors of :func:`construct` on grids of several sizes, at points drawn from the unit cube.

    Args:
        function: as in :func:`construct`.
        grids: cells along each axis.
        length: tokens of a sequence.
        dim: axes.
        ramp: width of the strips as a share of a cell, as in :func:`construct`.
        points: sequences that are drawn.
        rounds: of the search for codes.
        seed: of points and search.

    Example:
        >>> coarse, fine = grid_errors(lambda x: x * x.sum(1, keepdim=True), [4, 8], length=2)
        >>> round(coarse.mean_square / fine.mean_square, 1)
        2.0
    """
    check_count(points, "points", "it is the number of sequences that are drawn")
    check_count(dim, "dim", "it is the number of axes")
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(points, length, dim, generator=generator, dtype=torch.float64)
    expected, rows = function(drawn), []
    for cells in grids:
        network = construct(function, (cells,) * dim, length, ramp=ramp, rounds=rounds, generator=seed)
        with torch.no_grad():
            apart = torch.cat([network(part) for part in drawn.split(1000)]) - expected
        rows.append(GridError(cells, float(apart.square().mean().sqrt()), float(apart.abs().max())))
    return rows


def separation_gaps(
    vocabularies: Iterable[int], length: int, *, rounds: int = 50, limit: int = LIMIT, seed: int = 0
) -> list[SeparationGap]:
    """The gaps of vocabularies of several sizes, at the theorem's scale and at ours; the same sequences, no repeats.

    More than ``limit`` identifiers are refused, as in :func:`contextual_map`.

    Example:
        >>> for row in separation_gaps([4, 9], length=3):
        ...     print(row.vocabulary, f"{row.theorem:.0e}", row.searched > 1e-4)
        4 2e-05 True
        9 0e+00 True
    """
    rows = []
    for vocabulary in vocabularies:
        found = contextual_map(vocabulary, length, duplicates=False, rounds=rounds, limit=limit, generator=seed)
        theorem = boltz_gap(vocabulary, length, limit=limit) / (vocabulary * theorem_spacing(length))
        rows.append(SeparationGap(vocabulary, theorem, found.gap))
    return rows
