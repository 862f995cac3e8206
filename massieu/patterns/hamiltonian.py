"""Hamiltonian paths, which visit every token once: found, refuted with a reason, or unknown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from massieu.checks import UserError, check_count
from massieu.patterns.edges import Edges, check_edges
from massieu.patterns.reachability import flood

__all__ = ["HamiltonianPath", "hamiltonian_path", "is_hamiltonian"]

EXACT = 18  # longest sequence for which all subsets are searched
HUBS = 32  # most tokens removed to split the rest into components
TURNS = 20_000  # most extensions and turns of one path
CHOICES = 48  # most candidates compared for the next token


@dataclass(frozen=True)
class HamiltonianPath:
    """Result of the search for a path that visits every token once.

    Attributes:
        exists: True, False, or None if the search found neither a path nor a proof against one.
        order: the tokens along the path, each seen by the next; None without a path.
        message: origin of the path, or the reason against one.
    """

    exists: bool | None
    order: tuple[int, ...] | None
    message: str


def hamiltonian_path(edges: Edges, *, seed: int = 0, max_steps: int = 4) -> HamiltonianPath:
    r"""Return a permutation :math:`\gamma` of the tokens with :math:`\gamma(i) \in A_{\gamma(i+1)}` for all i.

    It tries, in order: the tokens as they stand and in reverse; up to 18 tokens all subsets (Held and Karp), which is
    exact; reasons against any path (several tokens without an edge to or from others, unconnected components, strongly
    connected components without a common order, a few tokens whose removal leaves too many components); a search that
    moves to the token with the fewest continuations (Warnsdorff) and reverses the end of a path that cannot be
    extended (Pósa).

    Args:
        edges: the graph.
        seed: of random choices in the search.
        max_steps: searches, each from a new random start.

    Source:
        Yun et al. 2020, assumption 1.2, for the union of the patterns.

    Example:
        >>> from massieu.patterns import star, window
        >>> hamiltonian_path(window(1).at(4)).order
        (0, 1, 2, 3)
        >>> hamiltonian_path(star().at(30)).message
        'without token 0 there remain 29 components, and a path leaves at most 2'
    """
    check_edges(edges)
    check_count(max_steps, "max_steps", least=0)
    length = edges.length
    chain = np.arange(length)
    for order, name in ((chain, "the tokens in their order"), (chain[::-1], "the tokens in reverse order")):
        if is_hamiltonian(edges, order):
            return HamiltonianPath(True, tuple(order.tolist()), f"{name} are a path")
    if length <= EXACT:
        exact = _held_karp(edges)
        return HamiltonianPath(exact is not None, exact, f"all subsets of {length} tokens were searched")
    sees, seen = edges.numbers(), edges.transpose().numbers()
    against = _refutation(sees, seen)
    if against:
        return HamiltonianPath(False, None, against)
    generator = np.random.default_rng(seed)
    for step in range(1, max_steps + 1):
        for search in (_rotate, _greedy):
            found = search(sees, seen, generator)
            if found is not None and is_hamiltonian(edges, found):
                return HamiltonianPath(True, tuple(found), f"found by search {step}")
    return HamiltonianPath(None, None, f"no path was found in {max_steps} searches, and none was ruled out")


def is_hamiltonian(edges: Edges, order: Sequence[int] | NDArray[np.int64]) -> bool:
    """Return True if an order of all tokens is a path in which each token is seen by the next.

    Example:
        >>> from massieu.patterns import ring
        >>> is_hamiltonian(ring().at(4), [2, 1, 0, 3]), is_hamiltonian(ring().at(4), [0, 2, 1, 3])
        (True, False)
    """
    check_edges(edges)
    tokens = np.asarray(order)
    if tokens.dtype.kind not in "iu":
        raise UserError(f"order must be the numbers of tokens, got {tokens.dtype}; convert it to whole numbers")
    if not np.array_equal(np.sort(tokens), np.arange(edges.length)):
        return False
    return bool(edges.contains(tokens[1:], tokens[:-1]).all())


def _held_karp(edges: Edges) -> tuple[int, ...] | None:
    """Return a path or None, by dynamic programming over subsets; bits of ``ends`` are possible last tokens."""
    length = edges.length
    sees = np.array(edges.numbers(), dtype=np.int64)
    subsets = np.arange(1 << length)
    sizes = np.zeros(1, dtype=np.int64)
    for _ in range(length):
        sizes = np.concatenate([sizes, sizes + 1])
    ends = np.zeros(1 << length, dtype=np.int64)
    ends[1 << np.arange(length)] = 1 << np.arange(length)
    by_size = np.split(np.argsort(sizes, kind="stable"), np.cumsum(np.bincount(sizes))[:-1])
    for group in by_size[2:]:
        for token in range(length):
            members = group[group >> token & 1 == 1]
            reached = (ends[members ^ (1 << token)] & sees[token]) != 0
            ends[members] |= reached.astype(np.int64) << token
    rest = int(subsets[-1])
    if not ends[rest]:
        return None
    order: list[int] = []
    possible = int(ends[rest])
    while rest:
        last = (possible & -possible).bit_length() - 1
        order.append(last)
        rest ^= 1 << last
        possible = int(ends[rest]) & int(sees[last])
    return tuple(reversed(order))


def _refutation(sees: Sequence[int], seen: Sequence[int]) -> str:
    """Return a reason against any path, or an empty string."""
    length = len(sees)
    for rows, what in ((sees, "see no other token"), (seen, "are seen by no other token")):
        alone = [token for token, row in enumerate(rows) if not row & ~(1 << token)]
        if len(alone) > 1:
            return f"{len(alone)} tokens {what}, such as {alone[0]} and {alone[1]}, and a path has one such end"
    either = [first | second for first, second in zip(sees, seen, strict=True)]
    left = (1 << length) - 1
    count = _count_components(either, left)
    if count > 1:
        return f"the tokens fall into {count} unconnected components"
    against = _unordered_components(sees, seen)
    if against:
        return against
    hubs = sorted(range(length), key=lambda token: -either[token].bit_count())[:HUBS]
    for number, hub in enumerate(hubs, 1):
        left &= ~(1 << hub)
        count = _count_components(either, left)
        if count > number + 1:
            names = f"token {hub}" if number == 1 else f"tokens {', '.join(map(str, hubs[:number]))}"
            return f"without {names} there remain {count} components, and a path leaves at most {number + 1}"
    return ""


def _count_components(rows: Sequence[int], within: int) -> int:
    count = 0
    while within:
        within &= ~flood(rows, within & -within, within)
        count += 1
    return count


def _unordered_components(sees: Sequence[int], seen: Sequence[int]) -> str:
    """Return two tokens in strongly connected components without an edge to the next in order, in words, or nothing.

    A path cannot return to a component that it has left, so it must visit them one after the other (Kosaraju).
    """
    left, finished = (1 << len(sees)) - 1, []
    while left:  # depth first along reversed edges; the token finished last comes first
        stack = [(left & -left).bit_length() - 1]
        left &= left - 1
        while stack:
            ahead = seen[stack[-1]] & left
            if ahead:
                step = ahead & -ahead
                left &= ~step
                stack.append(step.bit_length() - 1)
            else:
                finished.append(stack.pop())
    left, before = (1 << len(sees)) - 1, 0
    for token in reversed(finished):
        if not left >> token & 1:
            continue
        own = flood(sees, 1 << token, left)
        left &= ~own
        if before and not any(sees[each] & before for each in _tokens(own)):
            first = (before & -before).bit_length() - 1
            return f"tokens {first} and {token} belong to components that no path can visit one after the other"
        before = own
    return ""


def _tokens(number: int) -> list[int]:
    found = []
    while number:
        found.append((number & -number).bit_length() - 1)
        number &= number - 1
    return found


def _fewest(choices: int, edges: Sequence[int], left: int, generator: np.random.Generator) -> int:
    """Return one of the tokens with the fewest continuations (Warnsdorff)."""
    tokens = _tokens(choices)
    if len(tokens) > CHOICES:
        tokens = generator.choice(tokens, CHOICES, replace=False).tolist()
    counts = np.array([(edges[token] & left).bit_count() for token in tokens])
    return tokens[int(generator.choice(np.flatnonzero(counts == counts.min())))]


def _greedy(sees: Sequence[int], seen: Sequence[int], generator: np.random.Generator) -> list[int] | None:
    """Greedy search with backtracking along reversed edges; a token that sees no other token must come first."""
    length = len(sees)
    alone = [token for token, row in enumerate(sees) if not row & ~(1 << token)]
    start = alone[0] if alone else int(generator.integers(length))
    left = (1 << length) - 1 & ~(1 << start)
    path, tried = [start], [0]
    for _ in range(TURNS // 4):
        if not left:
            return path
        ahead = seen[path[-1]] & left & ~tried[-1]
        if ahead:
            step = _fewest(ahead, seen, left, generator)
            tried[-1] |= 1 << step
            left &= ~(1 << step)
            path.append(step)
            tried.append(0)
        elif len(path) > 1:
            left |= 1 << path.pop()
            tried.pop()
        else:
            return None
    return None


def _rotate(sees: Sequence[int], seen: Sequence[int], generator: np.random.Generator) -> list[int] | None:
    """Search along symmetric edges; a path that cannot be extended is reversed behind a neighbor of its end (Pósa)."""
    both = [first & second & ~(1 << token) for token, (first, second) in enumerate(zip(sees, seen, strict=True))]
    length = len(both)
    path = np.zeros(length, dtype=np.int64)
    place = np.full(length, -1)
    path[0] = start = int(generator.integers(length))
    place[start] = 0
    left, size = (1 << length) - 1 & ~(1 << start), 1
    for _ in range(min(20 * length, TURNS)):
        if size == length:
            return [int(token) for token in path]
        last = int(path[size - 1])
        if both[last] & left:
            step = _fewest(both[last] & left, both, left, generator)
            path[size], place[step] = step, size
            left &= ~(1 << step)
            size += 1
            continue
        behind = [int(place[token]) + 1 for token in _tokens(both[last])]
        turns = [after for after in behind if after < size - 1] or [0]  # if none, continue from the other end
        useful = [after for after in turns if both[int(path[after])] & left]  # the new end has a continuation
        after = int(generator.choice(useful or turns))
        path[after:size] = path[after:size][::-1]
        place[path[after:size]] = np.arange(after, size)
    return None
