"""Contextual maps, their certificates, the Boltzmann operator, and bad input."""

import itertools
import math

import pytest
import torch

from massieu import attend
from massieu.checks import UserError
from massieu.universal import (
    BelowResolution,
    boltz,
    boltz_bound,
    boltz_gap,
    contextual_map,
    cost,
    hardmax_identifiers,
    multisets,
    theorem_spacing,
)
from massieu.universal.multisets import sequences
from massieu.universal.search import attended


@pytest.mark.parametrize(("vocabulary", "length"), [(1, 1), (1, 4), (4, 1), (3, 3), (5, 4), (4, 0)])
def test_multisets_and_sets_are_those_of_itertools(vocabulary, length):
    tokens = range(vocabulary)
    expected = list(itertools.combinations_with_replacement(tokens, length))
    assert multisets(vocabulary, length).tolist() == [list(each) for each in expected]
    expected = list(itertools.combinations(tokens, length))
    assert multisets(vocabulary, length, duplicates=False).tolist() == [list(each) for each in expected]
    if length:
        expected = itertools.product(tokens, repeat=length)
        assert sequences(vocabulary, length).tolist() == [list(each) for each in expected]


def test_attended_is_attention_over_the_sequence():
    codes = torch.tensor([0.2, 0.5, 0.9, 1.0], dtype=torch.float64)
    beta = torch.tensor(-1.7, dtype=torch.float64)
    rows = multisets(4, 2)
    rest = torch.nn.functional.one_hot(rows, 4).sum(1).double()
    read = attended(codes, beta, rest)
    for token, (number, row) in itertools.product(range(4), enumerate(rows.tolist())):
        around = codes[[token, *row]][:, None]
        expected = attend(codes[token].reshape(1, 1), around, around, scale=float(beta)).output
        assert read[token, number] == pytest.approx(float(expected), rel=1e-14)


@pytest.mark.parametrize(("vocabulary", "length"), [(4, 2), (9, 3), (5, 5), (2, 1), (1, 3)])
def test_the_layer_gives_each_context_one_number_and_no_two_the_same(vocabulary, length):
    found = contextual_map(vocabulary, length)
    rows = sequences(vocabulary, length)
    with torch.no_grad():
        numbers = found.block(dim=2)(torch.nn.functional.pad(found.codes[rows][..., None], (0, 1)))[..., 0]
    contexts = torch.cat([rows.reshape(-1, 1), rows.sort(1).values.repeat_interleave(length, 0)], 1)
    kept, place = contexts.unique(dim=0, return_inverse=True)
    assert len(kept) == found.identifiers().numel() == cost(vocabulary, length).identifiers
    numbers = numbers.flatten()
    high, low = (
        torch.zeros(len(kept)).double().scatter_reduce(0, place, numbers, each, include_self=False)
        for each in ("amax", "amin")
    )
    # Orders of summation differ; the margin is a thousand times larger.
    assert (high - low).max() < 8 * 2.3e-16
    assert torch.allclose(low.sort().values, found.identifiers().flatten().sort().values, rtol=0, atol=1e-15)
    if len(kept) > 1:
        gap = float(low.sort().values.diff().min() / low.max())
        assert gap / torch.finfo(torch.float64).eps > 0.999 * found.margin
        assert length == 1 or gap / torch.finfo(torch.float64).eps < 1.001 * found.margin


@pytest.mark.parametrize(
    ("vocabulary", "length", "gap"), [(4, 2, 0.1), (4, 3, 3e-2), (9, 2, 2e-2), (9, 3, 2.3e-4), (9, 4, 5.9e-6)]
)
def test_the_search_finds_gaps_of_known_width(vocabulary, length, gap):
    found = contextual_map(vocabulary, length)
    assert found.gap > gap
    assert "all contexts differ by" in str(found)


def test_the_search_is_the_same_for_the_same_seed_and_better_than_its_start():
    first, again, other = (contextual_map(6, 3, generator=seed) for seed in (3, torch.Generator().manual_seed(3), 4))
    assert torch.equal(first.codes, again.codes)
    assert not torch.equal(first.codes, other.codes)
    assert first.margin > 3 * contextual_map(6, 3, generator=3, steps=0).margin


