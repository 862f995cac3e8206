"""Training on token selection: where each method goes, how fast, and what a run records."""

import math
import sys

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from massieu.margin import TokenSelection, descend, max_margin, misalignment, random_problem
from massieu.margin.descent import spaced


def slope(history):
    """Of log misalignment against log step, over the last two decades."""
    rows = history[history.step >= history.step.iloc[-1] / 100]
    return np.polyfit(np.log(rows.step), np.log(rows.misalignment_best), 1)[0]


def test_normalised_gd_approaches_like_the_inverse_square_of_the_step_and_gd_does_not():
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


def by_hand(problem, parameters, step, steps, normalised):
    for _ in range(steps):
        leaves = [parameter.clone().requires_grad_() for parameter in parameters]
        weights = leaves[0] if len(leaves) == 1 else leaves[0] @ leaves[1].mT
        grads = torch.autograd.grad(problem.objective(weights), leaves)
        size = math.sqrt(sum(float(grad.square().sum()) for grad in grads)) if normalised else 1.0
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


def test_records_are_spaced_by_decades_or_as_asked():
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


def test_a_run_says_why_it_stopped():
    tokens = random_problem(2, 3, 4).tokens
    flat = TokenSelection(tokens, tokens[:, 0], labels=torch.ones(2), head=lambda states: 0 * states.sum(-1))
    run = descend(flat, "ngd", steps=5)
    assert not run.finished
    assert run.ended == "stopped at step 1: the gradient is zero"
    assert run.history.step.tolist() == [0]
    run = descend(TokenSelection(tokens, tokens[:, 0], scores=torch.eye(3)[:2]), "sign", step=1e308, steps=5)
    assert not run.finished
    assert run.ended == "stopped at step 2: the weights are no longer finite"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"method": "newton"},
            "method must be one of gd, ngd, polyak, adam, sign or make a torch optimizer, got 'newton'",
        ),
        ({"step": 0.0}, "step and cap must be positive, got 0.0 and 10.0"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"parametrization": "QK"}, "parametrization must be W or KQ, got 'QK'"),
        (
            {"parametrization": "KQ"},
            "factors need a start, because zero is one that they cannot leave; give start=0.1 or (K, Q)",
        ),
        ({"start": torch.zeros(3, 4)}, "start must have shape (4, 4), got (3, 4)"),
        ({"start": torch.full((4, 4), torch.nan)}, "start must be finite, but some of it is nan or infinite"),
    ],
)
def test_bad_arguments_get_a_sentence(arguments, message):
    with pytest.raises(ValueError) as caught:
        descend(random_problem(3, 3, 4), **{"steps": 3, **arguments})
    assert str(caught.value) == message


def test_without_pandas_a_run_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(
        ImportError,
        match=r"tables of training runs need pandas, which is not installed; pip install 'massieu\[verify\]'",
    ):
        descend(random_problem(3, 3, 4), steps=1)
