"""Statements about retrieval with numbers in them: transitions, capacities, digits, radii."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from massieu.claims.claim import Curve, Evidence, Gap, Source, Trial
from massieu.claims.experiment import TIGHT, apart, normals, one, widest
from massieu.claims.memory.polar_memories import flipped, lost, signs
from massieu.claims.registry import claim
from massieu.memory import Classical, Continuous, Dense, Exponential, capacity, measure_capacity
from massieu.memory.polar import Polar


@claim(
    "P1",
    source=Source.AMIT,
    place="abstract and the equations at zero temperature, from memory",
    title="Retrieval ends at 0.138 d patterns",
    wording="With a small share of wrong bits, retrieval is possible for fewer than 0.138 d patterns.",
    reading=(
        "Our reading: the equations lose their solution between 0.1375 and 0.1385; from the patterns themselves, d ="
        " 400 (full: 1000), the overlap of those kept above 0.9 is that of the equations to 0.006 (full: 0.003) at 0.1"
        " d and 0.12 d, where more than half are kept; at 0.2 d, d = 600 (full: 0.17 d, d = 1500), fewer than half. So"
        " the transition is located between 0.12 and 0.2 (full: 0.17)."
    ),
    reference="the equations of Amit et al. at zero temperature, solved on a grid",
    formula="m = erf(y), y (√(2α) + 2 e^{−y^2} / √π) = erf(y), α = N / d",
)
def overlap_transition(trial: Trial) -> Evidence:
    """Overlaps after retrieval from the patterns themselves below and above; the control stores as many as above."""
    dim, wide = trial.size(400, 1000), trial.size(600, 1500)
    high = 0.17 if trial.full else 0.2
    draws, allowed = trial.size(4, 2), 0.003 if trial.full else 0.006

    @functools.cache
    def overlaps(share: float) -> Tensor:
        size, number, looked = (dim, draws, trial.size(30, 50)) if share < high else (wide, 1, 20)
        stored = [signs(trial, round(share * size), size) for _ in range(number)]
        found = [Classical(each, generator=trial.seed).retrieve(each[:looked], steps=8).state for each in stored]
        kept = zip(found, stored, strict=True)
        return torch.cat([(state * each[:looked]).mean(-1) for state, each in kept])

    def gap(share: float, load: float) -> Gap:
        seen, kept = overlaps(load), overlaps(load) > 0.9
        # Where none is kept there is no overlap to compare, and all are lost.
        mean = float(seen[kept].mean()) if bool(kept.any()) else 0.0
        return widest(Gap(abs(mean - mean_field_overlap(share)), allowed), Gap(1 - float(kept.double().mean()), 0.5))

    low = {share: float(overlaps(share).mean()) for share in (0.1, 0.12)}
    few = Gap(float((overlaps(high) > 0.9).double().mean()), 0.5)
    solved = Gap(float(not mean_field_overlap(0.1375)) + float(mean_field_overlap(0.1385) > 0), 0.5)
    seen = low | {high: float(overlaps(high).mean())}
    return Evidence(
        printed=widest(solved, gap(0.1, 0.1), gap(0.12, 0.12), few),
        control=gap(0.12, trial.control(high, 0.12)),
        table={f"overlap at {share:g} d": value for share, value in seen.items()}
        | {"overlap at 0.12 d by the equations": mean_field_overlap(0.12)},
        curve=Curve(
            list(seen),
            {"measured": list(seen.values()), "equations": [mean_field_overlap(share) for share in seen]},
            x_label="patterns / dimension",
            y_label="overlap",
        ),
    )


@claim(
    "P2",
    source=Source.MCELIECE,
    place="abstract",
    title="d / (4 ln d) are all fixed, d / (2 ln d) mostly",
    wording=(
        "Of random patterns, d / (2 ln d) can be stored if most are to be recovered, and d / (4 ln d) if all are to be."
    ),
    reading=(
        "Our reading: as fixed points, at d = 256 (full: 1024). At these numbers of patterns at most a quarter of 400"
        " draws fail their criterion, and no more than a union over bits allows; at 1.5 and 1.75 times as many more"
        " than a quarter fail, and these d locate the numbers no closer. Unstable bits of 64 patterns, d = 64, are"
        " as frequent as their exact law says, to 5 %, and that law, in its normal limit at d = 10^300, puts a quarter"
        " of an unstable bit at these numbers to 2 %. `capacity` gives the numbers to a relative 1e-9."
    ),
    reference="the two numbers written out, and the binomial law of the field of a bit, summed over integers",
    formula="P(a bit is unstable) = P(Bin(n, ½) < (n − d + 1) / 2), n = (N − 1)(d − 1)",
)
def fixed_points(trial: Trial) -> Evidence:
    """Failures of each criterion, and bits against the binomial law; the control wants all where most are."""
    dim, draws = trial.size(256, 1024), 400
    numbers = {"all_fixed": dim / (4 * math.log(dim)), "most_fixed": dim / (2 * math.log(dim))}

    @functools.cache
    def failing(criterion: str, number: float) -> float:
        options: dict[str, Any] = {"trials": draws, "generator": trial.seed}
        (row,) = measure_capacity("classical", dim, [int(number)], criterion=criterion, **options)
        return 1 - row.rate

    def below(criterion: str, number: float) -> Gap:
        bits = dim * (int(number) if criterion == "all_fixed" else 1)
        bound = bits * _unstable(int(number), dim)
        found = failing(criterion, number)
        # Five standard errors of a share of independent draws, of which one may fail.
        return widest(Gap(found, 0.25), Gap(found, bound + 5 * (bound / draws) ** 0.5 + 1 / draws))

    def located(criterion: str, number: float, more: float) -> Gap:
        limit = patterns_in_the_limit(criterion == "all_fixed")
        said = capacity("classical", dim, criterion) / number - 1
        above = Gap(1 - failing(criterion, more * number), 0.75)
        return widest(below(criterion, number), above, Gap(abs(limit - 1), 0.02), Gap(abs(said), TIGHT))

    patterns = [signs(trial, 64, 64) for _ in range(60)]
    unstable = [float((Classical(each).flip_cost(each) < 0).double().mean()) for each in patterns]
    predicted, every, most = _unstable(64, 64), *numbers.values()
    return Evidence(
        printed=widest(
            located("all_fixed", every, 1.75),
            located("most_fixed", most, 1.5),
            Gap(abs(sum(unstable) / 60 - predicted), 0.05 * predicted),
        ),
        control=below("all_fixed", trial.control(most, every)),
        table={"unstable bits, 64 patterns, d = 64": sum(unstable) / 60, "binomial law": predicted}
        | {f"{name.replace('_', ' ')}, share of draws that fail": failing(name, n) for name, n in numbers.items()},
    )


@claim(
    "P3",
    source=Source.SLIDES,
    place="memorization, new energy function, interaction z^a (Krotov and Hopfield 2016)",
    title="Powers store d^{a−1} / (2 (2a − 3)!! ln d)",
    wording="With the interaction function F(z) = z^a the capacity is C ≈ d^{a−1} / (2 (2a − 3)!! log d).",
    reading=(
        "Our reading: up to a factor of 2, for a = 2 and 3 (full: 4 too), d = 64. Of C random patterns at least half"
        " are fixed points, and at least as many as a union over bits allows, of 2 C fewer than half; unstable bits"
        " among 2 C are as frequent as their exact law says, to five standard errors. Rectified powers hold more, and"
        " break that. `capacity` gives C to a relative 1e-9."
    ),
    reference=(
        "C written out, and the exact law of the field of a bit: a convolution over integers by a discrete Fourier"
        " transform"
    ),
    formula="C = d^{a−1} / (2 (2a − 3)!! ln d), P(fixed) ≥ 1 − d P(a bit is unstable)",
)
def polynomial_capacity(trial: Trial) -> Evidence:
    """Shares of fixed patterns and of unstable bits at the capacity and at twice as many; the control is rectified."""
    powers, dim = (2, 3, 4) if trial.full else (2, 3), 64
    exact = {a: dim ** (a - 1) / (2 * math.prod(range(1, 2 * a - 2, 2)) * math.log(dim)) for a in powers}
    said = [Gap(abs(capacity("dense", dim, "most_fixed", power=a) / exact[a] - 1), TIGHT) for a in powers]
    numbers = {power: round(number) for power, number in exact.items()}
    draws, looked = {2: 60, 3: 40, 4: 40}, {2: 8, 3: 10, 4: 20}
    stored = {a: [signs(trial, 2 * numbers[a], dim) for _ in range(draws[a])] for a in powers}

    @functools.cache
    def flips(power: int, times: int, rectified: bool) -> Tensor:
        memories = [Dense(each[: times * numbers[power]], power, rectified=rectified) for each in stored[power]]
        return torch.stack([memory.flip_cost(memory.patterns[: looked[power]]) < 0 for memory in memories]).double()

    def fixed(power: int, times: int, rectified: bool = False) -> float:
        return 1 - float(flips(power, times, rectified).amax(-1).mean())

    def gap(power: int, rectified: bool) -> Gap:
        of_draws = flips(power, 2, rectified).mean((1, 2))
        error = float(of_draws.std()) / draws[power] ** 0.5
        law = unstable_bits(power, 2 * numbers[power], dim)
        return widest(Gap(fixed(power, 2, rectified), 0.5), Gap(abs(float(of_draws.mean()) - law), 5 * error))

    def most(power: int) -> Gap:
        lost, bound = 1 - fixed(power, 1), dim * unstable_bits(power, numbers[power], dim)
        # Five standard errors of a share of independent draws.
        return widest(Gap(lost, 0.5), Gap(lost, bound + 5 * (bound / draws[power]) ** 0.5))

    return Evidence(
        printed=widest(*said, *(most(power) for power in powers), *(gap(power, False) for power in powers)),
        control=widest(*(gap(power, trial.control(True, False)) for power in powers)),
        table={f"patterns for power {power}": float(number) for power, number in numbers.items()}
        | {f"fixed, power {power}": fixed(power, 1) for power in powers}
        | {f"fixed of twice as many, power {power}": fixed(power, 2) for power in powers}
        | {f"fixed of twice as many, rectified power {power}": fixed(power, 2, True) for power in powers},
    )


@claim(
    "P4",
    source=Source.DEMIRCIGIL,
    place="theorem on recovery, as theorem A10 of Ramsauer et al. 2020",
    title="e^{α d} patterns come back, α < I(1 − 2ρ) / 2",
    wording=(
        "Of e^{α d} + 1 random patterns with α < I(1 − 2ρ) / 2, all come back in one step from ρ d flipped bits, with a"
        " probability that goes to 1."
    ),
    reading=(
        "Our reading: ρ = 0.1, α = ¾ I(0.8) / 2, d = 40 (full: 50), that is 250 (full: 993) patterns. In at most 30 %"
        " of 10 draws a pattern is lost, and no larger share of patterns than Chebyshev's inequality allows. In the"
        " control twice as many bits are flipped, and the condition fails."
    ),
    reference="the stored patterns, and Chebyshev's inequality with the exact variance of the field of a bit",
    formula="2 I(x) = (1 + x) ln(1 + x) + (1 − x) ln(1 − x)",
)
def exponential_basins(trial: Trial) -> Evidence:
    """Draws that lose a pattern in one step of all coordinates; the control flips twice as many bits."""
    dim, draws = trial.size(40, 50), 10
    rate = (1.8 * math.log(1.8) + 0.2 * math.log(0.2)) / 4
    number, few = int(math.exp(0.75 * rate * dim)) + 1, dim // 10
    stored = [signs(trial, number, dim) for _ in range(draws)]
    cues = {count: [flipped(trial, each, count) for each in stored] for count in (few, 2 * few)}

    def gap(count: int) -> Gap:
        back = [at_once(Exponential(each), cue, each) for cue, each in zip(cues[count], stored, strict=True)]
        # A bit is lost if the others outweigh e^{d − 1 − 2 few}; each adds a symmetric law of variance cosh(2)^{d−1}.
        allowed = dim / 2 * (number - 1) * math.exp((dim - 1) * math.log(math.cosh(2)) - 2 * (dim - 1 - 2 * few))
        return widest(Gap(sum(share < 1 for share in back) / draws, 0.3), Gap(1 - sum(back) / draws, allowed))

    some = stored[0][:50]
    asynchronous = 1 - lost(Exponential(stored[0]), cues[few][0][:50], some)
    return Evidence(
        printed=gap(few),
        control=gap(trial.control(2 * few, few)),
        table={"patterns": float(number), "bits flipped": float(few), "back one bit at a time": asynchronous},
    )


@claim(
    "P9",
    source=Source.OURS,
    place="docs/memory.md, what to keep in mind; the update of Ramsauer et al. 2020 for two opposite patterns",
    title="Between x and −x a pitchfork at β ‖x‖^2 = 1",
    wording="Between x and −x the middle is the only fixed point up to β ‖x‖^2 = 1; beyond, two others branch off.",
    reading=(
        "From x, a random direction in 5 dimensions, retrieval ends at m x with the largest root of m = tanh(β ‖x‖^2"
        " m), to 1e-8, for β ‖x‖^2 of 0.5, 0.7, 0.9, 1.1, 1.21, 2 and 4."
    ),
    reference="the root by bisection",
    formula="m = tanh(β ‖x‖^2 m)",
)
def pitchfork(trial: Trial) -> Evidence:
    """End of retrieval from x against the root by bisection; the control is a fifth colder."""
    x = torch.nn.functional.normalize(normals(trial)(1, 5), dim=-1)
    products = (0.5, 0.7, 0.9, 1.1, 1.21, 2.0, 4.0)

    @functools.cache
    def end(product: float) -> float:
        memory = Continuous(torch.cat([x, -x]), product)
        return float((memory.retrieve(x, steps=20_000).state * x).sum())

    def gap(colder: float) -> Gap:
        return widest(*(apart(one(end(colder * each)), one(_root(each)), 1e-8) for each in products))

    return Evidence(
        printed=gap(1.0),
        control=gap(trial.control(1.2, 1.0)),
        table={"m at β ‖x‖^2 = 1.21": end(1.21)},
        curve=Curve(
            products,
            {"retrieved": [end(each) for each in products], "tanh": [_root(each) for each in products]},
            x_label="β ‖x‖^2",
            y_label="m",
        ),
    )


def at_once(memory: Polar, cues: Tensor, patterns: Tensor) -> float:
    """Return the share of patterns that are back when all coordinates of a cue choose at the same time."""
    found = torch.where(memory.flip_cost(cues) < 0, -cues, cues)
    return float((found == patterns).all(-1).double().mean())


@functools.cache
def mean_field_overlap(share: float) -> float:
    """Return the overlap m = erf(y) at zero temperature, with the largest root y of the equations; 0 if none."""
    y = np.linspace(0.05, 5, 200_001)
    error = torch.special.erf(torch.from_numpy(y)).numpy()
    excess = error - y * (math.sqrt(2 * share) + 2 / math.sqrt(math.pi) * np.exp(-np.square(y)))
    (roots,) = np.nonzero((excess[:-1] > 0) & (excess[1:] <= 0))
    return float(error[roots[-1]]) if len(roots) else 0.0


@functools.cache
def unstable_bits(power: int, number: int, dim: int) -> float:
    """Return the probability that a flip lowers −Σ z^power at a random pattern, by the law of a sum of integers."""
    fields = [dim - 1 - 2 * count for count in range(dim)]
    chances = [math.comb(dim - 1, count) / 2 ** (dim - 1) for count in range(dim)]
    pulls, own = [(each + 1) ** power - (each - 1) ** power for each in fields], dim**power - (dim - 2) ** power
    unit = math.gcd(own, *pulls)
    variance = (number - 1) * sum(chance * (pull // unit) ** 2 for chance, pull in zip(chances, pulls, strict=True))
    # Twelve standard deviations to each side: the tails wrap around and are below the rounding.
    size = 1 << math.ceil(math.log2(24 * math.sqrt(variance) + 4 * max(pulls) // unit))
    law = np.zeros(size)
    for chance, pull in zip(chances, pulls, strict=True):
        law[pull // unit % size] += chance / 2
        law[-pull // unit % size] += chance / 2
    total = np.fft.irfft(np.fft.rfft(law) ** (number - 1), size)
    values = np.arange(size) - size * (np.arange(size) >= size // 2)
    return float(total[values < -(own // unit)].sum())


def _unstable(number: int, dim: int) -> float:
    """Return the probability that a bit of a random pattern is unstable, by the binomial law of its field."""
    signs_in_field = (number - 1) * (dim - 1)
    most = math.ceil((signs_in_field - dim + 1) / 2) - 1
    logs = [
        math.lgamma(signs_in_field + 1) - math.lgamma(k + 1) - math.lgamma(signs_in_field - k + 1)
        for k in range(most + 1)
    ]
    return math.fsum(math.exp(each - signs_in_field * math.log(2)) for each in logs)


def patterns_in_the_limit(every: bool) -> float:
    """Return patterns with a quarter of an unstable bit in one of them, or in all, in units of d / (2 ln d) or
    d / (4 ln d), at d = 10^300 by the normal limit."""
    log_dim, low, high = 300 * math.log(10), 1.0, 100.0  # of the field of a bit in standard deviations, √(d / N)
    for _ in range(100):
        middle = (low + high) / 2
        log_bits = log_dim + (log_dim - 2 * math.log(middle) if every else 0.0)
        chance = float(torch.special.log_ndtr(torch.tensor(-middle, dtype=torch.float64)))
        low, high = (middle, high) if chance + log_bits > math.log(0.25) else (low, middle)
    return (4 if every else 2) * log_dim / low**2


def _root(product: float) -> float:
    low, high = (1e-9, 1.0) if product > 1 else (0.0, 0.0)
    while high - low > 1e-15:
        middle = (low + high) / 2
        low, high = (middle, high) if math.tanh(product * middle) > middle else (low, middle)
        if middle in (low, high) and high - low < 1e-14:
            break
    return high
