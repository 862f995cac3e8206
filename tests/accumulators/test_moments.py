import math

import torch
from torch.testing import assert_close

from massieu.accumulators.moments import (
    GROUPS,
    HashSample,
    LogHistogram,
    Mean,
    Moments,
    document_hash,
    shuffled,
    token_hash,
)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_moments_of_parts_are_the_moments_of_the_whole():
    x, y = draw(90, 5) * 3 + 1e5, draw(90, 2, seed=1) - 7
    one, parts, rest = Moments(5, 2), Moments(0), Moments(0)
    one.update(x, y)
    for cut in (slice(0, 1), slice(1, 40)):
        parts.update(x[cut], y[cut])
    rest.update(x[40:], y[40:])
    parts.merge(rest)
    expected = (x - x.mean(0)).T @ (y - y.mean(0)) / 90
    assert_close(one.covariance, expected, rtol=1e-10, atol=1e-9)
    assert_close(parts.covariance, expected, rtol=1e-10, atol=1e-9)
    assert parts.count == 90


def test_few_rows_are_kept_as_they_are_and_many_are_not():
    x, y = draw(30, 12), draw(30, 4, seed=1)
    few, more, cross = Moments(0), Moments(0), Moments(0)
    few.update(x[:3])
    few.update(x[3:5])
    more.update(x[5:6])
    cross.update(x[:6], y[:6])
    assert torch.equal(few.rows, x[:5])
    assert_close(few.covariance, torch.cov(x[:5].T, correction=0))
    assert_close(cross.scatter, (x[:6] - x[:6].mean(0)).T @ (y[:6] - y[:6].mean(0)))
    copied = few.copy()
    copied.merge(more)
    copied.merge(more)
    assert copied.rows is None
    assert_close(copied.covariance, torch.cov(torch.cat([x[:6], x[5:6]]).T, correction=0))
    assert few.count == 5
    cross.update(x[6:], y[6:])
    assert_close(cross.scatter, (x - x.mean(0)).T @ (y - y.mean(0)))


def test_nothing_and_an_empty_batch_change_nothing():
    moments = Moments(3)
    moments.update(draw(4, 3))
    before = moments.covariance.clone()
    moments.update(draw(0, 3))
    moments.merge(Moments(3))
    assert torch.equal(moments.covariance, before)


def test_quantiles_of_a_histogram_are_near_the_true_ones():
    values = draw(20000).exp()
    histogram, other = LogHistogram(), LogHistogram()
    group = torch.arange(20000) % GROUPS
    histogram.update(values[:300], group[:300])
    other.update(values[300:], group[300:])
    histogram.merge(other)
    for level in (0.1, 0.5, 0.9):
        assert abs(histogram.quantile(level) / float(values.quantile(level)) - 1) < 0.005  # one bin


def test_errors_by_group_are_as_large_as_the_spread_over_texts():
    # Numbers of one group share a shift: the error of their mean is that of GROUPS shifts, not of all numbers.
    group = torch.arange(4000) % GROUPS
    means, medians, errors = [], [], []
    for seed in range(60):
        values = 1 + 0.1 * draw(GROUPS, seed=seed)[group] + 0.01 * draw(4000, seed=1000 + seed)
        mean, histogram = Mean(), LogHistogram()
        mean.update(values, group)
        histogram.update(values, group)
        means.append(mean.value)
        medians.append(histogram.quantile(0.5))
        errors.append((mean.standard_error, histogram.standard_error(0.5)))
    squares = torch.tensor(errors).square().mean(0).sqrt()
    assert_close(squares[0], torch.tensor(means).std(), rtol=0.25, atol=0)
    assert_close(squares[1], torch.tensor(medians).std(), rtol=0.4, atol=0)
    assert squares[0] > 10 * 0.1 / 4000**0.5  # what counting every number as a draw would say
    alone = Mean()
    alone.update(torch.ones(9), torch.full((9,), 3))
    assert math.isnan(alone.standard_error)


def test_the_error_of_a_mean_is_the_jackknife_of_the_groups():
    values, group = draw(50), torch.arange(50) % 5
    mean = Mean()
    mean.update(values, group)
    without = torch.stack([values[group != k].mean() for k in range(5)])
    assert_close(mean.value, float(values.mean()))
    assert_close(mean.standard_error, float((4 / 5 * (without - without.mean()).square().sum()).sqrt()))


def test_a_quantile_hardly_moves_when_a_number_crosses_a_bin():
    numbers = torch.tensor([0.9, 1.0, 1.1], dtype=torch.float64)
    found = []
    for shift in (-1e-9, 1e-9):
        histogram = LogHistogram()
        histogram.update(numbers + shift, torch.zeros(3, dtype=torch.long))
        found.append(histogram.quantile(0.5))
    assert abs(found[0] - found[1]) < 1e-6


def test_the_sample_does_not_depend_on_the_order_of_rows():
    hashes = token_hash(torch.full((500,), document_hash("a")), torch.arange(500))
    rows = torch.arange(500.0)[:, None]
    forwards, backwards = HashSample(20, 1), HashSample(20, 1)
    forwards.update(hashes, rows)
    for part in torch.arange(500).flip(0).split(7):
        backwards.update(hashes[part], rows[part])
    assert torch.equal(forwards.rows, backwards.rows)
    assert forwards.rows.std() > 50  # spread over the whole, not its beginning


def test_hashes_are_even_and_do_not_collide():
    hashes = token_hash(torch.full((20000,), 5), torch.arange(20000))
    assert len(hashes.unique()) == 20000
    assert int(hashes.min()) >= 0
    assert abs(float(hashes.double().mean()) / 2**62 - 1) < 0.03
    other = token_hash(torch.full((20000,), 5), torch.arange(20000), salt=1)
    agree = ((hashes & 1) == (other & 1)).double().mean()
    assert abs(float(agree) - 0.5) < 0.02


def test_a_shuffle_stays_within_sequences():
    sequence = torch.tensor([0] * 50 + [1] * 70 + [3] * 2)
    permutation = shuffled(sequence, token_hash(sequence, torch.arange(len(sequence))))
    assert torch.equal(permutation.sort().values, torch.arange(len(sequence)))
    assert torch.equal(sequence[permutation], sequence)
    assert (permutation == torch.arange(len(sequence))).double().mean() < 0.2
