"""Statements on layers that learn in a context beside their weights: training, whitening, and the softmax."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from massieu.claims.claim import Evidence, Gap, Source, Trial
from massieu.claims.context.optimal_layers import by_quadrature, covariances, normal_nodes
from massieu.claims.experiment import apart, normals, widest
from massieu.claims.registry import claim
from massieu.context import Linear, LinearModel, Prompts, optimal_linear_attention, softmax_step_layer
from massieu.context.context_descent import regression_tokens
from massieu.context.learner_comparison import sensitivities


@claim(
    "I15",
    source=Source.ZHANG,
    place="abstract: gradient flow with a suitable random initialization",
    title="Training one linear layer finds the best such layer",
    wording=(
        "Despite nonconvexity, gradient flow from a suitable random start finds a global minimum of the"
        " in-context loss of one layer of linear attention."
    ),
    reading=(
        "Our reading: Adam from the random start of LinearModel, 600 batches of 1,024 tasks (full: 3,000)"
        " in 3 dimensions with variances 2, 1 and 0.5, noise 0.5 and 6 examples, comes within 1 percent of the least"
        " loss, with derivatives in the query whose mean cosine to those of the best layer on 2,000 new tasks is at"
        " least 0.999."
    ),
    reference="the optimum and its loss in closed form, which I7 compares with quadrature",
    formula="z^T A x → z^T A* x, A = −(u_x m_y^T + u_y M_x), u = last row of W_O W_V, M = W_K^T W_Q",
    trials=2,
)
def trained_layer(trial: Trial) -> Evidence:
    """Trained layers against the optimum; the control starts where the expected gradient keeps rank one."""
    task, examples = Linear(3, noise=0.5, covariance=[2.0, 1.0, 0.5]), 6
    best = optimal_linear_attention(task.covariance, task.prior, noise=task.noise, examples=examples)
    model = train(task, examples, trial.size(600, 3000), 1024, trial.generator)
    other = train(task, examples, trial.size(200, 3000), 128, trial.generator, swapped=True)
    prompts = task.draw(2000, examples + 1, trial.generator, torch.float64)
    moments = torch.einsum("tn,tnd->td", prompts.targets[:, :-1], prompts.inputs[:, :-1]) / examples

    def ratio(trained: LinearModel) -> float:
        return float(best.loss_of(trained.matrix.detach())) / best.loss

    def gap(trained: LinearModel) -> Gap:
        slopes = sensitivities(trained, prompts)
        cosine = torch.nn.functional.cosine_similarity(slopes, moments @ best.matrix, dim=-1).mean()
        return widest(Gap(1 - float(cosine), 1e-3), Gap(abs(ratio(trained) - 1), 0.01))

    values = torch.linalg.svdvals(other.matrix.detach())
    return Evidence(
        printed=gap(model),
        control=gap(trial.control(other, model)),
        table={
            "loss of the trained layer over the least": ratio(model),
            "the same from values that read inputs, tasks beside their negatives": ratio(other),
            "second singular value of that layer over the first": float(values[1] / values[0]),
        },
    )


@claim(
    "I16",
    source=Source.OURS,
    place="on Theorem 1 of Ahn et al. 2023",
    title="The best layer whitens if tasks undo the covariance",
    wording="Where tasks have the inverse covariance of the inputs, the best layer whitens exactly.",
    reading=(
        "For Gaussian inputs of a random covariance in 2 dimensions, 3 examples and no noise, N / (N + d + 1) Σ^{-1}"
        " and the matrix of optimal_linear_attention are the minimizer over all matrices A, to 1e-9."
    ),
    reference="exact quadrature over all contexts with Gauss-Hermite nodes",
    formula="Ψ = Σ^{-1} ⇒ A* = N / (N + d + 1) Σ^{-1}",
)
def whitening(trial: Trial) -> Evidence:
    """The inverse and our optimum against exact quadrature; the control has tasks that are isotropic."""
    (sigma, _), examples = covariances(trial, 2), 3
    inverse = torch.linalg.inv(sigma)

    def gap(prior: Tensor) -> Gap:
        exact = by_quadrature(sigma, prior, 0.0, examples, normal_nodes())
        found = optimal_linear_attention(sigma, prior, examples=examples).matrix
        return widest(apart(examples / (examples + 3) * inverse, exact), apart(found, exact))

    spectrum = torch.tensor([1.0, 1.0, 0.25, 2.25, 1.0]).double()
    ahn = optimal_linear_attention(torch.diag(spectrum), torch.diag(1 / spectrum), examples=20)
    return Evidence(
        printed=gap(inverse),
        control=gap(trial.control(torch.eye(2).double(), inverse)),
        table={"loss, spectrum of Ahn et al. and inverse prior, N = 20": ahn.loss},
    )


@claim(
    "I17",
    source=Source.OSWALD,
    place="a remark of their public notebook: softmax needs two heads",
    title="Softmax attention needs two heads for one linear head",
    wording="For what one head of linear attention does on these tasks, softmax attention needs two heads.",
    reading=(
        "Our reading: for standard normal inputs and tasks in 10 dimensions, 20 examples and 2,000 tasks (full:"
        " 20,000), at the best scale of the output and the best β of 0.1, 0.2 and 0.5, heads at β and −β come within 10"
        " percent of the loss of one linear head, and leave at most a quarter of the excess of one softmax head; heads"
        " of other weights were not searched."
    ),
    reference="the linear head as an inner product, written out",
    formula="loss of o(β) − o(−β) ≈ loss of a linear head < loss of o(β), at their best scales and β",
)
def softmax_heads(trial: Trial) -> Evidence:
    """Losses at the best scale of the output over that of a linear head; the control has one head."""
    dim, examples, tasks = 10, 20, trial.size(2000, 20_000)
    normal = normals(trial)
    inputs, query, weights = normal(tasks, examples, dim), normal(tasks, 1, dim), normal(tasks, dim, 1)
    targets, answers = inputs @ weights, (query @ weights)[:, 0, 0]
    linear = loss_at_best_scale((query @ inputs.mT @ targets)[:, 0, 0], answers)
    tokens = regression_tokens(inputs, targets, query)

    def excess(heads: int, beta: float) -> float:
        layer = softmax_step_layer(dim, step=1.0, beta=beta)
        assert layer.out_proj is not None
        with torch.no_grad():
            layer.out_proj.weight[:, heads * tokens.shape[2] :] = 0
            found = -layer(tokens, lengths=examples)[:, examples, dim]
        return loss_at_best_scale(found, answers) / linear - 1

    one, two = (min(excess(heads, beta) for beta in (0.1, 0.2, 0.5)) for heads in (1, 2))

    def gap(found: float) -> Gap:
        return widest(Gap(found, 0.1), Gap(found / one, 0.25))

    return Evidence(
        printed=gap(two),
        control=gap(trial.control(one, two)),
        table={
            "loss of one softmax head over that of a linear one": 1 + one,
            "loss of two softmax heads over that of a linear one": 1 + two,
        },
    )


def train(
    task: Linear, examples: int, steps: int, batch: int, generator: torch.Generator, swapped: bool = False
) -> LinearModel:
    """Train a layer by Adam on new tasks at each step, with a step size that falls to zero.

    With ``swapped``, values start with inputs alone and keys with targets, u_y = 0 and M_x = 0, and each task comes
    beside its negative, so that gradients in u_y and M_x cancel as they do in the expected loss.
    """
    model = LinearModel(task.dim, generator=generator).double()
    if swapped:
        values, keys = model.attention.v_proj, model.attention.k_proj
        assert values is not None
        with torch.no_grad():
            for weight in (values.weight, keys.weight):
                weight.copy_(torch.randn(weight.shape, generator=generator, dtype=torch.float64) / task.dim**0.5)
            values.weight[:, -1], keys.weight[:, :-1] = 0, 0
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.99))
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 0.005 * (1 + math.cos(math.pi * step / steps))
        optimizer.zero_grad()
        prompts = task.draw(batch, examples + 1, generator, torch.float64)
        model.loss(prompts).backward()
        if swapped:
            model.loss(Prompts.of(prompts.inputs, -prompts.targets)).backward()
        optimizer.step()
    return model


def loss_at_best_scale(found: Tensor, answers: Tensor) -> float:
    """Return the mean squared error of predictions times their best factor."""
    scale = (found * answers).sum() / found.square().sum()
    return float((scale * found - answers).square().mean())
