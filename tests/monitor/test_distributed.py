"""Two processes that share a batch read what one process reads of all of it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn

import massieu
from massieu.checks import UserError
from massieu.monitor.distributed import merge_processes, unwrap, watch_distributed
from massieu.monitor.reading import Place, Reading
from massieu.monitor.sums import PlaceSums

ROOT = Path(__file__).resolve().parents[2]
WORDS = torch.randint(10, (4, 12), generator=torch.Generator().manual_seed(0))
LENGTHS = torch.tensor([12, 9, 3, 5])  # the halves have 21 and 8 tokens: a mean of their means is another one
STEPS = 3
KINDS = ("float64", "float32")


def small(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return massieu.nn.Transformer(16, num_layers=2, num_heads=4, vocabulary=10).to(dtype)


def train(model, rows, **options):
    """A few steps of which each is read."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with watch_distributed(model, every=1, **options) as watched:
        for _ in range(STEPS):
            model(WORDS[rows], lengths=LENGTHS[rows]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return watched


def uneven(rank: int) -> list[PlaceSums]:
    """Sums of two layers, of which the second process has one more quantity, and the first one more layer."""
    all_sums = [PlaceSums(Place("decoder", layer, f"h.{layer}", 2)) for layer in range(2 - rank)]
    for sums in all_sums:
        sums.add("entropy", torch.tensor([1.0, 2.0]) + rank, torch.tensor([2, 2]))
        sums.largest["score_max"] = torch.tensor([5.0, -5.0]).double() * (-1) ** rank
    if rank:
        all_sums[0].add("effective_rank", torch.tensor(3.0), torch.tensor(1))
        all_sums[0].known["qk_norm"] = torch.ones(2).double()
    return all_sums


def process(rank: int, folder: Path) -> None:
    """What each of the two processes does."""
    dist.init_process_group("gloo", init_method=(folder / "meet").as_uri(), rank=rank, world_size=2)
    wrapped = {kind: nn.parallel.DistributedDataParallel(small(getattr(torch, kind))) for kind in KINDS}
    if importlib.util.find_spec("accelerate"):
        from accelerate import Accelerator

        wrapped["accelerate"] = Accelerator(cpu=True).prepare(small(torch.float32))
        assert isinstance(wrapped["accelerate"], nn.parallel.DistributedDataParallel)
    rows = slice(2 * rank, 2 * rank + 2)
    found: dict[str, Any] = {
        kind: [reading.to_dict() for reading in train(model, rows, log=folder / f"{kind}.jsonl").readings]
        for kind, model in wrapped.items()
    }
    joined = merge_processes(uneven(rank))
    found["uneven"] = [
        {name: sums.value(name).tolist() for name in sorted({*sums.total, *sums.largest, *sums.known})}
        for sums in joined
    ]
    found["names"] = [sums.place.name for sums in joined]
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> tuple[Path, list[dict[str, Any]]]:
    """The folder of two processes that trained together, and what each of them found."""
    folder = tmp_path_factory.mktemp("two")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    environment |= {"OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    started = []
    for rank in ("0", "1"):
        command = [sys.executable, str(Path(__file__).resolve()), rank, str(folder)]
        own = {**environment, "RANK": rank, "LOCAL_RANK": rank}
        started.append(subprocess.Popen(command, env=own, stderr=subprocess.PIPE, text=True))
    try:
        for one in started:
            _, errors = one.communicate(timeout=300)
            assert one.returncode == 0, errors
    finally:
        for one in started:
            one.kill()
    return folder, [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def largest_difference(first: Reading, second: Reading) -> float:
    """Return the largest difference of all values, relative where they are above one; nan agrees with nan."""
    assert first.places == second.places
    assert first.heads.keys() == second.heads.keys()
    ours, theirs = {**first.heads, **first.layers}, {**second.heads, **second.layers}
    found = 0.0
    for name, values in ours.items():
        assert torch.equal(values.isnan(), theirs[name].isnan()), name
        known = ~values.isnan()
        gap = (values - theirs[name])[known].abs() / values[known].abs().clamp_min(1)
        found = max(found, float(gap.max()) if gap.numel() else 0.0)
    return found


@pytest.mark.parametrize("kind", [*KINDS, "accelerate"])
def test_two_processes_read_what_one_reads_of_the_joined_batch(two, kind):
    _, found = two
    if kind not in found[0]:
        pytest.skip("accelerate is not installed")
    dtype = torch.float64 if kind == "float64" else torch.float32
    whole = train(small(dtype), slice(0, 4)).readings
    merged = [Reading.from_dict(reading) for reading in found[0][kind]]
    assert [reading.step for reading in merged] == [0, 1, 2]
    gaps = [largest_difference(one, other) for one, other in zip(whole, merged, strict=True)]
    # In single precision the sums of gradients are rounded differently, and later weights with them: seen 9.4e-7.
    limits = [1e-6, *[1e-6 if kind == "float64" else 1e-5] * (STEPS - 1)]
    assert all(gap < limit for gap, limit in zip(gaps, limits, strict=True)), gaps
    # The control: the halves themselves are far from it.
    for rows in (slice(0, 2), slice(2, 4)):
        assert largest_difference(whole[0], train(small(dtype), rows).readings[0]) > 0.01


@pytest.mark.parametrize("kind", KINDS)
def test_both_processes_hold_the_readings_and_the_first_one_writes_them(two, kind):
    folder, found = two
    assert found[0][kind] == found[1][kind]  # so that all processes may act on a flag
    assert [json.loads(line) for line in (folder / f"{kind}.jsonl").read_text().splitlines()] == found[0][kind]


def test_sums_of_only_one_process_are_merged_as_well(two):
    for one in two[1]:
        assert one["names"] == ["h.0", "h.1"]
        first = {"effective_rank": 3.0, "entropy": [0.75, 1.25], "qk_norm": [1.0, 1.0], "score_max": [5.0, 5.0]}
        assert one["uneven"] == [first, {"entropy": [0.5, 1.0], "score_max": [5.0, -5.0]}]


def test_a_single_process_needs_no_group(tmp_path):
    path = tmp_path / "run.jsonl"
    watched = train(small(torch.float32), slice(0, 2), log=path)
    assert [reading.step for reading in watched.readings] == [0, 1, 2]
    assert len(path.read_text().splitlines()) == STEPS


def test_copies_in_threads_are_refused():
    with pytest.raises(UserError, match="DataParallel"):
        unwrap(nn.DataParallel(nn.Linear(2, 2)))


if __name__ == "__main__":
    process(int(sys.argv[1]), Path(sys.argv[2]))
