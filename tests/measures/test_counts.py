import itertools
import math

import mpmath
import pytest
import torch
from moments import assert_moments
from scipy import stats
from torch.testing import assert_close

from massieu.checks import UserError
from massieu.measures.counts import DirichletMultinomial, Multinomial
from massieu.measures.measure import Measure


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


NATURAL = tensor([[0.0, 0.0, 0.0], [0.7, -1.2, 0.4], [3.0, -2.0, 3.5]])
CASES = {
    "multinomial": Multinomial(tensor([0.3, -0.5, 1.1]), count=4),
    "multinomial with an absent cell": Multinomial(tensor([0.3, -0.5, -math.inf]), count=4),
    "dirichlet": DirichletMultinomial(tensor([0.2, 1.0, 3.5]), count=4),
}
each_family = pytest.mark.parametrize("measure", CASES.values(), ids=CASES.keys())
counts_of_four = [x for x in itertools.product(range(5), repeat=3) if sum(x) == 4]


def log_pmf(measure, x):
    """log h at one vector of counts, by scipy or by hand where scipy needs weights that sum to one."""
    if isinstance(measure, DirichletMultinomial):
        return stats.dirichlet_multinomial(measure.concentration.numpy(), 4).logpmf(x)
    weights = measure.log_weight.exp().tolist()
    ways = math.factorial(4) // math.prod(math.factorial(k) for k in x)
    mass = ways * math.prod(w**k for w, k in zip(weights, x, strict=True))
    return math.log(mass) if mass > 0 else -math.inf


def enumerate_law(measure, natural):
    """Log normalizer and probabilities of all counts of four draws in three cells."""
    scores = natural @ tensor(counts_of_four).T + tensor([float(log_pmf(measure, x)) for x in counts_of_four])
    return scores.logsumexp(-1), scores.softmax(-1)


def series_law(concentration, natural, count):
    """Log normalizer, mean and covariance from n f_n = sum_j P_j f_(n-j), in 40 digits."""
    with mpmath.workdps(40):
        alpha, boost = [mpmath.mpf(v) for v in concentration.tolist()], [mpmath.exp(v) for v in natural.tolist()]
        cells, size = range(len(alpha)), mpmath.fsum(alpha)
        power = [[y**i for i in range(count + 1)] for y in boost]
        f = [mpmath.mpf(1)]
        for n in range(1, count + 1):
            f.append(mpmath.fsum(alpha[k] * power[k][i] * f[n - i] for k in cells for i in range(1, n + 1)) / n)
        mean = [
            [alpha[k] * mpmath.fsum(power[k][i] * f[n - i] for i in range(1, n + 1)) / f[n] for k in cells]
            for n in range(count + 1)
        ]
        covariance = [
            [
                alpha[k]
                * mpmath.fsum(
                    power[k][i] * f[count - i] / f[count] * (i * (k == l) + mean[count - i][l] - mean[count][l])
                    for i in range(1, count + 1)
                )
                for l in cells
            ]
            for k in cells
        ]
        value = mpmath.log(f[count] * mpmath.beta(size, count) * count)
        return (
            tensor(float(value)),
            tensor([float(m) for m in mean[count]]),
            tensor([list(map(float, c)) for c in covariance]),
        )


@each_family
def test_the_family_agrees_with_a_sum_over_all_counts(measure):
    log_normalizer, probability = enumerate_law(measure, NATURAL)
    x = tensor(counts_of_four)
    mean = probability @ x
    centered = x - mean[:, None]
    covariance = torch.einsum("qn,qnd,qne->qde", probability, centered, centered)
    assert_close(measure.log_normalizer(NATURAL), log_normalizer, rtol=1e-13, atol=1e-14)
    assert_close(measure.mean(NATURAL), mean, rtol=1e-12, atol=0)
    assert_close(measure.fisher(NATURAL), covariance, rtol=1e-11, atol=1e-15)


@each_family
def test_the_mean_is_the_gradient_of_the_log_normalizer(measure):
    assert_close(measure.mean(NATURAL), Measure.mean(measure, NATURAL), rtol=1e-12, atol=0)


