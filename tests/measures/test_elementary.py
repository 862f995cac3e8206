import itertools
import math

import mpmath
import pytest
import torch
from scipy import integrate, stats
from torch.testing import assert_close

from massieu.checks import UserError
from massieu.measures.elementary import Gamma, Hypercube, Laplace, Poisson


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


CASES = {
    "hypercube": (Hypercube(3), tensor([[0.0, 0.4, -1.3], [2.5, -0.7, 0.1]])),
    "gamma": (Gamma(tensor([2.5, 0.3]), tensor([0.7, 2.0])), tensor([[0.0, 0.0], [0.6, -3.0], [1.4, 0.45]])),
    "poisson": (Poisson(tensor([0.2, 4.0])), tensor([[0.0, 0.0], [-2.0, 1.5]])),
    "laplace": (Laplace(tensor([0.5, 2.0])), tensor([[0.0, 0.0], [1.9, -0.3], [-1.0, 0.49]])),
}
each_family = pytest.mark.parametrize(("measure", "natural"), CASES.values(), ids=CASES.keys())


def integral(function, *bounds):
    return integrate.quad(function, *bounds, epsabs=0, epsrel=1e-11, limit=500)[0]


@each_family
def test_the_support_function_bounds_every_draw(measure, natural):
    draws = measure.sample(natural, 1000, torch.Generator().manual_seed(2))
    directions = torch.randn(200, 1, measure.dim, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    reached = torch.einsum("sqd,uod->uosq", draws, directions).amax((-1, -2))
    assert bool((reached <= measure.support_function(directions) + 1e-12).all())


def test_the_hypercube_agrees_with_a_sum_over_its_corners():
    measure, natural = CASES["hypercube"]
    corners = tensor(list(itertools.product([-1.0, 1.0], repeat=3)))
    scores = natural @ corners.T
    probability = scores.softmax(-1)
    assert_close(measure.log_normalizer(natural), scores.logsumexp(-1), rtol=1e-14, atol=0)
    assert_close(measure.mean(natural), probability @ corners, rtol=1e-13, atol=1e-15)
    assert_close(measure.entropy(natural), torch.special.entr(probability).sum(-1), rtol=1e-13, atol=0)
    assert_close(measure.support_function(natural), scores.amax(-1), rtol=1e-14, atol=0)


@pytest.mark.parametrize("spin", [30.0, -200.0])
def test_the_fisher_matrix_of_the_hypercube_keeps_its_digits_far_out(spin):
    assert_close(Hypercube(1).fisher(tensor([[spin]])).item(), float(mpmath.sech(spin) ** 2), rtol=1e-13, atol=0)


def test_the_entropy_names_its_reference():
    references = {name: measure.reference for name, (measure, _) in CASES.items()}
    expected = {"hypercube": "counting", "gamma": "lebesgue", "poisson": "intrinsic", "laplace": "lebesgue"}
    assert references == expected


def test_the_gamma_normalizer_is_the_integral_of_the_tilted_density():
    (shape, scale), natural = (2.5, 0.7), 0.6
    measure = Gamma(shape, scale)
    log_density = stats.gamma(shape, scale=scale).logpdf
    expected = math.log(integral(lambda x: math.exp(natural * x + log_density(x)), 0, math.inf))
    assert expected == pytest.approx(1.3618179386, rel=1e-10)
    assert measure.log_normalizer(tensor([[natural]])).item() == pytest.approx(expected, rel=1e-10)
    assert measure.mean(tensor([[natural]])).item() == pytest.approx(3.01724137931, rel=1e-11)


def test_the_gamma_entropy_is_that_of_a_gamma_with_the_tilted_scale():
    measure, natural = CASES["gamma"]
    scale = measure.scale / (1 - measure.scale * natural)
    expected = stats.gamma(measure.shape.numpy(), scale=scale.numpy()).entropy().sum(-1)
    assert_close(measure.entropy(natural), torch.from_numpy(expected), rtol=1e-12, atol=1e-12)


def test_the_poisson_normalizer_is_the_sum_of_the_series():
    measure = Poisson(4.0)
    x = torch.arange(200, dtype=torch.float64)
    log_pmf = torch.from_numpy(stats.poisson(4.0).logpmf(x.numpy()))
    for natural in (-3.0, 0.5, 2.0):
        scores = natural * x + log_pmf
        point = tensor([[natural]])
        assert_close(measure.log_normalizer(point)[0], scores.logsumexp(0), rtol=1e-12, atol=0)
        assert_close(measure.mean(point)[0, 0], scores.softmax(0) @ x, rtol=1e-12, atol=0)
        log_ratio = scores.log_softmax(0) - log_pmf
        assert_close(measure.entropy(point)[0], -(scores.softmax(0) @ log_ratio), rtol=1e-11, atol=0)


@pytest.mark.parametrize("natural", [0.0, 0.3, -0.45])
def test_the_laplace_family_agrees_with_quadrature(natural):
    measure, point = Laplace(2.0), tensor([[natural]])

    def tilted(x):
        return math.exp(natural * x - abs(x) / 2) / 4

    def both_sides(function):
        return integral(function, -math.inf, 0) + integral(function, 0, math.inf)

    total = both_sides(tilted)
    mean = both_sides(lambda x: x * tilted(x)) / total
    entropy = math.log(total) - both_sides(lambda x: tilted(x) * (natural * x - abs(x) / 2 - math.log(4))) / total
    assert measure.log_normalizer(point).item() == pytest.approx(math.log(total), rel=1e-9, abs=1e-11)
    assert measure.mean(point).item() == pytest.approx(mean, rel=1e-9, abs=1e-11)
    assert measure.entropy(point).item() == pytest.approx(entropy, rel=1e-9)


def test_the_laplace_mean_keeps_its_digits_next_to_the_edge():
    natural = 1 - 2.0**-40
    with mpmath.workdps(40):
        expected = 2 * mpmath.mpf(natural) / (1 - mpmath.mpf(natural) ** 2)
    assert Laplace(1.0).mean(tensor([[natural]])).item() == pytest.approx(float(expected), rel=1e-14)


def test_one_number_serves_all_coordinates():
    measure = Gamma(shape=2.0, scale=tensor([0.5, 1.0]))
    assert measure.dim == 2
    assert_close(measure.mean(tensor([[0.0, 0.0]])), tensor([[1.0, 2.0]]))


def test_gradients_reach_the_parameters():
    scale = tensor([0.5, 1.0]).requires_grad_()
    value = Gamma(2.0, scale).log_normalizer(tensor([[0.3, 0.4]])).sum()
    (slope,) = torch.autograd.grad(value, scale)
    assert_close(slope, 2 * tensor([0.3, 0.4]) / (1 - tensor([0.15, 0.4])))


@pytest.mark.parametrize("measure", [Gamma(1.0, 1.0), Poisson(1.0)], ids=["gamma", "poisson"])
def test_half_lines_have_an_infinite_support_function_upwards(measure):
    assert measure.support_function(tensor([[-1.0], [0.0], [1e-9]])).tolist() == [0.0, 0.0, math.inf]


@pytest.mark.parametrize(
    ("measure", "outside", "bound"),
    [
        (Gamma(2.5, 0.5), [2.0], r"natural < 1/scale = \[2.0\]"),
        (Gamma(2.5, tensor([0.5, 4.0])), [1.9, 0.3], r"natural < 1/scale = \[2.0, 0.25\]"),
        (Laplace(0.5), [2.0], r"\|natural\| < 1/scale = \[2.0\]"),
        (Laplace(0.5), [-2.5], r"\|natural\| < 1/scale = \[2.0\]"),
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
        (lambda: Hypercube(0), "dim must"),
        (lambda: Hypercube(2.0), "dim must"),
        (lambda: Hypercube(True), "dim must"),
        (lambda: Gamma(0.0, 1.0), "shape must"),
        (lambda: Gamma(1.0, tensor([1.0, -2.0])), "scale must be positive"),
        (lambda: Gamma(1.0, math.inf), "scale must be finite"),
        (lambda: Poisson(0.0), "rate must be positive"),
        (lambda: Poisson(tensor([])), "rate must .* shape"),
        (lambda: Laplace(-1.0), "scale must be positive"),
        (lambda: Laplace(math.nan), "scale must be finite"),
        (lambda: Laplace(torch.ones(1, 2)), "scale must .* shape"),
        (lambda: Gamma(torch.ones(2), torch.ones(3)), r"shape and scale must be .* got \(2,\) and \(3,\)"),
    ],
)
def test_impossible_parameters_are_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()
