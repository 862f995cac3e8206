"""Time of attention with statistics, as a ratio to ``scaled_dot_product_attention``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.runner import Row, alternate, track
from massieu import attend

SHAPES = [(1, 8, 1024, 64), (1, 8, 4096, 64), (8, 12, 256, 32), (1, 8, 16384, 64)]
MOST_SCORES = 2**28  # the eager way holds several matrices of all scores; beyond 1 GB each it is left out


@dataclass(frozen=True)
class Case:
    """One set of inputs, ``shape`` being (batch, heads, length, dim)."""

    shape: tuple[int, int, int, int]
    causal: bool
    dtype: torch.dtype = torch.float32
    key_heads: int = 0  # 0: as many as there are heads

    def inputs(self) -> list[Tensor]:
        batch, heads, length, dim = self.shape
        generator = torch.Generator().manual_seed(0)
        each = (heads, self.key_heads or heads, self.key_heads or heads)
        return [torch.randn(batch, own, length, dim, generator=generator).to(self.dtype) for own in each]

    def sdpa(self, *tensors: Tensor) -> Tensor:
        return scaled_dot_product_attention(*tensors, is_causal=self.causal, enable_gqa=bool(self.key_heads))

    @property
    def eager_fits(self) -> bool:
        batch, heads, length, _ = self.shape
        return batch * heads * length**2 <= MOST_SCORES and not self.key_heads

    def row(self, measured: Row) -> Row:
        kind = str(self.dtype).removeprefix("torch.") + (f", {self.key_heads} key heads" if self.key_heads else "")
        return {"shape": str(self.shape), "causal": self.causal, "inputs": kind, **measured}


SINGLE = [Case(shape, causal) for shape in SHAPES for causal in (False, True)]
HALF = [Case(shape, causal, torch.bfloat16) for shape in SHAPES for causal in (False, True)]
GROUPED = [Case((1, 8, 4096, 64), causal, key_heads=2) for causal in (False, True)]


def forward() -> list[Row]:
    """Output and full statistics against the output alone, and against entropy from the whole matrix."""
    return _forward(SINGLE)


def forward_bfloat16() -> list[Row]:
    """The same for bfloat16 inputs; sdpa has them too."""
    return _forward(HALF)


def forward_grouped() -> list[Row]:
    """The same where four heads share their keys."""
    return _forward(GROUPED)


def _forward(cases: list[Case]) -> list[Row]:
    with torch.no_grad():
        return [case.row(compare_forward(case)) for case in track(cases)]


def compare_forward(case: Case) -> Row:
    tensors = case.inputs()
    ways = {
        "sdpa": lambda: case.sdpa(*tensors),
        "full": lambda: attend(*tensors, causal=case.causal),
    }
    if case.eager_fits:
        ways["eager + entropy"] = lambda: eager(*tensors, case.causal)
    return alternate(ways, baseline="sdpa")


def forward_backward() -> list[Row]:
    """A training step whose loss holds the output and the statistics, against one with the output alone."""
    return [case.row(compare_forward_backward(case)) for case in track([*SINGLE, *HALF[:2], *GROUPED])]


def compare_forward_backward(case: Case) -> Row:
    tensors = [x.requires_grad_() for x in case.inputs()]

    def plain() -> None:
        torch.autograd.grad(case.sdpa(*tensors).square().sum(), tensors)

    def full() -> None:
        output, found = attend(*tensors, causal=case.causal)
        rows = found.entropy + found.log_normalizer + found.score_variance
        torch.autograd.grad(output.square().sum() + rows.sum(), tensors)

    def whole() -> None:
        output, entropy = eager(*tensors, case.causal)
        torch.autograd.grad(output.square().sum() + entropy.sum(), tensors)

    ways = {"sdpa": plain, "full": full}
    if case.eager_fits:
        ways["eager + entropy"] = whole
    return alternate(ways, baseline="sdpa")


def eager(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """What people write today: materialize the weights, then take their entropy."""
    scores = query @ key.mT * query.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu_(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    weight = scores.softmax(-1)
    return weight @ value, -torch.xlogy(weight, weight).sum(-1)