@each_family
def test_every_vector_of_counts_is_drawn_as_often_as_its_probability_says(measure):
    draws = measure.sample(NATURAL, 20_000, torch.Generator().manual_seed(1))
    assert draws.shape == (20_000, *NATURAL.shape)
    assert draws.dtype == NATURAL.dtype
    _, probability = enumerate_law(measure, NATURAL)
    frequency = (draws[:, :, None] == tensor(counts_of_four)).all(-1).double().mean(0)
    allowed = 5 * (probability * (1 - probability) / len(draws)).sqrt() + 5 / len(draws)
    assert bool(((frequency - probability).abs() <= allowed).all())
    assert_close(frequency.sum(-1), torch.ones(3, dtype=torch.float64))


@each_family
def test_the_support_function_is_reached_by_the_best_count(measure):
    present = tensor([x for x in counts_of_four if log_pmf(measure, x) > -math.inf])
    directions = tensor([[1.0, 2.0, 5.0], [-1.0, -2.0, -0.5], [3.0, 0.0, 0.0]])
    assert_close(measure.support_function(directions), (directions @ present.T).amax(-1))


@each_family
def test_the_entropy_is_minus_the_divergence_from_h(measure):
    _, probability = enumerate_law(measure, NATURAL)
    log_h = tensor([float(log_pmf(measure, x)) for x in counts_of_four])
    terms = torch.where(probability > 0, probability * (probability.log() - log_h), 0.0)
    assert measure.reference == "intrinsic"
    assert_close(measure.entropy(NATURAL), -terms.sum(-1), rtol=1e-11, atol=1e-13)


@each_family
def test_the_affine_span_leaves_out_the_fixed_total_and_absent_cells(measure):
    cells = 2 if measure is CASES["multinomial with an absent cell"] else 3
    projector = measure.affine_span().reshape(3, 3)
    assert projector.trace().item() == pytest.approx(cells - 1)
    assert_close(projector.sum(-1), torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-14)


@each_family
def test_no_draws_leave_the_point_mass_at_zero(measure):
    parameter = measure.log_weight if isinstance(measure, Multinomial) else measure.concentration
    nothing = type(measure)(parameter, count=0)
    for value in (nothing.log_normalizer(NATURAL), nothing.mean(NATURAL), nothing.fisher(NATURAL)):
        assert not value.any()
    assert not nothing.sample(NATURAL, 2).any()
    assert not Measure.mean(nothing, NATURAL).any()


@pytest.mark.parametrize(
    ("concentration", "natural", "count"),
    [
        ([0.5, 1.5, 40.0], [1.0, 0.0, -2.0], 50),
        ([1e-6, 1e-3, 1e-2], [0.2, 0.0, 0.1], 40),
        ([0.7, 0.6, 2.0], [20.0, 0.0, -25.0], 40),
        ([300.0, 100.0, 200.0], [-1.0, 0.0, 1.0], 60),
    ],
)
def test_the_urn_agrees_with_the_power_series(concentration, natural, count):
    concentration, natural = tensor(concentration), tensor(natural)
    log_normalizer, mean, covariance = series_law(concentration, natural, count)
    measure = DirichletMultinomial(concentration, count)
    assert_close(measure.log_normalizer(natural[None])[0], log_normalizer, rtol=1e-12, atol=1e-12)
    assert_close(measure.mean(natural[None])[0], mean, rtol=1e-12, atol=0)
    # Entry by entry, down to a covariance of 1e-32; measured 4e-14.
    assert_close(measure.fisher(natural[None])[0], covariance, rtol=1e-12, atol=0)


def test_a_thousand_draws_in_a_hundred_cells_agree_with_the_textbook_moments():
    generator = torch.Generator().manual_seed(0)
    concentration = 5 * torch.rand(100, dtype=torch.float64, generator=generator) + 0.01
    measure, natural = DirichletMultinomial(concentration, 1000), torch.full((1, 100), 7.0, dtype=torch.float64)
    size, share = concentration.sum(), concentration / concentration.sum()
    covariance = 1000 * (1000 + size) / (1 + size) * (share.diag() - share.outer(share))
    assert_close(measure.log_normalizer(natural).item(), 7000.0, rtol=1e-13, atol=0)
    assert_close(measure.mean(natural)[0], 1000 * share, rtol=1e-12, atol=0)
    assert_close(measure.fisher(natural)[0], covariance, rtol=1e-11, atol=0)


