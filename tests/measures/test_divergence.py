"""Divergences against forty digits: close parameters, far ones, absent atoms, large scores, and their gradients."""

import itertools

import mpmath
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import massieu
from massieu import Gamma, Gaussian, GaussianMixture, Hypercube, Laplace, Measure, Mixture, Multinomial, Points, Poisson
from massieu.measures.remainders import exp_remainder, log_remainder

DISTANCES = [1e-12, 1e-9, 1e-6, 1e-3, 0.1, 1.0, 10.0]


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def exact_points(support: Tensor, log_weight: Tensor, first: Tensor, second: Tensor) -> float:
    with mpmath.workdps(60):
        rows = [[mpmath.mpf(x) for x in row] for row in support.tolist()]
        log_p, log_q = (
            [mpmath.fdot(row, eta.tolist()) + w for row, w in zip(rows, log_weight.tolist(), strict=True)]
            for eta in (first, second)
        )
        present = [j for j, w in enumerate(log_weight.tolist()) if w > -torch.inf]
        z_p, z_q = (mpmath.log(mpmath.fsum(mpmath.exp(x[j]) for j in present)) for x in (log_p, log_q))
        total = mpmath.fsum(mpmath.exp(log_p[j] - z_p) * (log_p[j] - z_p - log_q[j] + z_q) for j in present)
        return float(total)


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0])
def test_points_agree_with_forty_digits_at_any_distance(distance, scale):
    support, first, step = normal(0, 7, 3), scale * normal(1, 4, 3), distance * normal(2, 4, 3)
    log_weight = normal(3, 7)
    log_weight[2] = -torch.inf
    found = Points(support, log_weight).divergence(first, first + step)
    second = first + step
    expected = [exact_points(support, log_weight, *pair) for pair in zip(first, second, strict=True)]
    assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-11, atol=0)
    assert bool((found > 0).all())


def test_points_with_scores_of_ten_thousand():
    support = 100 * normal(0, 6, 4)
    first, second = 100 * normal(1, 3, 4), 100 * normal(2, 3, 4)
    assert float((first @ support.T).abs().max()) > 1e4
    nothing = torch.zeros(6, dtype=torch.float64)
    for step in (1e-9, 1e-3, 1.0):
        other = first + step * (second - first)
        expected = [exact_points(support, nothing, *pair) for pair in zip(first, other, strict=True)]
        # Where one atom has nearly all of the mass, the rest keeps the rounding of its score.
        assert_close(
            Points(support).divergence(first, other), torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=0
        )


def test_points_far_from_the_origin_lose_only_the_digits_of_their_distance():
    support, first = normal(0, 5, 3) + 1e6, normal(1, 2, 3) * 1e-3
    second = first + 1e-9 * normal(2, 2, 3)
    nothing = torch.zeros(5, dtype=torch.float64)
    expected = [exact_points(support, nothing, *pair) for pair in zip(first, second, strict=True)]
    found = Points(support).divergence(first, second)
    assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-8, atol=0)


def test_a_single_atom_is_no_distance_from_itself_and_has_a_finite_gradient():
    first, second = normal(0, 3, 4).requires_grad_(), normal(1, 3, 4).requires_grad_()
    found = Points(normal(2, 1, 4)).divergence(first, second)
    assert found.tolist() == [0.0, 0.0, 0.0]
    found.sum().backward()
    assert first.grad.abs().max() == second.grad.abs().max() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_divergence_has_the_dtype_of_the_first_argument_and_its_accuracy(dtype):
    support, first = normal(0, 7, 3), normal(1, 4, 3).to(dtype)
    second = (first.double() + 1e-4 * normal(2, 4, 3)).to(dtype)
    found = Points(support.to(dtype)).divergence(first, second)
    nothing = torch.zeros(7, dtype=torch.float64)
    expected = [
        exact_points(support.to(dtype), nothing, *pair) for pair in zip(first.double(), second.double(), strict=True)
    ]
    assert found.dtype == dtype
    assert_close(found.double(), torch.tensor(expected, dtype=torch.float64), rtol=8 * torch.finfo(dtype).eps, atol=0)


