"""Max-margin token selection for the Frobenius norm, against cvxpy, HiGHS and certificates from dense matrices."""

import itertools
import re
import sys

import numpy as np
import pytest
import torch
from selections import dense, draw, nearly_twins, tied
from torch.testing import assert_close

from massieu.checks import MissingPackageError, UserError
from massieu.margin import TokenSelection, direction_bound, frobenius, max_margin, random_problem
from massieu.margin.solver import rounded_up

cp = pytest.importorskip("cvxpy")


def by_cvxpy(problem, selection, rivals, equal=None):
    weights = cp.Variable(problem.shape)
    flat = cp.reshape(weights, (weights.size,), order="C")
    constraints = [dense(problem, selection, rivals) @ flat >= 1]
    if equal is not None and equal.any():
        constraints.append(dense(problem, selection, equal) @ flat == 0)
    program = cp.Problem(cp.Minimize(cp.sum_squares(flat)), constraints)
    program.solve(solver="CLARABEL", tol_gap_rel=1e-10, tol_gap_abs=1e-10, tol_feas=1e-10)
    return program.value**0.5, torch.from_numpy(weights.value)


@pytest.mark.parametrize("size", [(10, 5, 10), (50, 20, 32), (100, 32, 64), (200, 64, 128)])
def test_the_gap_is_certified(size):
    problem = draw(*size)
    found = max_margin(problem)
    assert found.feasible
    assert found.converged
    assert found.farkas is None
    # Both bounds from the fields of the result, with the problem's own logits and an explicit sum.
    upper = found.weights.norm() / problem.margins(found.weights).min()
    combined = torch.einsum("nt,ntd,nq->dq", found.dual, problem.differences(found.selection), problem.queries)
    assert (found.dual >= 0).all()
    assert found.gap <= 1e-9
    assert upper * combined.norm() / found.dual.sum() - 1 <= 1e-9
    assert_close(
        [found.lower, found.upper], [float(found.dual.sum() / combined.norm()), float(upper)], rtol=1e-12, atol=0
    )


@pytest.mark.parametrize("seed", range(4))
def test_cvxpy_agrees(seed):
    problem = draw(6, 5, 8, seed)
    found = max_margin(problem)
    value, weights = by_cvxpy(problem, found.selection, found.rivals)
    assert_close(found.weights, weights, rtol=0, atol=1e-6 * value)
    assert abs(found.margin * value - 1) < 1e-6
    worse = max_margin(problem, selection=(found.selection + 1) % 5)
    assert (worse.weights - weights).norm() > 0.1 * value


def test_multipliers_sum_to_the_squared_norm_and_belong_to_active_constraints():
    problem = draw(8, 6, 10)
    found = max_margin(problem)
    values = torch.einsum("ntd,dq,nq->nt", problem.differences(found.selection), found.weights, problem.queries)
    assert_close(found.dual.sum(), found.weights.square().sum(), rtol=1e-9, atol=0)
    assert_close(values[found.support], torch.ones(int(found.support.sum()), dtype=torch.float64), rtol=0, atol=1e-9)
    assert (values[found.rivals & ~found.support] > 1 + 1e-6).all()
    assert not found.support[~found.rivals].any()
    assert not found.dual[~found.rivals].any()


def test_infeasible_data_are_recognized_and_none_else():
    optimize = pytest.importorskip("scipy.optimize")
    sizes = np.random.default_rng(0)
    infeasible = 0
    for seed in range(100):
        problem = draw(int(sizes.integers(2, 30)), int(sizes.integers(2, 12)), int(sizes.integers(2, 16)), seed)
        found = max_margin(problem)
        rows = dense(problem, problem.selection(), found.rivals)
        judge = optimize.linprog(np.zeros(rows.shape[1]), -rows, -np.ones(len(rows)), bounds=(None, None))
        assert judge.status in (0, 2)
        assert found.converged
        assert found.feasible == (judge.status == 0)
        infeasible += not found.feasible
        if found.feasible:
            assert found.gap <= 1e-9
        else:
            shown = found.farkas[found.rivals].numpy()
            assert shown.min() >= 0
            assert abs(shown.sum() - 1) < 1e-12
            assert np.linalg.norm(shown @ rows) <= 1e-9
            assert abs(np.linalg.norm(shown @ rows) - found.eps) < 1e-12
            assert found.gap == np.inf
            assert found.margin == 0
    assert 10 <= infeasible <= 50  # both kinds are there