@pytest.mark.parametrize("slope", [-0.02, 0.3, 900.0])
def test_a_thousand_draws_in_two_cells_agree_with_a_sum_over_all_counts(slope):
    concentration, x = tensor([0.4, 2.5]), torch.arange(1001, dtype=torch.float64)
    measure, natural = DirichletMultinomial(concentration, 1000), tensor([[slope, 0.0]])
    scores = slope * x + torch.from_numpy(stats.betabinom(1000, 0.4, 2.5).logpmf(x.numpy()))
    mean = scores.softmax(0) @ x
    # The log pmf itself is a difference of log factorials near 6000, good to 1e-12.
    assert_close(measure.log_normalizer(natural)[0], scores.logsumexp(0), rtol=1e-11, atol=1e-10)
    assert_close(measure.mean(natural)[0], torch.stack([mean, 1000 - mean]), rtol=1e-9, atol=1e-9)
    assert_close(Measure.mean(measure, natural), measure.mean(natural), rtol=1e-11, atol=0)
    variance = scores.softmax(0) @ (x - mean).square()
    assert_close(measure.fisher(natural)[0, 0, 0], variance, rtol=1e-8, atol=1e-9)


def test_many_dirichlet_draws_have_the_moments_of_the_family():
    generator = torch.Generator().manual_seed(5)
    measure = DirichletMultinomial(torch.rand(8, dtype=torch.float64, generator=generator) + 0.05, count=200)
    natural = 0.3 * torch.randn(2, 8, dtype=torch.float64, generator=generator)
    draws = measure.sample(natural, 4000, generator)
    assert bool((draws.sum(-1) == 200).all())
    assert_moments(draws, measure.mean(natural), measure.fisher(natural))


def test_many_multinomial_draws_have_the_moments_of_the_family():
    generator = torch.Generator().manual_seed(5)
    measure = Multinomial(torch.randn(8, dtype=torch.float64, generator=generator), count=200)
    natural = torch.randn(2, 8, dtype=torch.float64, generator=generator)
    draws = measure.sample(natural, 4000, generator)
    assert bool((draws.sum(-1) == 200).all())
    assert_moments(draws, measure.mean(natural), measure.fisher(natural))


@pytest.mark.parametrize("make", [Multinomial, DirichletMultinomial])
def test_a_nearly_certain_cell_keeps_a_small_and_exact_variance(make):
    variance = make(tensor([1.0, 1.0]), 1).fisher(tensor([[40.0, 0.0]]))[0]
    rare = float(1 / (1 + mpmath.exp(40)))
    assert_close(variance, rare * tensor([[1.0, -1.0], [-1.0, 1.0]]), rtol=1e-13, atol=0)


def test_gradients_reach_the_parameters():
    natural = NATURAL[1:2]
    assert torch.autograd.gradcheck(
        lambda alpha: DirichletMultinomial(alpha, 5).log_normalizer(natural), tensor([0.5, 1.0, 2.0]).requires_grad_()
    )
    assert torch.autograd.gradcheck(
        lambda weight: Multinomial(weight, 5).log_normalizer(natural), tensor([0.5, 1.0, 2.0]).requires_grad_()
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Multinomial(tensor([0.0, math.nan]), 2), "a nan is often the logarithm of a negative weight"),
        (lambda: Multinomial(tensor([0.0, math.inf]), 2), "log_weight must be finite"),
        (lambda: Multinomial(tensor([-math.inf, -math.inf]), 2), "log_weight must leave"),
        (lambda: Multinomial(torch.zeros(2, 3), 2), "log_weight must have 3 entries"),
        (lambda: Multinomial(torch.zeros(2), -1), "count must"),
        (lambda: Multinomial(torch.zeros(2), 2.5), "count must"),
        (lambda: DirichletMultinomial(tensor([1.0, 0.0]), 2), "concentration must be positive"),
        (lambda: DirichletMultinomial(tensor([1.0, math.nan]), 2), "concentration must be finite"),
        (lambda: DirichletMultinomial(torch.ones(2, 2), 2), "concentration must .* shape"),
        (lambda: DirichletMultinomial(torch.ones(2), -3), "count must"),
        (lambda: DirichletMultinomial(torch.ones(2), 1.0), "count must"),
    ],
)
def test_impossible_parameters_are_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()


def test_integer_log_weights_are_refused():
    with pytest.raises(UserError, match="log_weight must"):
        Multinomial(torch.tensor([0, 1]), 2)
