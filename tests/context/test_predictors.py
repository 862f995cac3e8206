"""Predictors against loops and closed forms, and the curves of their errors."""

import math

import numpy as np
import pandas
import pytest
import torch
from torch.testing import assert_close

from massieu.checks import UserError
from massieu.context import LeastSquares, Prompts, Ridge, bayes_predictor, error_curve, predictors, task_named
from massieu.context.gradient_predictors import GradientDescent, GradientDescentPlus, GradientStep
from massieu.context.predictors import Averaging, Neighbors
from massieu.context.tasks import OrthogonalQueries, Quadrants

PREDICTORS = [
    Ridge(0.3),
    Ridge(0.0),
    Ridge(0.3, prior=[2.0, 1.0, 0.5, 0.0]),
    LeastSquares(),
    Neighbors(3),
    Averaging(),
    GradientStep(noise=0.4),
    GradientDescent(3, step_size=0.2),
    GradientDescent(3),
    GradientDescentPlus(3, step_size=0.4, curvature=0.05),
]


def named(predictor):
    return type(predictor).__name__


def drawn(name="linear", count=20, examples=9, seed=0, **options):
    task = task_named(name, **{"dim": 4, "noise": 0.4, **options})
    return task.draw(count, examples, torch.Generator().manual_seed(seed), torch.float64)


def by_loop(prompts, weights):
    """Predictions of a function from the examples of one prefix to weights, task by task."""
    found = torch.zeros_like(prompts.targets)
    for t in range(prompts.tasks):
        for i in range(1, prompts.examples):
            w = weights(prompts.inputs[t, :i].numpy(), prompts.targets[t, :i].numpy())
            found[t, i] = float(prompts.queries[t, i].numpy() @ w)
    return found


@pytest.mark.parametrize(
    "prompts",
    [drawn(), Quadrants(task_named("linear", dim=4)).draw(9, 9, torch.Generator().manual_seed(1), torch.float64)],
    ids=["next", "own"],
)
def test_ridge_solves_its_normal_equations(prompts):
    prior = np.array([[2.0, 0.5, 0, 0], [0.5, 1, 0, 0], [0, 0, 1, 0.2], [0, 0, 0.2, 0.5]])
    expected = by_loop(prompts, lambda x, y: np.linalg.solve(x.T @ x + 0.3 * np.linalg.inv(prior), x.T @ y))
    assert_close(Ridge(0.3, prior)(prompts), expected, rtol=1e-10, atol=1e-10)
    assert not torch.allclose(Ridge(0.3)(prompts), expected, rtol=1e-2)


@pytest.mark.parametrize("penalty", [1e-20, 1e-12, 1e-7, 1e-4, 1.0, 1e6])
def test_penalties_of_all_sizes_agree_with_singular_values(penalty):
    prompts = drawn()

    def shrunk(x, y):
        left, s, right = np.linalg.svd(x, full_matrices=False)
        return right.T @ (s / (s**2 + penalty) * (left.T @ y))

    assert_close(Ridge(penalty)(prompts), by_loop(prompts, shrunk), rtol=1e-8, atol=1e-8)
    variances = torch.zeros_like(prompts.targets)
    for t in range(prompts.tasks):
        for i in range(prompts.examples):
            s, right = np.linalg.svd(prompts.inputs[t, :i].numpy())[1:] if i else (np.zeros(0), np.eye(4))
            along = right @ prompts.queries[t, i].numpy()
            known = np.concatenate([s**2, np.zeros(4 - len(s))])
            variances[t, i] = float((along**2 * penalty / (known + penalty)).sum())
    assert_close(Ridge(penalty).variance(prompts), variances, rtol=1e-8, atol=1e-8)


def test_a_singular_prior_is_the_limit_of_priors():
    prompts = drawn()
    singular, near = (Ridge(0.3, [1.0, 2.0, 0.5, small])(prompts) for small in (0.0, 1e-12))
    assert_close(singular, near, rtol=1e-8, atol=1e-9)


