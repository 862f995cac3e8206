"""The patterns that people use, each for any length; every token sees itself in all of them."""

from __future__ import annotations

import functools
from collections.abc import Callable

from massieu.patterns.drawn import bigbird_edges, regular_edges
from massieu.patterns.edges import Edges
from massieu.patterns.given import check_count, named
from massieu.patterns.pattern import Pattern, Schedule
from massieu.patterns.rules import (
    dilated_edges,
    full_edges,
    global_window_edges,
    last_of_block_edges,
    multiple_edges,
    near_edges,
    own_block_edges,
    power_edges,
    ring_edges,
    star_edges,
)

__all__ = [
    "bigbird",
    "causal",
    "causal_strided",
    "dilated",
    "fixed",
    "full",
    "global_window",
    "powers_of_two",
    "random_regular",
    "ring",
    "star",
    "star_ring",
    "strided",
    "window",
]

Rule = Callable[[int | None, int], Edges]


def full(*, causal: bool = False) -> Pattern:
    """Every token sees every token.

    Example:
        >>> full().connections(256)
        65536
    """
    return Pattern(named("full", causal), full_edges, causal, stable=True)


def causal() -> Pattern:
    """Every token sees itself and all tokens before it.

    Example:
        >>> causal().connections(256)
        32896
    """
    return Pattern("causal", full_edges, causal=True, stable=True)


def window(width: int, *, causal: bool = False) -> Pattern:
    """Tokens at most ``width`` positions away, on both sides or, if causal, behind.

    Example:
        >>> window(1).connections(256)
        766
    """
    check_count(width, "width", 0, "it is the distance that a token sees")
    return Pattern(named(f"window({width})", causal), functools.partial(dilated_edges, width, 1), causal, stable=True)


def dilated(width: int, step: int, *, causal: bool = False) -> Pattern:
    """Every ``step``-th token, ``width`` of them on each side.

    From a step of two on, tokens of different remainder never meet: alone it is not universal.

    Example:
        >>> dilated(2, 2).connections(256)
        1268
    """
    check_count(width, "width", 0, "it is the number of tokens seen on each side")
    check_count(step, "step", 1, "1 is a window")
    return Pattern(
        named(f"dilated({width}, {step})", causal), functools.partial(dilated_edges, width, step), causal, stable=True
    )


def star(hub: int = 0, *, causal: bool = False) -> Pattern:
    """One token, the hub, sees all and is seen by all; the others see themselves besides.

    Example:
        >>> star().connections(256)
        766
    """
    check_count(hub, "hub", 0, "it is the position of the token that sees all")
    return Pattern(named("star", causal), functools.partial(star_edges, hub), causal, stable=True)


def ring(*, causal: bool = False) -> Pattern:
    """Both neighbors, first and last token being neighbors too.

    Example:
        >>> ring().connections(256)
        768
    """
    return Pattern(named("ring", causal), functools.partial(ring_edges, 0), causal)


def star_ring(*, causal: bool = False) -> Pattern:
    """The first token is the hub of a star, and the others are a ring.

    Source:
        Guo et al. 2019, Star-Transformer.

    Example:
        >>> star_ring().connections(256)
        1276
    """
    return Pattern(named("star_ring", causal), functools.partial(ring_edges, 1), causal)


def strided(stride: int | None = None, *, causal: bool = False) -> Schedule:
    """Two patterns in turn: tokens up to half a stride away, then tokens at multiples of the stride.

    Causal, the first one looks half a stride back, where Child et al. look back a whole one.

    Args:
        stride: the root of the length by default.
        causal: no token sees a later one.

    Source:
        Child et al. 2019, in both directions as in Yun et al. 2020.

    Example:
        >>> strided(16).connections(256)
        (4280, 4096)
    """
    return _two("strided", stride, causal, near_edges, multiple_edges)


def causal_strided(stride: int | None = None) -> Schedule:
    """:func:`strided` without later tokens.

    Example:
        >>> causal_strided(16).connections(256)
        (2268, 2176)
    """
    return strided(stride, causal=True)


