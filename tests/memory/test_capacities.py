"""Capacities: formulas by criterion, measurements with intervals, and the trap of the diagonal."""

import math

import pytest
import torch
from scipy.stats import binomtest

from massieu.checks import UserError
from massieu.memory import capacity, measure_capacity, wilson_interval


def test_formulas_differ_by_criterion():
    found = [capacity("classical", 1024, criterion) for criterion in ("all_fixed", "most_fixed", "small_errors")]
    assert found == pytest.approx([36.93, 73.87, 141.3], abs=0.05)
    # Two of them cross near dimension 36, which may be why they are confused.
    assert capacity("classical", 37, "most_fixed") == pytest.approx(capacity("classical", 37, "small_errors"), rel=0.02)


def test_more_patterns_than_a_float_can_count_are_infinitely_many():
    assert capacity("exponential", 4096, "all_recovered") == math.inf
    assert capacity("classical", 4096, "most_fixed") == pytest.approx(246.2, abs=0.1)


@pytest.mark.parametrize("criterion", ["all_fixed", "most_fixed"])
def test_the_second_power_is_the_classical_memory(criterion):
    assert capacity("dense", 100, criterion, power=2) == pytest.approx(capacity("classical", 100, criterion))


def test_polynomial_and_exponential_numbers():
    assert [round(capacity("dense", 64, "most_fixed", power=power)) for power in (2, 3, 4)] == [8, 164, 2101]
    shares = [capacity("dense", 10, "small_errors", power=power) / 10 ** (power - 1) for power in (2, 3, 4)]
    assert shares == pytest.approx([0.1385, 0.0461, 0.0092], abs=6e-5)
    found = [capacity("exponential", 20, "all_recovered", corruption=rho) for rho in (0.0, 0.05, 0.1, 0.2)]
    assert [round(value) for value in found] == [1024, 141, 40, 7]
    assert found[0] == pytest.approx(2**10)


@pytest.mark.parametrize(("successes", "trials"), [(0, 10), (3, 10), (10, 10), (187, 400)])
@pytest.mark.parametrize("confidence", [0.9, 0.99])
def test_intervals_are_those_of_wilson(successes, trials, confidence):
    expected = binomtest(successes, trials).proportion_ci(confidence, method="wilson")
    assert wilson_interval(successes, trials, confidence) == pytest.approx((expected.low, expected.high), abs=1e-12)


def exact_rate(dim, number):
    """Probability that a bit of a stored pattern is stable, from the binomial law; zero diagonal and a tie keeps."""
    count, least = (number - 1) * (dim - 1), ((number - 1) * (dim - 1) - (dim - 1)) / 2
    return 1 - sum(math.comb(count, k) for k in range(math.ceil(least))) / 2**count


@pytest.mark.parametrize("number", [7, 12])
def test_measured_rates_agree_with_the_exact_law(number):
    """Bits of a pattern are almost independent: the rate of patterns is the power of the rate of bits."""
    (row,) = measure_capacity(
        "classical", 64, [number], criterion="most_fixed", trials=400, generator=3, confidence=0.999
    )
    assert row.low <= exact_rate(64, number) ** 64 <= row.high
    assert row.random_fixed == 0
    if number == 12:  # the control: the rate of another number is outside
        assert not row.low <= exact_rate(64, 7) ** 64 <= row.high


def test_all_are_fixed_at_one_number_and_most_at_twice_it():
    few, many = measure_capacity("classical", 256, [11, 23], criterion="all_fixed", trials=40)
    assert few.rate >= 0.95
    assert 0.05 < many.rate < 0.6
    (most,) = measure_capacity("classical", 256, [23], criterion="most_fixed", trials=100)
    assert most.low > many.high


def test_small_errors_are_kept_below_the_transition_and_lost_above():
    below, above = measure_capacity("classical", 400, [40, 88], criterion="small_errors", trials=20)
    assert below.rate == 1.0
    assert above.rate < 0.3
    assert below.random_fixed is None
    # Nothing is exactly fixed there: another criterion, another capacity.
    (fixed,) = measure_capacity("classical", 400, [56], criterion="most_fixed", trials=40)
    assert fixed.rate < 0.4


def test_recovery_from_flipped_bits():
    rows = measure_capacity("exponential", 20, [40, 1024], criterion="most_recovered", trials=60, corruption=0.1)
    assert rows[0].rate > 0.85
    assert rows[1].rate < 0.8
    (cube,) = measure_capacity("dense", 40, [30], criterion="most_recovered", trials=20, corruption=0.1, power=3)
    assert cube.rate > 0.8


