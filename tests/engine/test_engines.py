"""Engines by name, and what a cluster says when it cannot go on."""

import gc
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import dask
import psutil
import pytest
import torch

from massieu import assets, cli
from massieu.checks import pip_install
from massieu.corpus import Corpus
from massieu.corpus.passages import TooLong
from massieu.corpus.shards import Shard, text_shards
from massieu.engine import Dask, LostCluster, driving, engine_named, worker_roster
from massieu.engine import cluster as clusters
from massieu.engine.workers import Failure, read_shards
from massieu.inspection import NotObservable, inspect_model
from massieu.inspection.options import Options
from massieu.inspection.reader import Reader
from massieu.models.loading import load
from massieu.models.origin import Origin

TEXTS = [f"Some years ago, never mind how long precisely, {i} whales." for i in range(100)]


@pytest.fixture(scope="module")
def embedded():
    loaded = load(str(assets.MODEL))
    options = Options(experiments="heads")
    return Reader(loaded.model, loaded.tokenizer, options, name="embedded", origin=Origin(None))


class Ending:
    """A piece of a text that ends who reads it."""

    key = "ending"

    def __init__(self, by):
        self.by = by

    def read(self, bad_records=None):
        if self.by == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise {"silence": NotObservable, "mistake": ZeroDivisionError}[self.by]("it was asked for")


