"""Deep narrow networks and sparse networks: values on all their sequences, and bad input."""

import itertools
import pickle

import pytest
import torch

from massieu.checks import UserError
from massieu.nn import FeedForward, MeasureAttention
from massieu.patterns import dilated, ring, star_ring, strided, window
from massieu.universal import construct_narrow, construct_sparse, shift_stack


def smooth(x):
    return torch.sin(3 * x[..., :1]) + x[..., -1:] * x.sum((1, 2), keepdim=True)


def ordered(length, seed=0):
    """A random function of all tokens of two cells and of their order."""
    drawn = torch.randn(*[2] * length, length, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return lambda x: drawn[tuple((2 * x[..., 0]).long().unbind(1))]


@pytest.mark.parametrize(("grid", "length"), [(2, 2), (3, 2), (4, 3), ((2, 2), 3), ((3, 2), 2), (7, 4)])
def test_a_narrow_network_maps_all_sequences_of_different_cells(grid, length):
    network = construct_narrow(smooth, grid, length)
    certificate = network.certify()
    assert certificate.holds
    assert "without repeated cells" in str(certificate)
    axes = grid if isinstance(grid, tuple) else (grid,)
    points = torch.tensor(list(itertools.product(*map(range, axes[::-1]))), dtype=torch.float64).flip(-1)
    centers = (points + 0.5) / torch.tensor(axes)
    rows = list(itertools.permutations(range(len(centers)), length))
    assert certificate.sequences == len(rows)
    inputs = centers[torch.tensor(rows)]
    with torch.no_grad():
        assert (network(inputs) - smooth(inputs)).abs().max() <= network.tolerance
        off = inputs + 0.99 * (torch.rand(inputs.shape, dtype=torch.float64) - 0.5) / torch.tensor(axes)
        assert (network(off) - smooth(inputs)).abs().max() <= network.tolerance


def test_a_narrow_network_has_two_heads_of_size_one_and_four_units_and_the_depth_of_the_proof():
    network = construct_narrow(smooth, (3, 3), 2)
    heads = [each for each in network.modules() if isinstance(each, MeasureAttention)]
    nets = [each for each in network.modules() if isinstance(each, FeedForward)]
    assert {(each.num_heads, each.head_dim) for each in heads} == {(2, 1)}
    assert {each.up.out_features for each in nets} == {4}
    assert len(heads) == 9 + 1
    assert len(nets) == 6 + 1 + 72 + 1


def test_the_identifiers_of_a_narrow_network_are_those_of_the_stack_of_shifts():
    stack, network = shift_stack(5, 1, 3), construct_narrow(smooth, 5, 3)
    stream = ((stack.sequences + 0.5).double() / 5)[..., None]
    with torch.no_grad():
        for layer in network.layers[: 5 + 1 + 6]:
            stream = layer(stream)
    assert (stream[..., 0] - stack.identifiers).abs().max() < 1e-6  # of 36 between two of them


def test_a_softmax_that_is_not_sharp_spoils_a_narrow_network_and_so_does_float32():
    assert construct_narrow(smooth, 4, 3, sharpness=40.0).certify().holds
    assert not construct_narrow(smooth, 4, 3, sharpness=10.0).certify().holds
    assert construct_narrow(smooth, 4, 3).float().certify().right < 0.5


def test_the_error_of_a_narrow_network_falls_like_the_share_of_repeated_cells():
    points = torch.rand(5000, 2, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with torch.no_grad():
        errors = [
            float((construct_narrow(smooth, n, 2)(points) - smooth(points)).square().mean().sqrt()) for n in (4, 16)
        ]
    assert errors[1] / errors[0] == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize(
    ("pattern", "layers"), [(star_ring(), 2), (ring(), 3), (window(1), 6), (strided(3), 3), (window(7), 1)]
)
def test_a_sparse_network_realizes_functions_of_order(pattern, layers):
    function = ordered(7)
    network = construct_sparse(function, 2, 7, pattern)
    assert sum(isinstance(each, MeasureAttention) for each in network.modules()) == layers
    inputs = (torch.tensor(list(itertools.product(range(2), repeat=7)))[..., None] + 0.5).double() / 2
    with torch.no_grad():
        assert torch.equal(network(inputs), function(inputs))
        assert torch.equal(network(inputs + 0.24), function(inputs))
    certificate = network.certify()
    assert (certificate.sequences, certificate.exhaustive, certificate.holds) == (128, True, True)


def test_a_sparse_network_takes_grids_of_several_axes_and_can_be_pickled():
    def function(x):
        return (x[:, :1] * x.cumsum(1)).sum(-1, keepdim=True)

    network = construct_sparse(function, (2, 3), 3, star_ring())
    assert network.certify().holds
    again = pickle.loads(pickle.dumps(network))
    assert again.certify() == network.certify()


def test_without_full_reach_a_sparse_network_ignores_tokens():
    function = ordered(6)
    network = construct_sparse(function, 2, 6, dilated(2, 2), layers=4)
    inputs = network.cases().inputs
    moved = inputs.clone()
    moved[:, 1::2] = 1 - moved[:, 1::2]
    with torch.no_grad():
        assert torch.equal(network(inputs)[:, ::2], network(moved)[:, ::2])
    assert not network.certify().holds
    assert not construct_sparse(function, 2, 6, star_ring(), layers=1).certify().holds


@pytest.mark.parametrize(
    ("word", "call"),
    [
        ("reach", lambda: construct_sparse(smooth, 2, 6, dilated(2, 2))),
        ("6377292", lambda: construct_sparse(smooth, 3, 12, star_ring())),
        ("29640", lambda: construct_narrow(smooth, 40, 3)),
        ("length", lambda: construct_narrow(smooth, 4, 1)),
        ("sharpness", lambda: construct_narrow(smooth, 4, 3, sharpness=0.0)),
        ("smaller than the identifiers", lambda: construct_narrow(lambda x: 1e6 * x, 3, 2)),
        ("equivariant", lambda: construct_narrow(lambda x: x.cumsum(1), 3, 2)),
        ("shape", lambda: construct_narrow(smooth, 3, 2)(torch.zeros(1, 3, 1))),
        ("floating", lambda: construct_narrow(smooth, 3, 2)(torch.zeros(1, 2, 1).long())),
    ],
)
def test_bad_input_is_refused(word, call):
    with pytest.raises(UserError, match=word):
        call()
