"""Claims and sweeps on a cluster come out as in this process."""

import os
import signal
import time
from pathlib import Path

import dask
import pytest
import torch

from massieu import assets, claims, cli
from massieu.engine import Dask, Local, LostCluster
from massieu.engine import worker_roster as attendance
from massieu.memory import measure_capacity
from massieu.models.loading import load


@pytest.fixture(scope="module")
def engine():
    with Dask(workers=2) as started:
        yield started


def figures(results):
    return [(each.claim.key, each.verdict, each.evidence) for each in results]


def test_claims_have_the_same_verdicts_on_a_cluster(engine):
    chosen = claims.select(["C14", "C1"])
    heard = []
    found = claims.verify(chosen, engine=engine, progress=lambda *what: heard.append(what))
    assert figures(found) == figures(claims.verify(chosen, workers=1))
    assert heard[-1] == ("verifying", len(chosen), len(chosen))


def test_the_command_verifies_on_a_cluster(capsys):
    assert cli.main(["verify", "C14", "--engine", "dask", "--workers", "1"]) == 0
    out, err = capsys.readouterr()
    assert "C14" in out
    assert "dashboard: http://127.0.0.1:" in err


@pytest.mark.parametrize("where", ["cluster", "here"])
def test_capacities_do_not_depend_on_the_engine(where, engine):
    sweep = {"kind": "classical", "dim": 32, "numbers": [2, 8], "criterion": "most_fixed", "trials": 25}
    chosen = engine if where == "cluster" else Local()
    assert measure_capacity(**sweep, engine=chosen) == measure_capacity(**sweep)


def test_a_sweep_runs_elsewhere_and_survives_a_killed_worker(engine, tmp_path):
    found = list(engine.map(_once_deadly, [(number, str(tmp_path / "died")) for number in range(8)]))
    assert found == [number * number for number in range(8)]
    assert (tmp_path / "died").exists()


def _once_deadly(given):
    number, marker = given
    if number == 3 and not Path(marker).exists():
        Path(marker).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return number * number


def test_a_lost_scheduler_ends_a_sweep(processes, tmp_path):
    scheduler = processes.scheduler(tmp_path / "scheduler.json")
    processes.worker(tmp_path / "scheduler.json")
    processes.worker(tmp_path / "scheduler.json")
    with Dask(scheduler_file=tmp_path / "scheduler.json") as engine:
        engine.client.wait_for_workers(2)
        results = engine.map(_slow, range(50))
        assert next(results) == 0
        scheduler.send_signal(signal.SIGKILL)
        with pytest.raises(LostCluster, match="the scheduler at tcp://127.0.0.1:.* is lost"):
            list(results)


def test_workers_that_are_gone_end_a_sweep(processes, tmp_path, monkeypatch):
    monkeypatch.setattr(attendance, "ABSENCE", 1.0)
    monkeypatch.setattr(attendance, "ROUND", 0.2)
    processes.scheduler(tmp_path / "scheduler.json")
    worker = processes.worker(tmp_path / "scheduler.json")
    with Dask(scheduler_file=tmp_path / "scheduler.json") as engine:
        results = engine.map(_slow, range(50))
        assert next(results) == 0
        worker.send_signal(signal.SIGKILL)
        with pytest.raises(LostCluster, match="all workers of the scheduler at .* have been gone for 1 s; start again"):
            list(results)


def test_the_error_of_a_task_is_its_own(engine):
    with pytest.raises(OSError, match="of the task"):
        list(engine.map(_failing, range(2)))


def _failing(number):
    raise OSError("of the task")


def test_a_task_that_ends_every_worker_ends_a_sweep():
    once = dask.config.set({"distributed.scheduler.allowed-failures": 0})
    with (
        once,
        Dask(workers=2) as engine,
        pytest.raises(LostCluster, match="a task has ended 1 worker, the last at tcp"),
    ):
        list(engine.map(_deadly, range(2)))


def test_what_ends_its_workers_may_be_replaced():
    once = dask.config.set({"distributed.scheduler.allowed-failures": 0})
    with once, Dask(workers=1) as engine:
        found = list(engine.map(_deadly_at_two, range(4), lost=lambda number: f"{number} is lost"))
    assert found[:3] == [0, 1, "2 is lost"]
    assert found[3] in (9, "3 is lost")  # who waits beside it may be lost with it


def _deadly_at_two(number):
    if number == 2:
        time.sleep(0.5)  # the others are told by now
        os.kill(os.getpid(), signal.SIGKILL)
    return number * number


def test_a_claim_that_ends_its_workers_is_undecided_and_the_one_beside_it_is_tried_again():
    asked = []

    class Losing(Local):
        def map(self, function, given, /, *, lost=None):
            asked.append(given := list(given))
            return (lost(keys) if keys == ["C14"] or len(given) > 1 else function(keys) for keys in given)

    found = {each.claim.key: each for each in claims.verify(claims.select(["C14", "C1"]), engine=Losing())}
    assert sorted(map(len, asked)) == [1, 1, 2]
    assert not found["C1"].surprises
    assert found["C14"].verdict is claims.Verdict.UNDECIDED
    assert found["C14"].expected is not None
    assert "the process that ran it ended" in found["C14"].reason


@pytest.fixture
def folder(tmp_path):
    loaded = load(str(assets.MODEL))
    loaded.model.save_pretrained(tmp_path / "model")
    loaded.tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_model_by_a_relative_path_is_found_by_workers_elsewhere(engine, folder, monkeypatch):
    assert engine.client.run(os.getcwd)  # the workers are there already, in another folder
    monkeypatch.chdir(folder.parent)
    (found,) = claims.verify(claims.select(["X5"]), engine=engine, model="model")
    assert found.evidence is not None, found.reason


def test_a_worker_with_another_model_is_refused(folder):
    class Elsewhere(Local):
        """A worker on whose machine the folder holds another model."""

        def map(self, function, given, /, *, lost=None):
            loaded = load(str(folder))
            with torch.no_grad():
                next(loaded.model.parameters()).mul_(2)
            loaded.model.save_pretrained(folder)
            return map(function, given)

    with pytest.raises(ValueError, match="must have the same model as this process, but its .* has other weights"):
        claims.verify(claims.select(["X5"]), engine=Elsewhere(), model=str(folder))


def _deadly(number):
    os.kill(os.getpid(), signal.SIGKILL)


def _slow(number):
    time.sleep(0.5)
    return number
