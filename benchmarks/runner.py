"""Run benchmarks by name, and print the results and the machine as a table or JSON."""

from __future__ import annotations

import json as json_format
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy
import torch

import massieu
from massieu import kernels
from massieu.checks import did_you_mean, visible

Case = TypeVar("Case")
Row = dict[str, Any]
Benchmark = Callable[[], list[Row]]


def main(names: Sequence[str] = (), *, json: bool = False) -> int:
    """Run the named benchmarks, or all; return the exit code, 2 for an unknown name."""
    known = benchmarks()
    unknown = sorted(set(names) - set(known))
    if unknown:
        got = ", ".join(f"{visible(name)}{did_you_mean(name, known)}" for name in unknown)
        print(f"massieu bench: NAME must be one of {', '.join(known)}, got {got}", file=sys.stderr)
        return 2
    results = {}
    for name in names or known:
        print(f"running {name} ...", file=sys.stderr, flush=True)
        results[name] = known[name]()
    if json:
        summaries = {name: summary(rows) for name, rows in results.items()}
        print(json_format.dumps({"environment": environment(), "benchmarks": results, "summaries": summaries}))
        return 0
    print("  ".join(f"{name} {fact}" for name, fact in environment().items()))
    for name, rows in results.items():
        print(f"\n{name}\n{table(rows)}")
        for way, own in summary(rows).items():
            print(f"{way}: median {own['median']:.2f}, largest {own['largest']:.2f}")
    return 0


def benchmarks() -> dict[str, Benchmark]:
    """Return all benchmarks by name, in order."""
    from benchmarks.attention import forward, forward_backward, forward_bfloat16, forward_grouped
    from benchmarks.contrast import contrast
    from benchmarks.dynamics import dynamics
    from benchmarks.engine import engine
    from benchmarks.inspection import inspection
    from benchmarks.learning import learning
    from benchmarks.margin import margin
    from benchmarks.memory import memory
    from benchmarks.patterns import patterns
    from benchmarks.retrieval import retrieval, scale
    from benchmarks.watch import watch

    kernels = (forward, forward_bfloat16, forward_grouped, forward_backward, retrieval, scale, memory)
    every = (*kernels, inspection, engine, contrast, dynamics, learning, margin, patterns, watch)
    return {benchmark.__name__: benchmark for benchmark in every}


def track(cases: Sequence[Case]) -> Iterator[Case]:
    """Yield the cases, with progress on stderr."""
    begin = time.perf_counter()
    for i, case in enumerate(cases):
        print(f"  case {i + 1} of {len(cases)}, {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
        yield case


def environment() -> Row:
    """Return the machine and the versions of packages."""
    return {
        "cpu": processor(),
        "threads": torch.get_num_threads(),
        "kernel": kernels.backend(),
        "massieu": massieu.__version__,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
    }


def processor() -> str:
    """Return model and vector extension of the processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{model} ({torch.backends.cpu.get_cpu_capability()})"


def alternate(ways: dict[str, Callable[[], object]], *, baseline: str, seconds: float = 4.0) -> Row:
    """Return the median ratio of every way to the baseline over alternating rounds, with its quartiles.

    Each ratio is taken within one round, so that a slow minute of the machine touches both of its sides; the order
    within a round is random, since a way may leave caches and threads behind that help or harm the next.
    """
    for way in ways.values():
        way()
    order = random.Random(0)
    rounds: list[dict[str, float]] = []
    start = time.perf_counter()
    while len(rounds) < 7 or (time.perf_counter() - start < seconds and len(rounds) < 101):
        taken = {}
        for name in order.sample(list(ways), len(ways)):
            begin = time.perf_counter()
            ways[name]()
            taken[name] = time.perf_counter() - begin
        rounds.append(taken)
    row: Row = {"rounds": len(rounds), f"{baseline} ms": 1e3 * statistics.median(r[baseline] for r in rounds)}
    for name in ways:
        if name != baseline:
            ratios = [r[name] / r[baseline] for r in rounds]
            low, middle, high = statistics.quantiles(ratios, n=4)
            row[name], row[f"{name} low"], row[f"{name} high"] = middle, low, high
    return row


def summary(rows: list[Row]) -> dict[str, dict[str, float]]:
    """Return median and largest ratio of every way with a baseline, over all rows."""
    ways = dict.fromkeys(name.removesuffix(" low") for row in rows for name in row if name.endswith(" low"))
    ratios = {way: [row[way] for row in rows if way in row] for way in ways}
    return {way: {"median": statistics.median(each), "largest": max(each)} for way, each in ratios.items()}


def table(rows: list[Row]) -> str:
    """Return aligned columns, with the quartiles of a ratio in brackets."""
    names = dict.fromkeys(name for row in rows for name in row)
    columns = [name for name in names if not name.endswith((" low", " high"))]

    def cell(row: Row, name: str) -> str:
        value = row.get(name, "")
        text = f"{value:.2f}" if isinstance(value, float) else str(value)
        return f"{text} [{row[name + ' low']:.2f}, {row[name + ' high']:.2f}]" if f"{name} low" in row else text

    cells = [columns, *([cell(row, name) for name in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return "\n".join("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) for line in cells)
