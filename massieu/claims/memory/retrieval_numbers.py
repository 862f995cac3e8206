"""Figures about retrieval that anybody can compute again: transitions, capacities, digits, radii."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from massieu.claims.claim import Curve, Evidence, Gap, Trial, Verdict
from massieu.claims.experiment import above, apart, normals, one, widest
from massieu.claims.memory.polar_memories import SLIDES, digits, flipped, lost, moved, signs
from massieu.claims.memory.softmax_memories import RAMSAUER
from massieu.claims.registry import claim
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
    source="Amit, Gutfreund and Sompolinsky 1985",
    statement="Retrieval with few wrong bits breaks down at 0.138 d patterns.",
    formula="ξ·x_i / d ≈ 1 for N < 0.138 d",
    expected=Verdict.HOLDS,
)
def overlap_transition(trial: Trial) -> Evidence:
    """Overlaps after retrieval from the patterns themselves, far below and above; the control is above."""
    dim = trial.size(400, 1000)
    shares = (0.06, 0.1, 0.138, 0.17, 0.2, 0.25) if trial.full else (0.1, 0.138, 0.25)
    patterns = signs(trial, int(0.25 * dim), dim)

    @functools.cache
    def overlap(share: float) -> float:
        stored = patterns[: round(share * dim)]
        found = Classical(stored, seed=trial.seed).retrieve(stored[:15], steps=30).state
        return float((found * stored[:15]).mean())

    def gap(share: float) -> Gap:
        return Gap(1 - overlap(share), 0.1)

    seen = {share: overlap(share) for share in shares}
    return Evidence(
        printed=widest(gap(0.1), Gap(seen[0.25], 0.6)),
        control=gap(trial.control(0.25, 0.1)),
        table={f"overlap at {share:g} d": value for share, value in seen.items()},
        curve=Curve(
            list(seen),
            {"measured": list(seen.values()), "0.138": [float(share <= 0.138) for share in seen]},
            x_label="patterns / dimension",
            y_label="overlap",
        ),
    )


@claim(
    "P2",
    source="McEliece et al. 1987",
    statement="Below d / (4 ln d) all random patterns are fixed points, below d / (2 ln d) most of them are.",
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
    source=f"{SLIDES}, modern Hopfield networks (Krotov and Hopfield 2016)",
    statement="Signal and noise of power n give the share of fixed patterns, so d^{n−1} / (2 (2n − 3)!! ln d) of them.",
    formula="P(fixed) = (1 − Q(√(d^{n−1} / ((N − 1) (2n − 3)!!))))^d",
    correction=(
        "For z^n as it is. Rectified it holds more: over 97 % of so many patterns are fixed, where the formula says"
        " 88 to 92 %, and over 70 % of twice as many, where it says 26 to 29 %."
    ),
    expected=Verdict.CONDITIONAL,
)
def polynomial_capacity(trial: Trial) -> Evidence:
    """Shares of fixed patterns, d = 64, as many and twice as many; the control stores twice as many as it says."""
    numbers = {power: round(capacity("dense", 64, "most_fixed", power=power)) for power in (2, 3, 4)}
    looked, odd = trial.size(300, 800), {2: 1, 3: 3, 4: 15}
    draws = {power: max(6, 4 * looked // number) for power, number in numbers.items()}
    stored = {power: [signs(trial, 4 * numbers[power], 64) for _ in range(draws[power])] for power in numbers}

    @functools.cache
    def share(power: int, rectified: bool, times: int = 1) -> float:
        found = []
        for each in stored[power]:
            memory = Dense(each[: times * numbers[power]], power, rectified=rectified)
            found.append((memory.flip_cost(each[: -(-looked // draws[power])]) >= 0).all(-1).double().mean())
        return float(torch.stack(found).mean())

    def predicted(power: int, times: int = 1) -> float:
        noise = (times * numbers[power] - 1) * odd[power]
        return NormalDist().cdf(math.sqrt(64.0 ** (power - 1) / noise)) ** 64

    def gap(rectified: bool, more: int = 1) -> Gap:
        cases = [(power, times) for power in numbers for times in (1, 2)]
        # Three standard errors of 300 patterns, and what the formula lacks at d = 64.
        return widest(*(Gap(abs(share(p, rectified, more * times) - predicted(p, times)), 0.15) for p, times in cases))

    above_formula = widest(*(Gap(1 - share(power, True), 0.03) for power in numbers))
    return Evidence(
        printed=gap(True),
        conditional=widest(gap(False), above_formula),
        control=widest(gap(False, trial.control(2, 1)), above_formula),
        table={f"patterns for power {power}": float(number) for power, number in numbers.items()}
        | {f"fixed, power {power}": share(power, False) for power in numbers}
        | {f"by the formula, power {power}": predicted(power) for power in numbers}
        | {f"fixed, rectified power {power}": share(power, True) for power in numbers}
        | {f"fixed of twice as many, rectified power {power}": share(power, True, 2) for power in numbers},
    )


@claim(
    "P4",
    source=f"{SLIDES}, modern Hopfield networks (Demircigil et al. 2017)",
    statement="Among 2^{d/2} patterns, d = 20, one step finds 99, 85, 27 and 0 % from 0, 1, 2 and 4 flipped bits.",
    formula="N = 2^{d/2} = 1024",
    expected=Verdict.HOLDS,
)
def exponential_basins(trial: Trial) -> Evidence:
    """Shares of patterns back after one step of all coordinates; the control flips one bit more."""
    patterns = signs(trial, 1024, 20)
    memory, looked = Exponential(patterns), patterns[: trial.size(512, 1024)]

    def back(flips: int) -> float:
        return at_once(memory, flipped(trial, looked, flips), looked)

    def gap(more: int) -> Gap:
        seen = {0: 0.995, 1: 0.85, 2: 0.27, 4: 0.0}
        return widest(*(Gap(abs(back(flips + more) - before), 0.08) for flips, before in seen.items()))

    some = patterns[:250]
    asynchronous = 1 - lost(memory, flipped(trial, some, 2), some)
    return Evidence(
        printed=gap(0), control=gap(trial.control(1, 0)), table={"from 2 flips, one bit at a time": asynchronous}
    )


@claim(
    "P5",
    source="Millidge et al. 2022, Universal Hopfield networks",
    statement="Comparing by the L1 distance retrieves more images than the L2 distance or the inner product.",
    formula="argmax_i −‖ξ − x_i‖_1",
    correction=(
        "Where hidden pixels are filled with zeros: .68 against .25 and .22 of 100 digits. Under Gaussian noise L2"
        " wins, .85 against .73, and comparing observed pixels alone finds all."
    ),
    expected=Verdict.CONDITIONAL,
    trials=1,
)
def similarities(trial: Trial) -> Evidence:
    """Digits found by the most similar one, half hidden or noisy; in the control L2 knows what is hidden."""
    number = trial.size(100, 1797)
    before = (0.041, 0.087, 0.467, 0.387) if trial.full else (0.22, 0.26, 0.69, 0.85)
    images = shuffled_digits()[:number].float()
    known = (torch.arange(64) < 32).expand(number, 64)
    noise = torch.as_tensor(np.random.default_rng(1).standard_normal((number, 64))).float()
    states = {"hidden": torch.where(known, images, 0.0), "noisy": images + 0.5 * noise}
    cold = 1e4

    @functools.cache
    def found(kind: Literal["l1", "l2", "dot"], cue: str, aware: bool = False) -> float:
        if kind == "dot":
            state = Continuous(images, cold).update(states[cue])
        else:
            state = Kernel(images, kind, cold).update(states[cue], observed=known if aware else None)
        return float(((state - images).abs().amax(-1) < 1e-3).double().mean())

    def behind(cue: str, aware: bool = False) -> Gap:
        others = max(found("dot", cue), found("l2", cue, aware))
        return Gap(max(0.0, others - found("l1", cue)), 0.02)

    shares = [found("dot", "hidden"), found("l2", "hidden"), found("l1", "hidden"), found("l2", "noisy")]
    again = apart(torch.tensor(shares), torch.tensor(before), 0.02)  # ties between images went to the first before
    return Evidence(
        printed=behind("noisy"),
        conditional=widest(behind("hidden"), again),
        control=behind("hidden", trial.control(True, False)),
        table=dict(zip(("inner product", "L2", "L1", "L2 under noise"), shares, strict=True))
        | {"observed pixels alone": found("l2", "hidden", True)},
    )


@claim(
    "P6",
    source=f"{SLIDES}, summary; scikit-learn's digits, black and white",
    statement="Of 5 to 50 digits a classical memory keeps hardly any, an exponential one all, and half from halves.",
    formula=(
        "fixed .2 .1 0 0 (z^2), .6 .1 .05 0 (relu^3), .8 .7 .85 .86 (relu^10), 1 1 1 1 (e^z); from half .8 .6 .6 .52"
        " (e^z, pixel after pixel)"
    ),
    expected=Verdict.HOLDS,
    trials=1,
)
def black_and_white(trial: Trial) -> Evidence:
    """Shares of fixed and recovered digits against those seen before; the control has another threshold."""
    images, numbers = shuffled_digits(), (5, 10, 20, 50)
    before = {
        "z^2": [0.2, 0.1, 0.0, 0.0],
        "relu^3": [0.6, 0.1, 0.05, 0.0],
        "relu^10": [0.8, 0.7, 0.85, 0.86],
        "e^z": [1.0, 1.0, 1.0, 1.0],
        "e^z, from half": [0.8, 0.6, 0.6, 0.52],
    }
    memories: list[Callable[[Tensor], Polar]] = [
        Classical,
        lambda patterns: Dense(patterns, 3),
        lambda patterns: Dense(patterns, 10),
        Exponential,
    ]

    def shares(threshold: float) -> Tensor:
        patterns = torch.where(images >= threshold, 1.0, -1.0)
        cues = torch.cat([patterns[:, :32], -torch.ones_like(patterns[:, 32:])], -1)

        rested = [[1 - moved(memory(patterns[:n]), patterns[:n]) for n in numbers] for memory in memories]
        back = [in_order(Exponential(patterns[:n]), cues[:n], patterns[:n]) for n in numbers]
        return torch.tensor([*rested, back])

    def gap(threshold: float) -> Gap:
        return apart(shares(threshold), torch.tensor(list(before.values())), 0.005)

    patterns = torch.where(images[:5] >= 0.5, 1.0, -1.0)
    cues = torch.cat([patterns[:, :32], -torch.ones_like(patterns[:, 32:])], -1)
    return Evidence(
        printed=gap(0.5),
        control=gap(trial.control(0.1, 0.5)),
        table={
            f"{name}, {number} digits": float(value)
            for name, row in zip(before, shares(0.5), strict=True)
            for number, value in zip(numbers, row, strict=True)
        }
        | {"e^z, from half, 5 digits, all pixels at once": at_once(Exponential(patterns), cues, patterns)},
    )


@claim(
    "P7",
    source=f"{RAMSAUER}, theorem 3",
    statement="The constant c is 3.1546 for d = 20, K = 3, β = 1, p = 0.001, and 1.3719 for d = 75, K = 1.",
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
    source=f"sharper than {RAMSAUER}, lemmas A5 to A7",
    statement="Every start closer to a pattern than its certified radius ends at one fixed point, near the pattern.",
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
    source=f"the update of {RAMSAUER}, for two opposite patterns",
    statement="Between x and −x the middle is the only fixed point up to β ‖x‖^2 = 1; beyond, two others branch off.",
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


def in_order(memory: Polar, cues: Tensor, patterns: Tensor) -> float:
    """The share of patterns that are back when coordinate after coordinate made its choice, until none moves."""
    state, before = cues.clone(), torch.zeros_like(cues)
    while not torch.equal(state, before):  # an energy falls with every flip
        before = state.clone()
        for place in range(state.shape[-1]):
            flips = memory.flip_cost(state)[:, place] < 0
            state[flips, place] *= -1
    return float((state == patterns).all(-1).double().mean())


def shuffled_digits() -> Tensor:
    """The digits in the order in which the figures were first computed."""
    return digits()[torch.as_tensor(np.random.default_rng(0).permutation(1797))]


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
