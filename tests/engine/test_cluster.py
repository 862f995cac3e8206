"""A scheduler and two workers on loopback find what one process finds, whatever is killed in the middle."""

import json
import os
import signal
import time

import pandas
import pytest
from clusters import DOCUMENTS, MINILM, QUICK, SHARD_BYTES, pieces_done, wait_until

from massieu.corpus import Corpus
from massieu.engine import Dask
from massieu.inspection import inspect_model


@pytest.fixture
def cluster(processes, tmp_path):
    """A scheduler file and two workers without nanny."""
    file = tmp_path / "scheduler.json"
    scheduler = processes.scheduler(file)
    return file, scheduler, [processes.worker(file), processes.worker(file)]


def assert_same(found, alone, tables=("heads",)):
    """Each document was counted once, and every figure is the same; sums in another order differ in their last digits."""
    for name in ("documents", "passages", "tokens", "counted_tokens", "sha256"):
        assert found["facts"]["text"][name] == alone["facts"]["text"][name]
    assert found["facts"]["text"]["documents"] == DOCUMENTS
    for table in tables:
        one, other = pandas.DataFrame(found[table]), pandas.DataFrame(alone[table])
        assert one.size > 100
        pandas.testing.assert_frame_equal(one, other[list(one.columns)], rtol=1e-6, atol=1e-6, check_dtype=False)


def ended(driver):
    out, err = driver.communicate(timeout=200)
    assert driver.returncode == 0, err
    return json.loads(out)


def test_two_workers_find_what_this_process_finds(cluster, text):
    corpus = Corpus(text, shard_bytes=SHARD_BYTES)
    with Dask(scheduler_file=cluster[0]) as engine:
        found = inspect_model(MINILM, corpus, engine=engine, **QUICK)
    assert_same(found.to_dict(), inspect_model(MINILM, corpus, **QUICK).to_dict(), ("heads", "layers", "experiments"))


def test_a_worker_that_is_killed_changes_nothing(cluster, processes, text, alone, tmp_path):
    file, _, workers = cluster
    checkpoint = tmp_path / "checkpoint.safetensors"
    driver = processes.driver(text, checkpoint, "--heads-only", "--engine", "dask", "--scheduler-file", str(file))
    wait_until(checkpoint.exists)
    workers[0].send_signal(signal.SIGKILL)
    assert pieces_done(checkpoint) < len(Corpus(text, shard_bytes=SHARD_BYTES).shards()) // 2
    assert_same(ended(driver), alone)
    assert workers[1].poll() is None
    assert not checkpoint.exists()


def test_a_killed_worker_that_its_nanny_starts_again_changes_nothing(text, alone):
    killed = []

    def kill(what, done, total):
        if what == "reading" and done >= 200 and not killed:
            killed.append(next(iter(engine.client.run(os.getpid).values())))
            os.kill(killed[0], signal.SIGKILL)

    with Dask(workers=2) as engine:
        corpus = Corpus(text, shard_bytes=SHARD_BYTES)
        found = inspect_model(MINILM, corpus, experiments="heads", engine=engine, progress=kill, **QUICK)
    assert killed
    assert_same(found.to_dict(), alone)


def test_a_driver_that_is_killed_goes_on_where_it_was(cluster, processes, text, alone, tmp_path):
    checkpoint = tmp_path / "checkpoint.safetensors"
    options = ["--heads-only", "--engine", "dask", "--scheduler-file", str(cluster[0])]
    first = processes.driver(text, checkpoint, *options)
    wait_until(checkpoint.exists)
    first.send_signal(signal.SIGKILL)
    first.wait()
    before = pieces_done(checkpoint)
    assert 0 < before < len(Corpus(text, shard_bytes=SHARD_BYTES).shards())
    assert_same(ended(processes.driver(text, checkpoint, *options, "--resume")), alone)
    assert not checkpoint.exists()


def test_a_lost_scheduler_is_one_sentence_and_a_new_one_goes_on(cluster, processes, text, alone, tmp_path):
    file, scheduler, _ = cluster
    checkpoint = tmp_path / "checkpoint.safetensors"
    options = ["--heads-only", "--engine", "dask", "--scheduler-file"]
    first = processes.driver(text, checkpoint, *options, str(file))
    wait_until(checkpoint.exists)
    begin = time.monotonic()
    scheduler.send_signal(signal.SIGKILL)
    _, err = first.communicate(timeout=100)
    assert time.monotonic() - begin < 60
    assert first.returncode == 4
    (sentence,) = err.splitlines()
    assert sentence.startswith("massieu: the scheduler at tcp://127.0.0.1:")
    assert sentence.endswith(
        f" is lost; what was read is in {checkpoint}; the same command with --resume goes on from it"
    )
    assert 0 < pieces_done(checkpoint) < len(Corpus(text, shard_bytes=SHARD_BYTES).shards())
    other = tmp_path / "other.json"
    processes.scheduler(other)
    processes.worker(other)
    assert_same(ended(processes.driver(text, checkpoint, *options, str(other), "--resume")), alone)
