"""Laws of the operator against particles, quadrature, enumeration and a numerical step of a perturbed law."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from torch.testing import assert_close

from massieu import Gamma, Gaussian, Points, attend
from massieu.dynamics import (
    ascend,
    cumulant_amplification,
    gaussian_moments,
    renormalize,
    rms_norm,
    rms_norm_moments,
    token_limit,
)


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_particles_approach_the_gaussian_moments_with_the_root_of_their_number():
    location = torch.tensor([0.5, -0.3, 0.2], dtype=torch.float64)
    A, B = 0.4 * randn(3, 3, seed=1), 0.5 * randn(3, 3, seed=2)
    covariance = torch.diag(torch.tensor([0.6, 0.4, 0.3], dtype=torch.float64))
    mean, spread = gaussian_moments(location, covariance, A, B)
    sizes, errors = (64, 256, 1024), []
    for size in sizes:
        cloud = location + randn(100, size, 3, seed=size) @ covariance.sqrt()
        moved = cloud + attend(cloud @ A, cloud, cloud, scale=1.0).output @ B.T
        centered = moved - moved.mean(1, keepdim=True)
        covariances = centered.mT @ centered / size
        errors.append(
            [
                (moved.mean(1) - mean).square().sum(-1).mean().sqrt().item(),
                (covariances - spread).square().sum((-1, -2)).mean().sqrt().item(),
            ]
        )
    slopes = (torch.tensor(errors[-1]) / torch.tensor(errors[0])).log() / math.log(sizes[-1] / sizes[0])
    assert bool(((slopes > -0.62) & (slopes < -0.4)).all()), slopes
    # The transposed score matrix is another operator.
    other, _ = gaussian_moments(location, covariance, A.T, B)
    assert float((other - mean).norm()) > 5 * errors[-1][0] / math.sqrt(100)


def test_gaussian_moments_are_those_of_the_affine_map():
    location, A, B = randn(3), randn(3, 3, seed=1), randn(3, 3, seed=2)
    root = randn(3, 3, seed=3)
    covariance = root @ root.T
    tokens = randn(5, 3, seed=4)
    moved = tokens + Gaussian(location, covariance).mean(tokens @ A) @ B.T
    transfer = torch.linalg.lstsq(torch.cat([tokens, torch.ones(5, 1)], -1), moved).solution
    mean, spread = gaussian_moments(location, covariance, A, B)
    assert_close(mean, location @ transfer[:3] + transfer[3])
    assert_close(spread, transfer[:3].T @ covariance @ transfer[:3])
    identity = torch.eye(3).double()
    assert_close(gaussian_moments(location, covariance), gaussian_moments(location, covariance, identity, identity))


def test_rms_norm_moments_agree_with_the_reference_figures():
    # The spectrum behind these figures was recovered from them; only ratios matter.
    found = rms_norm_moments(torch.diag(torch.tensor([4.0, 2.0, 1.0, 0.5, 0.1], dtype=torch.float64)))
    expected = torch.tensor([2.10822, 1.38597, 0.86408, 0.51222, 0.12952], dtype=torch.float64)
    assert_close(found.diagonal(), expected, rtol=0, atol=6e-6)


def test_rms_norm_moments_agree_with_quadrature_in_two_dimensions():
    for ratio in (1.0, 0.3, 1e-4):
        found = rms_norm_moments(torch.diag(torch.tensor([1.0, ratio], dtype=torch.float64)))

        def angular(angle, ratio=ratio):
            # The angle of a Gaussian has density proportional to 1 / (cos^2 / l1 + sin^2 / l2).
            return 1 / (math.cos(angle) ** 2 + math.sin(angle) ** 2 / ratio)

        peak = [0.0, math.pi]
        total = quad(angular, -math.pi / 2, 3 * math.pi / 2, points=peak, limit=500)[0]
        first = quad(lambda a: math.cos(a) ** 2 * angular(a), -math.pi / 2, 3 * math.pi / 2, points=peak, limit=500)[0]
        assert float(found[0, 0]) == pytest.approx(2 * first / total, rel=1e-7)


@pytest.mark.parametrize("dim", [1, 2, 3, 8, 64, 500])
def test_rms_norm_moments_have_trace_dim_and_are_even_for_even_spectra(dim):
    identity = torch.eye(dim, dtype=torch.float64)
    assert_close(rms_norm_moments(3 * identity), identity, rtol=0, atol=1e-12)
    root = randn(dim, dim)
    assert float(rms_norm_moments(root @ root.T).trace()) == pytest.approx(dim, rel=1e-12)


def test_rms_norm_moments_agree_with_tokens_in_any_basis_and_rank():
    root = randn(2, 4, 2)  # rank two of four
    found = rms_norm_moments(root @ root.mT)
    draws = rms_norm(randn(200_000, 2) @ root.mT)
    assert_close(found, draws.mT @ draws / 200_000, rtol=0, atol=0.02)
    assert rms_norm_moments(torch.eye(2)).dtype == torch.float32


def simulate(draw, query, num_tokens, repeats):
    tokens = draw(repeats, num_tokens)
    return attend(query.expand(repeats, 1, -1), tokens, tokens, scale=1.0).output[:, 0]


def test_finite_tokens_err_as_importance_sampling_says():
    query = torch.ones(1, 1, dtype=torch.float64)
    measure = Gaussian(torch.zeros(1).double(), torch.eye(1).double())
    limit = token_limit(measure, query, 1000)
    assert float(limit.rmse) == pytest.approx(0.0737, abs=5e-5)
    assert float(limit.effective_sample_size) == pytest.approx(1000 / math.e)
    found = torch.cat([simulate(lambda *n, s=s: randn(*n, 1, seed=s), query, 1000, 4000) for s in range(10)])
    error = found - measure.mean(query)
    assert float(error.square().mean().sqrt()) == pytest.approx(0.0724, abs=0.0015)
    assert float(error.mean()) == pytest.approx(float(limit.bias), abs=4 * 0.0724 / 200)
    assert abs(float(error.mean())) > 4 * 0.0724 / 200  # the bias is seen
    tokens = randn(100_000, 1, seed=99)
    seen = attend(query, tokens, tokens, scale=1.0)
    assert float(seen.statistics.effective_atoms) == pytest.approx(1e5 / math.e, rel=0.05)


def test_finite_tokens_of_an_atomic_law_in_two_dimensions():
    atoms = randn(6, 2)
    log_weight = randn(6, seed=1)  # of any total mass
    measure, query = Points(atoms, log_weight), torch.tensor([[0.6, -0.4]], dtype=torch.float64)

    def draw(*shape):
        index = torch.multinomial(
            log_weight.exp(), math.prod(shape), replacement=True, generator=torch.Generator().manual_seed(0)
        )
        return atoms[index].reshape(*shape, 2)

    limit = token_limit(measure, query, 200)
    error = simulate(draw, query, 200, 20_000) - measure.mean(query)
    assert float(error.square().sum(-1).mean().sqrt()) == pytest.approx(float(limit.rmse), rel=0.03)
    assert_close(error.mean(0), limit.bias[0], rtol=0, atol=4 * float(limit.rmse) / math.sqrt(20_000))
    assert float(limit.bias.norm()) > 6 * float(limit.rmse) / math.sqrt(20_000)


def perturbed(order, size):
    """Nodes and weights of a standardised law whose first cumulant beyond the second is of the given order."""
    grid = torch.linspace(-12, 12, 2401, dtype=torch.float64)[:, None]
    shares, centers = ((0.5, 0.5), (-size, size)) if order == 4 else ((0.2, 0.8), (2 * size, -size / 2))
    variance = 1 - sum(p * c * c for p, c in zip(shares, centers, strict=True))
    density = sum(p * torch.exp(-0.5 * (grid - c) ** 2 / variance) for p, c in zip(shares, centers, strict=True))
    return grid, (density / density.sum())[:, 0]


def cumulant(values, weight, order):
    mean = weight @ values
    central = [weight @ (values - mean) ** k for k in range(5)]
    return float(central[3] / central[2] ** 1.5 if order == 3 else central[4] / central[2] ** 2 - 3)


def amplification(order, size, step, spread):
    """Growth of the cumulant in one step of attention over the law's own keys, by nodes; both standardised."""
    grid, weight = perturbed(order, size)
    natural = grid / math.sqrt(spread)
    moved = ascend(natural, spread * natural, step=step, log_weight=weight.log())
    return cumulant(moved[:, 0], weight, order) / cumulant(grid[:, 0], weight, order)


