"""Patterns in tiles: the same energies, kinds and indices, without copies of all patterns."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from massieu.memory import Continuous

ROOT = Path(__file__).resolve().parents[2]


def randn(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("mask", ["none", "shared", "rows"])
def test_tiles_of_the_patterns_change_nothing(mask, monkeypatch):
    patterns = randn(3, 40, 6).float()
    given = {"shared": torch.arange(40) >= 9, "rows": randn(4, 30, 40) > 0.7}.get(mask)
    if given is not None and mask == "rows":
        given[:, 5] = True
        given[0, :20] = False  # whole tiles that a row does not see
    cues = torch.cat([randn(5, 10, 6).float(), torch.zeros(10, 6), 2 * patterns[:10]])
    found = {}
    for numbers in (1 << 18, 6 * 7, 1):
        monkeypatch.setattr("massieu.memory.continuous.TILE_NUMBERS", numbers)
        for beta in (0.2, 1.5):
            found[numbers, beta] = Continuous(patterns, beta, log_weight=given).retrieve(cues, steps=300)
    for beta in (0.2, 1.5):
        whole = found[1 << 18, beta]
        scores = beta * whole.state @ patterns.T
        seen = scores if given is None else scores.masked_fill(~given, -torch.inf)
        assert torch.equal(whole.index, seen.argmax(-1))
        exact = Continuous(patterns.double(), beta, log_weight=given).energy(whole.state.double())
        for numbers in (6 * 7, 1):
            own = found[numbers, beta]
            assert torch.equal(own.state, whole.state)
            assert torch.equal(own.index, whole.index)
            assert own.kind.tolist() == whole.kind.tolist()
            assert_close(own.energy, whole.energy, rtol=1e-6, atol=1e-6)
            assert_close(own.energy.double(), exact, rtol=1e-6, atol=1e-6)
    assert len({kind for each in found.values() for kind in each.kind.tolist()}) > 1


def test_the_growth_in_tiles_is_the_largest_eigenvalue_of_the_jacobian(monkeypatch):
    monkeypatch.setattr("massieu.memory.continuous.TILE_NUMBERS", 30)
    patterns, cues = randn(3, 40, 6).float(), 0.3 * randn(6, 8, 6).float()
    weights = randn(7, 8, 40).float()
    weights[:2, :10] = weights[2:4, 10:20] = -torch.inf  # two whole tiles
    memory = Continuous(patterns, 1.5, log_weight=weights)
    growth = memory._growth(cues, None, log_weight=weights)
    wide = Continuous(patterns.double(), 1.5, log_weight=weights.double())
    expected = torch.linalg.eigvalsh(torch.eye(6).double() - wide.hessian(cues.double()))[:, -1]
    assert bool((expected[:4] > 1).reshape(2, 2).any(1).all())
    assert_close(growth[expected > 1], expected[expected > 1], rtol=1e-9, atol=0)


RETRIEVAL = """
import resource
import torch
from massieu.memory import Continuous

peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
patterns = torch.randn(200_000, 32, generator=torch.Generator().manual_seed(0))
memory = Continuous(patterns, 2.0)
Continuous(patterns[:10], 2.0).retrieve(patterns[:2])
before = peak()
memory.retrieve(patterns[:200], steps=3)
print((peak() - before) / 1024)
"""


def test_a_retrieval_makes_no_copies_of_the_patterns():
    """They take 24 megabytes, twice that in double; copies of them took 280."""
    pytest.importorskip("resource")
    run = subprocess.run([sys.executable, "-c", RETRIEVAL], capture_output=True, text=True, check=True, cwd=ROOT)
    assert float(run.stdout) < 40  # measured 12
