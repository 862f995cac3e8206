"""Statements about retrieval with numbers in them: transitions, capacities, digits, radii."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from massieu.claims.claim import Curve, Evidence, Gap, Trial, Verdict
from massieu.claims.experiment import above, apart, normals, one, widest
from massieu.claims.memory.polar_memories import digits, flipped, lost, signs
from massieu.claims.registry import claim
from massieu.claims.sources import AMIT, DEMIRCIGIL, MCELIECE, MILLIDGE, OURS, RAMSAUER, SLIDES
from massieu.memory import (
    Classical,
    Continuous,
    Dense,
    Exponential,
    Kernel,
    capacity,
    certificate,
    guaranteed_storage,
    measure_capacity,
)
from massieu.memory.polar import Polar


@claim(
    "P1",
    source=AMIT,
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
    expected=Verdict.HOLDS,
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
        found = [Classical(each, seed=trial.seed).retrieve(each[:looked], steps=8).state for each in stored]
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
    source=MCELIECE,
    place="abstract",
    title="d / (4 ln d) are all fixed, d / (2 ln d) mostly",
    wording=(
        "Of random patterns, d / (2 ln d) can be stored if most are to be recovered, and d / (4 ln d) if all are to be."
    ),
    reading=(
        "Our reading: as fixed points, at d = 256 (full: 1024). At these numbers of patterns at most a quarter of 60"
        " draws fail their criterion, and unstable bits of 64 patterns, d = 64, are as frequent as their exact law"
        " says, to 5 %."
    ),
    reference="the binomial law of the field of a bit, summed over integers",
    formula="P(a bit is unstable) = P(Bin(n, ½) < (n − d + 1) / 2), n = (N − 1)(d − 1)",
    expected=Verdict.HOLDS,
)
def fixed_points(trial: Trial) -> Evidence:
    """How often each criterion fails, and bits against the binomial law; the control wants all where most are."""
    dim, draws = trial.size(256, 1024), 60
    every, most = (int(capacity("classical", dim, name)) for name in ("all_fixed", "most_fixed"))

    def failing(criterion: str, number: int) -> Gap:
        (row,) = measure_capacity("classical", dim, [number], criterion=criterion, trials=draws, seed=trial.seed)
        return Gap(1 - row.rate, 0.25)

    patterns = [signs(trial, 64, 64) for _ in range(draws)]
    unstable = [float((Classical(each).flip_cost(each) < 0).double().mean()) for each in patterns]
    predicted = _unstable(64, 64)
    return Evidence(
        printed=widest(
            failing("all_fixed", every),
            failing("most_fixed", most),
            Gap(abs(sum(unstable) / draws - predicted), 0.05 * predicted),
        ),
        control=failing("all_fixed", trial.control(most, every)),
        table={"unstable bits, 64 patterns, d = 64": sum(unstable) / draws, "binomial law": predicted},
    )


@claim(
    "P3",
    source=SLIDES,
    place="memorization, new energy function, interaction z^a (Krotov and Hopfield 2016)",
    title="Powers store d^{a−1} / (2 (2a − 3)!! ln d)",
    wording="With the interaction function F(z) = z^a the capacity is C ≈ d^{a−1} / (2 (2a − 3)!! log d).",
    reading=(
        "Our reading: up to a factor of 2, for a = 2 and 3 (full: 4 too), d = 64. Of C random patterns at least half"
        " are fixed points, and at least as many as a union over bits allows, of 2 C fewer than half; unstable bits"
        " among 2 C are as frequent as their exact law says, to five standard errors. Rectified powers hold more, and"
        " break that."
    ),
    reference="the exact law of the field of a bit: a convolution over integers by a discrete Fourier transform",
    formula="C = d^{a−1} / (2 (2a − 3)!! ln d), P(fixed) ≥ 1 − d P(a bit is unstable)",
    expected=Verdict.HOLDS,
)
def polynomial_capacity(trial: Trial) -> Evidence:
    """Shares of fixed patterns and of unstable bits at the capacity and at twice as many; the control is rectified."""
    powers, dim = (2, 3, 4) if trial.full else (2, 3), 64
    numbers = {power: round(capacity("dense", dim, "most_fixed", power=power)) for power in powers}
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
        printed=widest(*(most(power) for power in powers), *(gap(power, False) for power in powers)),
        control=widest(*(gap(power, trial.control(True, False)) for power in powers)),
        table={f"patterns for power {power}": float(number) for power, number in numbers.items()}
        | {f"fixed, power {power}": fixed(power, 1) for power in powers}
        | {f"fixed of twice as many, power {power}": fixed(power, 2) for power in powers}
        | {f"fixed of twice as many, rectified power {power}": fixed(power, 2, True) for power in powers},
    )


@claim(
    "P4",
    source=DEMIRCIGIL,
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
    expected=Verdict.HOLDS,
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
    "P5",
    source=MILLIDGE,
    place="abstract, from memory",
    title="Distances retrieve more than inner products",
    wording="Euclidean or Manhattan distance as similarity performs substantially better in practice on many tasks.",
    reading=(
        "Our reading: of 150 random digits (full: 500), the lower half filled with zeros or all under normal noise of"
        " 0.5, the inner product finds at most three quarters of what the better of the two distances finds. Both"
        " distances find what is nearest, to 2 % of the digits. In the control the mean is subtracted, all lengths are"
        " equal, and the noise is 0.2."
    ),
    reference="the nearest image by torch.cdist",
    formula="argmax_i −‖ξ − x_i‖_1 or −‖ξ − x_i‖_2 against argmax_i ξ·x_i",
    expected=Verdict.HOLDS,
)
def similarities(trial: Trial) -> Evidence:
    """Digits found by the most similar one, half hidden or noisy; the control compares digits of one length."""
    number, cold = trial.size(150, 500), 1e4
    raw = digits()[torch.randperm(1797, generator=trial.generator)[:number]]
    centered = torch.nn.functional.normalize(raw - raw.mean(0), dim=-1)
    known = (torch.arange(64) < 32).expand(number, 64)
    noise = normals(trial)(number, 64)

    def right(state: Tensor, images: Tensor) -> float:
        return float(((state - images).abs().amax(-1) < 1e-3).double().mean())

    def gap(images: Tensor, level: float) -> Gap:
        gaps = []
        for cue in (torch.where(known, images, 0.0), images + level * noise):
            inner = right(Continuous(images, cold).update(cue), images)
            found = {1: right(Kernel(images, "l1", cold).update(cue), images)}
            found[2] = right(Kernel(images, "l2", cold).update(cue), images)
            nearest = {order: strictly_nearest(cue, images, order) for order in found}
            gaps += [Gap(abs(found[order] - nearest[order]), 0.02) for order in found]
            gaps.append(Gap(inner, 0.75 * max(found.values())))
        return widest(*gaps)

    half = torch.where(known, raw, 0.0)
    aware = right(Kernel(raw, "l2", cold).update(half, observed=known), raw)
    plain = right(raw[torch.cdist(half, raw).argmin(-1)], raw)
    return Evidence(
        printed=gap(raw, 0.5),
        control=gap(trial.control(centered, raw), trial.control(0.2, 0.5)),
        table={
            "observed pixels alone": aware,
            "zeros for the others": plain,
        },
    )


@claim(
    "P6",
    source=SLIDES,
    place="memorization, summary, item 2",
    title="Modern networks increase capacity",
    wording="Modern Hopfield networks increase capacity.",
    reading=(
        "Our reading: of 32 random patterns in 64 dimensions, and of 20 random black and white digits, the quadratic"
        " energy keeps at most half as fixed points, the exponential one at least 90 %; rectified third and tenth"
        " powers are in the table. Single flips agree with sums of powers and exponentials written out."
    ),
    reference="energies of all single flips as sums written out in numpy, with extended precision",
    formula="E(ξ) = −Σ_i F(x_i·ξ), F(z) = z^2 against e^z",
    expected=Verdict.HOLDS,
)
def black_and_white(trial: Trial) -> Evidence:
    """Shares of fixed patterns with a quadratic and an exponential energy; the control is quadratic twice."""
    images = torch.where(digits()[torch.randperm(1797, generator=trial.generator)[:20]] >= 0.5, 1.0, -1.0)
    sets = {"random": signs(trial, 32, 64), "digits": images}

    def kept(memory: Polar) -> float:
        return float((memory.flip_cost(memory.patterns) >= 0).all(-1).double().mean())

    def written_out(patterns: Tensor, quadratic: bool) -> float:
        stored = patterns.numpy().astype(np.longdouble)
        overlap = stored @ stored.T
        flipped_overlap = overlap[:, :, None] - 2 * stored[:, None, :] * stored[None, :, :]
        energy = np.square if quadratic else np.exp
        rise = energy(overlap).sum(1)[:, None] - energy(flipped_overlap).sum(1)
        return float((rise >= 0).all(-1).mean())

    def gap(modern: Callable[[Tensor], Polar], quadratic: bool) -> Gap:
        gaps = []
        for patterns in sets.values():
            old, new = kept(Classical(patterns)), kept(modern(patterns))
            gaps += [Gap(old, 0.5), Gap(1 - new, 0.1)]
            gaps += [Gap(abs(old - written_out(patterns, True)), 1e-9)]
            gaps += [Gap(abs(new - written_out(patterns, quadratic)), 1e-9)]
        return widest(*gaps)

    return Evidence(
        printed=gap(Exponential, False),
        control=gap(trial.control(Classical, Exponential), trial.control(True, False)),
        table={f"{name}, quadratic": kept(Classical(each)) for name, each in sets.items()}
        | {f"{name}, power {power}": kept(Dense(each, power)) for name, each in sets.items() for power in (3, 10)}
        | {f"{name}, exponential": kept(Exponential(each)) for name, each in sets.items()},
    )


@claim(
    "P7",
    source=RAMSAUER,
    place="theorem 3 and the examples below it",
    title="c is 3.1546 for d = 20, 1.3719 for d = 75",
    wording="The constant c is 3.1546 for d = 20, K = 3, β = 1, p = 0.001, and 1.3719 for d = 75, K = 1.",
    reading=(
        "The two constants, as printed to four digits, to 1e-4; and w = b / c solves the equation w + ln w = a + ln b"
        " of Lambert's function to 1e-9."
    ),
    reference="the printed numbers, and the equation of Lambert's function",
    formula="c = b / W_0(e^{a + ln b}), N ≥ √p c^{(d − 1)/4}",
    expected=Verdict.HOLDS,
    trials=1,
)
def theorem_constants(trial: Trial) -> Evidence:
    """The constants, and w = b / c in the equation w + ln w = a + ln b; the control has ten times the failures."""
    cases = ((20, 3.0, 3.1546), (75, 1.0, 1.3719))

    def gap(failure: float) -> Gap:
        gaps = []
        for dim, radius, printed in cases:
            found = guaranteed_storage(dim, radius=radius, failure=failure).constant
            a = 2 / (dim - 1) * (1 + math.log(2 * radius**2 * 0.001 * (dim - 1)))
            b = 0.4 * radius**2
            gaps.append(Gap(abs(found - printed), 1e-4))
            gaps.append(Gap(abs(b / found + math.log(b / found) - a - math.log(b)), 1e-9))
        return widest(*gaps)

    return Evidence(
        printed=gap(0.001),
        control=gap(trial.control(0.01, 0.001)),
        table={f"patterns, d = {dim}, K = {k:g}": guaranteed_storage(dim, radius=k).patterns for dim, k, _ in cases},
    )


@claim(
    "P8",
    source=OURS,
    place="docs/memory.md, what a certificate covers; sharper than lemmas A5 to A7 of Ramsauer et al. 2020",
    title="Starts within the certified radius are retrieved",
    wording="Every start closer to a pattern than its certified radius ends at one fixed point, near the pattern.",
    reading=(
        "For 10 random patterns of length √20 in 20 dimensions, β = 1: starts at 0.999 of the radius towards the"
        " nearest rival end within the certified bound, and the radius is at least that of Ramsauer et al. The control"
        " starts eight radii away."
    ),
    reference="the stored patterns: ends of 2000 updates; the radius of Ramsauer et al. 2020",
    formula="r_i = (Δ_i − β^{-1} ln(β (N − 1) D_i^2)) / D_i, κ_i < 1/e",
    expected=Verdict.HOLDS,
)
def certified_radius(trial: Trial) -> Evidence:
    """Ends of starts towards the nearest rival at the radius, and both radii; the control starts eight radii away."""
    normal = normals(trial)

    def sphere(number: int, dim: int) -> Tensor:
        return math.sqrt(dim) * torch.nn.functional.normalize(normal(number, dim), dim=-1)

    memory, wide = Continuous(sphere(10, 20), 1.0), Continuous(sphere(100, 64), 0.25)
    known, far = certificate(memory), certificate(wide)
    patterns = memory.patterns
    rival = (patterns @ patterns.T).fill_diagonal_(-torch.inf).argmax(-1)
    towards = torch.nn.functional.normalize(patterns[rival] - patterns, dim=-1)

    def escape(share: float) -> Gap:
        inside = known.certified
        starts = patterns + share * known.radius[:, None] * towards
        end = memory.retrieve(starts[inside], steps=2000).state
        return above((end - patterns[inside]).norm(dim=-1), known.bound[inside])

    smaller = above(torch.where(known.ramsauer_certified, known.ramsauer_radius, 0.0), known.radius)
    return Evidence(
        printed=widest(escape(0.999), smaller),
        control=escape(trial.control(8.0, 0.999)),
        table={
            "median radius, 10 patterns, d = 20": float(known.radius.median()),
            "Ramsauer et al.": float(known.ramsauer_radius.median()),
            "share certified, 100 patterns, d = 64, β = 1/4": float(far.certified.double().mean()),
            "the same, Ramsauer et al.": float(far.ramsauer_certified.double().mean()),
        },
    )


@claim(
    "P9",
    source=OURS,
    place="docs/memory.md, what to keep in mind; the update of Ramsauer et al. 2020 for two opposite patterns",
    title="Between x and −x a pitchfork at β ‖x‖^2 = 1",
    wording="Between x and −x the middle is the only fixed point up to β ‖x‖^2 = 1; beyond, two others branch off.",
    reading=(
        "From x, a random direction in 5 dimensions, retrieval ends at m x with the largest root of m = tanh(β ‖x‖^2"
        " m), to 1e-8, for β ‖x‖^2 of 0.5, 0.7, 0.9, 1.1, 1.21, 2 and 4."
    ),
    reference="the root by bisection",
    formula="m = tanh(β ‖x‖^2 m)",
    expected=Verdict.HOLDS,
)
def pitchfork(trial: Trial) -> Evidence:
    """Where retrieval from x ends against the root by bisection; the control is a fifth colder."""
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
    """The share of patterns that are back when each coordinate of a cue has made its choice, all at the same time."""
    found = torch.where(memory.flip_cost(cues) < 0, -cues, cues)
    return float((found == patterns).all(-1).double().mean())


def strictly_nearest(cues: Tensor, images: Tensor, order: int) -> float:
    """The share of cues that are closer to their own image than to all others; a soft minimum shares out ties."""
    distance = torch.cdist(cues, images, p=order)
    own = distance.diagonal().clone()
    return float((own < distance.fill_diagonal_(torch.inf).amin(-1) - 1e-6).double().mean())


@functools.cache
def mean_field_overlap(share: float) -> float:
    """The overlap m = erf(y) at zero temperature, with the largest root y of the equations; 0 if there is none."""
    y = np.linspace(0.05, 5, 200_001)
    error = torch.special.erf(torch.from_numpy(y)).numpy()
    excess = error - y * (math.sqrt(2 * share) + 2 / math.sqrt(math.pi) * np.exp(-np.square(y)))
    (roots,) = np.nonzero((excess[:-1] > 0) & (excess[1:] <= 0))
    return float(error[roots[-1]]) if len(roots) else 0.0


@functools.cache
def unstable_bits(power: int, number: int, dim: int) -> float:
    """The probability that a flip lowers −Σ z^power at a random pattern, by the exact law of a sum of integers."""
    fields = [dim - 1 - 2 * count for count in range(dim)]
    chances = [math.comb(dim - 1, count) / 2 ** (dim - 1) for count in range(dim)]
    pulls, own = [(each + 1) ** power - (each - 1) ** power for each in fields], dim**power - (dim - 2) ** power
    unit = math.gcd(own, *pulls)
    variance = (number - 1) * sum(chance * (pull // unit) ** 2 for chance, pull in zip(chances, pulls, strict=True))
    # Twelve standard deviations to each side: what is beyond wraps around and is below the rounding.
    size = 1 << math.ceil(math.log2(24 * math.sqrt(variance) + 4 * max(pulls) // unit))
    law = np.zeros(size)
    for chance, pull in zip(chances, pulls, strict=True):
        law[pull // unit % size] += chance / 2
        law[-pull // unit % size] += chance / 2
    total = np.fft.irfft(np.fft.rfft(law) ** (number - 1), size)
    values = np.arange(size) - size * (np.arange(size) >= size // 2)
    return float(total[values < -(own // unit)].sum())


def _unstable(number: int, dim: int) -> float:
    """The probability that a bit of a random pattern is unstable, by the binomial law of its field."""
    signs_in_field = (number - 1) * (dim - 1)
    most = math.ceil((signs_in_field - dim + 1) / 2) - 1
    logs = [
        math.lgamma(signs_in_field + 1) - math.lgamma(k + 1) - math.lgamma(signs_in_field - k + 1)
        for k in range(most + 1)
    ]
    return math.fsum(math.exp(each - signs_in_field * math.log(2)) for each in logs)


def _root(product: float) -> float:
    """The largest m with m = tanh(product m), by bisection."""
    low, high = (1e-9, 1.0) if product > 1 else (0.0, 0.0)
    while high - low > 1e-15:
        middle = (low + high) / 2
        low, high = (middle, high) if math.tanh(product * middle) > middle else (low, middle)
        if middle in (low, high) and high - low < 1e-14:
            break
    return high
