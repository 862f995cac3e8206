"""A run that is interrupted or killed goes on from its checkpoint as if nothing had been."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from massieu import cli
from massieu.checks import UserError
from massieu.context import LearningRecipe, learn, learning, shifted, training_files

SMALL = LearningRecipe(steps=40, batch=8, width=16, layers=1, evaluate_every=10)
LONG = replace(SMALL, steps=150)
EVERY = {"checkpoint_every": 10}
COMMAND = ["learn", "linear", "--dim", "2", "--model", "linear", "--steps", "800", "--fitted", "0"]

signals = pytest.mark.skipif(os.name != "posix", reason="sends signals")


@pytest.fixture(autouse=True)
def _few_tests(monkeypatch):
    monkeypatch.setattr(learning, "TESTS", 256)


class StoppedError(Exception):
    pass


def stop_at(step):
    def progress(what, done, total):
        if done == step:
            raise StoppedError

    return progress


def step_of(folder):
    with safe_open(folder / training_files.NAME, "pt") as file:
        return int(file.metadata()["step"])


def metadata_of(folder):
    with safe_open(folder / training_files.NAME, "pt") as file:
        return file.metadata()


def assert_same_run(folder, other):
    assert (folder / "history.csv").read_bytes() == (other / "history.csv").read_bytes()
    ours, theirs = load_file(folder / training_files.NAME), load_file(other / training_files.NAME)
    assert ours.keys() == theirs.keys()
    assert any(name.startswith("model.") for name in ours)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def start(arguments, **pipes):
    # What starts the tests may ignore interrupts, which a child would inherit.
    return subprocess.Popen(
        [sys.executable, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **pipes,
    )


def wait_for_a_checkpoint(process, folder):
    deadline = time.monotonic() + 120
    while not (folder / training_files.NAME).exists():
        assert process.poll() is None, "ended before its first checkpoint"
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("model", ["softmax", "linear"])
def test_a_run_that_was_stopped_goes_on_bit_for_bit(task, tmp_path, model):
    recipe = SMALL if model == "softmax" else LearningRecipe(model="linear", steps=40, batch=8, evaluate_every=10)
    whole = learn(task, recipe)
    with pytest.raises(StoppedError):
        learn(task, recipe, out=tmp_path, **EVERY, progress=stop_at(25))
    resumed_from = []
    resumed = learn(task, recipe, out=tmp_path, resume=True, progress=lambda _, done, total: resumed_from.append(done))
    assert resumed_from[0] == 20
    assert resumed.history.equals(whole.history)
    assert resumed.comparison.curve.equals(whole.comparison.curve)
    for ours, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.usefixtures("only_training")
def test_a_checkpoint_between_two_measurements_keeps_the_loss_so_far(task, tmp_path):
    recipe = replace(SMALL, evaluate_every=20)
    with pytest.raises(StoppedError):
        learn(task, recipe, out=tmp_path, checkpoint_every=15, progress=stop_at(16))
    resumed = learn(task, recipe, out=tmp_path, resume=True)
    assert resumed.history.equals(learn(task, recipe).history)


@signals
def test_an_interrupt_ends_with_a_sentence_and_resuming_gives_the_same_run(tmp_path, capsys):
    run, whole = tmp_path / "run", tmp_path / "whole"
    process = start(["-m", "massieu", *COMMAND, "--out", str(run)], stderr=subprocess.PIPE, text=True)
    wait_for_a_checkpoint(process, run)
    process.send_signal(signal.SIGINT)
    _, printed = process.communicate(timeout=120)
    assert process.returncode == 130
    assert printed.endswith("massieu: interrupted; the same command with --resume goes on from the checkpoint\n")
    assert "Traceback" not in printed
    assert step_of(run) % 100 == 0
    assert 100 <= step_of(run) < 800
    assert {path.name for path in run.iterdir()} <= {training_files.NAME, "history.csv"}  # it may come between the two
    assert cli.main([*COMMAND, "--out", str(run), "--resume", "-q"]) == 0
    assert cli.main([*COMMAND, "--out", str(whole), "-q"]) == 0
    assert_same_run(run, whole)
    capsys.readouterr()
    ours, theirs = (json.loads((folder / "learned.json").read_text(encoding="utf-8")) for folder in (run, whole))
    assert ours["curve"] == theirs["curve"]
    assert ours["history"] == theirs["history"]


@signals
@pytest.mark.usefixtures("only_training")
def test_a_kill_costs_at_most_one_interval_and_resuming_gives_the_same_run(task, tmp_path):
    run, whole = tmp_path / "run", tmp_path / "whole"
    code = (
        "import os\n"
        "from massieu.context import LearningRecipe, learn, task_named\n"
        "def progress(what, done, total):\n"
        "    os.write(1, b'%d\\n' % done)\n"
        f"learn(task_named('linear', dim=2, noise=0.5), {LONG}, out={str(run)!r}, **{EVERY}, progress=progress)"
    )
    process = start(["-c", code], stdout=subprocess.PIPE)
    wait_for_a_checkpoint(process, run)
    process.kill()
    steps, _ = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL
    reached = int(steps.split()[-1])
    assert reached < LONG.steps
    assert reached - step_of(run) <= EVERY["checkpoint_every"]
    learn(task, LONG, out=run, resume=True)
    learn(task, LONG, out=whole)
    assert_same_run(run, whole)


@pytest.mark.usefixtures("only_training")
def test_another_seed_is_another_run(task, tmp_path):
    for seed in (0, 1):
        learn(task, replace(SMALL, seed=seed), out=tmp_path / str(seed))
    with pytest.raises(AssertionError):
        assert_same_run(tmp_path / "0", tmp_path / "1")


@pytest.mark.usefixtures("only_training")
def test_a_kill_while_a_checkpoint_is_written_leaves_the_one_before(task, tmp_path, monkeypatch):
    replace, calls = os.replace, []

    def killed(source, target):
        calls.append(target)
        if step_reached(calls) == 3:
            raise StoppedError
        replace(source, target)

    def step_reached(calls):
        return sum(path.name == training_files.NAME for path in calls)

    with monkeypatch.context() as patched:
        patched.setattr(training_files.os, "replace", killed)
        with pytest.raises(StoppedError):
            learn(task, SMALL, out=tmp_path, **EVERY)
    assert step_of(tmp_path) == 20
    (tmp_path / f".{training_files.NAME}.part").write_bytes(b"half of a checkpoi")
    learn(task, SMALL, out=tmp_path, **EVERY, resume=True)
    assert {path.name for path in tmp_path.iterdir()} == {training_files.NAME, "history.csv"}


@pytest.mark.usefixtures("only_training")
def test_a_kill_between_checkpoint_and_log_does_not_lose_the_log(task, tmp_path):
    learn(task, SMALL, out=tmp_path, **EVERY)
    whole = (tmp_path / "history.csv").read_bytes()
    (tmp_path / "history.csv").write_bytes(whole[: len(whole) // 2])
    learn(task, SMALL, out=tmp_path, **EVERY, resume=True)
    assert (tmp_path / "history.csv").read_bytes() == whole


@pytest.mark.usefixtures("only_training")
def test_the_time_of_a_run_is_that_of_all_its_parts(task, tmp_path):
    with pytest.raises(StoppedError):
        learn(task, SMALL, out=tmp_path, **EVERY, progress=stop_at(25))
    before = json.loads(metadata_of(tmp_path)["spent"])
    resumed = learn(task, SMALL, out=tmp_path, **EVERY, resume=True)
    again = learn(task, SMALL, out=tmp_path, **EVERY, resume=True)
    for name, part in zip(("seconds", "cpu_seconds"), before, strict=True):
        assert part > 0
        assert resumed.facts[name] >= round(part, 1)
        assert again.facts[name] == resumed.facts[name]


@signals
def test_a_disk_that_is_full_is_one_sentence(tmp_path):
    import resource

    def little_room():
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))

    command = [sys.executable, "-m", "massieu", *_short("linear"), "--out", str(tmp_path)]
    found = subprocess.run(command, preexec_fn=little_room, capture_output=True, text=True)
    assert found.returncode == 2
    assert found.stderr.splitlines()[-1].startswith(f"massieu: the folder {tmp_path} cannot be written to: ")
    assert "Traceback" not in found.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("only_training")
def test_an_interrupt_before_the_first_checkpoint_leaves_nothing_and_says_so(tmp_path, capsys, monkeypatch):
    def interrupt(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(learning._TrainingRun, "advance", interrupt)
    assert cli.main([*COMMAND, "--out", str(tmp_path), "-q"]) == 130
    assert capsys.readouterr().err == "massieu: interrupted before the first checkpoint; start again\n"
    assert not list(tmp_path.iterdir())


def test_an_interrupt_while_the_page_is_written_says_how_to_go_on(tmp_path, capsys, monkeypatch):
    def interrupt(document):
        raise KeyboardInterrupt

    monkeypatch.setattr("massieu.report.learning_page.render_learning", interrupt)
    assert cli.main([*_short("linear"), "--out", str(tmp_path), "-q"]) == 130
    printed = capsys.readouterr().err
    assert printed == "massieu: interrupted; the same command with --resume goes on from the checkpoint\n"
    assert (tmp_path / "learned.json").exists()


@signals
@pytest.mark.usefixtures("only_training")
def test_two_runs_do_not_write_to_one_folder(task, tmp_path):
    def second(what, done, total):
        if done == 5:
            with pytest.raises(UserError, match="another run is writing to .*; wait until it has ended"):
                learn(task, SMALL, out=tmp_path, **EVERY)
            raise StoppedError

    with pytest.raises(StoppedError):
        learn(task, SMALL, out=tmp_path, **EVERY, progress=second)
    learn(task, SMALL, out=tmp_path, **EVERY)  # the first has gone, without a checkpoint


@signals
@pytest.mark.usefixtures("only_training")
def test_files_are_as_readable_as_others_and_on_the_disk_before_they_have_their_name(task, tmp_path, monkeypatch):
    done, sync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (done.append("sync"), sync(handle)))
    monkeypatch.setattr(os, "replace", lambda source, target: (done.append("replace"), replace(source, target)))
    learn(task, SMALL, out=tmp_path, **EVERY)
    (tmp_path / "plain").write_text("")
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1
    assert done == ["sync", "replace"] * (len(done) // 2)


@pytest.mark.usefixtures("only_training")
def test_tasks_inside_a_task_are_told_apart_by_what_they_are(task):
    inner = training_files.described(shifted(task, "scale", factor=2.0))["task"]
    assert inner == training_files.described(task)
    assert inner["dim"] == 2
    task.extra = object()
    with pytest.raises(UserError, match="extra"):
        training_files.described(task)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    assert cli.main([*_short("linear"), "--out", str(folder), "-q"]) == 0
    return folder


def _short(task, *, dim=2, seed=0):
    return ["learn", task, "--dim", str(dim), "--model", "linear", "--steps", "5", "--seed", str(seed), "--fitted", "0"]


def refusal(arguments, capsys):
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("massieu: ")
    assert error.count("\n") == 1
    return error


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (_short("sparse"), "of another task, with class Linear, got SparseLinear"),
        (_short("linear", dim=3), "of another task, with dim 2, got 3"),
        (_short("linear", seed=1), "of another recipe, with seed 0, got 1"),
        ([*_short("linear"), "--noise", "0.25"], "of another task, with noise 0.5, got 0.25"),
        ([*_short("linear"), "--steps", "6"], "of another recipe, with steps 5, got 6"),
        ([*_short("linear"), "--pool", "4"], "of another recipe, with pool None, got 4"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(arguments, sentence, finished, capsys):
    error = refusal([*arguments, "--out", str(finished), "--resume"], capsys)
    assert sentence in error
    assert "resume with the same, or choose another folder" in error


def test_a_run_is_not_begun_over_another(finished, capsys):
    assert "holds a checkpoint.safetensors already" in refusal([*_short("linear"), "--out", str(finished)], capsys)


@pytest.mark.parametrize("part", [0, 7, 100, 0.5, -1, None])
def test_half_a_checkpoint_is_refused(part, finished, tmp_path, capsys):
    whole = (finished / training_files.NAME).read_bytes()
    end = int(part * len(whole)) if isinstance(part, float) else part
    (tmp_path / training_files.NAME).write_bytes(b"x" * 1000 if part is None else whole[:end])
    error = refusal([*_short("linear"), "--out", str(tmp_path), "--resume"], capsys)
    assert "is no whole checkpoint of this massieu learn; delete it" in error


@pytest.mark.usefixtures("only_training")
def test_tensors_of_something_else_are_refused(task, tmp_path):
    from safetensors.torch import save_file

    for metadata in (None, {"step": "3", "identity": "[]"}, {"step": "3", "identity": '{"task": 1, "recipe": 2}'}):
        save_file({"weights": torch.zeros(3)}, tmp_path / training_files.NAME, metadata)
        with pytest.raises(UserError, match="is no whole checkpoint of this massieu learn"):
            learn(task, SMALL, out=tmp_path, **EVERY, resume=True)


def test_a_checkpoint_of_another_format_is_refused(capsys, monkeypatch, tmp_path):
    with monkeypatch.context() as older:
        older.setattr(training_files, "FORMAT", "1")
        assert cli.main([*_short("linear"), "--out", str(tmp_path), "-q"]) == 0
    capsys.readouterr()
    error = refusal([*_short("linear"), "--out", str(tmp_path), "--resume"], capsys)
    assert "is no whole checkpoint of this massieu learn; delete it" in error
