"""Runs that learn and runs that fail: flags come before the loss diverges, and in healthy runs there are none."""

import math
import sys
from functools import cache

import pytest
import torch

from massieu import assets
from massieu.checks import MissingPackageError, UserError
from massieu.claims.training_runs import TrainingRun, alarms, training_run, training_tokens
from massieu.monitor import entropy_floor

pytest.importorskip("tokenizers")
SEEDS = range(5)
ATTENTION = {"entropy collapse", "logit growth"}


@cache
def stable(seed):
    return training_run("stable", seed, every=4)


@cache
def unstable(seed):
    return training_run("unstable", seed)


def floored(weight):
    return lambda attention: weight * entropy_floor(attention, 0.8, normalized=True)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_stable_run_learns_more_than_how_often_words_occur_and_raises_no_flag(seed):
    run = stable(seed)
    share = torch.bincount(training_tokens()).double() / len(training_tokens())
    unigram = float(torch.special.entr(share).sum())
    assert sum(run.losses[-10:]) / 10 < unigram - 0.5
    assert run.flags == ()
    assert run.diverged_at is None
    assert len(run.losses) == 120
    assert [reading.step for reading in run.readings] == list(range(0, 120, 4))


def test_unstable_runs_diverge_and_flags_of_attention_come_before_it():
    early = []
    for seed in SEEDS:
        run = unstable(seed)
        assert run.losses[-1] > 2 * min(run.losses)
        assert run.diverged_at == len(run.losses) - 1
        assert all(loss <= 2 * min(run.losses[: step + 1]) for step, loss in enumerate(run.losses[:-1]))
        first = min(step for step, flag in run.flags if flag.name in ATTENTION)
        early.append(first < run.diverged_at)
    assert sum(early) >= 4


def test_flags_of_attention_come_before_a_loss_that_rises():
    for seed in SEEDS:
        found = alarms(unstable(seed))
        assert min(found[name] for name in ATTENTION) < found["loss above 1.2 minima"] < found["divergence"]


@pytest.mark.parametrize("seed", [0, 1])
def test_a_floor_under_the_entropy_prevents_the_divergence(seed):
    run = training_run("unstable", seed, every=10, penalty=floored(10.0))
    assert run.diverged_at is None
    assert len(run.losses) == 120
    assert run.losses[-1] < min(unstable(seed).losses)


def test_a_floor_of_no_weight_changes_nothing():
    assert training_run("unstable", 0, every=20, penalty=floored(0.0)).losses == unstable(0).losses


def test_an_exploding_run_diverges_unannounced_with_diffuse_attention_and_a_floor_changes_nothing():
    run = training_run("exploding")
    _, entropy = run.series("normalized_entropy", torch.amin)
    assert min(entropy[:-1]) > 0.9
    assert [flag for step, flag in run.flags if step < run.diverged_at] == []
    assert training_run("exploding", every=20, penalty=floored(10.0)).losses[:-1] == run.losses[:-1]


def test_readings_leave_a_run_as_it_is_and_seeds_make_it():
    often, seldom = (training_run("stable", 7, every=every, steps=14) for every in (1, 5))
    assert often.losses == seldom.losses
    assert often.gradient_norms == seldom.gradient_norms
    assert training_run("stable", 8, every=5, steps=14).losses != seldom.losses


def test_the_text_is_the_embedded_one():
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(assets.MODEL)
    texts = tokenizer.decode(training_tokens()).split("<|endoftext|>")
    assert texts == [*assets.documents(), ""]


@pytest.mark.parametrize(
    ("losses", "step"),
    [
        ((7.0, 6.0, 11.9), None),
        ((7.0, 6.0, 12.1, 5.0), 2),
        ((7.0, math.nan), 1),
        ((math.inf,), 0),
        ((3.0, 5.9, 6.1), 2),
    ],
)
def test_a_run_diverges_at_twice_its_smallest_loss_or_where_it_is_not_finite(losses, step):
    assert TrainingRun("stable", 0, losses, (), ()).diverged_at == step


def test_alarms_compare_with_what_came_before():
    run = TrainingRun("stable", 0, (6.0, 7.1, 5.0, 6.1), (1.0, 3.0, 2.0, 19.0, 21.0, 29.0), ())
    assert alarms(run) == {"loss above 1.2 minima": 3, "gradient above 10 medians": None, "divergence": None}
    run = TrainingRun("stable", 0, (), (1.0, 3.0, 2.0, 19.0, 21.0, 29.0, 111.0), ())
    assert alarms(run)["gradient above 10 medians"] == 6


def test_the_table_has_a_row_for_each_step():
    pytest.importorskip("pandas")
    run = stable(0)
    table = run.table
    assert table["loss"].tolist() == list(run.losses)
    assert table["score_max"].notna().sum() == len(run.readings)
    reading = run.readings[3]
    medians = reading.heads["normalized_entropy"].sort(-1).values[:, 1:3].mean(-1)
    assert table["normalized_entropy"][reading.step] == pytest.approx(float(medians.min()))


def test_another_kind_is_refused():
    with pytest.raises(UserError):
        training_run("wild")


@pytest.mark.parametrize("steps", [12, 0.5, True])
def test_a_run_shorter_than_its_warm_up_is_refused(steps):
    with pytest.raises(UserError):
        training_run("stable", steps=steps)


@pytest.mark.parametrize("seed", ["a", 0.5, True, -1])
def test_a_seed_is_a_whole_number(seed):
    with pytest.raises(UserError):
        training_run("stable", seed=seed)


def test_a_missing_tokenizer_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingPackageError, match="tokenizers"):
        training_tokens.__wrapped__()
