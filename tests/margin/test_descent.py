"""Training on token selection: where each method goes, how fast, and what a run records."""

import math
import sys
import warnings

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from massieu.checks import MissingPackageError, UserError
from massieu.margin import (
    TokenSelection,
    descend,
    log_gradient,
    max_margin,
    misalignment,
    next_token_component,
    random_problem,
)
from massieu.margin.descent import spaced


def slope(history):
    """Of log misalignment against log step, over the last two decades."""
    rows = history[history.step >= history.step.iloc[-1] / 100]
    return np.polyfit(np.log(rows.step), np.log(rows.misalignment_best), 1)[0]


def test_normalized_gd_approaches_like_the_inverse_square_of_the_step_and_gd_does_not():
    problem = random_problem(4, 4, 24, kind="equal")
    runs = {method: descend(problem, method, steps=10_000, record=5) for method in ("ngd", "gd")}
    assert slope(runs["ngd"].history) == pytest.approx(-2, abs=0.15)
    assert slope(runs["gd"].history) > -0.6
    assert runs["ngd"].history.misalignment_best.iloc[-1] < 1e-6
    assert runs["gd"].history.misalignment_best.iloc[-1] > 1e-3


def test_adam_and_sign_descent_do_not_reach_the_direction_that_polyak_reaches():
    problem = random_problem(5, 5, 24, kind="equal", generator=1)
    ends = {
        method: descend(problem, method, step=step, steps=1000, record=[1000]).history.misalignment_best.iloc[-1]
        for method, step in {"adam": 0.02, "sign": 0.02, "polyak": 1.0}.items()
    }
    assert ends["adam"] > 0.1
    assert ends["sign"] > 0.1
    assert ends["polyak"] < 1e-4


def test_with_tied_scores_descent_follows_the_picks_and_not_the_equalities():
    problem = random_problem(4, 4, 12, kind="tied")
    run = descend(problem, "ngd", steps=2000, record=[2000])
    last = run.history.iloc[-1]
    assert last.misalignment_selected < 1e-5
    assert last.correlation_bound > 0.99
    equal = max_margin(problem, ties="equal")
    assert misalignment(run.weights, equal.weights) > 0.05
    assert not (run.local.rivals & problem.best).any()
    assert last.margin == pytest.approx(last.correlation_bound * run.local.margin)


def test_a_selection_that_is_not_the_best_keeps_its_own_direction():
    problem = random_problem(6, 8, 10, generator=0)
    run = descend(problem, "ngd", steps=2000, start=3.0, generator=3, record=[2000])
    last = run.history.iloc[-1]
    assert not last.selects_best
    assert last.saturated
    assert last.margin == pytest.approx(float(problem.margins(run.weights, run.selection).min() / run.weights.norm()))
    assert last.misalignment_selected < 0.01 < 0.1 < last.misalignment_best


def test_polyak_steps_are_capped_and_take_the_loss_of_the_tokens_really_selected():
    problem = random_problem(6, 8, 10, generator=0)
    settled = descend(problem, "ngd", steps=300, start=3.0, generator=3, record=[300])
    assert not settled.history.selects_best.iloc[-1]
    for cap in (1.0, 10.0):
        run = descend(problem, "polyak", steps=50, start=settled.weights, cap=cap, record=range(51))
        assert run.finished
        assert run.selection.tolist() == settled.selection.tolist()
        lengths = run.snapshots.diff(dim=0).flatten(1).norm(dim=1)
        # Uncapped, steps are about the norm of the max-margin solution, whatever the loss still is.
        natural = float(run.local.weights.norm())
        assert float(lengths[-20:].mean()) == pytest.approx(min(cap, natural), rel=0.1)
        assert float(lengths.max()) <= cap + 1e-9


