"""The finite component: its subspace, its minimizer, and what training does within and outside it."""

import pytest
import torch
from torch.testing import assert_close

from massieu.checks import UserError
from massieu.margin import (
    TokenSelection,
    descend,
    finite_component,
    max_margin,
    next_token_component,
    random_problem,
    token_graph,
)


@pytest.fixture(scope="module")
def problem():
    return random_problem(5, 6, 12, kind="soft")


@pytest.fixture(scope="module")
def finite(problem):
    return finite_component(problem)


def test_the_basis_is_orthonormal_and_spans_the_differences_of_tokens_with_mass(problem, finite):
    flat = finite.basis.flatten(1)
    assert_close(flat @ flat.mT, torch.eye(5, dtype=torch.float64), rtol=0.0, atol=1e-12)
    for tokens, query, mass in zip(problem.tokens, problem.queries, problem.targets, strict=True):
        first, second = tokens[mass > 0]
        edge = torch.outer(first - second, query)
        assert_close(finite.project(edge), edge, rtol=0.0, atol=1e-12)
        other = torch.outer(first - tokens[mass == 0][0], query)
        assert (finite.project(other) - other).norm() > 0.1


def test_log_ratios_at_the_finite_weights_are_those_of_the_targets(problem, finite):
    assert finite.converged
    assert finite.attained
    logits = problem.logits(finite.weights)
    for row, mass in zip(logits, problem.targets, strict=True):
        first, second = row[mass > 0]
        assert first - second == pytest.approx(float((mass[mass > 0][0] / mass[mass > 0][1]).log()), abs=1e-11)
    assert_close(finite.attention, problem.targets, rtol=0.0, atol=1e-12)


def test_the_max_margin_solution_is_orthogonal_to_the_subspace(finite):
    assert finite.solution.feasible
    assert finite.project(finite.solution.weights).norm() < 1e-9
    assert finite.project(finite.weights).sub(finite.weights).norm() < 1e-12


def test_targets_that_contradict_each_other_are_met_on_average():
    # The same tokens and query twice, with different targets: only their mean can be met.
    tokens = random_problem(1, 4, 6).tokens.expand(2, -1, -1)
    targets = torch.tensor([[0.9, 0.1, 0.0, 0.0], [0.3, 0.7, 0.0, 0.0]], dtype=torch.float64)
    finite = finite_component(TokenSelection(tokens, torch.ones(2, 3), targets=targets))
    assert len(finite.basis) == 1
    assert finite.converged
    assert not finite.attained
    assert_close(finite.attention, targets.mean(0).expand(2, -1), rtol=0.0, atol=1e-11)


def test_newton_finds_the_limit_of_plain_descent():
    problem = random_problem(6, 5, 3, kind="soft", best=3, generator=2)
    inside = problem.best
    solution = max_margin(random_problem(6, 5, 3, generator=2))
    finite = finite_component(problem, tied=inside, solution=solution)
    weights = torch.zeros(problem.shape, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weights], max_iter=3000, tolerance_grad=1e-12, tolerance_change=1e-16, line_search_fn="strong_wolfe"
    )

    def closure():
        optimizer.zero_grad()
        logits = problem.logits(weights).masked_fill(~inside, -torch.inf).log_softmax(-1).masked_fill(~inside, 0.0)
        loss = -(problem.targets * logits).sum(-1).mean()
        loss.backward()
        return loss

    optimizer.step(closure)  # from zero, gradients and hence weights stay in the subspace
    assert_close(finite.weights, weights.detach(), rtol=1e-5, atol=1e-5)
    assert finite.residual < 1e-12
    assert finite.message.startswith("solved: gradient of norm ")


