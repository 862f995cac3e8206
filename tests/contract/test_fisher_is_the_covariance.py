import pytest
import torch
from torch.testing import assert_close

from massieu import Measure


def test_fisher_is_the_jacobian_of_the_mean(measure, natural):
    expected = Measure.fisher(measure, natural)
    assert_close(measure.fisher(natural), expected, rtol=1e-10, atol=1e-10 * float(expected.abs().max()))


def test_fisher_is_symmetric_and_positive_semidefinite(measure, natural):
    fisher = measure.fisher(natural)
    scale = float(fisher.abs().max())
    assert_close(fisher, fisher.mT, rtol=0, atol=1e-13 * scale)
    assert float(torch.linalg.eigvalsh(fisher).min()) >= -1e-12 * scale


def test_fisher_is_definite_exactly_on_the_affine_span(row, measure, natural):
    span = measure.affine_span()
    assert_close(span @ span, span, rtol=0, atol=1e-12)
    identity = torch.eye(measure.dim, dtype=torch.float64).expand_as(span)
    assert torch.allclose(span, identity, atol=1e-12) == row.minimal
    off = (identity - span) @ measure.fisher(natural)
    assert float(off.abs().max()) <= 1e-12 * float(measure.fisher(natural).abs().max())


def test_fisher_can_be_differentiated_once_more(measure, natural):
    if measure.dim > 8:
        pytest.skip("finite differences of a large matrix take long and show nothing new")
    point = natural[..., :1, :].clone().requires_grad_()
    assert torch.autograd.gradcheck(measure.fisher, point, fast_mode=True, rtol=1e-3, atol=1e-5)
