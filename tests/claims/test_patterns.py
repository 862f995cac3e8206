"""The claims about sparse patterns: their verdicts, controls that count, and code whose break they notice."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from massieu.claims import Result, Verdict, examine, pattern_theorems, patterns, select
from massieu.claims.claim import Trial
from massieu.patterns import Schedule, dilated, ring, star, window

KEYS = [f"U{number}" for number in range(1, 9)]
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


@pytest.mark.parametrize("key", KEYS)
def test_a_control_is_the_measurement_that_comes_out_but_for_one_ingredient(key):
    claim = result(key, 0).claim
    usual, harmless = (claim.run(Trial(harmless=each)).gaps for each in (False, True))
    assert harmless.pop("control") == harmless[REAL[claim.expected]]
    assert usual.pop("control").share > 1.5
    assert usual == harmless
    found = examine(replace(claim, trials=1), harmless=True)
    assert found.verdict is Verdict.UNDECIDED
    assert found.reason.startswith("the control did not break")


@pytest.mark.parametrize("key", KEYS)
def test_a_claim_says_what_is_claimed_where_and_what_is_true_instead(key):
    claim = result(key, 0).claim
    assert claim.statement.endswith(".")
    assert claim.source
    assert claim.formula
    assert bool(claim.correction) == (claim.expected is not Verdict.HOLDS)


def test_what_the_notes_say_comes_out():
    figures = {key: result(key, 0).evidence.table for key in KEYS}
    assert figures["U1"]["of which the fixed pattern"] == 1
    assert figures["U2"]["exponent, strided"] == pytest.approx(1.5, abs=0.02)
    assert figures["U3"]["layers to full reach of the star"] == 2
    assert (figures["U4"]["layers, strided"], figures["U4"]["layers, fixed"]) == (3, 2)
    assert figures["U6"] == {"softmax meets the condition": 1, "the first of a list meets it": 0}
    assert figures["U7"]["of four patterns no theorem covers alone"] == 3
    assert figures["U8"]["theorem for the ring applies"] == 1


@pytest.mark.parametrize(("key", "falls"), [("U2", None), ("U5", "L2")])
def test_a_curve_has_a_value_for_every_point(key, falls):
    curve = result(key, 0).evidence.curve
    assert {len(values) for values in curve.series.values()} == {len(curve.x)}
    assert torch.tensor([list(values) for values in curve.series.values()]).isfinite().all()
    assert falls is None or curve.series[falls][-1] < curve.series[falls][0] / 8


CHECK, MODEL = patterns.check_universality, pattern_theorems.Transformer


def apart(*args, **options):
    """A schedule in which tokens of different remainder never meet."""
    return Schedule((dilated(1, 2), dilated(2, 2)))


@pytest.mark.parametrize(
    ("module", "name", "wrong", "keys"),
    [
        (patterns, "strided", apart, ["U1", "U4"]),
        (patterns, "fixed", apart, ["U1", "U4"]),
        (patterns, "star_ring", star, ["U1", "U2", "U3"]),
        (patterns, "check_universality", lambda *args: replace(CHECK(*args), hub=None), ["U3"]),
        (patterns, "Schedule", lambda given: given[1], ["U7"]),
        (pattern_theorems, "by_table", lambda points, *rest: 0 * points[:, 0], ["U5"]),
        (pattern_theorems, "star_ring", lambda: window(1), ["U6"]),
        (
            pattern_theorems,
            "Transformer",
            lambda *args, **options: MODEL(*args, **{**options, "positions": None}),
            ["U8"],
        ),
    ],
)
def test_code_that_is_wrong_changes_a_verdict(module, name, wrong, keys, monkeypatch):
    monkeypatch.setattr(module, name, wrong)
    assert [claim.key for claim in select(keys) if not examine(claim).surprises] == []


def test_the_longest_path_is_that_of_small_graphs():
    assert patterns.longest_path(ring().mask(6).numpy()) == 6
    assert patterns.longest_path(patterns.star().mask(6).numpy()) == 3
    assert patterns.longest_path(patterns.dilated(1, 2).mask(6).numpy()) == 3
