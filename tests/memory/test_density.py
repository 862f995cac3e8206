"""The density of a memory against a mixture written out, quadrature and autograd."""

import math

import pytest
import torch
from torch.distributions import Categorical, Independent, MixtureSameFamily, Normal
from torch.testing import assert_close

from massieu.checks import UserError
from massieu.memory import Continuous, Kernel, Sparse, denoise, log_density


def randn(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mixture(patterns, beta, logits):
    places = Independent(Normal(patterns, beta**-0.5), 1)
    return MixtureSameFamily(Categorical(logits=logits), places)


@pytest.mark.parametrize("beta", [0.3, 2.0, 40.0])
def test_the_density_is_a_mixture_in_which_longer_patterns_weigh_more(beta):
    patterns, state, weight = randn(0, 6, 3), randn(1, 9, 3), randn(2, 6)
    length = 0.5 * beta * patterns.square().sum(-1)
    assert_close(log_density(Continuous(patterns, beta), state), mixture(patterns, beta, length).log_prob(state))
    weighted = Continuous(patterns, beta, log_weight=weight)
    assert_close(log_density(weighted, state), mixture(patterns, beta, length + weight).log_prob(state))
    kernel = log_density(Kernel(patterns, "l2", beta), state)
    assert_close(kernel, mixture(patterns, beta, torch.zeros(6)).log_prob(state))
    # The control: patterns of different length are no kernel density of the softmax memory.
    assert not torch.allclose(kernel, log_density(Continuous(patterns, beta), state), rtol=1e-3)


def test_the_density_has_mass_one():
    memory = Continuous(torch.tensor([[1.0], [-0.5]]).double(), 3.0)
    grid = torch.linspace(-8, 8, 4001, dtype=torch.float64)
    assert float(torch.trapezoid(log_density(memory, grid[:, None]).exp(), grid)) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("make", [Continuous, lambda x, beta: Kernel(x, "l2", beta)])
def test_the_denoiser_is_the_formula_of_tweedie_and_the_update(make):
    memory, state = make(randn(0, 6, 3), 2.5), randn(1, 9, 3).requires_grad_()
    (score,) = torch.autograd.grad(log_density(memory, state).sum(), state)
    assert_close(denoise(memory, state), state + score / 2.5, rtol=0, atol=1e-12)
    assert_close(denoise(memory, state), memory.update(state))


def test_the_denoiser_has_the_smallest_error_of_all():
    """Patterns of one length and noise of variance 1/beta: no other estimate that was tried has a smaller mean square."""
    generator = torch.Generator().manual_seed(0)
    patterns, beta = 2 * torch.nn.functional.normalize(randn(0, 6, 4), dim=-1), 1.5
    clean = patterns[torch.randint(6, (20000,), generator=generator)]
    noisy = clean + torch.randn(clean.shape, generator=generator, dtype=torch.float64) / math.sqrt(beta)
    error = (denoise(Continuous(patterns, beta), noisy) - clean).square().sum(-1).mean()
    for other in (0.5 * beta, 2 * beta):
        assert float((Continuous(patterns, other).update(noisy) - clean).square().sum(-1).mean()) > float(error) + 0.01


def test_only_gaussian_mixtures_have_a_density():
    state = torch.eye(2)
    for memory in (Sparse(torch.eye(2), 1.0, 2.0), Kernel(torch.eye(2), "l1", 1.0)):
        for function in (log_density, denoise):
            with pytest.raises(UserError, match="memory"):
                function(memory, state)
    with pytest.raises(UserError, match="memory"):
        log_density(Continuous(torch.eye(2), torch.ones(3, 1)), state)
