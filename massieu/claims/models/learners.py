"""Transformers trained inside the experiment to learn classes of functions in a context."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import torch

from massieu.claims.claim import Evidence, Gap, Source, Trial
from massieu.claims.experiment import widest
from massieu.claims.registry import claim
from massieu.context import Linear, Pool, Ridge, SoftmaxModel, Task, draw_pool, learns_in_context, separate
from massieu.context.definition import ContextLearning
from massieu.context.optimizer import JointAdamW
from massieu.context.tasks import DecisionTree, Quadratic, Sine, TwoLayer

RATE, WARM_UP, BATCH = 6e-3, 50, 64
LINEAR, EXAMPLES = Linear(2, noise=0.5), 8
CLASSES: dict[str, tuple[Task, int]] = {
    "quadratic": (Quadratic(1, noise=0.3), 6),
    "decision tree": (DecisionTree(2, noise=0.2, depth=2), 12),
    "two-layer network": (TwoLayer(1, noise=0.2, hidden=8), 8),
    "sine": (Sine(1, noise=0.1, amplitudes=(0.5, 1.5), width=3.0), 10),
}
TESTS = 8192  # tasks of a risk, none of them seen in training


@claim(
    "I21",
    source=Source.SLIDES,
    place="in-context learning, definition, linear regression, and summary, point 1",
    title="A trained transformer learns linear functions in context",
    wording=(
        "Transformers are capable of in-context learning: a model learns a class of functions up to ε if its expected"
        " loss at the query is at most ε; linear functions with w and x standard normal are one."
    ),
    reading=(
        "Our reading: a softmax transformer of two blocks of width 32 (full: 64), after 2,600 steps of 64 tasks each"
        " (full: 6,000), learns linear functions of 2 inputs with noise 0.5 from 8 examples up to ε = r + (z − r) / 10"
        " (full: r + (z − r) / 20), with r the risk of ridge regression, which is optimal, and z that of zero, by the"
        " upper end of a 99 percent interval from 8,192 new tasks. Shown for this class, trained anew in each trial."
    ),
    reference="the risk of ridge regression on the same distribution, and E f^2 in closed form",
    formula="E ℓ(M(P), f(x_query)) ≤ ε",
    trials=1,
    slow=True,
)
def linear_functions(trial: Trial) -> Evidence:
    """The upper end of the risk in units of ε; the control is the same transformer without training."""
    model = trained(LINEAR, EXAMPLES, trial.size(2600, 6000), trial.size(32, 64), trial.seed)
    untrained = trained(LINEAR, EXAMPLES, 0, trial.size(32, 64), trial.seed)
    optimum = risk(Ridge(LINEAR.noise**2), LINEAR, EXAMPLES, trial, 0.0).risk
    epsilon = optimum + (0.05 if trial.full else 0.1) * (LINEAR.signal - optimum)
    found, broken = (risk(each, LINEAR, EXAMPLES, trial, epsilon) for each in (model, untrained))
    return Evidence(
        printed=Gap(found.upper, epsilon),
        control=trial.control(Gap(broken.lower, epsilon), Gap(found.upper, epsilon)),
        table={
            "risk of the model": found.risk,
            "of ridge regression": optimum,
            "of the zero predictor": LINEAR.signal,
            "ε": epsilon,
        },
    )


@claim(
    "I22",
    source=Source.SLIDES,
    place="in-context learning, non-linear regression",
    title="Trained transformers learn nonlinear functions in context",
    wording="Transformers learn classes of nonlinear functions in a context.",
    reading=(
        "Our reading, of slides that show pictures: softmax transformers of two blocks of width 32, one for each class,"
        " after 750 steps of 64 tasks each (full: 3,000), learn quadratic functions of one input from 6 examples,"
        " decision trees of depth 2 of two inputs from 12, two-layer networks of 8 units of one input from 8, and sine"
        " waves of one from 10, each with some noise, up to ε, the lesser of a third of the risk of zero and two thirds"
        " of that of the best affine ridge regression, by the upper end of a 99 percent interval from 8,192 new tasks."
    ),
    reference="E f^2 in closed form, and affine ridge regression with the best of nine penalties on 8,192 other tasks",
    formula="E ℓ(M(P), f(x_query)) ≤ ε < E ℓ(w^T x_query + b, f(x_query)), E f(x_query)^2",
    trials=1,
    slow=True,
)
def nonlinear_functions(trial: Trial) -> Evidence:
    """The upper end of each risk in units of its ε; the control has models without training."""
    table: dict[str, float] = {}
    gaps, broken = [], []
    for name, (task, examples) in CLASSES.items():
        affine = affine_risk(task, examples, trial)
        epsilon = min(task.signal / 3, affine * 2 / 3)
        model = trained(task, examples, trial.size(750, 3000), 32, trial.seed)
        found = risk(model, task, examples, trial, epsilon)
        gaps.append(Gap(found.upper, epsilon))
        other = risk(trained(task, examples, 0, 32, trial.seed), task, examples, trial, epsilon)
        broken.append(Gap(other.lower, epsilon))
        table |= {f"{name}, risk of the model": found.risk, f"{name}, of affine ridge": affine}
        table[f"{name}, of zero"] = task.signal
    return Evidence(
        printed=widest(*gaps), control=trial.control(min(broken, key=lambda gap: gap.share), widest(*gaps)), table=table
    )


@claim(
    "I23",
    source=Source.SLIDES,
    place="in-context learning, hypothesis 2",
    title="A trained transformer identifies functions it never saw",
    wording=(
        "The other hypothesis: in-context learning is learning, which can identify novel functions from within a"
        " function class, as in puzzles."
    ),
    reading=(
        "Our reading: on linear functions drawn anew, none of them seen in training, the transformer of I21 after 900"
        " steps (full: 4,000) is nearer to ridge regression, which learns, than to retrieval, the posterior mean over 4"
        " functions that training did not favor: ridge has a share of at least 3/4 in the mixture of both nearest to"
        " it, half of the way from 1/2, where both are equally far in mean square, to ridge itself; and its error is no"
        " farther from that of ridge than from that of retrieval."
    ),
    reference="ridge regression and the posterior mean over the 4 functions, both exact",
    formula="M ≈ s · ridge + (1 − s) · retrieval, s ≥ 3/4",
    trials=1,
    slow=True,
)
def novel_functions(trial: Trial) -> Evidence:
    """The share of retrieval, and the error between those of both hypotheses; the control only retrieves."""
    # A share s of ridge has |M - retrieval|^2 - |M - ridge|^2 = (2 s - 1) |ridge - retrieval|^2: nearer if s > 1/2.
    model = trained(LINEAR, EXAMPLES, trial.size(900, 4000), trial.size(32, 64), trial.seed)
    pool = pool_of(LINEAR, 4, trial.seed)

    def rows(retrieves: bool) -> dict[str, dict[str, float]]:
        ask = pool.predict if retrieves else model.predict
        found = separate(ask, LINEAR, pool, EXAMPLES, torch.Generator().manual_seed(trial.seed + 2))
        return {str(row["condition"]): row for row in found.to_dict("records")}

    def gap(novel: dict[str, float]) -> Gap:
        least, most = novel["learning_error"], novel["retrieval_error"]
        between = (novel["model_error"] - least) / (most - least)
        return widest(Gap(max(0.0, 1 - novel["share"]), 0.25), Gap(max(0.0, between), 0.5))

    own = rows(False)
    return Evidence(
        printed=gap(own["novel"]),
        control=gap(rows(trial.control(True, False))["novel"]),
        table={
            "error on novel functions": own["novel"]["model_error"],
            "of ridge regression": own["novel"]["learning_error"],
            "of retrieval": own["novel"]["retrieval_error"],
            "share of learning on novel functions": own["novel"]["share"],
            "on shuffled targets": own["shuffled"]["share"],
        },
    )


@functools.lru_cache(maxsize=32)
def trained(task: Task, examples: int, steps: int, width: int, seed: int, size: int | None = None) -> SoftmaxModel:
    """Train a transformer of two blocks on new tasks, or on a pool of a given size; step sizes fall to zero."""
    pool = None if size is None else pool_of(task, size, seed)
    generator = torch.Generator().manual_seed(seed)
    model = SoftmaxModel(task.dim, width=width, layers=2, heads=2, generator=generator)
    optimizer = JointAdamW(model)
    for step in range(steps):
        rate = RATE * min(1.0, (step + 1) / WARM_UP) * 0.5 * (1 + math.cos(math.pi * step / steps))
        optimizer.step(model.loss((pool or task).draw(BATCH, examples + 1, generator)), rate)
    return model.eval()


def pool_of(task: Task, size: int, seed: int) -> Pool:
    return draw_pool(task, size, torch.Generator().manual_seed(seed + 1))


def risk(model: object, task: Task, examples: int, trial: Trial, epsilon: float) -> ContextLearning:
    """Return the risk on tasks that training did not draw."""
    generator = torch.Generator().manual_seed(trial.seed + 2**40)
    options = {"examples": examples, "tasks": TESTS, "generator": generator}
    return learns_in_context(model, task, epsilon, **options)  # type: ignore[arg-type]


def affine_risk(task: Task, examples: int, trial: Trial) -> float:
    """Return the least error of ridge regression with an intercept, over nine penalties."""
    prompts = task.draw(TESTS, examples + 1, torch.Generator().manual_seed(trial.seed + 2**40 + 1))
    inputs = torch.nn.functional.pad(prompts.inputs, (0, 1), value=1.0)
    prompts = replace(prompts, inputs=inputs, queries=inputs)
    penalties = (0.01, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 1000.0)
    found = [Ridge(penalty)(prompts, [examples])[:, 0] for penalty in penalties]
    return min(float((each - prompts.answers[:, -1]).square().mean()) for each in found)