def test_twin_tokens_are_infeasible():
    problem = draw(4, 5, 8)
    tokens = problem.tokens.clone()
    best = int(problem.selection()[2])
    tokens[2, best - 1] = tokens[2, best]
    found = max_margin(TokenSelection(tokens, problem.queries, scores=problem.scores))
    assert not found.feasible
    assert found.eps == 0
    assert found.converged
    assert found.farkas.nonzero().tolist() == [[2, (best - 1) % 5]]
    assert max_margin(problem).feasible


@pytest.mark.parametrize("seed", range(3))
def test_picking_from_ties_is_the_best_of_all_selections(seed):
    problem = tied(seed)
    found = max_margin(problem)
    rivals = problem.present & ~problem.best
    ways = itertools.product(*[row.nonzero().flatten().tolist() for row in problem.best])
    values = {way: by_cvxpy(problem, torch.tensor(way), rivals)[0] for way in ways}
    assert len(values) == 24
    assert found.converged
    best = min(values, key=values.get)
    assert tuple(found.selection.tolist()) == best
    assert abs(found.upper / values[best] - 1) < 1e-6
    assert sorted(values.values())[1] > 1.0001 * found.upper


@pytest.mark.parametrize("seed", range(3))
def test_equal_ties_are_equal_and_cost_more_than_a_pick(seed):
    problem = tied(seed)
    found, pick = max_margin(problem, ties="equal"), max_margin(problem)
    equal = problem.best.scatter(1, found.selection[:, None], False)
    value, weights = by_cvxpy(problem, found.selection, found.rivals, equal)
    assert found.gap < 1e-9
    assert abs(found.upper / value - 1) < 1e-6
    assert_close(found.weights, weights, rtol=0, atol=1e-5 * value)
    values = torch.einsum("ntd,dq,nq->nt", problem.differences(found.selection), found.weights, problem.queries)
    assert values[equal].abs().max() < 1e-12
    assert found.support[equal].all()
    assert pick.upper < 0.9 * found.upper


def test_picks_that_all_fail_share_one_bound():
    generator = torch.Generator().manual_seed(0)
    tokens, queries = torch.randn(12, 8, 2, generator=generator), torch.randn(12, 2, generator=generator)
    scores = torch.zeros(12, 8)
    scores[:, 0] = 1
    scores[:2, 1] = 1
    found = max_margin(TokenSelection(tokens, queries, scores=scores))
    assert not found.feasible
    assert found.converged
    assert found.eps < 1e-9


def test_tokens_tied_with_a_selection_may_be_spared():
    problem = tied(0)
    selection = problem.best.int().argmax(-1)
    selection[0] = int((~problem.best[0]).int().argmax())
    found = max_margin(problem, selection=selection, rivals="untied")
    expected = problem.present.clone()
    for i, t in enumerate(selection.tolist()):
        expected[i] &= problem.scores[i] != problem.scores[i, t]
    assert torch.equal(found.rivals, expected)
    value, weights = by_cvxpy(problem, selection, expected)
    assert_close(found.weights, weights, rtol=0, atol=1e-5 * value)
    assert torch.equal(max_margin(problem, selection=selection.tolist(), rivals=expected).weights, found.weights)
    assert max_margin(problem, selection=selection).upper > 1.01 * found.upper
    for ties in ("pick", "equal"):  # all tied: no constraints
        level = TokenSelection(problem.tokens, problem.queries, scores=torch.ones(5, problem.tokens.shape[1]))
        assert not max_margin(level, selection=selection, rivals="untied", ties=ties).rivals.any()


def test_tied_tokens_leave_no_constraints():
    for ties in ("pick", "equal"):
        found = max_margin(draw(3, 4, 5, scores=torch.ones(3, 4)), ties=ties)
        assert found.feasible
        assert found.converged
        assert found.gap == 0
        assert found.message == "no constraints: all tokens are tied"
        assert not found.weights.any()
        assert found.margin == float("inf")
        assert not found.direction.any()
        assert not found.rivals.any()


def test_padding_is_absent():
    problem = draw(5, 6, 8, lengths=torch.tensor([6, 3, 2, 5, 4]))
    lengths = problem.lengths.tolist()
    parts = [problem.tokens[i, :count] for i, count in enumerate(lengths)]
    rows = [problem.scores[i, :count] for i, count in enumerate(lengths)]
    ragged = max_margin(TokenSelection(parts, problem.queries, scores=rows))
    padded = max_margin(problem)
    assert_close(padded.weights, ragged.weights, rtol=0, atol=1e-12)
    assert not padded.rivals[~problem.present].any()
    assert (max_margin(draw(5, 6, 8)).weights - padded.weights).norm() > 0.1


