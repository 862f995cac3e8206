"""The slides on memories of states 1 and −1: storage, capacity and retrieval."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from massieu.checks import MissingPackageError, pip_install
from massieu.claims.claim import Evidence, Gap, Source, Trial, Verdict
from massieu.claims.experiment import TIGHT, above, apart, normals, widest
from massieu.claims.registry import claim
from massieu.memory import Classical, Dense, Exponential, capacity, measure_capacity
from massieu.memory.polar import Polar


def signs(trial: Trial, *shape: int) -> Tensor:
    """Return a function that draws states of 1 and −1 in float64, one after the other."""
    return 2.0 * torch.randint(0, 2, shape, generator=trial.generator, dtype=torch.float64) - 1


def flipped(trial: Trial, states: Tensor, count: int) -> Tensor:
    """Flip a number of random coordinates of each state."""
    order = torch.rand(states.shape, generator=trial.generator, dtype=torch.float64).argsort(-1)
    return torch.where(order < count, -states, states)


def moved(memory: Polar, states: Tensor) -> float:
    return float((memory.update(states) != states).any(-1).double().mean())


def hebbian(patterns: Tensor, diagonal: bool) -> Tensor:
    """Write out the matrix W of Hebb's rule."""
    matrix = patterns.T @ patterns
    return matrix if diagonal else matrix - torch.diag(matrix.diagonal())


def quadratic(matrix: Tensor, states: Tensor) -> Tensor:
    return -0.5 * torch.einsum("ni,ij,nj->n", states, matrix, states)


def unstable(patterns: Tensor, states: Tensor, diagonal: bool) -> float:
    """Return the share of states of which W ξ changes a sign."""
    return float((states * (states @ hebbian(patterns, diagonal)) < 0).any(-1).double().mean())


def lost(memory: Polar, cues: Tensor, patterns: Tensor) -> float:
    return float((memory.retrieve(cues).state != patterns).any(-1).double().mean())