@settings(derandomize=True, deadline=None, database=None, max_examples=30)
@given(st.sampled_from([3, 4]), st.floats(0.05, 5), st.floats(0.1, 3))
def test_a_small_cumulant_grows_by_the_predicted_factor(order, step, spread):
    law = cumulant_amplification(order, step, spread)
    # Renormalization standardises, which cumulants of standardised tokens have built in.
    large, small = (abs(amplification(order, size, step, spread) - law) for size in (0.2, 0.05))
    # The shift shrinks by four, and with its square what the next order adds.
    assert small < 0.1 * large
    assert small < 0.02 * (law - 1)
    # It is neither the factor of another order nor stability.
    found = amplification(order, 0.05, step, spread)
    assert abs(found - cumulant_amplification(order + 1, step, spread)) > 2 * small
    assert found > 1 + 0.9 * (law - 1)


def test_an_affine_map_amplifies_nothing():
    grid, weight = perturbed(4, 0.3)
    assert cumulant(5 - 3 * grid[:, 0], weight, 4) == pytest.approx(cumulant(grid[:, 0], weight, 4))


def test_the_equilibrium_of_particles_is_unstable():
    cloud = renormalize(perturbed(4, 0.5)[0][400:2001:16], torch.zeros(1), torch.eye(1))  # flat: kurtosis -1.2
    moved = renormalize(ascend(cloud), torch.zeros(1), torch.eye(1))
    even = torch.full((len(cloud),), 1 / len(cloud), dtype=torch.float64)
    assert cumulant(moved[:, 0], even, 4) < 1.1 * cumulant(cloud[:, 0], even, 4) < 0


