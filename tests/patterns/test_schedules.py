"""Stable patterns, unions, reach without self-loops, and bad input."""

import json
import tracemalloc

import numpy as np
import pytest
import torch

from massieu.checks import UserError
from massieu.patterns import (
    Schedule,
    bigbird,
    boolean_product,
    causal,
    check_universality,
    dilated,
    fixed,
    from_edges,
    from_mask,
    full,
    global_window,
    hamiltonian_path,
    is_hamiltonian,
    powers_of_two,
    random_regular,
    reach,
    reach_by_layer,
    ring,
    sparse_plan,
    star,
    star_ring,
    strided,
    window,
)

STABLE = [
    full(),
    causal(),
    window(2),
    dilated(2, 3),
    star(),
    *strided(4),
    *fixed(4),
    global_window(1, 2),
    powers_of_two(),
    window(1) | star(),
    ring().laid_out(20),
]
CHANGING = [*strided(), *fixed(), ring(), star_ring(), bigbird(1, 1, 2), random_regular(4), window(1) | ring()]


def earlier(pattern, length):
    return pattern.mask(length).tril()


@pytest.mark.parametrize("pattern", [*STABLE, *CHANGING], ids=repr)
def test_a_pattern_is_stable_if_rows_of_earlier_tokens_stay(pattern):
    lengths = range(1, 21)
    agree = [torch.equal(earlier(pattern, short), earlier(pattern, 20)[:short, :short]) for short in lengths]
    assert all(agree) is pattern.stable


def test_a_pattern_that_is_laid_out_is_the_corner_of_the_whole():
    whole = bigbird(1, 1, 2).laid_out(30)
    assert torch.equal(whole.mask(12), bigbird(1, 1, 2).mask(30)[:12, :12])
    assert repr(whole) == "bigbird(1, 1, 2, seed=0) on 30 tokens"
    with pytest.raises(UserError):
        whole.mask(31)


def test_a_union_has_the_edges_of_its_operands_and_no_more():
    empty = from_mask(torch.zeros(4, 4, dtype=torch.bool), self_loops=False)
    one = from_edges([(0, 1)], 4, self_loops=False)
    assert (empty | one).connections(4) == Schedule((one, empty)).union().connections(4) == 1
    assert (one | window(0)).connections(4) == 5
    assert (causal() | window(1, causal=True)).causal
    assert not (causal() | window(1)).causal


def dense_layers(masks, most):
    known = masks[0]
    for layer in range(1, most):
        if known.all():
            return layer
        known = masks[layer % len(masks)].astype(int) @ known.astype(int) > 0
    return None


def test_reach_without_self_loops_agrees_with_dense_products():
    generator, ends = np.random.default_rng(3), set()
    for _ in range(300):
        length, p = int(generator.integers(1, 7)), int(generator.integers(1, 4))
        # Few connections and whole permutations: unconnected tokens, periods, and empty rows.
        masks = [
            np.eye(length, dtype=bool)[generator.permutation(length)]
            | (generator.random((length, length)) < generator.choice([0, 0.1, 0.3]))
            for _ in range(p)
        ]
        if generator.random() < 0.3:
            masks[0][0] = False
        found = reach([from_mask(mask, self_loops=False) for mask in masks], length)
        assert found.layers == dense_layers(masks, p * (length**2 + 2) * 3 + 20)
        ends.add("full" if found.layers else found.message.split(" ")[0])
    assert {"full", "tokens", "token", "the"} <= ends


def test_a_cycle_of_4096_tokens_is_never_full_and_a_late_one_stops_at_the_limit():
    around = [(i, (i + 1) % 4096) for i in range(4096)]
    cycle = from_edges(around, 4096, self_loops=False)
    assert reach(cycle, 4096).message == "tokens reach each other only every 4096 layers, never all at once"
    # With a second cycle of 4095 it would take 16 million layers.
    late = from_edges([*around, (4095, 1)], 4096, self_loops=False)
    assert not reach(late, 4096, max_layers=5).converged


def test_layers_without_self_loops_need_little_memory(monkeypatch):
    late = from_edges([*((i, (i + 1) % 80) for i in range(80)), (79, 1)], 80, self_loops=False)
    late.at(80)
    tracemalloc.start()
    assert reach(late, 80).layers == 79**2 + 1
    assert tracemalloc.get_traced_memory()[1] < 5e6
    tracemalloc.stop()
    monkeypatch.setattr("massieu.patterns.reachability.WORK", 100_000)
    found = reach(late, 80)
    assert (found.layers, found.converged) == (None, False)
    assert "not within" in found.message


def test_numpy_integers_are_lengths_and_blocks():
    found = check_universality(star(), np.int64(4))
    assert json.loads(json.dumps(found.as_dict()))["length"] == 4
    assert sparse_plan(window(1), np.int64(9), block=np.int64(4)).length == 9


@pytest.mark.parametrize(
    ("huge", "same"),
    [
        (dilated(2, 10**30), window(0)),
        (dilated(10**30, 1), full()),
        (strided(10**30)[0], full()),
        (strided(10**30)[1], window(0)),
        (fixed(10**30)[0], full()),
        (fixed(10**30)[1], window(0)),
        (bigbird(0, 1, 0, block=10**30), full()),
    ],
    ids=repr,
)
def test_steps_beyond_64_bits_are_steps_beyond_the_sequence(huge, same):
    assert torch.equal(huge.mask(5), same.mask(5))


@pytest.mark.parametrize(
    ("word", "call"),
    [
        ("max_layers", lambda: reach(window(1), 40, max_layers=0)),
        ("max_layers", lambda: reach(window(1), 40, max_layers=2.5)),
        ("layers", lambda: reach_by_layer(window(1), 8, 0)),
        ("layers", lambda: reach_by_layer(window(1), 8, -3)),
        ("4 and 5", lambda: boolean_product(window(1).at(4), window(1).at(5))),
        ("4 and 5", lambda: window(1).at(4) | window(1).at(5)),
        ("edges", lambda: window(1).at(4) & window(1)),
        ("edges", lambda: boolean_product(window(1), window(1).at(4))),
        ("edges", lambda: hamiltonian_path(window(1))),
        ("max_steps", lambda: hamiltonian_path(window(1).at(4), max_steps=-1)),
        ("edges", lambda: is_hamiltonian(window(1), [0, 1])),
        ("order", lambda: is_hamiltonian(window(1).at(2), [0.0, 1.0])),
    ],
)
def test_bad_input_is_refused(word, call):
    with pytest.raises(UserError, match=word):
        call()
