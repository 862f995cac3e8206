"""Sphere, ball and box against mpmath, quadrature and their own draws."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
import torch
from scipy import integrate, stats
from torch import Tensor
from torch.testing import assert_close

from massieu.checks import UserError
from massieu.measures.bessel import radial
from massieu.measures.measure import Measure, gradient
from massieu.measures.sphere import Ball, Box, Sphere

KAPPAS = [0.0, 1e-8, 1e-3, 1.0, 10.0, 29.0, 30.0, 31.0, 49.0, 50.0, 51.0, 1e2, 1e3, 1e4, 1e6]
MEASURES = [Sphere(2), Sphere(3), Sphere(7), Ball(1, 0.7), Ball(2, 3.0), Ball(5), Box(3, torch.tensor([0.5, 1.0, 4.0]))]


@pytest.fixture(autouse=True)
def fifty_digits():
    with mpmath.workdps(50):
        yield


def named(measure: Measure) -> str:
    return repr(measure)


def bessel(order: float, kappa: float) -> tuple[mpmath.mpf, mpmath.mpf, mpmath.mpf]:
    """Value, slope and curvature by definition; with fifty digits the textbook formula for the last may cancel."""
    v, k = mpmath.mpf(order), mpmath.mpf(kappa)
    if k == 0:
        return -v * mpmath.log(2) - mpmath.loggamma(v + 1), 1 / (2 * v + 2), 1 / (2 * v + 2)
    this, above = mpmath.besseli(v, k), mpmath.besseli(v + 1, k)
    ratio = above / this
    return mpmath.log(this) - v * mpmath.log(k), ratio / k, 1 - ratio**2 - (2 * v + 1) * ratio / k


def directions(dim: int, count: int, seed: int = 0) -> Tensor:
    normal = torch.randn(count, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return normal / normal.norm(dim=-1, keepdim=True)


@pytest.mark.parametrize("dim", [2, 3, 4, 8, 61, 62, 63, 64, 65, 1000])
def test_radial_function_has_all_its_digits_in_every_regime(dim):
    order = dim / 2 - 1
    found = torch.stack(radial(order, torch.tensor(KAPPAS, dtype=torch.float64).square()))
    for column, kappa in zip(found.unbind(1), KAPPAS, strict=True):
        value, slope, curvature = bessel(order, kappa)
        # Measured worst relative errors: 1.4e-15, 7e-16, 3.3e-15.
        assert abs(column[0].item() - value) <= 1e-14 * max(1, abs(value))
        assert abs(column[1].item() / slope - 1) <= 1e-14
        assert abs(column[2].item() / curvature - 1) <= 2e-14


@pytest.mark.parametrize(("kappa", "least_error"), [(1e6, 1e-5), (1e8, 0.5)])
def test_textbook_curvature_loses_its_digits_at_large_kappa(kappa, least_error):
    # The control of the test above: the Riccati equation on the circle, its ratio correctly rounded to float64.
    _, slope, curvature = bessel(0.0, kappa)
    ratio = float(slope * kappa)
    textbook = 1 - ratio**2 - ratio / kappa
    ours = radial(0.0, torch.tensor([kappa**2], dtype=torch.float64)).curvature.item()
    assert abs(textbook / curvature - 1) > least_error
    assert abs(ours / curvature - 1) <= 1e-15


@pytest.mark.parametrize("dim", [2, 3, 64, 1000])
@pytest.mark.parametrize("kappa", [1e-8, 1.0, 30.0, 1e3, 1e6])
def test_sphere_mean_and_fisher_agree_with_mpmath(dim, kappa):
    # Along an axis the matrix holds its two eigenvalues unmixed, so each can be judged relative to itself.
    natural = torch.zeros(1, dim, dtype=torch.float64)
    natural[0, 1] = -kappa
    _, slope, curvature = bessel(dim / 2 - 1, kappa)
    expected = torch.full((dim,), float(slope), dtype=torch.float64)
    expected[1] = float(curvature)
    assert_close(Sphere(dim).mean(natural), natural * float(slope), rtol=1e-14, atol=0)
    assert_close(Sphere(dim).fisher(natural)[0], torch.diag(expected), rtol=2e-14, atol=0)


@pytest.mark.parametrize("dim", [2, 3, 5])
@pytest.mark.parametrize("kappa", [0.0, 0.3, 4.0])
def test_sphere_agrees_with_quadrature_over_the_polar_angle(dim, kappa):
    area = 2 * math.pi ** ((dim - 1) / 2) / math.gamma((dim - 1) / 2)

    def moment(power: int) -> float:
        return integrate.quad(
            lambda a: math.cos(a) ** power * math.exp(kappa * math.cos(a)) * math.sin(a) ** (dim - 2), 0, math.pi
        )[0]

    natural = kappa * directions(dim, 1)
    assert_close(Sphere(dim).log_normalizer(natural).item(), math.log(area * moment(0)), rtol=1e-12, atol=1e-12)
    assert_close(Sphere(dim).mean(natural), directions(dim, 1) * moment(1) / moment(0), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dim", [1, 2, 3, 6])
@pytest.mark.parametrize("kappa", [0.0, 0.3, 4.0])
def test_ball_agrees_with_quadrature_over_its_slices(dim, kappa):
    radius = 1.7
    slice_volume = math.pi ** ((dim - 1) / 2) / math.gamma((dim + 1) / 2)

    def moment(power: int) -> float:
        # x = R sin(a), which removes the root singularity at the two poles.
        return integrate.quad(
            lambda a: (
                (radius * math.sin(a)) ** power * math.exp(kappa * radius * math.sin(a)) * (radius * math.cos(a)) ** dim
            ),
            -math.pi / 2,
            math.pi / 2,
        )[0]

    natural, ball = kappa * directions(dim, 1), Ball(dim, radius)
    assert_close(ball.log_normalizer(natural).item(), math.log(slice_volume * moment(0)), rtol=1e-12, atol=1e-12)
    assert_close(ball.mean(natural), directions(dim, 1) * moment(1) / moment(0), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kappa", KAPPAS[1:])
def test_box_is_langevin_on_every_axis(kappa):
    # Sums of closed forms that cancel at small kappa, hence mpmath.
    widths = [0.5, 1.0, 3.0]
    natural = torch.tensor([[kappa, -kappa, kappa]], dtype=torch.float64)
    box = Box(3, torch.tensor(widths, dtype=torch.float64))
    pairs = [(mpmath.mpf(a), mpmath.mpf(e)) for a, e in zip(widths, natural[0].tolist(), strict=True)]
    value = mpmath.fsum(mpmath.log(2 * mpmath.sinh(a * e) / e) for a, e in pairs)
    mean = [float(a * mpmath.coth(a * e) - 1 / e) for a, e in pairs]
    variance = [float(1 / e**2 - (a / mpmath.sinh(a * e)) ** 2) for a, e in pairs]
    assert abs(box.log_normalizer(natural).item() - value) <= 1e-14 * max(1, abs(value))
    assert_close(box.mean(natural)[0], torch.tensor(mean, dtype=torch.float64), rtol=1e-14, atol=0)
    assert_close(box.fisher(natural)[0], torch.diag(torch.tensor(variance, dtype=torch.float64)), rtol=2e-14, atol=0)


def test_box_with_one_axis_is_the_ball_of_dimension_one():
    natural = torch.tensor([[0.0], [-2.0], [40.0]], dtype=torch.float64)
    box, ball = Box(1, 1.3), Ball(1, 1.3)
    assert_close(box.log_normalizer(natural), ball.log_normalizer(natural), rtol=1e-14, atol=1e-14)
    assert_close(box.mean(natural), ball.mean(natural), rtol=1e-14, atol=0)
    assert_close(box.fisher(natural), ball.fisher(natural), rtol=1e-14, atol=0)


@pytest.mark.parametrize("measure", [Sphere(2), Sphere(64), Ball(3, 2.0), Ball(1000)], ids=named)
def test_mean_is_parallel_to_natural(measure):
    unit = directions(measure.dim, 4)
    for kappa in KAPPAS[1:]:
        mean = measure.mean(kappa * unit)
        assert_close(mean / mean.norm(dim=-1, keepdim=True), unit, rtol=0, atol=1e-15)


@pytest.mark.parametrize("kappa", [0.2, 5.0, 45.0])
def test_fisher_is_the_numerical_hessian_of_the_bessel_formula(kappa):
    dim, radius = 3, 1.5
    natural = kappa * directions(dim, 1)

    def log_normalizer(order: float, *eta: mpmath.mpf) -> mpmath.mpf:
        return bessel(order, mpmath.sqrt(mpmath.fsum(e**2 for e in eta)))[0]

    for measure, order, scale in [(Sphere(dim), dim / 2 - 1, 1.0), (Ball(dim, radius), dim / 2, radius)]:
        point = [scale * mpmath.mpf(e) for e in natural[0].tolist()]
        hessian = torch.empty(dim, dim, dtype=torch.float64)
        for i in range(dim):
            for j in range(dim):
                orders = tuple((i == axis) + (j == axis) for axis in range(dim))
                partial = mpmath.diff(lambda *eta, order=order: log_normalizer(order, *eta), tuple(point), orders)
                hessian[i, j] = float(partial) * scale**2
        assert_close(measure.fisher(natural)[0], hessian, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("measure", [*MEASURES, Sphere(64), Ball(1000)], ids=named)
def test_autograd_reaches_the_closed_mean_and_fisher_at_every_kappa(measure):
    unit = directions(measure.dim, 1)
    for kappa in KAPPAS:
        natural = (kappa * unit).requires_grad_()
        first = gradient(measure.log_normalizer, natural)
        assert_close(first, measure.mean(natural), rtol=1e-12, atol=0)
        fisher = measure.fisher(natural)[0, 0]
        # Relative to the row, whose entries may cancel; and on a line the product rule itself cancels to 1 / kappa.
        for derivative in (first, measure.mean(natural)):
            (row,) = torch.autograd.grad(derivative[0, 0], natural, retain_graph=True)
            assert (row[0] - fisher).norm() <= max(1e-12, 1e-15 * kappa) * fisher.norm()


@pytest.mark.parametrize("measure", MEASURES, ids=named)
def test_origin_has_mean_zero_an_isotropic_fisher_and_finite_third_derivatives(measure):
    natural = torch.zeros(1, measure.dim, dtype=torch.float64, requires_grad=True)
    assert_close(measure.mean(natural), torch.zeros_like(natural), rtol=0, atol=0)
    fisher = measure.fisher(natural)
    third = torch.autograd.grad(fisher.sum(), natural)[0]
    assert_close(third, torch.zeros_like(natural), rtol=0, atol=0)
    if isinstance(measure, Box):
        spread = measure.half_width.double() ** 2 / 3
    elif isinstance(measure, Ball):
        spread = measure.radius**2 / (measure.dim + 2) * torch.ones(measure.dim, dtype=torch.float64)
    else:
        spread = torch.full((measure.dim,), 1 / measure.dim, dtype=torch.float64)
    assert_close(fisher[0], torch.diag(spread), rtol=1e-14, atol=0)


def test_entropy_at_the_origin_is_the_log_volume():
    widths = torch.tensor([0.5, 1.0, 4.0], dtype=torch.float64)
    origin = torch.zeros(1, 3, dtype=torch.float64)
    assert_close(Box(3, 2.5).entropy(origin).item(), 3 * math.log(5.0), rtol=1e-14, atol=0)
    assert_close(Box(3, widths).entropy(origin).item(), (2 * widths).log().sum().item(), rtol=1e-14, atol=0)
    assert_close(Ball(3, 2.0).entropy(origin).item(), math.log(32 * math.pi / 3), rtol=1e-14, atol=0)
    assert_close(Sphere(3).entropy(origin).item(), math.log(4 * math.pi), rtol=1e-14, atol=0)
    assert [m.reference for m in (Box(3), Ball(3), Sphere(3))] == ["lebesgue", "lebesgue", "surface"]


@pytest.mark.parametrize("measure", MEASURES, ids=named)
def test_support_function_is_the_slope_of_the_log_normalizer_at_infinity(measure):
    unit = directions(measure.dim, 5)
    slope = (measure.log_normalizer(2e6 * unit) - measure.log_normalizer(1e6 * unit)) / 1e6
    # The difference of the logarithmic terms is of order dim / 1e6.
    assert_close(measure.support_function(unit), slope, rtol=0, atol=2e-5)


@pytest.mark.parametrize("measure", MEASURES, ids=named)
def test_float32_in_gives_float32_out_with_float64_inside(measure):
    natural = (20 * directions(measure.dim, 6)).float().reshape(2, 3, measure.dim)
    generator = torch.Generator().manual_seed(0)
    for method in (measure.log_normalizer, measure.mean, measure.fisher, measure.support_function):
        single, double = method(natural), method(natural.double())
        assert single.dtype == torch.float32
        # One rounding of a float64 result; the support function is computed in float32.
        assert_close(single.double(), double, rtol=3e-7, atol=1e-7)
    assert measure.sample(natural, 2, generator).dtype == torch.float32


def test_parameters_receive_gradients():
    natural = directions(2, 1)
    radius = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    width = torch.tensor([0.5, 2.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda r: Ball(2, r).log_normalizer(natural), radius)
    assert torch.autograd.gradcheck(lambda a: Box(2, a).mean(natural), width)


@pytest.mark.parametrize("kappa", [0.0, 1e-8, 1.0, 50.0, 1e6])
@pytest.mark.parametrize("measure", [*MEASURES, Sphere(40)], ids=named)
def test_draws_have_the_mean_and_the_covariance_of_the_family(measure, kappa):
    count, unit = 20_000, directions(measure.dim, 1)
    natural = kappa * unit
    draws = measure.sample(natural, count, torch.Generator().manual_seed(1))[:, 0]
    mean, fisher = measure.mean(natural)[0], measure.fisher(natural)[0]
    # In the eigenbasis, because along the mean the spread is smaller by a factor kappa.
    basis = torch.eye(measure.dim, dtype=torch.float64)
    if not isinstance(measure, Box):
        basis = torch.linalg.qr(torch.cat([unit.mT, basis[:, 1:]], dim=1)).Q
    centered = (draws - mean) @ basis
    covariance = basis.mT @ fisher @ basis
    products = centered[:, :, None] * centered[:, None, :]
    assert within_five_standard_errors(centered, torch.zeros_like(mean))
    assert within_five_standard_errors(products, covariance)


def within_five_standard_errors(draws: Tensor, expected: Tensor) -> bool:
    error = draws.std(0) / math.sqrt(len(draws))
    # The fisher matrix of a large kappa is known to the rounding of its largest entry.
    return bool(((draws.mean(0) - expected).abs() <= 5 * error + 1e-15 * expected.abs().max()).all())


def test_sampler_reaches_a_thousand_dimensions_at_both_ends_of_kappa():
    unit = directions(1000, 1)
    for kappa in (0.0, 1e6):
        draws = Sphere(1000).sample(kappa * unit, 500, torch.Generator().manual_seed(2))[:, 0]
        cosines = draws @ unit[0]
        expected = (Sphere(1000).mean(kappa * unit) @ unit[0]).item()
        assert abs(cosines.mean() - expected) <= 5 * cosines.std() / math.sqrt(500)
        assert_close(draws.norm(dim=-1), torch.ones(500, dtype=torch.float64), rtol=1e-14, atol=0)


@pytest.mark.parametrize("kappa", [-1e6, -30.0, -1e-18, 0.0, 2.0, 1e6])
def test_draws_of_the_box_follow_its_distribution_function(kappa):
    width = 1.5
    draws = Box(1, width).sample(torch.tensor([[kappa]], dtype=torch.float64), 5000, torch.Generator().manual_seed(3))
    assert draws.abs().max() <= width
    # Distance from the favored face, an exponential cut off at the far one.
    gap = (width - math.copysign(1, kappa) * draws.flatten()).numpy()
    length, rate = 2 * width, abs(kappa)
    law = stats.truncexpon(b=length * rate, scale=1 / rate) if rate > 1e-6 else stats.uniform(0, length)
    assert stats.kstest(gap, law.cdf).pvalue > 1e-3


@pytest.mark.parametrize(("dim", "kappa"), [(2, 2.0), (3, 0.5), (6, 100.0), (50, 10.0)])
def test_cosines_of_the_sphere_follow_their_density(dim, kappa):
    draws = Sphere(dim).sample(kappa * directions(dim, 1), 5000, torch.Generator().manual_seed(4))[:, 0]
    angles = (draws @ directions(dim, 1)[0]).clamp(-1, 1).acos().numpy()
    grid = np.linspace(0, math.pi, 20_001)
    density = np.exp(kappa * (np.cos(grid) - 1)) * np.sin(grid) ** (dim - 2)
    distribution = integrate.cumulative_trapezoid(density, grid, initial=0)
    assert stats.kstest(angles, lambda a: np.interp(a, grid, distribution / distribution[-1])).pvalue > 1e-3


@pytest.mark.parametrize("measure", MEASURES, ids=named)
def test_draws_lie_in_the_support_and_repeat_with_the_seed(measure):
    natural = 5 * directions(measure.dim, 6).reshape(2, 3, measure.dim)
    draws, again = (measure.sample(natural, 7, torch.Generator().manual_seed(5)) for _ in range(2))
    assert draws.shape == (7, 2, 3, measure.dim)
    assert torch.equal(draws, again)
    assert not torch.equal(draws, measure.sample(natural, 7, torch.Generator().manual_seed(6)))
    if isinstance(measure, Box):
        assert (draws.abs() <= measure.half_width).all()
    elif isinstance(measure, Ball):
        assert (draws.norm(dim=-1) <= measure.radius).all()
    else:
        assert_close(draws.norm(dim=-1), torch.ones(7, 2, 3, dtype=torch.float64), rtol=1e-14, atol=0)


@pytest.mark.parametrize("dim", [1, 0, -3])
def test_sphere_refuses_a_dimension_below_two(dim):
    with pytest.raises(UserError, match="dim must"):
        Sphere(dim)


@pytest.mark.parametrize("family", [Ball, Box])
def test_ball_and_box_refuse_a_dimension_below_one(family):
    with pytest.raises(UserError, match="dim must"):
        family(0)


@pytest.mark.parametrize("size", [0.0, -1.0, torch.tensor(-2.0)])
def test_ball_and_box_refuse_a_size_that_is_not_positive(size):
    with pytest.raises(UserError, match="radius must"):
        Ball(2, size)
    with pytest.raises(UserError, match="half_width must"):
        Box(2, size)


def test_ball_refuses_one_radius_per_axis():
    with pytest.raises(UserError, match="radius of Ball must"):
        Ball(2, torch.ones(2))


@pytest.mark.parametrize("shape", [(1,), (2,), (3, 1)])
def test_box_refuses_half_widths_that_do_not_match_its_axes(shape):
    with pytest.raises(UserError, match="half_width of Box must"):
        Box(3, torch.ones(shape))


@pytest.mark.parametrize("measure", [Sphere(3), Ball(3), Box(3)], ids=named)
@pytest.mark.parametrize("shape", [(3,), (1, 2), (3, 4)])
def test_every_method_refuses_a_natural_of_the_wrong_shape(measure, shape):
    methods = [measure.log_normalizer, measure.mean, measure.fisher, measure.support_function]
    for method in [*methods, lambda natural: measure.sample(natural, 1)]:
        with pytest.raises(UserError, match=r"must have shape \(\.\.\., queries, 3\)"):
            method(torch.zeros(shape))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_sampler_answers_a_natural_that_is_not_finite_with_nan_and_does_not_wait_forever(bad):
    natural = torch.tensor([[bad, 0.0], [1.0, 0.0]], dtype=torch.float64)
    draws = Sphere(2).sample(natural, 10, torch.Generator().manual_seed(7))
    assert draws[:, 0].isnan().all()
    assert draws[:, 1].isfinite().all()


def test_divergences_and_entropies_of_float32_are_differences_of_float64():
    # The potential is near 1e4, where float32 rounds by 1e-3: the divergence of 5e-5 would drown.
    sphere, natural = Sphere(3), torch.tensor([[1e4, 0.0, 0.0]])
    for single, double in (
        (sphere.divergence(natural, 1.01 * natural), sphere.divergence(natural.double(), (1.01 * natural).double())),
        (sphere.entropy(natural), sphere.entropy(natural.double())),
        (sphere.conjugate(natural), sphere.conjugate(natural.double())),
    ):
        assert_close(single.double(), double, rtol=1e-6, atol=0)
