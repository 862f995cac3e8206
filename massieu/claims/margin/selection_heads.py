"""Selection of tokens under a ReLU head, and under weights in factors."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from massieu.claims.claim import Evidence, Gap, Source, Trial
from massieu.claims.registry import claim
from massieu.margin import (
    MaxMargin,
    TokenSelection,
    finite_component,
    log_gradient,
    max_margin,
    misalignment,
    random_problem,
)


@claim(
    "T15",
    source=Source.SLIDES,
    place='optimization, "Better models"; the experiment of Ataee Tarzanagh et al. 2023',
    title="Under a ReLU head weights follow both parts",
    wording=("Better models are conjectured to give W_k ≈ W^fin + C_k W^mm for the tokens that attention keeps."),
    reading=(
        "Our reading: mean over the instances of one minus the correlation is at most 0.1, where a token is kept"
        " if its weight ends above 1e-3, W^fin has the log ratios of the kept ones, and C_k is fitted. All"
        " instances are counted, not only those that pass the filter of the published experiment (no weight between"
        " 1e-6 and 1e-3). Normalized descent of length 200 in all under the head 1^⊤ ReLU(V x), on instances of"
        " three sequences of four tokens: 40 drawn in 6 dimensions, at full size 150 in each of 4, 6 and 8; those"
        " whose labels are all positive are left out, as published, and those without an active unit, where descent"
        " does not move."
    ),
    reference="training of the head by autograd, which uses neither part",
    formula="corr(W_k, W^fin + C W^mm) ≈ 1",
)
def relu_head(trial: Trial) -> Evidence:
    """Mean of one minus the correlation over all instances; the control compares with other solutions."""
    dims, drawn = ((4, 6, 8), 150) if trial.full else ((6,), 40)
    found = [relu_experiment(dim, drawn, trial.size(600, 2000), trial.generator) for dim in dims]

    def gap(shift: int) -> Gap:
        means = [
            sum(misalignment(w, runs[(i + shift) % len(runs)][1]) for i, (w, *_) in enumerate(runs)) / len(runs)
            for runs, _ in found
        ]
        return Gap(max(means), 0.1)

    return Evidence(
        printed=gap(0),
        control=gap(trial.control(1, 0)),
        table={
            f"{name}, d = {dim}": value
            for dim, (runs, passed) in zip(dims, found, strict=True)
            for name, value in (
                ("instances", float(len(runs))),
                ("1 − corr with both parts", sum(misalignment(w, both) for w, both in runs) / len(runs)),
                ("instances that pass the published filter", float(len(passed))),
                ("1 − corr with both parts there", sum(passed) / max(len(passed), 1)),
            )
        },
    )


@claim(
    "T16",
    source=Source.TARZANAGH,
    place=('abstract of "Transformers as support vector machines", the (K, Q) parametrization; from memory'),
    title="Factors approach the nuclear-norm direction",
    wording=(
        "Training the factors K and Q with vanishing regularization converges in direction to the solution of the"
        " program with the least nuclear norm of K Q^⊤."
    ),
    reading=(
        "Our reading: descent without regularization, for the tokens that it selects. Six sequences of eight random"
        " tokens in 10 dimensions, factors with normal entries of a scale drawn between 0.03 and 1, and 6000 steps"
        " (12000 at full size) along the normalized gradient, of 5% of the norm of the factors and less in the second"
        " half: one minus the correlation with the nuclear solution is at most a tenth of that between the nuclear"
        " and the Frobenius solution. Problems are drawn again if the dual has a singular value within 3% of those of"
        " the solution's directions, since that direction fades too slowly."
    ),
    reference="training of the factors, which uses no program",
    formula="K_k Q_k^⊤ / ‖K_k Q_k^⊤‖ → W^nuc / ‖W^nuc‖",
)
def factors(trial: Trial) -> Evidence:
    """One minus the correlation with the nuclear solution over that of the Frobenius one, which is the control."""
    scale = 0.03 ** float(torch.rand((), generator=trial.generator))
    for _ in range(20):
        problem = random_problem(6, 8, 10, generator=trial.generator)
        weights = growing_factors(problem, scale, trial.size(6000, 12000), trial.generator)
        found = {norm: max_margin(problem, norm=norm, selection=problem.selected(weights)) for norm in ("fro", "nuc")}
        if singular_gap(problem, found["nuc"]) > 0.03:
            break
    solutions = {norm: solution.weights for norm, solution in found.items()}
    between = misalignment(*solutions.values())

    def gap(norm: str) -> Gap:
        return Gap(misalignment(weights, solutions[norm]) / between, 0.1)

    return Evidence(
        printed=gap("nuc"),
        control=gap(trial.control("fro", "nuc")),
        table={
            "scale of the start": scale,
            "1 − corr with the nuclear solution": gap("nuc").measured * between,
            "with the Frobenius one": gap("fro").measured * between,
            "between the two": between,
            "effective rank of the weights": effective_rank(weights),
            "of the Frobenius solution": effective_rank(solutions["fro"]),
        },
    )


def singular_gap(problem: TokenSelection, solution: MaxMargin) -> float:
    """Return the gap of the dual's singular values in directions that a nuclear solution lacks."""
    matrix = torch.einsum("nt,ntd,ne->de", solution.dual, problem.differences(solution.selection), problem.queries)
    sizes, own = torch.linalg.svdvals(matrix), torch.linalg.svdvals(solution.weights)
    rank = int((own > 1e-3 * own[0]).sum())
    return 1 - float(sizes[rank] / sizes[0]) if rank < len(sizes) else 1.0


