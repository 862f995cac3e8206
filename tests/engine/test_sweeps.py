"""Claims and sweeps on a cluster come out as in this process."""

import os
import signal
import time
from pathlib import Path

import dask
import pytest

from massieu import claims, cli
from massieu.engine import Dask, Local, LostCluster, attendance
from massieu.memory import measure_capacity


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


def _deadly(number):
    os.kill(os.getpid(), signal.SIGKILL)


def _slow(number):
    time.sleep(0.5)
    return number
