"""A model beside predictors, and the predictors that a task is compared with."""

import math

import pytest
import torch
from torch.testing import assert_close

from massieu.checks import UserError
from massieu.context import (
    LearningRecipe,
    LinearModel,
    Ridge,
    compare,
    error_curve,
    learn,
    optimal_linear_attention,
    predictors_for,
    task_named,
)
from massieu.context.baselines import fitted_for
from massieu.context.gradient_predictors import GradientStep, TunedDescent
from massieu.context.learner_comparison import affordable, sensitivities
from massieu.context.robustness import errors_under_shifts


@pytest.fixture
def draws():
    return torch.Generator().manual_seed(0)


def model_of(matrix):
    """A linear model whose weights are set so that its matrix is the one given."""
    dim = len(matrix)
    model = LinearModel(dim).double()
    layer = model.attention
    with torch.no_grad():
        for projection in (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj):
            projection.weight.zero_()
        layer.q_proj.weight[:dim, :dim] = matrix
        layer.k_proj.weight[:dim, :dim] = torch.eye(dim)
        layer.v_proj.weight[-1, -1] = 1.0
        layer.out_proj.weight[-1, -1] = -1.0
    return model


def test_the_closed_form_as_a_model_is_found_to_be_the_closed_form(draws):
    task = task_named("linear", dim=3, noise=0.5, covariance=[2.0, 1.0, 0.5])
    best = optimal_linear_attention(task.covariance, task.prior, noise=0.5, examples=6)
    found = compare(model_of(best.matrix), task, task.draw(200, 7, draws, torch.float64))
    row = found.sensitivities[found.sensitivities.predictor == "best linear layer"]
    assert row.examples.tolist() == [1, 2, 3, 4, 5, 6]
    assert row.least_cosine.min() > 1 - 1e-12
    assert row.difference.max() < 1e-12
    assert found.ratio("best linear layer") == pytest.approx(1, abs=1e-12)
    assert found.best_cosine == pytest.approx(1, abs=1e-12)
    assert_close(torch.tensor(found.slopes["model"]), torch.tensor(found.slopes["best linear layer"]))
    others = found.sensitivities[found.sensitivities.predictor == "gradient step"]
    assert others.cosine.max() < 0.99


def test_slow_predictors_are_measured_on_few_tasks_after_few_numbers_of_examples(draws):
    task = task_named("linear", dim=2, noise=0.5)
    reported = []
    found = compare(
        LinearModel(2, generator=draws),
        task,
        task.draw(40, 7, draws),
        fitted=6,
        progress=lambda what, done, total: reported.append((what, done, total)),
    )
    curve = found.curve.set_index("predictor")
    for name, tasks in {"Lasso": 6, "tree": 6, "two-layer network": 6, "boosting": 2}.items():
        assert curve.loc[name, "examples"].tolist() == [2, 4, 6]
        assert set(curve.loc[name, "tasks"]) == {tasks}
    assert curve.loc["model", "examples"].tolist() == list(range(7))
    assert set(curve.loc["model", "tasks"]) == {40}
    assert [done for _, done, _ in reported] == list(range(reported[0][2]))


def test_many_numbers_of_examples_are_thinned_and_fewer_tasks_compared(draws):
    task = task_named("linear", dim=2, noise=0.5)
    found = compare(LinearModel(2, generator=draws), task, task.draw(5, 101, draws))
    for _, rows in found.curve.groupby("predictor"):
        assert rows.examples.tolist() == [0, *range(5, 101, 5)]
    assert found.sensitivities.examples.max() == 100
    assert affordable(10, 20) >= 20480
    assert 1024 <= affordable(20, 100) < 2048
    assert affordable(1000, 1000) == 1024


def test_on_shifted_prompts_a_step_with_the_best_step_size_fails_where_ridge_does_not(draws):
    task = task_named("linear", dim=3, noise=0.5)
    best = optimal_linear_attention(task.covariance, task.prior, noise=0.5, examples=12)
    table = errors_under_shifts(model_of(best.matrix).float(), task, 12, draws)
    errors = table.pivot(index="shift", columns="predictor", values="error")
    assert list(errors.columns) == ["least squares", "model", "ridge (Bayes)", "zero"]
    assert errors.loc["none", "model"] == pytest.approx(best.loss, rel=0.15)
    # A rate for inputs of variance one overshoots on inputs of nine; Bayes does not depend on how inputs are drawn.
    assert errors.loc["scale 3", "model"] > 5 * errors.loc["scale 3", "zero"]
    assert errors.loc["scale 3", "ridge (Bayes)"] == pytest.approx(errors.loc["none", "ridge (Bayes)"], rel=0.2)
    assert (errors["ridge (Bayes)"] <= errors["least squares"] * 1.001).all()
    # What examples say does not help at a query that is orthogonal to them.
    assert errors.loc["orthogonal", "ridge (Bayes)"] == pytest.approx(errors.loc["orthogonal", "zero"], rel=1e-6)
    assert set(table[table["shift"] == "orthogonal"].examples) == {2}


def test_every_predictor_of_the_package_is_among_those_of_a_linear_task():
    task = task_named("linear", dim=5, noise=0.5)
    assert list(predictors_for(task)) == [
        *("ridge (Bayes)", "least squares", "gradient step", "5 gradient steps", "GD++ of 3 layers", "averaging"),
        "3 neighbors",
    ]
    assert list(fitted_for(task)) == ["Lasso", "tree", "boosting", "two-layer network"]
    assert "Lasso" not in fitted_for(task_named("tree", dim=5))


