"""What constructions do not claim: networks without numbers, functions of order, contexts that are alone, odd input."""

import copy
import io
import math
import pickle
import re

import numpy as np
import pytest
import torch

from massieu.universal import (
    BelowResolution,
    boltz_bound,
    boltz_gap,
    construct,
    contextual_map,
    cost,
    hardmax_identifiers,
    memorize,
    multisets,
    separation_gaps,
    shift_stack,
)

WORDS = torch.tensor([[0, 1], [1, 2]])


def smooth(x):
    return torch.sin(3 * x) + x * x.sum(1, keepdim=True)


def test_a_network_without_numbers_has_no_certificate():
    network = construct(smooth, 3, 2, rounds=3)
    assert network.certify().holds
    with torch.no_grad():
        network.block.attention.q_proj.weight.fill_(torch.nan)
    certificate = network.certify()
    assert not certificate.holds
    assert (certificate.error, certificate.wrong) == (math.inf, 18)
    assert str(certificate).startswith("all 9 sequences NOT within 1e-12: error inf, 18 tokens wrong")


def neighbors_on_a_circle(x):
    """Turning or reversing the sequence turns or reverses the values; other orders do more."""
    return x.roll(1, 1) * x.roll(-1, 1)


def descending(x):
    """Equivariant unless the last three tokens descend, which they do not where the first or none is out of order."""
    _, second, third, fourth = x[..., 0].unbind(1)
    return x + ((second > third) & (third > fourth))[:, None, None]


@pytest.mark.parametrize(
    ("function", "cells", "length"),
    [(neighbors_on_a_circle, 3, 4), (neighbors_on_a_circle, 2, 12), (descending, 5, 4)],
)
def test_functions_of_order_are_refused_whatever_order_they_mind(function, cells, length):
    with pytest.raises(ValueError, match="function must be permutation-equivariant, got values that change by"):
        construct(function, cells, length, rounds=0)


@pytest.mark.parametrize(("count", "words"), [(40, 100), (200, 300)])
def test_one_hot_vectors_are_memorised_as_well_as_words(count, words):
    rows = torch.randint(words, (count, 4), generator=torch.Generator().manual_seed(0))
    assert len(rows.unique()) > 64
    network = memorize(torch.eye(words, dtype=torch.float64)[rows], torch.arange(count), rounds=5)
    assert network.certify(0.0).holds
    assert network.margin > 1e9


@pytest.mark.parametrize("length", range(1, 10))
@pytest.mark.parametrize("duplicates", [None, True])
def test_nine_tokens_at_the_scale_of_the_theorem_are_never_a_success(length, duplicates):
    alone = length == 1 or (length == 9 and duplicates is None)
    message = "one context for each and nothing to tell apart" if alone else "below the resolution of float64"
    with pytest.raises(ValueError, match=message) as refused:
        contextual_map(9, length, scale="theorem", duplicates=duplicates, limit=10**6)
    assert isinstance(refused.value, BelowResolution) is not alone


def test_sets_are_counted_as_sets():
    assert 20 * math.comb(19, 3) == 19_380 < 20_000 < 20 * math.comb(22, 3)
    assert contextual_map(20, 4, duplicates=False, rounds=0).identifiers().isfinite().sum() == 19_380
    with pytest.raises(ValueError, match=": 30800 identifiers; take"):
        contextual_map(20, 4)


def test_numbers_of_numpy_do():
    network = construct(smooth, np.int64(3), np.int64(2), rounds=2, generator=np.int64(1))
    assert network.certify().holds
    assert cost((np.int64(3), 3), np.int64(2)) == cost((3, 3), 2)
    assert contextual_map(np.int64(3), np.int64(2), rounds=1).margin > 1e3


def test_networks_survive_pickle_torch_and_copies():
    inputs = torch.randn(5, 3, 2, generator=torch.Generator().manual_seed(0))
    memory = memorize(inputs, torch.arange(5), rounds=3)
    for network in (construct(lambda x: x * x.sum(1, keepdim=True), 3, 2, rounds=3), memory):
        stream = io.BytesIO()
        torch.save(network, stream)
        stream.seek(0)
        saved = torch.load(stream, weights_only=False)
        for again in (pickle.loads(pickle.dumps(network)), copy.deepcopy(network), saved):
            assert again.certify(0.0) == network.certify(0.0)
            assert again.certify(0.0).holds


