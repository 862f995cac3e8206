"""Universal approximation: what proofs of existence say, measured on networks that were built."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from massieu.claims.claim import Curve, Evidence, Gap, Trial, Verdict
from massieu.claims.experiment import apart, normals, widest
from massieu.claims.margin.selection import SLIDES
from massieu.claims.registry import claim
from massieu.claims.universal.contextual_maps import COUNT, KAJITSUKA
from massieu.nn import FeedForward, MeasureAttention
from massieu.universal import Realization, construct, memorize


@claim(
    "U29",
    source=f"{KAJITSUKA}, proposition on universality",
    statement="Feed-forward net, one head, feed-forward net realise any permutation-equivariant function on a grid.",
    formula="FF_2 ∘ (1 + Attn) ∘ FF_1 = f on {1, …, n}^{d × T}",
    expected=Verdict.HOLDS,
)
def one_layer_realises_a_function(trial: Trial) -> Evidence:
    """Largest error over all 729 sequences of three cells of a 3 × 3 grid, for a random function with two outputs,
    repeated tokens included; the control has no attention."""
    drawn = normals(trial)(9, 9, 9, 9, 2)

    def function(x: Tensor) -> Tensor:
        cell = (3 * x).long() @ torch.tensor([1, 3])
        first, second, third = cell.sort(1).values.mT[..., None].expand(-1, -1, 3)
        return drawn[cell, first, second, third]

    network = construct(function, (3, 3), 3, rounds=30, generator=trial.seed)
    attention = network.block.attention
    assert isinstance(attention, MeasureAttention)
    assert attention.out_proj is not None
    output = attention.out_proj.weight

    def gap(weight: float) -> Gap:
        with torch.no_grad():
            output.mul_(weight)
        return Gap(network.certify().error, 1e-12)

    return Evidence(
        printed=gap(1.0),
        control=gap(trial.control(0.0, 1.0)),
        table={
            "numbers": float(network.cost.identifiers),
            "weights that are not zero": float(network.num_parameters),
            "machine epsilons between numbers": network.margin,
        },
    )


@claim(
    "U30",
    source=f"{KAJITSUKA}, corollary on memorisation",
    statement="One head and a feed-forward net memorise N sequences of n tokens with 4(s + d) + d(2nN + d) parameters;"
    " ours are counted where they are not zero.",
    formula="s = 1: 4(1 + d) + d(2nN + d)",
    expected=Verdict.HOLDS,
)
def memorisation(trial: Trial) -> Evidence:
    """Tokens of random sequences with a wrong class, and weights that are not zero over that number; the control has
    half of the hidden units. As layers store them, zeros included, there are more than the corollary's."""
    count, length, dim = trial.size(60, 200), 8, 4
    sequences = normals(trial)(count, length, dim)
    labels = torch.randint(10, (count, length), generator=trial.generator)
    network = memorize(sequences, labels, exact=False, rounds=10, generator=trial.seed)
    allowed = 4 * (1 + dim) + dim * (2 * length * count + dim)
    used = network.num_parameters

    def gap(share: float) -> Gap:
        last = network.decode[0]
        assert isinstance(last, FeedForward)
        with torch.no_grad():
            last.down.weight[:, round(share * last.down.in_features) :] = 0.0
        return widest(Gap(float(network.certify(0.49).wrong), COUNT), Gap(used / allowed, 1.0))

    return Evidence(
        printed=gap(1.0),
        control=gap(trial.control(0.5, 1.0)),
        table={
            "weights that are not zero": float(used),
            "parameters of the corollary": float(allowed),
            "parameters as stored": float(network.cost.parameters),
        },
    )


@claim(
    "U32",
    source=f"{KAJITSUKA}, proposition on universality, for the networks of massieu.universal.construct",
    statement="For a continuous function the error vanishes as the grid becomes finer, in proportion to a cell.",
    formula="‖h_n − f‖ = O(1/n)",
    expected=Verdict.HOLDS,
)
def order_of_a_cell(trial: Trial) -> Evidence:
    """How far the exponents of root mean square and largest error are from −1, for a random smooth function of two
    tokens; the control has ramps of nine tenths of a cell."""
    function = _smooth(trial)
    points = torch.rand(2000, 2, 1, generator=trial.generator, dtype=torch.float64)
    grids = [4, 8, 16, *([32] if trial.full else [])]

    def errors(ramp: float) -> Tensor:
        with torch.no_grad():
            found = [_network(function, cells, ramp, trial)(points) - function(points) for cells in grids]
        return torch.stack([torch.stack([each.square().mean().sqrt(), each.abs().max()]) for each in found], -1)

    def gap(reached: Tensor) -> Gap:
        exponent = (reached[:, -1] / reached[:, 0]).log() / math.log(grids[-1] / grids[0])
        return Gap(float((exponent + 1).abs().max()), 0.25)

    real = errors(1e-6)
    return Evidence(
        printed=gap(real),
        control=gap(errors(trial.control(0.9, 1e-6))),
        table={f"root mean square error, n = {cells}": float(each) for cells, each in zip(grids, real[0], strict=True)},
        curve=Curve(
            grids,
            {"root mean square": real[0].tolist(), "largest": real[1].tolist()},
            x_label="cells along an axis",
            y_label="error",
            log_x=True,
            log_y=True,
        ),
    )