def test_the_gradient_step_knows_noise_covariance_and_prior_of_its_task(draws):
    task = task_named("linear", dim=4, noise=1.0, covariance=[3.0, 1.0, 1.0, 0.3], prior=[0.2, 1.0, 2.0, 4.0])
    prompts = task.draw(20_000, 7, draws, torch.float64)
    predictors = {"own": predictors_for(task)["gradient step"], "plain": GradientStep()}
    errors = error_curve(prompts, predictors, [6]).set_index("predictor")["error"]
    best = optimal_linear_attention(task.covariance, task.prior, noise=1.0, examples=6)
    assert errors["own"] == pytest.approx(best.step_loss, rel=0.05)
    assert errors["plain"] > 1.1 * errors["own"]


def test_rates_for_sparse_weights_come_from_their_second_moments(draws):
    task = task_named("sparse", dim=6, nonzero=2, noise=1.0)
    step, several = (predictors_for(task)[name] for name in ("gradient step", "5 gradient steps"))
    assert float(step.setting["prior"][0, 0]) == pytest.approx(1 / 3)
    assert several.noise == pytest.approx(math.sqrt(3))


def test_inputs_of_several_sizes_get_rates_from_their_context_and_no_moving_inputs():
    names = predictors_for(task_named("linear", dim=3, covariance=[4.0, 1.0, 1.0]))
    assert "GD++ of 3 layers" not in names
    assert type(names["5 gradient steps"]).__name__ == "GradientDescent"


def test_ridge_on_squares_is_best_for_quadratic_functions(draws):
    task = task_named("quadratic", dim=3, noise=0.5)
    prompts = task.draw(4000, 13, draws, torch.float64)
    name, best = next(iter(predictors_for(task).items()))
    errors = error_curve(prompts, {name: best, "ridge": Ridge(0.25)}, [12]).error.tolist()
    features = prompts.inputs[:, :12].square() / 3**0.5
    query = prompts.inputs[:, 12].square() / 3**0.5
    inverse = torch.linalg.inv(features.mT @ features + 0.25 * torch.eye(3).double())
    assert errors[0] == pytest.approx(0.25 * float(torch.einsum("ti,tij,tj->t", query, inverse, query).mean()), rel=0.1)
    assert errors[1] > 5 * errors[0]


def test_several_steps_with_the_best_step_sizes_have_the_losses_that_the_search_promises(draws):
    prompts = task_named("linear", dim=5, noise=0.5).draw(20_000, 11, draws, torch.float64)
    plain, moving = TunedDescent(3, 0.5, samples=4000), TunedDescent(3, 0.5, moving=True, samples=4000)
    for predictor in (plain, moving):
        table = error_curve(prompts, {"descent": predictor}, [0, 3, 10])
        for length, error, spread in table[["examples", "error", "standard_error"]].values[1:]:
            best = predictor.sizes(int(length), 5)
            assert best.converged
            assert abs(error - best.loss) < 4 * math.hypot(spread, best.standard_error)
    assert moving.sizes(10, 5).loss < 0.6 * plain.sizes(10, 5).loss


def test_descent_with_best_step_sizes_can_be_asked_where_slopes_are_off(draws):
    prompts = task_named("linear", dim=2).draw(5, 4, draws)
    with torch.no_grad():
        found = TunedDescent(2)(prompts)
    assert_close(found, TunedDescent(2)(prompts))
    assert_close(found[:, 0], torch.zeros(5))


def test_sensitivities_of_descent_are_finite_differences(draws):
    prompts = task_named("linear", dim=2).draw(5, 4, draws, torch.float64)
    predictor = TunedDescent(2, moving=True)
    moved = prompts.inputs.clone()
    moved[:, -1, 0] += 1.0  # the prediction is linear in the query
    expected = predictor(type(prompts)(prompts.inputs, prompts.targets, moved, prompts.answers)) - predictor(prompts)
    assert_close(sensitivities(predictor, prompts)[:, 0], expected[:, -1])


@pytest.mark.parametrize("seed", [0, 2])
def test_a_linear_layer_of_two_dimensions_does_not_stop_at_a_product_of_rank_one(seed):
    found = learn(
        task_named("linear", dim=2, noise=0.5), LearningRecipe(model="linear", steps=300, batch=256, seed=seed)
    )
    assert found.comparison.matrices["loss"] < 1.05 * found.comparison.matrices["best loss"]
    assert found.comparison.best_cosine > 0.98


@pytest.mark.parametrize(
    ("build", "reported"),
    [
        (lambda: TunedDescent(0), "steps"),
        (lambda: TunedDescent(2, -1.0), "noise"),
        (lambda: TunedDescent(2, samples=0), "samples"),
    ],
)
def test_bad_settings_of_descent_are_answered_with_a_sentence(build, reported):
    with pytest.raises(UserError, match=reported):
        build()


def test_a_negative_number_of_tasks_for_slow_predictors_is_answered_with_a_sentence(draws):
    task = task_named("linear", dim=2)
    with pytest.raises(UserError, match="fitted"):
        compare(LinearModel(2), task, task.draw(5, 3, draws), fitted=-1)
