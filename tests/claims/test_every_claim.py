"""Properties of all claims: the expected verdict, a control that counts, and words for the statement."""

from dataclasses import replace

import pytest
import torch

from massieu.claims import Trial, Verdict, all_claims, examine
from massieu.claims.claim import Source

CLAIMS = {claim.key: claim for claim in all_claims()}
ROUNDING = 1e-6  # Smaller bounds are those of identities; larger ones are sampling errors, shares or counts.


@pytest.mark.parametrize(
    ("key", "seed"), [(key, seed) for key, claim in CLAIMS.items() for seed in ([0] if claim.slow else [0, 1, 2])]
)
def test_the_verdict_is_the_expected_one(key, seed, result):
    found = result(key, seed)
    assert found.verdict is found.claim.expected, (found.reason, found.evidence)
    control = found.evidence.gaps["control"]
    assert control.share > (1e3 if control.allowed <= ROUNDING else 1.25)


@pytest.mark.parametrize("key", CLAIMS)
def test_a_control_that_is_the_real_case_changes_nothing_else_and_leaves_the_claim_undecided(key, result):
    claim = result(key).claim
    usual, harmless = (claim.run(Trial(harmless=each)).gaps for each in (False, True))
    assert usual.pop("control") != harmless.pop("control")
    assert {name: gap.share for name, gap in usual.items()} == pytest.approx(
        {name: gap.share for name, gap in harmless.items()},
        rel=1e-6 if claim.on_model else 1e-9,
        abs=1e-4,  # what is less is rounding
    )
    found = examine(replace(claim, trials=1), harmless=True)
    assert found.verdict is Verdict.UNDECIDED
    assert "the control did not break" in found.reason


@pytest.mark.parametrize("claim", all_claims(), ids=lambda claim: claim.key)
def test_a_claim_states_the_source_the_place_the_reading_and_the_correction(claim):
    assert claim.source in Source
    assert claim.place
    assert 0 < len(claim.title) <= 60
    assert claim.wording.endswith((".", "?"))
    assert claim.reading.endswith(".")
    assert claim.reading != claim.wording
    assert claim.reference
    assert not claim.reference.endswith(".")
    assert claim.formula
    assert bool(claim.correction) == (claim.expected is not Verdict.HOLDS)


@pytest.mark.parametrize("key", CLAIMS)
def test_the_table_has_numbers_and_a_curve_has_a_value_for_every_point(key, result):
    evidence = result(key).evidence
    assert all(value == value for value in evidence.table.values())
    if evidence.curve is not None:
        assert evidence.curve.series
        assert {len(values) for values in evidence.curve.series.values()} == {len(evidence.curve.x)}
        assert torch.tensor([list(values) for values in evidence.curve.series.values()]).isfinite().all()
