"""What all claims have in common: the expected verdict, a control that counts, and words for what is claimed."""

from dataclasses import replace

import pytest
import torch

from massieu.claims import Verdict, all_claims, examine
from massieu.claims.claim import Trial

# Those that measure or train a model have tests of their own.
CLAIMS = {claim.key: claim for claim in all_claims() if not claim.on_model and claim.key[0] != "S"}
CURVES = ["C10", "C20", "C27", "C35", "C36", "C37", "C41", "C42", "X8", "X9", "P1", "P9"]
CURVES += ["T8", "T9", "T10", "T11", "T12", "T16", "I9", "I10", "I13", "U2", "U5", "U32"]

# Bounds that are sampling errors, shares or counts. All other claims are identities, and wrong by orders of magnitude in
# their control.
WIDE = {"C27", "C40", "C41", "C42", "C45", "X8", "X9", "X11"}
WIDE |= {"M1", "M2", "M3", "M6", "M7", "M8", "M9", "M14", "P1", "P2", "P3", "P4", "P5", "P6", "P7"}
WIDE |= {f"T{number}" for number in range(4, 17)}
WIDE |= {"I9", "I10", "I11", "I13", "I14", "I15", "I17", "I18", "I19"}
WIDE |= {"U2", "U3", "U5", "U21", "U23", "U26", "U27", "U28", "U30", "U31", "U32", "U33"}


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("key", CLAIMS)
def test_the_verdict_is_the_expected_one(key, seed, result):
    found = result(key, seed)
    assert found.verdict is found.claim.expected, (found.reason, found.evidence)
    assert found.evidence.gaps["control"].share > (1.25 if key in WIDE else 1e3)


@pytest.mark.parametrize("key", CLAIMS)
def test_a_control_that_is_the_real_case_changes_nothing_else_and_leaves_the_claim_undecided(key, result):
    claim = result(key).claim
    usual, harmless = (claim.run(Trial(harmless=each)).gaps for each in (False, True))
    assert usual.pop("control") != harmless.pop("control")
    assert {name: gap.share for name, gap in usual.items()} == pytest.approx(
        {name: gap.share for name, gap in harmless.items()}, rel=1e-9
    )
    found = examine(replace(claim, trials=1), harmless=True)
    assert found.verdict is Verdict.UNDECIDED
    assert "the control did not break" in found.reason


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=CLAIMS)
def test_a_claim_says_what_is_claimed_where_and_what_is_true_instead(claim):
    assert claim.statement.endswith(".")
    assert claim.source
    assert claim.formula
    assert bool(claim.correction) == (claim.expected is not Verdict.HOLDS)


@pytest.mark.parametrize("key", CURVES)
def test_a_curve_has_a_value_for_every_point(key, result):
    curve = result(key).evidence.curve
    assert curve.series
    assert {len(values) for values in curve.series.values()} == {len(curve.x)}
    assert torch.tensor([list(values) for values in curve.series.values()]).isfinite().all()
