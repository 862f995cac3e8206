import numpy
import torch
from torch.testing import assert_close

from massieu.accumulators.regression import Regression, held_out_r2


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def seen(x, y, parts=1):
    found = Regression(0, 0)
    for rows, targets in zip(x.chunk(parts), y.chunk(parts), strict=True):
        found.update(rows, targets)
    return found


def noisy(seed=0):
    x = draw(400, 6, seed=seed) @ draw(6, 6, seed=5) + 3
    return x, x @ draw(6, 4, seed=6) + 2 + 2 * draw(400, 4, seed=seed + 1)


def test_it_is_the_r2_of_the_residuals_on_the_other_half():
    (x, y), (u, v) = noisy(0), noisy(10)
    # Noise is small beside the signal, so least squares and the ridge that validation picks agree.
    centered = numpy.linalg.lstsq((x - x.mean(0)).numpy(), (y - y.mean(0)).numpy(), rcond=None)[0]
    residual = v - y.mean(0) - (u - x.mean(0)) @ torch.from_numpy(centered)
    expected = 1 - float(residual.square().sum() / (v - v.mean(0)).square().sum())
    assert_close(held_out_r2(seen(x, y, parts=7), seen(u, v, parts=3)), expected, rtol=1e-3, atol=1e-3)


def test_a_linear_map_is_found_and_shuffled_targets_are_not():
    x, u = draw(300, 20), draw(300, 20, seed=1)
    shape = draw(20, 20, seed=2)
    train, test = seen(x, x @ shape), seen(u, u @ shape)
    assert_close(held_out_r2(train, test), 1.0, rtol=0, atol=1e-9)
    shuffled = seen(x, (x @ shape)[torch.randperm(300, generator=torch.Generator().manual_seed(0))])
    assert abs(held_out_r2(train.with_targets(shuffled.cross), test)) < 0.05


def test_with_fewer_tokens_than_dimensions_the_ridge_keeps_it_from_failing():
    x, u = draw(30, 60), draw(200, 60, seed=1)
    assert -0.2 < held_out_r2(seen(x, draw(30, 5, seed=2)), seen(u, draw(200, 5, seed=3))) < 0.1


def test_one_empty_half_has_no_r2():
    x, y = noisy()
    assert numpy.isnan(held_out_r2(seen(x, y), Regression(6, 4)))


def test_merging_spreads_keeps_the_sum_of_squares():
    x, y = noisy()
    assert_close(seen(x, y, parts=9).spread, float((y - y.mean(0)).square().sum()), rtol=1e-12, atol=0)
