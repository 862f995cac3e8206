"""Time of one-to-many retrieval, as a ratio to what the machine can do at best."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.runner import Row, alternate, track
from massieu import kernels
from massieu.memory import retrieve_at_scale

CASES = [(10**5, 64, 1), (10**5, 64, 128), (10**5, 512, 1), (10**5, 512, 128), (10**6, 64, 1), (10**6, 64, 16)]
LARGE = [(10**6, 64, 1), (10**5, 512, 128), (10**6, 64, 128)]
TOP = 10
SQUARE = 512  # where square products were fastest: 204 GF/s, against 184 at 1024 and 151 at 4096


def retrieval() -> list[Row]:
    """X^T softmax(beta X q) with all statistics, over the larger of bytes / bandwidth and flops / product rate."""
    with torch.no_grad():
        return [compare_retrieval(*case) for case in track(CASES)]


def scale() -> list[Row]:
    """Retrieval over many patterns with its best ones, as users call it, and what it takes beyond its inputs."""
    rows = []
    for case in track(LARGE):
        with torch.no_grad():
            rows.append(compare_scale(*case))
        command = [sys.executable, "-m", "benchmarks.retrieval", *map(str, case)]
        root = Path(__file__).resolve().parents[1]
        measured = subprocess.run(command, check=True, capture_output=True, text=True, cwd=root)
        rows[-1]["extra MB"] = float(measured.stdout)
    return rows


def compare_scale(patterns: int, dim: int, queries: int) -> Row:
    query, stored = draw(patterns, dim, queries)
    beta, halves = dim**-0.5, stored.bfloat16()
    inputs = arranged(query, stored)
    limit = Limit(stored, queries)
    ours: dict[str, Callable[[], object]] = {
        "limit": limit,
        "kernel": lambda: kernels.retrieve(inputs, 1, TOP),
        "at scale": lambda: retrieve_at_scale(query, stored, beta=beta, top=TOP),
    }
    others: dict[str, Callable[[], object]] = {
        "limit": limit,
        "in tiles": lambda: retrieve_at_scale(query, stored, beta=beta, top=TOP, progress=lambda *_: None),
        "bfloat16": lambda: retrieve_at_scale(query, halves, beta=beta, top=TOP),
        "sdpa": lambda: scaled_dot_product_attention(query[None, None], stored[None, None], stored[None, None]),
        "plain torch": lambda: plain(query, stored, beta),
    }
    if importlib.util.find_spec("pykeops"):
        from pykeops.torch import LazyTensor

        near = LazyTensor(query[:, None]) | LazyTensor(stored[None])
        others["pykeops"] = lambda: (near * beta).sumsoftmaxweight(LazyTensor(stored[None]), dim=1)
    # Apart: what takes many times as long would leave few rounds, and a machine whose memory is still busy.
    rest = alternate(others, baseline="limit")
    return {"patterns": patterns, "dim": dim, "queries": queries, **rest, **alternate(ours, baseline="limit")}


def plain(query: Tensor, stored: Tensor, beta: float) -> tuple[Tensor, ...]:
    """The same from the whole matrix of scores."""
    scores = query @ stored.mT * beta
    weights = scores.softmax(-1)
    entropy = -torch.xlogy(weights, weights).sum(-1)
    return weights @ stored, scores.logsumexp(-1), entropy, *scores.topk(TOP)


def extra(patterns: int, dim: int, queries: int) -> float:
    """MB by which one retrieval raises the peak of this process; a small one first loads what loads once."""
    from benchmarks.memory import peak

    query, stored = draw(patterns, dim, queries)
    retrieve_at_scale(query, stored[:1000], beta=1.0, top=TOP)
    before = peak()
    retrieve_at_scale(query, stored, beta=dim**-0.5, top=TOP)
    return peak() - before


def draw(patterns: int, dim: int, queries: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    stored = torch.randn(patterns, dim, generator=generator)
    return torch.randn(queries, dim, generator=generator), stored


def arranged(query: Tensor, stored: Tensor) -> kernels.Inputs:
    """What the retrieval entry of the kernel takes."""
    options = {"sink": None, "causal": False, "window": None, "lengths": None}
    return kernels.arrange(query, stored, stored, None, scale=stored.shape[1] ** -0.5, **options).inputs


def compare_retrieval(patterns: int, dim: int, queries: int) -> Row:
    query, stored = draw(patterns, dim, queries)
    inputs = arranged(query, stored)
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
        square = torch.randn(SQUARE, SQUARE)
        times, rest = divmod(flops, 2 * SQUARE**3)
        strip = square[: round(rest / (2 * SQUARE**2))]  # what is left over, as rows of one more product

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
    return min(taken)  # a slow moment of the machine must not decide which limit it is


if __name__ == "__main__":
    print(extra(*map(int, sys.argv[1:])))
