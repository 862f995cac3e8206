"""The Trainer of transformers, watched by a callback: its steps, its log, its checkpoints."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import massieu
from massieu.checks import MissingPackageError, UserError
from massieu.monitor import trainer as module

transformers = pytest.importorskip("transformers")
WORDS = torch.randint(32, (12, 8), generator=torch.Generator().manual_seed(0))
QUANTITIES = ("entropy", "update_ratio")


def tiny() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    return transformers.GPT2LMHeadModel(config)


def make(folder, callbacks=(), **options):
    pytest.importorskip("accelerate")
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        **{
            "per_device_train_batch_size": 2,
            "learning_rate": 0.01,
            "report_to": "none",
            "use_cpu": True,
            "logging_steps": 100,
            **options,
        },
        **{"disable_tqdm": True, "save_strategy": "steps", "save_steps": 3, "seed": 1, "dataloader_pin_memory": False},
    )
    data = [{"input_ids": words, "labels": words} for words in WORDS]
    return transformers.Trainer(tiny(), arguments, train_dataset=data, callbacks=list(callbacks))


def steps(callback) -> list[int]:
    return [reading.step for reading in callback.watched.readings]


def test_steps_are_those_of_the_trainer_and_a_resumed_run_continues_them(tmp_path):
    path = tmp_path / "run.jsonl"
    options = {"every": 2, "log": [path, "trainer"], "quantities": QUANTITIES}
    first = module.WatchCallback(**options)
    trainer = make(tmp_path, [first], max_steps=4)
    trainer.train()
    assert trainer.state.global_step == 4
    assert steps(first) == [0, 2]
    assert not trainer.model._forward_hooks  # closed

    second = module.WatchCallback(**options)
    resumed = make(tmp_path, [second], max_steps=6)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert steps(second) == [4]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 2, 4]

    # Its own log has the values, before and after the checkpoint.
    name = "massieu/entropy/layer01/median"
    written = {entry["step"]: entry[name] for entry in resumed.state.log_history if name in entry}
    readings = [*first.watched.readings, *second.watched.readings]
    assert written == {reading.step: reading.series()["entropy/layer01/median"] for reading in readings}


def test_the_weights_are_those_of_an_unwatched_run(tmp_path):
    callback = module.WatchCallback(every=1)
    runs = [make(tmp_path / str(len(each)), each, max_steps=3) for each in ([], [callback])]
    for trainer in runs:
        torch.manual_seed(5)
        trainer.train()
    assert steps(callback) == [0, 1, 2]
    for one, other in zip(runs[0].model.parameters(), runs[1].model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_accumulated_gradients_are_one_step_and_reports_get_the_values(tmp_path):
    reported = []

    class Report(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs, **_):
            reported.append((state.global_step, sorted(name for name in logs if name.startswith("massieu/entropy"))))

    trainer = make(tmp_path, [Report()], max_steps=3, gradient_accumulation_steps=2)
    callback = module.WatchCallback(every=1, log="trainer", quantities="entropy", heads=True, trainer=trainer)
    trainer.add_callback(callback)
    trainer.train()
    assert steps(callback) == [0, 1, 2]
    values = [(step, names) for step, names in reported if names]
    assert [step for step, _ in values] == [0, 1, 2]
    assert "massieu/entropy/layer01/head01" in values[0][1]


def test_the_losses_of_the_trainer_stand_beside_the_readings(tmp_path):
    path = tmp_path / "run.csv"
    callback = module.WatchCallback(every=2, log=path, console=False)
    trainer = make(tmp_path, [callback], max_steps=5, logging_steps=1)
    trainer.train()
    logged = {entry["step"]: entry for entry in trainer.state.log_history if "loss" in entry}
    readings = callback.watched.readings
    assert [reading.step for reading in readings] == [0, 2, 4]
    for reading in readings:  # the Trainer counts a step when it has ended
        assert reading.recorded["loss"] == logged[reading.step + 1]["loss"]
        assert reading.recorded["grad_norm"] == logged[reading.step + 1]["grad_norm"]
    log = massieu.monitor.read_log(path)
    assert [row["loss"] for row in log.rows] == [reading.recorded["loss"] for reading in readings]


def event_files(folder):
    return sorted(folder.rglob("events.out.tfevents.*"))


def tags(file):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(file))
    events.Reload()
    return {tag: [event.step for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_shows_the_values_in_the_run_of_the_trainer(tmp_path):
    pytest.importorskip("tensorboard")
    callback = module.WatchCallback(every=2, log="tensorboard", console=False)
    make(tmp_path, [callback], max_steps=5, logging_steps=1, report_to="tensorboard").train()
    (file,) = event_files(tmp_path)
    found = tags(file)
    assert found["massieu/score_max/max"] == found["massieu/loss"] == [0, 2, 4]
    assert found["train/loss"] == [1, 2, 3, 4, 5]


def test_tensorboard_writes_to_the_folder_of_a_trainer_that_does_not_report(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    monkeypatch.chdir(tmp_path)
    callback = module.WatchCallback(every=2, log="tensorboard", console=False)
    make(tmp_path / "out", [callback], max_steps=5).train()
    (file,) = event_files(tmp_path)
    assert file.is_relative_to(tmp_path / "out")
    assert tags(file)["massieu/score_max/max"] == [0, 2, 4]


def test_a_training_that_failed_can_be_begun_again():
    model, callback = tiny(), module.WatchCallback(every=1, quantities="entropy")
    state = SimpleNamespace(global_step=0, epoch=None, log_history=[])
    arguments = SimpleNamespace(n_gpu=0)
    callback.on_train_begin(arguments, state, None, model=model)
    model(WORDS[:2])
    state.global_step = 7  # the Trainer goes on from a checkpoint without having said that it stopped
    callback.on_train_begin(arguments, state, None, model=model)
    model(WORDS[:2])
    callback.on_step_end(arguments, state, None)
    model(WORDS[:2])
    assert steps(callback) == [7, 8]
    callback.close()
    massieu.watch(model).close()


def test_a_step_that_leaves_the_weights_alone_counts_as_it_does_for_the_trainer():
    model, callback = tiny(), module.WatchCallback(every=1, quantities="entropy")
    state = SimpleNamespace(global_step=0, epoch=None, log_history=[])
    callback.on_train_begin(SimpleNamespace(n_gpu=0), state, None, model=model)
    for _ in range(3):  # as with a scaler that skips
        model(WORDS[:2])
        callback.on_step_end(None, state, None)
    callback.on_train_end(None, state, None)
    assert steps(callback) == [0, 1, 2]


def test_it_is_a_callback_that_travels():
    callback = module.WatchCallback(every=7)
    assert isinstance(callback, transformers.TrainerCallback)
    assert type(pickle.loads(pickle.dumps(callback))) is module.WatchCallback


def test_copies_in_threads_are_refused():
    callback = module.WatchCallback()
    state = SimpleNamespace(global_step=0)
    with pytest.raises(UserError, match="threads on 2 devices"):
        callback.on_train_begin(SimpleNamespace(n_gpu=2), state, None, model=nn.Linear(2, 2))


@pytest.mark.parametrize(("log", "given"), [("run.jsonl", SimpleNamespace(log=print)), ("trainer", "mine")])
def test_a_trainer_is_given_where_it_logs(log, given):
    with pytest.raises(UserError, match="trainer must"):
        module.WatchCallback(log=log, trainer=given)


def test_without_transformers_a_sentence_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    module._callback.cache_clear()
    with pytest.raises(MissingPackageError, match=r"transformers.*\[train\]"):
        module.WatchCallback  # noqa: B018
    with pytest.raises(AttributeError, match="has no attribute 'WatchCallbak'"):
        module.WatchCallbak  # noqa: B018


def test_importing_the_module_imports_neither_transformers_nor_lightning():
    code = (
        "import sys, massieu, massieu.monitor.trainer, massieu.monitor.lightning;"
        "print([name for name in ('transformers', 'accelerate', 'lightning', 'pytorch_lightning')"
        " if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
