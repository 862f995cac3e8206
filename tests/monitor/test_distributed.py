"""Two processes that share a batch read what one process reads of all of it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch import nn

import massieu
from massieu.monitor.distributed import merge_processes, unwrap, watch_distributed
from massieu.monitor.reading import Place, Reading
from massieu.monitor.tallies import Tally

ROOT = Path(__file__).resolve().parents[2]
WORDS = torch.randint(10, (4, 12), generator=torch.Generator().manual_seed(0))
LENGTHS = torch.tensor([12, 9, 3, 5])  # the halves have 21 and 8 tokens: a mean of their means is another one
STEPS = 3


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


def uneven(rank: int) -> list[Tally]:
    """Sums of two layers, of which the second process heard one more quantity, and the first one more layer."""
    tallies = [Tally(Place("decoder", layer, f"h.{layer}", 2)) for layer in range(2 - rank)]
    for tally in tallies:
        tally.add("entropy", torch.tensor([1.0, 2.0]) + rank, torch.tensor([2, 2]))
        tally.largest["score_max"] = torch.tensor([5.0, -5.0]).double() * (-1) ** rank
    if rank:
        tallies[0].add("effective_rank", torch.tensor(3.0), torch.tensor(1))
        tallies[0].known["qk_norm"] = torch.ones(2).double()
    return tallies


def process(rank: int, folder: Path, kind: str) -> None:
    """What each of the two processes does."""
    rows = slice(2 * rank, 2 * rank + 2)
    if kind == "accelerate":
        from accelerate import Accelerator

        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        wrapped = Accelerator(cpu=True).prepare(small(torch.float32))
    else:
        dist.init_process_group("gloo", init_method=(folder / "meet").as_uri(), rank=rank, world_size=2)
        wrapped = nn.parallel.DistributedDataParallel(small(getattr(torch, kind)))
    assert isinstance(wrapped, nn.parallel.DistributedDataParallel)
    watched = train(wrapped, rows, log=folder / "run.jsonl")
    joined = merge_processes(uneven(rank))
    found = {
        "readings": [reading.to_dict() for reading in watched.readings],
        "names": [tally.place.name for tally in joined],
        "uneven": [{name: tally.value(name).tolist() for name in sorted(_names(tally))} for tally in joined],
    }
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _names(tally: Tally) -> set[str]:
    return {*tally.total, *tally.largest, *tally.known}


def run_two(folder: Path, kind: str, port: str = "0") -> list[dict]:
    environment = {
        **os.environ,
        **{"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), "MASTER_PORT": port},
        **{"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    }
    command = [sys.executable, str(Path(__file__).resolve())]
    started = [
        subprocess.Popen([*command, str(rank), str(folder), kind], env=environment, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        for one in started:
            _, errors = one.communicate(timeout=120)
            assert one.returncode == 0, errors
    finally:
        for one in started:
            one.kill()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def largest_difference(first: Reading, second: Reading) -> float:
    """Of all figures, relative where they are above one; nan agrees with nan."""
    assert first.places == second.places and first.heads.keys() == second.heads.keys()
    ours, theirs = {**first.heads, **first.layers}, {**second.heads, **second.layers}
    found = 0.0
    for name, values in ours.items():
        assert torch.equal(values.isnan(), theirs[name].isnan()), name
        known = ~values.isnan()
        gap = (values - theirs[name])[known].abs() / values[known].abs().clamp_min(1)
        found = max(found, float(gap.max()) if gap.numel() else 0.0)
    return found


@pytest.mark.parametrize("kind", ["float64", "float32"])
def test_two_processes_read_what_one_reads_of_the_joined_batch(tmp_path, kind):
    found = run_two(tmp_path, kind)
    whole = train(small(getattr(torch, kind)), slice(0, 4)).readings
    ranks = [[Reading.from_dict(reading) for reading in one["readings"]] for one in found]
    assert [reading.step for reading in ranks[0]] == [0, 1, 2]
    assert found[0]["readings"] == found[1]["readings"]  # so that all processes may act on a flag
    gaps = [largest_difference(one, other) for one, other in zip(whole, ranks[0], strict=True)]
    assert max(gaps) < 1e-6, gaps
    # The control: the halves themselves are far from it.
    for rows in (slice(0, 2), slice(2, 4)):
        half = train(small(getattr(torch, kind)), rows).readings
        assert largest_difference(whole[0], half[0]) > 0.01

    # The first process alone wrote, and once.
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert lines == found[0]["readings"]

    # What only one of them heard is merged as well.
    for one in found:
        assert one["names"] == ["h.0", "h.1"]
        first = {"effective_rank": 3.0, "entropy": [0.75, 1.25], "qk_norm": [1.0, 1.0], "score_max": [5.0, 5.0]}
        assert one["uneven"] == [first, {"entropy": [0.5, 1.0], "score_max": [5.0, -5.0]}]


def test_a_model_that_accelerate_prepared_is_read_as_a_whole(tmp_path):
    pytest.importorskip("accelerate", exc_type=ImportError)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    found = run_two(tmp_path, "accelerate", port)
    whole = train(small(torch.float32), slice(0, 4)).readings
    merged = [Reading.from_dict(reading) for reading in found[1]["readings"]]
    assert max(largest_difference(one, other) for one, other in zip(whole, merged, strict=True)) < 1e-6


def test_a_single_process_needs_no_group(tmp_path):
    path = tmp_path / "run.jsonl"
    watched = train(small(torch.float32), slice(0, 2), log=path)
    assert [reading.step for reading in watched.readings] == [0, 1, 2]
    assert len(path.read_text().splitlines()) == STEPS


def test_copies_in_threads_are_refused():
    with pytest.raises(TypeError, match="got DataParallel, which runs copies of it in threads; start .* with torchrun"):
        unwrap(nn.DataParallel(nn.Linear(2, 2)))


if __name__ == "__main__":
    process(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
