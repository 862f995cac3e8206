"""The claims about token selection: their verdicts, controls that count, and code whose break they notice."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("scipy")
pytest.importorskip("pandas")
from massieu.claims import examine, select
from massieu.claims.margin import selection, selection_tables
from massieu.margin import max_margin, random_problem

KEYS = [f"T{number}" for number in range(1, 17)]


def test_what_the_notes_measured_comes_out(result):
    figures = {key: result(key, 0).evidence.table for key in KEYS}
    assert figures["T1"]["their least margin"] == pytest.approx(0.1)
    assert figures["T5"]["norm of the best pick"] < figures["T5"]["norm of the equality program"]
    assert figures["T6"]["residual"] > figures["T6"]["residual ten times earlier"] > figures["T6"]["‖W^fin‖"]
    assert figures["T8"]["share of the ℓ∞ margin that sign descent has"] == pytest.approx(1, abs=0.01)
    assert figures["T9"]["nearly orthogonal"] == 1
    assert abs(figures["T10"]["exponent, gd"]) < 0.5
    assert figures["T16"]["effective rank of the weights"] < figures["T16"]["of the Frobenius solution"]


def turned(original):
    """A solver that is wrong: to its weights noise of half their length is added."""

    def solve(*given, **options):
        found = original(*given, **options)
        noise = torch.randn(found.weights.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        return replace(found, weights=found.weights + 0.5 * found.weights.norm() * noise / noise.norm())

    return solve


@pytest.mark.parametrize(("module", "keys"), [(selection, ["T4", "T5"]), (selection_tables, ["T15"])])
def test_a_solver_that_is_wrong_changes_a_verdict(module, keys, monkeypatch):
    monkeypatch.setattr("massieu.margin.finite.max_margin", turned(max_margin))
    monkeypatch.setattr(module, "max_margin", turned(max_margin))
    assert [claim.key for claim in select(keys) if not examine(claim).surprises] == []


def test_descent_towards_a_wrong_direction_changes_a_verdict(monkeypatch):
    monkeypatch.setattr("massieu.margin.trajectory.max_margin", turned(max_margin))
    monkeypatch.setattr("massieu.margin.path.max_margin", turned(max_margin))
    keys = ["T7", "T8", "T10", "T11", "T12", "T13"]
    assert [claim.key for claim in select(keys) if not examine(claim).surprises] == []


@pytest.mark.parametrize(("name", "keys"), [("attend", ["T2", "T3"]), ("log_gap", ["T1"])])
def test_wrong_attention_or_losses_change_a_verdict(name, keys, monkeypatch):
    original = getattr(selection, name)

    def wrong(*given, **options):
        found = original(*given, **options)
        return found._replace(output=found.output * 1.001) if name == "attend" else replace(found, log=0.0)

    monkeypatch.setattr(selection, name, wrong)
    assert [claim.key for claim in select(keys) if not examine(claim).surprises] == []


def test_targets_that_are_not_those_trained_on_change_a_verdict(monkeypatch):
    for module in (selection, selection_tables):
        original = module.finite_component
        monkeypatch.setattr(
            module,
            "finite_component",
            lambda *given, original=original, **options: replace(
                found := original(*given, **options), weights=1.1 * found.weights
            ),
        )
    assert [claim.key for claim in select(["T6", "T14"]) if not examine(claim).surprises] == []


def test_the_part_outside_of_the_constraints_is_seen_by_no_margin():
    problem = random_problem(4, 3, 6, generator=0)
    drawn = torch.randn(6, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    unseen = selection.outside(problem, drawn)
    logits = problem.logits(unseen)
    assert (logits - logits[:, :1]).abs().max() < 1e-12 < unseen.norm()


def test_the_entrywise_margin_bounds_that_of_any_weights():
    problem = random_problem(3, 3, 5, kind="equal", generator=0)
    found = max_margin(problem)
    most = selection.entrywise_margin(problem, found)
    some = found.weights / found.weights.abs().max()
    assert 0 < float(problem.margins(some).min()) < most


def test_the_cubic_loss_agrees_with_one_written_out():
    problem = random_problem(4, 3, 6, generator=2)
    centre = problem.scores.max() + 1
    start = max_margin(problem).weights
    found = selection.least_cubic_loss(problem, centre, 3.0, [start])

    def loss(weights):
        reached = (problem.attention(3 * weights / weights.norm()) * problem.scores).sum(-1)
        return float(-(reached - centre).pow(3).sum())

    near = [found + 1e-2 * torch.randn(6, 6, generator=torch.Generator().manual_seed(s)) for s in range(20)]
    assert all(loss(found) < loss(other) for other in (start, *near))
