"""Natural parameters from means, inside, on and outside the hull, and proximal maps."""

import pytest
import torch
from draws import randn
from torch import Tensor
from torch.testing import assert_close

from massieu import (
    Gamma,
    Gaussian,
    Hypercube,
    Laplace,
    Measure,
    Mixture,
    Points,
    Poisson,
    Sphere,
    bregman,
    conjugate,
    natural_from_mean,
    natural_gradient,
    prox,
)
from massieu.checks import UserError


def double(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


SQUARE = Points(double([0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]))


def test_means_inside_on_and_outside_the_hull_are_distinguished():
    means = double([0.3, 0.6], [0.0, 0.0], [0.5, 0.0], [1.2, 0.5], [0.5, 1 + 1e-9], [0.2, 1.0], [0.5, 1e-7])
    found = natural_from_mean(SQUARE, means)
    assert found.converged.tolist() == [True, False, False, False, False, False, True]
    assert found.boundary.tolist() == [False, True, True, False, False, True, False]
    assert found.outside.tolist() == [False, False, False, True, True, False, False]
    # Means on the boundary are approached, those inside are met; the product form gives logits.
    assert float(found.residual[~found.outside].max()) < 1e-12
    assert_close(found.natural[0], torch.logit(means[0]), rtol=1e-12, atol=1e-12)
    assert_close(found.natural[6, 1], torch.logit(means[6, 1]), rtol=1e-8, atol=1e-8)


def test_the_message_says_expected_got_and_what_to_do():
    text = natural_from_mean(SQUARE, double([0.5, 0.5], [2.0, 0.0], [0.0, 0.5])).message
    assert "1 of 3 means converged" in text
    assert "must lie in the convex hull of the support, got 1 outside it, the first at index (1,); move them" in text
    assert "1 on the boundary of the hull" in text
    assert "\n" not in text


def test_no_natural_parameter_is_invented_for_a_mean_outside():
    found = natural_from_mean(SQUARE, double([0.5, 0.5], [2.0, 0.0]))
    assert found.natural.isnan().all(-1).tolist() == [False, True]
    assert repr(found) == f"Inversion({found.message}; natural of shape (2, 2))"


@pytest.mark.parametrize("size", [5, 20, 100])
@pytest.mark.parametrize("seed", range(4))
def test_converged_means_right_also_where_most_means_touch_the_boundary(size, seed):
    points = Points(randn(16, 4, seed=seed))
    natural = size * randn(40, 4, seed=10 + seed)
    found = natural_from_mean(points, points.mean(natural))
    error = (found.natural - natural).norm(dim=-1) / natural.norm(dim=-1)
    assert float(error[found.converged].max(0).values if bool(found.converged.any()) else 0.0) < 1e-5
    assert not bool(found.outside.any())
    assert float(found.residual.max()) < 1e-7
    assert_close(conjugate(points, points.mean(natural)), points.conjugate(natural), rtol=1e-6, atol=1e-6)


def test_a_mean_beside_a_thin_support_far_from_the_origin_is_outside():
    points = Points(double([1000.0, 0.0], [1000.0, 1e-3]))
    assert natural_from_mean(points, double([1000 + 1e-5, 5e-4])).outside.tolist() == [True]
    assert conjugate(points, double([1000 + 1e-5, 5e-4])).tolist() == [float("inf")]


def test_huge_means_are_reached():
    assert_close(natural_from_mean(Poisson(2.0), double([1e30])).natural, double([0.5e30]).log())
    found = natural_from_mean(Gamma(2.5, 0.7), double([1e12]))
    assert bool(found.converged.all())
    assert_close(found.natural, 1 / 0.7 - 2.5 / double([1e12]))


SCALES = [1e-150, 1e-60, 1e-10, 1e-3, 1e3, 1e10, 1e60, 1e150]


@pytest.mark.parametrize("scale", [2.0**-300, 2.0**-33, 2.0**33, 2.0**300])
def test_a_power_of_two_times_the_keys_changes_not_one_bit(scale):
    keys = randn(12, 3)
    means = Points(keys).mean(30 * randn(20, 3, seed=2))  # some settled by rounding alone
    plain, scaled = natural_from_mean(Points(keys), means), natural_from_mean(Points(scale * keys), scale * means)
    assert scaled.steps.tolist() == plain.steps.tolist()
    assert scaled.converged.tolist() == plain.converged.tolist()
    assert torch.equal(scaled.natural * scale, plain.natural)
    assert torch.equal(scaled.residual / scale, plain.residual)


@pytest.mark.parametrize("scale", SCALES)
def test_scaling_the_keys_scales_the_solution_and_changes_no_verdict(scale):
    keys, natural = randn(12, 3), torch.cat([randn(6, 3, seed=1), 3 * randn(6, 3, seed=2)])
    means = torch.cat([Points(keys).mean(natural), keys[:1], 9 * keys[1:2]])  # the last two on the boundary and outside
    plain = natural_from_mean(Points(keys), means)
    scaled = natural_from_mean(Points(scale * keys), scale * means)
    assert scaled.steps.tolist() == plain.steps.tolist()
    for verdict in ("converged", "boundary", "outside", "undecided"):
        assert getattr(scaled, verdict).tolist() == getattr(plain, verdict).tolist()
    assert int(plain.converged.sum()) >= 6
    sure = plain.converged[: len(natural)].nonzero()[:, 0]
    error = (scale * scaled.natural[sure] - natural[sure]).norm(dim=-1) / natural[sure].norm(dim=-1)
    assert float(error.max()) < 1e-5  # the bound of every converged solution, as above
    assert float((scaled.residual[sure] / scale).max()) < 1e-12


def test_coordinates_of_any_scale_are_solved_together():
    scale = torch.tensor([1e-40, 1.0, 1e40], dtype=torch.float64)
    keys, natural = randn(12, 3), randn(6, 3, seed=1)
    found = natural_from_mean(Points(scale * keys), scale * Points(keys).mean(natural))
    assert bool(found.converged.all())
    assert_close(found.natural * scale, natural, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("power", range(0, 18, 3))
def test_converged_means_that_the_mean_is_met_as_well_as_natural_can_be_written_down(power):
    laplace, mean = Laplace(1.0), double([10.0**power])
    found = natural_from_mean(laplace, mean)
    exact = (mean.square() + 1).sqrt() / mean - 1 / mean  # the root of 2 natural / (1 - natural^2) = mean
    deviation = laplace.fisher(exact)[..., 0, 0].sqrt() if power < 15 else mean[..., 0]
    attainable = torch.finfo(torch.float64).eps * deviation  # natural is almost one
    assert bool((found.residual <= deviation * attainable.clamp(min=1e-9))[found.converged].all())
    assert found.converged.tolist() == [power <= 12]


@pytest.mark.parametrize("depth", [5.0, 50.0, 500.0])
def test_an_atom_that_starts_almost_absent_can_take_half_the_mass(depth):
    points = Points(double([0.0], [1.0]), torch.tensor([0.0, -depth], dtype=torch.float64))
    found = natural_from_mean(points, double([0.5]))
    assert bool(found.converged.all())
    assert_close(found.natural, double([depth]), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("scale", SCALES[1:-1])
def test_prox_of_scaled_keys_is_the_scaled_prox(scale):
    keys, point = randn(20, 5), 10 * randn(8, 5, seed=2)
    plain, scaled = prox(Points(keys), point, 3.0), prox(Points(scale * keys), point / scale, 3.0 / scale**2)
    assert bool(plain.converged.all())
    assert bool(scaled.converged.all())
    assert scaled.steps.tolist() == plain.steps.tolist()
    assert_close(scaled.natural * scale, plain.natural, rtol=1e-9, atol=1e-9)


class Geometric(Measure):
    """Counting measure on 0, 1, 2, ...: nothing but what a first own measure needs."""

    dim = 1
    domain = "natural < 0"
    start = -1.0

    def contains(self, natural):
        return natural[..., 0] < 0

    def log_normalizer(self, natural):
        return -torch.log(-torch.expm1(natural[..., 0]))


def test_a_measure_whose_domain_excludes_zero_is_inverted_from_its_start():
    means = double([1e-6], [0.5], [1.0], [20.0], [1e6])
    found = natural_from_mean(Geometric(), means)
    assert bool(found.converged.all())
    assert_close(found.natural, -torch.log1p(1 / means), rtol=1e-9, atol=0.0)
    assert_close(conjugate(Geometric(), means[:3]), Geometric().conjugate(found.natural[:3]))
    back = prox(Geometric(), found.natural + 2 * means, 2.0)
    assert_close(back.natural, found.natural, rtol=1e-7, atol=0.0)
    both = Mixture(torch.zeros(2), [Geometric(), Poisson(1.0)])
    assert bool(natural_from_mean(both, means[1:4]).converged.all())


def test_a_start_can_be_given_and_must_lie_in_the_domain():
    close = natural_from_mean(Geometric(), double([20.0]), start=-0.05)
    assert bool(close.converged.all())
    assert int(close.steps) < int(natural_from_mean(Geometric(), double([20.0])).steps)
    each = natural_from_mean(Geometric(), double([20.0], [0.5]), start=double([-0.05], [-1.0]))
    assert bool(each.converged.all())
    with pytest.raises(UserError, match="start of Geometric must lie"):
        natural_from_mean(Geometric(), double([20.0]), start=0.5)
    with pytest.raises(UserError, match="start of Geometric must be a number"):
        natural_from_mean(Geometric(), double([20.0]), start=torch.full((3,), -1.0))


def test_a_domain_without_zero_and_without_a_start_is_one_sentence():
    class Startless(Geometric):
        start = 0.0

    with pytest.raises(
        ValueError, match=r"must lie in natural < 0, got \[0.0\]; give Startless a start, a point inside"
    ):
        natural_from_mean(Startless(), double([1.0]))


def test_outside_cannot_be_known_without_a_support_function_and_the_message_says_so():
    found = natural_from_mean(Geometric(), double([1.0], [-1.0]))
    assert found.converged.tolist() == [True, False]
    assert found.outside.tolist() == [False, False]
    assert found.undecided.tolist() == [False, True]
    assert "whether 1 of these lie outside the hull is unknown: write support_function" in found.message

    class Known(Geometric):
        def support_function(self, direction):
            return torch.where(direction[..., 0] <= 0, 0.0, torch.inf)

    known = natural_from_mean(Known(), double([1.0], [-1.0], [0.0]))
    assert known.outside.tolist() == [False, True, False]
    assert known.boundary.tolist() == [False, False, True]
    assert not bool(known.undecided.any())


def test_a_measure_without_dim_or_with_a_misshaped_log_normalizer_is_one_sentence():
    class Dimless(Measure):
        def log_normalizer(self, natural):
            return natural[..., 0].exp()

    class Total(Geometric):
        def log_normalizer(self, natural):
            return super().log_normalizer(natural).sum()

    class Kept(Geometric):
        def log_normalizer(self, natural):
            return super().log_normalizer(natural)[..., None]

    for call in (Dimless().mean, Dimless().conjugate, lambda mean: natural_from_mean(Dimless(), mean)):
        with pytest.raises(UserError, match="dim of Dimless must"):
            call(double([-1.0]))
    assert repr(Dimless()) == "Dimless(dim=?)"
    for measure, shape in ((Total(), r"\(\)"), (Kept(), r"\(\d, 1\)")):
        for call in (measure.mean, measure.conjugate, lambda mean, own=measure: natural_from_mean(own, -mean)):
            with pytest.raises(UserError, match=rf"must map \(\d, 1\) to one value per query, .* got {shape}; sum"):
                call(double([-1.0], [-2.0]))


def test_single_precision_is_solved_in_double_precision():
    found = prox(Gamma(2.5, 0.7), torch.tensor([[5.0]]), 1e-8)
    assert found.natural.dtype == torch.float32
    assert float(found.residual) < 1e-6
    # Normalized in float32, these means lie on the sphere to float32 rounding only.
    means = torch.nn.functional.normalize(randn(20, 48).float(), dim=-1)
    assert bool(natural_from_mean(Sphere(48), means).boundary.all())
    half = natural_from_mean(SQUARE, torch.tensor([[0.5, 0.25]], dtype=torch.float16))
    assert_close(half.natural, torch.logit(torch.tensor([[0.5, 0.25]])).half())


def test_solutions_carry_first_and_second_derivatives():
    support, natural = randn(9, 3).requires_grad_(), randn(2, 3, seed=1)
    mean = Points(support.detach()).mean(natural).requires_grad_()

    def inverse(mean, support):
        return natural_from_mean(Points(support), mean).natural

    def step(point, support):
        return prox(Points(support), point).natural

    for function in (inverse, step):
        assert torch.autograd.gradcheck(function, (mean, support))
        assert torch.autograd.gradgradcheck(function, (mean, support), atol=1e-4)


def test_chord_steps_keep_sharp_members_within_twelve_steps(monkeypatch):
    cube, natural = Hypercube(4), 3 * randn(60, 4)
    found = natural_from_mean(cube, cube.mean(natural))
    assert bool(found.converged.all())
    assert int(found.steps.max()) <= 12
    monkeypatch.setattr("massieu.duality.CHORDS", 0)
    assert int(natural_from_mean(cube, cube.mean(natural)).steps.max()) > 12


def test_fewer_atoms_than_dimensions_give_the_solution_of_least_norm_and_say_so():
    points = Points(randn(8, 16))
    natural = randn(5, 16, seed=1)
    found = natural_from_mean(points, points.mean(natural))
    assert bool(found.converged.all())
    assert not found.unique
    assert "solution of least norm" in found.message
    differences = points.support[1:] - points.support[:1]
    least = torch.linalg.lstsq(differences, differences @ natural.mT, driver="gelsd").solution.mT
    assert_close(found.natural, least, rtol=1e-8, atol=1e-8)
    assert float((found.natural - natural).norm()) > 1


def test_a_mean_off_the_affine_span_is_outside():
    points = Points(randn(4, 6))
    inside = points.mean(randn(3, 6, seed=1))
    found = natural_from_mean(points, inside + 0.1 * randn(3, 6, seed=2))
    assert bool(found.outside.all())
    assert not bool(found.converged.any())


def test_a_single_atom_has_one_mean():
    atom = Points(double([1.0, 2.0]))
    found = natural_from_mean(atom, double([1.0, 2.0], [1.0, 2.1]))
    assert_close(found.natural[0], torch.zeros(2, dtype=torch.float64))
    assert found.converged.tolist() == [True, False]
    assert found.boundary.tolist() == [False, False]
    assert found.outside.tolist() == [False, True]


def test_the_domain_bounds_the_search():
    found = natural_from_mean(Poisson(2.0), double([1e-6], [1e6], [0.0], [-1.0]))
    assert found.converged.tolist() == [True, True, False, False]
    assert found.boundary.tolist() == [False, False, True, False]
    assert found.outside.tolist() == [False, False, False, True]
    assert_close(found.natural[:2], (double([1e-6], [1e6]) / 2).log(), rtol=1e-8, atol=1e-8)


def test_a_sphere_of_any_concentration_is_inverted():
    sphere = Sphere(10)
    direction = randn(1, 10) / randn(1, 10).norm()
    for concentration in (1e-6, 1.0, 1e3, 1e6):
        natural = concentration * direction
        found = natural_from_mean(sphere, sphere.mean(natural))
        assert bool(found.converged.all())
        assert_close(found.natural, natural, rtol=1e-8, atol=1e-8)


def test_single_precision_converges_to_its_own_tolerance():
    points = Points(randn(9, 3).float())
    natural = randn(4, 3, seed=1).float()
    found = natural_from_mean(points, points.mean(natural))
    assert bool(found.converged.all())
    assert_close(found.natural, natural, rtol=1e-2, atol=1e-2)


def test_too_few_steps_are_reported_and_not_passed_off():
    points = Points(randn(9, 4))
    found = natural_from_mean(points, points.mean(2 * randn(5, 4, seed=1)), max_steps=1)
    assert not bool(found.converged.any())
    assert "did not converge within max_steps" in found.message


def test_the_dual_is_infinite_outside_and_finite_on_the_boundary():
    values = conjugate(SQUARE, double([1.5, 0.5], [0.0, 0.0], [0.5, 0.0], [0.5, 0.5]))
    expected = torch.tensor([torch.inf, 0.0, -torch.log(torch.tensor(2.0)), -torch.log(torch.tensor(4.0))])
    assert_close(values, expected.double(), rtol=1e-6, atol=1e-6)


def test_natural_gradient_flow_multiplies_the_mean():
    points = Points(randn(12, 3) - 0.1)
    natural = randn(4, 3, seed=1)
    small = 1e-6
    moved = points.mean(natural + small * natural_gradient(points, natural))
    assert_close((moved - points.mean(natural)) / small, points.mean(natural), rtol=1e-4, atol=1e-5)
    direct = torch.linalg.solve(points.fisher(natural), points.mean(natural)[..., None])[..., 0]
    assert_close(natural_gradient(points, natural), direct, rtol=1e-9, atol=1e-9)


def test_natural_gradient_of_few_atoms_is_the_pseudo_inverse():
    points = Points(randn(4, 6))
    natural = randn(3, 6, seed=1)
    expected = (torch.linalg.pinv(points.fisher(natural), rtol=1e-10) @ points.mean(natural)[..., None])[..., 0]
    assert_close(natural_gradient(points, natural), expected, rtol=1e-8, atol=1e-8)


def test_prox_inverts_residual_attention_for_steps_up_to_a_hundred():
    points = Points(randn(20, 5))
    natural = randn(50, 5, seed=1)
    for step in (1.0, 10.0, 100.0):
        found = prox(points, natural + step * points.mean(natural), step)
        assert bool(found.converged.all())
        assert_close(found.natural, natural, rtol=1e-10, atol=1e-10)
        assert float(found.residual.max()) < 1e-11


def test_prox_of_any_point_solves_its_equation():
    points = Points(randn(20, 5))
    point = 10 * randn(50, 5, seed=2)
    found = prox(points, point, 3.0)
    assert_close(found.natural + 3.0 * points.mean(found.natural), point, rtol=1e-10, atol=1e-10)
    assert found.message == f"50 of 50 points converged, in at most {int(found.steps.max())} steps"


def test_bregman_of_a_function_and_of_a_measure_agree():
    gaussian = Gaussian(randn(3), torch.eye(3, dtype=torch.float64))
    first, second = randn(4, 3, seed=1), randn(4, 3, seed=2)
    half_square = 0.5 * (first - second).square().sum(-1)
    assert_close(bregman(gaussian, first, second), half_square)
    assert_close(bregman(gaussian.log_normalizer, first, second), half_square)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: natural_from_mean(SQUARE, torch.zeros(2)),
            r"mean of Points must have shape .* got \(2,\); .*mean\[None\]",
        ),
        (
            lambda: natural_from_mean(SQUARE, torch.zeros(1, 3)),
            r"\(..., queries, 2\), got \(1, 3\); check its last axis",
        ),
        (lambda: natural_from_mean(SQUARE, torch.zeros(1, 2).long()), "mean must"),
        (lambda: natural_from_mean(SQUARE, torch.full((1, 2), torch.nan)), "mean must be finite"),
        (
            lambda: natural_from_mean(torch.zeros(1, 2), SQUARE),
            r"must be a Measure, got Tensor; the order is \(measure, mean",
        ),
        (lambda: natural_from_mean(SQUARE, torch.zeros(1, 2), max_steps=0), "max_steps must"),
        (lambda: prox(SQUARE, torch.zeros(1, 2), -1.0), "step must"),
        (lambda: prox(SQUARE, torch.zeros(2)), r"point of Points must have shape .*; .* pass point\[None\]"),
        (lambda: natural_from_mean(Points(randn(3, 9, 2)), torch.zeros(2, 5, 2)), "mean must have leading axes"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(UserError, match=message):
        call()


def test_a_normalizer_that_is_not_finite_at_the_start_is_one_sentence():
    class Geometric(Measure):
        dim = 1

        def log_normalizer(self, natural):
            return -torch.log1p(-natural.exp()).squeeze(-1)

    mean = torch.tensor([[3.0]], dtype=torch.float64)
    with pytest.raises(UserError, match="log_normalizer of Geometric must"):
        natural_from_mean(Geometric(), mean)

    class Complete(Geometric):
        domain = "natural < 0"

        def contains(self, natural):
            return (natural < 0).all(-1)

    found = natural_from_mean(Complete(), mean, start=-1.0)  # a start of the class is not needed then
    assert_close(found.natural, torch.tensor([[0.75]], dtype=torch.float64).log())