def growing_factors(problem: TokenSelection, scale: float, steps: int, generator: torch.Generator) -> Tensor:
    """Return weights K Q^⊤ after descent in the factors, along the normalized gradient.

    Steps of constant length add a part 1 / k of the norm, and a singular direction that the solution lacks fades like
    k^-(1 - s), with s the singular value of the dual there, whose largest is one. Steps in proportion to the norm make
    this exponential; in the second half they shrink to zero, because directions swing by their size.
    """
    shapes = [(size, min(problem.shape)) for size in problem.shape]
    key, query = (scale * torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes)
    for k in range(steps):
        matrix = log_gradient(problem, key @ query.mT).matrix
        parts = matrix @ query, matrix.mT @ key
        size, length = (math.hypot(*(float(each.norm()) for each in pair)) for pair in ((key, query), parts))
        step = 0.05 * min(1.0, 2 - 2 * k / steps) * size / length
        key, query = key - step * parts[0], query - step * parts[1]
    return key @ query.mT


def effective_rank(weights: Tensor) -> float:
    """Return the squared ratio of nuclear and Frobenius norm: the rank, if all singular values are equal."""
    sizes = torch.linalg.svdvals(weights)
    return float((sizes.sum() / sizes.norm()) ** 2)


def relu_experiment(
    dim: int, count: int, steps: int, generator: torch.Generator
) -> tuple[list[tuple[Tensor, Tensor]], list[float]]:
    """Normalized descent of many small instances at once under the head 1^⊤ ReLU(V x), three sequences of four tokens.

    Returns:
        For each instance the weights at the end, and the finite part with the fitted multiple of the max-margin one,
        which is zero where no weights keep these tokens; and one minus the correlation of those that pass the
        published filter.
    """

    def unit(*shape: int, axes: int = 1) -> Tensor:
        drawn = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return torch.nn.functional.normalize(drawn.flatten(-axes), dim=-1).reshape(shape)

    tokens, queries, value = unit(count, 3, 4, dim), unit(count, 3, dim), unit(count, dim, dim, axes=2)
    labels = 2.0 * torch.randint(2, (count, 3), generator=generator) - 1
    mixed = (labels < 0).any(-1)  # as published: at least one label is negative
    tokens, queries, value, labels = tokens[mixed], queries[mixed], value[mixed], labels[mixed]
    weights = torch.zeros(len(tokens), dim, dim, dtype=torch.float64)

    def attention(weights: Tensor) -> Tensor:
        return torch.einsum("bntd,bde,bne->bnt", tokens, weights, queries).softmax(-1)

    length = 200 / steps  # the norm that 2000 steps of 0.1 may reach
    for _ in range(steps):
        weights.requires_grad_()
        hidden = torch.relu(torch.einsum("bnt,bntd,bde->bne", attention(weights), tokens, value)).sum(-1)
        loss = torch.nn.functional.softplus(-labels * hidden).sum()
        (slope,) = torch.autograd.grad(loss, weights)
        weights = (weights - length * slope / (slope.norm(dim=(1, 2), keepdim=True) + 1e-16)).detach()
    ends = attention(weights)
    between, gone = (ends > 1e-6) & (ends <= 1e-3), ends <= 1e-6
    passes = (~between).flatten(1).all(-1) & gone.flatten(1).any(-1)
    runs: list[tuple[Tensor, Tensor]] = []
    for i in weights.flatten(1).any(1).nonzero()[:, 0].tolist():
        targets = ends[i] * (ends[i] > 1e-3)
        problem = TokenSelection(tokens[i], queries[i], targets=targets / targets.sum(-1, keepdim=True))
        finite = finite_component(problem)
        both = finite.weights
        if finite.solution.feasible:
            both = both + finite.split(weights[i]).coefficient * finite.solution.weights
        runs.append((weights[i], both))
    return runs, [
        misalignment(*run) for run, good in zip(runs, passes[weights.flatten(1).any(1)].tolist(), strict=True) if good
    ]
