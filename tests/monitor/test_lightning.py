"""Lightning's events, and Lightning itself where it is installed."""

from __future__ import annotations

import importlib
import sys
import types
import warnings
from types import SimpleNamespace

import pytest
import torch
from monitor.expected_messages import logs
from torch import nn

import massieu
from massieu.checks import MissingPackageError, UserError
from massieu.monitor import lightning as module

WORDS = torch.randint(10, (2, 8), generator=torch.Generator().manual_seed(0))


def small() -> nn.Module:
    torch.manual_seed(0)
    return massieu.nn.Transformer(16, num_layers=2, num_heads=4, vocabulary=10)


class Task(nn.Module):
    """What a LightningModule looks like to a callback."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        self.loss = nn.CrossEntropyLoss()


class Base:
    """What a callback of Lightning inherits from."""


@pytest.fixture
def stub(monkeypatch):
    package = types.ModuleType("pytorch_lightning")
    package.Callback = Base
    monkeypatch.setitem(sys.modules, "pytorch_lightning", package)
    for name in ("lightning", "lightning.pytorch"):
        monkeypatch.setitem(sys.modules, name, None)
    return package


def fit(callback, task, batches, accumulate=1, start=0, end=True, outputs=lambda loss: None, **more):
    """The events of a training, in Lightning's order."""
    trainer = SimpleNamespace(global_step=start, **more)
    optimizer = torch.optim.SGD(task.parameters(), lr=0.1)
    callback.on_train_start(trainer, task)
    for batch in range(batches):
        loss = task.net(WORDS).square().mean()
        loss.backward()
        if (batch + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
            trainer.global_step += 1
        callback.on_train_batch_end(trainer, task, outputs(loss.detach()), WORDS, batch)
    if end:
        callback.on_train_end(trainer, task)
    return [reading.step for reading in callback.watched.readings]


def test_it_is_a_callback_of_the_lightning_that_is_there(stub):
    assert issubclass(module.WatchCallback, Base)
    assert module.WatchCallback is module.WatchCallback
    assert module.WatchCallback.__doc__ == module._LightningEvents.__doc__


@pytest.mark.parametrize("outputs", [lambda loss: loss, lambda loss: {"loss": loss, "more": 1}])
def test_the_loss_of_the_training_step_is_recorded(stub, tmp_path, outputs):
    path, seen = tmp_path / "run.csv", []
    callback = module.WatchCallback(every=2, log=path)

    def kept(loss):
        seen.append(loss.item())
        return outputs(loss)

    assert fit(callback, Task(net=small()), 3, outputs=kept) == [0, 2]
    assert [row["loss"] for row in massieu.monitor.read_log(path).rows] == [seen[0], seen[2]]


def test_steps_are_updates_and_a_continued_run_keeps_its_numbers(stub, tmp_path):
    path = tmp_path / "run.jsonl"
    callback, task = module.WatchCallback(every=2, log=path), Task(net=small())
    assert fit(callback, task, 6, accumulate=2) == [0, 2]
    assert not task.net._forward_hooks
    assert fit(callback, task, 3, start=3) == [4]
    assert len(path.read_text().splitlines()) == 3


def test_two_updates_in_a_batch_are_one_step(stub):
    callback, task, trainer = module.WatchCallback(every=1), Task(net=small()), SimpleNamespace(global_step=0)
    optimizer = torch.optim.SGD(task.parameters(), lr=0.1)
    callback.on_train_start(trainer, task)
    for _ in range(2):
        for _ in range(2):
            task.net(WORDS).square().mean().backward()
            optimizer.step()
            trainer.global_step += 1
        callback.on_train_batch_end(trainer, task)
    assert [reading.step for reading in callback.watched.readings] == [0, 1]


def test_loggers_of_the_trainer_get_the_figures(stub):
    seen = []
    logger = SimpleNamespace(log_metrics=lambda numbers, step: seen.append((step, numbers)))
    callback = module.WatchCallback(every=1, log="lightning", quantities="entropy")
    fit(callback, Task(net=small()), 2, loggers=[logger])
    assert [step for step, _ in seen] == [0, 1]
    series = callback.watched.readings[1].series()
    assert seen[1][1]["massieu/entropy/layer01/median"] == series["entropy/layer01/median"]


def test_a_logger_of_tensorboard_gets_flags_as_sentences_and_others_do_not_mind(stub):
    texts = []
    board = SimpleNamespace(add_text=lambda tag, words, step: texts.append((tag, step, words)))
    loggers = [
        SimpleNamespace(log_metrics=lambda numbers, step: None, experiment=board),
        SimpleNamespace(log_metrics=lambda numbers, step: None),
    ]
    low = massieu.monitor.Rule("low entropy", "entropy", "<", 10.0, 11.0, "it is made to be raised", "nobody")
    callback = module.WatchCallback(every=1, log="lightning", rules=[low], console=False)
    fit(callback, Task(net=small()), 2, loggers=loggers)
    ((tag, step, words),) = texts
    assert (tag, step) == ("massieu/flags", 0)
    assert words.startswith("low entropy raised in layer00 (heads 0, 1, 2, 3), layer01 (heads 0, 1, 2, 3): it is made")


def test_a_training_that_fails_leaves_nothing_behind(stub):
    callback, task = module.WatchCallback(every=1), Task(net=small())
    fit(callback, task, 1, end=False)
    callback.on_exception(None, task, RuntimeError())
    assert not task.net._forward_hooks
    massieu.watch(task.net).close()


def test_a_part_that_is_not_called_is_logged_once(stub):
    callback, task = module.WatchCallback(every=1, module="other"), Task(net=small(), other=small())
    with logs("a step ended without a call of other") as logged:
        assert fit(callback, task, 3) == []
    assert len(logged) == 1


def test_which_part_is_watched_must_be_clear(stub):
    trainer, several = SimpleNamespace(global_step=0), Task(net=small(), other=small())
    with pytest.raises(UserError, match="got net, other"):
        module.WatchCallback().on_train_start(trainer, several)
    with pytest.raises(UserError, match="got none"):
        module.WatchCallback().on_train_start(trainer, Task())
    with pytest.raises(UserError, match="got 'nte'"):
        module.WatchCallback(module="nte").on_train_start(trainer, several)
    wrapped = SimpleNamespace(global_step=0, strategy=SimpleNamespace(model=object()))
    with pytest.raises(UserError, match="several processes"):
        module.WatchCallback(module="").on_train_start(wrapped, several)
    callback = module.WatchCallback(module="")
    callback.on_train_start(trainer, several)
    assert several._forward_hooks
    callback.on_train_end(trainer, several)


def test_without_lightning_a_sentence_says_so(monkeypatch):
    for name in ("lightning", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingPackageError, match="lightning"):
        module.WatchCallback  # noqa: B018
    with pytest.raises(AttributeError, match="has no attribute 'WatchCallbak'"):
        module.WatchCallbak  # noqa: B018


def lightning():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in module.PACKAGES:
            try:
                return importlib.import_module(name)
            except ImportError:
                continue
    pytest.skip("lightning is not installed")


@pytest.mark.filterwarnings("ignore")
def test_lightning_itself_is_watched(tmp_path):
    package = lightning()

    class Real(package.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = small()

        def training_step(self, batch, index):
            return self.net(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def run(callback, **options):
        trainer = package.Trainer(
            **{"accelerator": "cpu", "callbacks": [callback], "logger": False, "default_root_dir": tmp_path},
            **{"enable_progress_bar": False, "enable_model_summary": False, "accumulate_grad_batches": 2},
            max_steps=options.pop("max_steps"),
        )
        trainer.fit(Real(), torch.utils.data.DataLoader(WORDS.repeat(8, 1), batch_size=2), **options)
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        return [reading.step for reading in callback.watched.readings]

    assert run(module.WatchCallback(every=2), max_steps=3) == [0, 2]
    assert run(module.WatchCallback(every=2), max_steps=6, ckpt_path=tmp_path / "last.ckpt") == [4]
