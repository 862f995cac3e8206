"""Patterns whose rows depend on the length or not, unions, layers that are not followed for ever, and odd input."""

import json
import tracemalloc

import numpy as np
import pytest
import torch

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
    probability_condition,
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
    with pytest.raises(ValueError, match="the pattern was laid out for 30 tokens, got 31; lay it out for more"):
        whole.mask(31)


def test_a_union_has_what_its_parts_have_and_no_more():
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


def test_what_is_known_beforehand_without_self_loops_agrees_with_products():
    generator, ends = np.random.default_rng(3), set()
    for _ in range(300):
        length, p = int(generator.integers(1, 7)), int(generator.integers(1, 4))
        # Few connections and whole permutations: tokens apart, periods, and rows that see nobody.
        masks = [
            np.eye(length, dtype=bool)[generator.permutation(length)]
            | (generator.random((length, length)) < generator.choice([0, 0.1, 0.3]))
            for _ in range(p)
        ]
        if generator.random() < 0.3:
            masks[0][0] = False
        found = reach([from_mask(mask, self_loops=False) for mask in masks], length)
        assert found.layers == dense_layers(masks, p * (length**2 + 2) * 3 + 20)
        ends.add(found.reason.split(" ")[0] if found.ended == "never" else found.ended)
    assert {"full", "tokens", "token", "what"} <= ends


def test_a_cycle_of_4096_tokens_never_fills_up_and_a_late_one_is_given_up_on():
    around = [(i, (i + 1) % 4096) for i in range(4096)]
    cycle = from_edges(around, 4096, self_loops=False)
    assert reach(cycle, 4096).reason == "tokens hear of each other only every 4096 layers, never all at once"
    # With a second cycle of 4095 it would take 16 million layers.
    late = from_edges([*around, (4095, 1)], 4096, self_loops=False)
    assert reach(late, 4096, max_layers=5).ended == "limit"


def test_layers_without_self_loops_are_followed_in_little_memory(monkeypatch):
    late = from_edges([*((i, (i + 1) % 80) for i in range(80)), (79, 1)], 80, self_loops=False)
    late.at(80)
    tracemalloc.start()
    assert reach(late, 80).layers == 79**2 + 1
    assert tracemalloc.get_traced_memory()[1] < 5e6
    tracemalloc.stop()
    monkeypatch.setattr("massieu.patterns.spread.WORK", 100_000)
    found = reach(late, 80)
    assert (found.layers, found.ended) == (None, "limit")
    assert "not within" in found.reason


def test_numbers_of_numpy_do_as_lengths_and_blocks():
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
    ("call", "message"),
    [
        (lambda: reach(window(1), 40, max_layers=0), "max_layers must be a whole number of at least 1, got 0"),
        (lambda: reach(window(1), 40, max_layers=2.5), "max_layers must be a whole number of at least 1, got 2.5"),
        (lambda: reach_by_layer(window(1), 8, 0), "layers must be a whole number of at least 1, got 0"),
        (lambda: reach_by_layer(window(1), 8, -3), "layers must be a whole number of at least 1, got -3"),
        (
            lambda: boolean_product(window(1).at(4), window(1).at(5)),
            "both must have as many tokens, got 4 and 5; lay them out for one length",
        ),
        (lambda: window(1).at(4) | window(1).at(5), "both must have as many tokens, got 4 and 5"),
        (lambda: window(1).at(4) & window(1), "edges must be Edges, got Pattern; of a pattern take pattern.at(length)"),
        (lambda: boolean_product(window(1), window(1).at(4)), "edges must be Edges, got Pattern"),
        (lambda: hamiltonian_path(window(1)), "edges must be Edges, got Pattern; of a pattern take pattern.at(length)"),
        (lambda: is_hamiltonian(window(1), [0, 1]), "edges must be Edges, got Pattern"),
        (lambda: is_hamiltonian(window(1).at(2), [0.0, 1.0]), "order must be the numbers of tokens, got float64"),
        (lambda: from_edges(None, 3), "edges must be pairs of positions from 0 to 2, got None; they are (query, atom)"),
        (lambda: Schedule(("a",)), "a schedule is made of several patterns, got ('a',); pass a tuple of them"),
        (lambda: Schedule(window(1)), "a schedule is made of several patterns, got window(1); pass a tuple of them"),
        (lambda: from_edges([(0, 1), (1,)], 3), "edges must be pairs of positions from 0 to 2, got [(0, 1), (1,)]"),
        (lambda: probability_condition([1], 4), "an alpha of at least 1 or a function, got [1]"),
        (lambda: probability_condition("softmax", 4, lead="a"), "lead must be positive and rest in (0, 1], got a and"),
        (
            lambda: probability_condition(lambda scores: torch.full_like(scores, 5.0), 4),
            "must return weights of at least 0 with a sum of at most 1, got 5 and 40; normalize over the last axis",
        ),
        (
            lambda: probability_condition(lambda scores: scores / scores.sum(-1, keepdim=True), 4),
            "must return weights of at least 0 with a sum of at most 1",
        ),
        (
            lambda: sparse_plan(window(1).at(9), 12),
            "edges are of 9 tokens, got length 12; pass the pattern itself for others",
        ),
    ],
)
def test_bad_input_is_answered_with_one_sentence(call, message):
    with pytest.raises((ValueError, TypeError)) as raised:
        call()
    assert message in str(raised.value)
