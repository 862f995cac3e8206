import pytest
import torch
from torch.testing import assert_close

from massieu.checks import UserError


def test_leading_axes_are_carried_and_queries_do_not_interact(measure, natural):
    if measure.batch_shape:
        pytest.skip("the batch of the measure fixes the leading axes")
    stacked = torch.stack([natural, natural.flip(-2)])
    for method in (measure.log_normalizer, measure.mean, measure.fisher, measure.entropy, measure.contains):
        assert_close(method(stacked)[0], method(natural))
        alone = method(natural[..., :1, :])
        assert_close(method(natural)[(..., slice(0, 1), *([slice(None)] * (alone.dim() - natural.dim() + 1)))], alone)


def test_single_precision_natural_gives_single_precision_results(measure, natural):
    single = natural.float()
    for method in (measure.log_normalizer, measure.mean, measure.fisher, measure.entropy):
        result = method(single)
        assert result.dtype == torch.float32
        exact = method(single.double())
        assert_close(result.double(), exact, rtol=1e-3, atol=1e-3 * float(exact.abs().max()))


def test_a_single_vector_is_refused_with_the_remedy(measure, natural):
    with pytest.raises(UserError, match=r"got .*; for a single vector pass natural\[None\]"):
        measure.log_normalizer(natural.flatten(0, -2)[0])


def test_a_wrong_dimension_is_refused(measure, natural):
    with pytest.raises(UserError, match=rf"must have shape \(\.\.\., queries, {measure.dim}\), got"):
        measure.mean(torch.cat([natural, natural], -1))


def test_whole_numbers_are_refused(measure, natural):
    with pytest.raises(UserError, match=r"must be a floating-point tensor, got torch.int64; convert it with"):
        measure.mean(natural.long())
