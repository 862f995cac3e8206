"""The claims about models in training: expected verdicts, controls that count, runs that would change them."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("tokenizers")
from massieu.claims import Trial, Verdict, examine, select
from massieu.claims.margin import training
from massieu.claims.sources import OURS, SLIDES

KEYS = ["S4", "S5", "S6"]


@pytest.fixture
def altered(monkeypatch):
    """Put another run in the place of the watched one: its readings in another order, or none but the first."""

    def alter(order):
        watched, own = training.watched, training.watched("stable", 0, 120)
        steps = [reading.step for reading in own.readings]
        readings = [replace(own.readings[at], step=step) for at, step in zip(order, steps, strict=True)]
        altered = replace(own, readings=tuple(readings))
        monkeypatch.setattr(
            training, "watched", lambda kind, *rest: altered if kind == "stable" else watched(kind, *rest)
        )

    return alter


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("key", KEYS)
def test_the_verdict_is_the_expected_one(key, seed, result):
    found = result(key, seed)
    assert found.verdict is found.claim.expected, (found.reason, found.evidence)
    assert found.evidence.gaps["control"].share > 1.25
    assert all(value == value for value in found.evidence.table.values())


@pytest.mark.parametrize("claim", select(KEYS), ids=KEYS)
def test_a_claim_is_a_motivation_of_the_slides_or_our_remark_on_one(claim):
    assert claim.source == (OURS if claim.key == "S5" else SLIDES)
    assert "motivation" in claim.place


@pytest.mark.parametrize("claim", select(KEYS), ids=KEYS)
def test_a_control_that_is_the_real_case_changes_nothing_else_and_leaves_the_claim_undecided(claim):
    usual, harmless = (claim.run(Trial(harmless=each)).gaps for each in (False, True))
    assert usual.pop("control") != harmless.pop("control")
    assert usual == harmless
    found = examine(replace(claim, trials=1), harmless=True)
    assert found.verdict is Verdict.UNDECIDED
    assert "the control did not break" in found.reason


@pytest.mark.parametrize("key", ["S5", "S6"])
def test_a_curve_has_a_value_for_every_reading(key, result):
    curve = result(key).evidence.curve
    assert curve.x == list(range(0, 121, 20))
    assert {len(values) for values in curve.series.values()} == {7}


def test_the_verdicts_do_not_depend_on_the_length_of_a_run(monkeypatch):
    watched, own = training.watched, training.watched("stable", 3, 240)
    for readings in (7, 9, 11, 13):
        short = replace(own, readings=own.readings[:readings])
        monkeypatch.setattr(
            training, "watched", lambda kind, *rest, run=short: run if kind == "stable" else watched(kind, *rest)
        )
        for claim in select(KEYS):
            assert examine(replace(claim, trials=1)).verdict is claim.expected, (claim.key, readings)


def test_a_run_read_backwards_gives_other_verdicts(altered):
    altered(range(6, -1, -1))
    assert examine(*select(["S5"])).verdict is Verdict.UNDECIDED
    assert examine(*select(["S6"])).verdict is Verdict.UNDECIDED


def test_attention_that_stays_as_it_was_neither_gets_diffuse_nor_grows(altered):
    altered([0] * 7)
    assert examine(*select(["S5"])).verdict is Verdict.FAILS
    assert examine(*select(["S6"])).verdict is Verdict.UNDECIDED


def test_maps_that_got_sparser_at_once_would_not_be_called_diffuse_first(altered):
    altered([1, 2, 3, 4, 5, 6, 6])
    found = examine(*select(["S5"]))
    assert found.evidence.printed.share > 1
    assert found.verdict is Verdict.FAILS


def test_maps_that_were_sparse_would_not_be_called_diffuse(monkeypatch):
    own = training.heads_of

    def sharp(run, quantity):
        found = own(run, quantity)
        if quantity == "effective_atoms":
            found[-1] = 2.0
        return found

    monkeypatch.setattr(training, "heads_of", sharp)
    found = examine(*select(["S4"]))
    assert found.evidence.printed.within
    assert found.verdict is Verdict.UNDECIDED
    assert "what is true instead did not come out" in found.reason


def test_a_row_of_the_runs_sees_so_many_tokens():
    (reading, *_) = training.watched("stable", 0, 120).readings
    seen = torch.arange(1, 65).double()
    assert seen.mean() == training.ATOMS
    uniform = (reading.heads["entropy"] / seen.log().mean()).mean()
    assert 0.98 < float(uniform) <= 1
