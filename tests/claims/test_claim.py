"""Numbers meet bounds in one place, and an experiment that cannot tell says so."""

import dataclasses
import math

import pytest

from massieu.claims import Evidence, Gap, Trial, Verdict, judge, worst

IN, OUT = Gap(1e-12, 1e-9), Gap(0.5, 1e-9)


@pytest.mark.parametrize(
    ("gaps", "verdict"),
    [
        ({"printed": IN, "control": OUT}, Verdict.HOLDS),
        ({"printed": OUT, "corrected": IN, "control": OUT}, Verdict.HOLDS_CORRECTED),
        ({"printed": OUT, "conditional": IN, "control": OUT}, Verdict.CONDITIONAL),
        ({"printed": OUT, "control": OUT}, Verdict.FAILS),
        ({"printed": OUT, "corrected": OUT, "control": OUT}, Verdict.FAILS),
        ({"printed": OUT, "instead": IN, "control": OUT}, Verdict.FAILS),
        ({"printed": IN, "control": IN}, Verdict.UNDECIDED),
        ({"printed": OUT, "instead": OUT, "control": OUT}, Verdict.UNDECIDED),
        ({"printed": Gap(math.nan, 1.0), "control": OUT}, Verdict.UNDECIDED),
        ({"printed": IN, "control": Gap(math.inf, 1.0)}, Verdict.UNDECIDED),
        ({"printed": IN, "corrected": Gap(1.0, math.nan), "control": OUT}, Verdict.UNDECIDED),
        ({"printed": (1e-12, 1e-9), "control": (0.5, 1e-9)}, Verdict.HOLDS),
    ],
)
def test_a_verdict_follows_from_the_gaps(gaps, verdict):
    assert judge(Evidence(**gaps)) is verdict


@pytest.mark.parametrize(
    ("gap", "within"), [(Gap(1, 1), True), (Gap(0, 0), True), (Gap(1e-300, 0), False), (Gap(2, 1), False)]
)
def test_a_gap_may_be_as_large_as_allowed(gap, within):
    assert gap.within is within


def test_the_worst_trial_counts_and_the_control_that_broke_least():
    easy = Evidence(printed=Gap(1e-12, 1e-9), corrected=Gap(1.0, 2.0), control=Gap(5.0, 1.0), table={"n": 1.0})
    hard = Evidence(printed=Gap(1e-3, 1e-9), corrected=Gap(1.0, 1.5), control=Gap(0.5, 1.0), table={"n": 2.0})
    found = worst([easy, hard])
    assert (found.printed, found.corrected, found.control) == (hard.printed, hard.corrected, hard.control)
    assert found.table == {"n": 1.0}
    assert judge(easy) is Verdict.HOLDS
    assert judge(found) is Verdict.UNDECIDED
    assert worst([easy]) == easy
    nan = dataclasses.replace(easy, printed=Gap(math.nan, 1.0))
    assert math.isnan(worst([easy, nan]).printed.measured)
    for strange in (math.nan, math.inf):
        bad = dataclasses.replace(easy, control=Gap(strange, 1.0))
        assert judge(worst([easy, bad])) is judge(worst([bad, easy])) is Verdict.UNDECIDED


def test_a_trial_gives_the_same_numbers_again():
    trial = Trial(3)
    assert trial.generator.initial_seed() == 3
    assert trial.generator is trial.generator  # drawing twice gives other numbers
    assert (trial.size(2, 9), Trial(full=True).size(2, 9)) == (2, 9)
    assert (trial.control("broken", "real"), Trial(harmless=True).control("broken", "real")) == ("broken", "real")
