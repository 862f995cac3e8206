"""The claims about families, duality and thermodynamics: their verdicts, and that these can go wrong."""

import pytest

from massieu.claims import examine, select
from massieu.claims.measures import duality, families, thermodynamics
from massieu.measures import ConjugatePrior, Gamma, Gaussian, GaussianMixture, Hypercube, Points, Poisson

FAMILIES = ["C1", "C2", "C3", "C4", "C5", "C6", "C7", "C8", "C9", "C10", "C13", "C28", "C50", "C53"]
DUALITY = ["C14", "C15", "C16", "C17", "C18"]
OTHERS = ["C35", "C36", "C37"]
KEYS = [*FAMILIES, *DUALITY, *OTHERS]

# Where the code breaks, by which factor too large, and which claims must notice.
BREAKS = [
    (Points, "log_normalizer", 1 + 1e-6, ["C2", "C36"]),
    (Points, "mean", 1 + 1e-6, ["C4", "C5", "C6", "C9", "C15", "C37"]),
    (Points, "fisher", 1 + 1e-6, ["C5", "C18"]),
    (Hypercube, "mean", 1 + 1e-6, ["C37", "C53"]),
    (Hypercube, "fisher", 1 + 1e-3, ["C53"]),
    (Poisson, "mean", 1 + 1e-6, ["C53"]),
    (Gaussian, "fisher", 1 + 1e-6, ["C53"]),
    (Gamma, "log_normalizer", 1 + 1e-6, ["C1"]),
    (Gamma, "mean", 1 + 1e-6, ["C7"]),
    (Gaussian, "mean", 1 + 1e-6, ["C8"]),
    (GaussianMixture, "mean", 1 + 1e-6, ["C9"]),
    (GaussianMixture, "lower_bound", 1 + 1e-6, ["C10"]),
    (GaussianMixture, "lower_bound_gradient", 1 + 1e-6, ["C50"]),
    (ConjugatePrior, "mean", 1 + 1e-6, ["C28"]),
    (families, "attend", 1 + 1e-6, ["C3", "C5", "C13"]),
    (thermodynamics, "row_statistics", 1 + 1e-6, ["C35"]),
    (duality, "bregman", 1 + 1e-6, ["C14"]),
    (duality, "conjugate", 1 + 1e-6, ["C15", "C16", "C17"]),
    (duality, "natural_from_mean", 1 + 1e-6, ["C15", "C17"]),
]


def test_every_claim_has_a_break_that_it_notices():
    assert {key for *_, keys in BREAKS for key in keys} == set(KEYS)


@pytest.mark.parametrize(("owner", "name", "factor", "keys"), BREAKS)
def test_code_that_is_slightly_wrong_changes_a_verdict(owner, name, factor, keys, unmoved):
    assert unmoved(owner, name, factor, keys) == []


def test_a_wrong_sign_of_the_mean_changes_the_verdicts_of_those_who_use_it(monkeypatch):
    mean = Points.mean
    monkeypatch.setattr(Points, "mean", lambda self, natural: -mean(self, natural))
    surprised = {claim.key for claim in select(KEYS) if examine(claim).surprises}
    assert surprised >= {"C4", "C5", "C6", "C9", "C14", "C15", "C18", "C37"}
    assert not surprised & {"C1", "C3", "C7", "C10", "C13", "C28", "C35"}


def test_figures_of_the_ledger_come_out(result):
    figures = {name: value for key in KEYS for name, value in result(key, 0).evidence.table.items()}
    assert figures["log Z of Gamma(2.5, 0.7) at 0.6"] == pytest.approx(1.3618179386, abs=1e-10)
    assert figures["mean of Gamma(2.5, 0.7) at 0.6"] == pytest.approx(3.01724137931, abs=1e-10)
    assert figures["mean log odds of Beta(1.8, 2.3) tilted by 0.7"] == pytest.approx(0.57710918787, abs=1e-10)
    assert figures["the same after Bayes"] == pytest.approx(-0.04789, abs=1e-5)
    assert figures["null directions of 8 keys in 16 dimensions"] == 9
