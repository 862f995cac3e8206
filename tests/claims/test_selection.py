"""The claims about token selection: their verdicts, controls that count, and code whose break they notice."""

from dataclasses import replace
from functools import partial

import pytest
import torch

pytest.importorskip("scipy")
pytest.importorskip("pandas")
from massieu.claims import examine, select
from massieu.claims.margin import selection, selection_limits, selection_tables
from massieu.margin import max_margin, random_problem

KEYS = [f"T{number}" for number in range(1, 19)]


def test_what_the_notes_measured_comes_out(result):
    figures = {key: result(key, 0).evidence.table for key in KEYS}
    assert figures["T1"]["their least margin"] == pytest.approx(0.1)
    assert figures["T5"]["norm of the best pick"] < figures["T5"]["norm of the equality program"]
    assert figures["T6"]["residual"] > figures["T6"]["residual ten times earlier"] > figures["T6"]["‖W^fin‖"]
    assert figures["T8"]["share of the ℓ∞ margin that sign descent has"] == pytest.approx(1, abs=0.01)
    assert figures["T8"]["1 − corr, adam"] > 0.05
    assert figures["T9"]["nearly orthogonal"] == 1
    assert abs(figures["T10"]["exponent, gd"]) < 0.5
    assert figures["T16"]["effective rank of the weights"] < figures["T16"]["of the Frobenius solution"]
    assert figures["T17"]["‖W_k − W^fin − C_k W^mm‖"] > figures["T17"]["‖W^fin‖"]  # in norm the residual stays


def turned(original, by=0.5):
    """A solver that is wrong: to its weights noise of a part of their length is added."""

    def solve(*given, **options):
        found = original(*given, **options)
        noise = torch.randn(found.weights.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        return replace(found, weights=found.weights + by * found.weights.norm() * noise / noise.norm())

    return solve


def scaled(factor, name="weights"):
    """A function that is wrong: its weights, or another part, come a factor too large."""

    def wrong(original):
        def call(*given, **options):
            found = original(*given, **options)
            part = getattr(found, name) * factor
            return found._replace(**{name: part}) if hasattr(found, "_replace") else replace(found, **{name: part})

        return call

    return wrong


def shortened(original):
    """Training that is wrong: from its second half on it stands still."""

    def train(*given, steps, **options):
        return replace(original(*given, steps=steps, **options), weights=original(*given, steps=1, **options).weights)

    return train


def slowed(original):
    """Training that is wrong: its steps shrink, as those of gradient descent do."""
    return lambda problem, method, **options: original(problem, "gd", **options)


# Where the code breaks, how, and which claims must notice.
BREAKS = [
    (["massieu.margin.finite.max_margin", selection], "max_margin", turned, ["T4", "T5"]),
    ([selection_tables], "max_margin", turned, ["T16"]),
    # Beside the finite part a part of the error is lost in the fit, and the bound is on a mean.
    (["massieu.margin.finite.max_margin"], "max_margin", partial(turned, by=1.0), ["T15"]),
    (["massieu.margin.finite.max_margin", selection_limits], "max_margin", turned, ["T17", "T18"]),
    (
        ["massieu.margin.trajectory.max_margin", "massieu.margin.path.max_margin"],
        "max_margin",
        turned,
        ["T7", "T8", "T9", "T10", "T11", "T12", "T13"],
    ),
    ([selection], "max_margin", scaled(-1.0), ["T1"]),
    ([selection], "attend", scaled(1 + 1e-6, "output"), ["T2", "T3"]),
    ([selection], "finite_component", scaled(1.1), ["T6"]),
    ([selection_tables], "finite_component", scaled(1.1), ["T14"]),
    ([selection_limits], "finite_component", scaled(1.1), ["T17"]),
    ([selection_limits], "descend", shortened, ["T17", "T18"]),
    ([selection], "descend", slowed, ["T8", "T9"]),
]


def test_every_claim_has_a_break_that_it_notices():
    assert {key for *_, keys in BREAKS for key in keys} == set(KEYS)


@pytest.mark.parametrize(("places", "name", "wrong", "keys"), BREAKS)
def test_code_that_is_wrong_changes_a_verdict(places, name, wrong, keys, monkeypatch):
    for place in places:
        if isinstance(place, str):
            monkeypatch.setattr(place, wrong(max_margin))
        else:
            monkeypatch.setattr(place, name, wrong(getattr(place, name)))
    assert [claim.key for claim in select(keys) if not examine(claim).surprises] == []


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
    center = problem.scores.max() + 1
    start = max_margin(problem).weights
    found = selection.least_cubic_loss(problem, center, 3.0, [start])

    def loss(weights):
        reached = (problem.attention(3 * weights / weights.norm()) * problem.scores).sum(-1)
        return float(-(reached - center).pow(3).sum())

    near = [found + 1e-2 * torch.randn(6, 6, generator=torch.Generator().manual_seed(s)) for s in range(20)]
    assert all(loss(found) < loss(other) for other in (start, *near))
