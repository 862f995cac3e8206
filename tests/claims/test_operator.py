"""The claims about the operator, its equilibrium and samples: their verdicts, and that these can go wrong."""

import pytest
import torch

from massieu.claims import examine, select
from massieu.claims.dynamics import equilibrium, gradients, hopfield, operator, sampling
from massieu.claims.sources import OURS, PAPER
from massieu.dynamics import evolution, maps
from massieu.measures import Gaussian, Points, Sphere

OPERATOR = ["C11", "C12", "C21", "C23", "C41", "C48"]
HOPFIELD = ["C20", "C38", "X10"]
SAMPLING = ["C27", "C40", "C55", "X9"]
EQUILIBRIUM = ["C24", "C25", "C26", "C45", "X8", "X11"]
GRADIENTS = ["C56"]
KEYS = [*OPERATOR, *HOPFIELD, *SAMPLING, *EQUILIBRIUM, *GRADIENTS]

# Predictions of our own, which the paper does not state.
OWN = {"C48", "C55", "X8", "X9", "X10", "X11"}


# Where the code breaks, by which factor too large, and which claims must notice.
BREAKS = [
    (operator, "ascend", 1 + 1e-6, ["C11", "C12", "C23"]),
    (operator, "attend", 1 + 1e-6, ["C48"]),
    (operator, "ascend", 1.01, ["C41"]),
    (operator, "attend", -0.1, ["C21"]),  # an inequality with room
    (hopfield, "hopfield_step", 1 + 1e-6, ["C38"]),
    (hopfield, "ascend", 1 + 1e-6, ["C38"]),
    (hopfield, "hopfield_time", 1 + 1e-6, ["C38", "X10"]),
    (operator, "prox", 1 + 1e-6, ["C48"]),
    (sampling, "resample", 1.1, ["C40", "C55"]),
    (sampling, "halve", 1.1, ["C55"]),
    (evolution, "ascend", 1.02, ["C55"]),
    (evolution, "attend", 1 + 1e-6, ["C20"]),
    (evolution, "ascend", 1e-3, ["X11"]),  # tokens so short that attention is affine
    (equilibrium, "normal_scores", 1 + 1e-6, ["X11"]),
    (equilibrium, "normal_ranks", 0.0, ["X11"]),
    (maps, "attend", 1e-3, ["C45"]),  # layer normalization undoes the former
    (Points, "fisher", 1 + 1e-6, ["C23"]),
    (Points, "mean", 1.1, ["X8"]),
    (Gaussian, "mean", 1 + 1e-6, ["C25"]),
    (Sphere, "mean", torch.linspace(1, 1.001, 8), ["C26"]),  # no longer parallel
    (equilibrium, "renormalization", 1 + 1e-6, ["C24"]),
    (equilibrium, "gaussian_moments", 1 + 1e-6, ["C25"]),
    (sampling, "attend", 1.5, ["C27", "X9"]),
    (sampling, "token_limit", 1.3, ["X9"]),
    (equilibrium, "cumulant_amplification", 1.02, ["X8"]),
    (gradients, "layer_norm", 10.0, ["C56"]),
]


def test_a_claim_is_of_the_paper_or_our_own():
    assert {claim.key: claim.source for claim in select(KEYS)} == {key: OURS if key in OWN else PAPER for key in KEYS}


def test_every_claim_has_a_break_that_it_notices():
    assert {key for *_, keys in BREAKS for key in keys} == set(KEYS)


@pytest.mark.parametrize(("owner", "name", "factor", "keys"), BREAKS)
def test_code_that_is_slightly_wrong_changes_a_verdict(owner, name, factor, keys, unmoved):
    assert unmoved(owner, name, factor, keys) == []


def test_steps_in_the_wrong_direction_change_the_verdicts_of_those_who_take_them(monkeypatch):
    ascend = operator.ascend
    for owner in (operator, hopfield, evolution):
        monkeypatch.setattr(owner, "ascend", lambda x, *keys, step=1.0, **more: ascend(x, *keys, step=-step, **more))
    surprised = {claim.key for claim in select([*OPERATOR, *HOPFIELD]) if examine(claim).surprises}
    assert surprised == {"C11", "C12", "C23", "C38", "C41", "X10"}


def test_figures_of_the_ledger_come_out(result):
    figures = {name: value for key in KEYS for name, value in result(key, 0).evidence.table.items()}
    assert figures["−0.6 beside 1 and 2 goes to"] == pytest.approx(-0.4725, abs=1e-4)
    assert figures["0.2 behind a causal mask comes to"] == pytest.approx(0.1690, abs=1e-4)
    assert figures["66 times the variance as printed, Σ = (2 1; 1 2), μ = (1, −1)"] == pytest.approx(17)
    assert figures["66 times the covariance"] == pytest.approx(5)
    assert figures["variance as printed, Σ = 1, μ = 2"] == pytest.approx(0.1)
    assert figures["least eigenvalue of the difference, Σ = (2 1; 1 2)"] == pytest.approx(3)
    assert figures["largest"] == pytest.approx(5)
    assert figures["gain of entropy"] == pytest.approx(2.0794415, abs=1e-7)
    assert figures["of these not self-dominant"] == 0
    assert figures["excess kurtosis on the sphere"] == pytest.approx(figures["−6 / (n + 2)"], abs=0.05)
    assert figures["slope in log N"] == pytest.approx(-0.5, abs=0.05)
