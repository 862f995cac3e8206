"""Retrieval over many patterns: one pass equals the dense result, wherever the patterns lie and however they are cut."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from massieu import kernels
from massieu.checks import UserError
from massieu.kernels import tiles
from massieu.memory import Retrieved, retrieve_at_scale

ROOT = Path(__file__).resolve().parents[2]
FIELDS = [field.name for field in fields(Retrieved)]


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def dense(queries: Tensor, patterns: Tensor, beta: float, top: int, values: Tensor | None = None) -> Retrieved:
    """The same from the whole matrix of scores, in double."""
    queries, patterns = queries.double(), patterns.double()
    values = patterns if values is None else values.double()
    scores = beta * queries @ patterns.mT
    weights, log_weights = scores.softmax(-1), scores.log_softmax(-1)
    best, order = scores.sort(dim=-1, descending=True, stable=True)
    entropy = -(weights * log_weights).sum(-1)
    return Retrieved(weights @ values, scores.logsumexp(-1), entropy, best[..., :top], order[..., :top])


def assert_same(found: Retrieved, expected: Retrieved, tolerance: float) -> None:
    for name in FIELDS:
        mine, other = getattr(found, name), getattr(expected, name)
        assert mine.shape == other.shape, name
        if name == "index":
            assert torch.equal(mine, other)
        else:
            assert_close(
                mine.double(), other.double(), rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize("tile", [None, 1, 2, 7, 128, 129, 333, 10**9])
@pytest.mark.parametrize("queries", [1, 5, 40])
def test_any_tile_gives_the_dense_result(tile, queries):
    query, patterns = randn(queries, 12), randn(333, 12, seed=1)
    found = retrieve_at_scale(query, patterns, beta=0.7, top=4, tile=tile)
    assert_same(found, dense(query, patterns, 0.7, 4), 1e-12)


@pytest.mark.parametrize("tile", [None, 50])
def test_values_are_retrieved_instead_of_the_patterns(tile):
    query, patterns, values = randn(2, 3, 5), randn(90, 5, seed=1), randn(90, 17, seed=2)
    found = retrieve_at_scale(query, patterns, beta=2.0, top=90, values=values, tile=tile)
    assert found.state.shape == (2, 3, 17)
    assert_same(found, dense(query, patterns, 2.0, 90, values), 1e-12)


@pytest.mark.parametrize("tile", [None, 100])
def test_single_precision_is_as_good_as_its_scores(tile):
    query, patterns = randn(9, 64, dtype=torch.float32), randn(2000, 64, seed=1, dtype=torch.float32)
    found = retrieve_at_scale(query, patterns, beta=0.125, top=5, tile=tile)
    assert found.state.dtype == torch.float32
    assert_same(found, dense(query, patterns, 0.125, 5), 2e-6)  # measured 6e-7


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tile", [None, 3, 64])
def test_scores_of_ten_thousand_do_not_overflow(dtype, tile):
    patterns = randn(200, 8, dtype=dtype)
    patterns /= patterns.norm(dim=-1, keepdim=True)
    found = retrieve_at_scale(patterns[:20], patterns, beta=1e4, top=3, tile=tile)
    # A score of 1e4 in float32 is rounded by 6e-4 when it is handed over; weights are not.
    assert_same(found, dense(patterns[:20], patterns, 1e4, 3), 1e-6 if dtype == torch.float32 else 1e-10)
    assert torch.equal(found.index[:, 0], torch.arange(20))


def test_tiles_of_large_scores_are_weighed_by_more_digits_than_single_precision_has():
    patterns = 1.0 + 1e-3 * randn(60, 8, dtype=torch.float32)
    query = torch.full((1, 8), 1e3)
    expected = dense(query, patterns, 1.0, 1)
    assert 0.5 < float(expected.entropy) < 4.0  # several patterns share the mass, at scores of 8000
    found = retrieve_at_scale(query, patterns, beta=1.0, tile=3)
    assert_close(found.state.double() - 1, expected.state - 1, rtol=0, atol=2e-7)
    assert_close(found.entropy.double(), expected.entropy, rtol=0, atol=1e-5)


@pytest.mark.parametrize("tile", [None, 1, 4])
def test_of_equal_patterns_the_earlier_come_first(tile):
    patterns = randn(4, 6).repeat(5, 1)
    query = patterns[:4] + 0.01
    found = retrieve_at_scale(query, patterns, beta=30.0, top=5, tile=tile)
    assert torch.equal(found.index, torch.arange(4)[:, None] + 4 * torch.arange(5))
    assert_close(found.entropy, dense(query, patterns, 30.0, 5).entropy, rtol=0, atol=1e-12)
    assert bool((found.entropy > 0.99 * np.log(5)).all())


def test_one_pattern_is_retrieved_whatever_the_query():
    patterns = randn(1, 6)
    found = retrieve_at_scale(randn(3, 6, seed=1), patterns, beta=1.0)
    assert_close(found.state, patterns.expand(3, 6))
    assert torch.equal(found.index, torch.zeros(3, 1, dtype=torch.int64))
    assert torch.equal(found.entropy, torch.zeros(3, dtype=torch.float64))


def test_no_query_and_no_best_pattern_give_empty_answers():
    found = retrieve_at_scale(randn(0, 6), randn(9, 6), beta=1.0, top=2)
    assert [tuple(getattr(found, name).shape) for name in FIELDS] == [(0, 6), (0,), (0,), (0, 2), (0, 2)]
    found = retrieve_at_scale(randn(4, 6), randn(9, 6), beta=1.0, top=0)
    assert found.scores.shape == found.index.shape == (4, 0)


def test_the_torch_kernel_finds_the_same(monkeypatch):
    monkeypatch.setenv("MASSIEU_KERNEL", "torch")
    monkeypatch.setattr("massieu.kernels.dispatch.loaded", lambda: None)
    query, patterns = randn(5, 12), randn(333, 12, seed=1)
    called = []
    best = tiles.best
    monkeypatch.setattr(tiles, "best", lambda *arguments: called.append(1) or best(*arguments))
    assert_same(retrieve_at_scale(query, patterns, beta=0.7, top=4, tile=200), dense(query, patterns, 0.7, 4), 1e-12)
    assert len(called) == 2


# Where patterns lie


def save(path: Path, **tensors: Tensor) -> Path:
    from safetensors.torch import save_file

    save_file(tensors, path, metadata={"made": "here"})
    return path


@pytest.mark.parametrize("mode", ["r", "r+", "c"])
@pytest.mark.parametrize("tile", [None, 100])
def test_a_memory_map_is_read_where_it_lies(tmp_path, mode, tile):
    patterns = randn(501, 8, dtype=torch.float32)
    patterns.numpy().tofile(tmp_path / "patterns")
    mapped = np.memmap(tmp_path / "patterns", np.float32, mode, shape=(501, 8))
    query = randn(3, 8, seed=1, dtype=torch.float32)
    expected = dense(query, patterns[1:], 1.0, 3)
    assert_same(retrieve_at_scale(query, mapped[1:], beta=1.0, top=3, tile=tile), expected, 2e-6)


def test_only_patterns_in_memory_are_read_at_once(tmp_path, monkeypatch):
    calls = []
    retrieve = kernels.retrieve
    monkeypatch.setattr(kernels, "retrieve", lambda *given: calls.append(1) or retrieve(*given))
    monkeypatch.setattr("massieu.memory.scale.TILE_BYTES", 100 * 8 * 4)
    patterns, query = randn(501, 8, dtype=torch.float32), randn(3, 8, dtype=torch.float32)
    patterns.numpy().tofile(tmp_path / "patterns")
    mapped = np.memmap(tmp_path / "patterns", np.float32, "r", shape=(501, 8))
    sources = [patterns, patterns.numpy(), mapped, patterns.bfloat16(), patterns.T.contiguous().T]
    counts = []
    for source in sources:
        calls.clear()
        retrieve_at_scale(query, source, beta=1.0)
        counts.append(len(calls))
    assert counts == [1, 1, 6, 6, 6]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tile", [None, 64])
def test_a_safetensors_file_is_read_in_any_precision_and_computed_in_single(tmp_path, dtype, tile):
    from safetensors import safe_open

    patterns, values = randn(500, 8).to(dtype), randn(500, 5, seed=2).to(dtype)
    path, other = (
        save(tmp_path / "one.safetensors", x=patterns),
        save(tmp_path / "two.safetensors", x=values + 1, y=values),
    )
    query = randn(3, 8, seed=1, dtype=torch.float32)
    expected = dense(query, patterns, 1.0, 3, values)
    with safe_open(other, "pt") as file:
        piece = file.get_slice("y")
        for source in (path, str(path), patterns):
            found = retrieve_at_scale(query, source, beta=1.0, top=3, values=piece, tile=tile)
            # In bfloat16 the queries would be off by 4e-3.
            assert_same(found, expected, 1e-6)
            assert found.state.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("tile", [None, 1, 7, 50])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log_weights_weigh_and_hide_patterns(tile, dtype):
    query, patterns = randn(2, 3, 8, dtype=dtype), randn(90, 8, seed=1, dtype=dtype)
    present = torch.rand(2, 3, 90, generator=torch.Generator().manual_seed(2)) < 0.3
    present[..., :20] = False  # whole tiles of nothing
    present[..., 30] = True
    weights = randn(90, seed=3)
    for log_weight in (weights, present, weights.masked_fill(~present[0, 0], -torch.inf), weights.float()):
        own = log_weight.double().log() if log_weight.dtype == torch.bool else log_weight.double()
        scores = 0.7 * query.double() @ patterns.double().mT + own
        best, order = scores.sort(dim=-1, descending=True, stable=True)
        mean, part = scores.softmax(-1) @ patterns.double(), scores.softmax(-1)
        expected = Retrieved(
            mean, scores.logsumexp(-1), torch.special.entr(part).sum(-1), best[..., :4], order[..., :4]
        )
        found = retrieve_at_scale(query, patterns, beta=0.7, top=4, tile=tile, log_weight=log_weight)
        assert_same(found, expected, 1e-12 if dtype == torch.float64 else 3e-6)
    alone = torch.arange(90) == 33
    found = retrieve_at_scale(query, patterns, beta=0.7, top=3, tile=tile, log_weight=alone)
    assert_close(found.state, patterns[33].expand(2, 3, 8))
    assert found.index.reshape(-1, 3).tolist() == [[33, -1, -1]] * 6
    assert bool(found.scores[..., 1:].isneginf().all())


@pytest.mark.parametrize("tile", [None, 2])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_infinity_raise(tile, bad):
    query, patterns = randn(2, 4), randn(5, 4)
    spoilt = patterns.clone()
    spoilt[3, 1] = bad
    with pytest.raises(UserError, match="patterns"):
        retrieve_at_scale(query, spoilt, beta=1.0, tile=tile)
    with pytest.raises(UserError, match="patterns"):
        retrieve_at_scale(query, patterns, beta=1.0, tile=tile, values=spoilt)


def test_progress_counts_the_patterns():
    seen = []
    retrieve_at_scale(randn(1, 4), randn(10, 4), beta=1.0, tile=4, progress=lambda *both: seen.append(both))
    assert seen == [(4, 10), (8, 10), (10, 10)]


PROGRAM = """
import json, resource, sys
import numpy as np, torch
from massieu.memory import retrieve_at_scale
path, kind, rows, dim = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
query = torch.ones(1, dim)
retrieve_at_scale(query, torch.ones(1000, dim), beta=1.0)  # threads and libraries come before the limit
def status(name):
    return int(open("/proc/self/status").read().split(name + ":")[1].split()[0]) * 1024
