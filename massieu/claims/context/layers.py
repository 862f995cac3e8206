"""Layers that learn in a context, trained, whitened, and with a softmax: what is known of them beside their weights."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from massieu.claims.claim import Evidence, Gap, Trial, Verdict
from massieu.claims.context.constructions import OSWALD, SLIDES, by_quadrature, covariances, normal_nodes
from massieu.claims.experiment import apart, normals, widest
from massieu.claims.registry import claim
from massieu.context import (
    Linear,
    LinearModel,
    optimal_linear_attention,
    regression_tokens,
    sensitivities,
    softmax_step_layer,
)


@claim(
    "I15",
    source=f"{SLIDES}, summary; Ahn et al. 2023; Zhang, Frei and Bartlett 2023",
    statement="Training one layer of linear attention from scratch finds the best of all such layers.",
    formula="z^T A x → z^T A* x, A = −(u_x m_y^T + u_y M_x), u = last row of W_O W_V, M = W_K^T W_Q",
    correction=(
        "From values that read targets and keys that read inputs, where u_x = 0 and m_y = 0. From values that read"
        " inputs and keys that read targets, where u_y = 0 and M_x = 0, A keeps rank one; from random weights of two"
        " dimensions it may end there."
    ),
    expected=Verdict.CONDITIONAL,
    trials=2,
)
def trained_layer(trial: Trial) -> Evidence:
    """Trained layers from two starts against the optimum; the control expects a step that is plain."""
    task, examples = Linear(3, noise=0.5, covariance=[2.0, 1.0, 0.5]), 6
    best = optimal_linear_attention(task.covariance, task.prior, noise=task.noise, examples=examples)
    plain = best.step * torch.eye(3).double()
    model = train(task, examples, trial.size(600, 3000), trial.generator)
    other = train(task, examples, trial.size(150, 3000), trial.generator, swapped=True)
    prompts = task.draw(2000, examples + 1, trial.generator, torch.float64)
    moments = torch.einsum("tn,tnd->td", prompts.targets[:, :-1], prompts.inputs[:, :-1]) / examples

    def loss(trained: LinearModel) -> float:
        return float(best.loss_of(trained.matrix.detach()))

    def gap(trained: LinearModel, matrix: Tensor) -> Gap:
        cosine = torch.nn.functional.cosine_similarity(sensitivities(trained, prompts), moments @ matrix, dim=-1).mean()
        ratio = loss(trained) / float(best.loss_of(matrix))
        return widest(Gap(1 - float(cosine), 1e-3), Gap(abs(ratio - 1), 0.01))

    return Evidence(
        printed=gap(other, best.matrix),
        conditional=gap(model, best.matrix),
        control=gap(model, trial.control(plain, best.matrix)),
        table={
            "loss of the trained layer over the least": loss(model) / best.loss,
            "the same from values that read inputs": loss(other) / best.loss,
        },
    )


@claim(
    "I16",
    source="mathematics of this project, on Ahn et al. 2023, Theorem 1",
    statement="Where tasks have the inverse covariance of the inputs, the best layer whitens exactly.",
    formula="Ψ = Σ^{-1} ⇒ A* = N / (N + d + 1) Σ^{-1}",
    expected=Verdict.HOLDS,
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
    source=f"the remark of the notebook of {OSWALD} that softmax needs two heads",
    statement="For what one linear head learns from examples, softmax attention needs two.",
    formula="loss of o(β) − o(−β) ≈ loss of a linear head < loss of o(β), at their best scales and β",
    expected=Verdict.HOLDS,
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


def train(task: Linear, examples: int, steps: int, generator: torch.Generator, swapped: bool = False) -> LinearModel:
    """A layer after so many steps of Adam, each on new tasks, with a rate that falls to zero.

    Values start with targets and keys with inputs alone, or the other way round.
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
        model.loss(task.draw(1024, examples + 1, generator, torch.float64)).backward()
        optimizer.step()
    return model


def loss_at_best_scale(found: Tensor, answers: Tensor) -> float:
    """The mean squared error of predictions that are multiplied by what suits them best."""
    scale = (found * answers).sum() / found.square().sum()
    return float((scale * found - answers).square().mean())
