import numpy
import torch
from torch.testing import assert_close

from massieu.geometry.clouds import (
    effective_dimension,
    gaussian_band,
    groups,
    half_log_det,
    mean_cosine,
    monotone,
    projection_kurtosis,
)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_volume_is_that_of_numpy_and_grows_with_the_scale():
    x = draw(300, 6) @ draw(6, 6, seed=1)
    covariance = torch.cov(x.T)
    assert_close(half_log_det(covariance), 0.5 * numpy.linalg.slogdet(covariance.numpy())[1], rtol=1e-10, atol=1e-10)
    assert_close(half_log_det(9 * covariance) - half_log_det(covariance), 6 * numpy.log(3), rtol=1e-9, atol=1e-9)


def test_a_flat_cloud_has_a_finite_volume_and_a_small_rank():
    covariance = torch.diag(torch.tensor([2.0, 2.0, 2.0, 0.0], dtype=torch.float64))
    assert numpy.isfinite(half_log_det(covariance))
    assert_close(effective_dimension(covariance), 3.0)


def test_the_mean_cosine_is_the_mean_over_pairs():
    x, sequence = draw(9, 4), torch.tensor([0] * 5 + [1] * 3 + [2])
    expected = []
    for rows in (x[:5], x[5:8]):
        cosine = torch.nn.functional.cosine_similarity(rows[:, None], rows[None], dim=-1)
        expected.append(cosine[~torch.eye(len(rows), dtype=torch.bool)].mean())
    found = mean_cosine(x, sequence, 3)
    assert_close(found[:2], torch.stack(expected))
    assert found[2].isnan()  # a single token has no pair


def test_tight_clusters_count_as_many_groups():
    centers = torch.eye(5, 40, dtype=torch.float64)
    x = centers.repeat_interleave(6, 0) + 0.01 * draw(30, 40)
    present = torch.ones(1, 30, dtype=torch.bool)
    assert_close(groups(x[None], present), torch.tensor([5.0], dtype=torch.float64))
    present[0, 9:] = False
    assert_close(groups(x[None], present), torch.tensor([2.0], dtype=torch.float64))


def test_a_gradient_of_a_convex_function_is_monotone_and_a_rotation_is_not():
    x = draw(200, 8)
    shape = draw(8, 8, seed=1)
    assert float(monotone(x, x @ (shape @ shape.T)).min()) > 0.99
    assert abs(float(monotone(x, x @ (shape - shape.T)).mean()) - 0.5) < 1e-9


def test_a_gaussian_is_in_the_band_and_a_heavy_tail_is_not():
    mixing = draw(12, 12, seed=3)
    for seed in range(5):
        x = draw(1500, 12, seed=seed) @ mixing
        found = projection_kurtosis(x[:1000], x.mean(0), torch.cov(x.T, correction=0))
        assert abs(found) < 1.5 * gaussian_band(1000, 1500, 12)  # the band is two standard deviations
    heavy = x * draw(1500, 1, seed=9).exp()
    assert projection_kurtosis(heavy, heavy.mean(0), torch.cov(heavy.T, correction=0)) > gaussian_band(1500, 1500, 12)


def test_whitening_keeps_a_large_direction_from_hiding_the_others():
    x = draw(4000, 10)
    x[:, 1:] = x[:, 1:].sign() * x[:, 1:].abs().exp()
    stretched = x * torch.tensor([1000.0] + [1.0] * 9, dtype=torch.float64)
    found = [projection_kurtosis(y, y.mean(0), torch.cov(y.T, correction=0)) for y in (x, stretched)]
    assert min(found) > 0.3
