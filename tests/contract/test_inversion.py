import torch
from torch.testing import assert_close

from massieu import natural_from_mean, prox


def test_natural_from_mean_inverts_the_mean_map_in_at_most_twelve_steps(row, measure, natural):
    inversion = natural_from_mean(measure, measure.mean(natural))
    assert bool(inversion.converged.all())
    assert not bool((inversion.boundary | inversion.outside).any())
    assert int(inversion.steps.max()) <= 12
    assert inversion.unique == row.minimal
    # Of the many solutions of a family that is not minimal, the one of least norm lies in the span.
    expected = torch.einsum("...de,...e->...d", measure.affine_span(), natural)
    assert_close(inversion.natural, expected, rtol=1e-8, atol=1e-8)


def test_prox_is_the_exact_inverse_of_a_residual_step_of_any_length(measure, natural):
    for step in (0.1, 1.0, 10.0):
        point = natural + step * measure.mean(natural)
        found = prox(measure, point, step)
        assert bool(found.converged.all())
        assert_close(found.natural, natural, rtol=1e-9, atol=1e-9 * (1 + step))
        identity = torch.eye(measure.dim, dtype=torch.float64)
        jacobian = identity + step * measure.fisher(natural)
        assert_close(found.log_determinant, torch.linalg.slogdet(jacobian).logabsdet, rtol=1e-7, atol=1e-7)


def test_prox_never_increases_a_distance(measure, natural):
    first, second = natural.flatten(0, -2)[:1].reshape(1, -1), natural.flatten(0, -2)[1:2].reshape(1, -1)
    after = prox(measure, first).natural - prox(measure, second).natural
    assert bool((after.norm(dim=-1) <= (first - second).norm(dim=-1) * (1 + 1e-12)).all())
