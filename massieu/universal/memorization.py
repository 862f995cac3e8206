"""Construction of a network that maps given sequences to given labels."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from massieu.checks import UserError, check_count
from massieu.nn import Block, FeedForward
from massieu.universal.identifiers import LEAST, BelowResolution, rank_one_block
from massieu.universal.lookup import table
from massieu.universal.multisets import LIMIT, Cost, digits_of
from massieu.universal.realization import EPSILON, Cases, Realization
from massieu.universal.search import LOWEST, CodeCandidates, as_generator, evolve
from massieu.universal.staircases import interpolant, net

__all__ = ["memorize"]

ENDS = ("amin", "amax")
EXACT = 2**53  # largest range of whole numbers that are exact in float64
FREE = 64  # most vectors with independent codes; those of more vectors are a projection


def memorize(
    sequences: Tensor,
    labels: Tensor,
    *,
    exact: bool = True,
    steps: int = 60,
    limit: int = LIMIT,
    generator: torch.Generator | int = 0,
) -> Realization:
    r"""Return a network with one rank-one softmax head that maps every token of every sequence to its label.

    Only contexts that occur need different identifiers.

    Args:
        sequences: vectors ``(sequences, length, dim)``, or word numbers ``(sequences, length)``.
        labels: one for each sequence, ``(sequences,)``, for each token, ``(sequences, length)``, or values
            ``(sequences, length, output_dim)``. Attention ignores order: equal tokens in equal multisets must have
            equal labels, unless positions are part of the tokens.
        exact: True for labels exact to the last bit, by a :func:`table`. False for a net that is linear between
            identifiers, with three weights for each instead of some twenty; its error is that of the labels times
            machine epsilon over the least gap, some 1e-8 for 1600 labels below ten.
        steps: of the search for codes.
        limit: largest number of identifiers.
        generator: of candidates for codes, or its seed.

    Returns:
        The network in float64; :meth:`Realization.certify` evaluates the sequences.

    Raises:
        BelowResolution: if identifiers are closer than a thousand machine epsilons.

    Source:
        Kajitsuka and Sato 2023, the corollary on memorization: :math:`4(s + d) + d(2nN + d)` parameters for N sequences
        of n tokens.

    Example:
        >>> words = torch.tensor([[0, 0, 1], [0, 1, 1], [2, 0, 1]])
        >>> network = memorize(words, torch.tensor([5, 7, 9]))
        >>> network(words).squeeze(-1).tolist()
        [[5.0, 5.0, 5.0], [7.0, 7.0, 7.0], [9.0, 9.0, 9.0]]
    """
    check_count(steps, "steps", least=0)
    generator = as_generator(generator)
    given, values = _checked(sequences, labels)
    vectors = given.reshape(-1, given.shape[-1] if given.dim() == 3 else 1).double()
    tokens, numbers = vectors.unique(dim=0, return_inverse=True)
    numbers = numbers.reshape(given.shape[:2])
    contexts = _contexts(numbers, values)
    length, dim_in, entries = given.shape[1], tokens.shape[1], len(contexts.own)
    dim = max(dim_in, values.shape[-1], digits_of(entries) if exact else 1)
    cost = Cost(len(tokens), length, entries, 0)
    cost.check(limit)
    free = given.dim() == 2 or dim_in == 1 or len(tokens) <= FREE
    first, block = _searched(tokens, contexts, free, dim, steps, generator)
    # Identifiers as computed by the layers: for tokens that hardly differ, rounding in the first net matters.
    with torch.no_grad():
        stream = block(first(_padded(tokens, dim))[numbers])[..., 0].flatten()
    low, high = (
        stream.new_zeros(entries).scatter_reduce(0, contexts.place, stream, each, include_self=False) for each in ENDS
    )
    order = low.argsort()
    apart = float((low[order][1:] - high[order][:-1]).min()) if entries > 1 else 1.0
    # Large terms of a projection may cancel; rounding is relative to them.
    terms = 0.0 if free else float((tokens.abs() @ first.up.weight[0, :dim_in].detach().abs()).max())
    margin = apart / max(float(high.abs().max()), terms) / EPSILON
    if not margin >= LEAST:
        raise BelowResolution(
            f"identifiers of {entries} contexts must be {LEAST:g} machine epsilons apart, got {margin:.1e}, which is"
            " below the resolution of float64; give fewer sequences, or tokens that differ more",
            None,
        )
    keys, levels = (low + high)[order] / 2, contexts.values[order]
    ahead = torch.eye(dim, dtype=torch.float64)[0]
    decode = table(dim, keys, levels) if exact else nn.Sequential(interpolant(dim, ahead, keys, levels))
    network = Realization(
        nn.Sequential(first),
        block,
        decode,
        input_dim=0 if given.dim() == 2 else dim_in,
        output_dim=values.shape[-1],
        length=length,
        margin=margin,
        cost=cost,
        cases=functools.partial(Cases, given if given.dim() == 2 else given.double(), values, True),
    )
    network.cost = dataclasses.replace(cost, parameters=sum(each.numel() for each in network.parameters()))
    return network


class _OccurringContexts(NamedTuple):
    """Pairs of a token and a multiset that occur: token, sorted multiset, value; and the pair of each token given."""

    own: Tensor
    rows: Tensor
    values: Tensor
    place: Tensor


def _searched(
    tokens: Tensor, contexts: _OccurringContexts, free: bool, dim: int, steps: int, generator: torch.Generator
) -> tuple[FeedForward, Block]:
    """Return a net from tokens to codes and a head, by a search for the widest gap between identifiers."""

    def codes_of(numbers: Tensor) -> Tensor:
        raw = numbers[..., :-1].abs() if free else (numbers[..., :-1] - 0.5) @ tokens.mT
        low = raw.amin(-1, keepdim=True)
        return LOWEST + (1 - LOWEST) * (raw - low) / (raw.amax(-1, keepdim=True) - low).clamp(min=1e-300)

    def identifiers(each: CodeCandidates) -> Tensor:
        codes, weight = codes_of(each.codes), each.codes[..., -1:].abs()
        own, around = codes[..., contexts.own], codes[..., contexts.rows]
        scores = each.beta[..., None, None] * own[..., None] * around
        return own + weight * (torch.softmax(scores, -1) * around).sum(-1)

    def quality(each: CodeCandidates) -> Tensor:
        ordered = identifiers(each).sort(-1).values
        if len(contexts.own) == 1:
            return torch.ones(len(ordered)).double()
        return ordered.diff(dim=-1).amin(-1) / ordered[..., -1]

    best = evolve(
        quality,
        tokens.shape[0 if free else 1] + 1,
        lambda numbers: numbers,
        generator=generator,
        steps=steps,
        population=max(16, min(128, 300_000 // contexts.rows.numel())),
    )
    codes, direction = codes_of(best.codes), best.codes[:-1] - 0.5
    first = _on_a_line(dim, tokens, codes, generator) if free else _projection(dim, tokens, direction)
    return first, rank_one_block(dim, float(best.beta), float(best.codes[-1].abs()))


def _checked(sequences: Any, labels: Any) -> tuple[Tensor, Tensor]:
    """Return the checked sequences, and values ``(sequences, length, output_dim)``."""
    if not isinstance(sequences, Tensor) or sequences.dim() not in (2, 3) or 0 in sequences.shape:
        got = tuple(sequences.shape) if isinstance(sequences, Tensor) else type(sequences).__name__
        raise UserError(
            f"sequences must be vectors (sequences, length, dim) or word numbers (sequences, length), got {got}"
        )
    if sequences.is_floating_point() != (sequences.dim() == 3):
        raise UserError(
            f"vectors have three axes and word numbers two, got {sequences.dim()} axes of {sequences.dtype};"
            " for vectors of one coordinate pass sequences[..., None]"
        )
    if sequences.dim() == 2 and _inexact(sequences):
        most = int(sequences.abs().max())
        raise UserError(f"words must be exact in float64, numbers up to 2**53, got {most}; number them from zero")
    if not sequences.double().isfinite().all():
        raise UserError("sequences must be finite, but some tokens are nan or infinite; remove those sequences")
    shape = tuple(sequences.shape[:2])
    try:
        given: Tensor = torch.as_tensor(labels)
    except (TypeError, ValueError, RuntimeError):
        raise UserError(f"labels must be numbers, got {labels!r}; number classes from zero") from None
    if tuple(given.shape[:2]) not in (shape, shape[:1]) or given.dim() > 3 or 0 in given.shape:
        raise UserError(
            f"labels must have shape ({shape[0]},), {shape} or ({shape[0]}, {shape[1]}, output_dim), got"
            f" {tuple(given.shape)}; one for each sequence or for each token"
        )
    if given.is_complex() or _inexact(given):
        got = "complex numbers" if given.is_complex() else f"{int(given.abs().max())}"
        raise UserError(f"labels must be exact in float64, real and whole ones up to 2**53, got {got}; number classes")
    given = given.double()
    if not given.isfinite().all():
        raise UserError("labels must be finite, but some are nan or infinite")
    if given.dim() == 1:
        given = given[:, None].expand(shape)
    return sequences.detach(), given if given.dim() == 3 else given[..., None]


def _inexact(numbers: Tensor) -> bool:
    """Return True for whole numbers beyond those that are exact in float64."""
    return not numbers.is_floating_point() and numbers.dtype != torch.bool and int(numbers.abs().max()) > EXACT


def _contexts(numbers: Tensor, values: Tensor) -> _OccurringContexts:
    count, length = numbers.shape
    rows = torch.cat([numbers.reshape(-1, 1), numbers.sort(1).values.repeat_interleave(length, 0)], 1)
    kept, place = rows.unique(dim=0, return_inverse=True)
    flat = values.reshape(count * length, -1)
    first = torch.full((len(kept),), count * length).scatter_reduce(0, place, torch.arange(len(rows)), "amin")
    differs = (flat != flat[first[place]]).any(-1)
    if differs.any():
        later = int(differs.nonzero()[0])
        earlier = int(first[place[later]])
        raise UserError(
            f"labels must agree for a token with the same tokens around it, got {flat[earlier].tolist()} in sequence"
            f" {earlier // length} and {flat[later].tolist()} in sequence {later // length}; attention ignores order,"
            " so give tokens a coordinate for their position"
        )
    return _OccurringContexts(kept[:, 0], kept[:, 1:], flat[first], place)


def _on_a_line(dim: int, tokens: Tensor, codes: Tensor, generator: torch.Generator) -> FeedForward:
    """Return a net from tokens to codes that is linear between their projections on a random line."""
    count, size = tokens.shape
    drawn = torch.randn(64, size, generator=generator, dtype=torch.float64) if size > 1 else torch.ones(1, 1)
    places = drawn.double() @ tokens.mT
    apart = places.sort(-1).values.diff(dim=-1).amin(-1) if count > 1 else torch.ones(len(places))
    best = int(apart.argmax())
    knots, order = places[best].sort()
    return interpolant(dim, _padded(drawn[best], dim), knots, codes[order, None])


def _projection(dim: int, tokens: Tensor, direction: Tensor) -> FeedForward:
    """Return a net of one unit from tokens to positive codes that are affine in them."""
    low, high = (direction @ tokens.mT).aminmax()
    slope = (1 - LOWEST) / (high - low).clamp(min=1e-300)
    offset = (LOWEST - slope * low)[None]
    return net(dim, _padded(slope * direction, dim)[None], offset, torch.ones(1, 1), torch.zeros(1))


def _padded(vector: Tensor, dim: int) -> Tensor:
    return torch.nn.functional.pad(vector.double(), (0, dim - vector.shape[-1]))
