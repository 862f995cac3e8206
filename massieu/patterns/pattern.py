"""Sparse patterns for sequences of any length, and schedules of them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from massieu.patterns.edges import Edges, triangle

__all__ = ["Pattern", "Schedule", "as_schedule"]


@dataclass(frozen=True, eq=False)
class Pattern:
    r"""Which tokens each token sees: sets :math:`A_k \subseteq \{0, \dots, T - 1\}` for every length T.

    Attributes:
        name: for people, such as ``"window(2)"``.
        rule: the connections at a length.
        causal: whether later tokens are left out.
        self_loops: whether every token is made to see itself.
        stable: whether a token sees the same earlier tokens whatever the length, as in a window and not in a ring. Only
            then may tokens come one by one, as with a cache; see :meth:`laid_out` for the others.

    Example:
        >>> from massieu.patterns import star, window
        >>> pattern = window(1)
        >>> pattern.mask(3).int()
        tensor([[1, 1, 0],
                [1, 1, 1],
                [0, 1, 1]], dtype=torch.int32)
        >>> (pattern | star()).connections(256)
        1274
    """

    name: str
    rule: Callable[[int], Edges]
    causal: bool = False
    self_loops: bool = True
    stable: bool = False

    def at(self, length: int) -> Edges:
        """The connections among ``length`` tokens."""
        if isinstance(length, bool) or not isinstance(length, (int, np.integer)) or length < 1:
            raise ValueError(f"length must be a positive whole number, got {length!r}; it is the number of tokens")
        return _edges(self, int(length))

    def connections(self, length: int) -> int:
        """Number of pairs that see each other, self-loops included."""
        return self.at(length).connections

    def density(self, length: int) -> float:
        """Share of all pairs."""
        return self.connections(length) / length**2

    def growth(self, short: int = 256, long: int = 1024) -> float:
        """Exponent with which connections grow between two lengths: 1 is linear in T, 2 is full attention.

        Example:
            >>> from massieu.patterns import full, star_ring, strided
            >>> round(star_ring().growth(), 2), round(strided().growth(), 2), full().growth()
            (1.0, 1.49, 2.0)
        """
        return _exponent(short, long, self.connections)

    def mask(self, length: int) -> Tensor:
        """A boolean mask ``(T, T)``, True where the atom is present, for :func:`massieu.attend` and torch."""
        return self.at(length).mask()

    def log_weights(self, length: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """The same as log weights: zero where the atom is present, minus infinity elsewhere."""
        mask = self.mask(length)
        return torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, -torch.inf)

    def laid_out(self, length: int) -> Pattern:
        """This pattern among ``length`` tokens, for the first so many of them, as in a cache until all are there.

        Example:
            >>> from massieu.patterns import ring
            >>> whole = ring().laid_out(100)
            >>> ring().connections(3), whole.connections(3), whole.connections(100)
            (9, 7, 300)
        """
        rule = functools.partial(_first, self.at(length))
        return Pattern(f"{self.name} on {length} tokens", rule, self.causal, self.self_loops, stable=True)

    def __or__(self, other: Pattern) -> Pattern:
        if not isinstance(other, Pattern):
            return NotImplemented
        return Pattern(
            f"{self.name} | {other.name}",
            functools.partial(_union, self, other),
            causal=self.causal and other.causal,
            self_loops=False,  # the parts have theirs
            stable=self.stable and other.stable,
        )

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True, eq=False)
class Schedule:
    """Patterns that layers use in turn: layer ``t``, from zero, uses pattern ``t mod p``.

    Example:
        >>> from massieu.patterns import strided
        >>> schedule = strided(16)
        >>> len(schedule), schedule.connections(256), schedule[2].connections(256)
        (2, (4280, 4096), 4280)
    """

    patterns: tuple[Pattern, ...]
    name: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.patterns, (tuple, list)) or not all(isinstance(each, Pattern) for each in self.patterns):
            raise TypeError(f"a schedule is made of several patterns, got {self.patterns!r}; pass a tuple of them")
        if not self.patterns:
            raise ValueError("a schedule must have at least one pattern, got none; full() is ordinary attention")
        object.__setattr__(self, "patterns", tuple(self.patterns))

    def __len__(self) -> int:
        return len(self.patterns)

    def __getitem__(self, layer: int) -> Pattern:
        return self.patterns[layer % len(self.patterns)]

    def __iter__(self) -> Iterator[Pattern]:
        return iter(self.patterns)

    def at(self, length: int) -> tuple[Edges, ...]:
        """The connections of each pattern among ``length`` tokens."""
        return tuple(pattern.at(length) for pattern in self.patterns)

    def union(self) -> Pattern:
        """All connections in one pattern."""
        return functools.reduce(lambda first, second: first | second, self.patterns)

    def connections(self, length: int) -> tuple[int, ...]:
        """Number of connections of each pattern."""
        return tuple(pattern.connections(length) for pattern in self.patterns)

    def growth(self, short: int = 256, long: int = 1024) -> float:
        """Exponent with which connections of all patterns together grow between two lengths."""
        return _exponent(short, long, lambda length: sum(self.connections(length)))

    def __repr__(self) -> str:
        return self.name or f"schedule of {', '.join(map(repr, self.patterns))}"


def as_schedule(schedule: Pattern | Schedule | Iterable[Pattern]) -> Schedule:
    """A pattern, a schedule or several patterns as a schedule."""
    if isinstance(schedule, Schedule):
        return schedule
    if isinstance(schedule, Pattern):
        return Schedule((schedule,), schedule.name)
    patterns = tuple(schedule) if isinstance(schedule, (list, tuple)) else (schedule,)
    strange = [each for each in patterns if not isinstance(each, Pattern)]
    if strange:
        got: Any = type(strange[0]).__name__
        raise TypeError(
            f"a schedule must be a pattern, a Schedule or a list of patterns, got {got}; from_mask makes a pattern of a"
            " boolean matrix"
        )
    return Schedule(patterns)


# Masks are asked for layer by layer, and a layer has few lengths.
@functools.lru_cache(maxsize=16)
def _edges(pattern: Pattern, length: int) -> Edges:
    found = pattern.rule(length)
    if pattern.causal:
        found = found & triangle(length)
    if pattern.self_loops and not found.has_self_loops:
        found = found | Edges.where(length, lambda query, atom: query == atom)
    return found


def _union(first: Pattern, second: Pattern, length: int) -> Edges:
    return first.at(length) | second.at(length)


def _first(edges: Edges, length: int) -> Edges:
    if length > edges.length:
        raise ValueError(f"the pattern was laid out for {edges.length} tokens, got {length}; lay it out for more")
    return Edges.of_mask(edges.unpack(slice(length))[:, :length])


def _exponent(short: int, long: int, count: Callable[[int], int]) -> float:
    if not 0 < short < long:
        raise ValueError(f"growth needs two lengths, the shorter first, got {short} and {long}; try 256 and 1024")
    return math.log(count(long) / count(short)) / math.log(long / short)