def fixed(stride: int | None = None, *, causal: bool = False) -> Schedule:
    """Two patterns in turn: the tokens of one's own block, then the last token of every block.

    Where the stride does not divide the length, the last block has no such token and nobody outside hears of it.

    Args:
        stride: size of a block; the root of the length by default.
        causal: no token sees a later one.

    Source:
        Child et al. 2019, in both directions as in Yun et al. 2020.

    Example:
        >>> fixed(16).connections(256)
        (4096, 4336)
    """
    return _two("fixed", stride, causal, own_block_edges, last_of_block_edges)


def global_window(width: int, num_global: int = 1, *, causal: bool = False) -> Pattern:
    """A window, and first tokens that see all and are seen by all.

    Source:
        Beltagy et al. 2020, Longformer.

    Example:
        >>> global_window(2, 1).connections(256)
        1780
    """
    check_count(width, "width", 0, "it is the distance that a token sees")
    check_count(num_global, "num_global", 0, "it is the number of tokens that see all")
    name = named(f"global_window({width}, {num_global})", causal)
    return Pattern(name, functools.partial(global_window_edges, width, num_global), causal, stable=True)


def bigbird(
    width: int = 1, num_global: int = 2, num_random: int = 3, seed: int = 0, *, block: int = 1, causal: bool = False
) -> Pattern:
    """A window, first tokens that see all, and random tokens.

    Every token draws ``num_random`` different tokens among all, by ``numpy.random.default_rng(seed)`` and in the order
    of the tokens. A draw that hits what it sees already adds nothing, so that the number of connections depends a
    little on the seed.

    Args:
        width: distance that a token sees.
        num_global: number of tokens that see all and are seen by all.
        num_random: number of draws.
        seed: decides them.
        block: with more than 1, all this is said of blocks of so many tokens.
        causal: no token sees a later one; draws of later tokens are lost.

    Source:
        Zaheer et al. 2020.

    Example:
        >>> [bigbird(1, 2, 3, seed=0).connections(length) for length in (64, 256, 1024)]
        [607, 2523, 10208]
    """
    check_count(width, "width", 0, "it is the distance that a token sees")
    check_count(num_global, "num_global", 0, "it is the number of tokens that see all")
    check_count(num_random, "num_random", 0, "it is the number of random tokens that each sees")
    check_count(block, "block", 1, "1 connects single tokens")
    check_count(seed, "seed", 0, "it decides the random tokens")
    own = f"bigbird({width}, {num_global}, {num_random}, seed={seed}{f', block={block}' if block > 1 else ''})"
    rule = functools.partial(bigbird_edges, width, num_global, num_random, seed, block)
    return Pattern(named(own, causal), rule, causal)


def powers_of_two(*, causal: bool = False) -> Pattern:
    """Tokens at a distance of 1, 2, 4, 8, ...

    Source:
        Li et al. 2019, LogSparse, in both directions.

    Example:
        >>> powers_of_two().connections(256)
        3842
    """
    return Pattern(named("powers_of_two", causal), power_edges, causal, stable=True)


def random_regular(degree: int, seed: int = 0, *, causal: bool = False) -> Pattern:
    """A random graph in which every token sees ``degree`` others, which see it.

    It starts as a circle in which neighbors up to half the degree see each other, and pairs of edges swap their ends
    at random, which keeps every degree. Where there are no more than ``degree`` others, all are seen.

    Example:
        >>> random_regular(4).connections(256)
        1280
    """
    check_count(degree, "degree", 0, "it is the number of other tokens that each sees")
    check_count(seed, "seed", 0, "it decides the edges")
    rule = functools.partial(regular_edges, degree, seed)
    return Pattern(named(f"random_regular({degree}, seed={seed})", causal), rule, causal)


def _two(name: str, stride: int | None, causal: bool, first: Rule, second: Rule) -> Schedule:
    if stride is not None:
        check_count(stride, "stride", 1, "None takes the root of the length")
    own = f"{name}({'' if stride is None else stride})"
    patterns = [
        Pattern(named(f"{own}[{number}]", causal), functools.partial(rule, stride), causal, stable=stride is not None)
        for number, rule in enumerate((first, second))
    ]
    return Schedule(tuple(patterns), named(own, causal))