def test_units_do_not_matter():
    problem = draw(8, 6, 10)
    plain = max_margin(problem)
    scaled = max_margin(TokenSelection(1e5 * problem.tokens, 1e-8 * problem.queries, scores=problem.scores))
    assert_close(scaled.weights, 1e3 * plain.weights, rtol=1e-8, atol=1e-8)
    for seed in range(3):
        crowded = draw(24, 8, 2, seed)
        small = max_margin(TokenSelection(1e-5 * crowded.tokens, crowded.queries, scores=crowded.scores))
        assert small.converged
        assert not small.feasible
    sizes = torch.logspace(-3, 3, 8, dtype=torch.float64)[:, None]
    uneven = max_margin(TokenSelection(problem.tokens * sizes[:, None], problem.queries, scores=problem.scores))
    assert uneven.converged
    assert uneven.gap < 1e-9


@pytest.mark.parametrize("ratio", [1e20, 1e40])
def test_one_unit_for_each_sequence_is_no_infeasibility(ratio):
    problem = random_problem(6, 4, 16, kind="equal")
    powers = torch.linspace(0, 1, 6, dtype=torch.float64)[:, None, None]
    found = max_margin(TokenSelection(problem.tokens * ratio**powers, problem.queries, scores=problem.scores))
    assert found.feasible
    assert found.gap < 1e-9
    # Twins stay infeasible in any units.
    twins = problem.tokens.clone()
    twins[-1] = twins[-1, :1]
    assert not max_margin(TokenSelection(twins * ratio**powers, problem.queries, scores=problem.scores)).feasible


@pytest.mark.parametrize("norm", ["fro", "nuc"])
@pytest.mark.parametrize("unit", [1e-58, 1e-40, 1e40, 1e58])
def test_extreme_units_change_weights_and_margin_alone(unit, norm):
    problem = random_problem(3, 3, 6, kind="equal")
    plain = max_margin(problem, norm)
    scaled = TokenSelection(
        unit * problem.tokens / problem.tokens.abs().max(), unit * problem.queries, scores=problem.scores
    )
    size = unit / float(problem.tokens.abs().max()) * unit
    found = max_margin(scaled, norm)
    assert found.converged
    assert torch.equal(found.support, plain.support)
    assert_close(found.direction, plain.direction, rtol=0, atol=1e-6)
    assert found.margin == pytest.approx(size * plain.margin, rel=1e-5)
    assert_close(found.dual * (size * size), plain.dual, rtol=0, atol=1e-3 * float(plain.dual.max()))
    if norm == "fro":
        assert direction_bound(scaled, found.weights, found) == pytest.approx(1, abs=1e-9)


def test_thin_data_are_solved_feasible_or_undecided_and_never_called_infeasible():
    found = {power: max_margin(nearly_twins(10.0**-power)) for power in (3, *range(6, 15))}
    assert all(found[power].feasible for power in (3, 6, 7, 8))
    assert found[3].message.startswith("solved: the bounds agree to ")
    for power, solution in found.items():
        assert solution.eps == pytest.approx(10.0 ** (3 - power) * found[3].eps, rel=1e-2)
        if not solution.feasible:
            assert (solution.feasible, solution.converged, solution.farkas) == (None, False, None)
            assert re.match("undecided: no margin was found, and none above [34]e-.* exists; margins", solution.message)


def test_thin_data_agree_with_cvxpy():
    problem = nearly_twins(1e-6)
    found = max_margin(problem)
    # In units of the margin that is expected, which cvxpy needs to be of order one.
    rows = dense(problem, found.selection, found.rivals)
    size, flat = cp.Variable(), cp.Variable(rows.shape[1])
    cp.Problem(cp.Maximize(size), [1e6 * (rows @ flat) >= size, cp.norm(flat) <= 1]).solve(solver="CLARABEL")
    assert found.margin == pytest.approx(float(size.value) / 1e6, rel=1e-3)


