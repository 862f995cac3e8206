"""Observables against their definitions, written out."""

import math

import pytest
import torch
from scipy.sparse.csgraph import connected_components
from torch.testing import assert_close

from massieu.checks import UserError
from massieu.dynamics import OBSERVABLES, Regime, cluster_labels, clusters


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def observed(name, cloud, regime=None):
    return OBSERVABLES[name](cloud, Regime() if regime is None else regime)


@pytest.mark.parametrize("radius", [0.0, 0.1, 0.3, 0.6, 10.0])
def test_clusters_are_connected_components(radius):
    cloud = randn(2, 60, 2)
    for points, count, labels in zip(cloud, clusters(cloud, radius), cluster_labels(cloud, radius), strict=True):
        number, expected = connected_components(torch.cdist(points, points).numpy() <= radius)
        assert (int(count), labels.tolist()) == (number, expected.tolist())


def test_clusters_do_not_depend_on_the_tiles(monkeypatch):
    from massieu.dynamics import observables

    cloud = randn(80, 2)
    expected = cluster_labels(cloud, 0.3)
    monkeypatch.setattr(observables, "TILE_NUMBERS", 7)
    assert torch.equal(cluster_labels(cloud, 0.3), expected)


def test_clusters_of_few_points():
    assert clusters(torch.zeros(5, 3), 0.0) == 1
    assert clusters(torch.zeros(1, 3), 0.0) == 1
    assert clusters(torch.zeros(0, 3), 0.0) == 0
    assert clusters(torch.zeros(0, 4, 3), 0.0).shape == (0,)
    # The distance of close points far from the origin survives.
    assert clusters(torch.tensor([[1e6], [1e6 + 1e-3]], dtype=torch.float64), 1e-4) == 2


def test_moments_are_those_of_the_population():
    cloud = randn(2, 40, 3)
    assert_close(observed("mean", cloud), cloud.mean(1))
    assert_close(observed("covariance", cloud)[1], torch.cov(cloud[1].T, correction=0))


def test_distances_are_those_of_all_pairs():
    cloud = randn(30, 3)
    apart = torch.nn.functional.pdist(cloud)
    for name, expected in (("median", apart.median()), ("min", apart.min()), ("max", apart.max())):
        assert_close(observed(f"{name}_distance", cloud), expected)
    assert torch.isnan(observed("median_distance", cloud[:1]))


def test_distances_of_a_large_cloud_are_sampled_the_same_way_each_time():
    cloud = randn(2000, 2)
    found = observed("median_distance", cloud)
    assert torch.equal(found, observed("median_distance", cloud))
    assert_close(found, torch.nn.functional.pdist(cloud).median(), rtol=5e-3, atol=0)
    assert observed("min_distance", cloud) > 0  # no token is paired with itself


def test_cumulants_vanish_for_a_gaussian_and_only_there():
    # Independent coordinates with third cumulant 2 and excess kurtosis 6.
    skewed = -torch.rand(200_000, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64).log()
    turned = skewed @ torch.tensor([[3.0, 1.0], [0.0, 0.2]], dtype=torch.float64)
    directions = torch.randn(2, 64, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    unit = directions / directions.norm(dim=0)
    assert_close(observed("excess_kurtosis", skewed), 6 * unit.pow(4).sum(0).mean(), rtol=0.05, atol=0)
    third = (2 * unit.pow(3).sum(0)).square().mean().sqrt()
    assert_close(observed("third_cumulant", skewed), third, rtol=0.03, atol=0)
    assert abs(float(observed("excess_kurtosis", turned))) > 1
    gaussian = 7 + randn(200_000, 2) * torch.tensor([1.0, 30.0])
    assert abs(float(observed("excess_kurtosis", gaussian))) < 0.05
    assert float(observed("third_cumulant", gaussian)) < 0.03
    assert torch.isnan(observed("excess_kurtosis", torch.full((9, 2), 0.1)))


def test_entropy_is_that_of_a_gaussian_with_the_same_covariance():
    cloud = randn(2, 100, 3)
    covariance = torch.cov(cloud[0].T, correction=0)
    expected = torch.distributions.MultivariateNormal(torch.zeros(3).double(), covariance).entropy()
    assert_close(observed("entropy_logdet", cloud)[0], expected)
    assert observed("entropy_logdet", cloud[0, :3]) == -math.inf  # three tokens fill no volume


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("moving", [False, True])
def test_normalizers_are_those_the_tokens_see(causal, moving):
    cloud, beta = randn(10, 3), 0.7
    keys = cloud if moving else randn(10, 3, seed=1)
    scores = (beta * cloud @ keys.T).exp()
    normalizer = (scores.tril() if causal else scores).sum(-1)
    regime = Regime(None if moving else keys, beta, causal)
    assert_close(observed("sum_log_normalizer", cloud, regime), normalizer.log().sum())
    assert_close(observed("log_sum_normalizer", cloud, regime), normalizer.sum().log())


def test_the_number_of_clusters_is_relative_to_the_size_of_the_tokens():
    cloud = torch.cat([torch.zeros(5, 2), torch.full((5, 2), 1.0)])
    assert observed("clusters", 1e-3 * cloud) == observed("clusters", 1e3 * cloud) == 2
    assert observed("clusters", 0 * cloud) == 1
    assert observed("clusters", torch.stack([cloud, 0 * cloud])).tolist() == [2, 1]


@pytest.mark.parametrize("radius", [-1.0, math.nan])
def test_a_radius_must_not_be_negative(radius):
    with pytest.raises(UserError, match="radius"):
        clusters(torch.zeros(3, 2), radius)
