import torch
from torch.testing import assert_close

from massieu import conjugate


def test_entropy_and_conjugate_differ_by_the_expected_log_density(measure, natural):
    total = measure.entropy(natural) + measure.conjugate(natural) + measure.expected_log_density(natural)
    scale = float(measure.log_normalizer(natural).abs().max()) + float((natural * measure.mean(natural)).abs().max())
    assert_close(total, torch.zeros_like(total), rtol=0, atol=1e-12 * (1 + scale))


def test_conjugate_at_the_mean_is_the_supremum_of_the_dual_problem(measure, natural):
    scale = float(measure.log_normalizer(natural).abs().max())
    reached = conjugate(measure, measure.mean(natural))
    assert_close(reached, measure.conjugate(natural), rtol=1e-9, atol=1e-11 * (1 + scale))
