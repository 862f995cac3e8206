"""Points from their distances and from their coordinates: classical scaling and principal components."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from massieu.checks import UserError, check_count, check_floating

__all__ = ["Embedding", "classical_mds", "pca"]

# Relative to the largest distance, in roots of the rounding: torch.cdist takes roots of differences of squares.
ROUNDING = 8


class Embedding(NamedTuple):
    """Coordinates on principal axes.

    Attributes:
        points: shape ``(points, dim)``, centered; in each column the entry of largest size is positive.
        eigenvalues: of the centered Gram matrix, descending. Negative ones say that the distances are not Euclidean.
    """

    points: Tensor
    eigenvalues: Tensor


def classical_mds(distances: Tensor, dim: int) -> Embedding:
    r"""Classical multidimensional scaling: leading coordinates of the inner products that belong to distances.

    .. math:: B = -\tfrac12 J D^{(2)} J, \qquad J = I - \tfrac1n 1 1^\top, \qquad X = V_d \Lambda_d^{1/2}

    For Euclidean distances B is the Gram matrix of the centered points, and the result that of :func:`pca`. This holds
    neither for other distances nor for scaling by stress.

    Args:
        distances: :math:`D`, not squared, symmetric with zero diagonal, shape ``(points, points)``.
        dim: number of coordinates to keep, at most the number of points. Coordinates of negative eigenvalues are zero.

    Source:
        Torgerson 1952; Gower 1966 for the equality with principal components.

    Example:
        >>> line = torch.tensor([[0.0], [1.0], [3.0]])
        >>> classical_mds(torch.cdist(line, line), dim=1).points
        tensor([[-1.3333],
                [-0.3333],
                [ 1.6667]])
    """
    check_floating(distances, "distances")
    if distances.dim() != 2 or distances.shape[0] != distances.shape[1] or not distances.numel():
        raise UserError(
            f"distances must have shape (points, points), got {tuple(distances.shape)};"
            ' for points use torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")'
        )
    fixed = distances.detach()
    slack = ROUNDING * torch.finfo(fixed.dtype).eps ** 0.5 * float(fixed.abs().max())
    worst = {
        "symmetric": float((fixed - fixed.mT).abs().max()),
        "zero on their diagonal": float(fixed.diagonal().abs().max()),
        "not negative": -float(fixed.min()),
    }
    for property_, off in worst.items():
        if not off <= slack:
            raise UserError(f"distances must be {property_}, got {off:.3g} off; pass distances, not similarities")
    _check_dim(dim, distances.shape[0], "the number of points")
    square = distances.square()
    gram = -0.5 * (square - square.mean(0) - square.mean(1, keepdim=True) + square.mean())
    eigenvalues, axes = (x.flip(-1) for x in torch.linalg.eigh((gram + gram.mT) / 2))
    return Embedding(_upright(axes[:, :dim] * eigenvalues[:dim].clamp(min=0).sqrt()), eigenvalues)


def pca(points: Tensor, dim: int) -> Embedding:
    r"""Principal components: the coordinates of the centered points on their leading axes.

    .. math:: X - \bar X = U S V^\top, \qquad \mathrm{points} = U_d S_d, \qquad \mathrm{eigenvalues} = S^2

    Args:
        points: :math:`X`, shape ``(points, own_dim)``.
        dim: number of coordinates to keep, at most the smaller of both sizes.

    Source:
        Pearson 1901.

    Example:
        >>> pca(torch.tensor([[0.0, 0.0], [1.0, 1.0], [3.0, 3.0]]), dim=1).points
        tensor([[-1.8856],
                [-0.4714],
                [ 2.3570]])
    """
    check_floating(points, "points")
    if points.dim() != 2 or not points.numel():
        raise UserError(f"points must have shape (points, dim), got {tuple(points.shape)}; give every point a row")
    _check_dim(dim, min(points.shape), "the smaller of the sizes of points")
    left, spread, _ = torch.linalg.svd(points - points.mean(0), full_matrices=False)
    return Embedding(_upright(left[:, :dim] * spread[:dim]), spread.square())


def _check_dim(dim: int, most: int, what: str) -> None:
    if check_count(dim, "dim") > most:
        raise UserError(f"dim must be at most {what}, {most}, got {dim}; keep fewer coordinates")


def _upright(points: Tensor) -> Tensor:
    """Make the entry of largest size in each column positive: axes have no sign of their own."""
    largest = points.detach().abs().argmax(0, keepdim=True)
    return points * torch.where(points.detach().gather(0, largest) < 0, -1.0, 1.0).to(points)
