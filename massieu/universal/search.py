"""Evolutionary search for codes of tokens, and a beta, with the widest gaps between contexts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from massieu.checks import check_count

__all__ = ["CodeCandidates", "as_generator", "attended", "evolve", "increasing", "mixed", "spread"]

LOWEST = 0.05  # smallest code, with one as the largest; a query of zero would attend to all tokens alike


class CodeCandidates(NamedTuple):
    """Candidates of the search, ``(candidates, size)`` and ``(candidates,)``."""

    codes: Tensor
    beta: Tensor


def attended(codes: Tensor, beta: Tensor, rest: Tensor) -> Tensor:
    r"""Return the attention output of each token in each context, with codes as queries, keys and values.

    .. math:: a_v(m) = \frac{\sum_u m_u p_u e^{\beta p_v p_u}}{\sum_u m_u e^{\beta p_v p_u}}

    Args:
        codes: :math:`p`, shape ``(..., vocabulary)``.
        beta: :math:`\beta`, shape ``(...)``.
        rest: number of each token in the context besides the query, ``(contexts, vocabulary)``.

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
    """Return the least gap between contexts of a token, a weight of the output, and the least gap of identifiers.

    The last is a share of the largest identifier. Each has shape ``(...)``.

    Args:
        codes: increasing, ``(..., vocabulary)``.
        read: :func:`attended`, ``(..., vocabulary, contexts)``; nan for contexts that do not occur.
    """
    lowest = read.nan_to_num(nan=torch.inf).amin(-1)
    highest = read.nan_to_num(nan=-torch.inf).amax(-1)
    gaps = read.sort(-1).values.diff(dim=-1).nan_to_num(nan=torch.inf)
    gap = gaps.flatten(-2).amin(-1) if gaps.shape[-1] else torch.full_like(codes[..., 0], torch.inf)
    gap = gap.clamp(max=1.0)
    # The largest weight with which identifiers of neighboring codes are as far apart as those of one code.
    overlap = highest[..., :-1] - lowest[..., 1:] + gap[..., None]
    room = codes.diff(dim=-1) / overlap.clamp(min=1e-12)
    weight = room.amin(-1).clamp(max=1.0) if room.shape[-1] else torch.ones_like(gap)
    return gap, weight, weight * gap / (codes[..., -1] + weight * highest[..., -1].abs())


def mixed(codes: Tensor, read: Tensor, weight: Tensor) -> Tensor:
    """Return the identifiers: the code plus the weighted attention output."""
    return codes[..., None] + weight[..., None, None] * read


def evolve(
    quality: Callable[[CodeCandidates], Tensor],
    size: int,
    normalize: Callable[[Tensor], Tensor],
    *,
    generator: torch.Generator,
    steps: int,
    population: int = 128,
    parents: int = 8,
) -> CodeCandidates:
    """Return the best of random candidates after steps of variation of the best, with a decreasing step size.

    Args:
        quality: of each candidate, ``(candidates,)``; larger is better.
        size: numbers of one candidate besides beta.
        normalize: map of any numbers ``(candidates, size)`` to valid ones.
        generator: of all random numbers.
        steps: of variation.
        population: candidates in a step.
        parents: best candidates that are varied.
    """

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    best = CodeCandidates(normalize(uniform(population, size)), 3 * normal(population))
    score = quality(best)
    for number in range(steps):
        top = score.topk(min(parents, len(score))).indices
        best, score = CodeCandidates(*(each[top] for each in best)), score[top]
        parent = torch.arange(population) % len(top)
        step_size = 0.3 * 0.94**number * uniform(population, 1) ** 2
        changed = (uniform(population, size) < uniform(population, 1)).double()  # a random share of the numbers
        codes = normalize(best.codes[parent] + step_size * changed * normal(population, size))
        varied = CodeCandidates(codes, best.beta[parent] * (1 + step_size[:, 0] * normal(population)))
        best = CodeCandidates(*(torch.cat(pair) for pair in zip(best, varied, strict=True)))
        score = torch.cat([score, quality(varied)])
    return CodeCandidates(*(each[score.argmax()] for each in best))


def as_generator(generator: Any) -> torch.Generator:
    """Return a generator, or a new one with a whole number as its seed."""
    if isinstance(generator, torch.Generator):
        return generator
    seed = check_count(generator, "generator", least=0, remedy="pass a torch.Generator or a seed, such as 0")
    return torch.Generator().manual_seed(seed)


def increasing(numbers: Tensor) -> Tensor:
    """Map any numbers to codes: positive, sorted, with one as the largest."""
    codes = numbers.abs().sort(-1).values
    return LOWEST + (1 - LOWEST) * codes / codes[..., -1:]
