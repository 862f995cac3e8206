"""The claims about the weights of heads and several heads: their verdicts, and that these can go wrong."""

import pytest

from massieu.claims import examine, select
from massieu.claims.dynamics import heads
from massieu.claims.sources import PAPER
from massieu.measures import Convolution, GaussianMixture, Points

KEYS = ["C19", "C39", "C42", "C54", "X12"]

# Where the code breaks, by which factor too large, and which claims must notice.
BREAKS = [
    (Points, "log_normalizer", 1 + 1e-6, ["C39"]),
    (Points, "log_normalizer", 1.01, ["C42"]),  # whose bound is a sampling error
    (Points, "mean", 1 + 1e-6, ["C39"]),
    (Points, "mean", 1.1, ["X12"]),
    (Points, "fisher", 1 + 1e-6, ["C19"]),
    (Convolution, "mean", 1 + 1e-6, ["C39"]),
    (GaussianMixture, "mean", 1 + 1e-6, ["C54"]),
    (GaussianMixture, "lower_bound", 1 + 1e-6, ["C54"]),
    (GaussianMixture, "lower_bound_gradient", 1 + 1e-6, ["C54"]),
    (heads, "attend", 1.2, ["C54"]),
    (heads, "floored_spectrum", 1 + 1e-6, ["C19"]),
]


def test_every_claim_is_one_of_the_paper():
    assert {claim.source for claim in select(KEYS)} == {PAPER}


def test_every_claim_has_a_break_that_it_notices():
    assert {key for *_, keys in BREAKS for key in keys} == set(KEYS)


@pytest.mark.parametrize(("owner", "name", "factor", "keys"), BREAKS)
def test_code_that_is_slightly_wrong_changes_a_verdict(owner, name, factor, keys, unmoved):
    assert unmoved(owner, name, factor, keys) == []


def test_a_wrong_sign_of_the_mean_changes_the_verdict_on_several_heads(monkeypatch):
    mean = Points.mean
    monkeypatch.setattr(Points, "mean", lambda self, natural: -mean(self, natural))
    assert {claim.key for claim in select(KEYS) if examine(claim).surprises} >= {"C39"}


def test_figures_of_the_ledger_come_out(result):
    figures = {name: value for key in KEYS for name, value in result(key, 0).evidence.table.items()}
    assert figures["free dimensions of B for 3 heads"] == 3
    assert figures["one softmax against log Z, relative"] < 0.1 < figures["bound against log Z, relative"]
    assert figures["law"] == pytest.approx(8.6422, abs=1e-4)
