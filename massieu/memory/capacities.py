"""Capacities of memories for random patterns: formulas, each with its criterion, and measurements."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import NormalDist
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from massieu.checks import UserError, check_choice, check_count, check_number
from massieu.memory.classical import Classical
from massieu.memory.dense import Dense, Exponential
from massieu.memory.memory import as_seed
from massieu.memory.polar import Polar

__all__ = ["CapacityRow", "capacity", "measure_capacity", "wilson_interval"]

OVERLAP = 0.95
"""A state with this overlap has a small fraction of wrong bits."""

LARGEST_EXPONENT = 709.0
"""Exponentials of larger numbers overflow."""

TASK_TRIALS = 10
"""Trials of a task of a worker."""

CRITERIA = ("all_fixed", "most_fixed", "small_errors", "all_recovered", "most_recovered")


@dataclass(frozen=True)
class CapacityRow:
    """Frequency of a criterion at a number of patterns.

    Attributes:
        number: patterns stored.
        trials: independent draws of all patterns.
        successes: draws in which the criterion held.
        rate: successes over trials.
        low: lower end of the Wilson interval of the rate.
        high: its upper end.
        random_fixed: number of random states, one in each draw, that were fixed points; None where the criterion is not
            about fixed points.
    """

    number: int
    trials: int
    successes: int
    rate: float
    low: float
    high: float
    random_fixed: int | None


class Mapper(Protocol):
    """Engine that maps a function over arguments on its workers."""

    def map(self, function: Callable[[Any], Any], given: Iterable[Any], /) -> Iterator[Any]:
        """Yield the results in the given order."""


def capacity(
    kind: str, dim: int, criterion: str, *, power: int = 3, corruption: float = 0.0, error: float = 0.0036
) -> float:
    r"""Return the number of random patterns that a memory holds by a criterion, asymptotic in the dimension.

    ============= ================ ==============================================================================
    kind          criterion        patterns
    ============= ================ ==============================================================================
    "classical"   "all_fixed"      :math:`d / (4 \ln d)`: every pattern is a fixed point
    "classical"   "most_fixed"     :math:`d / (2 \ln d)`: each one is, with high probability, but not all together
    "classical"   "small_errors"   :math:`0.138\, d`: a state with few wrong bits is near; almost no pattern is fixed
    "dense"       "all_fixed"      :math:`d^{n-1} / (2n\, (2n-3)!!\, \ln d)`
    "dense"       "most_fixed"     :math:`d^{n-1} / (2\, (2n-3)!!\, \ln d)`
    "dense"       "small_errors"   :math:`d^{n-1} / ((2n-3)!!\, z^2)` with a share Q(z) of bits wrong after one step
    "exponential" "all_recovered"  :math:`e^{d\, I(1 - 2\rho)/2}`: every pattern comes back in one step from
                                   :math:`\rho d` flips
    ============= ================ ==============================================================================

    with :math:`I(a) = \tfrac12 ((1+a) \ln(1+a) + (1-a) \ln(1-a))`. The formulas hold for unbiased random patterns
    without diagonal; those of "dense" for :math:`z^n` that is not rectified (rectified it holds more), and those of
    "exponential" are sufficient. At :math:`\rho \to 0` it is :math:`2^{d/2}`, with basins that vanish. Guarantees for
    the continuous memory depend on its temperature: :func:`~massieu.memory.guaranteed_storage`.

    Args:
        kind: "classical", "dense" or "exponential".
        dim: d, at least 2.
        criterion: as in the table.
        power: n, for "dense".
        corruption: :math:`\rho`, for "exponential", below one half.
        error: the share of wrong bits Q(z), for "dense" with "small_errors".

    Source:
        McEliece et al. 1987; Amit, Gutfreund and Sompolinsky 1985; Krotov and Hopfield 2016 ("all_fixed" follows from
        their error probability with a union over patterns and bits); Demircigil et al. 2017.

    Example:
        >>> [round(capacity("classical", 1024, criterion)) for criterion in ("all_fixed", "most_fixed", "small_errors")]
        [37, 74, 141]
    """
    dim, power = check_count(dim, "dim", least=2), check_count(power, "power", least=2)
    check_number(corruption, "corruption", least=0, below=0.5, remedy="it is a share of bits")
    check_number(error, "error", above=0, below=0.5, remedy="it is the share of wrong bits")
    double = math.prod(range(1, 2 * power - 2, 2))
    held = float(dim) ** (power - 1) / double
    a = 1 - 2 * corruption
    rate = 0.5 * ((1 + a) * math.log1p(a) + (0.0 if a == 1 else (1 - a) * math.log1p(-a)))
    exponent = 0.5 * dim * rate
    formulas = {
        ("classical", "all_fixed"): dim / (4 * math.log(dim)),
        ("classical", "most_fixed"): dim / (2 * math.log(dim)),
        ("classical", "small_errors"): 0.138 * dim,
        ("dense", "all_fixed"): held / (2 * power * math.log(dim)),
        ("dense", "most_fixed"): held / (2 * math.log(dim)),
        ("dense", "small_errors"): held / NormalDist().inv_cdf(error) ** 2,
        ("exponential", "all_recovered"): math.exp(exponent) if exponent < LARGEST_EXPONENT else math.inf,
    }
    if (kind, criterion) not in formulas:
        choices = ", ".join(f"{first} with {second}" for first, second in formulas)
        raise UserError(f"capacity has formulas for {choices}, got {kind!r} with {criterion!r}; see measure_capacity")
    return float(formulas[kind, criterion])


def measure_capacity(
    kind: str,
    dim: int,
    numbers: Sequence[int],
    *,
    criterion: str,
    trials: int = 100,
    generator: torch.Generator | int = 0,
    workers: int = 1,
    engine: Mapper | None = None,
    progress: Callable[[int, int], Any] | None = None,
    power: int = 3,
    rectified: bool = False,
    diagonal: bool = False,
    rule: str | None = None,
    corruption: float = 0.1,
    confidence: float = 0.95,
) -> list[CapacityRow]:
    """Measure the frequency of a criterion for random patterns, with binomial confidence intervals.

    Every trial draws all of its patterns anew, so that trials are independent and the interval is that of a binomial;
    except for "all_fixed" and "all_recovered" it tests the first pattern only. A trial depends on the seed, the number
    of patterns and its place, not on the workers.

    For criteria of fixed points each draw also tests a random state: where random states are fixed points too, the
    measurement has no meaning and raises.

    Args:
        kind: "classical", "dense" or "exponential".
        dim: of the patterns.
        numbers: numbers of patterns to store, one row for each.
        criterion: "all_fixed", "most_fixed" (the tested pattern is fixed), "small_errors" (its retrieval from itself
            keeps an overlap of 0.95), "all_recovered" or "most_recovered" (all patterns, or the tested one, come back
            exactly from flipped bits).
        trials: draws for each number.
        generator: of all draws, or a seed.
        workers: processes; more than one needs a script to protect its main part by ``if __name__ == "__main__"``.
        engine: such as :class:`massieu.engine.Dask`, whose workers run the trials instead.
        progress: called with the trials done and the number of all.
        power, rectified: of "dense".
        diagonal: of "classical".
        rule: of the memory; by default states are retrieved asynchronously.
        corruption: share of flipped bits for the criteria of recovery, rounded to a number of bits.
        confidence: of the intervals.

    Example:
        >>> row, = measure_capacity("classical", 64, [4], criterion="most_fixed", trials=50)
        >>> row.rate, round(row.low, 3), row.random_fixed
        (1.0, 0.929, 0)
    """
    check_choice(kind, "kind", ("classical", "dense", "exponential"))
    check_choice(criterion, "criterion", CRITERIA)
    check_number(corruption, "corruption", least=0, below=0.5, remedy="it is a share of bits")
    dim, trials, workers = check_count(dim, "dim"), check_count(trials, "trials"), check_count(workers, "workers")
    seed = as_seed(generator)
    if not isinstance(numbers, Iterable):
        raise UserError(f"numbers must be a sequence, got {numbers!r}; write [{numbers!r}] for a single one")
    counts = [check_count(number, "numbers") for number in numbers]
    build = partial(_build, kind, power=power, rectified=rectified, diagonal=diagonal, rule=rule)
    # Wrong options raise before the work begins.
    build(torch.ones(1, dim))
    wilson_interval(0, trials, confidence)
    run = partial(_run, build, dim, criterion, corruption, seed)
    tasks = [
        (number, start, min(start + TASK_TRIALS, trials))
        for number in dict.fromkeys(counts)  # the same number twice is the same measurement
        for start in range(0, trials, TASK_TRIALS)
    ]
    sums = {number: [0, 0] for number in counts}
    done = 0
    found = _map(run, tasks, workers) if engine is None else engine.map(run, tasks)
    for (number, start, stop), (good, fixed) in zip(tasks, found, strict=True):
        sums[number][0] += good
        sums[number][1] += fixed
        done += stop - start
        if progress is not None:
            progress(done, len(sums) * trials)
    rows = []
    for number in counts:
        good, fixed = sums[number]
        low, high = wilson_interval(good, trials, confidence)
        about_fixed = criterion.endswith("fixed")
        if about_fixed and wilson_interval(fixed, trials, confidence)[0] > 0.1:
            raise UserError(
                f"random states must not be fixed points for {criterion!r} to mean anything, got {fixed} of {trials}"
                f' with {number} patterns; leave the diagonal out, or measure with criterion="most_recovered"'
            )
        rows.append(CapacityRow(number, trials, good, good / trials, low, high, fixed if about_fixed else None))
    return rows


def wilson_interval(successes: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return the interval of Wilson for the probability of a success; it stays within 0 and 1.

    Example:
        >>> low, high = wilson_interval(0, 10)
        >>> low, round(high, 3)
        (0.0, 0.278)
    """
    if not 0 <= successes <= trials or trials < 1:
        raise UserError(f"successes must lie between 0 and trials, got {successes} of {trials}; count again")
    check_number(confidence, "confidence", above=0, below=1, remedy="0.95 is common")
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    rate, weight = successes / trials, z * z / trials
    center = (rate + weight / 2) / (1 + weight)
    half = math.sqrt(rate * (1 - rate) * weight + weight * weight / 4) / (1 + weight)
    low = 0.0 if successes == 0 else max(0.0, center - half)
    return low, 1.0 if successes == trials else min(1.0, center + half)


