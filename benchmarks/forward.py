"""Time of attention with statistics, as a ratio to ``scaled_dot_product_attention``."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.runner import Row, alternate
from massieu import attend

SHAPES = [(1, 8, 1024, 64), (1, 8, 4096, 64), (8, 12, 256, 32)]


def forward() -> list[Row]:
    """Output and full statistics against the output alone, and against entropy from the whole matrix."""
    with torch.no_grad():
        return [compare_forward(shape, causal) for shape in SHAPES for causal in (False, True)]


def compare_forward(shape: tuple[int, ...], causal: bool) -> Row:
    query, key, value = inputs(shape)
    ways = {
        "sdpa": lambda: scaled_dot_product_attention(query, key, value, is_causal=causal),
        "full": lambda: attend(query, key, value, causal=causal),
        "light": lambda: attend(query, key, value, causal=causal, statistics="light"),
        "eager + entropy": lambda: eager(query, key, value, causal),
    }
    return {"shape": str(shape), "causal": causal, **alternate(ways, baseline="sdpa")}


def forward_backward() -> list[Row]:
    """A training step whose loss holds the output and the statistics, against one with the output alone."""
    return [compare_forward_backward(shape, causal) for shape in SHAPES for causal in (False, True)]


def compare_forward_backward(shape: tuple[int, ...], causal: bool) -> Row:
    tensors = [x.requires_grad_() for x in inputs(shape)]

    def plain() -> None:
        loss = scaled_dot_product_attention(*tensors, is_causal=causal).square().sum()
        torch.autograd.grad(loss, tensors)

    def full() -> None:
        output, found = attend(*tensors, causal=causal)
        rows = found.entropy + found.log_normalizer + found.score_variance
        torch.autograd.grad(output.square().sum() + rows.sum(), tensors)

    def whole() -> None:
        output, entropy = eager(*tensors, causal)
        torch.autograd.grad(output.square().sum() + entropy.sum(), tensors)

    ways = {"sdpa": plain, "full": full, "eager + entropy": whole}
    return {"shape": str(shape), "causal": causal, **alternate(ways, baseline="sdpa")}


def inputs(shape: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for _ in range(3)]


def eager(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """What people write today: materialise the weights, then take their entropy."""
    scores = query @ key.mT * query.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu_(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    weight = scores.softmax(-1)
    return weight @ value, -torch.xlogy(weight, weight).sum(-1)
