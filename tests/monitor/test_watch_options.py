"""Options of a watch are checked when they are given, by every caller in the same way."""

import pytest

import massieu
from massieu.checks import UserError
from massieu.monitor import lightning, trainer
from massieu.monitor.distributed import watch_distributed
from massieu.monitor.watch_options import WatchOptions


def distributed(**options):
    return watch_distributed(massieu.nn.Transformer(16, 1, 2, vocabulary=10), **options)


@pytest.mark.parametrize("make", [lightning._LightningEvents, trainer._TrainerEvents, distributed])
def test_an_unknown_option_is_refused_with_the_nearest_name(make):
    with pytest.raises(UserError, match=r"did you mean quantities\?"):
        make(quantites="entropy")


@pytest.mark.parametrize("make", [lightning._LightningEvents, trainer._TrainerEvents])
@pytest.mark.parametrize("name", ["start", "gather", "training"])
def test_options_that_a_callback_sets_are_refused(make, name):
    with pytest.raises(UserError, match=f"got '{name}'"):
        make(**{name: 0})


@pytest.mark.parametrize("options", [{"every": 0}, {"quantities": "entropie"}, {"rules": [1]}])
def test_a_callback_checks_its_options_before_training(options):
    with pytest.raises(UserError):
        trainer._TrainerEvents(**options)


def test_quantities_may_come_from_an_iterator():
    options = WatchOptions(quantities=iter(["entropy", "peak"]), rules=[])
    assert options.wanted == options.wanted == {"entropy", "peak"}


def test_logs_by_name_are_separated_from_the_others():
    options = WatchOptions(log=["trainer", "run.jsonl", ("run.csv", print)])
    assert options.logs_without("trainer") == (["run.jsonl", ("run.csv", print)], True)
    assert options.files == ["trainer", "run.jsonl", "run.csv"]
