"""Seconds per step and peak memory of many particles that attend to each other, in a fresh process for each number."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.memory import peak
from benchmarks.runner import Row, track

SIZES = (12_500, 25_000, 50_000)
STEPS = 3
DIM = 3


def dynamics() -> list[Row]:
    """Residual attention and layer norm on one thread, beside the matrix of scores that is never made."""
    rows: list[Row] = []
    for particles in track(SIZES):
        measured = subprocess.run(
            [sys.executable, "-m", "benchmarks.dynamics", str(particles)],
            check=True,
            capture_output=True,
            text=True,
            cwd=Path(__file__).resolve().parents[1],
        )
        row: Row = {"particles": particles, **json.loads(measured.stdout)}
        row["matrix MB"] = particles**2 * 4 / 1e6
        row["memory over matrix"] = row["extra MB"] / row["matrix MB"]
        rows.append(row)
    return rows


def run(particles: int) -> Row:
    """Seconds per step, and MB by which the peak of this process rises; a small cloud first loads what loads once."""
    import torch

    from massieu.dynamics import evolve

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    evolve(torch.randn(500, DIM, generator=generator), steps=1, contraction="layer_norm")
    cloud = torch.randn(particles, DIM, generator=generator)
    before, begin = peak(), time.perf_counter()
    evolve(cloud, steps=STEPS, contraction="layer_norm", every=STEPS)
    return {"seconds per step": (time.perf_counter() - begin) / STEPS, "extra MB": peak() - before}


if __name__ == "__main__":
    print(json.dumps(run(int(sys.argv[1]))))