def by_hand(problem, parameters, step, steps, normalized):
    for _ in range(steps):
        leaves = [parameter.clone().requires_grad_() for parameter in parameters]
        weights = leaves[0] if len(leaves) == 1 else leaves[0] @ leaves[1].mT
        grads = torch.autograd.grad(problem.objective(weights), leaves)
        size = math.sqrt(sum(float(grad.square().sum()) for grad in grads)) if normalized else 1.0
        parameters = [parameter - step / size * grad for parameter, grad in zip(parameters, grads, strict=True)]
    return parameters


@pytest.mark.parametrize("method", ["gd", "ngd"])
def test_steps_are_those_written_with_autograd(method):
    problem = random_problem(4, 5, 6)
    start = 0.1 * torch.eye(6, dtype=torch.float64)
    (weights,) = by_hand(problem, [start], 0.5, 20, method == "ngd")
    assert_close(descend(problem, method, step=0.5, steps=20, start=start).weights, weights, rtol=1e-12, atol=1e-12)
    factors = (start[:, :3] + 0.1, start[:, :3] - 0.1)
    expected = by_hand(problem, list(factors), 0.5, 5, method == "ngd")
    run = descend(problem, method, step=0.5, steps=5, start=factors, parametrization="KQ", norm="fro")
    assert_close(list(run.factors), expected, rtol=1e-12, atol=1e-12)
    assert_close(run.weights, expected[0] @ expected[1].mT, rtol=1e-12, atol=1e-12)


def test_any_torch_optimizer_trains():
    problem = random_problem(4, 5, 6)
    plain = descend(problem, "gd", step=0.5, steps=20)
    sgd = descend(problem, lambda parameters: torch.optim.SGD(parameters, lr=0.5), steps=20)
    assert_close(sgd.weights, plain.weights, rtol=1e-12, atol=1e-12)
    adam = descend(problem, "adam", step=0.1, steps=20)
    other = descend(problem, lambda parameters: torch.optim.Adam(parameters, lr=0.1), steps=20)
    assert_close(adam.weights, other.weights)
    lbfgs = descend(problem, lambda parameters: torch.optim.LBFGS(parameters, max_iter=5), steps=5)
    assert lbfgs.history.loss.iloc[-1] < plain.history.loss.iloc[-1]


def test_factors_approach_the_nuclear_solution_and_not_the_frobenius_one():
    problem = random_problem(4, 4, 6, generator=2)
    run = descend(problem, "ngd", step=0.02, steps=3000, start=0.3, parametrization="KQ", record=[3000])
    assert run.local.norm == "nuc"
    near = run.history.misalignment_selected.iloc[-1]
    assert near < 0.03
    assert misalignment(run.weights, max_margin(problem, selection=run.selection).weights) > 3 * near
    assert run.history.correlation_bound.isna().all()
    # In the norm that was minimized, no margin exceeds the largest.
    assert 0.9 * run.local.margin < run.history.margin.iloc[-1] <= run.local.margin * (1 + 1e-5)
    assert run.history.margin.iloc[-1] * run.history.norm.iloc[-1] < run.weights.norm() * run.local.margin


@pytest.mark.parametrize("kind", ["head", "equal", "tied"])
def test_the_bound_of_the_correlation_holds_at_every_step(kind):
    history = descend(random_problem(5, 4, 10, kind=kind, generator=4), "ngd", step=0.3, steps=200).history[1:]
    assert (history.correlation_bound <= history.correlation_selected + 1e-12).all()
    assert history.correlation_bound.iloc[-1] > 0.8


def test_maps_become_sparse_and_weights_grow():
    problem = random_problem(5, 6, 12, kind="equal")
    history = descend(problem, "gd", step=50.0, steps=2000, record=5).history
    assert history.tokens.iloc[0] == pytest.approx(6)
    assert history.top.iloc[0] == pytest.approx(1 / 6)
    assert history.tokens.is_monotonic_decreasing
    assert history.norm.is_monotonic_increasing
    assert not history.saturated.iloc[0]
    assert history.saturated.iloc[-1]
    assert history.loss_gap.iloc[-1] == pytest.approx(
        history.loss.iloc[-1] - problem.loss_of(problem.selection()), rel=1e-9
    )


