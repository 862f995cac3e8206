"""Tokens as particles: the flow on the sphere, and resampling instead of averaging."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from massieu.checks import UserError, check_count, check_number
from massieu.dynamics.evolution import CloudTrajectory, Observe, record
from massieu.dynamics.maps import check_cloud
from massieu.dynamics.observables import Regime
from massieu.measures.measure import common_batch
from massieu.statistics import attend, probabilities

__all__ = ["resample", "sphere_flow"]

TILE_NUMBERS = 1 << 20
"""Weights in memory at a time."""


def sphere_flow(
    points: Tensor,
    *,
    beta: float = 1.0,
    steps: int = 400,
    step_size: float = 0.1,
    causal: bool = False,
    observe: Observe = ("clusters", "median_distance"),
    every: int = 1,
) -> CloudTrajectory:
    r"""Move points on the unit sphere along the tangential part of self-attention, all keys moving.

    .. math:: \dot x_i = P_{x_i} \sum_j p_{ij} x_j, \qquad P_x = I - x x^\top, \qquad
              p_{ij} \propto e^{\beta x_i \cdot x_j}

    Euler steps, each followed by a return to the sphere. In the end there is one cluster; at large :math:`\beta`
    several persist for a time that grows exponentially with it.

    Args:
        points: not zero, shape ``(..., tokens, dim)``; brought to the sphere first.
        beta: inverse temperature.
        steps: number of steps.
        step_size: time of each.
        causal: a point sees only those up to its own position.
        observe, every: as in :func:`evolve`.

    Source:
        Geshkovski et al. 2023, "A mathematical perspective on transformers", eq. SA with identity matrices.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> found = sphere_flow(torch.randn(50, 2, generator=generator), beta=1.0, every=400)
        >>> found.observables["clusters"][-1]
        tensor(1)
    """
    check_cloud(points, "points", least=1)
    beta, step_size = check_number(beta, "beta"), check_number(step_size, "step_size", least=0.0)
    size = points.norm(dim=-1, keepdim=True)
    if not bool((size > 0).all()):
        raise UserError("points must not be zero, got one at the origin; it has no direction, so remove it")

    def move(x: Tensor) -> Tensor:
        pull = attend(x, x, x, scale=beta, causal=causal, statistics=None).output
        moved = x + step_size * (pull - (pull * x).sum(-1, keepdim=True) * x)
        return torch.nn.functional.normalize(moved, dim=-1)

    motion = f"tangential attention with step size {step_size:g}"
    regime = Regime(None, beta, causal, motion, "a return to the unit sphere")
    return record(move, points / size, steps=steps, regime=regime, observe=observe, every=every)


def resample(
    cloud: Tensor,
    queries: Tensor | None = None,
    *,
    generator: torch.Generator | None = None,
    beta: float = 1.0,
    causal: bool = False,
    count: int | None = None,
) -> Tensor:
    r"""Draw a token for every query by its attention weights, as in sequential Monte Carlo, instead of averaging.

    .. math:: x_J, \quad J \sim p_{ij} \propto e^{\beta \eta_i \cdot x_j}, \qquad
              E[x_J] = m(\eta_i), \quad \mathrm{Cov}[x_J] = \nabla m(\eta_i) / \beta

    By inversion of the distribution function, in tiles: nothing of size queries x tokens is held.

    Args:
        cloud: the tokens :math:`x_j`, shape ``(..., tokens, dim)``.
        queries: :math:`\eta_i`, shape ``(..., queries, dim)``; None for the tokens themselves.
        generator: source of randomness.
        beta: inverse temperature.
        causal: a query sees only the tokens up to its own position, as in :func:`massieu.attend`.
        count: independent draws of each query.

    Returns:
        Shape ``(..., queries, dim)``, with a first axis of size ``count`` if that is given.

    Example:
        >>> resample(torch.tensor([[0.0], [1.0]]), torch.tensor([[-99.0], [99.0]]))
        tensor([[0.],
                [1.]])
    """
    check_cloud(cloud, least=1)
    queries = cloud if queries is None else queries
    check_cloud(queries, "queries")
    if queries.shape[-1] != cloud.shape[-1]:
        raise UserError(
            f"queries must have the {cloud.shape[-1]} coordinates of the cloud, got {queries.shape[-1]}; project them"
        )
    beta = check_number(beta, "beta")
    draws = 1 if count is None else check_count(count, "count", least=0)
    num_queries, tokens = queries.shape[-2], cloud.shape[-2]
    batch = common_batch(tuple(queries.shape[:-2]), tuple(cloud.shape[:-2]))
    cloud, queries = (x.expand(*batch, *x.shape[-2:]).detach() for x in (cloud, queries))
    places = torch.arange(num_queries, device=cloud.device) + tokens - num_queries
    if causal and bool((places < 0).any()):
        raise UserError(
            f"causal queries must not outnumber the tokens, got {num_queries} and {tokens}; the first would see nothing"
        )
    rows = max(1, TILE_NUMBERS // max(1, math.prod(batch) * tokens))
    # Filled in place: small results between the tiles would fragment the heap.
    index = places.new_empty(*batch, num_queries, draws)
    parts = zip(queries.split(rows, -2), places.split(rows), index.split(rows, -2), strict=True)
    for part, place, drawn in parts:
        hidden = torch.arange(tokens, device=cloud.device) > (place[:, None] if causal else tokens)
        scores = beta * torch.einsum("...qd,...nd->...qn", part.double(), cloud.double())
        reached = probabilities(scores.masked_fill(hidden, -torch.inf)).cumsum(-1)
        level = torch.rand(*reached.shape[:-1], draws, generator=generator, dtype=reached.dtype, device=reached.device)
        # By rounding the last level differs from one; the first token to reach it is the last that may be drawn.
        last = (reached < reached[..., -1:]).sum(-1, keepdim=True)
        drawn.copy_(torch.searchsorted(reached, level * reached[..., -1:], right=True).minimum(last))
    picked = torch.take_along_dim(cloud, index.flatten(-2)[..., None], dim=-2)
    found = picked.reshape(*batch, num_queries, draws, cloud.shape[-1]).movedim(-2, 0)
    return found[0] if count is None else found
