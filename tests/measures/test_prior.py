import itertools
import math

import mpmath
import numpy as np
import pytest
import torch
from moments import assert_moments
from scipy import integrate, special
from torch.testing import assert_close

from massieu.checks import UserError
from massieu.measures.measure import Measure
from massieu.measures.prior import ConjugatePrior


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


CASES = {
    "logit beta": (ConjugatePrior("categorical", 2.0, 4.1), tensor([[0.0], [0.5], [-1.9], [2.05]])),
    "dirichlet": (ConjugatePrior("categorical", tensor([1.5, 2.0]), 5.2), tensor([[0.0, 0.0], [0.9, -1.0]])),
    "poisson": (ConjugatePrior("poisson", tensor([2.0, 0.4]), 3.0), tensor([[0.0, 0.0], [4.0, -0.3]])),
}


def quadrature(log_density, *, below=-80.0, above=80.0):
    """Log mass, mean and differential entropy of an unnormalized density on the line."""

    def expect(function):
        spans = itertools.pairwise(np.linspace(below, above, 33))
        return sum(
            integrate.quad(lambda t: function(t) * math.exp(log_density(t)), *span, epsabs=0, epsrel=1e-11)[0]
            for span in spans
        )

    mass = expect(lambda t: 1.0)
    mean = expect(lambda t: t) / mass
    return math.log(mass), mean, math.log(mass) - expect(log_density) / mass


@pytest.mark.parametrize("x", [-1.2, 0.0, 0.5])
def test_the_logit_beta_agrees_with_quadrature(x):
    measure, point = ConjugatePrior("categorical", 2.0, 4.1), tensor([[x]])
    assert measure.reference == "lebesgue"
    log_partition = special.betaln(2.0, 2.1)
    mass, mean, entropy = quadrature(lambda t: (2 + x) * t - 4.1 * np.logaddexp(0, t) - log_partition)
    assert measure.log_normalizer(point).item() == pytest.approx(mass, rel=1e-9, abs=1e-11)
    assert measure.mean(point).item() == pytest.approx(mean, rel=1e-9, abs=1e-11)
    assert measure.entropy(point).item() == pytest.approx(entropy, rel=1e-9)


@pytest.mark.parametrize("x", [-1.2, 0.0, 6.0])
def test_the_log_rate_of_a_poisson_agrees_with_quadrature(x):
    measure, point = ConjugatePrior("poisson", 2.0, 3.0), tensor([[x]])
    log_partition = special.gammaln(2.0) - 2 * math.log(3)
    mass, mean, entropy = quadrature(lambda t: (2 + x) * t - 3 * math.exp(t) - log_partition, above=4.0)
    assert measure.log_normalizer(point).item() == pytest.approx(mass, rel=1e-9, abs=1e-11)
    assert measure.mean(point).item() == pytest.approx(mean, rel=1e-9)
    assert measure.entropy(point).item() == pytest.approx(entropy, rel=1e-9)


def test_three_cells_agree_with_a_sum_over_a_grid_of_log_odds():
    measure, natural = CASES["dirichlet"]
    axis = torch.arange(-60, 60, 0.2, dtype=torch.float64)
    theta = torch.cartesian_prod(axis, axis)
    partition = torch.logsumexp(torch.cat([theta, torch.zeros_like(theta[:, :1])], -1), -1)
    # The integrand is analytic in a strip and decays, so the plain sum is exact to rounding.
    log_h = theta @ measure.statistic - measure.count * partition + 2 * math.log(0.2)
    log_h = log_h - log_h.logsumexp(0)
    scores = natural @ theta.T + log_h
    assert_close(measure.log_normalizer(natural), scores.logsumexp(-1), rtol=1e-11, atol=1e-12)
    assert_close(measure.mean(natural), scores.softmax(-1) @ theta, rtol=1e-11, atol=1e-12)
    second = torch.einsum("qn,nd,ne->qde", scores.softmax(-1), theta, theta)
    mean = measure.mean(natural)
    assert_close(measure.fisher(natural), second - mean[:, :, None] * mean[:, None, :], rtol=1e-10, atol=0)
    log_p = scores.log_softmax(-1)
    assert_close(measure.entropy(natural), -(log_p.exp() * log_p).sum(-1) + 2 * math.log(0.2), rtol=1e-11, atol=0)