# Private writable memory, or the whole address space (ulimit -v). A file that is mapped for reading counts in the second
# only: its pages belong to the system, which takes them back when it needs them.
kind, limited = kind.split(", ")
limit = status({"data": "VmData", "address space": "VmSize"}[limited]) + 100_000_000
resource.setrlimit(resource.RLIMIT_DATA if limited == "data" else resource.RLIMIT_AS, (limit, limit))
before = status("RssAnon")
patterns = np.memmap(path, np.float32, "r", shape=(rows, dim)) if kind != "safetensors" else path
if kind == "whole":
    patterns = np.array(patterns)
peak = 0
def watch(done, count):
    global peak
    peak = max(peak, status("RssAnon") - before)
found = retrieve_at_scale(query, patterns, beta=1.0, top=2, progress=watch)
print(json.dumps({"index": found.index.tolist(), "log_z": found.log_normalizer.item(), "peak": peak}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits private memory alone")
@pytest.mark.parametrize(
    "kind", ["map, data", "safetensors, data", "whole, data", "safetensors, address space", "map, address space"]
)
def test_patterns_may_be_larger_than_the_memory_there_is(tmp_path, kind):
    rows, dim, path = 1_000_000, 64, tmp_path / "patterns"  # 256 MB under a limit of 100 MB
    header = json.dumps({"x": {"dtype": "F32", "shape": [rows, dim], "data_offsets": [0, rows * dim * 4]}}).encode()
    with path.open("wb") as file:
        if kind.startswith("safetensors"):
            file.write(len(header).to_bytes(8, "little") + header)
        start = file.tell()
        file.truncate(start + rows * dim * 4)  # zeros that take no room on the disk
        for row, size in ((rows - 1, 0.25), (7, 0.125)):
            file.seek(start + row * dim * 4)
            file.write(np.full(dim, size, np.float32).tobytes())
    arguments = [sys.executable, "-c", PROGRAM, str(path), kind, str(rows), str(dim)]
    done = subprocess.run(arguments, capture_output=True, text=True, cwd=ROOT)
    if kind in ("whole, data", "map, address space"):  # the control: the limit is one
        assert done.returncode != 0
        assert "MemoryError" in done.stderr or "allocate" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["index"] == [[rows - 1, 7]]
    assert found["log_z"] == pytest.approx(np.log(rows - 2 + np.exp(16) + np.exp(8)), rel=1e-6)
    assert found["peak"] < 100e6


# Mistakes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"queries": randn(4)}, "queries"),
        ({"queries": randn(2, 5)}, "queries"),
        ({"queries": [[1.0]]}, "queries"),
        ({"queries": randn(2, 4).requires_grad_()}, "retrieve_at_scale"),
        ({"patterns": randn(4)}, "patterns"),
        ({"patterns": randn(2, 3, 4)}, "patterns"),
        ({"patterns": randn(0, 4)}, "patterns"),
        ({"patterns": [1.0]}, "patterns"),
        ({"patterns": torch.ones(3, 4, dtype=torch.int64)}, "patterns"),
        ({"patterns": np.ones((3, 4), np.uint16)}, "patterns"),
        ({"patterns": np.ones((3, 4), ">f4")}, "patterns"),
        ({"queries": torch.full((1, 4), torch.nan)}, "queries"),
        ({"values": randn(3, 2).requires_grad_()}, "retrieve_at_scale"),
        ({"patterns": np.ones((3, 4))[::-1]}, "patterns"),
        ({"log_weight": torch.zeros(3).long()}, "log_weight"),
        ({"log_weight": torch.zeros(2)}, "log_weight"),
        ({"log_weight": torch.zeros(5, 3)}, "log_weight"),
        ({"log_weight": torch.zeros(3) > 0}, "log_weight"),
        ({"values": randn(4, 2)}, "values"),
        ({"beta": 0.0}, "beta"),
        ({"beta": float("nan")}, "beta"),
        ({"beta": torch.ones(())}, "beta"),
        ({"top": 4}, "top"),
        ({"top": True}, "top"),
        ({"tile": 0}, "tile"),
    ],
)
def test_a_mistake_ends_in_one_sentence(change, message):
    arguments = {"queries": randn(2, 4), "patterns": randn(3, 4), "beta": 1.0} | change
    with pytest.raises(ValueError, match=message):
        retrieve_at_scale(arguments.pop("queries"), arguments.pop("patterns"), **arguments)


