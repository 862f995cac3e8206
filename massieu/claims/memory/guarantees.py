"""Guarantees before retrieval: storage, radii, bounds of one update and of many, written out."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from massieu.claims.claim import Evidence, Gap, Source, Trial, Verdict
from massieu.claims.experiment import TIGHT, above, apart, normals, widest
from massieu.claims.registry import claim
from massieu.memory import Certificate, Continuous, Sparse, certificate, guaranteed_storage, one_step_bound


@claim(
    "M7",
    source=Source.SLIDES,
    place="memorization, properties of the continuous update; theorem 3 of Ramsauer et al. 2020",
    title="Exponential storage capacity",
    wording="The continuous network has exponential storage capacity.",
    reading=(
        "Our reading: for any β. 1000 (full: 4000) random patterns of length √(d − 1), d = 64, have fixed points of"
        " their own at β = 1 / √d, for all but 1 % of 50 that are looked at. Under the condition, length 3 √(d − 1) and"
        " β = 1: all of 7, d = 20, and of 1000 (4000), d = 64, and theorem 3 guarantees as many."
    ),
    reference=(
        "theorem 3 of Ramsauer et al. 2020, its equation w + ln w = a + ln b solved by bisection; distances between the"
        " ends of retrieval and to the nearest rival"
    ),
    formula="N ≥ √p c^{(d − 1)/4}, ‖x_i‖ = K √(d − 1)",
    correction=(
        "At a fixed β and if c is large enough. At the inverse temperature of attention, β = 1 / √d, with K = 1 and"
        " d = 64, the condition fails, and 1000 random patterns have one fixed point in common."
    ),
    expected=Verdict.CONDITIONAL,
)
def exponential_storage(trial: Trial) -> Evidence:
    """Share of patterns without a fixed point of their own, up to as many as guaranteed; the control is warm."""
    normal = normals(trial)
    sizes = {20: 7, 64: trial.size(1000, 4000)}
    draws = {dim: torch.nn.functional.normalize(normal(number, dim), dim=-1) for dim, number in sizes.items()}

    def missing(dim: int, radius: float, beta: float) -> Gap:
        patterns = radius * (dim - 1) ** 0.5 * draws[dim]
        starts = patterns[:50]
        end = Continuous(patterns, beta).retrieve(starts).state
        rival = torch.cdist(starts, patterns).fill_diagonal_(torch.inf).amin(-1)
        shared = torch.cdist(end, end).fill_diagonal_(torch.inf).amin(-1) < 1e-3 * rival
        return Gap(float((shared | ((end - starts).norm(dim=-1) > rival / 2)).double().mean()), 0.01)

    def guaranteed(beta: float) -> Gap:
        gaps = [missing(dim, 3.0, beta) for dim in sizes]
        for dim, number in sizes.items():
            expected = theorem_3(dim, 3.0, beta).patterns
            ours = guaranteed_storage(dim, radius=3.0, beta=beta).patterns
            gaps += [Gap(number / expected, 1.0), Gap(abs(ours / expected - 1), TIGHT)]
        return widest(*gaps)

    return Evidence(
        printed=missing(64, 1.0, 1 / 8),
        conditional=guaranteed(1.0),
        control=guaranteed(trial.control(0.01, 1.0)),
        table={
            "guaranteed, d = 20, K = 3, β = 1": theorem_3(20, 3.0, 1.0).patterns,
            "guaranteed, d = 64": theorem_3(64, 3.0, 1.0).patterns,
            "c for d = 64, K = 1, β = 1/8": theorem_3(64, 1.0, 1 / 8).constant,
            "where at least is needed": theorem_3(64, 1.0, 1 / 8).needed,
        },
    )


@claim(
    "M8",
    source=Source.SLIDES,
    place="memorization, properties of the continuous update; theorem 4 of Ramsauer et al. 2020",
    title="Convergence after one update step",
    wording="The continuous network converges after one update step.",
    reading=(
        "Our reading: whatever the patterns. One update from half the radius that is certified under the condition"
        " comes to 1e-3 of the length of a pattern, within the bound, which is that of `one_step_bound` to a relative"
        " 1e-9, and entmax with α = 2 exactly; 30 patterns (full: 1000) in 32 dimensions, β = 4, all with one large"
        " vector in common. Under the condition: the same without it, of length √32."
    ),
    reference="the stored patterns, and the bound written out from distances and inner products",
    formula="f(ξ) = x_i",
    correction=(
        "Up to D_i (N − 1) e^{−β (Δ_i − D_i ‖ξ − x_i‖)}, which is small for separated patterns alone. Exactly never"
        " with softmax, and with α-entmax if Δ_i ≥ 1 / (β (α − 1)) + D_i ‖ξ − x_i‖."
    ),
    expected=Verdict.CONDITIONAL,
)
def one_update(trial: Trial) -> Evidence:
    """Error after one update against its bound, 10^{−3} of the length, and none for entmax; the control is warm."""
    normal = normals(trial)
    atoms, dim = trial.size(30, 1000), 32
    separated = dim**0.5 * torch.nn.functional.normalize(normal(atoms, dim), dim=-1)
    away = torch.nn.functional.normalize(normal(atoms, dim), dim=-1)
    known = certificate(Continuous(separated, 4.0))
    reach = 0.5 * known.radius[:, None] * away

    def gap(patterns: Tensor, beta: float) -> Gap:
        memory, start = Continuous(patterns, beta), patterns + reach
        error, distance = (memory.update(start) - patterns).norm(dim=-1), reach.norm(dim=-1)
        lead = separations(patterns) - farthest(patterns) * distance
        bound = farthest(patterns) * ((atoms - 1) * (-beta * lead).exp()).clamp(max=1)
        ours = one_step_bound(certificate(memory), distance).value
        exact = apart(Sparse(patterns, beta, alpha=2.0).update(start), patterns)
        length = patterns.norm(dim=-1).max()
        return widest(Gap(float(error.max() / length), 1e-3), above(error, bound), relative(ours, bound), exact)

    alone = apart(Continuous(separated[:8], 1.0).update(separated[:8]), separated[:8])
    return Evidence(
        printed=gap(separated + 3 * dim**0.5 * away[:1], 4.0),
        conditional=gap(separated, 4.0),
        control=gap(separated, trial.control(0.04, 4.0)),
        table={"share certified": float(known.certified.double().mean()), "softmax at a pattern": alone.measured},
    )


@claim(
    "M16",
    source=Source.PAPER,
    place="appendix B, first paragraph",
    title="Proofs of the limits apply for fixed patterns",
    wording=(
        "Later Hopfield layers have changing patterns, but the theoretical proofs of the limiting behavior apply for"
        " fixed patterns."
    ),
    reading=(
        "Our reading: with fixed patterns, certified ones end within the bound after 200 (full: 500) updates, and at"
        " least half of 6 random ones of length 5 in 16 (full: 64) dimensions are certified, β = 1; which ones and"
        " with which bounds `certificate` says as well, to a relative 1e-9. Where the patterns move with the states,"
        " they do not."
    ),
    reference=(
        "the stored patterns; condition and bound in the place of lemmas A5 to A7 of Ramsauer et al. 2020, written out"
        " from distances and inner products"
    ),
    formula="ξ^{t+1} = X^T softmax(β X ξ^t), X fixed",
)
def fixed_patterns(trial: Trial) -> Evidence:
    """Ends of certified patterns against the certified bound; in the control the patterns change with the states."""
    normal = normals(trial)
    dim = trial.size(16, 64)
    patterns = 5 * torch.nn.functional.normalize(normal(6, dim), dim=-1)
    known = certified_by_hand(patterns, 1.0)

    def gap(moving: bool) -> Gap:
        state = patterns
        for _ in range(trial.size(200, 500)):
            state = Continuous(state if moving else patterns, beta=1.0).update(state)
        return above((state - patterns).norm(dim=-1), torch.where(known.certified, known.bound, torch.inf))

    return Evidence(
        printed=widest(
            gap(False),
            Gap(1 - float(known.certified.double().mean()), 0.5),
            as_by_hand(certificate(Continuous(patterns, beta=1.0)), known),
        ),
        control=gap(trial.control(True, False)),
        table={"certified distance from the pattern": float(known.bound[known.certified].max())},
    )


@claim(
    "P7",
    source=Source.RAMSAUER,
    place="theorem 3 and the examples below it",
    title="c is 3.1546 for d = 20, 1.3719 for d = 75",
    wording="The constant c is 3.1546 for d = 20, K = 3, β = 1, p = 0.001, and 1.3719 for d = 75, K = 1.",
    reading=(
        "The two constants of `guaranteed_storage`, as printed to four digits, to 1e-4; its constants and numbers of"
        " patterns are those of the theorem to a relative 1e-9, and it says when the condition on c fails, for K of 1,"
        " too, at d = 20."
    ),
    reference="the printed numbers, and the theorem written out, its equation w + ln w = a + ln b solved by bisection",
    formula="c = b / W_0(e^{a + ln b}), N ≥ √p c^{(d − 1)/4}",
    trials=1,
)
def theorem_constants(trial: Trial) -> Evidence:
    """Constants and numbers against those printed and the theorem; the control has ten times the failures."""
    printed = ((20, 3.0, 3.1546), (75, 1.0, 1.3719))

    def gap(failure: float) -> Gap:
        gaps = []
        for dim, radius in ((20, 3.0), (75, 1.0), (20, 1.0)):
            found, expected = guaranteed_storage(dim, radius=radius, failure=failure), theorem_3(dim, radius, 1.0)
            gaps.append(Gap(abs(found.constant / expected.constant - 1), TIGHT))
            gaps.append(Gap(abs(found.patterns / expected.patterns - 1), TIGHT))
            gaps.append(Gap(float(found.vacuous != (expected.constant < expected.needed)), 0.5))
        for dim, radius, number in printed:
            constant = guaranteed_storage(dim, radius=radius, failure=failure).constant
            gaps.append(Gap(abs(constant - number), 1e-4))
        return widest(*gaps)

    return Evidence(
        printed=gap(0.001),
        control=gap(trial.control(0.01, 0.001)),
        table={f"patterns, d = {dim}, K = {k:g}": guaranteed_storage(dim, radius=k).patterns for dim, k, _ in printed},
    )


@claim(
    "P8",
    source=Source.OURS,
    place="docs/memory.md, what a certificate covers; sharper than lemmas A5 to A7 of Ramsauer et al. 2020",
    title="Starts within the certified radius are retrieved",
    wording="Every start closer to a pattern than its certified radius ends at one fixed point, near the pattern.",
    reading=(
        "For 10 random patterns of length √20 in 20 dimensions, β = 1: starts at 0.999 of the radius of `certificate`,"
        " toward the nearest rival and in 20 (full: 500) random directions, end within the bound, where the pattern"
        " itself ends, to 1e-9. Its radii, bounds and conditions, and those of Ramsauer et al., are the written-out"
        " ones, to a relative 1e-9, and theirs are smaller, also for 100 patterns of length 8 in 64 dimensions, β ="
        " 1/4. The control starts eight radii away."
    ),
    reference=(
        "the stored patterns: ends of 2000 updates; radii, bounds and conditions written out from distances and inner"
        " products"
    ),
    formula="r_i = (Δ_i − β^{-1} ln(β (N − 1) D_i^2)) / D_i, κ_i < 1/e; Ramsauer et al.: 1 / (β N M)",
)
def certified_radius(trial: Trial) -> Evidence:
    """Ends of starts at the radius, and both certificates by hand; the control starts eight radii away."""
    normal = normals(trial)
    memories = [
        Continuous(math.sqrt(dim) * torch.nn.functional.normalize(normal(number, dim), dim=-1), beta)
        for number, dim, beta in ((10, 20, 1.0), (100, 64, 0.25))
    ]
    (known, far), (own, wide) = zip(
        *((certificate(each), certified_by_hand(each.patterns, float(each.beta))) for each in memories), strict=True
    )
    patterns, inside = memories[0].patterns, own.certified
    rival = (patterns @ patterns.T).fill_diagonal_(-torch.inf).argmax(-1)
    toward = torch.cat([(patterns[rival] - patterns)[None], normal(trial.size(20, 500), *patterns.shape)])
    toward = torch.nn.functional.normalize(toward, dim=-1)[:, inside]

    def escape(share: float) -> Gap:
        starts = patterns[inside] + share * known.radius[inside, None] * toward
        end = memories[0].retrieve(starts.flatten(0, 1), steps=2000).state.unflatten(0, starts.shape[:2])
        center = memories[0].retrieve(patterns[inside], steps=2000).state
        away = above((end - patterns[inside]).norm(dim=-1), own.bound[inside])
        return widest(away, apart(end, center.expand_as(end)))

    smaller = [above(torch.where(each.theirs, each.their_radius, 0.0), each.radius) for each in (own, wide)]
    return Evidence(
        printed=widest(escape(0.999), as_by_hand(known, own), as_by_hand(far, wide), *smaller),
        control=escape(trial.control(8.0, 0.999)),
        table={
            "median radius, 10 patterns, d = 20": float(known.radius.median()),
            "Ramsauer et al.": float(known.ramsauer_radius.median()),
            "share certified, 100 patterns, d = 64, β = 1/4": float(far.certified.double().mean()),
            "the same, Ramsauer et al.": float(far.ramsauer_certified.double().mean()),
        },
    )


class ByHand(NamedTuple):
    """Certificate written out: conditions, radii and bounds, each of shape ``(atoms,)``.

    Attributes:
        certified: κ_i < 1/e.
        radius: r_i; zero where there is none.
        bound: distance of the fixed point; meaningless where the condition fails.
        theirs: condition of Ramsauer et al. 2020.
        their_radius: 1 / (β N M).
    """

    certified: Tensor
    radius: Tensor
    bound: Tensor
    theirs: Tensor
    their_radius: Tensor


def separations(patterns: Tensor) -> Tensor:
    """Return Δ_i, the square of a pattern minus its largest inner product with another."""
    inner = patterns @ patterns.T
    return inner.diagonal() - inner.clone().fill_diagonal_(-torch.inf).amax(-1)


def farthest(patterns: Tensor) -> Tensor:
    """Return D_i, the distance of a pattern from the farthest other one."""
    return torch.stack([(patterns - each).square().sum(-1).sqrt().max() for each in patterns])


def certified_by_hand(patterns: Tensor, beta: float) -> ByHand:
    """Return the certificates of docs/memory.md and of Ramsauer et al. 2020 for patterns without weights."""
    atoms, separation, reach = len(patterns), separations(patterns), farthest(patterns)
    kappa = beta * reach.square() * (atoms - 1) * (-beta * separation).exp()
    # The bound is u / (β D) with the lesser root of u e^{−u} = κ, which lies below one.
    root, high = torch.zeros_like(kappa), torch.ones_like(kappa)
    for _ in range(100):
        middle = (root + high) / 2
        below = middle * (-middle).exp() < kappa
        root, high = torch.where(below, middle, root), torch.where(below, high, middle)
    longest = patterns.norm(dim=-1).max()
    needed = 2 / (beta * atoms) + torch.log(2 * (atoms - 1) * atoms * beta * longest**2) / beta
    return ByHand(
        certified=kappa < math.exp(-1),
        radius=((separation - torch.log(beta * (atoms - 1) * reach.square()) / beta) / reach).clamp(min=0),
        bound=root / (beta * reach),
        theirs=separation >= needed,
        their_radius=(1 / (beta * atoms * longest)).expand(atoms),
    )


def as_by_hand(found: Certificate, own: ByHand) -> Gap:
    """Return the largest relative difference of a certificate from that written out, for certified patterns."""
    kept = own.certified
    return widest(
        Gap(float((found.certified != kept).sum() + (found.ramsauer_certified != own.theirs).sum()), 0.5),
        relative(found.radius[kept], own.radius[kept]),
        relative(found.bound[kept], own.bound[kept]),
        relative(found.ramsauer_radius, own.their_radius),
    )


def relative(found: Tensor, expected: Tensor) -> Gap:
    return apart(found / expected, torch.ones_like(expected))


class Theorem(NamedTuple):
    """Numbers of Theorem 3 of Ramsauer et al. 2020: c, the number of patterns, and the least c."""

    constant: float
    patterns: float
    needed: float


def theorem_3(dim: int, radius: float, beta: float, failure: float = 0.001) -> Theorem:
    """Write Theorem 3 out, with the root w = b / c of w + ln w = a + ln b by bisection of ln w."""
    a = 2 / (dim - 1) * (1 + math.log(2 * beta * radius**2 * failure * (dim - 1)))
    b = 0.4 * radius**2 * beta
    low, high = -100.0, 100.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if math.exp(middle) + middle < a + math.log(b) else (low, middle)
    constant = b / math.exp(low)
    needed = (2 / math.sqrt(failure)) ** (4 / (dim - 1))
    return Theorem(constant, math.sqrt(failure) * constant ** ((dim - 1) / 4), needed)
