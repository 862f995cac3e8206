"""Numbers that identify a token's context, by stacks of selective shifts."""

from __future__ import annotations

import itertools
import math

import torch

from massieu.claims.claim import Evidence, Gap, Source, Trial
from massieu.claims.experiment import apart, normals, widest
from massieu.claims.registry import claim
from massieu.claims.universal.contextual_maps import COUNT
from massieu.universal import shift_stack
from massieu.universal.staircases import net


@claim(
    "U21",
    source=Source.YUN_2019,
    place="lemma on contextual mappings by selective shifts (from memory)",
    title="Selective shifts distinguish sequences of distinct tokens",
    wording=(
        "δ^{-d} + 1 attention layers with hardmax and heads of size one map the sequences of distinct tokens of a "
        "grid so that every token of every sequence gets a number of its own, up to order."
    ),
    reading=(
        "All sets of tokens of the grids (n, d, T) = (3, 1, 2), (4, 1, 3), (3, 2, 2) and (3, 2, 3), in whole "
        "numbers, get as many numbers as they have tokens, and permuting tokens permutes numbers."
    ),
    reference=(
        "the shifts written out in whole numbers of Python for all orders of the tokens, and a count of different"
        " numbers"
    ),
    formula="l_j ← l_j + n^d (max l − min l) 1[l_j = b] for b = 0, …, n^d − 1, then l_j ← l_j + T n^{(T+1)d} max l",
    trials=1,
)
def selective_shifts(trial: Trial) -> Evidence:
    """Contexts that share a number, over all sequences of four grids; the control shifts by too little."""
    grids = [(3, 1, 2), (4, 1, 3), (3, 2, 2), (3, 2, 3)]

    def gap(factor: int | None) -> Gap:
        wrong = 0
        for cells, dim, length in grids:
            stack = shift_stack(cells, dim, length, factor=factor)
            expected = stack.identifiers.tolist()
            wrong += math.comb(cells**dim, length) * length - len({number for row in expected for number in row})
            for order in itertools.permutations(range(length)):
                rows = ([row[place] for place in order] for row in stack.sequences.tolist())
                found = [_shifted(row, cells**dim, factor or cells**dim) for row in rows]
                wrong += found != [[row[place] for place in order] for row in expected]
        return Gap(float(wrong), COUNT)

    stacks = {f"n = {grid[0]}, d = {grid[1]}, T = {grid[2]}": shift_stack(*grid) for grid in grids}
    return Evidence(
        printed=gap(None),
        control=gap(trial.control(1, None)),
        table={
            f"{quantity}, {name}": float(value)
            for name, stack in stacks.items()
            for quantity, value in (("numbers", stack.distinct), ("least gap", stack.gap), ("largest", stack.largest))
        },
    )


def _shifted(numbers: list[int], cells: int, factor: int) -> list[int]:
    for level in range(cells):
        reach = max(numbers) - min(numbers)
        numbers = [each + factor * reach if each == level else each for each in numbers]
    length = len(numbers)
    return [each + length * cells ** (length + 1) * max(numbers) for each in numbers]


@claim(
    "U22",
    source=Source.YUN_2019,
    place="lemma on the value mapping by feed-forward layers (from memory)",
    title="Feed-forward layers of width four look values up",
    wording=(
        "A stack of feed-forward layers of constant width maps the numbers that the attention layers give to the "
        "values of the function."
    ),
    reading=(
        "Residual layers of four ReLUs, one layer for each of the 12 numbers of the grid (n, d, T) = (4, 1, 3), "
        "map these numbers to random values up to 1e-8. This is one step of the proof; U35 has the whole network."
    ),
    reference="the random values themselves",
    formula="x ← x + v_i φ(l − l_i), φ a trapezoid of four ReLUs",
)
def value_mapping(trial: Trial) -> Evidence:
    """Layers of four ReLUs, one for each number, against random values; the control lacks the last layer."""
    numbers = shift_stack(4, 1, 3).identifiers.flatten().double()
    targets = normals(trial)(len(numbers))
    bends = torch.tensor([1.0, 0.5, -0.5, -1.0], dtype=torch.float64)
    heights = torch.tensor([2.0, -2.0, -2.0, 2.0], dtype=torch.float64)

    def gap(depth: int) -> Gap:
        stream = torch.stack([torch.zeros_like(numbers), numbers], -1)
        for number, target in zip(numbers[:depth], targets, strict=False):
            up = torch.tensor([[0.0, 1.0]]).expand(4, 2)
            layer = net(2, up, bends - number, target * heights[:, None], torch.zeros(1))
            with torch.no_grad():
                stream = stream + layer(stream)
        return apart(stream[:, 0], targets, 1e-8)  # numbers up to 1e5 cancel

    return Evidence(
        printed=gap(len(numbers)),
        control=gap(len(numbers) - trial.control(1, 0)),
        table={
            f"layers for n = 3, d = {dim}, T = {length}": float(3**dim + 1 + length * math.comb(3**dim, length))
            for dim, length in ((1, 2), (2, 2), (2, 3), (3, 3), (3, 4))
        },
    )


@claim(
    "U23",
    source=Source.YUN_2019,
    place="lemma on contextual mappings by selective shifts: distinct tokens (from memory)",
    title="Sequences with repeated tokens are few, and left out",
    wording=(
        "The contextual mapping is one of sequences of distinct tokens; those with repeated tokens are left out, "
        "since their share vanishes on a fine grid."
    ),
    reading=(
        "Our reading: on the grids (n, d, T) = (4, 1, 3) and (3, 2, 3) no context of distinct tokens lacks a number of"
        " its own, the share of sequences with repeats is at most T (T − 1) / (2 n^d), and with repeats contexts do"
        " lose their numbers (the control), so that the restriction is needed."
    ),
    reference="a count of all sequences, one by one",
    formula="#{L : l_i = l_j for some i ≠ j} / n^{dT} ≤ T (T − 1) / (2 n^d)",
    trials=1,
)
def repeated_columns(trial: Trial) -> Evidence:
    """Contexts of sets without a number of their own, and share of repeats; the control has sequences with repeats."""
    grids = [(4, 1, 3), (3, 2, 3)]

    def gap(duplicates: bool) -> Gap:
        stacks = [shift_stack(*grid, duplicates=duplicates) for grid in grids]
        tokens = sum(len(set(row)) for each in stacks for row in each.sequences.tolist())
        return Gap(float(tokens - sum(len(set(each.identifiers.flatten().tolist())) for each in stacks)), COUNT)

    def share(cells: int, length: int) -> float:
        repeated = [len(set(row)) < length for row in itertools.product(range(cells), repeat=length)]
        return sum(repeated) / len(repeated)

    few = [Gap(share(grid**dim, length) / (math.comb(length, 2) / grid**dim), 1.0) for grid, dim, length in grids]
    return Evidence(
        printed=widest(gap(False), *few),
        control=gap(trial.control(True, False)),
        table={
            f"share of sequences with repeats, n^d = {cells}": 1 - math.perm(cells, 3) / cells**3
            for cells in (4, 9, 81, 729)
        },
    )
