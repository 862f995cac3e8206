"""Connections, paths and layers to full reach of every pattern, against figures known before."""

import time

import pytest

from massieu.patterns import (
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


@pytest.mark.parametrize(
    ("schedule", "totals"),
    [
        (lambda stride: window(1), {64: (190,), 1024: (3070,)}),
        (lambda stride: star_ring(), {64: (316,), 1024: (5116,)}),
        (lambda stride: global_window(2, 1), {64: (436,), 1024: (7156,)}),
        (lambda stride: bigbird(1, 2, 3, seed=0), {64: (607,), 1024: (10208,)}),
        (strided, {64: (556, 512), 1024: (33520, 32768)}),
    ],
)
def test_connections_at_64_and_1024_tokens(schedule, totals):
    for length, connections in totals.items():
        found = check_universality(schedule({64: 8, 1024: 32}[length]), length)
        assert found.connections == connections
        assert found.theorem == "Yun 2020"


def test_the_stride_is_the_root_of_the_length_by_default():
    assert strided().connections(256) == strided(16).connections(256)
    assert fixed().connections(1024) == fixed(32).connections(1024)


@pytest.mark.parametrize(
    ("pattern", "exponent"),
    [(star_ring(), 1.0), (global_window(2), 1.0), (bigbird(), 1.0), (strided(), 1.5), (fixed(), 1.5), (full(), 2.0)],
    ids=repr,
)
def test_connections_grow_with_the_exponent_that_papers_say(pattern, exponent):
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


def test_draws_of_another_seed_are_other_draws_and_hardly_fewer():
    counts = {bigbird(1, 2, 3, seed=seed).connections(256) for seed in range(8)}
    assert len(counts) > 3
    most = 1780 + 3 * 254  # if no draw hit what is there
    assert max(counts) <= most
    assert min(counts) > most - 40
