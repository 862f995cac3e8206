"""Weights that map given sequences to given labels: only the contexts that occur have to be told apart."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from massieu.nn import FeedForward
from massieu.nn.checks import check_count
from massieu.universal.identifiers import LEAST, BelowResolution, rank_one_block
from massieu.universal.multisets import LIMIT, Cost, digits_of
from massieu.universal.realization import Cases, Realization
from massieu.universal.search import LOWEST, Candidates, evolve, seeded
from massieu.universal.staircases import interpolant, net
from massieu.universal.lookup import table

__all__ = ["memorize"]

ENDS = ("amin", "amax")
EXACT = 2**53  # whole numbers up to which float64 tells them apart

FREE = 64
"""Different vectors up to which each has a code of its own; the codes of more are a projection."""


def memorize(
    sequences: Tensor,
    labels: Tensor,
    *,
    exact: bool = True,
    rounds: int = 60,
    limit: int = LIMIT,
    generator: torch.Generator | int = 0,
) -> Realization:
    r"""A network with one rank-one softmax head that maps every token of every sequence to its label.

    Args:
        sequences: vectors ``(sequences, length, dim)``, or word numbers ``(sequences, length)``.
        labels: one for each sequence, ``(sequences,)``, for each token, ``(sequences, length)``, or values
            ``(sequences, length, output_dim)``. Order is not seen: a token with the same tokens around it must have the
            same label, unless positions are part of the tokens.
        exact: whether labels come out to the last bit, by a :func:`table`; or by a net that is linear between
            identifiers and has three weights for each instead of some twenty, up to rounding: labels times machine
            epsilon over the least gap, some 1e-8 for 1600 labels below ten.
        rounds: of the search for codes.
        limit: identifiers that may be built.
        generator: draws candidates, or its seed.

    Returns:
        The network in float64, whose :meth:`Realization.certify` goes through the sequences.

    Raises:
        BelowResolution: if identifiers are closer than a thousand machine epsilons.

    Source:
        Kajitsuka and Sato 2023, the corollary on memorisation: :math:`4(s + d) + d(2nN + d)` parameters for N sequences
        of n tokens.

    Example:
        >>> words = torch.tensor([[0, 0, 1], [0, 1, 1], [2, 0, 1]])
        >>> network = memorize(words, torch.tensor([5, 7, 9]))
        >>> network(words).squeeze(-1).tolist()
        [[5.0, 5.0, 5.0], [7.0, 7.0, 7.0], [9.0, 9.0, 9.0]]
    """
    check_count(rounds, "rounds", "it is how often candidates are varied", least=0)
    source = seeded(generator)
    given, values = _checked(sequences, labels)
    vectors = given.reshape(-1, given.shape[-1] if given.dim() == 3 else 1).double()
    tokens, numbers = vectors.unique(dim=0, return_inverse=True)
    numbers = numbers.reshape(given.shape[:2])
    contexts = _contexts(numbers, values)
    length, dim_in, entries = given.shape[1], tokens.shape[1], len(contexts.own)
    dim = max(dim_in, values.shape[-1], digits_of(entries) if exact else 1)
    Cost(len(tokens), length, entries, 0).check(limit)

    free = given.dim() == 2 or dim_in == 1 or len(tokens) <= FREE

    def codes_of(numbers: Tensor) -> Tensor:
        raw = numbers[..., :-1].abs() if free else (numbers[..., :-1] - 0.5) @ tokens.mT
        low = raw.amin(-1, keepdim=True)
        return LOWEST + (1 - LOWEST) * (raw - low) / (raw.amax(-1, keepdim=True) - low).clamp(min=1e-300)

    def identifiers(each: Candidates) -> Tensor:
        codes, weight = codes_of(each.codes), each.codes[..., -1:].abs()
        own, around = codes[..., contexts.own], codes[..., contexts.rows]
        scores = each.beta[..., None, None] * own[..., None] * around
        return own + weight * (torch.softmax(scores, -1) * around).sum(-1)

    def quality(each: Candidates) -> Tensor:
        ordered = identifiers(each).sort(-1).values
        return ordered.diff(dim=-1).amin(-1) / ordered[..., -1] if entries > 1 else torch.ones(len(ordered)).double()

    best = evolve(
        quality,
        (len(tokens) if free else dim_in) + 1,
        lambda numbers: numbers,
        generator=source,
        rounds=rounds,
        population=max(16, min(128, 300_000 // contexts.rows.numel())),
    )
    codes, direction = codes_of(best.codes), best.codes[:-1] - 0.5
    first = _on_a_line(dim, tokens, codes, source) if free else _projection(dim, tokens, direction)
    encode = nn.Sequential(first)
    block = rank_one_block(dim, float(best.beta), float(best.codes[-1].abs()))
    # As the layers themselves give them: where tokens hardly differ, rounding in the first net counts.
    with torch.no_grad():
        stream = block(encode(_padded(tokens, dim))[numbers])[..., 0].flatten()
    low, high = (
        stream.new_zeros(entries).scatter_reduce(0, contexts.place, stream, each, include_self=False) for each in ENDS
    )
    order = low.argsort()
    apart = float((low[order][1:] - high[order][:-1]).min()) if entries > 1 else 1.0
    # Terms of a projection may be large and cancel; then they decide how large rounding is.
    terms = 0.0 if free else float((tokens.abs() @ first.up.weight[0, :dim_in].detach().abs()).max())
    margin = apart / max(float(high.abs().max()), terms) / torch.finfo(torch.float64).eps
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
        encode,
        block,
        decode,
        input_dim=0 if given.dim() == 2 else dim_in,
        output_dim=values.shape[-1],
        length=length,
        margin=margin,
        cost=Cost(len(tokens), length, entries, 0),
        cases=functools.partial(Cases, given if given.dim() == 2 else given.double(), values, True),
    )
    network.cost = Cost(len(tokens), length, entries, sum(part.numel() for part in network.parameters()))
    return network


class _Contexts(NamedTuple):
    """The pairs of a token and its multiset that occur: the token, all tokens sorted, the value, and which it is for
    every token of the sequences."""

    own: Tensor
    rows: Tensor
    values: Tensor
    place: Tensor


def _checked(sequences: Any, labels: Any) -> tuple[Tensor, Tensor]:
    """Sequences as they are, and values ``(sequences, length, output_dim)``."""
    if not isinstance(sequences, Tensor) or sequences.dim() not in (2, 3) or 0 in sequences.shape:
        got = tuple(sequences.shape) if isinstance(sequences, Tensor) else type(sequences).__name__
        raise ValueError(
            f"sequences must be vectors (sequences, length, dim) or word numbers (sequences, length), got {got}"
        )
    if sequences.is_floating_point() != (sequences.dim() == 3):
        raise ValueError(
            f"vectors have three axes and word numbers two, got {sequences.dim()} axes of {sequences.dtype};"
            " for vectors of one coordinate pass sequences[..., None]"
        )
    if sequences.dim() == 2 and _inexact(sequences):
        most = int(sequences.abs().max())
        raise ValueError(f"words must be exact in float64, numbers up to 2**53, got {most}; number them from zero")
    if not sequences.double().isfinite().all():
        raise ValueError("sequences must be finite, but some tokens are nan or infinite; remove those sequences")
    shape = tuple(sequences.shape[:2])
    try:
        given: Tensor = torch.as_tensor(labels)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"labels must be numbers, got {labels!r}; give classes numbers from zero") from None
    if tuple(given.shape[:2]) not in (shape, shape[:1]) or given.dim() > 3 or 0 in given.shape:
        raise ValueError(
            f"labels must have shape ({shape[0]},), {shape} or ({shape[0]}, {shape[1]}, output_dim), got"
            f" {tuple(given.shape)}; one for each sequence or for each token"
        )
    if given.is_complex() or _inexact(given):
        got = "complex numbers" if given.is_complex() else f"{int(given.abs().max())}"
        raise ValueError(f"labels must be exact in float64, real and whole ones up to 2**53, got {got}; number classes")
    given = given.double()
    if not given.isfinite().all():
        raise ValueError("labels must be finite, but some are nan or infinite")
    if given.dim() == 1:
        given = given[:, None].expand(shape)
    return sequences.detach(), given if given.dim() == 3 else given[..., None]


def _inexact(numbers: Tensor) -> bool:
    """Whether whole numbers are beyond those that float64 tells apart."""
    return not numbers.is_floating_point() and numbers.dtype != torch.bool and int(numbers.abs().max()) > EXACT


def _contexts(numbers: Tensor, values: Tensor) -> _Contexts:
    count, length = numbers.shape
    rows = torch.cat([numbers.reshape(-1, 1), numbers.sort(1).values.repeat_interleave(length, 0)], 1)
    kept, place = rows.unique(dim=0, return_inverse=True)
    flat = values.reshape(count * length, -1)
    first = torch.full((len(kept),), count * length).scatter_reduce(0, place, torch.arange(len(rows)), "amin")
    differs = (flat != flat[first[place]]).any(-1)
    if differs.any():
        later = int(differs.nonzero()[0])
        earlier = int(first[place[later]])
        raise ValueError(
            f"labels must agree where a token has the same tokens around it, got {flat[earlier].tolist()} in sequence"
            f" {earlier // length} and {flat[later].tolist()} in sequence {later // length}; attention does not see"
            " order, so give tokens a coordinate that says where they are"
        )
    return _Contexts(kept[:, 0], kept[:, 1:], flat[first], place)


def _on_a_line(dim: int, tokens: Tensor, codes: Tensor, generator: torch.Generator) -> FeedForward:
    """From tokens to any codes: linear between those on a line that no two of them share a place on."""
    count, size = tokens.shape
    drawn = torch.randn(64, size, generator=generator, dtype=torch.float64) if size > 1 else torch.ones(1, 1)
    places = drawn.double() @ tokens.mT
    apart = places.sort(-1).values.diff(dim=-1).amin(-1) if count > 1 else torch.ones(len(places))
    best = int(apart.argmax())
    knots, order = places[best].sort()
    return interpolant(dim, _padded(drawn[best], dim), knots, codes[order, None])


def _projection(dim: int, tokens: Tensor, direction: Tensor) -> FeedForward:
    """From tokens to codes that are affine in them, and positive, so that a single unit carries them."""
    low, high = (direction @ tokens.mT).aminmax()
    slope = (1 - LOWEST) / (high - low).clamp(min=1e-300)
    offset = (LOWEST - slope * low)[None]
    return net(dim, _padded(slope * direction, dim)[None], offset, torch.ones(1, 1), torch.zeros(1))


def _padded(vector: Tensor, dim: int) -> Tensor:
    return torch.nn.functional.pad(vector.double(), (0, dim - vector.shape[-1]))
