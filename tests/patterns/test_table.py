"""Connections, paths and layers to full reach of every pattern, against known values."""

import math
import time

import pytest

from massieu.patterns import (
    Schedule,
    bigbird,
    causal,
    causal_strided,
    check_universality,
    dilated,
    fixed,
    full,
    global_window,
    is_hamiltonian,
    powers_of_two,
    random_regular,
    ring,
    star,
    star_ring,
    strided,
    window,
)

# Schedule, connections of each pattern at 256 tokens, path, layers to full reach, layers to causal reach, theorem.
TABLE = [
    (window(1), (766,), True, 255, None, "Yun 2020"),
    (window(2), (1274,), True, 128, None, "Yun 2020"),
    (dilated(2, 2), (1268,), False, None, None, "none"),
    (star(), (766,), False, 2, None, "BigBird star"),
    (ring(), (768,), True, 128, None, "Yun 2020"),
    (star_ring(), (1276,), True, 2, None, "Yun 2020"),
    (strided(16), (4280, 4096), True, 3, None, "Yun 2020"),
    (fixed(16), (4096, 4336), True, 2, None, "Yun 2020"),
    (fixed(16)[1], (4336,), False, None, None, "none"),
    (strided(16)[1], (4096,), False, None, None, "none"),
    (global_window(2, 1), (1780,), True, 2, None, "Yun 2020"),
    (bigbird(1, 2, 3, seed=0), (2523,), True, 2, None, "Yun 2020"),
    (powers_of_two(), (3842,), True, 5, None, "Yun 2020"),
    (causal(), (32896,), True, None, 1, "none"),
    (causal_strided(16), (2268, 2176), True, None, 3, "none"),
    (full(), (65536,), True, 1, None, "Yun 2020"),
]


@pytest.mark.parametrize(("schedule", "connections", "path", "layers", "causal_layers", "theorem"), TABLE, ids=repr)
def test_the_table_at_256_tokens(schedule, connections, path, layers, causal_layers, theorem):
    found = check_universality(schedule, 256)
    assert found.connections == connections
    assert found.self_loops
    assert found.path is path
    assert (found.certificate is not None) is path
    assert (found.reach_layers, found.reach.causal_layers) == (layers, causal_layers)
    assert found.theorem == theorem


# Schedule with the root of the length as stride, connections, layers to full reach and to causal reach, by length T = r².
OTHERS = [
    (lambda r: window(1), lambda T, r: (3 * T - 2,), lambda T: T - 1, None, True, "Yun 2020"),
    (lambda r: window(2), lambda T, r: (5 * T - 6,), lambda T: T // 2, None, True, "Yun 2020"),
    (lambda r: dilated(2, 2), lambda T, r: (5 * T - 12,), None, None, False, "none"),
    (lambda r: star(), lambda T, r: (3 * T - 2,), 2, None, False, "BigBird star"),
    (lambda r: ring(), lambda T, r: (3 * T,), lambda T: T // 2, None, True, "Yun 2020"),
    (lambda r: star_ring(), lambda T, r: (5 * T - 4,), 2, None, True, "Yun 2020"),
    (strided, lambda T, r: (T * (r + 1) - r // 2 * (r // 2 + 1), T * r), 3, None, True, "Yun 2020"),
    (fixed, lambda T, r: (T * r, T * (r + 1) - r), 2, None, True, "Yun 2020"),
    (lambda r: fixed(r)[1], lambda T, r: (T * (r + 1) - r,), None, None, False, "none"),
    (lambda r: strided(r)[1], lambda T, r: (T * r,), None, None, False, "none"),
    (lambda r: global_window(2, 1), lambda T, r: (7 * T - 12,), 2, None, True, "Yun 2020"),
    (lambda r: bigbird(1, 2, 3, seed=0), lambda T, r: ({64: 607, 1024: 10208}[T],), 2, None, True, "Yun 2020"),
    (
        lambda r: powers_of_two(),
        lambda T, r: (T + 2 * (T * (T.bit_length() - 1) - T + 1),),
        lambda T: {64: 4, 1024: 6}[T],
        None,
        True,
        "Yun 2020",
    ),
    (lambda r: causal(), lambda T, r: (T * (T + 1) // 2,), None, 1, True, "none"),
    (
        causal_strided,
        lambda T, r: (T * (r // 2 + 1) - r // 2 * (r // 2 + 1) // 2, r * (T // r) * (T // r + 1) // 2),
        None,
        3,
        True,
        "none",
    ),
    (lambda r: full(), lambda T, r: (T * T,), 1, None, True, "Yun 2020"),
]


@pytest.mark.parametrize("length", [64, 1024])
@pytest.mark.parametrize(("make", "connections", "layers", "causal_layers", "path", "theorem"), OTHERS)
def test_the_table_at_64_and_1024_tokens(make, connections, layers, causal_layers, path, theorem, length):
    root = math.isqrt(length)
    schedule = make(root)
    found = check_universality(schedule, length)
    assert found.connections == connections(length, root)
    assert found.path is path
    layers = layers(length) if callable(layers) else layers
    assert (found.reach_layers, found.reach.causal_layers) == (layers, causal_layers)
    assert found.theorem == theorem
    if layers is not None and layers < 9:  # dense products are full after exactly this number of layers
        masks = [each.mask(length).float() for each in (schedule if isinstance(schedule, Schedule) else [schedule])]
        known, dense = masks[0], 1
        while not known.all():
            known, dense = (masks[dense % len(masks)] @ known).clamp(max=1), dense + 1
        assert dense == layers


def test_the_stride_is_the_root_of_the_length_by_default():
    assert strided().connections(256) == strided(16).connections(256)
    assert fixed().connections(1024) == fixed(32).connections(1024)


@pytest.mark.parametrize(
    ("pattern", "exponent"),
    [(star_ring(), 1.0), (global_window(2), 1.0), (bigbird(), 1.0), (strided(), 1.5), (fixed(), 1.5), (full(), 2.0)],
    ids=repr,
)
def test_connections_grow_with_the_exponent_of_the_papers(pattern, exponent):
    assert pattern.growth(256, 4096) == pytest.approx(exponent, abs=0.02)


@pytest.mark.parametrize(
    ("schedule", "path", "layers"),
    [(window(1), True, 4095), (random_regular(4), True, None), (strided(64), True, 3), (star(), False, 2)],
    ids=repr,
)
def test_4096_tokens_are_checked_within_ten_seconds(schedule, path, layers):
    begin = time.process_time()
    found = check_universality(schedule, 4096)
    assert time.process_time() - begin < 10
    assert found.path is path
    assert layers in (None, found.reach_layers)
    assert found.certificate is None or is_hamiltonian(
        schedule.union().at(4096) if layers == 3 else schedule.at(4096), found.certificate
    )


def test_seeds_change_the_draws_and_their_number_little():
    counts = {bigbird(1, 2, 3, seed=seed).connections(256) for seed in range(8)}
    assert len(counts) > 3
    most = 1780 + 3 * 254  # if every draw adds a connection
    assert max(counts) <= most
    assert min(counts) > most - 40