@pytest.mark.parametrize("unit", [1.0, 1e-6, 1e6])
def test_cancelling_constraints_are_infeasible_with_multipliers_that_cancel_to_rounding(unit):
    shown = 0
    for seed in range(20):
        problem = draw(20, 6, 3, seed)
        found = max_margin(TokenSelection(unit * problem.tokens, problem.queries, scores=problem.scores))
        if found.feasible:
            continue
        shown += 1
        assert (found.feasible, found.converged) == (False, True)
        rows = dense(problem, found.selection, found.rivals)
        multipliers = found.farkas[found.rivals].numpy()
        sizes = np.linalg.norm(rows, axis=1)
        assert multipliers.min() >= 0
        assert np.linalg.norm(multipliers @ rows) <= 1e-14 * float(multipliers @ sizes)
        assert found.message.startswith("infeasible: constraints of size one cancel to less than 1e-15")
    assert shown >= 10


def test_an_undecided_answer_has_no_certificate(monkeypatch):
    monkeypatch.setattr(frobenius, "DENSE", 0)
    monkeypatch.setattr(frobenius, "bounded", lambda product, right, free, x, **_: x + 1)
    monkeypatch.setattr(frobenius, "face", lambda product, right, free, x: x)
    found = max_margin(draw(24, 8, 2), max_steps=1)
    assert found.feasible is None
    assert not found.converged
    assert found.farkas is None
    assert (found.steps, found.residual) == (1, found.eps)
    assert found.message.startswith(
        f"undecided: no margin was found, and none above {rounded_up(found.eps)} exists; margins"
    )


@pytest.mark.parametrize("angle", [1e-2, 1e-5, 1e-7, 1e-10, 1e-13])
def test_thin_margins_are_found_until_rounding_hides_them(angle):
    def narrow(angle):
        ends = torch.tensor([[[1.0, angle]], [[-1.0, angle]]], dtype=torch.float64)
        tokens = torch.cat([ends, torch.zeros_like(ends)], 1)
        return max_margin(TokenSelection(tokens, torch.ones(2, 1), scores=torch.tensor([[1.0, 0.0]] * 2)))

    found, hidden = narrow(angle), narrow(3e-16)
    assert found.feasible
    assert found.gap < 1e-9
    assert_close(found.weights[:, 0], torch.tensor([0.0, 1 / angle], dtype=torch.float64), rtol=1e-9, atol=1e-4)
    assert hidden.feasible is None
    assert hidden.eps == pytest.approx(3e-16, rel=0.5)


def test_a_hull_that_hardly_holds_zero_is_recognized():
    """Products alone were left at 4e-9 after 18000 of them."""
    generator = np.random.default_rng(1006)
    tokens, queries = generator.standard_normal((6, 11, 4)), generator.standard_normal((6, 4))
    chosen = torch.nn.functional.one_hot(torch.zeros(6, dtype=torch.long), 11)
    found = max_margin(TokenSelection(torch.from_numpy(tokens), torch.from_numpy(queries), scores=chosen))
    assert not found.feasible
    assert found.converged
    assert found.products < 5000


@pytest.mark.parametrize("ties", ["pick", "equal"])
def test_the_active_set_alone_finds_the_same(monkeypatch, ties):
    expected = max_margin(tied(0), ties=ties)
    monkeypatch.setattr(frobenius, "bounded", lambda product, right, free, x, **_: x)
    monkeypatch.setattr(frobenius, "face", lambda product, right, free, x: x)
    found = max_margin(tied(0), ties=ties)
    assert found.converged
    assert_close(found.weights, expected.weights, rtol=0, atol=1e-9)
    monkeypatch.setattr(frobenius, "DENSE", 0)
    assert not max_margin(tied(0), ties=ties).converged


def test_queries_may_have_another_dimension():
    problem = draw(6, 4, 8)
    found = max_margin(TokenSelection(problem.tokens, problem.queries[:, :5], scores=problem.scores))
    assert found.weights.shape == (8, 5)
    assert found.gap < 1e-9


def test_the_correlation_exceeds_its_bound():
    problem = draw(6, 5, 8)
    found = max_margin(problem)
    generator = torch.Generator().manual_seed(0)
    for noise in (0.0, 0.01, 0.1, 0.5):
        other = found.direction + noise * torch.randn(8, 8, generator=generator, dtype=torch.float64) / 8
        bound = direction_bound(problem, other, found)
        assert bound <= float((other / other.norm() * found.direction).sum()) + 1e-12
        assert noise or bound == pytest.approx(1, abs=1e-9)
    assert direction_bound(problem, -found.weights, found) < 0
    # Not true of the margins of another selection.
    rival = max_margin(problem, selection=(found.selection + 1) % 5)
    assert direction_bound(problem, rival.weights, rival) > float((rival.direction * found.direction).sum())


