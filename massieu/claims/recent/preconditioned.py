"""Several layers of linear attention: the stationary points that are steps of preconditioned gradient descent."""

from __future__ import annotations

import itertools

import numpy
import torch
from torch import Tensor

from massieu.claims.claim import Evidence, Gap, Source, Trial
from massieu.claims.context.optimal_layers import covariances
from massieu.claims.experiment import apart, fit, normals, widest
from massieu.claims.registry import claim
from massieu.context import gradient_step_layer
from massieu.context.context_descent import regression_tokens

EXAMPLES = 2
STATIONARY = 1e-6  # of a gradient whose other entries are of order one; the minimizer stops at 1e-10


@claim(
    "R8",
    source=Source.AHN,
    place="Theorems 3 and 4 (from memory)",
    title="Deep linear attention may stop at preconditioned descent",
    wording=(
        "For inputs of covariance Σ and tasks of covariance Σ^{-1}, the in-context loss of several layers of linear"
        " attention has critical points where every layer is a step of gradient descent preconditioned by Σ^{-1}: with"
        " layers that only change targets, and with those that move inputs too, by a multiple of the identity."
    ),
    reading=(
        "Our reading: for a random Σ in 2 dimensions, 2 examples and 2 layers (in full 3 where inputs stay). Where"
        " L-BFGS finds the expected loss least over the multiples a_i, or a_i and b_i, its derivatives in all entries"
        " of A_i, or of A_i and B_i, vanish to 1e-6. Two layers of massieu.nn with A = Σ^{-1} / 2 and Σ^{-1} / 4, where"
        " inputs stay, have the errors of which this loss is the mean square, to 1e-9. That these points are global"
        " minima is not tested."
    ),
    reference="autograd through the expected loss, by Gauss-Hermite quadrature over contexts, exact for polynomials",
    formula="A_i = a_i Σ^{-1}, B_i = b_i I ⇒ ∇ E (ŷ − w^T x)^2 = 0 at the best a, b",
)
def stationary_steps(trial: Trial) -> Evidence:
    """Derivatives in all matrices at the best multiples of a shape; the control has the identity in place of Σ^{-1}."""
    (sigma, _), eye = covariances(trial, 2), torch.eye(2).double()
    inverse = torch.linalg.inv(sigma)
    # Exact to degree 9, 13 and 17 in every input; the loss has degree 8, with three layers 12, with moved inputs 16.
    contexts = {count: all_contexts(sigma, count) for count in {5, trial.size(5, 7), 9}}
    table: dict[str, float] = {}

    def gap(shape: Tensor, layers: int, nodes: int, moving: bool) -> Gap:
        best = best_multiples(shape, layers, contexts[nodes], sigma, moving)
        steps, moves = (best[:, i, None, None] * each for i, each in enumerate((shape, eye)))
        steps, moves = (each.detach().clone().requires_grad_() for each in (steps, moves))
        loss = expected_loss(steps, moves if moving else torch.zeros_like(moves), *contexts[nodes], sigma)
        slopes = torch.autograd.grad(loss, [steps, moves] if moving else [steps])
        if shape is inverse:
            table[f"least loss within the family, {layers} layers" + ", inputs move" * moving] = float(loss.detach())
        return Gap(max(float(slope.abs().max()) for slope in slopes), STATIONARY)

    def gaps(shape: Tensor) -> Gap:
        return widest(gap(shape, trial.size(2, 3), trial.size(5, 7), False), gap(shape, 2, 9, True))

    return Evidence(
        printed=widest(gaps(inverse), by_layers(trial, inverse)), control=gaps(trial.control(eye, inverse)), table=table
    )


def expected_loss(steps: Tensor, moves: Tensor, contexts: Tensor, mass: Tensor, sigma: Tensor) -> Tensor:
    """Return the in-context loss of layers with matrices A_i and B_i, shapes ``(layers, dim, dim)``.

    Targets are linear functions of the task, and the query and its slot linear maps of the query, so that the mean over
    tasks and queries is a trace.
    """
    left = residual_map(steps, moves, contexts)
    return mass @ torch.einsum("nij,jk,nlk,li->n", left, torch.linalg.inv(sigma), left, sigma)


def residual_map(steps: Tensor, moves: Tensor, inputs: Tensor) -> Tensor:
    """Return R of each context, ``(contexts, dim, dim)``: x^T R w is the error at a query x for a task w."""
    eye = torch.eye(inputs.shape[2]).to(inputs)
    targets, query, slot = inputs, eye.expand(len(inputs), *eye.shape), torch.zeros_like(eye)
    for step, move in zip(steps, moves, strict=True):
        scores = inputs @ step.mT @ inputs.mT / EXAMPLES  # of token j with key i: x_i^T A x_j
        asked = query.mT @ step.mT @ inputs.mT / EXAMPLES
        slot, query = slot - asked @ targets, query - (asked @ inputs @ move.mT).mT
        targets, inputs = targets - scores @ targets, inputs - scores @ inputs @ move.mT
    return slot + eye


def all_contexts(sigma: Tensor, nodes: int) -> tuple[Tensor, Tensor]:
    """Return inputs ``(contexts, examples, dim)`` at all combinations of Gauss-Hermite nodes, and their masses."""
    points, weights = (torch.from_numpy(each) for each in numpy.polynomial.hermite_e.hermegauss(nodes))
    grid = torch.tensor(list(itertools.product(range(nodes), repeat=EXAMPLES * len(sigma))))
    inputs = points[grid].unflatten(-1, (EXAMPLES, len(sigma))) @ torch.linalg.cholesky(sigma).mT
    return inputs, (weights / weights.sum())[grid].prod(-1)


def best_multiples(shape: Tensor, layers: int, contexts: tuple[Tensor, Tensor], sigma: Tensor, moving: bool) -> Tensor:
    """Return the multiples a_i and b_i of least loss, shape ``(layers, 2)``."""
    eye, scale = torch.eye(len(shape)).to(shape), len(shape) / (shape @ sigma).trace()
    found = torch.stack([0.3 * scale.expand(layers), torch.full((layers,), 0.1 if moving else 0.0).to(shape)], 1)
    found.requires_grad_()

    def loss() -> Tensor:
        moves = found[:, 1, None, None] * eye if moving else torch.zeros(layers, 2, 2).to(shape)
        return expected_loss(found[:, 0, None, None] * shape, moves, *contexts, sigma)

    fit(loss, [found], max_iter=300, tolerance_grad=1e-10, tolerance_change=0.0)
    return found.detach()


def by_layers(trial: Trial, inverse: Tensor) -> Gap:
    """Return the gap of two layers with A = Σ^{-1} / 2 and Σ^{-1} / 4 to the matrices in the expected loss."""
    normal = normals(trial)
    inputs, query, task = normal(6, EXAMPLES, 2), normal(6, 1, 2), normal(6, 2, 1)
    tokens, steps = regression_tokens(inputs, inputs @ task, query), torch.stack([inverse / 2, inverse / 4])
    for step in steps:
        layer = gradient_step_layer(2, 1, step=1.0, examples=EXAMPLES, preconditioner=step, dtype=torch.float64)
        tokens = (tokens + layer(tokens, lengths=EXAMPLES)).detach()
    left = residual_map(steps, torch.zeros_like(steps), inputs)
    return apart(tokens[:, -1, -1] + (query @ task)[:, 0, 0], (query @ left @ task)[:, 0, 0])
