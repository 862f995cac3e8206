from torch.testing import assert_close

from massieu import Measure


def test_mean_is_the_gradient_of_the_log_normalizer(measure, natural):
    expected = Measure.mean(measure, natural)
    assert_close(measure.mean(natural), expected, rtol=1e-10, atol=1e-10 * float(expected.abs().max()))


def test_mean_agrees_with_a_central_difference(measure, natural):
    # Independent of autograd: O(step^2) truncation and O(eps / step) rounding meet near 1e-5.
    step = 1e-5
    for axis in range(min(measure.dim, 4)):
        moved = natural.clone()
        moved[..., axis] += step
        ahead = measure.log_normalizer(moved)
        moved[..., axis] -= 2 * step
        difference = (ahead - measure.log_normalizer(moved)) / (2 * step)
        scale = float(measure.mean(natural).abs().max()) + float(measure.log_normalizer(natural).abs().max())
        assert_close(measure.mean(natural)[..., axis], difference, rtol=1e-6, atol=1e-8 * scale)
