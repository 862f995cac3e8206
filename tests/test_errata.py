"""Misprints of the paper: the printed form must fail, the corrected one must hold to 1e-10."""

import math

import pytest
import torch
from scipy import integrate, stats
from torch import Tensor
from torch.testing import assert_close

from massieu import Gaussian, GaussianMixture, Points, bregman, conjugate
from massieu.duality import natural_from_mean
from massieu.measures.measure import gradient

HOLDS = {"rtol": 1e-10, "atol": 1e-10}


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture
def points() -> Points:
    return Points(randn(9, 4, seed=0), randn(9, seed=1))


def misses(found: Tensor, expected: Tensor) -> float:
    """Smallest relative gap over the queries: how clearly the printed form fails."""
    return float(((found - expected).abs() / expected.abs()).min())


def kullback_leibler(points: Points, first: Tensor, second: Tensor) -> Tensor:
    """By its definition, as a sum over atoms."""
    p, q = points.probabilities(first), points.probabilities(second)
    return (p * (p / q).log()).sum(-1)


def test_bregman_in_the_printed_order_is_not_the_divergence(points):
    first, second = randn(5, 4, seed=2), randn(5, 4, seed=3)
    printed = kullback_leibler(points, first, second)
    corrected = kullback_leibler(points, second, first)
    found = bregman(points, first, second)
    assert_close(found, corrected, **HOLDS)
    assert misses(found, printed) > 1e-2
    assert_close(points.divergence(first, second), printed, **HOLDS)


def test_bregman_of_the_dual_is_the_divergence_in_order(points):
    first, second = randn(3, 4, seed=2), randn(3, 4, seed=3)

    def dual(mean: Tensor) -> Tensor:
        # Danskin: the gradient of the supremum is the maximizer, which is held fixed.
        natural = natural_from_mean(points, mean.detach()).natural
        return (natural * mean).sum(-1) - points.log_normalizer(natural)

    found = bregman(dual, points.mean(first), points.mean(second))
    assert_close(found, kullback_leibler(points, first, second), **HOLDS)
    assert misses(found, kullback_leibler(points, second, first)) > 1e-2


def test_the_uncentered_second_moment_is_not_the_fisher_matrix(points):
    natural = randn(5, 4, seed=2)
    hessian = torch.stack(
        [gradient(lambda eta, i=i: points.mean(eta)[..., i], natural) for i in range(points.dim)], dim=-2
    )
    weight = points.probabilities(natural)
    printed = torch.einsum("qn,nd,ne->qde", weight, points.support, points.support)
    mean = points.mean(natural)
    corrected = printed - mean[..., :, None] * mean[..., None, :]
    assert_close(hessian, corrected, **HOLDS)
    assert_close(points.fisher(natural), corrected, **HOLDS)
    assert float(((printed - hessian).norm(dim=(-2, -1)) / hessian.norm(dim=(-2, -1))).min()) > 0.1


def test_the_misplaced_parenthesis_in_the_dual_changes_a_sign(points):
    natural = randn(5, 4, seed=2)
    p = points.probabilities(natural)
    entropy = -(p * p.log()).sum(-1)
    log_density = (p * points.log_weight).sum(-1)
    dual = conjugate(points, points.mean(natural))
    assert_close(dual, -entropy - log_density, **HOLDS)
    assert_close(dual, (p * (p.log() - points.log_weight)).sum(-1), **HOLDS)
    printed = -(entropy - log_density)
    assert misses(printed, dual) > 1e-2


