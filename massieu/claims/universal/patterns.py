"""Sparse attention as a universal approximator: which patterns meet the conditions on them, and how these are meant."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from massieu.claims.claim import Curve, Evidence, Gap, Trial, Verdict
from massieu.claims.experiment import widest
from massieu.claims.registry import claim
from massieu.nn import Transformer
from massieu.patterns import (
    Pattern,
    Schedule,
    bigbird,
    check_universality,
    dilated,
    fixed,
    from_edges,
    global_window,
    powers_of_two,
    ring,
    star,
    star_ring,
    strided,
    window,
)
from massieu.patterns.pattern import as_schedule

SLIDES = 'slides "A perspective on the fundamentals of transformers", approximation: sparse transformers'
YUN = 'Yun et al. 2020, "O(n) connections are expressive enough"'
NONE = 0.5  # of what is counted, none may be left


@claim(
    "U1",
    source=f"{YUN}, assumption 1 and its examples; {SLIDES}",
    statement="The usual sparse patterns meet the three conditions on sparsity patterns, in both directions.",
    formula="k ∈ A^l_k; γ(i) ∈ ∪_l A^l_γ(i+1); S^s_k = [T] for all k",
    correction=(
        "If the stride of the fixed pattern divides the length. Otherwise the last block has no last token, and nobody"
        " outside hears of it."
    ),
    expected=Verdict.CONDITIONAL,
)
def conditions_of_families(trial: Trial) -> Evidence:
    """Self-loops, links of the path and pairs that are missing, by dense products, over eight families, for a length
    that the stride divides and one that it does not; the control has a dilated window in the place of a window."""
    stride = int(torch.randint(6, 10, (), generator=trial.generator))
    rest = int(torch.randint(1, stride, (), generator=trial.generator))
    families: list[Pattern | Schedule] = [
        ring(),
        star_ring(),
        strided(stride),
        fixed(stride),
        global_window(2, 1),
        bigbird(1, 2, 3, seed=trial.seed),
        powers_of_two(),
    ]

    def gap(length: int, first: Pattern) -> Gap:
        return Gap(float(sum(missing(each, length) for each in [first, *families])), NONE)

    length = stride**2
    found = {repr(each): check_universality(each, length).reach_layers for each in families}
    lacking = [repr(each) for each in families if missing(each, length + rest)]
    return Evidence(
        printed=gap(length + rest, window(2)),
        conditional=gap(length, window(2)),
        control=gap(length, trial.control(dilated(2, 2), window(2))),
        table={
            "tokens": float(length),
            "families that the other length harms": float(len(lacking)),
            "of which the fixed pattern": float(lacking == [f"fixed({stride})"]),
            **{f"layers, {name}": float(layers or 0) for name, layers in found.items()},
        },
    )


@claim(
    "U2",
    source=f"{SLIDES}, corollary; {YUN}",
    statement="There are sparse transformers with O(T) connections in a layer that meet the conditions.",
    formula="Σ_k #A_k = O(T)",
    expected=Verdict.HOLDS,
)
def linear_connections(trial: Trial) -> Evidence:
    """How far the exponent of connections in the length exceeds one, and what the conditions miss, for a star with a
    ring, a window with global tokens, and BigBird; the control is the strided schedule."""
    short, long = trial.size(256, 1024), trial.size(1024, 4096)
    linear: list[Pattern | Schedule] = [star_ring(), bigbird(1, 2, 3, seed=trial.seed)]

    def gap(first: Pattern | Schedule) -> Gap:
        every = [first, *linear]
        return widest(
            Gap(max(each.growth(short, long) for each in every) - 1, 0.05),
            Gap(float(sum(missing(each, 64) for each in every)), NONE),
        )

    real: Pattern | Schedule = global_window(2, 1)
    lengths = [64, 128, 256, 512, 1024]
    broken: Pattern | Schedule = strided()
    shown: dict[str, Pattern | Schedule] = {"star and ring": star_ring(), "strided": strided(), "BigBird": linear[1]}
    return Evidence(
        printed=gap(real),
        control=gap(trial.control(broken, real)),
        table={f"exponent, {name}": each.growth(short, long) for name, each in shown.items()},
        curve=Curve(
            lengths,
            {name: [sum(as_schedule(each).connections(length)) for length in lengths] for name, each in shown.items()},
            "tokens",
            "connections",
            log_x=True,
            log_y=True,
        ),
    )


@claim(
    "U3",
    source=f"{SLIDES}, second condition; Zaheer et al. 2020, theorem 1",
    statement="A star meets the conditions, since a chain of direct connections covers all its tokens.",
    formula="γ(i) ∈ ∪_l A^l_γ(i+1)",
    correction=(
        "The chain must visit every token once, and in a star of four tokens or more it would have to come back to the"
        " hub. A ring around the star mends that; without one, BigBird's theorem covers it, with a hub of its own."
    ),
    expected=Verdict.FAILS,
)
def star_alone(trial: Trial) -> Evidence:
    """How many tokens the longest path leaves out, over all paths, in a star and in a star with a ring; the control has
    a star whose other tokens are paired."""
    length = int(torch.randint(7, 9, (), generator=trial.generator))
    pairs = [(i, i + 1) for i in range(1, length - 1, 2)]
    paired = star() | from_edges([*pairs, *((b, a) for a, b in pairs)], length)

    def gap(pattern: Pattern) -> Gap:
        return Gap(float(length - longest_path(pattern.mask(length).numpy())), NONE)

    found = check_universality(star(), length)
    return Evidence(
        printed=gap(star()),
        instead=widest(gap(star_ring()), Gap(float(found.theorem != "BigBird star"), NONE)),
        control=widest(gap(trial.control(paired, star_ring())), Gap(float(found.theorem != "BigBird star"), NONE)),
        table={"tokens": float(length), "layers to full reach of the star": float(found.reach_layers or 0)},
    )


@claim(
    "U4",
    source=f"{SLIDES}, pictures of strided and fixed patterns and third condition; Child et al. 2019",
    statement="With the strided and fixed patterns as drawn, every token can attend to all others with enough layers.",
    formula="S^s_k = [T]",
    correction=(
        "As drawn they are causal, and no number of layers lets a token hear of a later one. In both directions strided"
        " takes three layers and fixed two."
    ),
    expected=Verdict.HOLDS_CORRECTED,
)
def causal_pictures(trial: Trial) -> Evidence:
    """Share of pairs without a derivative in a transformer of three layers, for both schedules, causal and not; the
    control leaves out the first pattern of each."""

    def gap(*schedules: Pattern | Schedule) -> Gap:
        return Gap(max(unheard(trial, schedule, 9, 3) for schedule in schedules), 1e-9)

    both: list[Pattern | Schedule] = [strided(3), fixed(3)]
    seconds: list[Pattern | Schedule] = [strided(3)[1], fixed(3)[1]]
    return Evidence(
        printed=gap(strided(3, causal=True), fixed(3, causal=True)),
        corrected=gap(*both),
        control=gap(*trial.control(seconds, both)),
        table={
            "layers, strided": float(check_universality(both[0], 9).reach_layers or 0),
            "layers, fixed": float(check_universality(both[1], 9).reach_layers or 0),
        },
    )


@claim(
    "U7",
    source=f"{SLIDES}, conditions on sparsity patterns; {YUN}, assumption 1",
    statement="Every pattern that a sparse transformer uses must let every token reach all others.",
    formula="S^t_k = ∪_{j ∈ A^{((t−1) mod p)+1}_k} S^{t−1}_j",
    correction=(
        "Layers take p patterns in turn: the chain is asked of their union, and the reach of their product. Strided and"
        " fixed attention meet the conditions though their second patterns alone never do."
    ),
    expected=Verdict.HOLDS_CORRECTED,
)
def patterns_in_turn(trial: Trial) -> Evidence:
    """Share of pairs without a derivative in a transformer of three layers that use each strided pattern alone, and in
    turn; the control has for the first pattern one that keeps to multiples too."""

    def gap(*schedules: Pattern | Schedule) -> Gap:
        return Gap(max(unheard(trial, schedule, 9, 3) for schedule in schedules), 1e-9)

    near, far = strided(3)
    alone = [check_universality(each, 9).theorem for each in (near, far, *fixed(3))]
    return Evidence(
        printed=gap(near, far),
        corrected=gap(Schedule((near, far))),
        control=gap(Schedule((trial.control(dilated(1, 3), near), far))),
        table={"of four patterns no theorem covers alone": float(alone.count("none"))},
    )


def missing(schedule: Pattern | Schedule, length: int) -> int:
    """Self-loops, links of the path, and pairs out of reach that a schedule lacks, by dense products."""
    masks = [pattern.mask(length).double() for pattern in as_schedule(schedule)]
    loops = sum(int((mask.diagonal() == 0).sum()) for mask in masks)
    union = torch.stack(masks).amax(0)
    order = check_universality(schedule, length).certificate
    links = length - 1 if order is None else int((union[list(order[1:]), list(order[:-1])] == 0).sum())
    heard = torch.eye(length, dtype=torch.float64)
    for layer in range(length * len(masks)):
        heard = (masks[layer % len(masks)] @ heard).clamp(max=1)
    return loops + links + int((heard == 0).sum())


def longest_path(mask: np.ndarray) -> int:
    """Number of tokens on the longest path in which each is seen by the next and none comes twice, over all paths."""

    def longest(last: int, left: frozenset[int]) -> int:
        return 1 + max((longest(step, left - {step}) for step in left if mask[step, last]), default=0)

    tokens = frozenset(range(len(mask)))
    return max(longest(start, tokens - {start}) for start in tokens)


def unheard(trial: Trial, schedule: Pattern | Schedule, length: int, layers: int) -> float:
    """Share of pairs of tokens of which the first, in a random transformer with the pattern, ignores the second."""
    generator = torch.Generator().manual_seed(trial.seed)
    model = Transformer(8, layers, 2, causal=False, pattern=schedule, dtype=torch.float64, generator=generator)
    x = torch.randn(1, length, 8, generator=generator, dtype=torch.float64)
    return without_derivative(lambda tokens: model(tokens[None])[0], x[0])


def without_derivative(layers: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """Share of pairs of tokens for which the derivative of the output of the one in the other is exactly zero."""
    slopes = torch.autograd.functional.jacobian(lambda tokens: layers(tokens)[:, 0], x)
    return float((slopes.abs().sum(-1) == 0).double().mean())
