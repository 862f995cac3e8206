"""Peak memory of one call beyond its inputs, measured in a fresh process for each way."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.runner import Row

SHAPE = (1, 8, 16384, 64)
WAYS = ("sdpa", "full", "sdpa backward", "full backward")


def memory() -> list[Row]:
    """Growth of the peak resident set over one call at a length where the matrix would take 8 GB."""
    queries, heads = SHAPE[2], SHAPE[0] * SHAPE[1]
    rows = []
    for way in WAYS:
        measured = subprocess.run(
            [sys.executable, "-m", "benchmarks.memory", way],
            check=True,
            capture_output=True,
            text=True,
            cwd=Path(__file__).resolve().parents[1],
        )
        rows.append({"shape": str(SHAPE), "way": way, "extra MB": float(measured.stdout)})
        rows[-1]["over sdpa"] = rows[-1]["extra MB"] / rows[-2 if way.startswith("full") else -1]["extra MB"]
    rows.append({"shape": str(SHAPE), "way": "the matrix itself", "extra MB": heads * queries**2 * 4 / 1e6})
    return rows


def extra(way: str) -> float:
    """MB by which one call raises the peak of this process; a small call first loads what loads once."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    from benchmarks.attention import Case
    from massieu import attend

    def run(shape: tuple[int, int, int, int]) -> float:
        tensors = [x.requires_grad_(way.endswith("backward")) for x in Case(shape, True).inputs()]
        before = peak()
        if way.startswith("sdpa"):
            loss = scaled_dot_product_attention(*tensors, is_causal=True).sum()
        else:
            output, found = attend(*tensors, causal=True)
            loss = output.sum() + (found.entropy + found.log_normalizer + found.score_variance).sum()
        if loss.requires_grad:
            torch.autograd.grad(loss, tensors)
        return peak() - before

    run((1, 8, 512, 64))
    return run(SHAPE)


def peak() -> float:
    """Highest resident set of this process so far, in MB."""
    # Not getrusage: a child starts there with the peak of its parent.
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024 / 1e6


if __name__ == "__main__":
    print(extra(sys.argv[1]))
