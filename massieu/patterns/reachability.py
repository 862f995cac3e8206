"""Reach of tokens after a number of layers, by products of boolean matrices."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from massieu.checks import check_count
from massieu.patterns.edges import CHUNK, Edges, check_edges, pack, union
from massieu.patterns.pattern import Pattern, Schedule, as_schedule

__all__ = ["Reach", "boolean_product", "reach", "reach_by_layer"]

PAIR_COST = 16  # cost of a pair followed alone, relative to one in a row of bits
WORK = 1 << 29  # most words of 64 bits read for patterns without self-loops; some seconds


@dataclass(frozen=True)
class Reach:
    """Number of layers until every token reaches every token, that is, depends on it.

    Attributes:
        layers: s, the number of layers; None if there is none or it was not found.
        causal_layers: layers until every token reaches all earlier tokens, for causal patterns; None otherwise.
        counts: number of pairs reached after each layer computed.
        converged: True if the answer is final; False if a bound on the layers came first.
        message: the answer and its reason in words.
    """

    layers: int | None
    causal_layers: int | None
    counts: tuple[int, ...]
    converged: bool
    message: str


def reach(schedule: Pattern | Schedule | Iterable[Pattern], length: int, *, max_layers: int | None = None) -> Reach:
    r"""Return the number of layers s until every token can depend on every token.

    .. math:: S^1_k = A^1_k, \qquad S^t_k = \bigcup_{j \in A^{((t-1) \bmod p) + 1}_k} S^{t-1}_j, \qquad
              S^s_k = \{1, \dots, T\} \text{ for all } k

    With self-loops the sets only grow, and such an s exists if and only if the union of the patterns is strongly
    connected. Few new pairs are followed one by one, many as rows of bits.

    Args:
        schedule: a pattern or several.
        length: number of tokens T.
        max_layers: None for no limit with self-loops. Without them sets may shrink again, and None is
            :math:`p ((T - 1)^2 + 1)`, or fewer, by a bound of some seconds: 400 layers of a few thousand tokens.

    Source:
        Yun et al. 2020, assumption 1.3.

    Example:
        >>> from massieu.patterns import causal_strided, dilated, star_ring, window
        >>> reach(window(1), 256).layers, reach(star_ring(), 256).layers, reach(dilated(2, 2), 256).layers
        (255, 2, None)
        >>> reach(causal_strided(16), 256).message
        'after 3 layers every token reaches all earlier tokens; later ones stay out of reach'
    """
    edges = as_schedule(schedule).at(length)
    if max_layers is not None:
        check_count(max_layers, "max_layers", remedy="None sets no limit")
    if all(each.has_self_loops for each in edges):
        return _with_self_loops(edges, length, max_layers)
    return _without_self_loops(edges, length, max_layers)


def reach_by_layer(schedule: Pattern | Schedule | Iterable[Pattern], length: int, layers: int) -> list[Edges]:
    """Return the sets :math:`S^1, \\dots, S^{layers}` as edges: in the t-th, token k reaches token j after t layers.

    Example:
        >>> from massieu.patterns import window
        >>> [each.connections for each in reach_by_layer(window(1), 8, 3)]
        [22, 34, 44]
    """
    check_count(layers, "layers")
    edges = as_schedule(schedule).at(length)
    found = [edges[0]]
    for layer in range(1, layers):
        found.append(boolean_product(edges[layer % len(edges)], found[-1]))
    return found


def boolean_product(first: Edges, second: Edges) -> Edges:
    """Return the tokens that each token sees through an edge of ``first`` followed by one of ``second``.

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
    while row < first.length:  # chunks of rows, each of at least one
        last = max(row + 1, int(np.searchsorted(starts, starts[row] + step, side="right")) - 1)
        own = starts[row : last + 1]
        seen = np.flatnonzero(np.diff(own))  # reduceat accepts no empty rows
        if len(seen):
            gathered = second.bits[atoms[own[0] : own[-1]]]
            bits[row + seen] = np.bitwise_or.reduceat(gathered, own[seen] - own[0], axis=0)
        row = last
    return Edges(first.length, bits)


def _with_self_loops(edges: Sequence[Edges], length: int, max_layers: int | None) -> Reach:
    """Return the reach of sets that only grow, after a test of whether they ever become full."""
    whole = union(edges)
    missing = unreachable(whole)
    causal = whole.is_causal and length > 1
    before = np.arange(length - 1)
    if missing is not None and not (causal and bool(whole.contains(before + 1, before).all())):
        return Reach(None, None, (), True, _never_reaches(missing))
    target = length * (length + 1) // 2 if causal else length**2
    counts: list[int] = []
    for count in _follow(edges):
        counts.append(count)
        if count == target:
            break
        if len(counts) == max_layers:
            return Reach(None, None, tuple(counts), False, f"not within {max_layers} layers")
    layers = len(counts)
    after = f"after {layers} layer{'s' if layers > 1 else ''} every token reaches"
    if causal:
        return Reach(None, layers, tuple(counts), True, f"{after} all earlier tokens; later ones stay out of reach")
    return Reach(layers, None, tuple(counts), True, f"{after} every token")


