"""The claim about next-token prediction in linear models: its verdict, its reference, and code whose break it notices."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("scipy")
pytest.importorskip("pandas")
from massieu.claims import examine, select
from massieu.claims.recent import next_token

# Which part of whose result comes wrong, by which factor.
BREAKS = [("finite_component", "weights", 1.001), ("descend", "snapshots", -1.0)]


@pytest.mark.parametrize(("name", "part", "factor"), BREAKS)
def test_code_that_is_slightly_wrong_changes_the_verdict(name, part, factor, monkeypatch):
    original = getattr(next_token, name)

    def wrong(*given, **options):
        found = original(*given, **options)
        return replace(found, **{part: factor * getattr(found, part)})

    monkeypatch.setattr(next_token, name, wrong)
    (claim,) = select(["R11"])
    assert examine(claim).surprises


def test_a_program_that_is_slightly_wrong_changes_the_verdict(monkeypatch):
    original = next_token.finite_component

    def wrong(*given, **options):
        found = original(*given, **options)
        return replace(found, solution=replace(found.solution, weights=1.001 * found.solution.weights))

    monkeypatch.setattr(next_token, "finite_component", wrong)
    (claim,) = select(["R11"])
    assert examine(claim).surprises


def test_the_reference_meets_its_constraints_and_no_shorter_weights_do():
    cp = pytest.importorskip("cvxpy")
    generator = torch.Generator().manual_seed(0)
    embeddings = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    odds = torch.tensor([[0.5, 0.5, 0, 0], [0, 0.2, 0.3, 0.5], [0, 0, 1, 0]], dtype=torch.float64)
    found = next_token.support_program(odds, embeddings)
    weights = cp.Variable(found.shape)
    constraints = []
    for shares, context in zip(odds, embeddings, strict=True):
        logits, inside = weights @ context.numpy(), shares.nonzero().flatten().tolist()
        constraints += [logits[inside[0]] == logits[t] for t in inside[1:]]
        constraints += [logits[t] - logits[u] >= 1 for t in inside for u in range(4) if shares[u] == 0]
    cp.Problem(cp.Minimize(cp.sum_squares(weights)), constraints).solve(solver="CLARABEL")
    assert torch.dist(found, torch.from_numpy(weights.value)) < 1e-5 * found.norm()


def test_log_odds_are_met_by_the_solution_in_the_subspace():
    embeddings = torch.randn(2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    odds = torch.tensor([[0.25, 0.75, 0.0], [0.2, 0.3, 0.5]], dtype=torch.float64)
    solution, inside = next_token.log_odds_solution(odds, embeddings)
    logits = embeddings @ solution.mT
    assert float((logits[1].softmax(-1) - odds[1]).abs().max()) < 1e-12
    assert float(logits[0, 1] - logits[0, 0]) == pytest.approx(float(torch.tensor(3.0).log()))
    assert torch.dist(inside(solution), solution) < 1e-12
