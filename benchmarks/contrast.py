"""InfoNCE and its relatives against the dense version that people write today: time, memory and agreement.

Forward and backward of both sides in one process, in turns, on one thread and on all; peak memory in a fresh process
for each way.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from benchmarks.memory import peak
from benchmarks.runner import Row, alternate, track
from massieu.contrast import info_nce, nt_xent
from massieu.kernels.threads import torch_threads

PAIRS, DIM, TEMPERATURE = 8192, 256, 0.07
LOSSES = ("info_nce", "symmetric", "nt_xent")

Loss = Callable[[Tensor, Tensor], Tensor]


def contrast() -> list[Row]:
    """Loss and gradients in a batch of 8192 pairs of dimension 256; of 4096 pairs, hence 8192 views, for NT-Xent."""
    all_threads = os.cpu_count() or 1
    cases = [(loss, threads) for loss in LOSSES for threads in dict.fromkeys((1, all_threads))]
    rows = []
    for loss, threads in track(cases):
        with torch_threads(threads):
            rows.append(compare(loss, threads))
    return rows


def compare(name: str, threads: int) -> Row:
    tensors = inputs(name)
    ours, dense = losses(name)
    row: Row = {"loss": name, "pairs": len(tensors[0]), "dim": DIM, "threads": threads}
    row |= alternate({"dense": lambda: step(dense, tensors), "ours": lambda: step(ours, tensors)}, baseline="dense")
    row |= {"log10 error": disagreement(step(ours, tensors), step(dense, tensors))}
    if threads == 1:
        row |= {f"{way} MB": extra_of(name, way) for way in ("dense", "ours")}
    return row


def inputs(name: str, pairs: int = PAIRS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    pairs = pairs // 2 if name == "nt_xent" else pairs
    first = normalize(torch.randn(pairs, DIM, generator=generator), dim=-1)
    second = normalize(first + 0.05 * torch.randn(pairs, DIM, generator=generator), dim=-1)
    return [first.requires_grad_(), second.requires_grad_()]


def losses(name: str) -> tuple[Loss, Loss]:
    """Our loss, and the dense one."""
    options = {"temperature": TEMPERATURE}
    if name == "nt_xent":
        return lambda a, b: nt_xent(a, b, **options), dense_nt_xent
    if name == "symmetric":
        return lambda a, b: info_nce(a, b, symmetric=True, **options), dense_symmetric
    return lambda a, b: info_nce(a, b, **options), dense_info_nce


def dense_info_nce(query: Tensor, key: Tensor) -> Tensor:
    return cross_entropy(query @ key.mT / TEMPERATURE, torch.arange(len(query)))


def dense_symmetric(query: Tensor, key: Tensor) -> Tensor:
    scores, labels = query @ key.mT / TEMPERATURE, torch.arange(len(query))
    return (cross_entropy(scores, labels) + cross_entropy(scores.mT, labels)) / 2


def dense_nt_xent(first: Tensor, second: Tensor) -> Tensor:
    views = normalize(torch.cat([first, second]), dim=-1)
    scores = (views @ views.mT / TEMPERATURE).fill_diagonal_(-torch.inf)
    return cross_entropy(scores, torch.arange(len(views)).roll(len(first)))


def step(loss: Loss, tensors: list[Tensor]) -> list[Tensor]:
    """The loss and its gradients."""
    value = loss(*tensors)
    return [value.detach(), *torch.autograd.grad(value, tensors)]


def disagreement(found: list[Tensor], expected: list[Tensor]) -> float:
    """Decimal logarithm of the largest error of loss and gradients, each relative to its own largest entry."""
    pairs = zip(found, expected, strict=True)
    return max(float(((x - y).abs().max() / y.abs().max()).log10()) for x, y in pairs)


def extra_of(name: str, way: str) -> float:
    """MB by which one step raises the peak of a fresh process."""
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.contrast", name, way],
        check=True,
        capture_output=True,
        text=True,
        cwd=Path(__file__).resolve().parents[1],
    )
    return float(ended.stdout)


def main(name: str, way: str) -> None:
    torch.set_num_threads(1)
    loss = losses(name)[0 if way == "ours" else 1]
    step(loss, inputs(name, 256))  # what is loaded once
    tensors = inputs(name)
    before = peak()
    step(loss, tensors)
    print(peak() - before)


if __name__ == "__main__":
    main(*sys.argv[1:])
