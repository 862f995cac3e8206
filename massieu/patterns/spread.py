"""How far tokens have heard of each other after so many layers, by products of boolean matrices."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from massieu.patterns.edges import CHUNK, Edges, check_edges, pack
from massieu.patterns.given import check_count
from massieu.patterns.pattern import Pattern, Schedule, as_schedule

__all__ = ["Reach", "boolean_product", "reach", "reach_by_layer"]

PAIR_COST = 16  # what a pair costs that is followed alone, in units of one that is followed with all others
WORK = 1 << 29  # words of 64 bits that are looked at, without self-loops, before layers are given up on; some seconds
Ended = Literal["full", "causal", "never", "limit"]


@dataclass(frozen=True)
class Reach:
    """How many layers it takes until every token has heard of every token.

    Attributes:
        layers: s, the number of layers; None if it never happens or was not seen.
        causal_layers: layers until every token has heard of all before it, for causal patterns; None otherwise.
        counts: number of pairs after each layer that was followed.
        ended: ``"full"``; ``"causal"`` when all earlier tokens and no others were reached; ``"never"``; ``"limit"``
            when a bound on the layers came first, which only patterns without self-loops need.
        reason: the same in words.
    """

    layers: int | None
    causal_layers: int | None
    counts: tuple[int, ...]
    ended: Ended
    reason: str


def reach(schedule: Pattern | Schedule | Iterable[Pattern], length: int, *, max_layers: int | None = None) -> Reach:
    r"""Layers s until every token can depend on every token.

    .. math:: S^1_k = A^1_k, \qquad S^t_k = \bigcup_{j \in A^{((t-1) \bmod p) + 1}_k} S^{t-1}_j, \qquad
              S^s_k = \{1, \dots, T\} \text{ for all } k

    With self-loops the sets only grow, and there is such an s if and only if the union of the patterns is strongly
    connected. Sets that no longer grow along single pairs are followed pair by pair, others as rows of bits.

    Args:
        schedule: a pattern or several.
        length: number of tokens T.
        max_layers: where to stop; by default never with self-loops. Without them sets may shrink again, and it stops at
            :math:`p ((T - 1)^2 + 1)`, or with ``"limit"`` after some seconds: 400 layers of a few thousand tokens.

    Source:
        Yun et al. 2020, assumption 1.3.

    Example:
        >>> from massieu.patterns import causal_strided, dilated, star_ring, window
        >>> reach(window(1), 256).layers, reach(star_ring(), 256).layers, reach(dilated(2, 2), 256).layers
        (255, 2, None)
        >>> reach(causal_strided(16), 256).reason
        'after 3 layers every token has heard of all before it; later ones stay out of reach'
    """
    edges = as_schedule(schedule).at(length)
    if max_layers is not None:
        check_count(max_layers, "max_layers", 1, "None follows them to the end")
    if all(each.has_self_loops for each in edges):
        return _growing(edges, length, max_layers)
    return _changing(edges, length, max_layers)


def reach_by_layer(schedule: Pattern | Schedule | Iterable[Pattern], length: int, layers: int) -> list[Edges]:
    """The sets :math:`S^1, \\dots, S^{layers}` as edges: token k of the t-th has heard of token j after t layers.

    Example:
        >>> from massieu.patterns import window
        >>> [each.connections for each in reach_by_layer(window(1), 8, 3)]
        [22, 34, 44]
    """
    check_count(layers, "layers", 1, "it is the number of layers to follow")
    edges = as_schedule(schedule).at(length)
    found = [edges[0]]
    for layer in range(1, layers):
        found.append(boolean_product(edges[layer % len(edges)], found[-1]))
    return found


def boolean_product(first: Edges, second: Edges) -> Edges:
    """Whom a token sees through one layer of ``first`` on what ``second`` has gathered: rows of bits, or-ed.

    Example:
        >>> from massieu.patterns import window
        >>> boolean_product(window(1).at(9), window(2).at(9)).connections == window(3).connections(9)
        True
    """
    check_edges(first)
    check_edges(second, first.length)
    starts, atoms = first.lists
    bits = np.zeros_like(second.bits)
    step = max(1, CHUNK // (8 * bits.shape[1]))
    row = 0
    while row < first.length:  # as many rows as fit into a chunk, at least one
        last = max(row + 1, int(np.searchsorted(starts, starts[row] + step, side="right")) - 1)
        own = starts[row : last + 1]
        seen = np.flatnonzero(np.diff(own))  # rows that see anyone: reduceat takes no empty ones
        if len(seen):
            gathered = second.bits[atoms[own[0] : own[-1]]]
            bits[row + seen] = np.bitwise_or.reduceat(gathered, own[seen] - own[0], axis=0)
        row = last
    return Edges(first.length, bits)


def _growing(edges: Sequence[Edges], length: int, max_layers: int | None) -> Reach:
    """Sets that only grow, as self-loops make them: whether they fill up is known before any layer."""
    union = edges[0]
    for each in edges[1:]:
        union = union | each
    missing = unreachable(union)
    causal = union.is_causal and length > 1
    before = np.arange(length - 1)
    if missing is not None and not (causal and bool(union.contains(before + 1, before).all())):
        sees, seen = missing
        return Reach(None, None, (), "never", f"token {sees} never hears of token {seen}, however many layers")
    target = length * (length + 1) // 2 if causal else length**2
    counts: list[int] = []
    for count in _follow(edges):
        counts.append(count)
        if count == target:
            break
        if len(counts) == max_layers:
            return Reach(None, None, tuple(counts), "limit", f"not within {max_layers} layers")
    layers = len(counts)
    plural = f"{layers} layer{'s' if layers > 1 else ''}"
    if causal:
        reason = f"after {plural} every token has heard of all before it; later ones stay out of reach"
        return Reach(None, layers, tuple(counts), "causal", reason)
    return Reach(layers, None, tuple(counts), "full", f"after {plural} every token has heard of every token")


def _follow(edges: Sequence[Edges]) -> Iterator[int]:
    """Number of pairs after each layer. What is new since a pattern had its last turn is all it can carry on."""
    length, p = edges[0].length, len(edges)
    known = edges[0].unpack()
    flat = known.reshape(-1)
    stamps = np.empty(length**2, dtype=np.int32)  # which of equal pairs came last
    listeners = [each.transpose() for each in edges]
    news: list[NDArray[np.int64] | None] = [None] * p  # pairs of the last p layers, None for too many
    count = edges[0].connections
    yield count
    for layer in range(1, p * length**2 + 1):
        turn = layer % p
        recent = [each for each in news if each is not None]
        pairs = sum(map(len, recent)) * edges[turn].connections // length
        if len(recent) < p or PAIR_COST * pairs > length**2 + 2 * edges[turn].connections * edges[turn].bits.shape[1]:
            after = boolean_product(edges[turn], Edges(length, pack(known))).unpack()
            fresh = np.flatnonzero(after > known)
            np.copyto(known, after)
        else:
            fresh = _spread(np.concatenate(recent), listeners[turn].lists, length)
            fresh = fresh[~flat[fresh]]
            order = np.arange(len(fresh), dtype=np.int32)
            stamps[fresh] = order
            fresh = fresh[stamps[fresh] == order]
            flat[fresh] = True
        news[turn] = fresh if PAIR_COST * len(fresh) <= length**2 else None
        count += len(fresh)
        yield count


def _spread(
    pairs: NDArray[np.int64], listeners: tuple[NDArray[np.int64], NDArray[np.int64]], length: int
) -> NDArray[np.int64]:
    """For pairs (j, x), as numbers j T + x, all (k, x) such that k sees j."""
    starts, tokens = listeners
    who, what = np.divmod(pairs, length)
    counts = starts[who + 1] - starts[who]
    first = np.repeat(starts[who] - np.concatenate([[0], counts.cumsum()[:-1]]), counts)
    found: NDArray[np.int64] = tokens[first + np.arange(len(first))] * length + np.repeat(what, counts)
    return found


def _changing(edges: Sequence[Edges], length: int, max_layers: int | None) -> Reach:
    """Sets that may shrink again: follow them until they are full, repeat, or the limit comes."""
    against = _never(edges)
    if against:
        return Reach(None, None, (), "never", against)
    p = len(edges)
    cost = (max(each.connections for each in edges) + 4 * length) * edges[0].bits.shape[1]
    limit = max(8, min(p * ((length - 1) ** 2 + 1), WORK // cost)) if max_layers is None else max_layers
    current, counts, seen = edges[0], [edges[0].connections], {_state(0, edges[0])}
    while counts[-1] < length**2:
        if len(counts) >= limit:
            return Reach(
                None, None, tuple(counts), "limit", f"not within {limit} layers, and some self-loop is missing"
            )
        turn = len(counts) % p
        current = boolean_product(edges[turn], current)
        counts.append(current.connections)
        state = _state(turn, current)
        if state in seen:
            reason = f"what tokens hear of repeats from layer {len(counts)} on, without ever being all of them"
            return Reach(None, None, tuple(counts), "never", reason)
        seen.add(state)
    reason = f"after {len(counts)} layers every token has heard of every token, though some self-loop is missing"
    return Reach(len(counts), None, tuple(counts), "full", reason)


def _state(turn: int, edges: Edges) -> bytes:
    return hashlib.blake2b(edges.bits.tobytes(), digest_size=16, salt=turn.to_bytes(8, "little")).digest()


def _never(edges: Sequence[Edges]) -> str:
    """Why sets never fill up, if that can be told beforehand, or nothing.

    If every token sees someone in every pattern, full sets stay full. So the pairs of one round of patterns must be
    strongly connected, and lengths of its cycles must have no common divisor.
    """
    union, whole = edges[0], edges[0]
    for each in edges[1:]:
        union = union | each
    missing = unreachable(union)
    if missing is None and all(each.counts.min() > 0 for each in edges):
        for each in edges[1:]:
            whole = boolean_product(each, whole)
        missing = unreachable(whole)
        period = _period(whole) if missing is None else 1
        if period > 1:
            return f"tokens hear of each other only every {period * len(edges)} layers, never all at once"
    return "" if missing is None else f"token {missing[0]} never hears of token {missing[1]}, however many layers"


def _period(edges: Edges) -> int:
    """The greatest common divisor of the lengths of all cycles, if tokens are strongly connected."""
    depth = np.full(edges.length, -1)
    ahead, steps = np.zeros(1, dtype=np.int64), 0
    while len(ahead):
        depth[ahead] = steps
        ahead = np.flatnonzero(edges.unpack(ahead).any(0) & (depth < 0))
        steps += 1
    starts, atoms = edges.lists
    return math.gcd(*np.unique(np.repeat(depth, np.diff(starts)) + 1 - depth[atoms]).tolist())


def unreachable(edges: Edges) -> tuple[int, int] | None:
    """Two tokens of which the first never hears of the second; None if all are strongly connected."""
    everyone = (1 << edges.length) - 1
    for turned, graph in enumerate((edges, edges.transpose())):
        left = everyone & ~flood(graph.numbers(), 1, everyone)
        if left:
            other = (left & -left).bit_length() - 1
            return (other, 0) if turned else (0, other)
    return None


def flood(rows: Sequence[int], start: int, within: int) -> int:
    """Everything that rows, as whole numbers, lead to from a set of tokens, within another."""
    found = ahead = start
    while ahead:
        step = (ahead & -ahead).bit_length() - 1
        new = rows[step] & within & ~found
        found |= new
        ahead = (ahead & (ahead - 1)) | new
    return found
