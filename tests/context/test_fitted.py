"""Predictors fitted to each prefix, against the estimators alone."""

import re
import sys

import pytest
import torch
from torch.testing import assert_close

from massieu.checks import UserError, pip_install
from massieu.context import LeastSquares, Prompts, error_curve, task_named
from massieu.context.fitted import Boosting, Lasso, TrainedNetwork, Tree


def drawn(name="sparse", count=6, examples=13, **options):
    return task_named(name, **{"dim": 8, **options}).draw(
        count, examples, torch.Generator().manual_seed(0), torch.float64
    )


def estimators():
    from sklearn.ensemble import GradientBoostingRegressor
    from sklearn.linear_model import Lasso as Alone
    from sklearn.tree import DecisionTreeRegressor

    return [
        (Lasso(0.05), Alone(alpha=0.05, fit_intercept=False, max_iter=10_000)),
        (Tree(2), DecisionTreeRegressor(max_depth=2, random_state=0)),
        (Boosting(trees=5), GradientBoostingRegressor(n_estimators=5, random_state=0)),
    ]


@pytest.mark.parametrize("which", range(3))
def test_each_prefix_has_an_estimator_of_its_own(which):
    prompts = drawn()
    predictor, alone = estimators()[which]
    found = predictor(prompts, [0, 5, 12])
    assert bool((found[:, 0] == 0).all())
    for t in range(6):
        for place, i in ((1, 5), (2, 12)):
            alone.fit(prompts.inputs[t, :i], prompts.targets[t, :i])
            assert float(found[t, place]) == pytest.approx(alone.predict(prompts.queries[t, i : i + 1])[0])


def test_sparse_functions_are_found_before_there_are_enough_equations():
    prompts = drawn(dim=20, nonzero=2, count=40)
    table = error_curve(prompts, {"lasso": Lasso(0.05), "least squares": LeastSquares()}, [12])
    assert table.error[0] < 0.5 * table.error[1]


def test_fits_that_did_not_converge_are_counted():
    with pytest.warns(RuntimeWarning, match="^[1-6] of 6 fits of Lasso stopped before they converged"):
        Lasso(1e-4, steps=1)(drawn(), [0, 12])


def test_networks_of_tasks_are_trained_each_by_itself():
    prompts = drawn("network")
    changed = prompts.targets.clone()
    changed[1] += 1
    before, after = (
        TrainedNetwork(hidden=7, steps=20)(Prompts.of(prompts.inputs, y), [4, 12]) for y in (prompts.targets, changed)
    )
    same = torch.arange(6) != 1
    assert torch.equal(before[same], after[same])
    assert bool((before[1] != after[1]).all())


def test_networks_are_trained_as_torch_would():
    prompts = drawn("network", count=2)
    predictor = TrainedNetwork(hidden=7, steps=30, learning_rate=0.02)
    found = predictor(prompts, [12])
    x, y = prompts.inputs[:, :12].float(), prompts.targets[:, :12, None].float()
    start = predictor._start(x, y)
    for t in range(2):
        model = torch.nn.Sequential(torch.nn.Linear(8, 7), torch.nn.ReLU(), torch.nn.Linear(7, 1))
        with torch.no_grad():
            for parameter, weight in zip(model.parameters(), start, strict=True):
                parameter.copy_(weight[t].T.reshape(parameter.shape))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        for _ in range(30):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x[t]), y[t]).backward()
            optimizer.step()
        expected = model(prompts.queries[t, 12].float())
        # Sums in another order, thirty steps of Adam: 2e-6 was seen.
        assert_close(found[t], expected.detach().double(), rtol=1e-3, atol=1e-4)


def test_training_helps_and_needs_no_gradients_outside():
    prompts = drawn("network", dim=3, hidden=4, count=60, examples=41)
    with torch.no_grad():
        table = error_curve(prompts, {"none": TrainedNetwork(steps=0), "some": TrainedNetwork(steps=150)}, [40])
    assert table.error[1] < 0.5 * table.error[0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Lasso(0.0), "without a penalty take LeastSquares"),
        (lambda: Lasso(0.1, steps=0), "steps"),
        (lambda: Tree(0), "depth"),
        (lambda: Boosting(trees=0), "trees"),
        (lambda: Boosting(learning_rate=0.0), "learning_rate"),
        (lambda: TrainedNetwork(hidden=0), "hidden"),
        (lambda: TrainedNetwork(learning_rate=-1.0), "learning_rate"),
    ],
)
def test_what_cannot_be_fitted_is_refused_in_one_sentence(make, message):
    with pytest.raises(UserError, match=message):
        make()


@pytest.mark.parametrize(("module", "package"), [("sklearn.tree", "scikit-learn"), ("pandas", "pandas")])
def test_a_package_that_is_missing_is_named(module, package, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        ImportError, match=re.escape(f"needs {package}, which is not installed; {pip_install('verify')}")
    ):
        Tree()(drawn(), [5]) if package == "scikit-learn" else error_curve(drawn(), {})
