"""What a model that learns in its context is compared with: baselines, the rule of Bayes, and what is known."""

from __future__ import annotations

import itertools
import math
from typing import Literal

import torch
from torch import Tensor

from massieu.claims.claim import Curve, Evidence, Gap, Trial, Verdict
from massieu.claims.context.constructions import SLIDES
from massieu.claims.experiment import widest
from massieu.claims.registry import claim
from massieu.context import (
    Averaging,
    DecisionTree,
    GradientStep,
    LeastSquares,
    Linear,
    Predictor,
    Prompts,
    Quadratic,
    Ridge,
    SparseLinear,
    Task,
    Tree,
    TwoLayer,
    concept_mixture,
    draw_symbol_prompts,
)

GARG = "Garg et al. 2022"
SURE = 5.0  # standard errors
LOW, HIGH = 20.0, 400.0  # where errors are cut off, in units of their typical size


@claim(
    "I11",
    source=f"{GARG}, baselines for linear functions",
    statement="Without noise the errors of the baselines, divided by d, are simple functions of the examples seen.",
    formula="least squares max(0, 1 − i/d), averaging (d + 1)/i, best single step (d + 1)/(i + d + 1)",
    expected=Verdict.HOLDS,
)
def baselines(trial: Trial) -> Evidence:
    """Mean errors of predictors in standard errors from their closed forms; the control has inputs of two sizes."""
    dim, lengths = 20, [5, 10, 19, 40]
    sizes = torch.tensor([2.0, 0.1] * (dim // 2), dtype=torch.float64)
    closed: dict[Predictor, list[float]] = {
        LeastSquares(): [max(0.0, 1 - i / dim) for i in lengths],
        Averaging(): [(dim + 1) / i for i in lengths],
        GradientStep(): [(dim + 1) / (i + dim + 1) for i in lengths],
    }

    def gap(covariance: Tensor) -> Gap:
        task = Linear(dim, covariance=covariance)
        prompts = task.draw(trial.size(1000, 10_000), lengths[-1] + 1, trial_generator(trial), torch.float64)
        distances = []
        for predictor, expected in closed.items():
            mean, error = mean_error(predictor(prompts, lengths), prompts.answers[:, lengths], dim)
            distances.append((mean - torch.tensor(expected).double()).abs() / (error + 1e-9))
        return Gap(float(torch.stack(distances).max()), SURE)

    return Evidence(printed=gap(torch.ones(dim).double()), control=gap(trial.control(sizes, torch.ones(dim).double())))


@claim(
    "I12",
    source=f"{GARG}, linear functions",
    statement="Least squares is the optimal estimator of a linear function from the examples in a context.",
    formula="risk of least squares = E Var(w^T x | context)",
    correction=(
        "Without noise. With noise the optimum is ridge regression with λ = σ^2 / ψ^2, and the mean error of least"
        " squares is infinite at i = d − 1, d and d + 1."
    ),
    expected=Verdict.CONDITIONAL,
)
def least_squares(trial: Trial) -> Evidence:
    """Risk of least squares over the posterior variance in each context; the control has noise of a tenth."""
    dim, examples = 5, 10
    prompts = Linear(dim).draw(trial.size(2000, 20_000), examples + 1, trial.generator, torch.float64)
    seen, query = prompts.inputs[:, :examples], prompts.queries[:, examples]
    inverse = torch.linalg.inv(seen.mT @ seen)
    leverage = torch.einsum("ti,tij,tj->t", query, inverse, query)

    def risks(noise: float) -> tuple[Tensor, Tensor]:
        return noise**2 * leverage, Ridge(noise**2).variance(prompts, [examples])[:, 0]

    def gap(noise: float) -> Gap:
        plain, best = risks(noise)
        return Gap(float((plain / best - 1).abs().max()), 1e-6)

    plain, best = (each.mean() for each in risks(0.5))
    return Evidence(
        printed=gap(0.5),
        conditional=gap(1e-6),
        control=gap(trial.control(0.1, 1e-6)),
        table={
            "risk of least squares, d = 5, i = 10, σ = 0.5": float(plain),
            "in closed form, σ^2 d / (i − d − 1)": 0.25 * dim / (examples - dim - 1),
            "risk of ridge": float(best),
        },
    )


@claim(
    "I13",
    source="Xie et al. 2021 (hypothesis 1 of the slides on in-context learning)",
    statement="Learning in a context is finding its concept: the posterior predictive comes to that of the concept.",
    formula="p(y | prompt) = Σ_θ p(θ | prompt) p(y | prompt, θ)",
    expected=Verdict.HOLDS,
)
def concept_inference(trial: Trial) -> Evidence:
    """Distance of predictions from those of the true concept; the control averages over concepts without a prompt."""
    mixture = concept_mixture(trial.generator)
    counts = [0, 1, 4, 8]
    prompts = [draw_symbol_prompts(mixture, trial.size(60, 500), count, trial.generator) for count in counts]

    def distances(weighing: Literal["posterior", "uniform"]) -> list[float]:
        """In total variation, on average, for each number of examples."""
        guesses = [mixture.predictive(each.symbols, weighing) for each in prompts]
        pairs = zip(guesses, known, strict=True)
        return [float(0.5 * (guess - true).abs().sum(-1).mean()) for guess, true in pairs]

    known = [mixture.predictive(each.symbols, "oracle", each.concepts) for each in prompts]
    series = {"posterior": distances("posterior"), "uniform average": distances("uniform")}

    def gap(weighing: str) -> Gap:
        return Gap(series[weighing][-1], 0.02)

    right = known[-1].argmax(-1) == prompts[-1].answers
    return Evidence(
        printed=gap("posterior"),
        control=gap(trial.control("uniform average", "posterior")),
        table={"share of right answers of the concept after 8 examples": float(right.double().mean())},
        curve=Curve(counts, dict(series), "examples", "distance from the true concept"),
    )


@claim(
    "I14",
    source=f"{SLIDES}, summary ({GARG}, decision trees)",
    statement=(
        "Transformers can learn more sample efficient algorithms than are known, read as: no algorithm known needs"
        " fewer examples than greedy trees."
    ),
    formula="error of the best algorithm known = error of greedy trees",
    correction=(
        "No transformer is trained here. It may be better than those it was compared with, greedy trees and boosting,"
        " and for networks gradient descent. The posterior mean is known too: for small trees it is a sum over all of"
        " them, far better than greedy ones, and for tasks of that prior nothing is better on average."
    ),
    expected=Verdict.FAILS,
)
def known_algorithms(trial: Trial) -> Evidence:
    """Greedy trees against the posterior mean over all trees; the control weighs trees by the prior alone."""
    task, length = DecisionTree(4, noise=0.2, depth=2), 16
    prompts = task.draw(trial.size(300, 3000), length + 1, trial.generator, torch.float64)
    answers = prompts.answers[:, length]
    greedy = (Tree(2)(prompts, [length])[:, 0] - answers).square()

    def posterior(evidence: float) -> tuple[Tensor, Tensor]:
        mean, variance = tree_posterior(prompts, length, task.noise, evidence)
        return (mean - answers).square(), variance

    def gap(evidence: float) -> Gap:
        """A posterior mean whose errors are as large as its variances is the right one."""
        errors, variances = posterior(evidence)
        beside = errors - variances
        calibrated = float(beside.mean().abs() / beside.std()) * math.sqrt(len(beside))
        return widest(Gap(calibrated, SURE), Gap(float(errors.mean() / greedy.mean()), 0.3))

    best = float(posterior(1.0)[0].mean())
    return Evidence(
        printed=Gap(float(greedy.mean()) / best - 1, 0.05),
        instead=gap(1.0),
        control=gap(trial.control(0.0, 1.0)),
        table={"error of greedy trees": float(greedy.mean()), "of the posterior mean": best},
    )


@claim(
    "I18",
    source=f"mathematics of this project, on the baselines of {GARG}",
    statement=(
        "With noise the mean excess error of least squares is infinite at d − 1, d and d + 1 examples and finite after"
        " these."
    ),
    formula=(
        "E (ŵ^T x − w^T x)^2 = σ^2 d / (i − d − 1), i > d + 1; at i = d ± 1 the mean of errors cut off at t grows as"
        " σ^2 min(i, d) / 2 · log t"
    ),
    expected=Verdict.HOLDS,
)
def noisy_least_squares(trial: Trial) -> Evidence:
    """Means, and growth of cut means, in standard errors from the formulas; the control cuts them at d + 2 examples."""
    dim, lengths, noise = 5, [10, 15, 30], 0.5
    prompts = Linear(dim, noise=noise).draw(trial.size(20_000, 100_000), 31, trial.generator, torch.float64)
    mean, error = mean_error(LeastSquares()(prompts, lengths), prompts.answers[:, lengths], 1.0)
    expected = torch.tensor([noise**2 * dim / (length - dim - 1) for length in lengths]).double()
    means = Gap(float(((mean - expected).abs() / error).max()), SURE)
    near = [dim - 1, dim, dim + 1, dim + 2]
    more = Linear(dim, noise=noise).draw(trial.size(30_000, 300_000), dim + 3, trial.generator, torch.float64)
    # Least squares is linear in the targets: what is left without the clean ones is the part of the noise.
    clean = Prompts.of(more.inputs, more.answers)
    parts = (LeastSquares()(more, near) - LeastSquares()(clean, near)).square() / noise**2

    def growth(length: int) -> tuple[float, float]:
        """Of the cut mean for each factor e of the cut, over half of min(i, d); and its standard error."""
        unit = min(length, dim)
        errors = parts[:, near.index(length)] / unit
        rates = 2 * (errors.clamp(max=HIGH) - errors.clamp(max=LOW)) / math.log(HIGH / LOW)
        return float(rates.mean()), float(rates.std()) / math.sqrt(len(rates))

    def gap(above: int) -> Gap:
        beside = [growth(length) for length in (dim - 1, above)]
        return widest(*(Gap(abs(rate - 1) / spread, SURE) for rate, spread in beside))

    return Evidence(
        printed=widest(means, gap(dim + 1), Gap(1 / growth(dim)[0], 0.5)),
        control=gap(trial.control(dim + 2, dim + 1)),
        table={
            f"growth of the cut mean at i = {name}, as a share of σ^2 min(i, d) / 2": growth(length)[0]
            for name, length in zip(("d − 1", "d", "d + 1", "d + 2"), near, strict=True)
        },
    )


@claim(
    "I19",
    source=f"{GARG}, their public code: classes whose errors are divided by d alike",
    statement="Functions of all classes have the same size, that of their inputs.",
    formula="E f(x)^2 = d",
    correction="Linear and quadratic functions and networks. Sparse ones have their number of weights, and trees one.",
    expected=Verdict.CONDITIONAL,
)
def sizes_of_functions(trial: Trial) -> Evidence:
    """Mean squares in standard errors from d; the control puts trees among the classes that are of that size."""
    dim, tasks = 20, trial.size(4000, 40_000)
    same: list[Task] = [Linear(dim), Quadratic(dim), TwoLayer(dim)]
    table = {}

    def gap(classes: list[Task]) -> Gap:
        distances = []
        for task in classes:
            squares = task.draw(tasks, 1, trial.generator, torch.float64).answers[:, 0].square()
            table[f"mean square, {type(task).__name__}, d = {dim}"] = float(squares.mean())
            distances.append(float((squares.mean() - dim).abs() / squares.std()) * math.sqrt(tasks))
        return Gap(max(distances), SURE)

    return Evidence(
        printed=gap([*same, SparseLinear(dim), DecisionTree(dim)]),
        conditional=gap(same),
        control=gap([*same, trial.control(DecisionTree(dim), Linear(dim))]),
        table=table,
    )


@claim(
    "I20",
    source="Xie et al. 2021, and their public code, which does not smooth",
    statement="A prompt of joined examples has a posterior over the concepts of training.",
    formula="p(θ | prompt) = p(prompt | θ) p(θ) / p(prompt), p(prompt) > 0",
    correction=(
        "Where every transition has some probability. Otherwise the joints between examples may be impossible under"
        " all concepts, and the posterior is zero over zero."
    ),
    expected=Verdict.CONDITIONAL,
)
def smoothed_transitions(trial: Trial) -> Evidence:
    """Share of prompts that no concept can have made; the control has more examples, without smoothing."""
    prompts = trial.size(60, 500)

    def gap(smoothing: float, examples: int) -> Gap:
        mixture = concept_mixture(trial_generator(trial), smoothing=smoothing)
        symbols = draw_symbol_prompts(mixture, prompts, examples, trial_generator(trial)).symbols
        impossible = mixture.log_likelihood(symbols).isneginf().all(-1)
        return Gap(float(impossible.double().mean()), 1e-9)

    plain = gap(0.0, 4)
    return Evidence(
        printed=plain,
        conditional=gap(0.02, 4),
        control=gap(trial.control(0.0, 0.02), 8),
        table={"share of prompts that are impossible without smoothing, 4 examples": plain.measured},
    )


def tree_posterior(prompts: Prompts, length: int, noise: float, evidence: float) -> tuple[Tensor, Tensor]:
    """Mean and variance of the answer over all trees of depth two with normal leaves, ``(tasks,)`` each.

    Trees are weighed by their likelihood to the power ``evidence``.
    """
    inputs, targets = prompts.inputs[:, :length], prompts.targets[:, :length]
    means, variances, scores = [], [], []
    for tree in itertools.product(range(prompts.dim), repeat=3):
        leaf, asked = tree_leaves(inputs, tree), tree_leaves(prompts.queries[:, length : length + 1], tree)
        counts = leaf.sum(1)
        sums, squares = torch.einsum("tnl,tn->tl", leaf, targets), torch.einsum("tnl,tn->tl", leaf, targets.square())
        # Of n numbers around a standard normal one, noise apart: a Gaussian with covariance noise^2 I + 1 1^T.
        shrunk = sums / (counts + noise**2)
        exponent = (squares - sums * shrunk) / noise**2 + torch.log1p(counts / noise**2)
        scores.append(-0.5 * exponent.sum(-1))
        means.append((asked[:, 0] * shrunk).sum(-1))
        variances.append((asked[:, 0] * noise**2 / (counts + noise**2)).sum(-1))
    weight = torch.softmax(evidence * torch.stack(scores), 0)
    mean, within = torch.stack(means), torch.stack(variances)
    middle = (weight * mean).sum(0)
    return middle, (weight * (within + (mean - middle).square())).sum(0)


def tree_leaves(inputs: Tensor, tree: tuple[int, ...]) -> Tensor:
    """Which of four leaves each input comes to, ``(tasks, inputs, 4)`` of zeros and ones."""
    root, left, right = (inputs[..., coordinate] > 0 for coordinate in tree)
    leaf = torch.where(root, 2 + right.long(), left.long())
    return torch.nn.functional.one_hot(leaf, 4).to(inputs)


def mean_error(found: Tensor, answers: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Mean squared errors over tasks divided by a scale, and their standard errors."""
    errors = (found - answers).square() / scale
    return errors.mean(0), errors.std(0) / math.sqrt(len(errors))


def trial_generator(trial: Trial) -> torch.Generator:
    """A fresh generator, so that every measurement of a trial sees the same draws."""
    return torch.Generator().manual_seed(trial.seed)