def digits() -> Tensor:
    """Return the 1797 handwritten digits of scikit-learn, 8 by 8 pixels from 0 to 1, shape ``(1797, 64)``."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise MissingPackageError(
            f"claims about digits need scikit-learn, which is not installed; {pip_install('verify')}"
        ) from None
    return torch.as_tensor(load_digits().data / 16)


@claim(
    "M1",
    source=Source.SLIDES,
    place="memorization, the asynchronous update rule of classical Hopfield networks",
    title="All stored patterns are fixed points",
    wording="After updates until convergence, all stored patterns are fixed points.",
    reading=(
        "Our reading: at any load. 64 random patterns in 256 dimensions (full: 256 in 1024) with W as printed, of which"
        " 48 are looked at, and at most 5 % may move in a sweep. Under the condition none of the 11 (full: 36) patterns"
        " that d / (4 ln d) allows may move, with diagonal zero; that twice as many are too many is the subject of P2."
        " W written out as a matrix says the same."
    ),
    reference="signs of W ξ with W written out as a matrix; d / (4 ln d) of McEliece et al. 1987",
    formula="x_i = sgn(W x_i − b), W = Σ_i x_i x_i^T",
    correction="With high probability, for random patterns, at most d / (4 ln d), without bias (McEliece et al. 1987).",
    expected=Verdict.CONDITIONAL,
)
def stored_patterns(trial: Trial) -> Evidence:
    """Share of patterns that an update moves, with few and with many; the control looks at states not stored."""
    dim = trial.size(256, 1024)
    patterns, others = signs(trial, dim // 4, dim), signs(trial, dim // 4, dim)
    few = int(dim / (4 * math.log(dim)))

    def gap(number: int, states: Tensor, allowed: float, diagonal: bool = False) -> Gap:
        looked, stored = states[: min(number, 48)], patterns[:number]
        share = moved(Classical(stored, diagonal=diagonal), looked)
        return widest(Gap(share, allowed), Gap(abs(share - unstable(stored, looked, diagonal)), 1e-9))

    smallest = torch.tensor([[-1.0, -1, -1, -1], [-1, -1, -1, 1], [-1, -1, 1, -1]])
    return Evidence(
        printed=gap(dim // 4, patterns, 0.05, diagonal=True),
        conditional=gap(few, patterns, 1e-9),
        control=gap(few, trial.control(others, patterns), 1e-9),
        table={
            "patterns below the condition": float(few),
            f"share moved among {dim // 4}, without diagonal": gap(dim // 4, patterns, 0.05).measured,
            "share moved of 3 patterns in 4 dimensions": moved(Classical(smallest), smallest),
        },
    )


@claim(
    "M2",
    source=Source.SLIDES,
    place="memorization, pictures, formula of the capacity",
    title="The capacity is d / (2 log d), about 0.14 d",
    wording="The capacity is C ≈ d / (2 log d) ≈ 0.14 d.",
    reading=(
        "Our reading: the two numbers, with the natural logarithm, are equal up to 10 % at d = 512 (full: 1024)."
        " Corrected: of random draws, 60 for the first and 24 (60) for the second, at most 30 % fail each criterion"
        " below its own number: a pattern is a fixed point among d / (2 ln d), and keeps an overlap of 0.95 among 0.8"
        " times 0.138 d. Among 1.75 and 1.45 times these numbers more than 30 % fail; no closer are they located here."
        " `capacity` gives 0.138 d to a relative 1e-9."
    ),
    reference=(
        "the capacities of McEliece et al. 1987 and of Amit et al. 1985 written out, and counts over random draws"
    ),
    formula="C ≈ d / (2 ln d) ≈ 0.14 d",
    correction=(
        "Two criteria, equal near d = 36 alone: below d / (2 ln d) most patterns are fixed (McEliece et al. 1987);"
        " below 0.138 d a state with few wrong bits is near (Amit et al. 1985), and hardly any pattern is fixed."
    ),
    expected=Verdict.HOLDS_CORRECTED,
)
def two_capacities(trial: Trial) -> Evidence:
    """Failures of each criterion below and above its own capacity; the control takes the other for the first."""
    dim = trial.size(512, 1024)
    most, errors = dim / (2 * math.log(dim)), 0.138 * dim

    def failing(criterion: str, number: float) -> float:
        draws = trial.size(24, 60) if criterion == "small_errors" else 60
        options: dict[str, Any] = {"trials": draws, "generator": trial.seed}
        (row,) = measure_capacity("classical", dim, [int(number)], criterion=criterion, **options)
        return 1 - row.rate

    near = Gap(failing("small_errors", 0.8 * errors), 0.3)
    above = [Gap(1 - failing("most_fixed", 1.75 * most), 0.7), Gap(1 - failing("small_errors", 1.45 * errors), 0.7)]
    said = Gap(abs(capacity("classical", dim, "small_errors") / errors - 1), TIGHT)

    def gap(number: float) -> Gap:
        return widest(Gap(failing("most_fixed", number), 0.3), near, *above, said)

    return Evidence(
        printed=Gap(abs(0.14 * dim / most - 1), 0.1),
        corrected=gap(most),
        control=gap(trial.control(errors, most)),
        table={
            "dim": float(dim),
            "d / (2 ln d)": most,
            "0.138 d": errors,
            "the first over the second at d = 36": 36 / (2 * math.log(36)) / (0.138 * 36),
        },
    )


@claim(
    "M3",
    source=Source.SLIDES,
    place="memorization, weights matrix, energy, and the picture of recovered local minima",
    title="Local minima of −½ ξ^T W ξ are recovered, W = Σ x x^T",
    wording="With W = Σ_i x_i x_i^T the rule minimizes the energy, and its local minima are recovered.",
    reading=(
        "Our reading: the energy does not rise in a sweep, and at least 90 % of 100 random states are not at rest, or"
        " there would be nothing to recover; with 5 and with 1024 patterns in 64 dimensions, W as printed, with its"
        " diagonal. Corrected: with diagonal zero."
    ),
    reference="energies and signs of W ξ with W written out as a matrix",
    formula="W = Σ_i x_i x_i^T, E(ξ) = −½ ξ^T W ξ",
    correction=(
        "The energy falls, but with many more patterns than dimensions the diagonal holds every state: capacities need"
        " w_ii = 0, or cues with errors."
    ),
    expected=Verdict.HOLDS_CORRECTED,
)
def diagonal_trap(trial: Trial) -> Evidence:
    """Share of random states at rest, rises of the energy; the control looks at stored patterns instead."""
    dim, many = 64, 1024
    patterns, random = signs(trial, many, dim), signs(trial, 100, dim)

    def gap(number: int, states: Tensor, diagonal: bool) -> Gap:
        stored = patterns[:number]
        memory = Classical(stored, diagonal=diagonal)
        matrix, after = hebbian(stored, diagonal), memory.update(states)
        before = quadratic(matrix, states)
        return widest(
            Gap(1 - unstable(stored, states, diagonal), 0.1),
            Gap(abs(moved(memory, states) - unstable(stored, states, diagonal)), 1e-9),
            apart(memory.energy(states), before),
            above(quadratic(matrix, after), before),
        )

    states = trial.control(patterns[:5], random)
    kept, cues = Classical(patterns, diagonal=True), flipped(trial, patterns[:50], 6)
    return Evidence(
        printed=widest(gap(5, random, True), gap(many, random, True)),
        corrected=widest(gap(5, random, False), gap(many, random, False)),
        control=widest(gap(5, states, False), gap(many, states, False)),
        table={
            f"of {many} patterns at rest, diagonal kept": 1 - moved(kept, patterns[:50]),
            "of random states": 1 - moved(kept, random),
            "of patterns back from 6 flips": 1 - lost(kept, cues, patterns[:50]),
            "of patterns at rest, diagonal zero": 1 - moved(Classical(patterns), patterns[:50]),
        },
    )


@claim(
    "M4",
    source=Source.SLIDES,
    place="memorization, the asynchronous update rule of classical Hopfield networks",
    title="sgn(Wξ b) minimizes the energy with bias",
    wording=(
        "The asynchronous rule is sgn(W ξ b) and minimizes E(ξ) = −½ ξ^T W ξ + ξ^T b; so reads the text of the slides,"
        " which may have lost a sign that the slides have."
    ),
    reading=(
        "Our reading: with sgn(W ξ + b), one way to read what is printed, and with sgn(W ξ − b), corrected, no sweep"
        " raises the energy, from 100 random states and from where they come to rest; 5 patterns in 64 dimensions"
        " (full: 256), a normal bias."
    ),
    reference="the energy written out with W as a matrix",
    formula="ξ_i = sgn(W ξ b)_i, E(ξ) = −½ ξ^T W ξ + ξ^T b",
    correction="sgn(W ξ − b). The minus sign may be lost in the extraction of the text alone, not in the slides.",
    expected=Verdict.HOLDS_CORRECTED,
)
def lost_sign(trial: Trial) -> Evidence:
    """Rises of the energy, from random states and where it should rest; the control mixes up the bias."""
    dim = trial.size(64, 256)
    patterns, states = signs(trial, 5, dim), signs(trial, 100, dim)
    bias = dim / 2 * normals(trial)(dim)
    memory = Classical(patterns, bias=bias)
    starts = torch.cat([states, memory.retrieve(states).state])

    def energy(each: Tensor) -> Tensor:
        return quadratic(hebbian(patterns, False), each) + each @ bias

    def rise(field: Tensor) -> Gap:
        return above(energy(Classical(patterns, bias=field).update(starts)), energy(starts))

    return Evidence(printed=rise(-bias), corrected=rise(bias), control=rise(trial.control(bias.flip(0), bias)))


@claim(
    "M6",
    source=Source.SLIDES,
    place="memorization, new energy function, interaction exp",
    title="With the exponential the capacity is 2^{d/2}",
    wording="With the interaction function F(z) = exp(z) the capacity is C ≈ 2^{d/2}.",
    reading=(
        "Our reading: of 2^{d/2} = 1024 random patterns, d = 20, at most 10 % are lost from cues with a tenth of the"
        " bits flipped. Under the condition: at most 10 % of them are lost from no flips, and of e^{d I / 2} = 249"
        " patterns, d = 30, from a tenth. 200 (full: 500) of the 1024 and all of the 249 are looked at."
    ),
    reference="the stored patterns; the theorem of Demircigil et al. 2017",
    formula="C ≈ 2^{d/2}",
    correction=(
        "As fixed points, with basins that vanish. From ρ d flipped bits e^{d I(1 − 2ρ) / 2} patterns come back, where"
        " 2 I(x) = (1 + x) ln(1 + x) + (1 − x) ln(1 − x)."
    ),
    expected=Verdict.CONDITIONAL,
)
def vanishing_basins(trial: Trial) -> Evidence:
    """Share of patterns lost from 0 and from 10 % flips; the control has the quadratic interaction."""
    patterns, longer = signs(trial, 1024, 20), signs(trial, 249, 30)
    looked = trial.size(200, 500)
    cues, long_cues = flipped(trial, patterns[:looked], 2), flipped(trial, longer, 3)

    def gap(memory: Callable[[Tensor], Polar], stored: Tensor, states: Tensor) -> Gap:
        return Gap(lost(memory(stored), states, stored[: len(states)]), 0.1)

    def both(memory: Callable[[Tensor], Polar]) -> Gap:
        return widest(gap(memory, patterns, patterns[:looked]), gap(memory, longer, long_cues))

    return Evidence(
        printed=gap(Exponential, patterns, cues),
        conditional=both(Exponential),
        control=both(trial.control(Classical, Exponential)),
        table={
            "patterns for ρ = 0, d = 20": capacity("exponential", 20, "all_recovered"),
            "patterns for ρ = 0.1, d = 20": capacity("exponential", 20, "all_recovered", corruption=0.1),
            "patterns for ρ = 0.1, d = 30": capacity("exponential", 30, "all_recovered", corruption=0.1),
        },
    )


@claim(
    "M9",
    source=Source.SLIDES,
    place="memorization, summary, item 2",
    title="Modern networks prevent interference",
    wording="Modern Hopfield networks prevent interference from correlated data.",
    reading=(
        "Our reading: with the exponential, at most 10 % of handwritten digits, black and white, are lost from their"
        " upper half, the lower one white, in 5 (full: 15) groups of 20 at random. Under the condition: no cue hides"
        " anything."
    ),
    reference="the stored digits of scikit-learn",
    formula="ξ = x_i from a part of x_i",
    correction="Digits are fixed points with the exponential interaction; from half of the pixels many do not return.",
    expected=Verdict.CONDITIONAL,
)
def correlated_data(trial: Trial) -> Evidence:
    """Share of binary digits that move, and that are lost from their upper half; the control is cubic."""
    images = torch.where(digits() >= 0.5, 1.0, -1.0)
    order = torch.randperm(len(images), generator=trial.generator)
    groups = [images[order[start : start + 20]] for start in range(0, trial.size(100, 300), 20)]

    def power(exponent: int) -> Callable[[Tensor], Polar]:
        return lambda patterns: Dense(patterns, exponent)

    def gap(memory: Callable[[Tensor], Polar], hidden: int) -> Gap:
        shares = []
        for patterns in groups:
            cues = patterns.clone()
            cues[:, 64 - hidden :] = -1
            shares.append(lost(memory(patterns), cues, patterns))
        return Gap(sum(shares) / len(shares), 0.1)

    return Evidence(
        printed=gap(Exponential, 32),
        conditional=gap(Exponential, 0),
        control=gap(trial.control(power(3), Exponential), 0),
        table={
            "lost from half, rectified tenth power": gap(power(10), 32).measured,
            "moved, classical": gap(Classical, 0).measured,
        },
    )