@claim(
    "U33",
    source=f"{SLIDES}, theorem 2: the distance D_p",
    statement="Networks that quantise their tokens are close to the function in D_p, whatever p.",
    formula="D_p(h, f) = (∫ ‖h − f‖_p^p)^{1/p} ≤ ε",
    correction="For p < ∞, or off the strips at borders of cells: there a continuous network runs through the numbers"
    " of other contexts, and its largest error does not fall with the strips' width.",
    expected=Verdict.CONDITIONAL,
)
def boundary_strips(trial: Trial) -> Evidence:
    """Largest error, over the largest that a piecewise constant function makes, within strips and off them; the control
    has strips of nine tenths of a cell at the same points."""
    function = _smooth(trial)
    ramp = 1e-3
    cells = torch.randint(8, (2000, 2, 1), generator=trial.generator)
    inside = torch.rand(2000, 2, 1, generator=trial.generator, dtype=torch.float64)
    off = (cells + 0.01 + 0.98 * inside) / 8
    border = torch.cat([cells[:, :1].clamp(min=1) + ramp * (inside[:, :1] - 0.5), cells[:, 1:] + 0.5], 1) / 8
    constant = float((function(off) - function((cells + 0.5).double() / 8)).abs().max())

    def gap(points: Tensor, ramp: float) -> Gap:
        with torch.no_grad():
            found = _network(function, 8, ramp, trial)(points) - function(points)
        return Gap(float(found.abs().max()) / constant, 1.5)

    return Evidence(
        printed=gap(border, ramp),
        conditional=gap(off, ramp),
        control=gap(off, trial.control(0.9, ramp)),
        table={
            f"largest error in strips of {width:g} cells": gap(_moved(border, ramp, width), width).measured * constant
            for width in (1e-2, 1e-4)
        },
    )


@claim(
    "U34",
    source=f"{SLIDES}, theorem 3 [Yun et al. 2019, with positional encodings]",
    statement="With positional encodings, networks approximate the permutation-equivariant functions.",
    formula="C = {f continuous, f(XP) = f(X)P}",
    correction="All continuous functions on a compact domain: equivariance is what positional encodings remove.",
    expected=Verdict.HOLDS_CORRECTED,
)
def positional_encodings(trial: Trial) -> Evidence:
    """Distance of a random function of order from the class as printed, and the error of a network whose tokens carry
    positions; the control swaps the positions."""
    rows = torch.cartesian_prod(torch.arange(4), torch.arange(4))
    targets = normals(trial)(16, 2)
    place = torch.tensor([0.0, 1.0], dtype=torch.float64)

    def tokens(places: Tensor) -> Tensor:
        return torch.stack([(rows + 0.5) / 4, places.expand(16, 2)], -1)

    network = memorize(tokens(place), targets, rounds=20, generator=trial.seed)

    def gap(places: Tensor) -> Gap:
        with torch.no_grad():
            return apart(network(tokens(places))[..., 0], targets)

    swapped = targets[4 * rows[:, 1] + rows[:, 0]].flip(1)
    return Evidence(
        # The nearest equivariant function is the mean of the function and its image under the swap.
        printed=apart((targets + swapped) / 2, targets),
        corrected=gap(place),
        control=gap(trial.control(place.flip(0), place)),
    )


def _smooth(trial: Trial) -> Callable[[Tensor], Tensor]:
    """A random smooth function of a token and the mean of its sequence."""
    first, second, third = (1 + torch.rand(3, generator=trial.generator, dtype=torch.float64)).tolist()
    return lambda x: torch.sin(3 * first * x) + second * x * x.sum(1, keepdim=True) + third * x.sum(1, keepdim=True)


def _network(function: Callable[[Tensor], Tensor], cells: int, ramp: float, trial: Trial) -> Realization:
    return construct(function, cells, 2, ramp=ramp, rounds=20, generator=trial.seed)


def _moved(border: Tensor, before: float, after: float) -> Tensor:
    """Points of strips of one width as points of strips of another, eight cells along the axis."""
    edge = (8 * border[:, :1]).round()
    return torch.cat([edge + (8 * border[:, :1] - edge) * after / before, 8 * border[:, 1:]], 1) / 8
