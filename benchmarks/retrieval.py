"""Time of one-to-many retrieval, as a ratio to what the machine can do at best."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.runner import Row, alternate, track
from massieu import kernels

CASES = [(10**5, 64, 1), (10**5, 64, 128), (10**5, 512, 1), (10**5, 512, 128), (10**6, 64, 1), (10**6, 64, 16)]


def retrieval() -> list[Row]:
    """X^T softmax(beta X q) with all statistics, over the larger of bytes / bandwidth and flops / product rate."""
    with torch.no_grad():
        return [compare_retrieval(*case) for case in track(CASES)]


def compare_retrieval(patterns: int, dim: int, queries: int) -> Row:
    generator = torch.Generator().manual_seed(0)
    stored = torch.randn(patterns, dim, generator=generator)
    query = torch.randn(queries, dim, generator=generator)
    options = {"sink": None, "causal": False, "window": None, "lengths": None}
    inputs = kernels.arrange(query, stored, stored, None, scale=dim**-0.5, **options).inputs
    ways: dict[str, Callable[[], object]] = {
        "limit": Limit(stored, queries),
        "full": lambda: kernels.retrieve(inputs, 2),
        "sdpa": lambda: scaled_dot_product_attention(query[None, None], stored[None, None], stored[None, None]),
        "two products": lambda: torch.softmax(query @ stored.mT * dim**-0.5, -1) @ stored,
    }
    return {"patterns": patterns, "dim": dim, "queries": queries, **alternate(ways, baseline="limit")}


class Limit:
    """Takes as long as reading the patterns once, or as the two products at the rate of a large square one.

    Measured in the same rounds as the rest. The sum of all patterns reads them; square products with just as many
    operations stand for the arithmetic; the longer of both decides, and only that one is run.
    """

    def __init__(self, stored: Tensor, queries: int) -> None:
        flops = 4 * stored.numel() * queries
        square = torch.randn(1024, 1024)
        times, rest = divmod(flops, 2 * 1024**3)
        strip = square[: round(rest / (2 * 1024**2))]  # what is left over, as rows of one more product

        def read() -> None:
            stored.sum()

        def multiply() -> None:
            for _ in range(times):
                torch.mm(square, square)
            torch.mm(strip, square)

        # A strip alone is too thin for the full rate: there reading decides.
        self.way = read if not times or timed(read) > timed(multiply) else multiply

    def __call__(self) -> None:
        self.way()


def timed(way: Callable[[], object]) -> float:
    taken = []
    for _ in range(5):
        begin = time.perf_counter()
        way()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)
