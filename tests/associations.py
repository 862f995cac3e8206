"""Hopfield layers with random biases, and associations written with the weights as a matrix."""

from __future__ import annotations

import torch
from draws import generator, randn
from torch import Tensor, nn

from massieu.nn import Hopfield

RAW = {
    "normalize_stored_pattern": False,
    "normalize_state_pattern": False,
    "normalize_pattern_projection": False,
}
STATIC = {
    "stored_pattern_as_static": True,
    "state_pattern_as_static": True,
    "pattern_projection_as_static": True,
    "disable_out_projection": True,
} | RAW


def build(*sizes, kind: type = Hopfield, dtype: torch.dtype = torch.float64, **options):
    """A layer whose biases and norms are random too."""
    layer = kind(*sizes, dtype=dtype, generator=generator(1), **options)
    with torch.no_grad():
        for seed, (name, parameter) in enumerate(layer.named_parameters()):
            if parameter.dim() == 1 and "scaling" not in name:
                parameter.copy_(randn(*parameter.shape, seed=seed, dtype=dtype))
    return layer


def update(state: Tensor, stored: Tensor, beta: Tensor | float, value: Tensor | None = None) -> Tensor:
    """One update, with the weights as a matrix."""
    return (beta * state @ stored.mT).softmax(-1) @ (stored if value is None else value)


def by_heads(linear: nn.Linear, x: Tensor, heads: int) -> Tensor:
    return linear(x).reshape(*x.shape[:2], heads, -1).permute(0, 2, 1, 3)
