"""Paths and reach of short sequences, against all permutations and dense products."""

import itertools

import numpy as np
import pytest

from massieu.patterns import (
    Schedule,
    bigbird,
    causal,
    causal_strided,
    check_universality,
    dilated,
    fixed,
    from_mask,
    full,
    global_window,
    hamiltonian_path,
    is_hamiltonian,
    powers_of_two,
    random_regular,
    reach,
    reach_by_layer,
    reachability,
    ring,
    star,
    star_ring,
    strided,
    window,
)
from massieu.patterns.hamiltonian import _refutation
from massieu.patterns.pattern import as_schedule

BOTH = [
    lambda causal: full(causal=causal),
    lambda causal: window(1, causal=causal),
    lambda causal: window(2, causal=causal),
    lambda causal: dilated(1, 2, causal=causal),
    lambda causal: dilated(2, 2, causal=causal),
    lambda causal: star(causal=causal),
    lambda causal: ring(causal=causal),
    lambda causal: star_ring(causal=causal),
    lambda causal: strided(2, causal=causal),
    lambda causal: strided(3, causal=causal),
    lambda causal: strided(causal=causal),
    lambda causal: strided(3, causal=causal)[1],
    lambda causal: fixed(2, causal=causal),
    lambda causal: fixed(3, causal=causal),
    lambda causal: fixed(3, causal=causal)[1],
    lambda causal: global_window(1, 1, causal=causal),
    lambda causal: bigbird(1, 1, 1, seed=3, causal=causal),
    lambda causal: bigbird(0, 0, 2, seed=1, block=2, causal=causal),
    lambda causal: powers_of_two(causal=causal),
    lambda causal: random_regular(2, causal=causal),
]
FAMILIES = [family(causal) for family in BOTH for causal in (False, True)] + [causal(), causal_strided(2)]


def masks(schedule, length):
    return [pattern.mask(length).numpy() for pattern in as_schedule(schedule)]


def path_exists(union):
    """Some permutation in which each token is seen by the next."""
    return any(
        all(union[after, before] for before, after in itertools.pairwise(order))
        for order in itertools.permutations(range(len(union)))
    )


def layers_to(target, matrices, most=60):
    """Products of matrices of whole numbers, until exactly the target is positive."""
    found = matrices[0].astype(int)
    for layer in range(1, most):
        if np.array_equal(found > 0, target):
            return layer
        found = np.minimum(matrices[layer % len(matrices)].astype(int) @ found, 1)
    return None


@pytest.mark.parametrize("schedule", FAMILIES, ids=repr)
def test_paths_and_reach_are_those_of_enumeration(schedule):
    for length in range(1, 7):
        matrices = masks(schedule, length)
        found = check_universality(schedule, length)
        assert found.connections == tuple(int(matrix.sum()) for matrix in matrices)
        assert found.self_loops == all(matrix.diagonal().all() for matrix in matrices)
        union = np.logical_or.reduce(matrices)
        assert found.path is path_exists(union)
        assert found.reach_layers == layers_to(np.ones_like(union), matrices)
        hubs = np.logical_and.reduce([matrix.all(0) & matrix.all(1) for matrix in matrices])
        assert (found.hub is not None) == hubs.any()
        if found.reach.causal_layers is not None:
            assert found.reach.causal_layers == layers_to(np.tril(np.ones_like(union)), matrices)
        elif not np.triu(union, 1).any() and length > 1:
            assert layers_to(np.tril(np.ones_like(union)), matrices) is None


@pytest.mark.parametrize("schedule", FAMILIES, ids=repr)
def test_a_causal_pattern_is_the_lower_half_and_no_pattern_misses_a_self_loop(schedule):
    for length in (1, 2, 5, 70):
        for pattern in as_schedule(schedule):
            mask = pattern.mask(length)
            assert mask.diagonal().all()
            assert not (pattern.causal and mask.triu(1).any())


def drawn(generator, length, share, self_loops):
    mask = generator.random((length, length)) < share
    if self_loops:
        np.fill_diagonal(mask, True)
    return mask


@pytest.mark.parametrize("self_loops", [True, False])
def test_random_graphs_agree_with_enumeration(self_loops):
    generator = np.random.default_rng(0)
    answers = set()
    for _ in range(60):
        matrices = [drawn(generator, 5, 0.35, self_loops) for _ in range(generator.integers(1, 4))]
        found = check_universality([from_mask(mask, self_loops=False) for mask in matrices], 5)
        union = np.logical_or.reduce(matrices)
        assert found.path is path_exists(union)
        assert found.reach_layers == layers_to(np.ones_like(union), matrices)
        assert found.self_loops == all(mask.diagonal().all() for mask in matrices)
        answers.add((found.path, found.reach_layers is None))
    assert len(answers) >= 3  # both answers to both questions were put to the test


