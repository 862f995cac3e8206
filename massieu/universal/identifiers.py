"""Contextual maps: a softmax head of rank one that gives every token in every context a different identifier."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from massieu.checks import UserError, check_choice, check_count, check_floating, check_shape
from massieu.nn import Block, MeasureAttention
from massieu.universal.boltzmann import theorem_spacing
from massieu.universal.multisets import LIMIT, Cost, cost, multisets
from massieu.universal.search import CodeCandidates, as_generator, attended, evolve, increasing, mixed, spread

__all__ = ["BelowResolution", "ContextualMap", "Scale", "contextual_map", "hardmax_identifiers", "rank_one_block"]

Scale = Literal["searched", "theorem"]

LEAST = 1e3  # smallest margin of a map that is returned


class BelowResolution(UserError):  # noqa: N818  # a fact about the numbers
    """Identifiers differ in exact arithmetic, but by less than the resolution of float64.

    Attributes:
        found: the rejected map, with its margin; None for a network.
    """

    exit_code = 5

    def __init__(self, message: str, found: ContextualMap | None) -> None:
        super().__init__(message)
        self.found = found


@dataclass(frozen=True)
class ContextualMap:
    r"""Codes of tokens and a rank-one head; code plus head output is a different identifier in every context.

    .. math:: \mathrm{id}(v, m) = p_v + \alpha \, \frac{\sum_u m_u p_u e^{\beta p_v p_u}}{\sum_u m_u e^{\beta p_v p_u}}

    Attributes:
        codes: :math:`p`, increasing, shape ``(vocabulary,)``, float64.
        beta: :math:`\beta`, factor of the scores.
        weight: :math:`\alpha`, of the head's output.
        length: tokens of a sequence.
        duplicates: True if sequences may contain a token twice.
        gap: the least distance between the head's outputs for a token in two contexts.
        spread: the least distance between two identifiers, as a share of the largest.
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
        """Certificate: least distance between identifiers over machine epsilon times the largest."""
        return self.spread / torch.finfo(torch.float64).eps

    @property
    def resolved(self) -> bool:
        """True if identifiers differ by at least a thousand machine epsilons."""
        return self.margin >= LEAST

    def identifiers(self) -> Tensor:
        """Return the identifiers ``(vocabulary, contexts)``, with contexts in the order of :func:`multisets`.

        Without duplicates, nan for contexts that contain the token.
        """
        beta, weight = (torch.tensor(number, dtype=torch.float64) for number in (self.beta, self.weight))
        read = _read(CodeCandidates(self.codes, beta), _contexts(len(self.codes), self.length, self.duplicates))
        return mixed(self.codes, read, weight)

    def block(self, dim: int = 1) -> Block:
        """Return the head with its residual connection as a layer on ``(batch, tokens, dim)``; codes are coordinate 0.

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
    steps: int = 100,
    limit: int = LIMIT,
    generator: torch.Generator | int = 0,
) -> ContextualMap:
    r"""Return codes and beta of one rank-one softmax head with different outputs for all multisets of tokens.

    For positive codes with different pairwise sums, all but countably many :math:`\beta` give different outputs: those
    of two contexts :math:`m, m'` of a token with code q are equal only if

    .. math:: \sum_{u<w} (m_u m'_w - m_w m'_u)(p_u - p_w) \, e^{\beta q (p_u + p_w)} = 0,

    and exponentials with different exponents are independent. So the search for the largest margin needs no condition
    on the distances of codes.

    Args:
        vocabulary: number of tokens.
        length: tokens of a sequence.
        scale: ``"searched"``, or ``"theorem"`` for codes 1, 2, ... and :math:`\beta = 2 \log T + 3`, the least beta
            with the distance of scores in the proof of Kajitsuka and Sato.
        duplicates: allow a token twice in a sequence; None allows it except for ``"theorem"``.
        steps: of the search.
        limit: largest number of identifiers.
        generator: of candidates, or its seed.

    Raises:
        BelowResolution: if identifiers are closer than a thousand machine epsilons.
        UserError: for ``"theorem"`` also if every token has one context only.

    Source:
        Kajitsuka and Sato 2023, theorem 2, for ``"theorem"``, which is about sequences without duplicates.

    Example:
        >>> contextual_map(9, 3).margin > 1e10
        True
        >>> contextual_map(9, 3, scale="theorem")
        Traceback (most recent call last):
            ...
        massieu.universal.identifiers.BelowResolution: identifiers of 9 tokens in sequences of 3 must be ...
    """
    vocabulary, length = check_count(vocabulary, "vocabulary"), check_count(length, "length")
    check_count(steps, "steps", least=0)
    check_choice(scale, "scale", get_args(Scale))
    check_choice(duplicates, "duplicates", (None, True, False))
    duplicates = scale == "searched" if duplicates is None else duplicates
    if not duplicates and vocabulary < length:
        raise UserError(
            f"sequences of {length} without duplicates need a larger vocabulary, got {vocabulary}; pass duplicates=True"
        )
    contexts_each = math.comb(vocabulary + length - 2 if duplicates else vocabulary - 1, length - 1)
    number = vocabulary * contexts_each
    Cost(vocabulary, length, number, 0).check(limit)
    if scale == "theorem" and contexts_each == 1:
        raise UserError(
            f"the theorem is about several contexts of a token, got {vocabulary} tokens in sequences of {length}, with"
            " only one context for each; take another length, or more tokens"
        )
    contexts = _contexts(vocabulary, length, duplicates)
    if scale == "theorem":
        codes = torch.arange(1.0, vocabulary + 1, dtype=torch.float64)
        best = CodeCandidates(codes, torch.tensor(theorem_spacing(length), dtype=torch.float64))
    else:
        best = evolve(
            lambda each: spread(each.codes, _read(each, contexts))[2],
            vocabulary,
            increasing,
            generator=as_generator(generator),
            steps=steps,
            # Limits memory to a few hundred megabytes.
            population=max(8, min(128, 2_000_000 // number)),
        )
    gap, weight, share = (float(each) for each in spread(best.codes, _read(best, contexts)))
    found = ContextualMap(best.codes, float(best.beta), weight, length, duplicates, gap, share)
    if not found.resolved:
        theorem, searched = 'search for codes with scale="searched"', "take fewer tokens, or shorter sequences"
        remedy = theorem if scale == "theorem" else searched
        raise BelowResolution(
            f"identifiers of {vocabulary} tokens in sequences of {length} must be {LEAST:g} machine epsilons apart,"
            f" got {found.margin:.1e}, which is below the resolution of float64; {remedy}",
            found,
        )
    return found


def rank_one_block(dim: int, beta: float, weight: float) -> Block:
    """Return attention with one head of size one on coordinate zero, with a residual connection, in float64."""
    attention = MeasureAttention(dim, 1, head_dim=1, bias=False, scale=1.0, dtype=torch.float64)
    with torch.no_grad():
        for name, factor in (("q_proj", beta), ("k_proj", 1.0), ("v_proj", 1.0), ("out_proj", weight)):
            matrix = getattr(attention, name).weight
            matrix.zero_()
            matrix[0, 0] = factor
    return Block(dim, attention, None, norm=None)


def hardmax_identifiers(codes: Tensor, beta: float, length: int, *, limit: int = LIMIT) -> int:
    """Return the number of identifiers of one hardmax head for all multisets: it reads the highest code, or the lowest.

    More than ``limit`` pairs of a token and its context raise an error.

    Example:
        >>> found = contextual_map(9, 3)
        >>> hardmax_identifiers(found.codes, found.beta, 3), found.identifiers().unique().numel()
        (45, 405)
    """
    check_floating(codes, "codes")
    check_shape(codes, "codes", "vocabulary")
    cost(len(codes), length).check(limit)
    present = _contexts(len(codes), length, True).rest > 0
    own = torch.eye(len(codes), dtype=torch.bool)[:, None]
    scores = (beta * codes[:, None] * codes)[:, None].masked_fill(~(present | own), -torch.inf)
    token = torch.arange(len(codes))[:, None].expand(scores.shape[:-1])
    return len(torch.stack([token, scores.argmax(-1)], -1).flatten(0, 1).unique(dim=0))


@dataclass(frozen=True)
class _Contexts:
    """Multisets of other tokens: counts ``(contexts, vocabulary)``, and valid pairs with a token, None for all."""

    rest: Tensor
    allowed: Tensor | None


def _contexts(vocabulary: int, length: int, duplicates: bool) -> _Contexts:
    number = math.comb(vocabulary + length - 2, length - 1)
    rows = multisets(vocabulary, length - 1, duplicates=duplicates, limit=number)  # callers have checked their limit
    rest = torch.zeros(len(rows), vocabulary, dtype=torch.float64)
    rest.scatter_add_(1, rows, torch.ones_like(rows, dtype=torch.float64))
    return _Contexts(rest, None if duplicates else rest.mT == 0)


def _read(candidates: CodeCandidates, contexts: _Contexts) -> Tensor:
    read = attended(candidates.codes, candidates.beta, contexts.rest)
    return read if contexts.allowed is None else read.masked_fill(~contexts.allowed, torch.nan)