def test_the_misplaced_parenthesis_fails_for_a_gaussian_too():
    measure = Gaussian(torch.tensor([0.5], dtype=torch.float64), torch.tensor([[2.0]], dtype=torch.float64))
    natural = torch.tensor([[0.8]], dtype=torch.float64)
    mean = float(measure.mean(natural))
    member, base = stats.norm(mean, math.sqrt(2.0)), stats.norm(0.5, math.sqrt(2.0))
    log_density = integrate.quad(lambda x: member.pdf(x) * base.logpdf(x), -20, 20, epsabs=1e-13)[0]
    dual = float(conjugate(measure, measure.mean(natural)))
    assert dual == pytest.approx(-float(member.entropy()) - log_density, abs=1e-10)
    assert abs(dual - (-float(member.entropy()) + log_density)) > 1
    assert float(measure.entropy(natural)) == pytest.approx(float(member.entropy()), abs=1e-12)


def test_the_lower_bound_needs_weights_that_sum_to_one():
    locations = torch.tensor([[-1.0], [1.5]], dtype=torch.float64)
    covariances = torch.tensor([[[0.5]], [[2.0]]], dtype=torch.float64)
    log_weight = torch.tensor([0.4, 0.6], dtype=torch.float64).log()
    natural = torch.linspace(-2, 2, 41, dtype=torch.float64)[:, None]

    normalized = GaussianMixture(log_weight, locations, covariances)
    gap = normalized.log_normalizer(natural) - normalized.lower_bound(natural)
    assert float(gap.min()) >= -1e-12
    responsibility = torch.softmax(
        log_weight + natural * locations.mT + 0.5 * natural.square() * covariances.flatten(), dim=-1
    )
    jensen = (log_weight.exp() * (log_weight - responsibility.log())).sum(-1)
    assert_close(gap, jensen, **HOLDS)
    assert_close(normalized.lower_bound_gradient(natural), gradient(normalized.lower_bound, natural), **HOLDS)

    for total in (1.8, 0.54):
        scaled = GaussianMixture(log_weight + math.log(total), locations, covariances)
        exponents = natural * locations.mT + 0.5 * natural.square() * covariances.flatten()
        printed = exponents @ scaled.log_weight.exp()
        assert float((scaled.log_normalizer(natural) - printed).min()) < -1e-2  # not a lower bound
        corrected = math.log(total) + printed / total
        assert_close(scaled.log_normalizer(natural) - corrected, jensen, **HOLDS)
        with pytest.raises(ValueError, match=rf"weights that sum to one, got the sum {total}; subtract"):
            scaled.lower_bound(natural)
        with pytest.raises(ValueError, match="weights that sum to one"):
            scaled.lower_bound_gradient(natural)


def test_equation_four_of_the_appendix_has_a_gradient_and_a_logarithm_too_many():
    # One dimension, positive locations: the logarithm that eq. 4 takes of the average exists.
    locations = torch.tensor([[0.5], [1.5], [3.0]], dtype=torch.float64)
    log_weight = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log()
    variance = 0.7
    mixture = GaussianMixture(log_weight, locations, torch.tensor([[variance]], dtype=torch.float64))
    natural = torch.tensor([[-0.6], [0.4], [0.9]], dtype=torch.float64)

    def average(eta: Tensor) -> Tensor:
        return Points(locations, log_weight).mean(eta)[..., 0]

    by_quadrature = []
    for eta in natural.flatten().tolist():
        pairs = list(zip(log_weight.exp().tolist(), locations.flatten().tolist(), strict=True))

        def density(x: float, eta: float = eta, pairs: list = pairs) -> float:
            return math.exp(eta * x) * sum(w * stats.norm.pdf(x, m, math.sqrt(variance)) for w, m in pairs)

        total = integrate.quad(density, -15, 20, epsabs=1e-13, epsrel=1e-13)[0]
        first = integrate.quad(lambda x: x * density(x), -15, 20, epsabs=1e-13, epsrel=1e-13)[0]
        by_quadrature.append([first / total])
    truth = torch.tensor(by_quadrature, dtype=torch.float64)

    corrected = variance * natural + average(natural)[..., None]
    printed = variance * natural + gradient(lambda eta: average(eta).log(), natural)
    assert_close(corrected, truth, **HOLDS)
    assert_close(mixture.mean(natural), truth, **HOLDS)
    assert misses(printed, truth) > 0.1