def test_a_network_takes_the_sequences_it_was_built_from():
    inputs = torch.randn(5, 3, 2, generator=torch.Generator().manual_seed(0))
    network = memorize(inputs, torch.arange(5), rounds=3)
    assert inputs.dtype == torch.float32
    with torch.no_grad():
        assert torch.equal(network(inputs)[..., 0], torch.arange(5.0).double()[:, None].expand(5, 3))
    with pytest.raises(TypeError, match="dtype of the weights"):
        network.float()(inputs.double())


def test_ramps_are_wide_enough_by_default():
    # With 2 ** -20 of a cell, rounding would spoil the codes of a hundred cells.
    with pytest.raises(ValueError, match="ramp must be at least 1.* for these cells"):
        construct(smooth, 100, 2, rounds=2, ramp=2.0**-20)
    network = construct(smooth, 100, 2, rounds=2)
    centers = (torch.randint(100, (200, 2, 1), generator=torch.Generator().manual_seed(0)) + 0.5).double() / 100
    with torch.no_grad():
        assert torch.equal(network(centers), smooth(centers))


def test_labels_up_to_two_to_the_53_are_exact():
    labels = torch.tensor([[2**53, 2**53 - 1]])
    with torch.no_grad():
        assert memorize(WORDS[:1], labels, rounds=2)(WORDS[:1])[..., 0].long().tolist() == labels.tolist()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: multisets(100, 6), "at most 1000000 multisets may be listed, got 1609344100 of 6 out of 100 tokens"),
        (lambda: boltz_gap(60, 6), "at most 1000000 multisets may be listed, got 50063860 of 6 out of 60 tokens"),
        (lambda: boltz_gap(9, 3, limit=5), "at most 5 multisets may be listed, got 84 of 3 out of 9 tokens"),
        (lambda: separation_gaps([60], 6), "at most 20000 identifiers may be built, got 60 tokens in sequences of 6"),
        (lambda: hardmax_identifiers([1, 2], 1.0, 2), "codes must be a floating tensor (vocabulary,), got list"),
        (
            lambda: hardmax_identifiers(torch.linspace(0.1, 1, 50), 1.0, 6),
            "at most 20000 identifiers may be built, got 50 tokens in sequences of 6",
        ),
        (lambda: boltz_bound(0, 1.0), "length must be a whole number of at least 1, got 0"),
        (lambda: shift_stack(1, 1, 1).gap, "a gap is between two identifiers, got one; take more cells"),
        (lambda: shift_stack(3, 1, 2, duplicates="no"), "duplicates must be True or False, got 'no'"),
        (lambda: contextual_map(3, 2, duplicates="no"), "duplicates must be True or False, got 'no'"),
        (lambda: construct("f", 3, 2), "function must be callable, from (batch, length, dim) to values, got str"),
        (lambda: construct(smooth, 3, 2, generator=1.5), "generator must be a torch.Generator or a whole number, its"),
        (lambda: construct(smooth, 3, 2, limit=None), "limit must be a whole number of at least 0, got None"),
        (lambda: construct(smooth, 3, 2, ramp="a"), "ramp must lie between 0 and 1, a share of a cell, got 'a'"),
        (lambda: construct(lambda x: x[..., :0], 3, 2), "must return real numbers for every token, got none"),
        (lambda: construct(lambda x: x + 1j, 3, 2), "must return real numbers for every token, got complex ones"),
        (lambda: memorize(WORDS, ["a", "b"]), "labels must be numbers, got ['a', 'b']; give classes numbers from zero"),
        (lambda: memorize(WORDS, [1, 2], rounds=2.5), "rounds must be a whole number of at least 0, got 2.5"),
        (lambda: memorize(WORDS, [1, 2], generator=1.5), "generator must be a torch.Generator or a whole number"),
        (lambda: memorize(WORDS, [1, 2], limit="a"), "limit must be a whole number of at least 0, got 'a'"),
        (
            lambda: memorize(WORDS, torch.ones(2) * 1j),
            "labels must be exact in float64, real and whole ones up to 2**53, got complex numbers",
        ),
        (lambda: memorize(WORDS, [1, 2**53 + 1]), "labels must be exact in float64, real and whole ones up to 2**53"),
        (
            lambda: memorize(torch.tensor([[2**53, 2**53 + 1]]), [[1, 2]]),
            "words must be exact in float64, numbers up to 2**53, got 9007199254740993; number them from zero",
        ),
    ],
)
def test_odd_input_is_refused_in_a_sentence(call, message):
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        call()