def test_all_recovered_is_harder_than_most_recovered():
    options = {"trials": 40, "corruption": 0.1}
    (every,) = measure_capacity("exponential", 20, [80], criterion="all_recovered", **options)
    (most,) = measure_capacity("exponential", 20, [80], criterion="most_recovered", **options)
    assert every.high < most.low
    (alone,) = measure_capacity("exponential", 20, [1], criterion="all_recovered", **options)
    assert alone.rate == 1.0


def test_a_number_given_twice_has_two_equal_rows():
    options = {"criterion": "most_fixed", "trials": 10}
    seen = []
    rows = measure_capacity("classical", 32, [2, 8, 2], progress=lambda *both: seen.append(both), **options)
    assert [row.number for row in rows] == [2, 8, 2]
    assert rows[0] == rows[2] == measure_capacity("classical", 32, [2], **options)[0]
    assert seen == [(10, 20), (20, 20)]


def test_the_gradient_rule_has_a_capacity_of_its_own():
    options = {"criterion": "most_fixed", "trials": 20, "power": 4}
    (flip,) = measure_capacity("dense", 20, [400], **options)
    assert measure_capacity("dense", 20, [400], rule="flip", **options) == [flip]
    assert flip.random_fixed < 5
    # There coordinates hold themselves, and so do random states.
    with pytest.raises(UserError, match="random"):
        measure_capacity("dense", 20, [400], rule="gradient", **options)


def test_the_trap_of_the_diagonal_is_refused():
    with pytest.raises(UserError, match="random"):
        measure_capacity("classical", 32, [600], criterion="most_fixed", trials=20, diagonal=True)
    # With corrupted cues the same memory shows that it holds nothing.
    (row,) = measure_capacity("classical", 32, [600], criterion="most_recovered", trials=20, diagonal=True)
    assert row.rate == 0.0


def test_the_result_depends_on_the_seed_and_not_on_the_workers():
    seen = []
    options = {"criterion": "most_fixed", "trials": 25}
    one = measure_capacity(
        "classical", 64, [8, 12], generator=1, progress=lambda done, total: seen.append((done, total)), **options
    )
    two = measure_capacity("classical", 64, [8, 12], generator=1, workers=2, **options)
    assert one == two
    assert seen[-1] == (50, 50)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    others = [measure_capacity("classical", 64, [12], generator=seed, **options)[0].successes for seed in range(6)]
    assert len(set(others)) > 1
    drawn = [torch.Generator().manual_seed(seed) for seed in (0, 0)]
    assert measure_capacity("classical", 8, [2], generator=drawn[0], **options) == measure_capacity(
        "classical", 8, [2], generator=drawn[1], **options
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: capacity("classical", 64, "recovered"), "capacity"),
        (lambda: capacity("continuous", 64, "all_fixed"), "capacity"),
        (lambda: capacity("classical", 1, "all_fixed"), "dim"),
        (lambda: capacity("exponential", 8, "all_recovered", corruption=0.5), "corruption"),
        (lambda: capacity("dense", 8, "small_errors", error=0.7), "error"),
        (lambda: measure_capacity("continuous", 8, [2], criterion="all_fixed"), "kind"),
        (lambda: measure_capacity("dense", 8, [2], criterion="fixed"), "criterion"),
        (lambda: measure_capacity("dense", 8, [0], criterion="all_fixed"), "numbers"),
        (lambda: measure_capacity("dense", 8, [2], criterion="most_recovered", corruption=0.6), "corruption"),
        (lambda: measure_capacity("dense", 8, [2], criterion="most_recovered", power=1), "power"),
        (lambda: measure_capacity("dense", 8, 4, criterion="all_fixed"), "numbers"),
        (
            lambda: measure_capacity("dense", 8, [4], criterion="all_fixed", confidence=2.0, progress=_unwanted),
            "confidence",
        ),
        (lambda: measure_capacity("dense", 8, [4], criterion="all_fixed", rule="sync"), "rule"),
        (lambda: wilson_interval(3, 2), "successes"),
        (lambda: wilson_interval(1, 2, 1.0), "confidence"),
    ],
)
def test_bad_input_gets_a_sentence(call, message):
    with pytest.raises(UserError, match=message):
        call()


def _unwanted(*_):
    raise AssertionError("the trials had begun")