def test_files_that_do_not_serve_end_in_one_sentence(tmp_path):
    query = randn(1, 4)

    def refused(path: Path, message: str) -> None:
        with pytest.raises(UserError, match=message):
            retrieve_at_scale(query, path, beta=1.0)

    refused(tmp_path / "missing", "patterns must be an existing file, got .*missing; check the path")
    refused(tmp_path, "patterns must be an existing file, got ")
    for number, header in enumerate((b'{"x":5}', b"[1]", b'{"x":{"shape":[1,1],"dtype":"F32"}}')):
        path = tmp_path / f"header{number}"
        path.write_bytes(len(header).to_bytes(8, "little") + header)
        refused(path, "patterns must be a safetensors file, got header. without its header; open other files")
    (tmp_path / "text").write_text("no header at all")
    refused(tmp_path / "text", "patterns must be a safetensors file, got text without its header; open other files")
    refused(
        save(tmp_path / "two", x=randn(3, 4), y=randn(3, 4)), "patterns must be a file of one tensor, got x, y; pick"
    )
    refused(save(tmp_path / "whole", x=torch.ones(3, 4, dtype=torch.int8)), "must be stored as one of F64, .* got I8")
    path = save(tmp_path / "short", x=randn(3, 4))
    path.write_bytes(path.read_bytes()[:-8])
    refused(path, "patterns must hold 3 patterns, got a file that ends earlier; write it again")


@pytest.mark.parametrize("beta", [1e8, 1e9, 1e12, 1e20])
def test_scores_beyond_the_resolution_of_float32_choose_the_best_pattern(beta):
    generator = torch.Generator().manual_seed(0)
    stored, queries = torch.randn(1000, 16, generator=generator), torch.randn(7, 16, generator=generator)
    found = retrieve_at_scale(queries, stored, beta=beta, top=1)
    best = (queries.double() @ stored.double().mT).max(-1)
    assert found.index[:, 0].tolist() == best.indices.tolist()
    assert_close(found.state, stored[best.indices])
    assert_close(found.log_normalizer, (beta * best.values).float())
