"""The regularization path, local optimality, and where starts lead."""

import math

import pytest
import torch
from torch.testing import assert_close

from massieu.checks import UserError
from massieu.margin import (
    TokenSelection,
    descend,
    locally_optimal,
    log_gap,
    max_margin,
    misalignment,
    path_bound,
    random_problem,
    regularization_path,
    selections_reached,
)

INFEASIBLE = TokenSelection(
    torch.tensor([[[1.0], [0.0]], [[0.0], [1.0]]]), torch.ones(2, 1), scores=torch.tensor([[2.0, 0.0], [1.0, 0.0]])
)


@pytest.fixture(scope="module")
def path():
    return regularization_path(random_problem(6, 8, 10, generator=1), [1, 10, 100, 1000], starts=2)


def test_the_path_turns_to_the_max_margin_direction_like_the_inverse_square_of_the_radius(path):
    rows = path.table
    assert rows.misalignment.is_monotonic_decreasing
    assert not rows.selects_best.iloc[0]
    assert rows.selects_best.iloc[-1]
    decay = math.log10(rows.misalignment.iloc[-2] / rows.misalignment.iloc[-1])
    assert decay == pytest.approx(2, abs=0.25)
    assert_close(path.weights.flatten(1).norm(dim=1), torch.tensor(rows.radius.to_numpy()), rtol=1e-12, atol=0.0)
    assert path.selections[-1].tolist() == path.solution.selection.tolist()


def test_the_path_is_within_its_bound_which_is_vacuous_at_small_radii(path):
    assert (path.table.misalignment <= path.table.bound).all()
    assert path.table.bound.iloc[0] > 2
    assert path.table.bound.iloc[-1] < 0.05


def test_the_path_has_the_outcome_of_every_radius(path):
    assert (path.table.converged == (path.table.residual <= 1e-6)).all()
    assert (path.table.steps > 0).all()
    assert path.message.startswith(f"{int(path.table.converged.sum())} of 4 minimizers are stationary")


def test_the_bound_is_its_formula():
    scores = torch.tensor([[2.0, 1.0, -1.0], [0.0, 0.5, 0.25]], dtype=torch.float64)
    problem = TokenSelection(random_problem(2, 3, 6).tokens, torch.eye(6)[:2], scores=scores)
    slopes = [1 / (1 + math.exp(score)) for score in (-1.0, 2.0)]  # of the logistic loss at the ends of the range
    size = float(max_margin(problem).weights.norm())
    expected = size / 7 * math.log(2 * 2 * 2 * slopes[0] / slopes[1] * 3.0 / 0.25)
    assert path_bound(problem, 7.0) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("loss", ["logistic", "exponential", "linear"])
def test_the_bound_holds_for_every_loss(loss):
    problem = random_problem(3, 4, 6, loss=loss, generator=3)
    rows = regularization_path(problem, [30, 300], starts=1).table
    assert (rows.misalignment <= rows.bound).all()


@pytest.mark.parametrize("radius", [2.0, 20.0])
def test_on_a_circle_the_path_is_the_best_of_all_angles(radius):
    tokens = torch.tensor([[[0.3, 0.1], [1.0, 0.2], [-0.5, 0.6]], [[0.1, -0.9], [0.8, 0.5], [0.4, -0.3]]])
    problem = TokenSelection(tokens, torch.ones(2, 1), scores=torch.tensor([[0.0, 2.0, 1.0], [0.5, 2.0, 0.0]]))
    row = regularization_path(problem, [radius], starts=4).table.iloc[0]
    angles = torch.linspace(0, 2 * math.pi, 1001, dtype=torch.float64)
    best = problem.selection()
    gaps = [log_gap(problem, radius * torch.stack([angle.cos(), angle.sin()])[:, None], best).log for angle in angles]
    assert row.log_loss_gap == pytest.approx(min(gaps), abs=1e-3)
    assert row.log_loss_gap <= min(gaps) + 1e-9


def test_the_best_tokens_are_locally_optimal_and_the_worst_are_not():
    problem = random_problem(4, 4, 12)
    good = locally_optimal(problem, problem.selection())
    assert good.optimal
    assert good.message == "the program is feasible, and every support token has a lower score than the selected one"
    bad = locally_optimal(problem, problem.scores.argmin(-1))
    assert not bad.optimal
    assert bad.offending == tuple(map(tuple, bad.solution.support.nonzero().tolist()))


def test_a_support_token_of_higher_score_is_named():
    tokens = torch.tensor([[[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]]])
    problem = TokenSelection(tokens, torch.ones(1, 1), scores=torch.tensor([[1.0, 2.0, 0.0]]))
    verdict = locally_optimal(problem, torch.tensor([0]))
    assert verdict.offending == ((0, 1),)
    assert verdict.message == "sequence 0 has support token 1, whose score is not below that of the selected token 0"


def test_a_selection_that_no_weights_make_is_not_locally_optimal():
    verdict = locally_optimal(INFEASIBLE, torch.tensor([0, 0]))
    assert not verdict.optimal
    assert verdict.message.startswith("no weights select these tokens: none of norm one has a margin above ")


def test_descent_ends_in_locally_optimal_selections_that_depend_on_the_start():
    reached = selections_reached(random_problem(6, 8, 10), 8, deviation=3.0, steps=1500)
    assert len(reached) > 1
    assert not reached.best.all()
    assert reached.locally_optimal.all()
    assert (reached.saturated == 1).all()
    assert reached.share.sum() == pytest.approx(1)
    assert sorted(i for starts in reached.starts for i in starts) == list(range(8))
    assert (reached.misalignment <= reached.misalignment_most).all()
    assert reached.misalignment_most.max() < 0.05


