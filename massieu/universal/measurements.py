"""Accuracy of constructions on finer grids, and gaps between contexts for larger vocabularies."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from massieu.checks import check_count
from massieu.universal.boltzmann import boltz_gap, theorem_spacing
from massieu.universal.construction import construct
from massieu.universal.identifiers import contextual_map
from massieu.universal.multisets import LIMIT

__all__ = ["GridAccuracy", "SeparationGap", "grid_errors", "separation_gaps"]


class GridAccuracy(NamedTuple):
    """Root mean square and largest error of a construction on a grid at random points."""

    cells: int
    root_mean_square: float
    largest: float


class SeparationGap(NamedTuple):
    """Least distance between two contexts of a token as a share of the largest code.

    ``theorem`` is from :func:`boltz_gap`, the best case at the theorem's spacing; ``searched`` from
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
    steps: int = 30,
    seed: int = 0,
) -> list[GridAccuracy]:
    """Return the errors of :func:`construct` on grids of several sizes, at random points of the unit cube.

    Args:
        function: as in :func:`construct`.
        grids: cells along each axis.
        length: tokens of a sequence.
        dim: axes.
        ramp: as in :func:`construct`.
        points: random sequences.
        steps: of the search for codes.
        seed: of points and search.

    Example:
        >>> coarse, fine = grid_errors(lambda x: x * x.sum(1, keepdim=True), [4, 8], length=2)
        >>> round(coarse.root_mean_square / fine.root_mean_square, 1)
        2.0
    """
    check_count(points, "points")
    check_count(dim, "dim")
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(points, length, dim, generator=generator, dtype=torch.float64)
    expected, rows = function(drawn), []
    for cells in grids:
        network = construct(function, (cells,) * dim, length, ramp=ramp, steps=steps, generator=seed)
        with torch.no_grad():
            error = torch.cat([network(batch) for batch in drawn.split(1000)]) - expected
        rows.append(GridAccuracy(cells, float(error.square().mean().sqrt()), float(error.abs().max())))
    return rows


def separation_gaps(
    vocabularies: Iterable[int], length: int, *, steps: int = 50, limit: int = LIMIT, seed: int = 0
) -> list[SeparationGap]:
    """Return the gaps at the theorem's scale and after a search, by vocabulary, for sequences without duplicates.

    More than ``limit`` identifiers raise an error, as in :func:`contextual_map`.

    Example:
        >>> for row in separation_gaps([4, 9], length=3):
        ...     print(row.vocabulary, f"{row.theorem:.0e}", row.searched > 1e-4)
        4 2e-05 True
        9 0e+00 True
    """
    rows = []
    for vocabulary in vocabularies:
        found = contextual_map(vocabulary, length, duplicates=False, steps=steps, limit=limit, generator=seed)
        theorem = boltz_gap(vocabulary, length, limit=limit) / (vocabulary * theorem_spacing(length))
        rows.append(SeparationGap(vocabulary, theorem, found.gap))
    return rows
