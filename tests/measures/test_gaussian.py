import math

import pytest
import torch
from draws import randn
from scipy import integrate, stats
from torch.testing import assert_close

from massieu import Gaussian, GaussianMixture, Points
from massieu.checks import UserError


def test_the_mean_is_affine_and_members_are_shifted_gaussians():
    location, root, natural = randn(3), randn(3, 3, seed=1), randn(4, 3, seed=2)
    covariance = root @ root.mT + torch.eye(3, dtype=torch.float64)
    gaussian = Gaussian(location, covariance)
    assert_close(gaussian.mean(natural), location + natural @ covariance)
    member = stats.multivariate_normal(gaussian.mean(natural)[0].numpy(), covariance.numpy())
    assert float(gaussian.entropy(natural)[0]) == pytest.approx(float(member.entropy()), abs=1e-12)


@pytest.mark.parametrize("eta", [-0.6, 0.0, 1.3])
def test_unequal_mixtures_agree_with_quadrature(eta):
    weight, location, variance = [0.3, 1.1, 0.4], [-1.0, 0.5, 2.0], [0.5, 1.5, 0.2]
    mixture = GaussianMixture(
        torch.tensor(weight, dtype=torch.float64).log(),
        torch.tensor(location, dtype=torch.float64)[:, None],
        torch.tensor(variance, dtype=torch.float64)[:, None, None],
    )

    def moment(power: int) -> float:
        def integrand(x: float) -> float:
            density = sum(
                w * stats.norm.pdf(x, m, math.sqrt(v)) for w, m, v in zip(weight, location, variance, strict=True)
            )
            return x**power * math.exp(eta * x) * density

        return integrate.quad(integrand, -25, 30, epsabs=1e-13, epsrel=1e-13, limit=200)[0]

    z, first, second = moment(0), moment(1), moment(2)
    natural = torch.tensor([[eta]], dtype=torch.float64)
    assert float(mixture.log_normalizer(natural)) == pytest.approx(math.log(z), abs=1e-10)
    assert float(mixture.mean(natural)) == pytest.approx(first / z, abs=1e-9)
    assert float(mixture.fisher(natural)) == pytest.approx(second / z - (first / z) ** 2, abs=1e-9)


def test_shared_covariances_are_attention_plus_a_linear_map():
    log_weight, locations, natural = randn(5), randn(5, 3, seed=1), randn(4, 3, seed=2)
    covariance = torch.diag(torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64))
    mixture = GaussianMixture(log_weight, locations, covariance)
    attention = Points(locations, log_weight)
    assert_close(mixture.mean(natural), attention.mean(natural) + natural @ covariance)
    assert_close(mixture.fisher(natural), attention.fisher(natural) + covariance)
    square = 0.5 * torch.einsum("qd,de,qe->q", natural, covariance, natural)
    assert_close(mixture.log_normalizer(natural), attention.log_normalizer(natural) + square)


EYE = torch.eye(2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Gaussian(torch.zeros(2), torch.diag(torch.tensor([1.0, -1.0]))),
            "positive definite, got a smallest eigenvalue of -1; add",
        ),
        (lambda: Gaussian(torch.zeros(2), torch.zeros(2, 2)), "must be positive definite, got"),
        (
            lambda: Gaussian(torch.zeros(2), torch.tensor([[1.0, 0.5], [0.0, 1.0]])),
            "must be symmetric, got one that is not; use",
        ),
        (lambda: Gaussian(torch.zeros(2), torch.eye(3)), "covariance must have shape"),
        (lambda: Gaussian(torch.zeros(1, 2), EYE), "location must have shape"),
        (lambda: Gaussian(torch.zeros(2).long(), EYE), "location must"),
        (lambda: Gaussian(torch.full((2,), torch.nan), EYE), "location must be finite"),
        (lambda: GaussianMixture(torch.zeros(3), torch.zeros(2, 2), EYE), "log_weight must"),
        (
            lambda: GaussianMixture(torch.tensor([1.0, -2.0]).log(), torch.zeros(2, 2), EYE),
            "logarithm of a negative weight",
        ),
        (lambda: GaussianMixture(torch.zeros(2), torch.zeros(2), EYE), "locations must"),
        (lambda: GaussianMixture(torch.zeros(2), torch.zeros(2, 2), torch.zeros(2, 2, 2)), "positive definite"),
    ],
)
def test_impossible_parameters_are_refused(make, message):
    with pytest.raises(UserError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)