def test_tilting_is_not_the_bayes_rule():
    prior, x, rest = ConjugatePrior("categorical", 2.0, 4.1), 0.5, torch.zeros(1, 1, dtype=torch.float64)
    assert prior.mean(tensor([[x]])).item() == pytest.approx(0.57710918787, abs=1e-11)
    assert prior.observe(x).mean(rest).item() == pytest.approx(-0.04789, abs=1e-5)


def test_observing_multiplies_the_prior_by_the_likelihood():
    prior = ConjugatePrior("poisson", 2.0, 1.5)
    posterior = prior.observe(torch.tensor([4]))
    log_rate = torch.linspace(-3, 3, 7, dtype=torch.float64)
    before, after = (law.statistic * log_rate - law.count * log_rate.exp() for law in (prior, posterior))
    assert_close(after - before, 4 * log_rate - log_rate.exp(), rtol=1e-13, atol=1e-13)
    assert (posterior.likelihood, posterior.dim) == ("poisson", 1)


@pytest.mark.parametrize("statistic", [1e-3, 0.3, 1.0, 7.0, 1e4])
def test_the_fisher_matrix_has_all_digits_of_the_trigamma_function(statistic):
    measure, origin = ConjugatePrior("poisson", statistic, 1.0), torch.zeros(1, 1, dtype=torch.float64)
    expected = float(mpmath.psi(1, statistic))
    assert measure.fisher(origin).item() == pytest.approx(expected, rel=1e-14)
    assert Measure.fisher(measure, origin).item() == pytest.approx(expected, rel=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_with_a_tiny_shape_do_not_underflow(dtype):
    measure, origin = ConjugatePrior("poisson", 1e-3, 2.0), torch.zeros(1, 1, dtype=dtype)
    draws = measure.sample(origin, 40_000, torch.Generator().manual_seed(4))
    assert bool(draws.isfinite().all())
    assert_moments(draws.double(), measure.mean(origin.double()), measure.fisher(origin.double()))


def test_the_support_is_unbounded():
    measure, natural = CASES["dirichlet"]
    assert measure.support_function(natural).tolist() == [math.inf, math.inf]


def test_gradients_reach_the_parameters():
    for likelihood in ("categorical", "poisson"):
        assert torch.autograd.gradcheck(
            lambda xi, nu, likelihood=likelihood: ConjugatePrior(likelihood, xi, nu).log_normalizer(
                tensor([[0.3, 0.4]])
            ),
            (tensor([1.5, 2.0]).requires_grad_(), tensor(5.2).requires_grad_()),
        )


@pytest.mark.parametrize(
    ("measure", "outside", "bound"),
    [
        (CASES["logit beta"][0], [-2.0], r"natural > -statistic = \[-2.0\] with sum below .* = 2.0999"),
        (CASES["logit beta"][0], [2.2], r"natural > -statistic = \[-2.0\] with sum below .* = 2.0999"),
        (CASES["dirichlet"][0], [1.0, 0.8], r"natural > -statistic = \[-1.5, -2.0\] with sum below .* = 1.7"),
        (CASES["poisson"][0], [0.0, -0.4], r"natural > -statistic = \[-2.0, -0.4\], got"),
    ],
)
def test_a_natural_outside_the_domain_is_refused_with_the_bound(measure, outside, bound):
    assert measure.contains(tensor([outside, [0.0] * measure.dim])).tolist() == [False, True]
    for method in (measure.log_normalizer, measure.mean, measure.fisher, measure.expected_log_density):
        with pytest.raises(UserError, match=bound):
            method(tensor([outside]))
    with pytest.raises(UserError, match=bound):
        measure.sample(tensor([outside]), 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ConjugatePrior("bernoulli", 1.0, 2.0), "likelihood must"),
        (lambda: ConjugatePrior("poisson", 0.0, 2.0), "statistic must"),
        (lambda: ConjugatePrior("poisson", 1.0, -2.0), "count must be positive"),
        (lambda: ConjugatePrior("poisson", 1.0, torch.ones(2)), "count must be one number"),
        (lambda: ConjugatePrior("categorical", tensor([1.0, 2.0]), 3.0), "count must exceed"),
        (lambda: CASES["poisson"][0].observe(3.0), r"statistic of one poisson draw, of shape \(2,\), got \[3.0\]"),
        (lambda: CASES["poisson"][0].observe(tensor([1.0, -1.0])), "statistic of one poisson draw"),
        (lambda: CASES["dirichlet"][0].observe(tensor([1.0, 1.0])), "statistic of one categorical draw"),
    ],
)
def test_impossible_parameters_are_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()
