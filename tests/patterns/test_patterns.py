"""Patterns as objects: masks, log weights, schedules, unions, custom patterns, and bad input."""

import copy
import pickle

import numpy as np
import pytest
import torch

from massieu import attend
from massieu.checks import UserError
from massieu.memory.tsallis import entmax
from massieu.patterns import (
    Edges,
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
    probability_condition,
    random_regular,
    reach,
    reach_by_layer,
    star,
    star_ring,
    strided,
    window,
)


def test_masks_and_log_weights_give_the_attention_that_torch_gives():
    query, key, value = torch.randn(3, 2, 40, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    pattern = bigbird(1, 1, 2, seed=4)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, pattern.mask(40))
    for log_weight in (pattern.mask(40), pattern.log_weights(40), pattern.log_weights(40, torch.float64)):
        assert torch.allclose(attend(query, key, value, log_weight).output, expected, atol=1e-12)
    assert pattern.log_weights(40, torch.float64).dtype == torch.float64
    assert not torch.allclose(attend(query, key, value, pattern.mask(40).mT).output, expected, atol=1e-3)


def test_bits_hold_what_was_put_in_at_every_length():
    generator = np.random.default_rng(0)
    for length in (1, 7, 8, 63, 64, 65, 130):
        first, second = generator.random((2, length, length)) < 0.3
        edges, other = Edges.of_mask(first), Edges.of_mask(second)
        assert np.array_equal(edges.unpack(), first)
        assert edges.connections == first.sum()
        assert np.array_equal(edges.transpose().unpack(), first.T)
        assert np.array_equal((edges | other).unpack(), first | second)
        assert np.array_equal((edges & other).unpack(), first & second)
        starts, atoms = edges.lists
        assert np.array_equal(atoms, np.nonzero(first)[1])
        assert np.array_equal(np.diff(starts), first.sum(1))
        product = first.astype(int) @ second.astype(int) > 0
        assert np.array_equal(boolean_product(edges, other).unpack(), product)
        assert sum(number.bit_count() for number in edges.numbers()) == first.sum()


def test_products_in_several_chunks_are_the_same(monkeypatch):
    edges = bigbird(1, 1, 3).at(90)
    whole = boolean_product(edges, edges).unpack()
    for module in ("massieu.patterns.reachability", "massieu.patterns.edges"):
        monkeypatch.setattr(f"{module}.CHUNK", 100)
    again = Edges.of_mask(edges.unpack())
    assert np.array_equal(boolean_product(again, again).unpack(), whole)
    assert bigbird(1, 1, 3, seed=0).at(90).connections == edges.connections


def test_reach_by_layer_are_the_sets_whose_sizes_reach_counts():
    schedule = strided(4)
    sets = reach_by_layer(schedule, 16, 3)
    assert tuple(each.connections for each in sets) == reach(schedule, 16).counts
    assert np.array_equal(sets[0].unpack(), schedule[0].mask(16).numpy())


def test_a_random_regular_graph_is_regular_symmetric_and_random():
    for degree in (3, 4, 7):
        mask = random_regular(degree, 1).mask(50)
        assert (mask.sum(0) == degree + 1).all()
        assert torch.equal(mask, mask.mT)
        assert mask.diagonal().all()
    assert not torch.equal(random_regular(4, 0).mask(50), random_regular(4, 1).mask(50))
    assert torch.equal(random_regular(4, 0).mask(50), random_regular(4, 0).mask(50))
    assert random_regular(9).mask(6).all()


def test_blocks_of_bigbird_are_tokens_of_a_coarser_one():
    fine, coarse = bigbird(1, 1, 2, seed=5, block=4).mask(30), bigbird(1, 1, 2, seed=5).mask(8)
    assert torch.equal(fine, coarse.repeat_interleave(4, 0).repeat_interleave(4, 1)[:30, :30])


def test_a_schedule_repeats_and_a_union_has_all_of_it():
    schedule = Schedule((window(1), star(), dilated(1, 3)))
    assert [repr(schedule[layer]) for layer in (0, 4, 5)] == ["window(1)", "star", "dilated(1, 3)"]
    union = schedule.union().mask(20)
    assert torch.equal(union, window(1).mask(20) | star().mask(20) | dilated(1, 3).mask(20))
    assert len(list(schedule)) == 3
    assert repr(schedule) == "schedule of window(1), star, dilated(1, 3)"


def test_order_in_a_schedule_counts():
    """Blocks first and then their last tokens takes two layers; the other way round it takes three."""
    near, far = fixed(4)
    assert [reach([near, far], 16).layers, reach([far, near], 16).layers] == [2, 3]


def test_given_masks_and_edges_keep_or_gain_self_loops():
    mask = torch.zeros(4, 4, dtype=torch.bool)
    mask[0, 1] = True
    assert from_mask(mask).connections(4) == from_edges([(0, 1)], 4).connections(4) == 5
    assert from_mask(mask, self_loops=False).connections(4) == 1
    assert from_edges([(0, 1), (2, 0)], 4, causal=True).connections(4) == 5
    assert from_edges([], 3).connections(3) == 3
    found = check_universality(from_mask(~torch.eye(4, dtype=torch.bool), self_loops=False), 4)
    assert (found.self_loops, found.path, found.reach_layers, found.theorem) == (False, True, 2, "none")


