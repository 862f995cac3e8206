"""The claims about universal approximation: their verdicts, controls that count, and code whose break they notice."""

import importlib
from dataclasses import replace
from functools import cache

import pytest
import torch

pytest.importorskip("scipy")
pytest.importorskip("pandas")
from massieu.claims import Result, Verdict, examine, select
from massieu.claims.claim import Trial

KEYS = [f"U{number}" for number in range(21, 35)]

# The gap that is within its bound, by verdict.
REAL = {Verdict.HOLDS: "printed", Verdict.HOLDS_CORRECTED: "corrected", Verdict.CONDITIONAL: "conditional"}


@cache
def result(key: str, seed: int) -> Result:
    (claim,) = select([key])
    return examine(claim, seed=seed)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("key", KEYS)
def test_the_verdict_is_the_expected_one(key, seed):
    found = result(key, seed)
    assert found.verdict is found.claim.expected, (found.reason, found.evidence)


@pytest.mark.parametrize("key", KEYS)
def test_a_control_is_the_measurement_that_comes_out_but_for_one_ingredient(key):
    claim = result(key, 0).claim
    usual, harmless = (claim.run(Trial(harmless=each)).gaps for each in (False, True))
    assert harmless.pop("control") == harmless[REAL[claim.expected]]
    assert usual.pop("control") not in usual.values()
    assert usual == harmless


@pytest.mark.parametrize("key", KEYS)
def test_a_control_that_is_the_real_case_leaves_the_claim_undecided(key):
    found = examine(replace(result(key, 0).claim, trials=1), harmless=True)
    assert found.verdict is Verdict.UNDECIDED
    assert found.reason.startswith("the control did not break")


@pytest.mark.parametrize("key", KEYS)
def test_a_claim_says_what_is_claimed_where_and_what_is_true_instead(key):
    claim = result(key, 0).claim
    assert claim.statement.endswith(".")
    assert claim.source
    assert claim.formula
    assert bool(claim.correction) == (claim.expected is not Verdict.HOLDS)


def test_a_curve_has_a_value_for_every_point():
    curve = result("U32", 0).evidence.curve
    assert {len(values) for values in curve.series.values()} == {len(curve.x)}


def test_what_the_notes_measured_comes_out():
    figures = {key: result(key, 0).evidence.table for key in KEYS}
    assert figures["U21"]["largest, n = 3, d = 2, T = 3"] == 112_120_064
    assert figures["U26"]["numbers of a rank-one hardmax head, 9 tokens, T = 3"] == 45
    assert figures["U26"]["contexts"] == 405
    assert figures["U27"]["decimal logarithm of the least gap"] < -100
    assert figures["U28"]["machine epsilons at the proof's scale"] == 0
    assert figures["U28"]["machine epsilons with codes that were searched"] > 1e10
    assert figures["U30"]["weights that are not zero"] < figures["U30"]["parameters of the corollary"]
    assert figures["U30"]["parameters of the corollary"] < figures["U30"]["parameters as stored"]
    assert figures["U33"]["largest error in strips of 0.0001 cells"] > 1


def broken_stack(original):
    def stack(*given, **options):
        found = original(*given, **options)
        return replace(found, identifiers=found.identifiers // 1000)

    return stack


def broken_codes(original):
    """A search that returns two codes that are the same."""

    def search(*given, **options):
        found = original(*given, **options)
        codes = found.codes.clone()
        codes[1] = codes[2]
        return replace(found, codes=codes)

    return search


def broken_table(original):
    def look_up(dim, keys, values):
        return original(dim, keys + 3 * keys.diff().min() * torch.arange(len(keys)), values)

    return look_up


@pytest.mark.parametrize(
    ("place", "wrong", "keys"),
    [
        ("massieu.claims.contextual_maps.shift_stack", broken_stack, ["U21", "U22", "U23"]),
        ("massieu.claims.contextual_maps.boltz", lambda original: lambda scores: 1.001 * original(scores), ["U24"]),
        (
            "massieu.claims.contextual_maps._exact_boltz",
            lambda original: lambda *given: 0 * original(*given),
            ["U25", "U27"],
        ),
        ("massieu.claims.contextual_maps.contextual_map", broken_codes, ["U28"]),
        ("massieu.universal.construction.contextual_map", broken_codes, ["U29", "U32"]),
        (
            "massieu.universal.memorization.interpolant",
            lambda original: lambda a, b, c, d: original(a, b, c, d.flip(0)),
            ["U30"],
        ),
        ("massieu.claims.contextual_maps.attended", lambda original: lambda *given: original(*given) ** 2, ["U31"]),
        ("massieu.universal.memorization.table", broken_table, ["U34"]),
        ("massieu.universal.construction.table", broken_table, ["U29", "U33"]),
    ],
)
def test_code_that_is_wrong_changes_verdicts(place, wrong, keys, monkeypatch):
    module, name = place.rsplit(".", 1)
    target = importlib.import_module(module)
    monkeypatch.setattr(target, name, wrong(getattr(target, name)))
    assert [claim.key for claim in select(keys) if not examine(claim).surprises] == []