def test_a_refutation_is_never_wrong():
    generator = np.random.default_rng(1)
    refuted = 0
    for _ in range(400):
        mask = drawn(generator, 6, generator.uniform(0.1, 0.5), True)
        edges = from_mask(mask).at(6)
        against = _refutation(edges.numbers(), edges.transpose().numbers())
        if against:
            refuted += 1
            assert not path_exists(mask), against
    assert refuted > 100


def hidden_path(generator, length, extra):
    """A random path and a few random connections besides."""
    order = generator.permutation(length)
    mask = np.eye(length, dtype=bool)
    mask[order[1:], order[:-1]] = True
    mask[tuple(generator.integers(0, length, (2, extra)))] = True
    return mask


@pytest.mark.parametrize("length", [10, 18])
def test_held_and_karp_find_a_hidden_path_and_miss_one_without_its_middle(length):
    generator = np.random.default_rng(length)
    edges = from_mask(hidden_path(generator, length, 6)).at(length)
    found = hamiltonian_path(edges)
    assert found.exists is True
    assert is_hamiltonian(edges, found.order)
    mask = hidden_path(generator, length, 0)
    last = next(iter(np.argwhere(mask & ~np.eye(length, dtype=bool))))
    mask[tuple(last)] = False
    assert hamiltonian_path(from_mask(mask).at(length)).exists is False


def test_the_search_finds_paths_in_random_regular_graphs_that_no_order_shows():
    for seed in range(4):
        edges = random_regular(4, seed).at(100)
        found = hamiltonian_path(edges)
        assert found.message.startswith("found by search")
        assert is_hamiltonian(edges, found.order)


def test_the_search_finds_a_directed_path():
    mask = hidden_path(np.random.default_rng(0), 40, 20)
    edges = from_mask(mask).at(40)
    assert not (edges & edges.transpose()).counts.max() > 20  # hardly anything goes both ways
    found = hamiltonian_path(edges, max_steps=40)
    assert found.exists is True
    assert is_hamiltonian(edges, found.order)


def test_the_answer_is_unknown_without_a_path_and_without_a_reason():
    edges = random_regular(3, 1).at(1000)
    found = hamiltonian_path(edges, max_steps=0)
    assert found.exists is None
    assert found.message == "no path was found in 0 searches, and none was ruled out"
    assert check_universality(Schedule((random_regular(4),)), 30).theorem == "Yun 2020"


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        (star().at(30), "without token 0 there remain 29 components, and a path leaves at most 2"),
        (dilated(2, 2).at(30), "the tokens fall into 2 unconnected components"),
        (
            fixed(5)[1].at(30),
            "24 tokens are seen by no other token, such as 0 and 1, and a path has one such end",
        ),
        (
            from_mask(star().mask(30).numpy() & np.tril(np.ones((30, 30), dtype=bool))).at(30),
            "29 tokens are seen by no other token, such as 1 and 2, and a path has one such end",
        ),
    ],
)
def test_a_refutation_gives_a_reason(edges, message):
    found = hamiltonian_path(edges)
    assert (found.exists, found.order, found.message) == (False, None, message)


def test_components_without_a_common_order_refute_a_path():
    """Two cycles that both see a third and no other: no path visits both."""
    mask = np.eye(30, dtype=bool)
    for start in (0, 10, 20):
        own = np.arange(start, start + 10)
        mask[own, np.roll(own, 1)] = True
    mask[12, 3] = mask[25, 7] = True
    found = hamiltonian_path(from_mask(mask).at(30))
    assert found.exists is False
    assert "no path can visit one after the other" in found.message
    mask[25, 14] = True
    assert hamiltonian_path(from_mask(mask).at(30), max_steps=20).exists is not False


def test_a_permutation_that_is_no_path_is_no_certificate():
    edges = window(1).at(5)
    assert is_hamiltonian(edges, [0, 1, 2, 3, 4])
    assert not is_hamiltonian(edges, [0, 1, 2, 4, 3])
    assert not is_hamiltonian(edges, [0, 1, 2, 3, 3])
    assert not is_hamiltonian(from_mask(np.tril(np.ones((5, 5), dtype=bool))).at(5), [4, 3, 2, 1, 0])


@pytest.mark.parametrize("share", [1.5, 0.05, 0.0])
def test_layers_of_longer_schedules_agree_with_dense_products(share, monkeypatch):
    generator = np.random.default_rng(2)
    calls = []
    original = reachability._spread
    monkeypatch.setattr(reachability, "_spread", lambda *given: calls.append(given) or original(*given))
    for length in (70, 130):
        matrices = [
            drawn(generator, length, share / length, True) | np.eye(length, k=k, dtype=bool) for k in (-1, 1, 2)
        ]
        found = reach([from_mask(mask) for mask in matrices], length)
        assert found.layers == layers_to(np.ones((length, length), dtype=bool), matrices, most=10**4)
        sets = reach_by_layer([from_mask(mask) for mask in matrices], length, found.layers)
        assert found.counts == tuple(each.connections for each in sets)
    assert bool(calls) == (share < 1)  # few news are followed pair by pair, many as rows of bits