def test_least_squares_has_minimum_norm():
    prompts = drawn()
    expected = by_loop(prompts, lambda x, y: np.linalg.pinv(x) @ y)
    assert_close(LeastSquares()(prompts), expected, rtol=1e-8, atol=1e-8)
    # By pivoted orthogonal factors the limit of ridge is reached to many digits.
    assert_close(Ridge(1e-9)(prompts), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("predictor", [LeastSquares(), Ridge(0.0), Ridge(1e-24)], ids=["plain", "none", "tiny"])
def test_repeated_inputs_do_not_disturb_least_squares(predictor):
    prompts = drawn(noise=0.0)
    inputs = prompts.inputs[:, [0, 0, 1, 1, 2, 2, 3, 3, 4]]
    targets = prompts.targets[:, [0, 0, 1, 1, 2, 2, 3, 3, 4]]
    found = predictor(Prompts.of(inputs, targets))
    assert_close(found[:, -1], targets[:, -1], rtol=1e-8, atol=1e-8)
    assert_close(found[:, 2:7:2], LeastSquares()(prompts)[:, 1:4], rtol=1e-8, atol=1e-8)


def test_neighbors_are_those_of_scikit_learn():
    from sklearn.neighbors import KNeighborsRegressor

    prompts = drawn()
    found = Neighbors(3)(prompts)
    for t in range(prompts.tasks):
        for i in range(1, prompts.examples):
            model = KNeighborsRegressor(min(3, i)).fit(prompts.inputs[t, :i], prompts.targets[t, :i])
            assert float(found[t, i]) == pytest.approx(model.predict(prompts.queries[t, i : i + 1])[0])


@pytest.mark.parametrize("predictor", PREDICTORS, ids=named)
def test_predictions_use_earlier_examples_and_no_others(predictor):
    prompts = drawn()
    inputs, targets = prompts.inputs.clone(), prompts.targets.clone()
    inputs[:, 6:] = -inputs[:, 6:]
    targets[:, 5:] += 1
    changed = Prompts(inputs, targets, prompts.queries, prompts.answers)
    before, after = predictor(prompts), predictor(changed)
    assert_close(before[:, :6], after[:, :6], rtol=1e-9, atol=1e-9)
    assert bool((before[:, 6:] - after[:, 6:]).abs().amax(0).gt(1e-3).all())
    assert bool((before[:, 0] == 0).all())


@pytest.mark.parametrize("predictor", PREDICTORS, ids=named)
def test_some_lengths_are_a_part_of_all(predictor):
    prompts = drawn()
    assert_close(predictor(prompts, [7, 0, 2]), predictor(prompts)[:, [7, 0, 2]], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("predictor", PREDICTORS, ids=named)
def test_outputs_are_predicted_each_by_itself(predictor):
    prompts = drawn(outputs=3)
    found = predictor(prompts)
    assert found.shape == (20, 9, 3)
    for k in range(3):
        assert_close(found[..., k], predictor(Prompts.of(prompts.inputs, prompts.targets[..., k])))


@pytest.mark.parametrize("predictor", PREDICTORS, ids=named)
def test_chunks_of_tasks_do_not_change_predictions(predictor, monkeypatch):
    prompts = drawn()
    whole = predictor(prompts)
    monkeypatch.setattr(predictors, "CHUNK", 3 * 9 * 16)
    assert_close(predictor(prompts), whole)


def curve(prompts, predictor, lengths, **options):
    table = error_curve(prompts, {"it": predictor}, lengths, **options)
    return table.error.to_numpy(), table.standard_error.to_numpy()


LENGTHS = [5, 10, 15, 20, 40]


@pytest.mark.parametrize(
    ("predictor", "closed"),
    [
        (LeastSquares(), lambda d, i: max(0, 1 - i / d)),
        (Averaging(), lambda d, i: (d + 1) / i),
        (GradientStep(), lambda d, i: (d + 1) / (i + d + 1)),
    ],
    ids=["least squares", "averaging", "one step"],
)
def test_errors_are_those_of_closed_forms(predictor, closed):
    prompts = drawn(dim=20, noise=0.0, count=6000, examples=41)
    error, spread = curve(prompts, predictor, LENGTHS, per_dim=True)
    expected = np.array([closed(20, i) for i in LENGTHS])
    assert (np.abs(error - expected) < 4 * spread + 1e-12).all()
    # The control: the closed form after three more examples is another number.
    other = np.array([closed(20, i + 3) for i in LENGTHS])
    assert (np.abs(error - other) > 4 * spread + 1e-12).any()


def test_three_neighbors_err_as_measured_before():
    prompts = drawn(dim=20, noise=0.0, count=20_000, examples=41)
    error, spread = curve(prompts, Neighbors(3), [10, 40], per_dim=True)
    assert error == pytest.approx([0.923, 0.693], abs=0.03)
    assert spread.max() < 0.012


def test_noisy_least_squares_and_ridge_at_ten_examples():
    prompts = drawn(dim=5, noise=0.5, count=20_000, examples=11)
    error, spread = curve(prompts, LeastSquares(), [10])
    assert abs(error[0] - 0.25 * 5 / 4) < 4 * spread[0]
    error, spread = curve(prompts, Ridge(0.25), [10])
    assert abs(error[0] - 0.2674) < 4 * spread[0]
    assert float(Ridge(0.25).variance(prompts, [10]).mean()) == pytest.approx(0.2674, abs=0.003)


def test_the_median_is_finite_where_the_mean_of_least_squares_is_not():
    prompts = drawn(dim=5, noise=0.5, count=4000, examples=7)
    mean, _ = curve(prompts, LeastSquares(), [5])
    median, spread = curve(prompts, LeastSquares(), [5], statistic="median")
    assert mean[0] > 20 * median[0]
    assert 0.5 < median[0] < 2
    assert 0 < spread[0] < 0.1 * median[0]


@pytest.mark.parametrize(
    "options", [{}, {"prior": [3.0, 1.0, 0.3, 0.1]}, {"covariance": [2.0, 1.0, 1.0, 0.2]}, {"noise": 0.0}]
)
def test_the_bayes_predictor_beats_all_others(options):
    task = task_named("linear", **{"dim": 4, "noise": 0.6, **options})
    prompts = task.draw(6000, 9, torch.Generator().manual_seed(3), torch.float64)
    best = (bayes_predictor(task)(prompts) - prompts.answers).square()
    rivals = [Averaging(), Neighbors(3), GradientDescent(2), Ridge(0.05), Ridge(3.0), LeastSquares()]
    for rival in rivals[:-1] if task.noise == 0 else rivals:
        other = (rival(prompts) - prompts.answers).square()
        for i in (2, 4, 8):
            gap = other[:, i] - best[:, i]
            assert gap.mean() > -3 * gap.std() / math.sqrt(len(gap))
        assert gap.mean() > 0  # after eight examples all differ by more than chance


def test_the_posterior_variance_is_the_error_of_the_bayes_predictor():
    task = task_named("linear", dim=4, noise=0.6, prior=[3.0, 1.0, 0.3, 0.0])
    prompts = Quadrants(task).draw(20_000, 9, torch.Generator().manual_seed(0), torch.float64)
    predictor = bayes_predictor(task)
    error, spread = curve(prompts, predictor, None)
    variance = predictor.variance(prompts).mean(0).numpy()
    assert (np.abs(error - variance) < 4.5 * spread).all()
    wrong = Ridge(2 * 0.36, task.prior).variance(prompts).mean(0).numpy()
    assert (np.abs(error - wrong) > 4.5 * spread)[4:].all()


def test_nothing_is_known_of_orthogonal_queries():
    task = OrthogonalQueries(task_named("linear", dim=6))
    prompts = task.draw(50, 6, torch.Generator().manual_seed(0), torch.float64)
    for predictor in (Ridge(0.1), LeastSquares(), Averaging(), GradientDescent(4)):
        assert float(predictor(prompts).abs().max()) < 1e-9
    assert float(LeastSquares()(Prompts.of(prompts.inputs, prompts.targets)).abs().max()) > 1


def test_curves_compare_predictors_and_models():
    prompts = drawn(outputs=2)
    table = error_curve(prompts, {"zero": lambda p: torch.zeros_like(p.targets), "ridge": Ridge(0.16)}, [0, 8])
    assert isinstance(table, pandas.DataFrame)
    assert table.columns.tolist() == ["predictor", "examples", "error", "standard_error"]
    assert table.predictor.tolist() == ["zero", "zero", "ridge", "ridge"]
    assert table.examples.tolist() == [0, 8, 0, 8]
    expected = prompts.answers[:, 8].square().sum(-1)
    assert table.error[1] == pytest.approx(float(expected.mean()))
    assert table.standard_error[1] == pytest.approx(float(expected.std()) / math.sqrt(20))
    assert table.error[0] == table.error[2]
    per_dim = error_curve(prompts, {"ridge": Ridge(0.16)}, [8], per_dim=True)
    assert per_dim.error[0] == pytest.approx(table.error[3] / 4)


def test_the_standard_error_of_a_median_is_that_of_repeated_draws():
    medians, spreads = [], []
    for seed in range(60):
        prompts = drawn(count=300, examples=2, seed=seed)
        error, spread = curve(prompts, Averaging(), [1], statistic="median")
        medians.append(error[0])
        spreads.append(spread[0])
    assert np.mean(spreads) == pytest.approx(np.std(medians), rel=0.35)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Ridge(-1.0), "penalty"),
        (lambda: Ridge(1.0, prior=[1.0, 2.0])(drawn()), "prior"),
        (lambda: Ridge(0.0).variance(drawn()), "variance needs a positive penalty"),
        (lambda: Neighbors(0), "count"),
        (lambda: Averaging()(drawn(), [9]), "lengths"),
        (lambda: Averaging()(drawn(), []), r"at least one, got \[\]"),
        (lambda: bayes_predictor(task_named("sparse", dim=4)), "task"),
        (lambda: bayes_predictor(task_named("tree", dim=4)), "got DecisionTree"),
        (lambda: error_curve(drawn(), {}, statistic="mode"), "statistic"),
        (lambda: error_curve(drawn(), {"mine": lambda p: p.targets[:, :2]}), "mine"),
    ],
)
def test_what_cannot_predict_is_refused_in_one_sentence(make, message):
    with pytest.raises(UserError, match=message):
        make()


def test_predictors_without_names_are_one_sentence():
    with pytest.raises(UserError, match="predictors"):
        error_curve(drawn(dim=2, noise=0.5, count=4, examples=3), Ridge(0.25), [2])
