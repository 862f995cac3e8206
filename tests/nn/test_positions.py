"""Rotary positions, against complex multiplication."""

import torch
from draws import randn
from torch.testing import assert_close

from massieu.nn import rotate


def by_phase(x: torch.Tensor, offset: int) -> torch.Tensor:
    phase = [[(offset + i) * 100.0 ** (-m / 4) for m in range(4)] for i in range(x.shape[-2])]
    angle = torch.tensor(phase, dtype=torch.float64)
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], dim=-1)


def test_rotation_is_multiplication_by_a_phase():
    x = randn(2, 5, 8)
    assert_close(rotate(x, 3, base=100.0), by_phase(x, 3), rtol=0, atol=1e-14)


def test_inner_products_depend_on_differences_of_positions_only():
    query, key = randn(1, 8).expand(6, 8), randn(1, 8, seed=1).expand(6, 8)
    near, far = (rotate(query, offset) @ rotate(key, offset).T for offset in (0, 1000))
    assert_close(near, far, rtol=0, atol=1e-11)
    assert_close(near[2:, 2:], near[:-2, :-2], rtol=0, atol=1e-12)
    assert float((near[0] - near[0, 0]).abs().max()) > 0.1


def test_float32_keeps_its_precision_at_far_positions():
    x = randn(3, 8)
    # Angles in float32 would be off by a hundredth here.
    assert_close(rotate(x.float(), 10**6, base=100.0).double(), by_phase(x, 10**6), rtol=0, atol=1e-6)
