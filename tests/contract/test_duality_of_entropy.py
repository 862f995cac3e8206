from torch.testing import assert_close

from massieu import conjugate


def test_conjugate_at_the_mean_is_the_supremum_of_the_dual_problem(measure, natural):
    scale = float(measure.log_normalizer(natural).abs().max())
    reached = conjugate(measure, measure.mean(natural))
    assert_close(reached, measure.conjugate(natural), rtol=1e-9, atol=1e-11 * (1 + scale))


def test_entropy_falls_from_the_reference_by_the_conjugate(measure, natural):
    # Independent of how a family writes its entropy: H = G - eta . m - E[log h], each term on its own.
    linear = (natural * measure.mean(natural)).sum(-1)
    expected = measure.log_normalizer(natural) - linear - measure.expected_log_density(natural)
    scale = float(linear.abs().max()) + float(measure.log_normalizer(natural).abs().max())
    assert_close(measure.entropy(natural), expected, rtol=1e-10, atol=1e-12 * (1 + scale))