def test_points_take_their_rows_in_blocks(monkeypatch):
    support, first, second = normal(0, 7, 3), normal(1, 2, 5, 3), normal(2, 2, 5, 3)
    log_weight = normal(3, 5, 7)
    measure = Points(support, log_weight)
    whole = measure.divergence(first, second)
    monkeypatch.setattr("massieu.measures.points.FISHER_NUMBERS", 20)
    assert_close(measure.divergence(first, second), whole, rtol=1e-14, atol=0)


ROWS = {
    "gaussian": (Gaussian(normal(5, 2), torch.diag(torch.tensor([0.4, 2.0], dtype=torch.float64))), 1.0),
    "hypercube": (Hypercube(2), 1.0),
    "hypercube, saturated": (Hypercube(2), 15.0),
    "gamma": (Gamma(2.5, torch.tensor([0.05, 0.02], dtype=torch.float64)), 1.0),
    "poisson": (Poisson(torch.tensor([1.5, 0.3], dtype=torch.float64)), 1.0),
    "laplace": (Laplace(torch.tensor([0.05, 0.02], dtype=torch.float64)), 1.0),
    "multinomial": (Multinomial(torch.tensor([0.3, -0.2], dtype=torch.float64), 5), 1.0),
    "box": (massieu.Box(2, 1.3), 1.0),
    "ball": (massieu.Ball(2, 1.3), 1.0),
    "sphere": (massieu.Sphere(2), 1.0),
    "prior": (massieu.ConjugatePrior("categorical", torch.tensor([20.0, 30.0], dtype=torch.float64), 90.0), 1.0),
    "urn": (massieu.DirichletMultinomial(torch.tensor([0.7, 2.0], dtype=torch.float64), 4), 1.0),
}


def reference(name: str, measure: Measure, natural: list) -> mpmath.mpf:
    """The log normalizer in mpmath, written from the definition."""
    first, second = natural
    log = mpmath.log
    if name == "gaussian":
        a = [mpmath.mpf(x) for x in measure.location.tolist()]
        v = [mpmath.mpf(x) for x in measure.covariance.diagonal().tolist()]
        return sum(a[i] * natural[i] + v[i] * natural[i] ** 2 / 2 for i in range(2))
    if name.startswith("hypercube"):
        return sum(log(mpmath.exp(x) + mpmath.exp(-x)) for x in natural)
    if name == "gamma":
        return -sum(mpmath.mpf(2.5) * log(1 - s * x) for s, x in zip(measure.scale.tolist(), natural, strict=True))
    if name == "poisson":
        return sum(r * mpmath.expm1(x) for r, x in zip(measure.rate.tolist(), natural, strict=True))
    if name == "laplace":
        return -sum(log(1 - (mpmath.mpf(s) * x) ** 2) for s, x in zip(measure.scale.tolist(), natural, strict=True))
    if name == "multinomial":
        return 5 * log(sum(mpmath.exp(w + x) for w, x in zip(measure.log_weight.tolist(), natural, strict=True)))
    if name == "box":
        return sum(log(2 * mpmath.sinh(mpmath.mpf(1.3) * x) / x) for x in natural)
    if name in ("sphere", "ball"):
        radius, order = (1, mpmath.mpf(0)) if name == "sphere" else (mpmath.mpf(1.3), mpmath.mpf(1))
        kappa = radius * mpmath.sqrt(first**2 + second**2)
        return log(mpmath.besseli(order, kappa) / kappa**order)
    if name == "prior":
        a, b = 20 + first, 30 + second
        return mpmath.loggamma(a) + mpmath.loggamma(b) + mpmath.loggamma(90 - a - b)
    alpha = [mpmath.mpf(x) for x in measure.concentration.tolist()]
    total = mpmath.mpf(0)
    for k in range(5):  # counts (k, 4 - k)
        mass = mpmath.rf(alpha[0], k) / mpmath.factorial(k) * mpmath.rf(alpha[1], 4 - k) / mpmath.factorial(4 - k)
        total += mass * mpmath.exp(k * first + (4 - k) * second)
    return log(total)