def test_a_cluster_of_this_machine_listens_on_loopback_only(engine):
    assert engine.client is engine.client
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]
    listening = {c.laddr.ip for p in family for c in p.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    assert listening == {"127.0.0.1"}


def test_a_worker_has_one_thread_for_the_model(engine):
    engine.client.submit(torch.set_num_threads, 2).result()
    inspect_model(texts=TEXTS[:8], experiments="heads", engine=engine)
    assert engine.client.submit(torch.get_num_threads, pure=False).result() == 1


def test_texts_in_memory_and_a_corpus_give_the_same_on_a_cluster(engine, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("\n\n".join(TEXTS), encoding="utf-8")
    told = []
    one = inspect_model(texts=TEXTS, engine=engine, experiments="heads", progress=lambda *what: told.append(what))
    other = inspect_model(texts=Corpus(file, shard_bytes=500), engine=engine, experiments="heads")
    assert one.facts["text"]["sha256"] == other.facts["text"]["sha256"]
    assert one.heads.entropy.to_numpy() == pytest.approx(other.heads.entropy.to_numpy(), rel=1e-6)
    assert ("reading", len(TEXTS), len(TEXTS)) in told
    assert [done for what, done, _ in told if what == "tokens"][-1] == one.facts["text"]["tokens"]


def test_texts_that_come_one_by_one_are_read_on_a_cluster(engine):
    found = inspect_model(texts=(text for text in TEXTS), engine=engine, experiments="heads")
    assert found.facts["text"]["documents"] == len(TEXTS)


def test_a_worker_with_another_model_is_refused_with_one_sentence(engine, embedded):
    other = Origin(str(next((assets.MODEL.parent / "checkpoints").iterdir())))
    sentence = r"^the worker tcp://127\.0\.0\.1:\d+ must have the model of the process that started the run, but the model differs"
    reader = Reader(embedded.model, embedded.tokenizer, embedded.options, name="embedded", origin=other)
    with pytest.raises(ValueError, match=sentence):
        engine.fold(reader, list(text_shards(TEXTS, 10)))


def test_what_is_wrong_with_a_text_is_said_as_in_this_process(engine, tmp_path):
    file = tmp_path / "bad.jsonl"
    file.write_text('"good"\n{not json\n' * 20, encoding="utf-8")
    said = []
    for where in (None, engine):
        with pytest.raises(ValueError) as error:
            inspect_model(texts=Corpus(file, strict=True, shard_bytes=20), engine=where, experiments="heads")
        said.append(str(error.value))
    assert said[0] == said[1]
    assert "line 2" in said[0]


@pytest.mark.parametrize(("by", "error"), [("silence", NotObservable), ("mistake", RuntimeError)])
def test_errors_of_workers_arrive(engine, embedded, by, error):
    with pytest.raises(error, match="it was asked for"):
        engine.fold(embedded, [Ending(by)])


def _held(dask_worker):
    return list(dask_worker.data)


def test_workers_hold_nothing_that_the_driver_has_taken(engine, embedded, monkeypatch):
    monkeypatch.setattr(driving, "BETWEEN", 0.0)  # so that every piece is a task
    held = []

    def progress(*how_far):
        held.append(sum(map(len, engine.client.run(_held).values())))

    gc.disable()  # which would find it, late
    try:
        engine.fold(embedded, list(text_shards(TEXTS, 5)), progress=progress)
    finally:
        gc.enable()
    assert len(held) >= 20
    assert max(held) <= driving.GROUPS + 1


class Heavy:
    """A piece of a text that weighs more than what it gives."""

    key = "heavy"

    def __init__(self):
        self.weight = os.urandom(12_000_000)

    def read(self, bad_records=None):
        return Shard.of_texts(("Call me Ishmael.",)).read(bad_records)


def test_large_texts_travel_without_a_warning(engine, embedded):  # which would be an error
    assert engine.fold(embedded, [Heavy()]).counts.documents == 1


def test_a_piece_that_ends_every_worker_is_named(embedded):
    once = dask.config.set({"distributed.scheduler.allowed-failures": 0})
    with once, Dask(workers=1) as engine, pytest.raises(LostCluster) as error:
        engine.fold(embedded, [Ending("kill")])
    assert str(error.value).startswith("reading shard 1 of the text has ended 1 worker, the last at tcp://127.0.0.1:")
    assert "is memory short?" in str(error.value)
    assert str(error.value).endswith("nothing was kept; next time --out DIR or --checkpoint FILE keeps what was read")


def test_a_cluster_without_workers_is_one_sentence(embedded, processes, tmp_path, monkeypatch):
    monkeypatch.setattr(worker_roster, "ABSENCE", 1.0)
    monkeypatch.setattr(worker_roster, "ROUND", 0.2)
    processes.scheduler(tmp_path / "scheduler.json")
    processes.worker(tmp_path / "scheduler.json")
    with (
        Dask(scheduler_file=tmp_path / "scheduler.json") as engine,
        pytest.raises(LostCluster, match="all workers of the scheduler at tcp://127.0.0.1:.* have been gone for 1 s"),
    ):
        engine.fold(embedded, [Ending("kill")])


@pytest.mark.parametrize(
    "address", ["127.0.0.1:1", "tcp://127.0.0.1:1", "127.0.0.1", "tcp://", "nonsense://a:1", "", 5]
)
def test_an_address_where_nobody_answers_is_one_sentence(address):
    before = threading.active_count()
    with Dask(address) as engine, pytest.raises(ValueError, match=f"^no scheduler answers at {address!r} "):
        inspect_model(texts=TEXTS, engine=engine, experiments="heads")
    assert threading.active_count() == before  # nobody is left behind who tries again


@pytest.mark.parametrize("held", [b"{bad", b"[]", b"{}", b"", b'{"address": 5}', b"\xff"])
def test_what_no_scheduler_wrote_is_refused(held, tmp_path):
    file = tmp_path / "scheduler.json"
    file.write_bytes(held)
    with pytest.raises(
        ValueError, match=r"scheduler.json must be what dask scheduler --scheduler-file wrote, got another"
    ):
        Dask(scheduler_file=file)


def test_a_worker_that_cannot_run_massieu_is_named_and_lives(processes, tmp_path):
    file = tmp_path / "scheduler.json"
    processes.scheduler(file)
    (tmp_path / "massieu.py").write_text("raise ImportError('nothing here')")
    processes.environment["PYTHONPATH"] = str(tmp_path)
    worker = processes.worker(file, cwd=tmp_path)
    sentence = (
        r"^the worker tcp://127.0.0.1:\d+ must have massieu .* as this process has, got ImportError: nothing here;"
    )
    with Dask(scheduler_file=file) as engine:
        with pytest.raises(ValueError, match=sentence):
            inspect_model(texts=TEXTS, engine=engine, experiments="heads")
        with pytest.raises(ValueError, match=sentence):
            list(engine.map(len, ["a"]))
        assert len(engine.client.scheduler_info()["workers"]) == 1
    assert worker.poll() is None


def test_a_text_that_cannot_be_read_is_not_a_lost_scheduler(engine):
    def texts():
        yield "Call me Ishmael."
        raise FileNotFoundError("the rest is missing")

    with pytest.raises(FileNotFoundError, match="the rest is missing"):
        inspect_model(texts=texts(), engine=engine, experiments="heads")


def test_a_model_that_was_trained_further_is_loaded_again(engine, tmp_path):
    folder = tmp_path / "model"
    loaded = load(str(assets.MODEL))
    entropies = []
    for _ in range(2):
        loaded.model.save_pretrained(folder)
        loaded.tokenizer.save_pretrained(folder)
        found = inspect_model(str(folder), TEXTS[:8], engine=engine, experiments="heads")
        entropies.append(found.heads.entropy.mean())
        with torch.no_grad():
            for weight in loaded.model.parameters():
                weight *= 1.5
    assert entropies[0] != entropies[1]


def test_a_script_without_a_guard_says_what_is_missing(processes, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("from massieu.engine import Dask\nDask(workers=1).client\n")
    ran = subprocess.run(
        [sys.executable, str(script)], env=processes.environment, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode != 0
    assert "put what it does under if __name__ == '__main__':" in ran.stderr
    assert ran.stderr.count("Traceback") <= 1  # that of the script


def test_a_scheduler_without_workers_is_one_sentence(processes, tmp_path, monkeypatch):
    monkeypatch.setattr(clusters, "FIRST", 2.0)
    processes.scheduler(tmp_path / "scheduler.json")
    sentence = "no worker has come to the scheduler at .* within 2 s; start some"
    with Dask(scheduler_file=tmp_path / "scheduler.json") as engine, pytest.raises(ValueError, match=sentence):
        inspect_model(texts=TEXTS, engine=engine, experiments="heads")


def test_a_model_in_memory_is_refused_by_a_cluster(embedded):
    with pytest.raises(ValueError, match="needs a model that its workers can load by name, got one in memory"):
        inspect_model(embedded.model, TEXTS, tokenizer=embedded.tokenizer, engine="dask", experiments="heads")


def test_without_dask_the_extra_is_named(monkeypatch, capsys):
    found = importlib.util.find_spec
    hidden = {"dask", "distributed"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in hidden else found(name, *rest))
    assert cli.main(["inspect", "--engine", "dask", "-q"]) == 2
    said = f"massieu: the engine dask needs dask, distributed, not installed; {pip_install('dask')}\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"address": "a:1", "scheduler_file": "b"},
            "a cluster has an address or a scheduler file, got both; choose one",
        ),
        ({"address": "a:1", "workers": 2}, "workers are for a cluster that is started here, and this one is there"),
        ({"workers": 0}, "workers"),
        ({"workers": "2"}, "workers"),
        ({"scheduler_file": "nowhere.json"}, "there is no scheduler file nowhere.json"),
    ],
)
def test_options_that_no_cluster_has_are_refused(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        engine_named("dask", **options)


def test_an_unknown_engine_is_refused():
    with pytest.raises(ValueError, match="engine"):
        inspect_model(texts=TEXTS, engine="spark")
    with pytest.raises(TypeError, match="engine must be local, dask or an engine, got int"):
        inspect_model(texts=TEXTS, engine=42)


def test_options_of_a_cluster_are_refused_elsewhere(capsys):
    assert cli.main(["inspect", "--address", "127.0.0.1:1"]) == 2
    assert capsys.readouterr().err == "massieu: address is for the engine dask, got the engine local; leave it out\n"


@pytest.fixture
def listening():
    """The address of something that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_whoever_listens_and_is_no_scheduler_is_one_sentence(listening, monkeypatch):
    monkeypatch.setattr(clusters, "CONNECTION", 1.0)
    sentence = f"^no scheduler answers at '{listening}' .*; start one with dask scheduler$"
    with Dask(listening) as engine, pytest.raises(ValueError, match=sentence):
        inspect_model(texts=TEXTS, engine=engine, experiments="heads")


def test_the_address_of_a_worker_is_one_sentence(engine):
    (worker,) = engine.client.scheduler_info()["workers"]
    sentence = f"^the address must be that of a scheduler, got '{worker}', where a Worker answers"
    with Dask(worker) as other, pytest.raises(ValueError, match=sentence):
        inspect_model(texts=TEXTS, engine=other, experiments="heads")


def test_a_worker_that_hangs_changes_nothing(processes, tmp_path, embedded):
    file = tmp_path / "scheduler.json"
    processes.environment["DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL"] = "5s"  # after which the scheduler drops it
    processes.scheduler(file)
    hanging, _ = processes.worker(file), processes.worker(file)
    with Dask(scheduler_file=file) as engine:
        engine.client.wait_for_workers(2)
        hanging.send_signal(signal.SIGSTOP)
        found = engine.fold(embedded, list(text_shards(TEXTS, 10)))
        assert list(engine.map(len, ["a", "bc"])) == [1, 2]
    assert found.counts.documents == len(TEXTS)


def test_workers_that_all_hang_are_one_sentence(processes, tmp_path, embedded, monkeypatch):
    monkeypatch.setattr(worker_roster, "LOADING", 1.0)
    file = tmp_path / "scheduler.json"
    processes.scheduler(file)
    hanging = processes.worker(file)
    with Dask(scheduler_file=file) as engine:
        engine.client.wait_for_workers(1)
        hanging.send_signal(signal.SIGSTOP)
        with pytest.raises(
            LostCluster, match="no worker of the scheduler at tcp.* has answered for 1 s; nothing was kept"
        ):
            engine.fold(embedded, list(text_shards(TEXTS, 10)))


def test_a_sweep_that_is_left_begins_no_cluster(monkeypatch):
    with Dask(workers=1) as engine:
        results = engine.map(len, ["a", "bc"])
        assert next(results) == 1
    monkeypatch.setattr(Dask, "_connected", lambda self: pytest.fail("a cluster was started"))
    results.close()


def test_an_interrupt_while_a_cluster_begins_ends_it_without_a_word(processes, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, threading, time\n"
        "from distributed import LocalCluster\n"
        "from massieu.engine import Dask\n"
        "if __name__ == '__main__':\n"
        "    threading.Timer(0.5, lambda: os.killpg(0, signal.SIGINT)).start()\n"
        "    try:\n"
        "        with Dask(workers=2) as engine:\n"
        "            engine.client, time.sleep(60)\n"
        "    except KeyboardInterrupt:\n"
        "        print('interrupted')\n"
    )
    ran = subprocess.run(
        [sys.executable, str(script)],
        env=processes.environment,
        capture_output=True,
        text=True,
        timeout=60,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "interrupted\n", "")


def test_a_worker_that_comes_late_has_time_to_answer(engine, monkeypatch):
    clock = [0.0]  # of this module alone: timers of the cluster must not jump
    own = SimpleNamespace(monotonic=lambda: time.monotonic() + clock[0], sleep=time.sleep)
    monkeypatch.setattr(worker_roster, "time", own)
    there = worker_roster.WorkerRoster(engine.client)
    there.gather()
    clock[0] += 10 * worker_roster.LOADING  # of a long run
    there.look()
    clock[0] += worker_roster.ROUND
    monkeypatch.setattr(there, "_has_answered", lambda worker: False)  # all are new
    there.look()
    assert there.silent
    assert not there.workers
    clock[0] += worker_roster.LOADING
    with pytest.raises(LostCluster, match="no worker of the scheduler at .* has answered for 300 s"):
        there.look()
    there.close()


def test_a_cluster_treats_long_documents_as_one_process_does(engine):
    texts = [*TEXTS[:8], TEXTS[0] * 40]
    alone = inspect_model(texts=texts, experiments="heads", long_documents="skip")
    found = inspect_model(texts=texts, experiments="heads", long_documents="skip", engine=engine)
    assert found.facts["text"] == alone.facts["text"]
    assert found.facts["text"]["long_documents"] == 1
    assert "1 document beyond 256 tokens was skipped." in found.notes


def test_a_long_document_that_a_worker_meets_is_told_as_one(embedded):
    failure = read_shards("run", embedded.remote(), [(0, Shard.of_texts((TEXTS[0] * 40,)))])
    assert isinstance(failure, Failure)
    assert failure.kind is TooLong
