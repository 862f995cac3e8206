"""Attention on the blocks of sparse patterns, as a ratio to dense ``scaled_dot_product_attention``.

Dense attention computes all pairs, so its output differs; it is the baseline of time only. A plan is made once for a
pattern and a length; its time is a column of its own. The last row of a pattern has the length from which on it is
faster.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.runner import Row, alternate, track
from massieu.patterns import (
    Pattern,
    bigbird,
    fixed,
    global_window,
    powers_of_two,
    sparse_attend,
    sparse_plan,
    star_ring,
    strided,
)

HEADS, DIM = 4, 32
LENGTHS = (256, 512, 1024, 2048, 4096)
PATTERNS: dict[str, Callable[[], Pattern]] = {
    "star_ring": star_ring,
    "global_window(16, 1)": lambda: global_window(16, 1),
    "global_window(128, 1)": lambda: global_window(128, 1),
    "bigbird(16, 2, 3)": lambda: bigbird(16, 2, 3),
    "bigbird, blocks of 64": lambda: bigbird(1, 1, 2, block=64),
    "strided, multiples": lambda: strided()[1],
    "fixed, last of blocks": lambda: fixed()[1],
    "powers_of_two": powers_of_two,
}


def patterns() -> list[Row]:
    """Return ratios of the output alone and of a training step, by pattern and length."""
    rows: list[Row] = []
    cases = [(name, length) for name in PATTERNS for length in LENGTHS]
    for name, length in track(cases):
        rows.append(compare(name, length))
        if length == LENGTHS[-1]:
            own = [row for row in rows if row["pattern"] == name]
            for way in ("sparse", "sparse training"):
                rows[-1][f"{way} faster from"] = _faster_from(own, way)
    return rows


def compare(name: str, length: int) -> Row:
    pattern = PATTERNS[name]()
    pattern.at(length)
    begin = time.perf_counter()
    plan = sparse_plan(pattern, length)
    planning = time.perf_counter() - begin
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, HEADS, length, DIM, generator=generator) for _ in range(3)]
    mask = pattern.mask(length)
    with torch.no_grad():
        ways: dict[str, Callable[[], object]] = {
            "sdpa": lambda: scaled_dot_product_attention(*tensors),
            "sparse": lambda: sparse_attend(*tensors, plan, statistics=None),
            "sparse + statistics": lambda: sparse_attend(*tensors, plan),
            "sdpa + mask": lambda: scaled_dot_product_attention(*tensors, attn_mask=mask),
        }
        forward = alternate(ways, baseline="sdpa", seconds=1.0)
    leaves = [tensor.requires_grad_() for tensor in tensors]

    def step(attention: Callable[..., Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(attention(*leaves).square().sum(), leaves)

    training = alternate(
        {
            "sdpa training": step(scaled_dot_product_attention),
            "sparse training": step(lambda *each: sparse_attend(*each, plan, statistics=None).output),
        },
        baseline="sdpa training",
        seconds=1.0,
    )
    training.pop("rounds")
    row: Row = {"pattern": name, "tokens": length, "listed %": 100 * pattern.density(length)}
    return {**row, "visited %": 100 * plan.density, "plan ms": 1e3 * planning, **forward, **training}


def _faster_from(rows: list[Row], way: str) -> str:
    """Return the shortest length from which on a way was always faster than its baseline, by the upper quartile."""
    slower = [row["tokens"] for row in rows if row[f"{way} high"] >= 1]
    faster = [row["tokens"] for row in rows if row["tokens"] > max(slower, default=0)]
    return str(min(faster)) if faster else "nowhere"
