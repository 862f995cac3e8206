"""The claims about transformers trained inside the experiment: verdicts, controls, and that these can go wrong."""

import pytest

from massieu.claims import Verdict, examine, select
from massieu.context import SoftmaxModel

KEYS = ["I21", "I22", "I23", "R10"]

# Where the code breaks once the models are trained, by which factor too large, and which claims must notice.
BREAKS = [(SoftmaxModel, "ask", 2.0, ["I21", "I22"]), (SoftmaxModel, "ask", 0.0, ["I23", "R10"])]


@pytest.mark.parametrize("key", KEYS)
def test_the_verdict_is_the_expected_one_and_the_control_counts(key, result):
    found = result(key)
    assert found.verdict is found.claim.expected, (found.reason, found.evidence)
    assert found.evidence.gaps["control"].share > 1.25


@pytest.mark.parametrize("key", KEYS)
def test_a_control_that_is_the_real_case_leaves_the_claim_undecided(key):
    (claim,) = select([key])
    found = examine(claim, harmless=True)
    assert found.verdict is Verdict.UNDECIDED
    assert "the control did not break" in found.reason


@pytest.mark.parametrize(("owner", "name", "factor", "keys"), BREAKS)
def test_models_that_answer_wrongly_change_a_verdict(owner, name, factor, keys, unmoved):
    assert unmoved(owner, name, factor, keys) == []


def test_every_claim_has_a_break_that_it_notices():
    assert {key for *_, keys in BREAKS for key in keys} == set(KEYS)


def test_models_err_between_the_optimum_and_zero(result):
    table = result("I21").evidence.table
    assert table["of ridge regression"] < table["risk of the model"] < table["ε"] < table["of the zero predictor"]
    table = result("R10").evidence.table
    assert table["share of ridge, 2 functions"] < 0.5 < table["share of ridge, 64 functions"]