def test_without_duplicates_there_are_fewer_contexts():
    found = contextual_map(6, 3, duplicates=False)
    assert found.identifiers().isfinite().sum() == 6 * math.comb(5, 2)
    assert found.gap > contextual_map(6, 3).gap / 2


@pytest.mark.parametrize(("vocabulary", "length"), [(9, 3), (4, 2), (9, 2), (12, 4)])
@pytest.mark.parametrize("duplicates", [None, True])
def test_maps_at_the_scale_of_the_theorem_are_refused_below_the_resolution(vocabulary, length, duplicates):
    with pytest.raises(BelowResolution, match="searched") as refused:
        contextual_map(vocabulary, length, scale="theorem", duplicates=duplicates)
    found = refused.value.found
    assert not found.resolved
    assert found.margin < 1e3
    assert "below the resolution of float64" in str(found)
    assert "differ" not in str(found)


def test_the_scale_of_the_theorem_works_for_three_tokens():
    found = contextual_map(3, 2, scale="theorem")
    assert found.codes.tolist() == [1, 2, 3]
    assert found.beta == 2 * math.log(2) + 3
    # In the sequences 1 3 and 2 3, the output of the last token is 3 up to exp(-13).
    assert found.gap == pytest.approx(1 / (1 + math.exp(3 * found.beta)), rel=1e-3)


def test_a_search_without_a_resolved_map_is_refused(monkeypatch):
    monkeypatch.setattr("massieu.universal.identifiers.LEAST", 1e17)
    with pytest.raises(BelowResolution, match="fewer tokens"):
        contextual_map(4, 2, steps=0)


@pytest.mark.parametrize(
    ("vocabulary", "length", "gap"),
    [(3, 2, 5.3e-2), (4, 2, 1.3e-3), (5, 2, 2.5e-5), (5, 3, 2.6e-6), (6, 3, 1.9e-8), (9, 3, 0.0)],
)
def test_the_gap_of_the_boltzmann_operator_has_its_known_value_above_the_bound(vocabulary, length, gap):
    found = boltz_gap(vocabulary, length)
    assert found == pytest.approx(gap, rel=0.03)
    assert found > boltz_bound(length, vocabulary * theorem_spacing(length)) or vocabulary == 9


def test_the_boltzmann_operator_is_a_mean_and_a_derivative():
    scores = torch.randn(3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = (scores * scores.softmax(-1)).sum(-1)
    assert torch.allclose(boltz(scores), expected, rtol=1e-14)
    beta = torch.ones((), dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad((beta * scores).logsumexp(-1).sum(), beta)
    assert slope == pytest.approx(float(expected.sum()), rel=1e-14)


@pytest.mark.parametrize("sign", [1, -1])
def test_hardmax_identifies_the_extreme_code_only(sign):
    found = contextual_map(9, 3)
    assert hardmax_identifiers(found.codes, sign * abs(found.beta), 3) == 45
    # Written out for four tokens: the pairs of a token and the highest code beside it.
    codes = torch.tensor([0.1, 0.4, 0.7, 1.0], dtype=torch.float64)
    pairs = {(row[0], max(row) if sign > 0 else min(row)) for row in itertools.product(range(4), repeat=3)}
    assert hardmax_identifiers(codes, sign, 3) == len(pairs) == 10


@pytest.mark.parametrize(
    ("word", "call"),
    [
        ("vocabulary", lambda: contextual_map(0, 2)),
        ("length", lambda: contextual_map(3, 2.0)),
        ("steps", lambda: contextual_map(3, 2, steps=-1)),
        ("scale", lambda: contextual_map(3, 2, scale="own")),
        ("duplicates", lambda: contextual_map(2, 3, scale="theorem")),
        ("2437006780000 identifiers", lambda: contextual_map(100, 8)),
        ("scores", lambda: boltz(torch.tensor(1.0))),
        ("scores", lambda: boltz([1.0])),
        ("two sets", lambda: boltz_gap(2, 2)),
        ("length", lambda: multisets(3, -1)),
        ("grid", lambda: cost((), 2)),
        ("grid", lambda: cost((3, 0), 2)),
    ],
)
def test_bad_input_is_refused(word, call):
    with pytest.raises(UserError, match=word):
        call()
