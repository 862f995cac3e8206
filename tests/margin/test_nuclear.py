"""Max-margin token selection for the nuclear norm, against cvxpy and certificates from singular values."""

import pytest
import torch
from selections import dense, draw, tied
from torch.testing import assert_close

from massieu.margin import TokenSelection, max_margin
from massieu.margin.nuclear import clip

cp = pytest.importorskip("cvxpy")


@pytest.mark.parametrize("size", [(6, 8, 10), (20, 10, 20), (50, 20, 32)])
def test_the_gap_is_certified(size):
    problem = draw(*size)
    found = max_margin(problem, norm="nuc")
    assert found.feasible
    assert found.converged
    assert found.gap <= 1e-5
    upper = torch.linalg.matrix_norm(found.weights, "nuc") / problem.margins(found.weights).min()
    combined = torch.einsum("nt,ntd,nq->dq", found.dual, problem.differences(found.selection), problem.queries)
    assert (found.dual >= 0).all()
    assert upper * torch.linalg.matrix_norm(combined, 2) / found.dual.sum() - 1 <= 1e-5


@pytest.mark.parametrize("seed", range(3))
def test_cvxpy_agrees(seed):
    problem = draw(6, 5, 7, seed)
    found = max_margin(problem, norm="nuc")
    weights = cp.Variable(problem.shape)
    flat = cp.reshape(weights, (weights.size,), order="C")
    rows = dense(problem, found.selection, found.rivals)
    value = cp.Problem(cp.Minimize(cp.normNuc(weights)), [rows @ flat >= 1]).solve(solver="CLARABEL")
    assert found.lower <= value * (1 + 1e-6)
    assert value <= found.upper * (1 + 1e-6)
    assert abs(found.margin * value - 1) < 1e-5


def test_the_solution_has_a_lower_nuclear_norm_and_rank_than_the_frobenius_one():
    problem = draw(6, 8, 10)
    nuclear, frobenius = max_margin(problem, norm="nuc", tolerance=1e-8), max_margin(problem)
    sizes = [float(torch.linalg.matrix_norm(found.weights, "nuc")) for found in (nuclear, frobenius)]
    assert sizes[0] < 0.99 * sizes[1]
    assert frobenius.upper < 0.99 * float(nuclear.weights.norm())
    ranks = [int(torch.linalg.matrix_rank(found.weights, rtol=1e-3)) for found in (nuclear, frobenius)]
    assert ranks[0] < ranks[1]
    assert_close(torch.linalg.matrix_norm(nuclear.direction, "nuc"), torch.tensor(1.0, dtype=torch.float64))


def test_ties_are_picked_or_made_equal():
    problem = tied(0)
    pick, equal = max_margin(problem, norm="nuc"), max_margin(problem, norm="nuc", ties="equal")
    assert pick.converged
    assert equal.converged
    assert pick.upper < equal.lower
    values = torch.einsum("ntd,dq,nq->nt", problem.differences(equal.selection), equal.weights, problem.queries)
    assert values[problem.best].abs().max() < 1e-12


def test_infeasible_data_have_a_certificate_in_this_norm_too():
    found = max_margin(draw(24, 8, 2), norm="nuc")
    assert not found.feasible
    assert found.converged
    assert found.eps < 1e-9


def test_units_do_not_matter():
    problem = draw(6, 5, 8)
    scaled = TokenSelection(1e4 * problem.tokens, problem.queries, scores=problem.scores)
    found, plain = max_margin(scaled, norm="nuc"), max_margin(problem, norm="nuc")
    assert found.converged
    assert abs(1e4 * found.upper / plain.upper - 1) < 2e-6


def test_too_few_steps_are_reported():
    found = max_margin(draw(20, 10, 20), norm="nuc", tolerance=1e-15, max_steps=1)
    assert found.feasible
    assert not found.converged
    assert 0 < found.gap < 1e-2


def test_clipping_is_the_projection_on_the_spectral_ball():
    matrix = torch.randn(5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64).numpy()
    near = torch.from_numpy(clip(matrix))
    other = cp.Variable((5, 4))
    cp.Problem(cp.Minimize(cp.sum_squares(other - matrix)), [cp.sigma_max(other) <= 1]).solve(solver="CLARABEL")
    assert_close(near, torch.from_numpy(other.value), rtol=0, atol=1e-4)
