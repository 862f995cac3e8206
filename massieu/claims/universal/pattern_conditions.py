"""Conditions of universal approximation on sparse patterns, and the patterns that meet them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from massieu.claims.claim import Curve, Evidence, Gap, Source, Trial, Verdict
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

NONE = 0.5  # bound on a count that must be zero


@claim(
    "U1",
    source=Source.YUN_2020,
    place="assumption 1 and its examples (from memory), with the patterns that the slides' corollary cites",
    title="The usual sparse patterns meet the three conditions",
    wording=(
        "The strided, fixed, star-and-ring, sliding-window and BigBird patterns meet the conditions on sparsity "
        "patterns."
    ),
    reading=(
        "Our reading: window(2), ring, star_ring, strided(w), fixed(w), global_window(2, 1), bigbird(1, 2, 3) and "
        "powers_of_two, in both directions, lack no self-loop, no link of the certified path and no pair within "
        "reach, for one random stride w from 6 to 9, at w² tokens and at a length that w does not divide."
    ),
    reference="self-loops, links and reach counted by products of dense masks",
    formula="k ∈ A^l_k; γ(i) ∈ ∪_l A^l_γ(i+1); S^s_k = [T] for all k",
    correction=(
        "If the stride of the fixed pattern divides the length. Otherwise the last block has no last token, and "
        "no token outside reads from that block."
    ),
    expected=Verdict.CONDITIONAL,
)
def conditions_of_families(trial: Trial) -> Evidence:
    """Self-loops, links and pairs that eight families lack, for two lengths; the control has a dilated window."""
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
    source=Source.SLIDES,
    place="approximation, corollary on sparse transformers with O(T) connections",
    title="Patterns with O(T) connections meet the conditions",
    wording=(
        "There are sparse transformers with O(T) connections in each attention layer that are universal approximators."
    ),
    reading=(
        "Our reading: connections of star_ring, global_window(2, 1) and bigbird(1, 2, 3) grow from 256 to 1024 tokens"
        " (1024 to 4096 in full) with an exponent of at most 1.05, and at 64 tokens the three conditions lack nothing"
        " and dense masks have as many entries as connections. That the conditions suffice is the theorem before, not"
        " tested here (U36 builds one such network)."
    ),
    reference=(
        "connections at 64 tokens and the conditions, counted in dense masks and their products, and an exponent of one"
    ),
    formula="Σ_k #A_k = O(T)",
)
def linear_connections(trial: Trial) -> Evidence:
    """Excess of the exponent of connections, and missed conditions; the control is the strided schedule."""
    short, long = trial.size(256, 1024), trial.size(1024, 4096)
    linear: list[Pattern | Schedule] = [star_ring(), bigbird(1, 2, 3, seed=trial.seed)]

    def gap(first: Pattern | Schedule) -> Gap:
        every = [first, *linear]
        return widest(
            Gap(max(each.growth(short, long) for each in every) - 1, 0.05),
            Gap(float(sum(missing(each, 64) + miscounted(each, 64) for each in every)), NONE),
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
    source=Source.SLIDES,
    place="approximation, sparse transformers: the Star-Transformer and the second condition",
    title="A chain of connections covers a star",
    wording="The Star-Transformer is a sparse transformer for which a chain of direct connections covers all tokens.",
    reading=(
        "Our reading: taken as a star alone, of 7 or 8 tokens, it has a path of direct connections that visits every"
        " token once; under the condition, the star with its ring has one, and `check_universality` names BigBird's"
        " theorem for the star alone."
    ),
    reference="the longest path by a search through all paths",
    formula="γ(i) ∈ ∪_l A^l_γ(i+1)",
    correction=(
        "With the ring of the Star-Transformer. In a star alone of four tokens or more a path would have to come "
        "back to the hub; BigBird's theorem covers that pattern, with a hub that is a token of its own."
    ),
    expected=Verdict.CONDITIONAL,
)
def star_alone(trial: Trial) -> Evidence:
    """Tokens outside the longest path, in a star and in a star with a ring; the control has pairs for the ring."""
    length = int(torch.randint(7, 9, (), generator=trial.generator))
    pairs = [(i, i + 1) for i in range(1, length - 1, 2)]
    paired = star() | from_edges([*pairs, *((b, a) for a, b in pairs)], length)

    def gap(pattern: Pattern) -> Gap:
        return Gap(float(length - longest_path(pattern.mask(length).numpy())), NONE)

    found = check_universality(star(), length)
    return Evidence(
        printed=gap(star()),
        conditional=widest(gap(star_ring()), Gap(float(found.theorem != "BigBird star"), NONE)),
        control=widest(gap(trial.control(paired, star_ring())), Gap(float(found.theorem != "BigBird star"), NONE)),
        table={"tokens": float(length), "layers to full reach of the star": float(found.reach_layers or 0)},
    )


@claim(
    "U4",
    source=Source.SLIDES,
    place="approximation, pictures Strided and Fixed, and the third condition",
    title="Strided and fixed attention reach all tokens",
    wording="With the strided and fixed patterns and enough layers every token can attend to all other tokens.",
    reading=(
        "Our reading: as drawn, which is causal, for stride three and nine tokens: in a random transformer of "
        "three layers no derivative of an output in an input token is exactly zero; corrected, the same patterns "
        "in both directions."
    ),
    reference="derivatives by autograd",
    formula="S^s_k = [T]",
    correction=(
        "In both directions: strided takes three layers and fixed two. As drawn they are causal, and no number of "
        "layers lets a token depend on a later one."
    ),
    expected=Verdict.HOLDS_CORRECTED,
)
def causal_pictures(trial: Trial) -> Evidence:
    """Share of pairs without a derivative for both schedules; the control leaves out the first pattern of each."""

    def gap(*schedules: Pattern | Schedule) -> Gap:
        return Gap(max(ignored(trial, schedule, 9, 3) for schedule in schedules), 1e-9)

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
    source=Source.SLIDES,
    place="approximation, third condition on sparsity patterns",
    title="Patterns in turn reach all tokens, single ones do not",
    wording="With enough layers every token can attend to all other tokens.",
    reading=(
        "Our reading: required of each of the two strided patterns alone (stride three, nine tokens), used in all of "
        "three layers of a random transformer, no derivative of an output in an input token is exactly zero; "
        "corrected, the two patterns in turn."
    ),
    reference="derivatives by autograd",
    formula="S^t_k = ∪_{j ∈ A^{((t−1) mod p)+1}_k} S^{t−1}_j",
    correction=(
        "Asked of the layers together, as Yun et al. 2020 do: they take p patterns in turn, the chain is one in their"
        " union and the reach that of their product. The second strided pattern alone never reaches all tokens."
    ),
    expected=Verdict.HOLDS_CORRECTED,
)
def patterns_in_turn(trial: Trial) -> Evidence:
    """Share of pairs without a derivative, patterns alone and in turn; the control keeps to multiples too."""

    def gap(*schedules: Pattern | Schedule) -> Gap:
        return Gap(max(ignored(trial, schedule, 9, 3) for schedule in schedules), 1e-9)

    near, far = strided(3)
    alone = [check_universality(each, 9).theorem for each in (near, far, *fixed(3))]
    return Evidence(
        printed=gap(near, far),
        corrected=gap(Schedule((near, far))),
        control=gap(Schedule((trial.control(dilated(1, 3), near), far))),
        table={"of four patterns no theorem covers alone": float(alone.count("none"))},
    )


def missing(schedule: Pattern | Schedule, length: int) -> int:
    """Count self-loops, links of the path, and pairs out of reach that a schedule lacks, by dense products."""
    masks = [pattern.mask(length).double() for pattern in as_schedule(schedule)]
    loops = sum(int((mask.diagonal() == 0).sum()) for mask in masks)
    union = torch.stack(masks).amax(0)
    order = check_universality(schedule, length).certificate
    links = length - 1 if order is None else int((union[list(order[1:]), list(order[:-1])] == 0).sum())
    reached = torch.eye(length, dtype=torch.float64)
    for layer in range(length * len(masks)):
        reached = (masks[layer % len(masks)] @ reached).clamp(max=1)
    return loops + links + int((reached == 0).sum())


def miscounted(schedule: Pattern | Schedule, length: int) -> int:
    """Return the difference between the connections that patterns name and the entries of their dense masks."""
    return sum(abs(int(each.mask(length).sum()) - each.connections(length)) for each in as_schedule(schedule))


def longest_path(mask: np.ndarray) -> int:
    """Count the tokens on the longest path without repeats in which each attends to the one before, over all paths."""

    def longest(last: int, left: frozenset[int]) -> int:
        return 1 + max((longest(step, left - {step}) for step in left if mask[step, last]), default=0)

    tokens = frozenset(range(len(mask)))
    return max(longest(start, tokens - {start}) for start in tokens)


def ignored(trial: Trial, schedule: Pattern | Schedule, length: int, layers: int) -> float:
    """Return the share of pairs of tokens of which the first, in a random transformer, ignores the second."""
    generator = torch.Generator().manual_seed(trial.seed)
    model = Transformer(8, layers, 2, causal=False, pattern=schedule, dtype=torch.float64, generator=generator)
    x = torch.randn(1, length, 8, generator=generator, dtype=torch.float64)
    return without_derivative(lambda tokens: model(tokens[None])[0], x[0])


def without_derivative(layers: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """Return the share of pairs of tokens whose derivative, of one output in the other, is exactly zero."""
    slopes = torch.autograd.functional.jacobian(lambda tokens: layers(tokens)[:, 0], x)
    return float((slopes.abs().sum(-1) == 0).double().mean())
