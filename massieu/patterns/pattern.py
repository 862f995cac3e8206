"""Sparse patterns for sequences of any length, and schedules of them."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from massieu.checks import UserError, check_count
from massieu.patterns.edges import Edges, triangle

__all__ = ["Pattern", "Schedule", "as_schedule", "causal_name"]


@dataclass(frozen=True, eq=False)
class Pattern:
    r"""Sparse attention pattern: sets :math:`A_k \subseteq \{0, \dots, T - 1\}` of visible tokens for every length T.

    Attributes:
        name: shown in reports, such as ``"window(2)"``.
        rule: edges at a length.
        causal: True leaves out later tokens.
        self_loops: True adds missing self-loops.
        stable: True if a token sees the same earlier tokens at every length, as in a window and not in a ring. A cache
            needs this; see :meth:`laid_out` for other patterns.

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
        """Return the edges among ``length`` tokens."""
        return _edges(self, check_count(length, "length"))

    def connections(self, length: int) -> int:
        """Return the number of edges, self-loops included."""
        return self.at(length).connections

    def density(self, length: int) -> float:
        """Return the edges as a share of all pairs."""
        return self.connections(length) / length**2

    def growth(self, short: int = 256, long: int = 1024) -> float:
        """Return the exponent of the growth of connections between two lengths: 1 is linear, 2 is full attention.

        Example:
            >>> from massieu.patterns import full, star_ring, strided
            >>> round(star_ring().growth(), 2), round(strided().growth(), 2), full().growth()
            (1.0, 1.49, 2.0)
        """
        return _exponent(short, long, self.connections)

    def mask(self, length: int) -> Tensor:
        """Return a boolean mask ``(T, T)``, True where the atom is present, for :func:`massieu.attend` and torch."""
        return self.at(length).mask()

    def log_weights(self, length: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the mask as log weights: zero where the atom is present, minus infinity elsewhere."""
        mask = self.mask(length)
        return torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, -torch.inf)

    def laid_out(self, length: int) -> Pattern:
        """Return this pattern at one length, restricted to the first tokens at smaller lengths, as in a cache.

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
            self_loops=False,  # each operand has its own
            stable=self.stable and other.stable,
        )

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True, eq=False)
class Schedule:
    """Patterns that layers use in turn: layer ``t``, counted from zero, uses pattern ``t mod p``.

    Example:
        >>> from massieu.patterns import strided
        >>> schedule = strided(16)
        >>> len(schedule), schedule.connections(256), schedule[2].connections(256)
        (2, (4280, 4096), 4280)
    """

    patterns: tuple[Pattern, ...]
    name: str = ""

    def __post_init__(self) -> None:
        given = self.patterns
        if not isinstance(given, (tuple, list)) or not given or not all(isinstance(each, Pattern) for each in given):
            raise UserError(
                f"patterns must be a tuple of one or more patterns, got {given!r}; full() is full attention"
            )
        object.__setattr__(self, "patterns", tuple(given))

    def __len__(self) -> int:
        return len(self.patterns)

    def __getitem__(self, layer: int) -> Pattern:
        return self.patterns[layer % len(self.patterns)]

    def __iter__(self) -> Iterator[Pattern]:
        return iter(self.patterns)

    def at(self, length: int) -> tuple[Edges, ...]:
        """Return the edges of each pattern among ``length`` tokens."""
        return tuple(pattern.at(length) for pattern in self.patterns)

    def union(self) -> Pattern:
        """Return one pattern with the edges of all."""
        return functools.reduce(operator.or_, self.patterns)

    def connections(self, length: int) -> tuple[int, ...]:
        """Return the number of edges of each pattern."""
        return tuple(pattern.connections(length) for pattern in self.patterns)

    def growth(self, short: int = 256, long: int = 1024) -> float:
        """Return the exponent of the growth of the connections of all patterns together between two lengths."""
        return _exponent(short, long, lambda length: sum(self.connections(length)))

    def __repr__(self) -> str:
        return self.name or f"schedule of {', '.join(map(repr, self.patterns))}"


def as_schedule(schedule: Pattern | Schedule | Iterable[Pattern]) -> Schedule:
    """Return a pattern, a schedule or several patterns as a schedule."""
    if isinstance(schedule, Schedule):
        return schedule
    if isinstance(schedule, Pattern):
        return Schedule((schedule,), schedule.name)
    if isinstance(schedule, (list, tuple)):
        return Schedule(tuple(schedule))
    got = type(schedule).__name__
    raise UserError(
        f"a schedule must be a Pattern, a Schedule or a list of patterns, got {got}; from_mask makes a pattern of a"
        " boolean matrix"
    )


def causal_name(name: str, causal: bool) -> str:
    """Return the name of a pattern, or that of its causal half."""
    return f"causal {name}" if causal else name


# Layers request masks one after the other, and use few lengths.
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
        raise UserError(f"the pattern was laid out for {edges.length} tokens, got {length}; lay it out for more")
    return Edges.of_mask(edges.unpack(slice(length))[:, :length])


def _exponent(short: int, long: int, count: Callable[[int], int]) -> float:
    if not 0 < short < long:
        raise UserError(f"growth needs two lengths, the shorter first, got {short} and {long}; try 256 and 1024")
    return math.log(count(long) / count(short)) / math.log(long / short)
