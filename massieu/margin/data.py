"""Random problems of token selection, one for each regime of the theory."""

from __future__ import annotations

import torch
from torch import Tensor

from massieu.checks import UserError, check_choice
from massieu.margin.conversions import as_generator
from massieu.margin.problem import TokenSelection

__all__ = ["KINDS", "random_problem"]

KINDS = ("head", "equal", "tied", "soft")


def random_problem(
    sequences: int,
    length: int,
    dim: int,
    *,
    kind: str = "head",
    best: int = 2,
    loss: str = "logistic",
    generator: torch.Generator | int = 0,
) -> TokenSelection:
    """Draw a problem whose tokens and queries are independent and uniform on the unit sphere.

    Args:
        sequences, length, dim: number of sequences, of tokens in each, and their dimension.
        kind: source of the scores. "head": a random unit vector and random labels, so that descent may settle on tokens
            that are not best. "equal": 1 for one random token, 0 for all others, which leaves descent no finite
            stationary point. "tied": as "equal" with ``best`` tokens at 1. "soft": no scores but targets, random
            distributions over ``best`` tokens, so that the optimum is partly at finite weights.
        best: tokens of each sequence that are tied or have mass; without effect on the first two kinds.
        loss: as for :class:`TokenSelection`.
        generator: of the draws, or a seed for one.

    Example:
        >>> random_problem(3, 4, 5, kind="equal", generator=1).assumptions().equal_scores
        True
    """
    check_choice(kind, "kind", KINDS)
    if kind in ("tied", "soft") and not 1 <= best < length:
        raise UserError(f"best must be at least 1 and below the {length} tokens of a sequence, got {best}")
    draw = as_generator(generator)
    tokens, queries = _unit(draw, sequences, length, dim), _unit(draw, sequences, dim)
    if kind == "head":
        labels = 2 * torch.randint(2, (sequences,), generator=draw) - 1
        return TokenSelection(tokens, queries, labels=labels, head=_unit(draw, dim), loss=loss)
    chosen = torch.rand(sequences, length, generator=draw).argsort(-1)[:, : 1 if kind == "equal" else best]
    scores = torch.zeros(sequences, length, dtype=torch.float64).scatter(1, chosen, 1.0)
    if kind != "soft":
        return TokenSelection(tokens, queries, scores=scores, loss=loss)
    # Away from zero: a target without mass would be another problem.
    targets = scores * (0.2 + torch.rand(sequences, length, generator=draw, dtype=torch.float64))
    return TokenSelection(tokens, queries, targets=targets / targets.sum(-1, keepdim=True))


def _unit(draw: torch.Generator, *shape: int) -> Tensor:
    return torch.nn.functional.normalize(torch.randn(*shape, generator=draw, dtype=torch.float64), dim=-1)
