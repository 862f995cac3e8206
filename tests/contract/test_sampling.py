import pytest
import torch
from moments import assert_moments


def test_samples_have_the_mean_and_covariance_of_the_member(measure, natural):
    count = 40_000
    generator = torch.Generator().manual_seed(2)
    natural = natural[..., :2, :]
    try:
        draws = measure.sample(natural, count, generator)
    except NotImplementedError:
        pytest.skip(f"{measure} has no exact sampler")
    assert draws.shape == (count, *natural.shape)
    assert_moments(draws, measure.mean(natural), measure.fisher(natural))


def test_samples_repeat_with_the_seed_and_leave_the_global_one_alone(measure, natural):
    before = torch.random.get_rng_state()
    try:
        first, second = (measure.sample(natural, 3, torch.Generator().manual_seed(3)) for _ in range(2))
    except NotImplementedError:
        pytest.skip(f"{measure} has no exact sampler")
    assert torch.equal(first, second)
    assert torch.equal(torch.random.get_rng_state(), before)
