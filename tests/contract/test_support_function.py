import pytest
import torch


def test_every_mean_lies_below_the_support_function(measure, natural):
    generator = torch.Generator().manual_seed(1)
    direction = torch.randn(7, measure.dim, generator=generator, dtype=torch.float64)
    height = torch.einsum("...qd,ud->...qu", measure.mean(natural), direction)
    reach = measure.support_function(direction)
    assert bool((height <= reach[..., None, :] + 1e-12 * height.abs()).all())


def test_the_support_function_is_the_slope_of_the_log_normalizer_at_infinity(measure, natural):
    direction = natural / natural.norm(dim=-1, keepdim=True)
    reach = measure.support_function(direction)
    far = 1e5 * direction
    if not bool((torch.isfinite(reach) & measure.contains(far)).all()):
        pytest.skip("the support is unbounded in these directions")
    # G(t u) / t falls short by O(log t / t); a family of dim D may lose (D / 2) log t.
    short = reach - measure.log_normalizer(far) / 1e5
    assert float(short.abs().max()) < 1e-3 * (1 + measure.dim)
