import pytest
import torch


def test_samples_have_the_mean_and_covariance_of_the_member(measure, natural):
    count = 40_000
    generator = torch.Generator().manual_seed(2)
    natural = natural[..., :2, :]
    try:
        draws = measure.sample(natural, count, generator)
    except NotImplementedError:
        pytest.skip(f"{measure} has no exact sampler")
    mean, fisher = measure.mean(natural), measure.fisher(natural)
    assert draws.shape == (count, *mean.shape)
    deviation = fisher.diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt()
    # Five standard errors, plus rounding for coordinates that do not vary.
    error = (draws.mean(0) - mean).abs()
    assert bool((error <= 5 * deviation / count**0.5 + 1e-9 * mean.abs()).all())
    centred = draws - mean
    square = centred.square()
    spread = (square.mean(0) - deviation.square()).abs()
    assert bool((spread <= 5 * square.std(0) / count**0.5 + 1e-9).all())


def test_samples_repeat_with_the_seed_and_leave_the_global_one_alone(measure, natural):
    before = torch.random.get_rng_state()
    try:
        first, second = (measure.sample(natural, 3, torch.Generator().manual_seed(3)) for _ in range(2))
    except NotImplementedError:
        pytest.skip(f"{measure} has no exact sampler")
    assert torch.equal(first, second)
    assert torch.equal(torch.random.get_rng_state(), before)
