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

# Schedule with stride r = √T, connections, layers to full reach and to causal reach.
TABLE = [
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
    (
        lambda r: bigbird(1, 2, 3, seed=0),
        lambda T, r: ({64: 607, 256: 2523, 1024: 10208}[T],),
        2,
        None,
        True,
        "Yun 2020",
    ),
    (
        lambda r: powers_of_two(),
        lambda T, r: (T + 2 * (T * (T.bit_length() - 1) - T + 1),),
        lambda T: {64: 4, 256: 5, 1024: 6}[T],
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


@pytest.mark.parametrize("length", [64, 256, 1024])
@pytest.mark.parametrize(("make", "connections", "layers", "causal_layers", "path", "theorem"), TABLE)
def test_the_table_at_several_lengths(make, connections, layers, causal_layers, path, theorem, length):
    root = math.isqrt(length)
    schedule = make(root)
    found = check_universality(schedule, length)
    assert found.connections == connections(length, root)
    assert found.self_loops
    assert found.path is path
    assert (found.certificate is not None) is path
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
