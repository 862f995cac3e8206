"""Pattern families of the literature, for any length; every token sees itself in all of them."""

from __future__ import annotations

import functools
from collections.abc import Callable

from massieu.checks import check_count
from massieu.patterns.edges import Edges
from massieu.patterns.family_edges import (
    bigbird_edges,
    dilated_edges,
    full_edges,
    global_window_edges,
    last_of_block_edges,
    multiple_edges,
    near_edges,
    own_block_edges,
    power_edges,
    regular_edges,
    ring_edges,
    star_edges,
)
from massieu.patterns.pattern import Pattern, Schedule, causal_name

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


def full(*, causal: bool = False) -> Pattern:
    """Return the pattern in which every token sees every token.

    Example:
        >>> full().connections(256)
        65536
    """
    return _pattern("full", causal, full_edges, stable=True)


def causal() -> Pattern:
    """Return the pattern in which every token sees itself and all earlier tokens.

    Example:
        >>> causal().connections(256)
        32896
    """
    return Pattern("causal", full_edges, causal=True, stable=True)


def window(width: int, *, causal: bool = False) -> Pattern:
    """Return a sliding window: tokens at most ``width`` positions away, on both sides or, if causal, behind.

    Example:
        >>> window(1).connections(256)
        766
    """
    check_count(width, "width", least=0)
    return _pattern(f"window({width})", causal, dilated_edges, width, 1, stable=True)


def dilated(width: int, step: int, *, causal: bool = False) -> Pattern:
    """Return a dilated window: every ``step``-th token, ``width`` of them on each side.

    With a step of two or more it is not universal alone: tokens in different residue classes never see each other.

    Example:
        >>> dilated(2, 2).connections(256)
        1268
    """
    check_count(width, "width", least=0)
    check_count(step, "step", remedy="1 is a window")
    return _pattern(f"dilated({width}, {step})", causal, dilated_edges, width, step, stable=True)


def star(hub: int = 0, *, causal: bool = False) -> Pattern:
    """Return a star: one token, the hub, sees all and is seen by all; every other token sees itself and the hub.

    Example:
        >>> star().connections(256)
        766
    """
    check_count(hub, "hub", least=0)
    return _pattern("star", causal, star_edges, hub, stable=True)


def ring(*, causal: bool = False) -> Pattern:
    """Return a ring: both neighbors, with the first and the last token as neighbors.

    Example:
        >>> ring().connections(256)
        768
    """
    return _pattern("ring", causal, ring_edges, 0)


def star_ring(*, causal: bool = False) -> Pattern:
    """Return a star with the first token as hub, and a ring of all other tokens.

    Source:
        Guo et al. 2019, Star-Transformer.

    Example:
        >>> star_ring().connections(256)
        1276
    """
    return _pattern("star_ring", causal, ring_edges, 1)


def strided(stride: int | None = None, *, causal: bool = False) -> Schedule:
    """Return two patterns in turn: tokens at most half a stride away, then tokens at multiples of the stride.

    The causal first pattern looks back half a stride; that of Child et al. looks back a whole one.

    Args:
        stride: None for the square root of the length.
        causal: leave out later tokens.

    Source:
        Child et al. 2019, in both directions as in Yun et al. 2020.

    Example:
        >>> strided(16).connections(256)
        (4280, 4096)
    """
    return _pair("strided", stride, causal, near_edges, multiple_edges)


def causal_strided(stride: int | None = None) -> Schedule:
    """Return :func:`strided` without later tokens.

    Example:
        >>> causal_strided(16).connections(256)
        (2268, 2176)
    """
    return strided(stride, causal=True)


def fixed(stride: int | None = None, *, causal: bool = False) -> Schedule:
    """Return two patterns in turn: the tokens of the same block, then the last token of every block.

    If the stride does not divide the length, the last block has no such token, and no other block reaches it.

    Args:
        stride: size of a block; None for the square root of the length.
        causal: leave out later tokens.

    Source:
        Child et al. 2019, in both directions as in Yun et al. 2020.

    Example:
        >>> fixed(16).connections(256)
        (4096, 4336)
    """
    return _pair("fixed", stride, causal, own_block_edges, last_of_block_edges)


def global_window(width: int, num_global: int = 1, *, causal: bool = False) -> Pattern:
    """Return a window, and first tokens that see all and are seen by all.

    Source:
        Beltagy et al. 2020, Longformer.

    Example:
        >>> global_window(2, 1).connections(256)
        1780
    """
    check_count(width, "width", least=0)
    check_count(num_global, "num_global", least=0)
    return _pattern(
        f"global_window({width}, {num_global})", causal, global_window_edges, width, num_global, stable=True
    )


def bigbird(
    width: int = 1, num_global: int = 2, num_random: int = 3, seed: int = 0, *, block: int = 1, causal: bool = False
) -> Pattern:
    """Return a window, first tokens that see all, and random tokens.

    Every token draws ``num_random`` different tokens among all, by ``numpy.random.default_rng(seed)`` and in the order
    of the tokens. A draw of a token that is already seen adds no connection, so their number depends on the seed.

    Args:
        width: distance to either side.
        num_global: number of tokens that see all and are seen by all.
        num_random: number of draws.
        seed: of the draws.
        block: size of the blocks of tokens that take the place of single tokens.
        causal: leave out later tokens, drawn ones too.

    Source:
        Zaheer et al. 2020.

    Example:
        >>> [bigbird(1, 2, 3, seed=0).connections(length) for length in (64, 256, 1024)]
        [607, 2523, 10208]
    """
    for value, name in ((width, "width"), (num_global, "num_global"), (num_random, "num_random"), (seed, "seed")):
        check_count(value, name, least=0)
    check_count(block, "block", remedy="1 connects single tokens")
    name = f"bigbird({width}, {num_global}, {num_random}, seed={seed}{f', block={block}' if block > 1 else ''})"
    return _pattern(name, causal, bigbird_edges, width, num_global, num_random, seed, block)


def powers_of_two(*, causal: bool = False) -> Pattern:
    """Return tokens at a distance of 1, 2, 4, 8, ...

    Source:
        Li et al. 2019, LogSparse, in both directions.

    Example:
        >>> powers_of_two().connections(256)
        3842
    """
    return _pattern("powers_of_two", causal, power_edges, stable=True)


def random_regular(degree: int, seed: int = 0, *, causal: bool = False) -> Pattern:
    """Return a random symmetric graph in which every token sees ``degree`` others.

    It starts as a circle in which neighbors up to half the degree see each other. Random pairs of edges then swap their
    ends, which keeps every degree. With at most ``degree`` other tokens, every token sees all.

    Example:
        >>> random_regular(4).connections(256)
        1280
    """
    check_count(degree, "degree", least=0)
    check_count(seed, "seed", least=0)
    return _pattern(f"random_regular({degree}, seed={seed})", causal, regular_edges, degree, seed)


def _pattern(
    name: str, causal: bool, rule: Callable[..., Edges], *arguments: int | None, stable: bool = False
) -> Pattern:
    return Pattern(causal_name(name, causal), functools.partial(rule, *arguments), causal, stable=stable)


def _pair(name: str, stride: int | None, causal: bool, *rules: Callable[[int | None, int], Edges]) -> Schedule:
    if stride is not None:
        check_count(stride, "stride", remedy="None takes the root of the length")
    name, stable = f"{name}({'' if stride is None else stride})", stride is not None
    patterns = [_pattern(f"{name}[{i}]", causal, rule, stride, stable=stable) for i, rule in enumerate(rules)]
    return Schedule(tuple(patterns), causal_name(name, causal))
