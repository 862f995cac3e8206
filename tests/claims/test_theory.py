"""The claims about families, duality, thermodynamics and heads: their verdicts, and that these can go wrong."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from massieu.claims import Result, Verdict, duality, examine, families, select, thermodynamics
from massieu.claims.claim import Trial
from massieu.measures import ConjugatePrior, Gamma, Gaussian, GaussianMixture, Hypercube, Points

FAMILIES = ["C1", "C2", "C3", "C4", "C5", "C6", "C7", "C8", "C9", "C10", "C13", "C28"]
DUALITY = ["C14", "C15", "C16", "C17", "C18"]
OTHERS = ["C19", "C35", "C36", "C37", "C39", "C42", "X12"]
KEYS = [*FAMILIES, *DUALITY, *OTHERS]

# Where the code breaks, by which factor too large, and which claims must notice.
BREAKS = [
    (Points, "log_normalizer", 1 + 1e-6, ["C2", "C36", "C39"]),
    (Points, "log_normalizer", 1.01, ["C42"]),  # whose bound is a sampling error
    (Points, "mean", 1.1, ["X12"]),
    (Points, "mean", 1 + 1e-6, ["C4", "C5", "C6", "C9", "C15", "C37", "C39"]),
    (Points, "fisher", 1 + 1e-6, ["C5", "C18", "C19"]),
    (Hypercube, "mean", 1 + 1e-6, ["C37"]),
    (Gamma, "log_normalizer", 1 + 1e-6, ["C1"]),
    (Gamma, "mean", 1 + 1e-6, ["C7"]),
    (Gaussian, "mean", 1 + 1e-6, ["C8"]),
    (GaussianMixture, "mean", 1 + 1e-6, ["C9"]),
    (GaussianMixture, "lower_bound", 1 + 1e-6, ["C10"]),
    (ConjugatePrior, "mean", 1 + 1e-6, ["C28"]),
    (families, "attend", 1 + 1e-6, ["C3", "C5", "C13"]),
    (thermodynamics, "row_statistics", 1 + 1e-6, ["C35"]),
    (duality, "bregman", 1 + 1e-6, ["C14"]),
    (duality, "conjugate", 1 + 1e-6, ["C15", "C16", "C17"]),
    (duality, "natural_from_mean", 1 + 1e-6, ["C15", "C17"]),
]


# The gap that is within its bound, by verdict.
REAL = {
    Verdict.HOLDS: "printed",
    Verdict.HOLDS_CORRECTED: "corrected",
    Verdict.CONDITIONAL: "conditional",
    Verdict.FAILS: "instead",
}


@cache
def result(key: str, seed: int) -> Result:
    (claim,) = select([key])
    return examine(claim, seed=seed)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("key", KEYS)
def test_the_verdict_is_the_expected_one(key, seed):
    found = result(key, seed)
    assert found.verdict is found.claim.expected, (found.reason, found.evidence)
    assert found.evidence.gaps["control"].share > 1e3 or key == "C42"  # whose bound is a sampling error


@pytest.mark.parametrize("key", KEYS)
def test_a_control_that_is_the_real_case_leaves_the_claim_undecided(key):
    found = examine(result(key, 0).claim, harmless=True)
    assert found.verdict is Verdict.UNDECIDED
    assert found.reason.startswith("the control did not break")


@pytest.mark.parametrize("key", KEYS)
def test_a_control_is_the_measurement_that_comes_out_but_for_one_ingredient(key):
    claim = result(key, 0).claim
    usual, harmless = (claim.run(Trial(harmless=each)).gaps for each in (False, True))
    assert harmless.pop("control") == harmless[REAL[claim.expected]]
    assert usual.pop("control") not in usual.values()
    assert usual == harmless


@pytest.mark.parametrize("key", KEYS)
def test_a_claim_says_what_is_claimed_where_and_what_is_true_instead(key):
    claim = result(key, 0).claim
    assert claim.statement.endswith(".")
    assert families.PAPER in claim.source
    assert claim.formula
    assert bool(claim.correction) == (claim.expected is not Verdict.HOLDS)


def test_every_claim_has_a_break_that_it_notices():
    assert {key for *_, keys in BREAKS for key in keys} == set(KEYS)


@pytest.mark.parametrize(("owner", "name", "factor", "keys"), BREAKS)
def test_code_that_is_slightly_wrong_changes_a_verdict(owner, name, factor, keys, monkeypatch):
    original = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **options: stretched(original(*args, **options), factor))
    assert [claim.key for claim in select(keys) if not examine(claim).surprises] == []


def test_a_wrong_sign_of_the_mean_changes_the_verdicts_of_those_who_use_it(monkeypatch):
    mean = Points.mean
    monkeypatch.setattr(Points, "mean", lambda self, natural: -mean(self, natural))
    surprised = {claim.key for claim in select(KEYS) if examine(claim).surprises}
    assert surprised >= {"C4", "C5", "C6", "C9", "C14", "C15", "C18", "C37", "C39"}
    assert not surprised & {"C1", "C3", "C7", "C10", "C13", "C28", "C35"}


@pytest.mark.parametrize("key", ["C10", "C35", "C36", "C37", "C42"])
def test_a_curve_has_a_value_for_every_point(key):
    curve = result(key, 0).evidence.curve
    assert curve.series
    assert {len(values) for values in curve.series.values()} == {len(curve.x)}
    assert torch.tensor([list(values) for values in curve.series.values()]).isfinite().all()


def test_figures_of_the_ledger_come_out():
    figures = {name: value for key in KEYS for name, value in result(key, 0).evidence.table.items()}
    assert figures["log Z of Gamma(2.5, 0.7) at 0.6"] == pytest.approx(1.3618179386, abs=1e-10)
    assert figures["mean of Gamma(2.5, 0.7) at 0.6"] == pytest.approx(3.01724137931, abs=1e-10)
    assert figures["mean log odds of Beta(1.8, 2.3) tilted by 0.7"] == pytest.approx(0.57710918787, abs=1e-10)
    assert figures["the same after Bayes"] == pytest.approx(-0.04789, abs=1e-5)
    assert figures["null directions of 8 keys in 16 dimensions"] == 9
    assert figures["free dimensions of B for 3 heads"] == 3
    assert figures["law"] == pytest.approx(8.6422, abs=1e-4)


def stretched(found, factor):
    """Every number in a result times a factor."""
    if isinstance(found, torch.Tensor):
        return found * factor if found.is_floating_point() else found
    if isinstance(found, tuple):
        return type(found)(*(stretched(each, factor) for each in found))
    return replace(found, natural=found.natural * factor)