ONE = torch.ones(1, 1, dtype=torch.float64)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gaussian_moments(ONE, ONE), "location"),
        (lambda: gaussian_moments(ONE[0], -ONE), "covariance"),
        (lambda: gaussian_moments(ONE[0], ONE, A=torch.eye(2)), "A"),
        (lambda: gaussian_moments(ONE[0], ONE, B=torch.ones(1)), "B"),
        (lambda: rms_norm_moments(torch.ones(2, 3)), "covariance"),
        (lambda: rms_norm_moments(0 * ONE), "covariance"),
        (lambda: rms_norm_moments(torch.diag(torch.tensor([1.0, -1.0]))), "smallest eigenvalue -1 and largest 1; check its sign"),
        (lambda: token_limit(Gamma(2.0, 1.0), 0.6 * ONE, 10), "twice natural"),
        (lambda: token_limit(Gamma(2.0, 1.0), 1.5 * ONE, 10), "natural of Gamma"),
        (lambda: token_limit(Gamma(2.0, 1.0), 0.1 * ONE, 0), "num_tokens"),
        (lambda: cumulant_amplification(2, 1.0, 1.0), "order"),
        (lambda: cumulant_amplification(3, -1.0, 1.0), "step"),
        (lambda: cumulant_amplification(3, 1.0, -1.0), "spread"),
    ],
)  # fmt: skip
def test_mistakes_end_in_one_sentence(call, message):
    with pytest.raises(ValueError, match=message):
        call()