@pytest.mark.parametrize(("name", "distance"), list(itertools.product(ROWS, DISTANCES)))
def test_families_agree_with_forty_digits_at_any_distance(name, distance):
    measure, scale = ROWS[name]
    first = scale * normal(7, 1, 2)
    second = first + distance * torch.tensor([[0.6, -0.5]], dtype=torch.float64)
    with mpmath.workdps(60):
        start, end = ([mpmath.mpf(x) for x in each[0].tolist()] for each in (first, second))
        slope = [
            mpmath.diff(lambda *eta: reference(name, measure, list(eta)), tuple(start), n) for n in ((1, 0), (0, 1))
        ]
        expected = reference(name, measure, end) - reference(name, measure, start)
        expected -= sum(s * (e - b) for s, e, b in zip(slope, end, start, strict=True))
        expected = float(expected)
    found = measure.divergence(first, second)
    assert_close(found.item(), expected, rtol=1e-10, atol=0)


@pytest.mark.parametrize("distance", [1e-10, 1e-5, 0.3])
def test_mixtures_convolutions_and_tilts_are_those_of_their_parts(distance):
    first, step = normal(0, 4, 2), distance * normal(1, 4, 2)
    second = first + step
    step = second - first
    keys, covariance = normal(2, 5, 2), torch.diag(torch.tensor([0.4, 2.0], dtype=torch.float64))
    log_weight, no_spread = normal(3, 5), 1e-30 * torch.eye(2, dtype=torch.float64)
    points = Points(keys, log_weight)
    expected = points.divergence(first, second)
    narrow = GaussianMixture(log_weight, keys, no_spread)
    assert_close(narrow.divergence(first, second), expected, rtol=1e-11, atol=0)
    single = Mixture(log_weight, [Points(key[None]) for key in keys])
    assert_close(single.divergence(first, second), expected, rtol=1e-11, atol=0)
    wide = GaussianMixture(log_weight, keys, covariance)  # one covariance: those of points and of one Gaussian add
    gaussian = Gaussian(torch.zeros(2, dtype=torch.float64), covariance)
    both = expected + 0.5 * torch.einsum("qd,de,qe->q", step, covariance, step)
    assert_close(wide.divergence(first, second), both, rtol=1e-11, atol=0)
    eye = torch.eye(2, dtype=torch.float64)
    assert_close(
        massieu.Convolution([eye, eye], [points, gaussian]).divergence(first, second), both, rtol=1e-11, atol=0
    )
    tilted = points.tilt(torch.tensor([3.0, -2.0], dtype=torch.float64))
    moved = Points(keys, log_weight + keys @ torch.tensor([3.0, -2.0], dtype=torch.float64))
    assert_close(tilted.divergence(first, second), moved.divergence(first, second), rtol=1e-11, atol=0)


def test_the_remainders_of_exp_and_log_keep_their_digits():
    points = [x * s for x in (1e-300, 1e-160, 1e-20, 1e-9, 1e-3, 0.2, 0.4999, 0.5001, 0.9, 20.0) for s in (1, -1)]
    for x in points:
        with mpmath.workdps(700):
            expected = float(mpmath.expm1(x) - mpmath.mpf(x))
        found = exp_remainder(torch.tensor(x, dtype=torch.float64)).item()
        assert_close(found, expected, rtol=1e-14, atol=1e-307)
        if x > -1:
            with mpmath.workdps(700):
                expected = float(mpmath.mpf(x) - mpmath.log1p(x))
            found = log_remainder(torch.tensor(x, dtype=torch.float64)).item()
            assert_close(found, expected, rtol=1e-14, atol=1e-307)


@pytest.mark.parametrize("function", [exp_remainder, log_remainder])
def test_the_remainders_have_the_right_derivatives(function):
    points = torch.tensor([-0.7, -0.51, -0.49, -1e-3, 0.0, 1e-3, 0.49, 0.51, 3.0], dtype=torch.float64)
    assert torch.autograd.gradcheck(function, points.requires_grad_())
    assert torch.autograd.gradgradcheck(function, points)