def test_the_log_of_the_loss_gap_does_not_underflow():
    last = descend(random_problem(3, 3, 8, kind="equal"), "ngd", step=100.0, steps=100, record=[100]).history.iloc[-1]
    assert last.loss_gap == 0
    assert last.log_loss_gap < -1000
    assert last.saturated


def test_targets_with_one_token_each_are_selected():
    targets = torch.nn.functional.one_hot(torch.tensor([0, 1, 2]), 4)
    tokens = random_problem(3, 4, 8).tokens
    run = descend(TokenSelection(tokens, tokens[:, 0], targets=targets), "ngd", steps=1000, record=[1000])
    assert run.selection.tolist() == [0, 1, 2]
    assert run.history.misalignment_best.iloc[-1] < 1e-3


def test_infeasible_data_are_trained_and_have_no_direction():
    tokens = torch.tensor([[[1.0], [0.0]], [[0.0], [1.0]]])
    problem = TokenSelection(tokens, torch.ones(2, 1), scores=torch.tensor([[2.0, 0.0], [1.0, 0.0]]))
    run = descend(problem, "gd", steps=50)
    assert not run.best.feasible
    assert run.history.misalignment_best.isna().all()
    assert run.finished


def test_records_are_spaced_by_decades_or_at_given_steps():
    assert spaced(1) == [1]
    assert spaced(1000, 1) == [1, 10, 100, 1000]
    seen = []
    problem = random_problem(3, 3, 4)
    run = descend(problem, steps=7, record=[3, 5, 99], progress=lambda step, steps: seen.append((step, steps)))
    assert run.history.step.tolist() == [0, 3, 5, 7]
    assert seen == [(3, 7), (5, 7), (7, 7)]
    assert_close(run.snapshots[-1], run.weights)
    assert_close(run.misalignments(run.best.weights)[1:], torch.tensor(run.history.misalignment_best[1:].to_numpy()))


def test_a_seed_draws_the_start():
    problem = random_problem(3, 3, 4)
    weights = [descend(problem, steps=1, start=1.0, generator=seed).weights for seed in (1, 1, 2)]
    assert_close(weights[0], weights[1])
    assert not torch.allclose(weights[0], weights[2])
    run = descend(problem, steps=1, start=1.0, parametrization="KQ", rank=2, norm="fro")
    assert [tuple(factor.shape) for factor in run.factors] == [(4, 2), (4, 2)]
    again = descend(problem, steps=1, start=list(run.factors), parametrization="KQ", norm="fro")
    assert [tuple(factor.shape) for factor in again.factors] == [(4, 2), (4, 2)]


