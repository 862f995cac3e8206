"""Alpha-entmax against its definition as a maximum, and the exact fixed points that follow."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from torch.testing import assert_close

from massieu.checks import UserError
from massieu.memory import Continuous, Sparse, certificate, entmax, tsallis_entropy

ALPHAS = [1.0, 1.0001, 1.2, 1.5, 1.7, 2.0, 3.0, 6.0]


def randn(seed, *shape, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def written_out(scores, alpha):
    """The threshold by a root finder of another library."""
    found = []
    for row in scores.numpy():
        if alpha == 1:
            found.append(np.exp(row - row.max()) / np.exp(row - row.max()).sum())
            continue
        z = (alpha - 1) * row

        def weights(tau, z=z):
            return np.maximum(z - tau, 0.0) ** (1 / (alpha - 1))

        tau = brentq(lambda tau: weights(tau).sum() - 1, z.max() - 1 - 1e-12, z.max(), xtol=1e-15, rtol=1e-14)
        found.append(weights(tau))
    return torch.from_numpy(np.array(found))


@pytest.mark.parametrize("alpha", ALPHAS)
def test_weights_agree_with_a_root_of_the_definition(alpha):
    scores = torch.cat([3 * randn(0, 20, 7), 0.01 * randn(1, 5, 7), torch.zeros(1, 7).double()])
    # Near alpha one the root is a small difference, divided by alpha minus one.
    assert_close(entmax(scores, alpha), written_out(scores, alpha), rtol=0, atol=1e-8 if alpha == 1.0001 else 1e-11)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), atoms=st.integers(1, 12), alpha=st.sampled_from(ALPHAS), size=st.floats(0.01, 30.0))
def test_weights_maximize_score_plus_entropy(seed, atoms, alpha, size):
    scores = size * randn(seed, 1, atoms)
    weight = entmax(scores, alpha)
    assert float(weight.sum()) == pytest.approx(1.0, abs=1e-12)
    assert bool((weight >= 0).all())
    best = (weight * scores).sum(-1) + tsallis_entropy(weight, alpha)
    others = (
        torch.distributions.Dirichlet(torch.full((atoms,), 0.3, dtype=torch.float64)).sample((200,))
        if atoms > 1
        else weight
    )
    others = torch.cat([others, torch.eye(atoms).double(), 0.999 * weight + 0.001 * others])
    reached = (others * scores).sum(-1) + tsallis_entropy(others, alpha)
    assert float((reached - best).max()) <= 1e-9 * (1 + size)


@pytest.mark.parametrize("alpha", [1.2, 1.5, 2.0, 3.0])
def test_all_weight_is_on_one_entry_if_and_only_if_it_leads_by_the_margin(alpha):
    margin = 1 / (alpha - 1)
    for lead, single in ((margin * 1.0001, True), (margin * 0.99, False)):
        scores = torch.tensor([[5.0 + lead, 5.0, 1.0]]).double()
        assert (entmax(scores, alpha)[0].tolist() == [1.0, 0.0, 0.0]) == single
    assert bool((entmax(torch.tensor([[50.0, 0.0]]).double(), 1.0) > 0).all())  # softmax never


@pytest.mark.parametrize("alpha", [1.0, 1.3, 1.5, 2.0, 2.5])
def test_derivatives_are_those_of_finite_differences(alpha):
    scores = 0.7 * randn(0, 3, 5)
    assert torch.autograd.gradcheck(lambda z: entmax(z, alpha), scores.requires_grad_(), atol=1e-6)
    assert torch.autograd.gradgradcheck(lambda z: entmax(z, alpha), (0.1 * randn(1, 2, 4)).requires_grad_(), atol=1e-6)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_extreme_scores(alpha):
    scores = torch.tensor([[1e4, -1e4, 0.0], [1e8, 1e8, -1e8], [3.0, -math.inf, 3.0]]).double()
    expected = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.5, 0.0, 0.5]]).double()
    assert_close(entmax(scores, alpha), expected, rtol=0, atol=1e-12)
    assert_close(entmax(scores.float(), alpha), expected.float(), rtol=0, atol=1e-6)
    assert_close(
        entmax(torch.zeros(2, 5).double(), alpha), torch.full((2, 5), 0.2, dtype=torch.float64), rtol=0, atol=1e-12
    )
    assert_close(entmax(torch.ones(3, 1), alpha), torch.ones(3, 1))


def test_alpha_near_one_is_softmax():
    """A public implementation returns equal weights at alpha 1."""
    scores = randn(0, 4, 6)
    assert torch.equal(entmax(scores, 1.0), torch.softmax(scores, -1))
    assert_close(entmax(scores, 1 + 1e-9), torch.softmax(scores, -1), rtol=0, atol=1e-8)


@pytest.mark.parametrize("alpha", [1.2, 1.5, 2.0, 3.0])
@pytest.mark.parametrize("beta", [0.3, 1.0, 4.0])
def test_a_pattern_is_an_exact_fixed_point_if_and_only_if_it_is_separated_by_the_margin(alpha, beta):
    patterns = randn(3, 50, 8)
    memory = Sparse(patterns, beta, alpha)
    found = certificate(memory)
    exact = (memory.update(patterns) == patterns).all(-1)
    assert exact.tolist() == found.certified.tolist()
    assert bool((found.margin[exact] >= 0).all())
    assert not bool((found.margin[~exact] >= 0).any())
    assert not bool((Continuous(patterns, beta).update(patterns) == patterns).all(-1).any())


def test_entmax_memories_are_exact_in_one_step_from_within_the_radius():
    count = 0
    for seed in range(40):
        patterns = 2 * randn(seed, 12, 6)
        memory = Sparse(patterns, 1.0, (1.3, 1.5, 2.0)[seed % 3])
        found = certificate(memory)
        direction = torch.nn.functional.normalize(randn(seed + 100, 12, 6), dim=-1)
        cue = patterns + 0.999 * found.radius[:, None] * direction
        # The nearest rival pulls hardest.
        rival = (patterns @ patterns.T).fill_diagonal_(-math.inf).argmax(-1)
        toward = torch.nn.functional.normalize(patterns[rival] - patterns, dim=-1)
        for start in (cue, patterns + 0.999 * found.radius[:, None] * toward):
            assert_close(memory.update(start)[found.certified], patterns[found.certified], rtol=0, atol=1e-14)
        count += int(found.certified.sum())
        assert bool((found.bound[found.certified] == 0).all())
    assert count > 100


def test_the_entropy_checks_its_arguments():
    with pytest.raises(UserError, match="alpha"):
        tsallis_entropy(torch.tensor([0.5, 0.5]), 0)
    with pytest.raises(UserError, match="weight"):
        tsallis_entropy([0.5, 0.5], 2.0)