def _never_reaches(missing: tuple[int, int]) -> str:
    return f"token {missing[0]} never reaches token {missing[1]}, with any number of layers"


def _follow(edges: Sequence[Edges]) -> Iterator[int]:
    """Yield the number of pairs after each layer; a pattern extends only pairs that are new since its last turn."""
    length, p = edges[0].length, len(edges)
    known = edges[0].unpack()
    flat = known.reshape(-1)
    stamps = np.empty(length**2, dtype=np.int32)  # number of the last among equal pairs
    reverse = [each.transpose() for each in edges]
    news: list[NDArray[np.int64] | None] = [None] * p  # new pairs of the last p layers, None for too many
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
            fresh = _spread(np.concatenate(recent), reverse[turn].lists, length)
            fresh = fresh[~flat[fresh]]
            order = np.arange(len(fresh), dtype=np.int32)
            stamps[fresh] = order
            fresh = fresh[stamps[fresh] == order]
            flat[fresh] = True
        news[turn] = fresh if PAIR_COST * len(fresh) <= length**2 else None
        count += len(fresh)
        yield count


def _spread(
    pairs: NDArray[np.int64], reverse: tuple[NDArray[np.int64], NDArray[np.int64]], length: int
) -> NDArray[np.int64]:
    """Return all (k, x) such that k sees j, for pairs (j, x), each a number j T + x."""
    starts, tokens = reverse
    source, target = np.divmod(pairs, length)
    counts = starts[source + 1] - starts[source]
    first = np.repeat(starts[source] - np.concatenate([[0], counts.cumsum()[:-1]]), counts)
    found: NDArray[np.int64] = tokens[first + np.arange(len(first))] * length + np.repeat(target, counts)
    return found


def _without_self_loops(edges: Sequence[Edges], length: int, max_layers: int | None) -> Reach:
    """Return the reach of sets that may shrink again: compute layers until they are full, repeat, or the limit."""
    against = _never(edges)
    if against:
        return Reach(None, None, (), True, against)
    p = len(edges)
    cost = (max(each.connections for each in edges) + 4 * length) * edges[0].bits.shape[1]
    limit = max(8, min(p * ((length - 1) ** 2 + 1), WORK // cost)) if max_layers is None else max_layers
    current, counts, seen = edges[0], [edges[0].connections], {_state(0, edges[0])}
    while counts[-1] < length**2:
        if len(counts) >= limit:
            message = f"not within {limit} layers, and some self-loop is missing"
            return Reach(None, None, tuple(counts), False, message)
        turn = len(counts) % p
        current = boolean_product(edges[turn], current)
        counts.append(current.connections)
        state = _state(turn, current)
        if state in seen:
            message = f"the sets repeat from layer {len(counts)} on, without ever being full"
            return Reach(None, None, tuple(counts), True, message)
        seen.add(state)
    message = f"after {len(counts)} layers every token reaches every token, though some self-loop is missing"
    return Reach(len(counts), None, tuple(counts), True, message)


def _state(turn: int, edges: Edges) -> bytes:
    return hashlib.blake2b(edges.bits.tobytes(), digest_size=16, salt=turn.to_bytes(8, "little")).digest()


def _never(edges: Sequence[Edges]) -> str:
    """Return a reason against full sets that needs no layers, or an empty string.

    If every token sees some token in every pattern, full sets stay full. So the product of all patterns must be
    strongly connected, and the lengths of its cycles must have no common divisor.
    """
    missing = unreachable(union(edges))
    if missing is None and all(each.counts.min() > 0 for each in edges):
        whole = edges[0]
        for each in edges[1:]:
            whole = boolean_product(each, whole)
        missing = unreachable(whole)
        period = _period(whole) if missing is None else 1
        if period > 1:
            return f"tokens reach each other only every {period * len(edges)} layers, never all at once"
    return "" if missing is None else _never_reaches(missing)


def _period(edges: Edges) -> int:
    """Return the greatest common divisor of the lengths of all cycles of a strongly connected graph."""
    depth = np.full(edges.length, -1)
    ahead, steps = np.zeros(1, dtype=np.int64), 0
    while len(ahead):
        depth[ahead] = steps
        ahead = np.flatnonzero(edges.unpack(ahead).any(0) & (depth < 0))
        steps += 1
    starts, atoms = edges.lists
    return math.gcd(*np.unique(np.repeat(depth, np.diff(starts)) + 1 - depth[atoms]).tolist())


def unreachable(edges: Edges) -> tuple[int, int] | None:
    """Return two tokens of which the first never reaches the second; None if the graph is strongly connected."""
    everyone = (1 << edges.length) - 1
    for turned, graph in enumerate((edges, edges.transpose())):
        left = everyone & ~flood(graph.numbers(), 1, everyone)
        if left:
            other = (left & -left).bit_length() - 1
            return (other, 0) if turned else (0, other)
    return None


def flood(rows: Sequence[int], start: int, within: int) -> int:
    """Return the tokens reachable from ``start`` along rows of edges within a set; sets are the bits of numbers."""
    found = ahead = start
    while ahead:
        step = (ahead & -ahead).bit_length() - 1
        new = rows[step] & within & ~found
        found |= new
        ahead = (ahead & (ahead - 1)) | new
    return found
