"""References of the claims about token selection."""

import pytest
import torch

pytest.importorskip("scipy")
pytest.importorskip("pandas")
from massieu.claims.margin import descent_directions, selected_tokens, selection_limits
from massieu.margin import max_margin, random_problem


def test_the_attention_of_least_loss_is_the_least():
    generator = torch.Generator().manual_seed(5)
    found = None
    while found is None:
        outputs = 2 * torch.randn(4, 3, generator=generator, dtype=torch.float64)
        found = selection_limits.least_attention(outputs, 1)

    def loss(attention):
        return float(torch.nn.functional.cross_entropy((attention @ outputs)[None], torch.tensor([1])))

    others = torch.distributions.Dirichlet(torch.full((4,), 0.5, dtype=torch.float64)).sample((200,))
    assert (found > 0).sum() >= 2
    assert all(loss(found) < loss(other) for other in others)


def test_a_tilted_matrix_has_the_correlation_that_was_asked_for():
    axis = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = selection_limits.tilted(axis, 0.03, torch.Generator().manual_seed(1))
    assert float(found.norm()) == pytest.approx(1)
    assert float((found * axis).sum() / axis.norm()) == pytest.approx(0.97)


def test_the_part_outside_of_the_constraints_is_seen_by_no_margin():
    problem = random_problem(4, 3, 6, generator=0)
    drawn = torch.randn(6, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    unseen = selected_tokens.outside(problem, drawn)
    logits = problem.logits(unseen)
    assert (logits - logits[:, :1]).abs().max() < 1e-12 < unseen.norm()


def test_the_entrywise_margin_bounds_that_of_any_weights():
    problem = random_problem(3, 3, 5, kind="equal", generator=0)
    found = max_margin(problem)
    most = descent_directions.entrywise_margin(problem, found)
    some = found.weights / found.weights.abs().max()
    assert 0 < float(problem.margins(some).min()) < most


def test_the_cubic_loss_agrees_with_one_written_out():
    problem = random_problem(4, 3, 6, generator=2)
    center = problem.scores.max() + 1
    start = max_margin(problem).weights
    found = selected_tokens.least_cubic_loss(problem, center, 3.0, [start])

    def loss(weights):
        reached = (problem.attention(3 * weights / weights.norm()) * problem.scores).sum(-1)
        return float(-(reached - center).pow(3).sum())

    near = [found + 1e-2 * torch.randn(6, 6, generator=torch.Generator().manual_seed(s)) for s in range(20)]
    assert all(loss(found) < loss(other) for other in (start, *near))
