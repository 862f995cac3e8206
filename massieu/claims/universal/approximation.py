"""Universal approximation: statements of existence, measured on networks that were built."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from massieu.claims.claim import Curve, Evidence, Gap, Source, Trial
from massieu.claims.experiment import apart, normals, widest
from massieu.claims.registry import claim
from massieu.claims.universal.contextual_maps import COUNT
from massieu.nn import FeedForward, MeasureAttention
from massieu.patterns import dilated, star_ring
from massieu.universal import Realization, Stack, construct, construct_narrow, construct_sparse, memorize


@claim(
    "U29",
    source=Source.KAJITSUKA,
    place="proposition on universality",
    title="One layer realizes a function on a grid",
    wording=(
        "Transformers with one layer of single-head attention between feed-forward nets are universal for "
        "continuous permutation-equivariant functions on a compact domain."
    ),
    reading=(
        "Our reading: for one random equivariant function with two outputs on a 3 × 3 grid such a network is "
        "exact to 1e-12 on all 729 sequences of three centers of cells, repeated tokens included."
    ),
    reference="the table of random values, read directly",
    formula="FF_2 ∘ (1 + Attn) ∘ FF_1 = f on {1, …, n}^{d × T}",
)
def one_layer_realizes_a_function(trial: Trial) -> Evidence:
    """Largest error over all 729 sequences of a grid, for a random function; the control has no attention."""
    drawn = normals(trial)(9, 9, 9, 9, 2)

    def function(x: Tensor) -> Tensor:
        cell = (3 * x).long() @ torch.tensor([1, 3])
        first, second, third = cell.sort(1).values.mT[..., None].expand(-1, -1, 3)
        return drawn[cell, first, second, third]

    network = construct(function, (3, 3), 3, steps=30, generator=trial.seed)
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
    source=Source.KAJITSUKA,
    place="corollary on memorization",
    title="One head memorizes with about 2nNd parameters",
    wording="One head and a feed-forward net memorize N sequences of n tokens with 4(s + d) + d(2nN + d) parameters.",
    reading=(
        "Our reading: for 60 (200 in full) random sequences of eight tokens in four dimensions with random "
        "classes no token gets a wrong class, with no more weights that are not zero than the corollary has "
        "parameters for s = 1. As layers store them, zeros included, there are more."
    ),
    reference="the classes, and the corollary's number written out",
    formula="s = 1: 4(1 + d) + d(2nN + d)",
)
def memorisation(trial: Trial) -> Evidence:
    """Tokens of a wrong class, and weights over the number stated; the control has half of the hidden units."""
    count, length, dim = trial.size(60, 200), 8, 4
    sequences = normals(trial)(count, length, dim)
    labels = torch.randint(10, (count, length), generator=trial.generator)
    network = memorize(sequences, labels, exact=False, steps=10, generator=trial.seed)
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
    source=Source.OURS,
    place="massieu.universal.construct",
    title="The error is of the order of a cell",
    wording=(
        "For a continuous function the error of a constructed network vanishes as the grid becomes finer, in "
        "proportion to a cell."
    ),
    reading=(
        "For a random smooth function of two tokens the exponents of the root mean square and the largest error "
        "at 2000 random points, between 4 and 16 cells (32 in full), are −1 up to 0.25."
    ),
    reference="the function itself",
    formula="‖h_n − f‖ = O(1/n)",
)
def order_of_a_cell(trial: Trial) -> Evidence:
    """Distances of the exponents of both errors from −1, for a smooth function; the control has wide ramps."""
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
    source=Source.OURS,
    place="massieu.universal.construct and docs/universal.md, on strips",
    title="The largest error of a construction lies in its strips",
    wording=(
        "Off the strips at borders of cells a constructed network is as close to the function as a piecewise "
        "constant one; in the strips its largest error is larger, however narrow they are."
    ),
    reading=(
        "For a random smooth function of two tokens and eight cells the largest error at 2000 points off the "
        "strips is at most 1.5 times that of the value at the center, and at 2000 points in strips of 1e-2, 1e-3 "
        "and 1e-4 cells it is more than 1.5 times that. So these networks approximate in D_p for p < ∞; nothing "
        "is said of other networks."
    ),
    reference="the function itself, and its value at the center of each cell",
    formula="max ‖h − f‖ within strips ≫ max ‖f(center) − f‖",
)
def boundary_strips(trial: Trial) -> Evidence:
    """Largest errors off strips and within them; the control has wide strips at the points off them."""
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

    within = {width: gap(_moved(border, ramp, width), width).measured for width in (1e-2, ramp, 1e-4)}
    return Evidence(
        printed=widest(gap(off, ramp), Gap(1.5 / min(within.values()), 1.0)),
        control=gap(off, trial.control(0.9, ramp)),
        table={f"largest error in strips of {width:g} cells": each * constant for width, each in within.items()},
    )


@claim(
    "U34",
    source=Source.SLIDES,
    place="approximation, theorem 3 (Yun et al. 2019, with positional encodings)",
    title="With positions networks approximate functions of order",
    wording=(
        "With positional encodings, transformer networks universally approximate the continuous "
        "permutation-equivariant functions."
    ),
    reading=(
        "Our reading: and, as Yun et al. prove, all continuous functions, where the slide repeats the class of "
        "theorem 2. Networks that memorize all 16 sequences of two tokens of four cells with positions in the "
        "tokens are off by at most 1e-9, for a random function of order and for an equivariant one."
    ),
    reference="the random values themselves",
    formula="f : [0, 1]^{d×T} → R^{d×T}, equivariant or not",
)
def positional_encodings(trial: Trial) -> Evidence:
    """Errors of networks with positions, for two functions of order; the control swaps the positions."""
    rows = torch.cartesian_prod(torch.arange(4), torch.arange(4))
    targets = normals(trial)(16, 2)
    place = torch.tensor([0.0, 1.0], dtype=torch.float64)

    def tokens(places: Tensor) -> Tensor:
        return torch.stack([(rows + 0.5) / 4, places.expand(16, 2)], -1)

    swapped = targets[4 * rows[:, 1] + rows[:, 0]].flip(1)
    equivariant = (targets + swapped) / 2
    functions = [
        (each, memorize(tokens(place), each, steps=20, generator=trial.seed)) for each in (targets, equivariant)
    ]

    def gap(places: Tensor) -> Gap:
        with torch.no_grad():
            return widest(*(apart(network(tokens(places))[..., 0], values) for values, network in functions))

    return Evidence(
        printed=gap(place),
        control=gap(trial.control(place.flip(0), place)),
        table={"distance of the function of order from equivariance": float((targets - equivariant).abs().max())},
    )


@claim(
    "U35",
    source=Source.SLIDES,
    place="approximation, theorem 2 (Yun et al. 2019)",
    title="A narrow deep softmax network approximates",
    wording=(
        "Transformer networks with constant width and large enough depth universally approximate the continuous"
        " permutation-equivariant functions, up to any ε in D_p."
    ),
    reading=(
        "Our reading: the networks of the proof with real weights, two softmax heads of size one and four ReLUs a"
        " layer. For random equivariant functions on the grids (n, d, T) = (3, 1, 2), (4, 1, 3) and (2, 2, 3) they are"
        " off by at most 1e-9 on all sequences of different cells; for a random smooth function of two tokens the root"
        " mean square error at 1000 random points falls by a quarter or more from 2 to 8 cells (16 in full), repeated"
        " cells included."
    ),
    reference="the random tables read directly, the function itself, and a count of the widths",
    formula="T^{2,1,4}: d n + 1, then n^d + 1 attention layers, then T C(n^d, T) + 1 layers",
)
def narrow_network(trial: Trial) -> Evidence:
    """Errors on grids and at random points, and layers that are too wide; the control has a softer softmax."""
    drawn = normals(trial)(4, 4, 4, 4)
    grids: list[tuple[int | tuple[int, ...], int]] = [(3, 2), (4, 3), ((2, 2), 3)]

    def function(x: Tensor) -> Tensor:
        side = 2 if x.shape[-1] == 2 else x.shape[1] + 1
        cell = (side * x).long() @ torch.tensor([1, side])[: x.shape[-1]]
        around = cell.sort(1).values[..., None].expand(-1, -1, x.shape[1]).mT
        return drawn[cell, around[..., 0], around[..., 1], around[..., -1]][..., None]

    smooth, points = _smooth(trial), torch.rand(1000, 2, 1, generator=trial.generator, dtype=torch.float64)
    counts = [2, trial.size(8, 16)]
    fine = [construct_narrow(smooth, cells, 2) for cells in counts]
    errors = _errors(fine, smooth, points)

    def gap(sharpness: float) -> Gap:
        networks = [construct_narrow(function, *grid, sharpness=sharpness) for grid in grids]
        error = max(network.certify().error for network in networks)
        return widest(Gap(error, 1e-9), Gap(float(sum(map(_too_wide, [*networks, *fine]))), COUNT))

    return Evidence(
        printed=widest(gap(1600.0), Gap(errors[1] / errors[0], 0.75)),
        control=gap(trial.control(20.0, 1600.0)),
        table={
            **{
                f"layers, {cells} cells, T = 2": float(len(each.layers))
                for cells, each in zip(counts, fine, strict=True)
            },
            **{f"root mean square error, {cells} cells": each for cells, each in zip(counts, errors, strict=True)},
        },
    )


@claim(
    "U36",
    source=Source.YUN_2020,
    place="theorem 1 (from memory), and the corollary on the slides",
    title="A sparse network approximates a function of order",
    wording=(
        "There are sparse transformers with O(T) connections in an attention layer that are universal approximators of"
        " continuous sequence-to-sequence functions."
    ),
    reading=(
        "Our reading: a network with real weights and two attention layers on a star with a ring, which has 5T − 4"
        " connections; queries and keys are zero, so that attention is a fixed uniform mean over the pattern, and wide"
        " nets do the rest. For one random function of all of six tokens (eight in full) of two cells and of their"
        " order it is exact to 1e-12 on all sequences and at a random point of every cell. For a random smooth function"
        " of four tokens and their order the root mean square error at 400 random points (1000 in full) falls by a"
        " third or more from 2 to 4 cells and from 4 to 8."
    ),
    reference="the table of random values, read directly, and the smooth function itself",
    formula="FF_2 ∘ (1 + Attn_A)² ∘ FF_1 = f on {1, …, n}^T, #A = 5T − 4",
)
def sparse_network(trial: Trial) -> Evidence:
    """Errors over all sequences and finer grids, and connections; the control has a dilated window."""
    length = trial.size(6, 8)
    drawn = normals(trial)(*[2] * length, length, 1)
    inside = 0.998 * (torch.rand(1, length, 1, generator=trial.generator, dtype=torch.float64) - 0.5) / 2
    points = torch.rand(trial.size(400, 1000), 4, 1, generator=trial.generator, dtype=torch.float64)
    smooth = _ordered(trial)

    def function(x: Tensor) -> Tensor:
        return drawn[tuple((2 * x[..., 0]).long().unbind(1))]

    @torch.no_grad()
    def gap(star: bool) -> tuple[Gap, list[float], float]:
        network = _sparse(function, 2, length, star)
        centers = network.cases().inputs
        near = apart(network(centers + inside), function(centers + inside), 1e-12)
        errors = _errors([_sparse(smooth, cells, 4, star) for cells in (2, 4, 8)], smooth, points)
        falls = [Gap(after / before, 2 / 3) for before, after in itertools.pairwise(errors)]
        moved = torch.cat([centers[:, :1], 1 - centers[:, 1:2], centers[:, 2:]], 1)
        change = float((network(centers) - network(moved))[:, 0].abs().max())
        return widest(Gap(network.certify().error, 1e-12), near, *falls), errors, change

    real, broken = gap(True), gap(False)
    connections = star_ring().connections(length)
    return Evidence(
        printed=widest(real[0], Gap(float(connections - (5 * length - 4)), COUNT)),
        control=trial.control(broken, real)[0],
        table={
            "connections of a layer": float(connections),
            "change of the first output by its neighbor": real[2],
            "the same in a dilated window": broken[2],
            **{f"root mean square error, {2 << at} cells": each for at, each in enumerate(real[1])},
            "of 8 cells in a dilated window": broken[1][-1],
        },
    )


def _too_wide(network: Stack) -> int:
    """Count layers of a network that are wider than two heads of size one, or than four units."""
    heads = [each for each in network.modules() if isinstance(each, MeasureAttention)]
    nets = [each for each in network.modules() if isinstance(each, FeedForward)]
    return sum(each.num_heads > 2 or each.head_dim > 1 for each in heads) + sum(
        each.up.out_features > 4 for each in nets
    )


def _smooth(trial: Trial) -> Callable[[Tensor], Tensor]:
    """Draw a smooth function of a token and the mean of its sequence."""
    first, second, third = (1 + torch.rand(3, generator=trial.generator, dtype=torch.float64)).tolist()
    return lambda x: torch.sin(3 * first * x) + second * x * x.sum(1, keepdim=True) + third * x.sum(1, keepdim=True)


def _ordered(trial: Trial) -> Callable[[Tensor], Tensor]:
    """Draw a smooth function of tokens, of those before them, and of the next ones."""
    before, after = 0.5 + torch.rand(2, 4, 1, generator=trial.generator, dtype=torch.float64)
    return lambda x: torch.sin((before * x).cumsum(1)) + after * x * x.roll(-1, 1)


def _sparse(function: Callable[[Tensor], Tensor], cells: int, length: int, star: bool) -> Stack:
    if star:
        return construct_sparse(function, cells, length, star_ring())
    return construct_sparse(function, cells, length, dilated(2, 2), layers=3)


@torch.no_grad()
def _errors(networks: list[Stack], function: Callable[[Tensor], Tensor], points: Tensor) -> list[float]:
    found = (torch.cat([each(some) for some in points.split(50)]) for each in networks)
    return [float((each - function(points)).square().mean().sqrt()) for each in found]


def _network(function: Callable[[Tensor], Tensor], cells: int, ramp: float, trial: Trial) -> Realization:
    return construct(function, cells, 2, ramp=ramp, steps=20, generator=trial.seed)


def _moved(border: Tensor, before: float, after: float) -> Tensor:
    """Move points of strips of one width to strips of another, eight cells along the axis."""
    edge = (8 * border[:, :1]).round()
    return torch.cat([edge + (8 * border[:, :1] - edge) * after / before, 8 * border[:, 1:]], 1) / 8
