import pytest
import torch
from torch.testing import assert_close


def test_no_divergence_of_close_members_is_negative(measure, natural):
    for distance in (1e-15, 1e-12, 1e-9, 1e-6, 1e-3):
        assert bool((measure.divergence(natural, (1 - distance) * natural) >= 0).all())


def test_the_divergence_of_close_members_is_half_of_the_fisher_metric(measure, natural):
    other = (1 - 1e-9) * natural
    step = other - natural
    square = torch.einsum("...d,...de,...e->...", step, measure.fisher(natural), step)
    scale = float(natural.abs().max())
    assert_close(measure.divergence(natural, other), square / 2, rtol=1e-6, atol=1e-24 * scale**2)


@pytest.mark.parametrize("distance", [0.0, 1e-9, 1e-4, 1.0])
def test_the_gradients_are_those_of_a_divergence(measure, natural, distance):
    # In the second argument m(second) - m(first), in the first C(first) (first - second).
    first = natural.clone().requires_grad_()
    second = ((1 - distance) * natural).detach().requires_grad_()
    measure.divergence(first, second).sum().backward()
    with torch.no_grad():
        change = torch.einsum("...de,...e->...d", measure.fisher(natural), natural - second)
        moved = measure.mean(second) - measure.mean(natural)
        size = float(measure.mean(natural).abs().max() + change.abs().max())
    assert_close(first.grad, change, rtol=1e-6, atol=1e-14 * size)
    assert_close(second.grad, moved, rtol=1e-6, atol=1e-12 * (1 + size))
