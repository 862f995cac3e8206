"""Samples against the moments that they should have."""

import math

from torch import Tensor


def assert_moments(draws: Tensor, mean: Tensor, covariance: Tensor, errors: float = 5) -> None:
    """First and second moments of ``draws`` lie within so many standard errors of the given ones."""
    centered = draws - mean
    for value, expected in [(centered, 0 * mean), (centered[..., :, None] * centered[..., None, :], covariance)]:
        allowed = errors * value.std(0) / math.sqrt(len(draws))
        assert bool(((value.mean(0) - expected).abs() <= allowed + 1e-9 * (1 + mean.abs().max())).all())