def test_a_split_adds_up_and_its_parts_are_orthogonal(finite):
    weights = torch.randn(12, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    split = finite.split(weights)
    assert_close(finite.weights + split.coefficient * finite.solution.weights + split.residual, weights)
    assert float((split.residual * finite.solution.weights).sum()) == pytest.approx(0, abs=1e-9)
    assert split.error == pytest.approx(float(finite.project(split.residual).norm()))


def test_training_converges_within_the_subspace_and_its_residual_does_not_vanish(problem, finite):
    run = descend(problem, "gd", steps=10_000, record=[100, 1000])
    splits = [finite.split(weights) for weights in run.snapshots[1:]]
    assert splits[1].error < 0.2 * splits[0].error
    assert splits[2].error < 0.2 * splits[1].error
    assert splits[2].coefficient - splits[1].coefficient == pytest.approx(2.303, abs=0.1)
    sizes = [float(split.residual.norm()) for split in splits]
    assert sizes[0] < sizes[1] < sizes[2]
    assert sizes[2] > 2 * float(finite.weights.norm())
    assert run.history.misalignment_best.iloc[-1] < 0.03


def test_normalized_steps_do_not_converge_within_the_subspace(problem, finite):
    run = descend(problem, "ngd", step=1.0, steps=1000, record=[900, 950])
    assert min(finite.split(weights).error for weights in run.snapshots[1:]) > 0.1


def draw(seed):
    generator = torch.Generator().manual_seed(seed)
    embeddings = torch.nn.functional.normalize(torch.randn(6, 8, generator=generator, dtype=torch.float64), dim=-1)
    sequences = torch.randint(6, (20, 4), generator=generator)
    labels = sequences[torch.arange(20), torch.randint(4, (20,), generator=generator)]
    return embeddings, sequences, labels


def test_cycles_of_next_token_data_span_the_finite_subspace():
    embeddings, sequences, labels = draw(0)
    _, finite = next_token_component(embeddings, list(sequences), labels)
    graph = token_graph(list(sequences), labels)
    assert len(finite.basis) == len(graph.equal) > 0
    for index, first, second in graph.equal.tolist():
        edge = torch.outer(embeddings[first] - embeddings[second], embeddings[graph.last[index]])
        assert_close(finite.project(edge), edge, rtol=0.0, atol=1e-12)
    assert finite.project(finite.solution.weights).norm() < 1e-9


def test_training_on_next_token_data_converges_within_and_not_without():
    problem, finite = next_token_component(*draw(0))
    run = descend(problem, "gd", step=5.0, steps=3000, record=[300])
    before, after = (finite.split(weights) for weights in run.snapshots[1:])
    assert after.error < 0.2 * before.error
    assert after.error < 0.02
    assert after.residual.norm() > 0.5
    misalignments = run.misalignments(finite.solution.weights)
    assert misalignments[2] < 0.5 * misalignments[1]


def test_one_token_each_leaves_nothing_finite():
    targets = torch.nn.functional.one_hot(torch.tensor([0, 1]), 3)
    tokens = random_problem(2, 3, 4).tokens
    finite = finite_component(TokenSelection(tokens, tokens[:, 0], targets=targets))
    assert len(finite.basis) == 0
    assert finite.converged
    assert not finite.weights.any()


def test_bad_arguments_get_a_sentence(problem, finite):
    with pytest.raises(UserError, match="targets"):
        finite_component(random_problem(3, 3, 4))
    with pytest.raises(UserError, match="tied"):
        finite_component(problem, tied=problem.best)
    with pytest.raises(UserError, match="tied"):
        finite_component(problem, tied=~problem.best, solution=finite.solution)
    with pytest.raises(UserError, match="weights"):
        finite.split(torch.zeros(12))
    with pytest.raises(UserError, match="tied"):
        finite_component(problem, tied=problem.best.double(), solution=finite.solution)


@pytest.mark.parametrize("unit", [1e-50, 1e-10, 1e10, 1e50])
def test_the_finite_component_does_not_depend_on_units(problem, finite, unit):
    other = finite_component(TokenSelection(unit * problem.tokens, problem.queries, targets=problem.targets))
    assert other.converged
    assert other.attained
    assert_close(unit * other.weights, finite.weights, rtol=1e-9, atol=1e-9)


def test_sequences_of_other_units_count_as_well(problem):
    units = torch.logspace(0, 12, 5, dtype=torch.float64)[:, None, None]
    other = finite_component(TokenSelection(units * problem.tokens, problem.queries, targets=problem.targets))
    assert len(other.basis) == 5


def test_there_is_nothing_to_split_along_without_a_solution():
    tokens = random_problem(1, 3, 6).tokens.expand(2, -1, -1)
    targets = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5]])
    finite = finite_component(TokenSelection(tokens, torch.ones(2, 3), targets=targets))
    with pytest.raises(UserError, match="weights"):
        finite.split(torch.ones(6, 3))


def test_nothing_diverges_where_all_tokens_have_mass():
    problem = TokenSelection(random_problem(2, 3, 6).tokens, torch.eye(6)[:2], targets=torch.full((2, 3), 1 / 3))
    finite = finite_component(problem)
    split = finite.split(torch.ones(6, 6))
    assert split.coefficient == 0
    assert_close(finite.weights + split.residual, torch.ones(6, 6, dtype=torch.float64))


def test_embeddings_may_be_lists():
    _, finite = next_token_component(
        [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]], [[0, 1, 2], [1, 0, 2]], [0, 1]
    )
    assert finite.converged
