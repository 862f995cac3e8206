"""Runs that were too short, and standard errors of what a model is nearest to."""

import math

import pandas
import pytest
import torch

from massieu.context import LearningRecipe, compare, draw_pool, learn, separate, task_named
from massieu.context.duration import why_too_short
from massieu.context.models import LinearModel


def curve(own, best, blind=3.0, error=0.01):
    rows = [("model", 0, blind), ("ridge (Bayes)", 0, blind), ("model", 4, own), ("ridge (Bayes)", 4, best)]
    table = pandas.DataFrame(rows, columns=["predictor", "examples", "error"])
    return table.assign(standard_error=error)


def history(*errors):
    return pandas.DataFrame({"error": errors})


def test_a_run_whose_error_still_falls_far_from_the_best_is_too_short():
    sentence = why_too_short(history(2.0, 1.0, 0.9, 0.6), curve(0.6, 0.3))
    assert "lowered the error by 40 %, and it is 2 times that of ridge (Bayes)" in sentence


@pytest.mark.parametrize(
    ("errors", "own", "noise"),
    [
        ((2.0, 1.0, 0.9, 0.31), 0.31, 0.01),  # near the best
        ((2.0, 0.6, 0.6, 0.59), 0.6, 0.01),  # no longer falling
        ((2.0, 1.0, 0.9, 0.6), 0.6, 0.2),  # no further from the best than chance
        ((0.6,), 0.6, 0.01),  # one measurement says nothing about a fall
    ],
    ids=["near", "flat", "noisy", "single"],
)
def test_other_runs_are_not(errors, own, noise):
    assert why_too_short(history(*errors), curve(own, 0.3, error=noise)) is None


def test_a_run_that_gains_nothing_from_examples_is_too_short_unless_it_saw_few_functions():
    arguments = history(3.0), curve(2.9, 0.3)
    assert "its error is 2.9 after 4 of them and 3 without any" in why_too_short(*arguments)
    assert why_too_short(*arguments, is_pooled=True) is None


def test_a_few_steps_are_told_to_be_few_and_enough_are_not():
    task = task_named("linear", dim=2, noise=0.5)
    short = learn(task, LearningRecipe(model="linear", steps=90, batch=64, evaluate_every=15))
    assert short.too_short.startswith("The run was too short")
    assert short.to_dict()["facts"]["too_short"] == short.too_short
    assert learn(task, LearningRecipe(model="linear", steps=400, batch=256)).too_short is None


def test_standard_errors_of_cosines_are_those_over_tasks():
    task, draws = task_named("linear", dim=3, noise=0.5), torch.Generator().manual_seed(0)
    model = LinearModel(3, generator=draws)
    found = compare(model, task, task.draw(400, 7, draws)).sensitivities
    last = found[found.examples == found.examples.max()].set_index("predictor")
    assert (last.standard_error > 0).all()
    assert (last.behind >= 0).all()
    best = last.cosine.idxmax()
    assert last.behind[best] == 0
    assert last.behind_error[best] == 0
    assert last.behind.tolist() == pytest.approx((last.cosine.max() - last.cosine).tolist(), abs=1e-6)
    # Tasks of their own give cosines that differ by no more than their errors let expect.
    again = compare(model, task, task.draw(400, 7, draws)).sensitivities
    other = again[again.examples == again.examples.max()].set_index("predictor")
    spread = (last.standard_error**2 + other.standard_error**2) ** 0.5
    assert ((last.cosine - other.cosine).abs() < 5 * spread).all()


def test_the_error_of_a_share_is_that_over_tasks():
    """Halfway between both hypotheses the share is one half, with noise within a few of its standard errors."""
    task, draws = task_named("linear", dim=3, noise=0.5), torch.Generator().manual_seed(0)
    pool, noise = draw_pool(task, 4, draws), torch.Generator().manual_seed(1)
    from massieu.context import Ridge

    def mixture(prompts):
        half = 0.5 * Ridge(0.25)(prompts) + 0.5 * pool.predict(prompts)
        return half + 0.5 * torch.randn(half.shape, generator=noise, dtype=half.dtype)

    found = separate(mixture, task, pool, 6, draws).set_index("condition")
    for row in found.itertuples():
        assert 0 < row.share_error < 0.1
        assert math.isclose(row.share, 0.5, abs_tol=5 * row.share_error)
