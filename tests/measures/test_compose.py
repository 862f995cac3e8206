import itertools

import pytest
import torch
from draws import randn
from torch.testing import assert_close

from massieu import Convolution, Gamma, Gaussian, GaussianMixture, Hypercube, Mixture, Points, Poisson
from massieu.checks import UserError


def test_a_convolution_is_the_law_of_the_sum_over_independent_heads():
    # 5 x 5 x 5 sums of atoms, enumerated: multi-head attention is attention over all of them.
    maps = [randn(4, 3, seed=h) for h in range(3)]
    heads = [Points(randn(5, 3, seed=10 + h), randn(5, seed=20 + h)) for h in range(3)]
    atoms, log_weight = [], []
    for choice in itertools.product(range(5), repeat=3):
        atoms.append(sum(maps[h] @ heads[h].support[j] for h, j in enumerate(choice)))
        log_weight.append(sum(heads[h].log_weight[j] for h, j in enumerate(choice)))
    product = Points(torch.stack(atoms), torch.stack(log_weight))
    natural = randn(6, 4, seed=5)
    convolution = Convolution(maps, heads)
    assert_close(convolution.log_normalizer(natural), product.log_normalizer(natural), rtol=1e-12, atol=1e-12)
    assert_close(convolution.mean(natural), product.mean(natural), rtol=1e-12, atol=1e-12)
    assert_close(convolution.fisher(natural), product.fisher(natural), rtol=1e-11, atol=1e-12)


def test_a_mixture_of_gaussians_is_the_gaussian_mixture():
    log_weight, locations, natural = randn(3), randn(3, 2, seed=1), randn(4, 2, seed=2)
    covariances = torch.stack([torch.eye(2, dtype=torch.float64) * c for c in (0.5, 1.0, 2.0)])
    direct = GaussianMixture(log_weight, locations, covariances)
    mixed = Mixture(log_weight, [Gaussian(m, c) for m, c in zip(locations, covariances, strict=True)])
    for method in ("log_normalizer", "mean", "fisher", "entropy"):
        assert_close(getattr(mixed, method)(natural), getattr(direct, method)(natural))


def test_a_mixture_of_single_atoms_is_points():
    support, log_weight, natural = randn(5, 3), randn(5, seed=1), randn(4, 3, seed=2)
    mixed = Mixture(log_weight, [Points(atom[None]) for atom in support])
    assert_close(mixed.mean(natural), Points(support, log_weight).mean(natural))
    assert_close(mixed.support_function(natural), Points(support).support_function(natural))


def test_an_absent_component_does_not_count():
    far = Points(torch.full((1, 2), 1e3, dtype=torch.float64))
    near = Points(randn(4, 2))
    mixed = Mixture(torch.tensor([0.0, -torch.inf], dtype=torch.float64), [near, far])
    natural = randn(3, 2, seed=1)
    assert_close(mixed.mean(natural), near.mean(natural))
    assert_close(mixed.support_function(natural), near.support_function(natural))


def test_tilting_gamma_changes_its_scale():
    tilted = Gamma(2.5, 0.7).tilt(torch.tensor([0.4], dtype=torch.float64))
    plain = Gamma(2.5, 0.7 / (1 - 0.7 * 0.4))
    natural = torch.tensor([[-1.0], [0.5]], dtype=torch.float64)
    for method in ("log_normalizer", "mean", "fisher", "entropy"):
        assert_close(getattr(tilted, method)(natural), getattr(plain, method)(natural))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Mixture(torch.zeros(2), [Hypercube(2), Hypercube(3)]), r"all of one dim, got dims \[2, 3\]; map"),
        (lambda: Mixture(torch.zeros(0), []), r"at least one, all of one dim, got dims \[\]"),
        (lambda: Mixture(torch.zeros(3), [Hypercube(2)] * 2), "log_weight must"),
        (
            lambda: Convolution([torch.zeros(3, 2)], [Hypercube(4)]),
            r"dim_h = \[4\], one per measure, got \[\(3, 2\)\]; transpose",
        ),
        (lambda: Convolution([torch.zeros(3, 2), torch.zeros(4, 2)], [Hypercube(2)] * 2), "maps must"),
        (lambda: Convolution([], []), "maps must"),
        (lambda: Gamma(1.0, 0.5).tilt(torch.tensor([2.5])), "natural of Gamma must lie in"),
        (lambda: Gamma(1.0, 0.5).tilt(torch.tensor([1.0])).mean(torch.tensor([[1.5]])), "moved by minus the tilt, got"),
        (
            lambda: Mixture(torch.zeros(2), [Gamma(1.0, 1.0), Poisson(1.0)]).mean(torch.ones(1, 1)),
            "domain of every component",
        ),
        (
            lambda: Convolution([torch.eye(1)], [Gamma(1.0, 1.0)]).mean(torch.ones(1, 1)),
            "every map takes into the natural domain",
        ),
    ],
)
def test_impossible_compositions_are_refused(call, message):
    with pytest.raises(UserError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