def test_without_self_loops_sets_that_repeat_are_never_full_and_a_limit_is_reported():
    cycle = from_edges([(i, (i + 1) % 5) for i in range(5)], 5, self_loops=False)
    found = reach(cycle, 5)
    assert (found.layers, found.converged) == (None, True)
    # One more connection makes a cycle of four besides that of five: full after (5 - 1)^2 + 1 layers, the most there is.
    late = from_edges([*((i, (i + 1) % 5) for i in range(5)), (4, 1)], 5, self_loops=False)
    assert reach(late, 5).layers == 17
    found = reach(late, 5, max_layers=10)
    assert (found.layers, found.converged) == (None, False)
    assert not reach(window(1), 50, max_layers=10).converged


def test_patterns_survive_pickle_and_copies():
    for pattern in (
        star_ring(),
        bigbird(1, 2, 3),
        fixed()[1],
        from_mask(torch.eye(9, dtype=torch.bool)),
        window(1) | star(),
    ):
        for again in (pickle.loads(pickle.dumps(pattern)), copy.deepcopy(pattern)):
            assert torch.equal(again.mask(9), pattern.mask(9))


@pytest.mark.parametrize("alpha", [1.0, 1.3, 1.5, 2.0])
@pytest.mark.parametrize(("lead", "rest"), [(1.0, 0.1), (0.3, 0.01)])
def test_the_factor_of_a_known_map_is_enough_and_for_equal_others_needed(alpha, lead, rest):
    factor = probability_condition(alpha, 20, lead=lead, rest=rest).factor
    scores = torch.zeros(20, dtype=torch.float64)
    scores[3] = lead
    assert entmax(factor * scores, alpha)[3] >= 1 - rest - 1e-9
    if alpha == 1:
        assert entmax(0.99 * factor * scores, alpha)[3] < 1 - rest


@pytest.mark.parametrize(
    ("function", "holds"),
    [
        (lambda scores: torch.softmax(scores, -1), True),
        (lambda scores: entmax(scores, 1.5), True),
        (lambda scores: torch.nn.functional.one_hot(scores.argmax(-1), scores.shape[-1]).double(), True),
        (lambda scores: torch.full_like(scores, 1 / scores.shape[-1]), False),
        (
            lambda scores: torch.nn.functional.one_hot(torch.zeros(len(scores), dtype=int), scores.shape[-1]).double(),
            False,
        ),
        (lambda scores: scores.clamp(min=0) / scores.clamp(min=0).sum(-1, keepdim=True), False),
        (lambda scores: torch.softmax(30 * torch.tanh(scores / 30), -1), False),
        (lambda scores: scores.exp() / (1 + scores.exp().sum(-1, keepdim=True)), False),
        (lambda scores: torch.softmax(-scores, -1), False),
    ],
    ids=["softmax", "entmax", "hardmax", "uniform", "first", "relu", "softcap", "sink", "negative"],
)
def test_functions_are_probed(function, holds):
    found = check_universality(star_ring(), 8, probability_map=function)
    assert found.probability_map.holds is holds
    assert found.theorem == ("Yun 2020" if holds else "none")


def test_the_result_reads_as_text_and_as_a_dictionary():
    found = check_universality(global_window(1), 32)
    assert found.theorems == ("Yun 2020", "BigBird star")
    assert "Zaheer" in str(found)
    assert "Yun" in str(found)
    values = found.as_dict()
    assert (values["theorem"], values["certificate"], values["hub"]) == ("Yun 2020", list(range(32)), 0)
    assert "2 path in union    no, the tokens fall into 2 unconnected" in str(check_universality(dilated(1, 2), 32))
    assert "neither of the two applies" in str(check_universality(causal(), 32))


@pytest.mark.parametrize(
    ("word", "call"),
    [
        ("width", lambda: window(-1)),
        ("step", lambda: dilated(1, 0)),
        ("hub", lambda: star(1.5)),
        ("hub must be one of 3 tokens", lambda: star(5).mask(3)),
        ("stride", lambda: strided(0)),
        ("block", lambda: bigbird(block=0)),
        ("degree", lambda: random_regular(3).mask(7)),
        ("length", lambda: full().mask(0)),
        ("growth", lambda: full().growth(9, 9)),
        ("patterns", lambda: Schedule(())),
        ("patterns", lambda: Schedule(("a",))),
        ("patterns", lambda: Schedule(window(1))),
        ("laid out", lambda: window(1).laid_out(3).mask(4)),
        ("mask", lambda: from_mask(torch.eye(3))),
        ("3 tokens", lambda: from_mask(torch.eye(3) > 0).mask(4)),
        ("0 to 3", lambda: from_edges([(0, 3)], 3)),
        ("edges", lambda: from_edges([(0, 1, 2)], 3)),
        ("edges", lambda: from_edges([(0, 1), (1,)], 3)),
        ("edges", lambda: from_edges(None, 3)),
        ("schedule", lambda: reach(torch.eye(3), 3)),
        ("probability_map", lambda: check_universality(full(), 4, probability_map="typo")),
        ("probability_map", lambda: probability_condition([1], 4)),
        ("lead", lambda: probability_condition("softmax", 4, lead=0)),
        ("lead", lambda: probability_condition("softmax", 4, lead="a")),
        ("rest", lambda: probability_condition("softmax", 4, rest=1.1)),
        ("shape of its scores", lambda: probability_condition(lambda scores: scores.sum(-1), 4)),
        ("sum of at most 1", lambda: probability_condition(lambda scores: torch.full_like(scores, 5.0), 4)),
        ("at least 0", lambda: probability_condition(lambda scores: scores / scores.sum(-1, keepdim=True), 4)),
    ],
)
def test_bad_input_is_refused(word, call):
    with pytest.raises(UserError, match=word):
        call()