def test_the_bound_has_the_constraints_of_the_solution():
    problem = tied(0)
    pick, equal = max_margin(problem), max_margin(problem, ties="equal")
    corr = float((pick.direction * equal.direction).sum())
    assert 0 < direction_bound(problem, equal.weights, pick) <= corr + 1e-12
    chosen = max_margin(problem, selection=pick.selection)
    assert direction_bound(problem, equal.weights, chosen) < 1e-9  # there the tied tokens are rivals too


def test_a_solver_without_enough_steps_does_not_converge():
    found = max_margin(draw(20, 10, 12), tolerance=1e-18, max_steps=1)
    assert found.feasible
    assert not found.converged
    assert 0 <= found.gap < 1e-3


def test_products_run_on_one_thread():
    threadpoolctl = pytest.importorskip("threadpoolctl")
    from massieu.margin.program import one_thread

    def threads():
        return [pool["num_threads"] for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"]

    with threadpoolctl.threadpool_limits(2, user_api="blas"):
        before = threads()
        with one_thread():
            assert set(threads()) == {1}
            assert 2 in before
        assert threads() == before


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"norm": "max"}, "norm"),
        ({"ties": "both"}, "ties"),
        ({"tolerance": 0.0}, "tolerance"),
        ({"tolerance": float("nan")}, "tolerance"),
        ({"max_steps": 0}, "max_steps"),
        ({"max_steps": 1.5}, "max_steps"),
        ({"limit": 0}, "limit"),
        ({"rivals": "untied"}, "rivals"),
        ({"selection": [0] * 5, "rivals": "some"}, "rivals"),
        ({"selection": [0] * 5, "rivals": torch.ones(5, 4, dtype=torch.bool)}, "rivals"),
        ({"selection": torch.tensor([0, 1])}, "selection"),
        ({"selection": torch.tensor([0, 5, 0, 0, 0])}, "selection"),
        ({"selection": torch.zeros(5)}, "selection"),
        ({"limit": 2}, "limit"),
    ],
)
def test_bad_requests_get_a_sentence(options, sentence):
    with pytest.raises(UserError, match=sentence):
        max_margin(tied(0), **options)


def test_bounds_that_do_not_hold_are_refused():
    problem = tied(0)
    found = max_margin(problem)
    with pytest.raises(UserError, match="equal logits"):
        direction_bound(problem, found.weights, max_margin(problem, ties="equal"))
    with pytest.raises(UserError, match="weights"):
        direction_bound(problem, torch.ones(8, 7), found)
    with pytest.raises(UserError, match="vanish"):
        direction_bound(problem, torch.zeros(8, 8), found)
    with pytest.raises(UserError, match="feasible"):
        direction_bound(problem, found.weights, max_margin(problem, norm="nuc"))


def test_bounds_of_other_problems_and_of_nothing_are_refused():
    found = max_margin(draw(6, 5, 8))
    with pytest.raises(UserError, match="solution"):
        direction_bound(draw(6, 4, 8), found.weights, found)
    level = draw(3, 4, 5, scores=torch.ones(3, 4))
    with pytest.raises(UserError, match="tied"):
        direction_bound(level, torch.ones(5, 5), max_margin(level))


@pytest.mark.parametrize(("module", "package"), [("scipy.optimize", "scipy"), ("threadpoolctl", "threadpoolctl")])
def test_a_missing_package_is_named(monkeypatch, module, package):
    from massieu.margin import program

    program._controller.cache_clear()
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingPackageError, match=package):
        max_margin(draw(3, 4, 5))


@pytest.mark.parametrize("norm", ["fro", "nuc"])
def test_a_solution_prints_a_summary_without_its_tensors(norm):
    found = max_margin(draw(6, 5, 8), norm=norm)
    assert "tensor" not in repr(found)
    assert len(str(found).splitlines()) <= 5
    assert f"margin {found.margin:.4g}" in str(found)
    assert f"{int(found.support.sum())} of {int(found.rivals.sum())} rivals" in str(found)
    assert found.message in str(found)


def test_the_summary_of_infeasible_data_says_that_no_weights_separate_them():
    tokens = torch.tensor([[[1.0, 0.0], [-1.0, 0.0]], [[-1.0, 0.0], [1.0, 0.0]]], dtype=torch.float64)
    problem = TokenSelection(
        tokens, torch.ones(2, 1, dtype=torch.float64), scores=torch.tensor([[1.0, 0.0]] * 2).double()
    )
    found = max_margin(problem)
    assert not found.feasible
    assert found.message in str(found)
    assert "margin" in str(found)
    assert "least norm" not in str(found)