def test_a_cone_of_starts_leads_to_the_selection_of_its_axis():
    problem = random_problem(6, 8, 10)
    reached = selections_reached(problem, 8, deviation=3.0, steps=500)
    axes = torch.stack([max_margin(problem, selection=torch.tensor(one)).weights for one in reached.selection])
    again = selections_reached(problem, 20 * axes, steps=300)
    assert len(again) == len(reached)
    assert again.sort_values("starts").selection.tolist() == reached.selection.tolist()


def test_the_path_and_normalized_descent_agree_far_out():
    problem = random_problem(4, 4, 8, generator=2)
    run = descend(problem, "ngd", steps=300, record=[300])
    path = regularization_path(problem, [float(run.weights.norm())], starts=2)
    gap = log_gap(problem, run.weights, problem.selection()).log
    assert path.table.log_loss_gap[0] <= gap
    assert path.table.log_loss_gap[0] == pytest.approx(gap, rel=0.05)


def test_bad_arguments_get_a_sentence():
    problem = random_problem(3, 3, 6)
    with pytest.raises(UserError, match="radii"):
        regularization_path(problem, [1.0, -1.0])
    with pytest.raises(UserError, match="radii"):
        regularization_path(problem, [])
    with pytest.raises(UserError, match="starts"):
        regularization_path(problem, [1.0], starts=-1)
    with pytest.raises(UserError, match="the best"):
        regularization_path(INFEASIBLE, [1.0])
    with pytest.raises(UserError, match="starts"):
        regularization_path(problem, [1.0], starts=1.5)
    with pytest.raises(UserError, match="radii"):
        regularization_path(problem, 1.0)
    for radius in (0.0, -1.0):
        with pytest.raises(UserError, match="radius"):
            path_bound(problem, radius)
    with pytest.raises(UserError, match="share"):
        regularization_path(random_problem(3, 4, 6, kind="soft"), [1.0])
    with pytest.raises(UserError, match="tied"):
        regularization_path(random_problem(3, 4, 6, kind="tied"), [1.0])
    with pytest.raises(UserError, match="starts"):
        selections_reached(problem, 0)
    with pytest.raises(UserError, match="starts"):
        selections_reached(problem, 2.0)
    with pytest.raises(UserError, match="starts"):
        selections_reached(problem, torch.zeros(0, 6, 6))
    with pytest.raises(UserError, match="starts"):
        selections_reached(problem, torch.zeros(6, 6))
    soft = random_problem(3, 4, 6, kind="soft")
    with pytest.raises(UserError, match="local"):
        locally_optimal(soft, torch.zeros(3, dtype=torch.long))
    with pytest.raises(UserError, match="the bound"):
        path_bound(soft, 1.0)


def test_a_head_that_prefers_mixtures_has_no_path():
    tokens = torch.tensor([[[1.0, 0.0], [-1.0, 0.1]]])
    problem = TokenSelection(
        tokens, torch.ones(1, 1), labels=torch.ones(1), head=lambda states: 1 - (states[..., 0] - 0.1) ** 2
    )
    with pytest.raises(UserError, match="the head"):
        regularization_path(problem, [0.1])


@pytest.mark.parametrize("unit", [1e-10, 1e-6, 1e8])
def test_the_path_does_not_depend_on_units(unit):
    problem = random_problem(3, 3, 6, kind="equal")
    other = TokenSelection(unit * problem.tokens, problem.queries, scores=problem.scores)
    expected = regularization_path(problem, [0.1, 1.0, 10.0], starts=1).table
    found = regularization_path(other, [0.1 / unit, 1 / unit, 10 / unit], starts=1).table
    assert found.misalignment.to_list() == pytest.approx(expected.misalignment.to_list(), rel=1e-5)
    assert found.converged.all()
    assert expected.converged.all()


def test_a_small_radius_leads_against_the_gradient_at_zero():
    problem = random_problem(6, 8, 10, generator=1)
    zero = torch.zeros(10, 10, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(problem.objective(zero), zero)
    path = regularization_path(problem, [1e-12, 1e-9, 1e-6, 1e-4, 1e-2], starts=1)
    apart = [misalignment(weights, -gradient) for weights in path.weights]
    assert max(apart[:3]) < 1e-11
    assert apart[3] < apart[4] < 1e-3
    assert path.table.converged.all()
    assert (path.table.misalignment > 0.5).all()  # far from the max-margin direction, where the search also began


def test_scores_whose_loss_underflows_have_a_path():
    p = random_problem(3, 3, 6, kind="equal")
    rows = regularization_path(TokenSelection(p.tokens, p.queries, scores=1e3 * p.scores), [10, 100], starts=1).table
    assert rows.misalignment.iloc[0] < 0.1
    assert rows.misalignment.iloc[1] < 0.001
    assert (rows.misalignment <= rows.bound).all()
    assert rows.bound.map(math.isfinite).all()


def test_scores_tied_up_to_rounding_are_no_rivals():
    p = random_problem(1, 3, 6)
    scores = torch.tensor([[0.1 + 0.2, 0.3, 0.0]], dtype=torch.float64)
    problem = TokenSelection(p.tokens, p.queries, scores=scores)
    assert [locally_optimal(problem, [token]).optimal for token in range(3)] == [True, True, False]


def test_best_selections_of_tied_tokens_are_locally_optimal():
    reached = selections_reached(random_problem(4, 4, 8, kind="tied"), 4, steps=300)
    assert reached.best.all()
    assert reached.locally_optimal.all()
    assert reached.misalignment_most.max() < 0.01
