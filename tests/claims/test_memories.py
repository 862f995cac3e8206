"""The claims about associative memories: their verdicts, and that these can go wrong."""

import re
from dataclasses import replace

import pytest

from massieu.checks import pip_install
from massieu.claims import Verdict, examine, select
from massieu.claims.memory import guarantees, polar_memories, retrieval_numbers, softmax_memories
from massieu.memory import Classical, Continuous, Dense, Exponential, Kernel

POLAR = ["M1", "M2", "M3", "M4", "M6", "M9"]
PICTURES = ["M14", "M17", "M18", "M19", "P5", "P6"]
SOFTMAX = ["M5", "M10", "M11", "M12", "M13", "M15"]
GUARANTEES = ["M7", "M8", "M16", "P7", "P8"]
NUMBERS = ["P1", "P2", "P3", "P4", "P9"]
KEYS = [*POLAR, *PICTURES, *SOFTMAX, *GUARANTEES, *NUMBERS]

# Statements of the slides and the paper that are loose or wrong, and the claim about each.
LOOSE = {
    "all stored patterns are fixed points": "M1",
    "capacity d / (2 log d), about 0.14 d": "M2",
    "diagonal kept": "M3",
    "sgn(W ξ b)": "M4",
    "continuous energy of Krotov and Hopfield": "M15",
    "convergence to a local minimum": "M5",
    "capacity 2^{d/2}": "M6",
    "exponential storage capacity": "M7",
    "convergence after one update": "M8",
    "no interference from correlated data": "M9",
    "V = K W_V is attention": "M10",
    "quadratic term models the skip": "M11",
    "Hessian of log Z is a second moment": "C18",
    "order of the Kullback-Leibler divergence": "C14",
    "ascent increases entropy": "C23",
    "proofs apply for fixed patterns": "M16",
}

# Where the code breaks, by which factor too large, and which claims must notice.
BREAKS = [
    (Classical, "update", -1.0, ["M1", "M4"]),
    (Classical, "retrieve", -1.0, ["M2", "M14", "P1"]),
    (Classical, "energy", -1.0, ["M3"]),
    (Classical, "flip_cost", -1.0, ["P2"]),
    (Exponential, "retrieve", -1.0, ["M6", "M9", "M17", "M18"]),
    (Exponential, "flip_cost", -1.0, ["P4", "P6"]),
    (Continuous, "retrieve", -1.0, ["M18"]),
    (Dense, "retrieve", -1.0, ["M17"]),
    (Dense, "flip_cost", -1.0, ["P3"]),
    (Continuous, "update", 1 + 1e-6, ["M10", "M11", "M13"]),
    (Continuous, "retrieve", 1 + 1e-3, ["M5", "P9"]),
    (Continuous, "retrieve", 1.1, ["P8"]),
    (Continuous, "retrieve", -1.0, ["M7"]),
    (Continuous, "update", 1.01, ["M8", "M16", "M19"]),
    (Continuous, "energy", 1 + 1e-6, ["M15"]),
    (Kernel, "update", -1.0, ["P5"]),
    (softmax_memories, "log_density", 1 + 1e-6, ["M12"]),
    (softmax_memories, "denoise", 1 + 1e-6, ["M13"]),
    (guarantees, "guaranteed_storage", 1.001, ["M7", "P7"]),
    (guarantees, "theorem_3", 1.001, ["M7", "P7"]),
    (guarantees, "one_step_bound", 10.0, ["M8"]),
    (guarantees, "separations", 1.001, ["M8", "M16", "P8"]),
    (guarantees, "farthest", 1.001, ["M8", "M16", "P8"]),
    (polar_memories, "capacity", 1.05, ["M2"]),
    (retrieval_numbers, "capacity", 0.9, ["P2", "P3"]),
    (retrieval_numbers, "patterns_in_the_limit", 1.05, ["P2"]),
]
# The part of a certificate that is wrong, by which factor, and which claims must notice.
PARTS = [
    ("radius", 1 + 1e-6, ["P8"]),
    ("bound", 10.0, ["M16", "P8"]),
    ("ramsauer_radius", 0.1, ["P8"]),
]


def test_every_loose_statement_has_a_claim_that_does_not_simply_repeat_it():
    found = {claim.key: claim for claim in select(LOOSE.values())}
    assert set(found) == set(LOOSE.values())
    assert [key for key, claim in found.items() if claim.expected is Verdict.HOLDS] == ["M16"]


def test_every_claim_has_a_break_that_it_notices():
    assert {key for *_, keys in BREAKS for key in keys} == set(KEYS)


@pytest.mark.parametrize(("owner", "name", "factor", "keys"), BREAKS)
def test_code_that_is_wrong_changes_a_verdict(owner, name, factor, keys, unmoved):
    assert unmoved(owner, name, factor, keys) == []


@pytest.mark.parametrize(("part", "factor", "keys"), PARTS)
def test_a_certificate_that_is_wrong_in_one_part_changes_a_verdict(part, factor, keys, monkeypatch):
    original = guarantees.certificate

    def wrong(memory):
        found = original(memory)
        return replace(found, **{part: factor * getattr(found, part)})

    monkeypatch.setattr(guarantees, "certificate", wrong)
    assert [claim.key for claim in select(keys) if not examine(claim).surprises] == []


def test_figures_of_the_notes_come_out(result):
    figures = {name: value for key in KEYS for name, value in result(key, 0).evidence.table.items()}
    assert figures["share moved of 3 patterns in 4 dimensions"] == pytest.approx(2 / 3)
    assert figures["patterns for ρ = 0.1, d = 20"] == pytest.approx(39.67, abs=0.01)
    assert figures["its least curvature"] == pytest.approx(-3)
    assert figures["after the update"] == pytest.approx(0.7382, abs=1e-4)
    assert figures["after the update added to the state"] == pytest.approx(1.0432, abs=1e-4)
    assert figures["guaranteed, d = 64"] == pytest.approx(1.66e6, rel=1e-2)
    assert figures["patterns, d = 75, K = 1"] == pytest.approx(10.97, abs=0.01)
    assert figures["observed pixels alone"] == 1
    assert figures["patterns for power 2"] == 8
    assert figures["overlap at 0.12 d by the equations"] == pytest.approx(0.9932, abs=1e-4)
    assert figures["lost from a white half, exponential"] == pytest.approx(0.2)
    assert figures["mean overlap"] == pytest.approx(0.0854, abs=1e-4)
    assert figures["m at β ‖x‖^2 = 1.21"] == pytest.approx(0.66993, abs=1e-5)


def test_digits_without_scikit_learn_say_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sklearn.datasets", None)
    with pytest.raises(
        ImportError, match=re.escape(f"need scikit-learn, which is not installed; {pip_install('verify')}")
    ):
        polar_memories.digits()
