"""One softmax head of rank one that gives every token in every context a number of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from massieu.checks import UserError
from massieu.nn import Block, MeasureAttention
from massieu.nn.checks import check_count, unknown
from massieu.universal.boltzmann import theorem_spacing
from massieu.universal.multisets import LIMIT, Cost, check_duplicates, cost, multisets
from massieu.universal.search import Candidates, attended, evolve, increasing, mixed, seeded, spread

__all__ = ["BelowResolution", "ContextualMap", "Scale", "contextual_map", "hardmax_identifiers", "rank_one_block"]

Scale = Literal["searched", "theorem"]

LEAST = 1e3
"""Machine epsilons between two identifiers, as a share of the largest, that a map must have to be given out."""


class BelowResolution(UserError):  # noqa: N818  # a fact about the numbers
    """The identifiers exist in exact arithmetic, and float64 cannot tell them apart.

    Attributes:
        found: the map that is refused, with its margin; None where it is that of a network.
    """

    exit_code = 5

    def __init__(self, message: str, found: ContextualMap | None) -> None:
        super().__init__(message)
        self.found = found


@dataclass(frozen=True)
class ContextualMap:
    r"""Codes of tokens and a rank-one head whose outputs, added to the codes, differ wherever the contexts do.

    .. math:: \mathrm{id}(v, m) = p_v + \alpha \, \frac{\sum_u m_u p_u e^{\beta p_v p_u}}{\sum_u m_u e^{\beta p_v p_u}}

    Attributes:
        codes: :math:`p`, increasing, shape ``(vocabulary,)``, float64.
        beta: :math:`\beta`, factor of the scores.
        weight: :math:`\alpha`, of what is read.
        length: tokens of a sequence.
        duplicates: whether sequences may contain a token twice.
        gap: the least distance between what a token reads in two contexts.
        spread: the least distance between two identifiers, as a share of the largest one.
    """

    codes: Tensor
    beta: float
    weight: float
    length: int
    duplicates: bool
    gap: float
    spread: float

    @property
    def margin(self) -> float:
        """The certificate: least distance between identifiers over machine epsilon times the largest of them."""
        return self.spread / torch.finfo(torch.float64).eps

    @property
    def resolved(self) -> bool:
        """Whether float64 tells all identifiers apart, with a margin of a thousand machine epsilons."""
        return self.margin >= LEAST

    def identifiers(self) -> Tensor:
        """Of every token, with every multiset of others in the order of :func:`multisets`, ``(vocabulary, contexts)``.

        Without duplicates, nan where the token is among the others.
        """
        beta, weight = (torch.tensor(number, dtype=torch.float64) for number in (self.beta, self.weight))
        read = _read(Candidates(self.codes, beta), _contexts(len(self.codes), self.length, self.duplicates))
        return mixed(self.codes, read, weight)

    def block(self, dim: int = 1) -> Block:
        """The head with its residual connection as a layer on ``(batch, tokens, dim)``; codes are coordinate zero.

        Example:
            >>> found = contextual_map(3, 2)
            >>> found.block()(found.codes[torch.tensor([[0, 1], [1, 0]])][..., None]).flatten().unique().numel()
            2
        """
        return rank_one_block(dim, self.beta, self.weight)

    def __str__(self) -> str:
        head = f"{len(self.codes)} tokens in sequences of {self.length}, beta {self.beta:.3g}, gap {self.gap:.1e}"
        if not self.resolved:
            return f"{head}: below the resolution of float64 ({self.margin:.1e} machine epsilons)"
        return f"{head}: all contexts differ by {self.margin:.1e} machine epsilons or more"


def contextual_map(
    vocabulary: int,
    length: int,
    *,
    scale: Scale = "searched",
    duplicates: bool | None = None,
    rounds: int = 100,
    limit: int = LIMIT,
    generator: torch.Generator | int = 0,
) -> ContextualMap:
    r"""Codes and temperature of one rank-one softmax head that tells all multisets of tokens apart.

    For positive codes whose pairwise sums differ, all but countably many :math:`\beta` do: contexts :math:`m, m'` of a
    token with code q are mistaken for each other only if

    .. math:: \sum_{u<w} (m_u m'_w - m_w m'_u)(p_u - p_w) \, e^{\beta q (p_u + p_w)} = 0,

    and exponentials with different exponents are independent. So codes are searched for the largest margin, and nothing
    is asked of their distances.

    Args:
        vocabulary: number of tokens.
        length: tokens of a sequence.
        scale: ``"searched"``, or ``"theorem"`` for codes 1, 2, ... and :math:`\beta = 2 \log T + 3`, the least with
            which scores are as far apart as the proof of Kajitsuka and Sato asks.
        duplicates: whether a sequence may contain a token twice; as a rule it may, except in the theorem.
        rounds: of the search.
        limit: identifiers that may be enumerated.
        generator: draws candidates, or its seed.

    Raises:
        BelowResolution: if identifiers are closer than a thousand machine epsilons.
        ValueError: at the theorem's scale also if every token has one context only, which tells nothing apart.

    Source:
        Kajitsuka and Sato 2023, theorem 2, for ``"theorem"``; they ask for sequences without duplicates.

    Example:
        >>> contextual_map(9, 3).margin > 1e10
        True
        >>> contextual_map(9, 3, scale="theorem")
        Traceback (most recent call last):
            ...
        massieu.universal.identifiers.BelowResolution: identifiers of 9 tokens in sequences of 3 must be ...
    """
    check_count(vocabulary, "vocabulary", "it is the number of tokens")
    check_count(length, "length", "it is the number of tokens of a sequence")
    check_count(rounds, "rounds", "it is how often candidates are varied", least=0)
    if scale not in get_args(Scale):
        unknown("scale", get_args(Scale), scale)
    vocabulary, length = int(vocabulary), int(length)
    duplicates = scale == "searched" if duplicates is None else duplicates
    check_duplicates(duplicates)
    if not duplicates and vocabulary < length:
        raise ValueError(
            f"sequences without duplicates need as many tokens as places, got {vocabulary} for {length}; pass"
            " duplicates=True"
        )
    contexts_each = math.comb(vocabulary + length - 2 if duplicates else vocabulary - 1, length - 1)
    number = vocabulary * contexts_each
    Cost(vocabulary, length, number, 0).check(limit)
    if scale == "theorem" and contexts_each == 1:
        raise ValueError(
            f"the theorem is about several contexts of a token, got {vocabulary} tokens in sequences of {length}, one"
            " context for each and nothing to tell apart; take another length, or more tokens"
        )
    contexts = _contexts(vocabulary, length, duplicates)
    if scale == "theorem":
        codes = torch.arange(1.0, vocabulary + 1, dtype=torch.float64)
        best = Candidates(codes, torch.tensor(theorem_spacing(length), dtype=torch.float64))
    else:
        best = evolve(
            lambda each: spread(each.codes, _read(each, contexts))[2],
            vocabulary,
            increasing,
            generator=seeded(generator),
            rounds=rounds,
            # What is enumerated at once stays within a few hundred megabytes.
            population=max(8, min(128, 2_000_000 // number)),
        )
    gap, weight, share = (float(part) for part in spread(best.codes, _read(best, contexts)))
    found = ContextualMap(best.codes, float(best.beta), weight, length, duplicates, gap, share)
    if not found.resolved:
        remedy = (
            'search for codes with scale="searched"'
            if scale == "theorem"
            else "take fewer tokens, or shorter sequences"
        )
        raise BelowResolution(
            f"identifiers of {vocabulary} tokens in sequences of {length} must be {LEAST:g} machine epsilons apart,"
            f" got {found.margin:.1e}, which is below the resolution of float64; {remedy}",
            found,
        )
    return found


def rank_one_block(dim: int, beta: float, weight: float) -> Block:
    """Attention of one head of size one, on coordinate zero alone, with its residual connection; in float64."""
    attention = MeasureAttention(dim, 1, head_dim=1, bias=False, scale=1.0, dtype=torch.float64)
    with torch.no_grad():
        for name, factor in (("q_proj", beta), ("k_proj", 1.0), ("v_proj", 1.0), ("out_proj", weight)):
            matrix = getattr(attention, name).weight
            matrix.zero_()
            matrix[0, 0] = factor
    return Block(dim, attention, None, norm=None)


def hardmax_identifiers(codes: Tensor, beta: float, length: int, *, limit: int = LIMIT) -> int:
    """How many identifiers one hardmax head has for all multisets: it reads the highest code, or the lowest.

    More than ``limit`` pairs of a token and its context are refused.

    Example:
        >>> found = contextual_map(9, 3)
        >>> hardmax_identifiers(found.codes, found.beta, 3), found.identifiers().unique().numel()
        (45, 405)
    """
    if not isinstance(codes, Tensor) or codes.dim() != 1 or not codes.is_floating_point() or not len(codes):
        got = f"{codes.dtype} {tuple(codes.shape)}" if isinstance(codes, Tensor) else type(codes).__name__
        raise ValueError(f"codes must be a floating tensor (vocabulary,), got {got}; contextual_map finds some")
    cost(len(codes), length).check(limit)
    present = _contexts(len(codes), length, True).rest > 0
    own = torch.eye(len(codes), dtype=torch.bool)[:, None]
    scores = (beta * codes[:, None] * codes)[:, None].masked_fill(~(present | own), -torch.inf)
    token = torch.arange(len(codes))[:, None].expand(scores.shape[:-1])
    return len(torch.stack([token, scores.argmax(-1)], -1).flatten(0, 1).unique(dim=0))


@dataclass(frozen=True)
class _Contexts:
    """How often each token is in each multiset of others, and where that leaves a token without duplicates."""

    rest: Tensor
    allowed: Tensor | None


def _contexts(vocabulary: int, length: int, duplicates: bool) -> _Contexts:
    number = math.comb(vocabulary + length - 2, length - 1)
    rows = multisets(vocabulary, length - 1, duplicates=duplicates, limit=number)  # callers have asked for so many
    rest = torch.zeros(len(rows), vocabulary, dtype=torch.float64)
    rest.scatter_add_(1, rows, torch.ones_like(rows, dtype=torch.float64))
    return _Contexts(rest, None if duplicates else rest.mT == 0)


def _read(candidates: Candidates, contexts: _Contexts) -> Tensor:
    read = attended(candidates.codes, candidates.beta, contexts.rest)
    return read if contexts.allowed is None else read.masked_fill(~contexts.allowed, torch.nan)
