"""Observables of an evolving cloud: moments, distances, clusters, entropy, Lyapunov functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from massieu.checks import check_number
from massieu.dynamics.contractions import moments, spectrum
from massieu.dynamics.maps import check_cloud
from massieu.statistics import row_statistics

__all__ = ["OBSERVABLES", "Observable", "Regime", "cluster_labels", "clusters"]

PAIRS = 1 << 18
"""Number of pairs up to which distances are over all pairs; beyond it over this many, drawn with a fixed seed."""

DIRECTIONS = 64
"""Directions on which whitened tokens are projected, drawn with a fixed seed."""

CLUSTER_RADIUS = 0.1
"""The observable "clusters" joins tokens closer than this share of their root mean square length."""

TILE_NUMBERS = 1 << 20
"""Distances in memory at a time."""


@dataclass(frozen=True)
class Regime:
    """Rules of the motion of a cloud; as text, one sentence.

    Attributes:
        keys: fixed keys, or None when the tokens are the keys.
        beta: inverse temperature.
        causal: a token sees only those up to its own position.
        motion: the motion by attention, in words.
        contraction: the contraction after attention, in words.
    """

    keys: Tensor | None = None
    beta: float = 1.0
    causal: bool = False
    motion: str = "residual attention with step 1"
    contraction: str = "no contraction"

    def __str__(self) -> str:
        keys = "moving keys (the tokens themselves)" if self.keys is None else f"{self.keys.shape[-2]} frozen keys"
        mask = "causal" if self.causal else "not causal"
        return f"{self.motion} at beta {self.beta:g} over {keys}, {mask}, then {self.contraction}"


Observable = Callable[[Tensor, Regime], Tensor]
"""A function of the cloud ``(..., tokens, dim)`` and of its regime."""


def clusters(cloud: Tensor, radius: float) -> Tensor:
    """Count the clusters: connected components of the tokens that are at most ``radius`` apart.

    Args:
        cloud: shape ``(..., tokens, dim)``.
        radius: not negative.

    Returns:
        Integers, shape ``(...)``.

    Example:
        >>> clusters(torch.tensor([[0.0], [0.9], [1.8], [5.0]]), radius=1.0)
        tensor(2)
    """
    labels = cluster_labels(cloud, radius)
    return labels.amax(-1) + 1 if cloud.shape[-2] else labels.sum(-1)


def cluster_labels(cloud: Tensor, radius: float) -> Tensor:
    """Return the cluster of each token, numbered in the order of their first tokens, shape ``(..., tokens)``.

    Arguments as in :func:`clusters`. Quadratic in time, linear in memory: every token is compared once, in tiles, with
    those that have no cluster yet.

    Example:
        >>> cluster_labels(torch.tensor([[5.0], [0.0], [0.9], [5.1]]), radius=1.0)
        tensor([0, 1, 1, 0])
    """
    check_cloud(cloud)
    radius = check_number(radius, "radius", least=0.0)
    if not cloud.numel():
        return torch.zeros(cloud.shape[:-1], dtype=torch.long, device=cloud.device)
    labels = [_components(points, radius) for points in cloud.detach().reshape(-1, *cloud.shape[-2:])]
    return torch.stack(labels).reshape(cloud.shape[:-1])


def _components(points: Tensor, radius: float) -> Tensor:
    labels = torch.full(points.shape[:1], -1, device=points.device)
    left = torch.arange(len(points), device=points.device)
    label = -1
    while len(left):
        label += 1
        frontier, left = left[:1], left[1:]
        while len(frontier):
            labels[frontier] = label
            near = torch.zeros_like(left, dtype=torch.bool)
            for part in points[frontier].split(max(1, TILE_NUMBERS // max(1, len(left)))):
                # By differences: the expanded square loses the distance of close points.
                apart = torch.cdist(part, points[left], compute_mode="donot_use_mm_for_euclid_dist")
                near |= (apart <= radius).any(0)
            frontier, left = left[near], left[~near]
    return labels


def _excess_kurtosis(cloud: Tensor, regime: Regime) -> Tensor:
    """Mean over directions of the fourth cumulant of whitened projections; zero for a Gaussian."""
    projected = _projections(cloud)
    square = projected.square()
    return (square.square().mean(-2) / square.mean(-2).square()).mean(-1) - 3


def _third_cumulant(cloud: Tensor, regime: Regime) -> Tensor:
    """Root mean square over directions of the third cumulant of whitened projections; zero for a Gaussian."""
    projected = _projections(cloud)
    cumulant = projected.pow(3).mean(-2) / projected.square().mean(-2).pow(1.5)
    return cumulant.square().mean(-1).sqrt()


def _projections(cloud: Tensor) -> Tensor:
    """Whitened tokens on fixed directions, ``(..., tokens, directions)``; nan for a cloud that is one point."""
    wide = cloud.double()
    source = spectrum(wide)
    root = torch.where(source.kept.any(-1)[..., None, None], source.inverse_root(), torch.nan)
    white = (wide - source.mean[..., None, :]) @ root
    generator = torch.Generator().manual_seed(cloud.shape[-1])
    drawn = torch.randn(cloud.shape[-1], DIRECTIONS, generator=generator, dtype=torch.float64)
    return white @ torch.nn.functional.normalize(drawn, dim=0).to(white.device)


def _distances(cloud: Tensor) -> Tensor:
    """Return distances of pairs of different tokens, ``(..., pairs)``; one nan without pairs."""
    tokens = cloud.shape[-2]
    if tokens < 2:
        return cloud.new_full((*cloud.shape[:-2], 1), torch.nan)
    if tokens * (tokens - 1) // 2 <= PAIRS:
        first, second = torch.triu_indices(tokens, tokens, 1)
    else:
        generator = torch.Generator().manual_seed(tokens)
        first = torch.randint(tokens, (PAIRS,), generator=generator)
        second = (first + torch.randint(1, tokens, (PAIRS,), generator=generator)) % tokens
    difference = cloud[..., first, :] - cloud[..., second, :]
    return difference.square().sum(-1).sqrt()


def _clusters(cloud: Tensor, regime: Regime) -> Tensor:
    flat = cloud.detach().reshape(-1, *cloud.shape[-2:])
    radii = CLUSTER_RADIUS * flat.double().square().sum(-1).mean(-1).sqrt()  # squares overflow before the cloud does
    found = [clusters(points, float(radius)) for points, radius in zip(flat, radii, strict=True)]
    return torch.stack(found).reshape(cloud.shape[:-2])


def _entropy_logdet(cloud: Tensor, regime: Regime) -> Tensor:
    r"""Entropy of a Gaussian of the same covariance, :math:`\tfrac12 \log\det(2 \pi e C)`."""
    source = spectrum(cloud.double())
    return 0.5 * torch.where(source.kept, 2 * math.pi * math.e * source.values, 0.0).log().sum(-1)


def _log_normalizer(cloud: Tensor, regime: Regime) -> Tensor:
    keys = cloud if regime.keys is None else regime.keys
    return row_statistics(cloud, keys, scale=regime.beta, causal=regime.causal).log_normalizer


OBSERVABLES: dict[str, Observable] = {
    "mean": lambda cloud, regime: moments(cloud)[0],
    "covariance": lambda cloud, regime: moments(cloud)[1],
    "third_cumulant": _third_cumulant,
    "excess_kurtosis": _excess_kurtosis,
    "median_distance": lambda cloud, regime: _distances(cloud).median(-1).values,
    "min_distance": lambda cloud, regime: _distances(cloud).amin(-1),
    "max_distance": lambda cloud, regime: _distances(cloud).amax(-1),
    "clusters": _clusters,
    "entropy_logdet": _entropy_logdet,
    "sum_log_normalizer": lambda cloud, regime: _log_normalizer(cloud, regime).sum(-1),
    "log_sum_normalizer": lambda cloud, regime: _log_normalizer(cloud, regime).logsumexp(-1),
}
"""Observables by name. The last two are sum_i log Z_i and log sum_i Z_i over the keys that the regime shows each token;
the continuous flow with moving keys is a gradient ascent on log sum_i Z_i in a metric."""
