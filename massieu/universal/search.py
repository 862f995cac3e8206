"""Codes and a temperature under which attention tells all contexts apart: random candidates, the best ones varied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

__all__ = ["Candidates", "attended", "evolve", "mixed", "seeded", "spread"]

LOWEST = 0.05  # of a code whose largest is one; a query of zero would attend to all tokens alike


class Candidates(NamedTuple):
    """Several choices of the parameters, ``(candidates, size)`` and ``(candidates,)``."""

    codes: Tensor
    beta: Tensor


def attended(codes: Tensor, beta: Tensor, rest: Tensor) -> Tensor:
    r"""What a token reads from itself and the tokens around it, with codes as queries, keys and values.

    .. math:: a_v(m) = \frac{\sum_u m_u p_u e^{\beta p_v p_u}}{\sum_u m_u e^{\beta p_v p_u}}

    Args:
        codes: :math:`p`, shape ``(..., vocabulary)``.
        beta: :math:`\beta`, shape ``(...)``.
        rest: how often each token is there besides the one that asks, ``(contexts, vocabulary)``.

    Returns:
        Shape ``(..., vocabulary, contexts)``.

    Example:
        >>> attended(torch.tensor([0.0, 1.0]), torch.tensor(1.0), torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
        tensor([[0.0000, 0.5000],
                [0.7311, 1.0000]])
    """
    scores = beta[..., None, None] * codes[..., :, None] * codes[..., None, :]
    # One exponential for each pair of tokens serves all contexts.
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    own = weights.diagonal(dim1=-2, dim2=-1)
    total = weights @ rest.mT + own[..., None]
    return ((weights * codes[..., None, :]) @ rest.mT + (own * codes)[..., None]) / total


def spread(codes: Tensor, read: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """How far apart contexts of the same token are at least, the weight that keeps different tokens apart, and how far
    apart all identifiers then are, in units of the largest; each ``(...)``.

    Args:
        codes: increasing, ``(..., vocabulary)``.
        read: what tokens read in each of their contexts, ``(..., vocabulary, contexts)``; nan where there is none.
    """
    lowest = read.nan_to_num(nan=torch.inf).amin(-1)
    highest = read.nan_to_num(nan=-torch.inf).amax(-1)
    steps = read.sort(-1).values.diff(dim=-1).nan_to_num(nan=torch.inf)
    gap = steps.flatten(-2).amin(-1) if steps.shape[-1] else torch.full_like(codes[..., 0], torch.inf)
    gap = gap.clamp(max=1.0)
    # As much weight as leaves, between the identifiers of neighboring codes, the distance they have within one.
    overlap = highest[..., :-1] - lowest[..., 1:] + gap[..., None]
    room = codes.diff(dim=-1) / overlap.clamp(min=1e-12)
    weight = room.amin(-1).clamp(max=1.0) if room.shape[-1] else torch.ones_like(gap)
    return gap, weight, weight * gap / (codes[..., -1] + weight * highest[..., -1].abs())


def mixed(codes: Tensor, read: Tensor, weight: Tensor) -> Tensor:
    """The identifiers: code plus what was read, times its weight."""
    return codes[..., None] + weight[..., None, None] * read


def evolve(
    quality: Callable[[Candidates], Tensor],
    size: int,
    normalize: Callable[[Tensor], Tensor],
    *,
    generator: torch.Generator,
    rounds: int,
    population: int = 128,
    parents: int = 8,
) -> Candidates:
    """The best of random candidates, after rounds in which the best so far are varied in smaller and smaller steps.

    Args:
        quality: of each candidate, ``(candidates,)``; more is better.
        size: numbers of one candidate besides beta.
        normalize: from any numbers ``(candidates, size)`` to ones that are allowed.
        generator: draws them.
        rounds: how often.
        population: candidates in a round.
        parents: how many are varied.
    """

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    fresh = Candidates(normalize(uniform(population, size)), 3 * normal(population))
    best, reached = fresh, quality(fresh)
    for number in range(rounds):
        top = reached.topk(min(parents, len(reached))).indices
        best, reached = Candidates(*(part[top] for part in best)), reached[top]
        parent = torch.arange(population) % len(top)
        step = 0.3 * 0.94**number * uniform(population, 1) ** 2
        moved = (uniform(population, size) < uniform(population, 1)).double()  # from one number to all of them
        codes = normalize(best.codes[parent] + step * moved * normal(population, size))
        varied = Candidates(codes, best.beta[parent] * (1 + step[:, 0] * normal(population)))
        best = Candidates(*(torch.cat(pair) for pair in zip(best, varied, strict=True)))
        reached = torch.cat([reached, quality(varied)])
    return Candidates(*(part[reached.argmax()] for part in best))


def seeded(generator: Any) -> torch.Generator:
    """A generator as it is, or one with this seed."""
    if isinstance(generator, torch.Generator):
        return generator
    if isinstance(generator, bool) or not isinstance(generator, (int, np.integer)):
        raise TypeError(f"generator must be a torch.Generator or a whole number, its seed, got {generator!r}; try 0")
    return torch.Generator().manual_seed(int(generator))


def increasing(numbers: Tensor) -> Tensor:
    """Codes: positive, sorted, the largest one."""
    codes = numbers.abs().sort(-1).values
    return LOWEST + (1 - LOWEST) * codes / codes[..., -1:]
