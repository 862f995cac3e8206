"""Max-margin token selection against what people solve it with today: time, memory and accuracy.

Each way has a fresh process, which first solves a small problem to load what is loaded once. Accuracy is the same for
all: by how much the norm of the weights, scaled to margin one, exceeds our certified lower bound.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from benchmarks.memory import peak
from benchmarks.runner import Row, track
from massieu.margin import TokenSelection, max_margin

SIZES = [(10, 5, 10), (50, 20, 32), (100, 32, 64), (200, 64, 128), (500, 64, 256)]
LARGEST = {  # of the sizes that a way can take; the next needs gigabytes or more than three minutes
    "ours": 5,
    "sklearn one class": 3,
    "sklearn linear": 3,
    "cvxpy norm": 2,
    "cvxpy squares": 2,
}


def margin() -> list[Row]:
    """Least Frobenius norm on normal data, a table row for each size and way."""
    cases = [(size, way) for size in SIZES for way in LARGEST]
    rows: list[Row] = []
    for size, way in track(cases):
        row: Row = {"size": str(size), "constraints": size[0] * (size[1] - 1), "way": way}
        if SIZES.index(size) < LARGEST[way]:
            row |= measured(way, size)
            ours = next(each for each in rows if each["size"] == row["size"]) if way != "ours" else row
            row["over ours"] = row["ms"] / ours["ms"]
        else:
            row["ms"] = "not run"
        rows.append(row)
    return rows


def measured(way: str, size: tuple[int, int, int]) -> Row:
    command = [sys.executable, "-m", "benchmarks.margin", way, *map(str, size)]
    root = Path(__file__).resolve().parents[1]
    row: Row = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, cwd=root).stdout)
    return row


def main(way: str, *size: str) -> None:
    torch.set_num_threads(1)
    solve = WAYS[way]
    solve(draw(4, 3, 5))
    problem = draw(*map(int, size))
    before, taken = resident(), []
    while not taken or (len(taken) < 7 and sum(taken) < 2):
        begin = time.perf_counter()
        weights = solve(problem)
        taken.append(time.perf_counter() - begin)
    extra = peak() - before
    norm = float(weights.norm() / problem.margins(weights).min())
    excess = max(norm / max_margin(problem).lower - 1, 1e-16)
    print(json.dumps({"ms": 1e3 * statistics.median(taken), "extra MB": extra, "log10 gap": float(np.log10(excess))}))


def resident() -> float:
    """What this process holds now, in MB: making the problem has raised the peak above it."""
    return int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0]) * 1024 / 1e6


def draw(n: int, length: int, dim: int) -> TokenSelection:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(n, length, dim, generator=generator, dtype=torch.float64)
    queries = torch.randn(n, dim, generator=generator, dtype=torch.float64)
    return TokenSelection(tokens, queries, scores=torch.randn(n, length, generator=generator))


def ours(problem: TokenSelection) -> torch.Tensor:
    return max_margin(problem).weights


def rivals(problem: TokenSelection) -> tuple[np.ndarray, np.ndarray]:
    """Differences of tokens and the query of each, one row for every constraint."""
    selection = problem.selection()
    others = torch.ones_like(problem.present).scatter(1, selection[:, None], False)
    queries = problem.queries[:, None].expand(-1, others.shape[1], -1)
    return problem.differences(selection)[others].numpy(), queries[others].numpy()


def one_class(problem: TokenSelection) -> torch.Tensor:
    """The point of the constraints' hull nearest to zero, from their Gram matrix."""
    from sklearn.svm import OneClassSVM

    rows, queries = rivals(problem)
    gram = (rows @ rows.T) * (queries @ queries.T)
    machine = OneClassSVM(kernel="precomputed", nu=1 / len(rows), tol=1e-9).fit(gram)
    chosen = machine.support_
    return torch.from_numpy((machine.dual_coef_[0][:, None] * rows[chosen]).T @ queries[chosen])


def linear(problem: TokenSelection) -> torch.Tensor:
    """A linear machine without intercept on the flattened constraints and their mirror images."""
    from sklearn.svm import LinearSVC

    rows, queries = rivals(problem)
    flat = np.einsum("cd,cq->cdq", rows, queries).reshape(len(rows), -1)
    signs = np.where(np.arange(len(flat)) % 2, 1.0, -1.0)
    machine = LinearSVC(loss="hinge", C=1e4, fit_intercept=False, tol=1e-9, max_iter=10**5)
    return torch.from_numpy(machine.fit(flat * signs[:, None], signs).coef_.reshape(problem.shape))


def by_cvxpy(objective: str) -> Callable[[TokenSelection], torch.Tensor]:
    """All constraints as one matrix, with the solver that cvxpy chooses."""

    def solve(problem: TokenSelection) -> torch.Tensor:
        import cvxpy as cp

        rows, queries = rivals(problem)
        flat = np.einsum("cd,cq->cdq", rows, queries).reshape(len(rows), -1)
        weights = cp.Variable(flat.shape[1])
        goal = cp.norm(weights) if objective == "norm" else cp.sum_squares(weights)
        cp.Problem(cp.Minimize(goal), [flat @ weights >= 1]).solve()
        return torch.from_numpy(weights.value.reshape(problem.shape))

    return solve


WAYS: dict[str, Callable[[TokenSelection], torch.Tensor]] = {
    "ours": ours,
    "sklearn one class": one_class,
    "sklearn linear": linear,
    "cvxpy norm": by_cvxpy("norm"),
    "cvxpy squares": by_cvxpy("squares"),
}

if __name__ == "__main__":
    main(*sys.argv[1:])
