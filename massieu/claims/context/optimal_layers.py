"""Best layers of linear attention in closed form, compared with exact quadrature over all contexts."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from massieu.claims.claim import Evidence, Gap, Source, Trial, Verdict
from massieu.claims.experiment import apart, normals, widest
from massieu.claims.registry import claim
from massieu.context import Optimum, optimal_linear_attention
from massieu.context.optimum import independent_moment, isotropic_optimum


@claim(
    "I5",
    source=Source.SLIDES,
    place="in-context learning, summary, point 3",
    title="The best linear head is a plain gradient step",
    wording="Linear attention transformers with one head can and do learn to do a single step of gradient descent.",
    reading=(
        "Our reading: the best layer is a plain step, A* = η I. Tested by the loss of the best plain step, which is"
        " that of the best layer to a relative 1e-9, for a random covariance of inputs and one of tasks in 5 dimensions"
        " (full: 20), noise 0.3 and twice as many examples; conditional: for Σ = I and Ψ = 2 I. Training is the subject"
        " of I15."
    ),
    reference="the losses in closed form; I7 compares both of them with quadrature",
    formula="A* = η I",
    correction=(
        "For isotropic inputs and tasks. Otherwise the best layer is a preconditioned step, and a plain one loses."
    ),
    expected=Verdict.CONDITIONAL,
)
def plain_step(trial: Trial) -> Evidence:
    """Loss of the best plain step over the least one, less one; the control stretches one direction of the inputs."""
    dim = trial.size(5, 20)
    sigma, psi = covariances(trial, dim)
    eye = torch.eye(dim).double()
    stretched = torch.diag(torch.cat([torch.full((1,), 4.0), torch.ones(dim - 1)]).double())

    def gap(covariance: Tensor, prior: Tensor) -> Gap:
        found = optimal_linear_attention(covariance, prior, noise=0.3, examples=2 * dim)
        return Gap(abs(found.step_loss / found.loss - 1), 1e-9)

    loss = gap(sigma, psi)
    return Evidence(
        printed=loss,
        conditional=gap(eye, 2 * eye),
        control=gap(trial.control(stretched, eye), 2 * eye),
        table={"loss of a plain step over the least": 1 + loss.measured},
    )


@claim(
    "I6",
    source=Source.AHN,
    place="abstract, and Theorem 1 (the theorem from memory)",
    title="The best layer inverts a shrunken covariance",
    wording=(
        "For tasks w ~ N(0, I) without noise, the global minimum of the in-context loss of one layer is a"
        " preconditioned step of gradient descent, whose preconditioner adapts to the covariance and to the"
        " number of examples."
    ),
    reading=(
        "Our reading: among layers that predict (1/N) Σ_i y_i x_i^T A x, the best has A = A*. For a random covariance"
        " of Gaussian inputs in 2 dimensions and 3 examples, the printed matrix and that of optimal_linear_attention"
        " are the minimizer over all matrices A, to 1e-9. Layers of another form are not searched."
    ),
    reference="exact quadrature over all contexts with Gauss-Hermite nodes",
    formula="A* = Γ^{-1}, Γ = (1 + 1/N) Σ + (tr Σ / N) I",
)
def shrunken_covariance(trial: Trial) -> Evidence:
    """The inverse and our optimum against exact quadrature; the control leaves out the 1/N of the covariance."""
    (sigma, _), examples = covariances(trial, 2), 3
    exact = by_quadrature(sigma, torch.eye(2).double(), 0.0, examples, normal_nodes())
    found = optimal_linear_attention(sigma, examples=examples)

    def gap(more: float) -> Gap:
        gamma = (1 + more / examples) * sigma + sigma.trace() / examples * torch.eye(2).double()
        return widest(apart(torch.linalg.inv(gamma), exact), apart(found.matrix, exact))

    spectrum = torch.diag(torch.tensor([1.0, 1.0, 0.25, 2.25, 1.0]).double())
    return Evidence(
        printed=gap(1.0),
        control=gap(trial.control(0.0, 1.0)),
        table={
            "loss, d = 10, N = 20": optimal_linear_attention(torch.eye(10).double(), examples=20).loss,
            "loss, spectrum of Ahn et al., N = 20": optimal_linear_attention(spectrum, examples=20).loss,
        },
    )


@claim(
    "I7",
    source=Source.OURS,
    place="on Theorem 1 of Ahn et al. 2023: tasks with a prior, and noise",
    title="The best layer for a prior of tasks and noise",
    wording=(
        "With a prior covariance Ψ of the tasks and noise of variance σ^2, the best layer is A* = [(1 + 1/N) Ψ Σ"
        " + ((tr Ψ Σ + σ^2) / N) I]^{-1} Ψ."
    ),
    reading=(
        "For random Σ and Ψ in 2 dimensions, 3 examples and σ = 0.7, the matrix of optimal_linear_attention is"
        " the minimizer over all matrices A of predictions (1/N) Σ_i y_i x_i^T A x, and its losses of that matrix and"
        " of the best plain step A = η I are the least ones, to 1e-9."
    ),
    reference="exact quadrature over all contexts with Gauss-Hermite nodes",
    formula="A* = [(1 + 1/N) Ψ Σ + ((tr Ψ Σ + σ^2) / N) I]^{-1} Ψ",
)
def prior_and_noise(trial: Trial) -> Evidence:
    """Optima against exact quadrature for a random prior and noise; the control forgets the noise."""
    (sigma, psi), examples, noise = covariances(trial, 2), 3, 0.7
    moment = quadrature_moment(sigma, psi, noise, examples, normal_nodes())
    exact, cross = torch.linalg.solve(moment, sigma @ psi), sigma @ psi @ sigma
    plain = optimal_linear_attention(sigma, examples=examples).matrix
    # E (z^T A x - w^T x)^2 with E z z^T = M is tr ΨΣ - 2 tr ΣΨΣA + tr AΣA^T M: put in A* and the best η I.
    squares = torch.stack([(cross * exact.mT).sum(), cross.trace() ** 2 / (moment @ sigma).trace()])

    def gap(deviation: float) -> Gap:
        found = optimal_linear_attention(sigma, psi, noise=deviation, examples=examples)
        losses = torch.tensor([found.loss, found.step_loss], dtype=torch.float64)
        return widest(apart(found.matrix, exact), apart(losses, (psi @ sigma).trace() - squares))

    return Evidence(
        printed=gap(noise),
        control=gap(trial.control(0.0, noise)),
        table={
            "largest difference from the matrix of isotropic tasks without noise": float((plain - exact).abs().max()),
            "loss, d = 10, N = 20, σ = 0.5": isotropic_optimum(10, examples=20, noise=0.5).loss,
        },
    )


@claim(
    "I8",
    source=Source.OURS,
    place="on the rate that the public code of von Oswald et al. 2022 finds by a scan",
    title="The best rate of one step, from moments of the inputs",
    wording=(
        "For isotropic inputs that need not be Gaussian, the best rate of one step is a ratio of their moments"
        " up to the fourth."
    ),
    reading=(
        "For independent coordinates uniform within ± a, with one random a from 0.5 to 1.5, in 2 dimensions and 3"
        " examples, the printed rate times I, and the optimum and the rate of optimal_linear_attention, are the"
        " minimizer over all matrices A, to 1e-9."
    ),
    reference="exact quadrature over all contexts with Gauss-Legendre nodes",
    formula="η* = d s^2 / tr E[C^2], tr E[C^2] = E|x|^4 / N + (1 − 1/N) d s^4",
)
def uniform_inputs(trial: Trial) -> Evidence:
    """Rates and optima for uniform inputs against exact quadrature; the control takes the inputs for Gaussian."""
    width, examples = 0.5 + float(torch.rand(1, generator=trial.generator)), 3
    variance, nodes = width**2 / 3, uniform_nodes()
    exact = by_quadrature(variance * torch.eye(2).double(), torch.eye(2).double(), 0.0, examples, nodes)

    def gap(fourth: float) -> Gap:
        found = uniform_optimum(width, 2, examples, fourth)
        square = (2 * fourth + 2 * variance**2) / examples + (1 - 1 / examples) * 2 * variance**2
        rate = torch.tensor(2 * variance / square, dtype=torch.float64)
        step = torch.tensor(found.step, dtype=torch.float64)
        return widest(apart(found.matrix, exact), apart(rate * torch.eye(2).double(), exact), apart(step, exact[0, 0]))

    table = {}
    for bound in (0.5, 1.0):
        found = uniform_optimum(bound, 10, 10, bound**4 / 5)
        table[f"best rate, d = N = 10, inputs within {bound:g}"] = found.step
        table[f"half of its loss, inputs within {bound:g}"] = found.loss / 2
    return Evidence(printed=gap(width**4 / 5), control=gap(trial.control(3 * variance**2, width**4 / 5)), table=table)


def covariances(trial: Trial, dim: int) -> tuple[Tensor, Tensor]:
    roots = normals(trial)(2, dim, dim)
    first, second = roots @ roots.mT / dim + 0.2 * torch.eye(dim).double()
    return first, second


def normal_nodes() -> Tensor:
    """Return Gauss-Hermite nodes and weights of a standard normal number, exact to the fifth power; ``(2, 3)``."""
    return torch.tensor([[-math.sqrt(3), 0.0, math.sqrt(3)], [1 / 6, 2 / 3, 1 / 6]], dtype=torch.float64)


def uniform_nodes() -> Tensor:
    """Return Gauss-Legendre nodes and weights of a centered uniform number of variance one."""
    return torch.tensor([[-math.sqrt(9 / 5), 0.0, math.sqrt(9 / 5)], [5 / 18, 4 / 9, 5 / 18]], dtype=torch.float64)


def uniform_optimum(width: float, dim: int, examples: int, fourth: float) -> Optimum:
    """Return the optimum for coordinates within ± width, with a fourth moment that may be wrong."""
    variance = torch.full((dim,), width**2 / 3, dtype=torch.float64)
    moment = independent_moment(variance, torch.full_like(variance, fourth))
    return optimal_linear_attention(torch.diag(variance), examples=examples, fourth_moment=moment)


def by_quadrature(sigma: Tensor, psi: Tensor, noise: float, examples: int, nodes: Tensor) -> Tensor:
    found: Tensor = torch.linalg.solve(quadrature_moment(sigma, psi, noise, examples, nodes), sigma @ psi)
    return found


def quadrature_moment(sigma: Tensor, psi: Tensor, noise: float, examples: int, nodes: Tensor) -> Tensor:
    """Return the second moment of (1/N) Σ y x over all contexts of nodes, exact for fourth powers; ``(dim, dim)``."""
    points, mass = nodes
    grid = torch.tensor(list(itertools.product(range(len(points)), repeat=len(sigma) * examples)))
    inputs = points[grid].unflatten(-1, (examples, len(sigma))) @ torch.linalg.cholesky(sigma).mT
    moment = inputs.mT @ inputs / examples
    each = moment @ psi @ moment + noise**2 / examples * moment
    return torch.einsum("n,nij->ij", mass[grid].prod(-1), each)