def test_a_run_says_why_it_stopped():
    tokens = random_problem(2, 3, 4).tokens
    flat = TokenSelection(tokens, tokens[:, 0], labels=torch.ones(2), head=lambda states: 0 * states.sum(-1))
    run = descend(flat, "ngd", steps=5)
    assert not run.finished
    assert run.message == "stopped at step 1: the gradient is zero"
    assert (run.converged, run.residual, run.steps) == (True, 0.0, 0)
    assert run.history.step.tolist() == [0]
    run = descend(TokenSelection(tokens, tokens[:, 0], scores=torch.eye(3)[:2]), "sign", step=1e308, steps=5)
    assert not run.finished
    assert run.message == "stopped at step 2: the weights are no longer finite"
    assert (run.converged, run.steps) == (False, 1)
    run = descend(random_problem(2, 3, 4), steps=3)
    assert (run.finished, run.converged, run.steps, run.message) == (True, False, 3, "all 3 steps were made")
    assert run.residual == pytest.approx(float(log_gradient(random_problem(2, 3, 4), run.weights).dense().norm()))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "newton"}, "method"),
        ({"step": 0.0}, "step"),
        ({"steps": 0}, "steps"),
        ({"steps": 1.5}, "steps"),
        ({"record": 0}, "record"),
        ({"record": 2.5}, "record"),
        ({"norm": "max"}, "norm"),
        ({"rank": 2}, "rank"),
        ({"rank": -1, "parametrization": "KQ", "start": 0.1}, "rank"),
        ({"parametrization": "KQ", "start": 0.0, "method": "adam"}, "factors"),
        ({"parametrization": "KQ", "start": (torch.ones(()), torch.ones(()))}, "start"),
        ({"start": [[0.0] * 4] * 4}, "start"),
        ({"start": math.inf}, "start"),
        ({"method": lambda parameters: None}, "method"),
        ({"method": 3}, "method"),
        ({"solution": max_margin(random_problem(2, 3, 5))}, "solution"),
        ({"tied": torch.ones(3, 3, dtype=torch.bool)}, "tied"),
        ({"parametrization": "QK"}, "parametrization"),
        ({"parametrization": "KQ"}, "factors"),
        ({"start": torch.zeros(3, 4)}, "start"),
        ({"start": torch.full((4, 4), torch.nan)}, "start"),
    ],
)
def test_bad_arguments_get_a_sentence(arguments, message):
    with pytest.raises(UserError, match=message):
        descend(random_problem(3, 3, 4), **{"steps": 3, **arguments})


def test_without_pandas_the_error_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingPackageError, match="pandas"):
        descend(random_problem(3, 3, 4), steps=1)


def contradiction():
    """The same tokens and query twice, with different targets, and the least loss: that of their mean."""
    targets = torch.tensor([[0.9, 0.1, 0.0, 0.0], [0.3, 0.7, 0.0, 0.0]], dtype=torch.float64)
    tokens = random_problem(1, 4, 6).tokens.expand(2, -1, -1)
    return TokenSelection(tokens, torch.ones(2, 3), targets=targets), float(torch.special.entr(targets.mean(0)).sum())


def test_polyak_takes_the_least_loss_that_contradictory_targets_leave():
    problem, least = contradiction()
    history = descend(problem, "polyak", steps=1000, record=[10, 100]).history
    assert history.loss.is_monotonic_decreasing
    assert history.loss.iloc[-1] == pytest.approx(least, abs=1e-3)
    assert least > float(torch.special.entr(problem.targets).sum(-1).mean()) + 0.1


def test_polyak_stops_at_the_least_loss():
    tokens = random_problem(1, 2, 6).tokens.expand(2, -1, -1)
    problem = TokenSelection(tokens, torch.ones(2, 3), targets=torch.full((2, 2), 0.5))
    # The gradient still tells targets from attention, their divergence, its square, no longer does.
    run = descend(problem, "polyak", steps=100, start=torch.full((6, 3), 1e-12))
    assert run.message == "stopped at step 1: the loss is the least one, to rounding"
    assert run.history.step.tolist() == [0]


def test_polyak_is_refused_where_the_least_loss_is_not_known():
    tokens = random_problem(1, 3, 6).tokens.expand(2, -1, -1)
    problem = TokenSelection(tokens, torch.ones(2, 3), targets=torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5]]))
    with pytest.raises(UserError, match="Polyak"):
        descend(problem, "polyak", steps=3)
    assert descend(problem, "gd", steps=3).finished


def test_scores_whose_loss_underflows_are_descended():
    p = random_problem(3, 3, 6, kind="equal")
    run = descend(TokenSelection(p.tokens, p.queries, scores=800 * p.scores), "ngd", steps=100, record=[100])
    assert run.finished
    assert run.history.loss.iloc[-1] == 0
    assert run.history.misalignment_best.iloc[-1] < 0.01


