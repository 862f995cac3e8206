"""Next-token prediction in linear models: the direction in which gradient descent diverges, and the part that stays."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from massieu.claims.claim import Evidence, Gap, Source, Trial
from massieu.claims.experiment import widest
from massieu.claims.registry import claim
from massieu.margin import TokenSelection, descend, finite_component, misalignment
from massieu.margin.program import scipy_module


@claim(
    "R11",
    source=Source.THRAMPOULIDIS,
    place='"Implicit Optimization Bias of Next-token Prediction in Linear Models", abstract; the theorem from memory',
    title="Next-token prediction diverges along its own SVM",
    wording=(
        "Under the paper's separability conditions, gradient descent on linear next-token prediction equates the"
        " logits' differences of in-support tokens with their log odds in the subspace of the data, and diverges in the"
        " orthogonal subspace in the direction of the largest margin between tokens in and out of support."
    ),
    reading=(
        "Four contexts with random embeddings in 12 dimensions, so that the conditions hold, a vocabulary of five and"
        " two or three next tokens each, 2000 steps of gradient descent from a random start (20000 at full size). The"
        " part in the subspace differs from the solution of the log-odds equations by at most a tenth of its norm;"
        " the rest grows, over the last decade of steps, in a direction whose one minus correlation with the solution"
        " of the program is at most 0.02: growth, because what it began with fades only like 1 / log k. The solutions"
        " of massieu.margin agree with the reference to 1e-5."
    ),
    reference="the program by SLSQP and the log-odds equations by a pseudoinverse",
    formula="Π_F W_k → W^*, (W_k − Π_F W_k) / ‖·‖ → W^mm / ‖W^mm‖, (e_t − e_t′)^⊤ W^mm h = 0 in support, ≥ 1 beyond",
)
def next_token_margin(trial: Trial) -> Evidence:
    """The part in the subspace and the growth of the rest; the control is the program of the most frequent word."""
    generator, contexts, words, dim = trial.generator, 4, 5, 12
    embeddings = torch.randn(contexts, dim, generator=generator, dtype=torch.float64)
    embeddings = embeddings / embeddings.norm(dim=-1, keepdim=True)
    order = torch.rand(contexts, words, generator=generator).argsort(-1)
    counts = torch.randint(2, 4, (contexts, 1), generator=generator)
    mass = (0.5 + torch.rand(contexts, words, generator=generator, dtype=torch.float64)) * (order < counts)
    odds = mass / mass.sum(-1, keepdim=True)
    # Next-token prediction selects among all words, each a unit vector, in every context.
    problem = TokenSelection(torch.eye(words).expand(contexts, -1, -1), embeddings, targets=odds)
    start = 0.3 * torch.randn(words, dim, generator=generator, dtype=torch.float64)
    steps = trial.size(2000, 20000)
    run = descend(problem, "gd", step=5.0, steps=steps, start=start, record=[steps // 10], compare=False)
    solution, inside = log_odds_solution(odds, embeddings)
    program, one_hot = (support_program(each, embeddings) for each in (odds, one_hot_of(odds)))
    finite = finite_component(problem)
    before, after = (weights - inside(weights) for weights in run.snapshots[1:])

    def gap(direction: Tensor) -> Gap:
        return widest(
            Gap(float((inside(run.weights) - solution).norm() / solution.norm()), 0.1),
            Gap(misalignment(after - before, direction), 0.02),
            Gap(float((finite.solution.weights - program).norm() / program.norm()), 1e-5),
            Gap(float((finite.weights - solution).norm() / solution.norm()), 1e-5),
        )

    return Evidence(
        printed=gap(program),
        control=gap(trial.control(one_hot, program)),
        table={
            "norm of the solution in the subspace": float(solution.norm()),
            "norm of the orthogonal part": float(after.norm()),
            "ten times earlier": float(before.norm()),
            "1 − corr of the orthogonal part": misalignment(after, program),
            "margin of the program": 1 / float(program.norm()),
        },
    )


def one_hot_of(odds: Tensor) -> Tensor:
    """Return targets with all mass on the most frequent word of every context."""
    return torch.nn.functional.one_hot(odds.argmax(-1), odds.shape[1]).double()


def log_odds_solution(odds: Tensor, embeddings: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return the least solution of (e_t − e_t′)^⊤ W h = log odds, and the projection on the span of the equations."""
    rows, values = [], []
    for shares, context in zip(odds, embeddings, strict=True):
        first, *others = shares.nonzero().flatten().tolist()
        for other in others:
            rows.append(difference(first, other, context, len(shares)))
            values.append((shares[first] / shares[other]).log())
    matrix = torch.stack(rows).flatten(1)
    inverse = torch.linalg.pinv(matrix)
    shape = (odds.shape[1], embeddings.shape[1])
    solution = (inverse @ torch.stack(values)).reshape(shape)
    return solution, lambda weights: (inverse @ (matrix @ weights.flatten())).reshape(shape)


def support_program(odds: Tensor, embeddings: Tensor) -> Tensor:
    """Return the least weights that put words in support above all others by one and at equal logits, by SLSQP."""
    above, level = [], []
    for shares, context in zip(odds, embeddings, strict=True):
        inside, outside = shares.nonzero().flatten().tolist(), (shares == 0).nonzero().flatten().tolist()
        above += [difference(t, other, context, len(shares)) for t in inside for other in outside]
        level += [difference(inside[0], t, context, len(shares)) for t in inside[1:]]
    least = torch.stack(above).flatten(1).numpy()
    constraints = [{"type": "ineq", "fun": lambda at: least @ at - 1, "jac": lambda at: least}]
    if level:
        same = torch.stack(level).flatten(1).numpy()
        constraints.append({"type": "eq", "fun": lambda at: same @ at, "jac": lambda at: same})
    found = scipy_module("optimize").minimize(
        lambda at: (0.5 * at @ at, at),
        np.zeros(least.shape[1]),
        jac=True,
        method="SLSQP",
        constraints=constraints,
        options={"ftol": 1e-14, "maxiter": 500},
    )
    return torch.from_numpy(found.x).reshape(odds.shape[1], -1)


def difference(first: int, second: int, context: Tensor, words: int) -> Tensor:
    """Return the matrix (e_first − e_second) h^⊤."""
    rows = torch.zeros(words, len(context), dtype=torch.float64)
    rows[first], rows[second] = context, -context
    return rows
