"""Limits of constructions: nan weights, functions of order, single contexts, bad input."""

import copy
import io
import math
import pickle

import numpy as np
import pytest
import torch

from massieu.checks import UserError
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


def test_a_network_with_nan_weights_has_no_certificate():
    network = construct(smooth, 3, 2, steps=3)
    assert network.certify().holds
    with torch.no_grad():
        network.block.attention.q_proj.weight.fill_(torch.nan)
    certificate = network.certify()
    assert not certificate.holds
    assert (certificate.error, certificate.wrong) == (math.inf, 18)
    assert str(certificate).startswith("all 9 sequences NOT within 1e-12: error inf, 18 tokens wrong")


def neighbors_on_a_circle(x):
    """Equivariant under rotation and reversal of the sequence only."""
    return x.roll(1, 1) * x.roll(-1, 1)


def descending(x):
    """Equivariant unless the last three tokens descend, which a sorted sequence after one shift or swap does not."""
    _, second, third, fourth = x[..., 0].unbind(1)
    return x + ((second > third) & (third > fourth))[:, None, None]


@pytest.mark.parametrize(
    ("function", "cells", "length"),
    [(neighbors_on_a_circle, 3, 4), (neighbors_on_a_circle, 2, 12), (descending, 5, 4)],
)
def test_functions_of_order_are_refused(function, cells, length):
    with pytest.raises(UserError, match="equivariant"):
        construct(function, cells, length, steps=0)


@pytest.mark.parametrize(("count", "words"), [(40, 100), (200, 300)])
def test_one_hot_vectors_are_memorized_as_well_as_words(count, words):
    rows = torch.randint(words, (count, 4), generator=torch.Generator().manual_seed(0))
    assert len(rows.unique()) > 64
    network = memorize(torch.eye(words, dtype=torch.float64)[rows], torch.arange(count), steps=5)
    assert network.certify(0.0).holds
    assert network.margin > 1e9


@pytest.mark.parametrize("length", range(1, 10))
@pytest.mark.parametrize("duplicates", [None, True])
def test_nine_tokens_at_the_scale_of_the_theorem_are_always_refused(length, duplicates):
    alone = length == 1 or (length == 9 and duplicates is None)
    message = "only one context" if alone else "below the resolution"
    with pytest.raises(UserError, match=message) as refused:
        contextual_map(9, length, scale="theorem", duplicates=duplicates, limit=10**6)
    assert isinstance(refused.value, BelowResolution) is not alone


def test_sets_are_counted_as_sets():
    assert 20 * math.comb(19, 3) == 19_380 < 20_000 < 20 * math.comb(22, 3)
    assert contextual_map(20, 4, duplicates=False, steps=0).identifiers().isfinite().sum() == 19_380
    with pytest.raises(UserError, match="30800"):
        contextual_map(20, 4)


def test_numpy_integers_are_sizes_and_seeds():
    network = construct(smooth, np.int64(3), np.int64(2), steps=2, generator=np.int64(1))
    assert network.certify().holds
    assert cost((np.int64(3), 3), np.int64(2)) == cost((3, 3), 2)
    assert contextual_map(np.int64(3), np.int64(2), steps=1).margin > 1e3


def test_networks_survive_pickle_torch_and_copies():
    inputs = torch.randn(5, 3, 2, generator=torch.Generator().manual_seed(0))
    memory = memorize(inputs, torch.arange(5), steps=3)
    for network in (construct(lambda x: x * x.sum(1, keepdim=True), 3, 2, steps=3), memory):
        stream = io.BytesIO()
        torch.save(network, stream)
        stream.seek(0)
        saved = torch.load(stream, weights_only=False)
        for again in (pickle.loads(pickle.dumps(network)), copy.deepcopy(network), saved):
            assert again.certify(0.0) == network.certify(0.0)
            assert again.certify(0.0).holds


def test_a_network_accepts_float32_without_loss_and_no_wider_type():
    inputs = torch.randn(5, 3, 2, generator=torch.Generator().manual_seed(0))
    network = memorize(inputs, torch.arange(5), steps=3)
    assert inputs.dtype == torch.float32
    with torch.no_grad():
        assert torch.equal(network(inputs)[..., 0], torch.arange(5.0).double()[:, None].expand(5, 3))
    with pytest.raises(TypeError, match="dtype of the weights"):
        network.float()(inputs.double())


def test_ramps_are_wide_enough_by_default():
    # With 2 ** -20 of a cell, rounding would spoil the codes of a hundred cells.
    with pytest.raises(UserError, match="ramp"):
        construct(smooth, 100, 2, steps=2, ramp=2.0**-20)
    network = construct(smooth, 100, 2, steps=2)
    centers = (torch.randint(100, (200, 2, 1), generator=torch.Generator().manual_seed(0)) + 0.5).double() / 100
    with torch.no_grad():
        assert torch.equal(network(centers), smooth(centers))


def test_labels_up_to_two_to_the_53_are_exact():
    labels = torch.tensor([[2**53, 2**53 - 1]])
    with torch.no_grad():
        assert memorize(WORDS[:1], labels, steps=2)(WORDS[:1])[..., 0].long().tolist() == labels.tolist()


@pytest.mark.parametrize(
    ("word", "call"),
    [
        ("multisets", lambda: multisets(100, 6)),
        ("multisets", lambda: boltz_gap(60, 6)),
        ("multisets", lambda: boltz_gap(9, 3, limit=5)),
        ("identifiers", lambda: separation_gaps([60], 6)),
        ("codes", lambda: hardmax_identifiers([1, 2], 1.0, 2)),
        ("codes", lambda: hardmax_identifiers(torch.ones(2, 2), 1.0, 2)),
        ("identifiers", lambda: hardmax_identifiers(torch.linspace(0.1, 1, 50), 1.0, 6)),
        ("length", lambda: boltz_bound(0, 1.0)),
        ("gap", lambda: shift_stack(1, 1, 1).gap),
        ("duplicates", lambda: shift_stack(3, 1, 2, duplicates="no")),
        ("duplicates", lambda: contextual_map(3, 2, duplicates="no")),
        ("function", lambda: construct("f", 3, 2)),
        ("generator", lambda: construct(smooth, 3, 2, generator=1.5)),
        ("limit", lambda: construct(smooth, 3, 2, limit=None)),
        ("ramp", lambda: construct(smooth, 3, 2, ramp="a")),
        ("none", lambda: construct(lambda x: x[..., :0], 3, 2)),
        ("complex", lambda: construct(lambda x: x + 1j, 3, 2)),
        ("labels", lambda: memorize(WORDS, ["a", "b"])),
        ("steps", lambda: memorize(WORDS, [1, 2], steps=2.5)),
        ("generator", lambda: memorize(WORDS, [1, 2], generator=1.5)),
        ("limit", lambda: memorize(WORDS, [1, 2], limit="a")),
        ("complex", lambda: memorize(WORDS, torch.ones(2) * 1j)),
        ("labels", lambda: memorize(WORDS, [1, 2**53 + 1])),
        ("words", lambda: memorize(torch.tensor([[2**53, 2**53 + 1]]), [[1, 2]])),
    ],
)
def test_bad_input_is_refused(word, call):
    with pytest.raises(UserError, match=word):
        call()