def _build(kind: str, patterns: Tensor, *, power: int, rectified: bool, diagonal: bool, rule: Any) -> Polar:
    if kind == "classical":
        return Classical(patterns, rule or "async", diagonal=diagonal)
    if kind == "exponential":
        return Exponential(patterns, rule=rule or "flip")
    return Dense(patterns, power, rectified=rectified, rule=rule or "flip")


def _run(
    build: Callable[[Tensor], Polar], dim: int, criterion: str, corruption: float, seed: int, task: tuple[int, int, int]
) -> tuple[int, int]:
    """Return the number of trials in a range that met the criterion, and of random states that were fixed."""
    number, start, stop = task
    good = fixed = 0
    for trial in range(start, stop):
        mixed = np.random.SeedSequence([seed, number, trial]).generate_state(1, np.uint64)
        generator = torch.Generator().manual_seed(int(mixed[0]) >> 1)
        patterns = 2.0 * torch.randint(0, 2, (number, dim), generator=generator, dtype=torch.float64) - 1
        other = 2.0 * torch.randint(0, 2, (1, dim), generator=generator, dtype=torch.float64) - 1
        memory = build(patterns)
        if criterion.endswith("fixed"):
            tested = patterns if criterion == "all_fixed" else patterns[:1]
            good += bool(_is_fixed(memory, tested).all())
            fixed += bool(_is_fixed(memory, other)) and not bool(((patterns @ other[0]).abs() == dim).any())
            continue
        tested = patterns if criterion == "all_recovered" else patterns[:1]
        cue = tested.clone()
        if criterion != "small_errors":
            for row in cue:
                row[torch.randperm(dim, generator=generator)[: round(corruption * dim)]] *= -1
        overlap = (memory.retrieve(cue).state * tested).mean(-1).min()
        good += float(overlap) >= (OVERLAP if criterion == "small_errors" else 1.0)
    return good, fixed


def _is_fixed(memory: Polar, states: Tensor) -> Tensor:
    if memory._asynchronous:
        return ~memory._unstable(states, states @ memory.patterns.T).any(-1)
    return (memory._move(states, 0, None) == states).all(-1)


def _map(
    run: Callable[[tuple[int, int, int]], tuple[int, int]], tasks: list[tuple[int, int, int]], workers: int
) -> Iterator[tuple[int, int]]:
    if workers == 1:
        yield from map(run, tasks)
        return
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    # Spawned, not forked: a fork of a process in which torch has threads may hang.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        yield from pool.map(run, tasks)