def test_enormous_weights_keep_their_norm_and_direction():
    problem = random_problem(3, 3, 6, kind="equal")
    runs = [descend(problem, "gd", step=step, steps=1).history.iloc[-1] for step in (1.0, 1e200)]
    assert runs[1].norm == pytest.approx(1e200 * runs[0].norm, rel=1e-12)
    assert runs[1].misalignment_best == pytest.approx(runs[0].misalignment_best, rel=1e-9)
    assert runs[1].margin == pytest.approx(runs[0].margin, rel=1e-9)


def test_a_solution_that_is_not_found_within_the_limit_leaves_its_columns_nan():
    problem = random_problem(6, 4, 8, kind="tied")
    found, missing = (descend(problem, "ngd", steps=10, limit=limit) for limit in (1000, 1))
    assert found.history.misalignment_best.iloc[-1] > 0
    assert missing.history.misalignment_best.isna().all()
    assert missing.history.misalignment_selected.iloc[-1] == found.history.misalignment_selected.iloc[-1]
    assert_close(missing.weights, found.weights)
    with pytest.raises(UserError, match="compare"):
        _ = missing.best


def test_a_run_need_not_be_compared(monkeypatch):
    problem = random_problem(3, 3, 4)
    full = descend(problem, "ngd", steps=10)
    monkeypatch.setattr("massieu.margin.trajectory.max_margin", None)
    run = descend(problem, "ngd", steps=10, compare=False)
    solved = ["misalignment_selected", "misalignment_best", "correlation_selected", "correlation_best"]
    assert run.history[solved].isna().all(axis=None)
    rest = full.history.columns.difference([*solved, "correlation_bound"])
    assert run.history[rest].equals(full.history[rest])


def test_next_token_runs_are_compared_with_the_solution_of_their_graph():
    embeddings = torch.nn.functional.normalize(torch.randn(4, 6, generator=torch.Generator().manual_seed(0)), dim=-1)
    problem, finite = next_token_component(embeddings, [[0, 0, 1, 2], [1, 0, 2], [3, 1, 2]], [0, 1, 3])
    alone = descend(problem, "gd", steps=1000, record=[1000])
    assert alone.history.misalignment_best.isna().all()  # tokens with mass cannot all be put first
    for method in ("gd", "polyak"):
        run = descend(problem, method, steps=1000, record=[1000], solution=finite.solution, tied=finite.tied)
        assert run.best is finite.solution
        assert run.history.misalignment_best.iloc[-1] < 0.01
        assert run.history.misalignment_best.iloc[-1] == misalignment(run.weights, finite.solution.weights)
        assert 0 < run.history.margin.iloc[-1] <= finite.solution.margin
    with pytest.raises(UserError, match="tied"):
        descend(problem, steps=1, tied=finite.tied)


def test_a_run_that_stops_has_its_last_row():
    problem = random_problem(3, 3, 4)
    run = descend(problem, "sign", step=1e307, steps=100, record=[100])
    assert not run.finished
    made = int(run.message.split("step ")[1].split(":")[0]) - 1
    assert 0 < made < 99
    assert run.history.step.tolist() == [0, made]
    assert_close(run.snapshots[-1], run.weights)
    run = descend(problem, "sign", step=1e308, steps=2)
    assert run.history.step.iloc[-1] == run.snapshots.shape[0] - 1


def test_a_module_as_head_is_trained_without_a_warning():
    torch.manual_seed(0)
    head = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)).double()
    p = random_problem(3, 3, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = descend(TokenSelection(p.tokens, p.queries, labels=torch.tensor([1, -1, 1]), head=head), "ngd", steps=20)
    assert run.finished


def test_a_run_shows_itself_in_a_line():
    shown = repr(descend(random_problem(3, 3, 4, kind="equal"), "ngd", steps=20, record=[20]))
    assert shown.startswith("Trajectory(2 rows to step 20: norm ")
    assert shown.endswith(" with the best; all 20 steps were made)")
    assert len(shown) < 200
