"""The example that trains with the Trainer and TensorBoard runs offline and leaves what its text promises."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from massieu.checks import pip_install
from massieu.monitor import read_log

ROOT = Path(__file__).resolve().parents[2]
for package in ("transformers", "accelerate", "tensorboard"):
    pytest.importorskip(package, reason=f"the example of the Trainer needs {package}; {pip_install('train')}")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("example")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(ROOT / "examples" / "trainer.py"), "run"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "run", done.stderr


def test_the_console_names_each_flag_and_the_log(run):
    folder, err = run
    lines = [line for line in err.replace("\r", "\n").splitlines() if line.startswith("massieu: ")]
    raised = {flag["name"] for flag in read_log(folder / "run.jsonl").flags}
    assert raised
    for name in raised:
        assert [line for line in lines if f": {name} in layer" in line]
    assert lines[-1] == "massieu: 8 readings; massieu watch run/run.jsonl shows the log"


def test_the_ids_of_special_tokens_fit_the_vocabulary_from_the_beginning(run):
    assert "token_id" not in run[1]


def test_tensorboard_reads_curves_and_flags_in_the_run_of_the_trainer(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (file,) = run[0].rglob("events.out.tfevents.*")
    events = EventAccumulator(str(file.parent))
    events.Reload()
    steps = {tag: [event.step for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert steps["massieu/score_max/max"] == list(range(0, 40, 5))
    losses = {event.step: event.value for event in events.Scalars("train/loss")}
    assert [event.value for event in events.Scalars("massieu/loss")] == [losses[step] for step in range(5, 40, 5)]
    texts = [event.tensor_proto.string_val[0].decode() for event in events.Tensors("massieu/flags/text_summary")]
    assert any("raised in layer" in text for text in texts)


def test_each_reading_of_the_log_but_the_first_has_a_loss(run):
    log = read_log(run[0] / "run.jsonl")
    assert [step for step, row in zip(log.steps, log.rows, strict=True) if "loss" in row] == log.steps[1:]
