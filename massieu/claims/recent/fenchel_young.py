"""Memories with sparse weights: energies from Fenchel-Young losses, and exact retrieval where a margin is met."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from massieu.claims.claim import Evidence, Gap, Source, Trial
from massieu.claims.experiment import above, apart, normals, widest
from massieu.claims.registry import claim
from massieu.measures.measure import gradient
from massieu.memory import Sparse

ALPHAS = (1.5, 2.0, 3.0)


@claim(
    "R9",
    source=Source.SANTOS,
    place="Hopfield-Fenchel-Young networks, proposition on exact retrieval, from memory; abstract seen",
    title="A margin gives exact retrieval in one step",
    wording=(
        "If the Fenchel-Young loss has margin m, a pattern x_i is a stationary point of the energy if and only if"
        " Δ_i ≥ m / β; and if all patterns have length M and Δ_i ≥ m / β + 2 M ε, one iteration retrieves it exactly"
        " from every query at most ε away."
    ),
    reading=(
        "For 20 (full: 80) random patterns of length 4 in 16 (full: 64) dimensions, α-entmax with α of 1.5, 2 and 3,"
        " whose margin is 1 / (α − 1), and the 2-norm entropy, with margin 1: at the least β that meets a condition for"
        " all patterns, one step gives them to 1e-9 from themselves, from ε = 0.2 Δ / M away, for the least Δ, toward"
        " the nearest rival and in a random direction, and for α-entmax the gradient of the energy vanishes at them to"
        " 1e-9; at 0.98 of it the least separated pattern moves, by the gradient too (R14 has the gradient of the"
        " energy of the 2-norm). The control has softmax in the place of α-entmax."
    ),
    reference="weights by bisection for their threshold, in numpy, and the gradient of the energy by autograd",
    formula="Δ_i = x_i·x_i − max_{j≠i} x_i·x_j ≥ m / β + 2 M ε",
)
def exact_retrieval(trial: Trial) -> Evidence:
    """Errors after one step and gradients under the conditions, and movement just below; the control has softmax."""
    normal = normals(trial)
    number, dim, length = trial.size(20, 80), trial.size(16, 64), 4.0
    patterns = length * torch.nn.functional.normalize(normal(number, dim), dim=-1)
    rivals = (patterns @ patterns.T).fill_diagonal_(-torch.inf)
    separation = length**2 - rivals.amax(-1)
    least = float(separation.min())
    reach = 0.4 * least / (2 * length)
    ways = (patterns[rivals.argmax(-1)] - patterns, normal(number, dim))
    cues = [patterns + reach * torch.nn.functional.normalize(way, dim=-1) for way in ways]

    def gap(alpha: float | None, used: float | None) -> Gap:
        margin = 1.0 if alpha is None else 1 / (alpha - 1)
        # The condition is met with equality, but for rounding.
        at_rest, away = (1 + 1e-12) * margin / least, (1 + 1e-12) * margin / (least - 2 * length * reach)
        tried = [(patterns, at_rest), *((cue, away) for cue in cues)]
        gaps = [apart(updated(patterns, state, beta, used), patterns) for state, beta in tried]
        moves = (updated(patterns, patterns, 0.98 * at_rest, used) - patterns)[separation.argmin()]
        gaps.append(Gap(1e-6, max(float(moves.norm()), 1e-300)))
        if used is not None:
            at, below = (gradient(Sparse(patterns, beta, used).energy, patterns) for beta in (at_rest, 0.98 * at_rest))
            gaps += [apart(at, torch.zeros_like(at)), apart(below[separation.argmin()], -moves)]
            scores = at_rest / 3 * cues[1] @ patterns.T
            gaps.append(apart(updated(patterns, cues[1], at_rest / 3, used), by_bisection(scores, used) @ patterns))
        return widest(*gaps)

    some, others = cues[1] @ patterns.T / (2 * least), torch.softmax(normal(100, 1, number), -1)
    warm = Sparse(patterns, 1 / least, alpha=1.0).update(patterns)
    optimal = above(objective(others, some), objective(by_bisection(some, None), some))
    return Evidence(
        printed=widest(*(gap(alpha, alpha) for alpha in (*ALPHAS, None)), optimal),
        control=widest(*(gap(alpha, trial.control(1.0, alpha)) for alpha in ALPHAS)),
        table={
            "least separation": least,
            "reach": reach,
            "error of softmax at a pattern": float((warm - patterns).norm(dim=-1).max()),
        },
    )


@claim(
    "R14",
    source=Source.SANTOS,
    place="Hopfield-Fenchel-Young networks, abstract; update rule and its descent from memory",
    title="Hopfield energies are differences of two losses",
    wording=(
        "The energy of a Hopfield-Fenchel-Young network is the difference of two Fenchel-Young losses, one of which"
        " belongs to a generalized entropy and defines the scores, while the other applies a transformation to the"
        " output, such as the normalization of its length; updates descend it."
    ),
    reading=(
        "For 20 (full: 80) random patterns of length M = 4 in 16 (full: 64) dimensions, α-entmax with α of 1.5, 2 and 3"
        " and the 2-norm entropy, β of 0.3, 1 and 3 times the least of R9, and 20 states: the energy of the memory of"
        " α-entmax is the difference of both losses and the constant (M² − ‖μ‖²) / 2 to 1e-9. The slope of that"
        " difference in a random direction at 10 states is that of the energy by autograd, or minus the step of the"
        " update for the 2-norm, to 1e-4. Our reading of the descent: each of five updates lowers the difference by"
        " half its squared length at least; with the ball of radius M for the second loss, whose update ends with a"
        " normalization, the difference rises by 1e-9 at most. The control has the memory of softmax in the place of"
        " α-entmax."
    ),
    reference="both losses by their definition, with the conjugate of the entropy from weights by bisection, in numpy",
    formula=(
        "E(ξ) = L_Ψ(X^⊤u; ξ) − L_Ω(β X ξ; u) / β + const, L_Ω(z; y) = Ω*(z) + Ω(y) − z·y, u = 1/N,"
        " ξ ← ∇Ψ*(X^⊤ ∇Ω*(β X ξ))"
    ),
)
def difference_of_losses(trial: Trial) -> Evidence:
    """Energies, gradients and updates of memories against losses written out; the control has softmax."""
    normal = normals(trial)
    number, dim, length = trial.size(20, 80), trial.size(16, 64), 4.0
    patterns = length * torch.nn.functional.normalize(normal(number, dim), dim=-1)
    rivals = (patterns @ patterns.T).fill_diagonal_(-torch.inf)
    near, far = patterns[:10] + 0.4 * normal(10, dim), 3 * torch.nn.functional.normalize(normal(10, dim), dim=-1)
    states, way = torch.cat([near, far]), normal(10, dim)
    middle = patterns.mean(0)
    constant = (length**2 - middle.square().sum()) / 2

    def gap(alpha: float | None, used: float | None, share: float) -> Gap:
        margin = 1.0 if alpha is None else 1 / (alpha - 1)
        beta = share * margin / float((length**2 - rivals.amax(-1)).min())
        gaps = []
        uphill = states[::2] - updated(patterns, states[::2], beta, used)
        if used is not None:
            memory = Sparse(patterns, beta, alpha=used)
            gaps = [apart(memory.energy(states), loss_difference(patterns, states, beta, alpha) + constant)]
            uphill = gradient(memory.energy, states[::2])
        ahead, behind = (loss_difference(patterns, states[::2] + h * way, beta, alpha) for h in (1e-7, -1e-7))
        gaps.append(apart((uphill * way).sum(-1), (ahead - behind) / 2e-7, 1e-4))
        for radius in (None, length):
            gaps.append(_rise(patterns, states, beta, alpha, used, radius))
        return widest(*gaps)

    shares = (0.3, 1.0, 3.0)
    return Evidence(
        printed=widest(*(gap(alpha, alpha, share) for alpha in (*ALPHAS, None) for share in shares)),
        control=widest(*(gap(alpha, trial.control(1.0, alpha), share) for alpha in ALPHAS for share in shares)),
    )


def loss_difference(
    patterns: Tensor, states: Tensor, beta: float, alpha: float | None, radius: float | None = None
) -> Tensor:
    """Return the second loss, of half a squared length or of a ball, less the first over beta."""
    scores, even = beta * states @ patterns.T, torch.full_like(patterns[:, 0], 1 / len(patterns))
    middle = even @ patterns
    weight = by_bisection(scores, alpha)
    conjugate = (weight * scores).sum(-1) + _entropy(weight, alpha)
    first = conjugate - _entropy(even, alpha) - scores @ even
    if radius is None:
        second = middle.square().sum() / 2 + states.square().sum(-1) / 2 - states @ middle
    else:
        assert float(states.norm(dim=-1).max()) <= radius * (1 + 1e-12)
        second = radius * middle.norm() - states @ middle
    difference: Tensor = second - first / beta
    return difference


def _entropy(weight: Tensor, alpha: float | None) -> Tensor:
    """Return the entropy of Tsallis, or that of the 2-norm, 1 − ‖y‖."""
    if alpha is None:
        found: Tensor = 1 - weight.norm(dim=-1)
    else:
        found = (weight - weight**alpha).sum(-1) / (alpha * (alpha - 1))
    return found


def _rise(
    patterns: Tensor, states: Tensor, beta: float, alpha: float | None, used: float | None, radius: float | None
) -> Gap:
    """Return the excess over the promised change of the difference of losses, in any of five updates."""
    states, excess = states if radius is None else radius * states / states.norm(dim=-1, keepdim=True), []
    for _ in range(5):
        found = updated(patterns, states, beta, used)
        if radius is not None:
            found = radius * torch.nn.functional.normalize(found, dim=-1)
        before, after = (loss_difference(patterns, each, beta, alpha, radius) for each in (states, found))
        promised = (found - states).square().sum(-1) / 2 if radius is None else torch.zeros_like(before)
        excess.append(after - before + promised)
        states = found
    return above(torch.stack(excess), torch.zeros_like(excess[0]))


def objective(weight: Tensor, scores: Tensor) -> Tensor:
    """Return expected score less length of the weights; the weights of the 2-norm entropy maximize it."""
    gain: Tensor = (weight * scores).sum(-1) - weight.norm(dim=-1)
    return gain


def updated(patterns: Tensor, states: Tensor, beta: float, alpha: float | None) -> Tensor:
    if alpha is None:
        return by_bisection(beta * states @ patterns.T, alpha) @ patterns
    return Sparse(patterns, beta, alpha=alpha).update(states)


def by_bisection(scores: Tensor, alpha: float | None) -> Tensor:
    """Return weights of α-entmax, which is softmax at 1, or of the 2-norm entropy for None.

    The latter are y = [z − τ]_+ / Σ [z − τ]_+ with Σ [z − τ]_+² = 1.
    """
    z = scores.numpy().astype(np.longdouble)
    if alpha == 1:
        weight = np.exp(z - z.max(-1, keepdims=True))
        return torch.from_numpy((weight / weight.sum(-1, keepdims=True)).astype(np.float64))
    order = 1.0 if alpha is None else alpha - 1
    power = 2.0 if alpha is None else 1 / order
    top = order * z.max(-1, keepdims=True)
    low, high = top - 1, top
    for _ in range(100):
        middle = (low + high) / 2
        heavy = (np.maximum(order * z - middle, 0) ** power).sum(-1, keepdims=True) >= 1
        low, high = np.where(heavy, middle, low), np.where(heavy, high, middle)
    weight = np.maximum(order * z - low, 0)
    weight = weight if alpha is None else weight**power
    return torch.from_numpy((weight / weight.sum(-1, keepdims=True)).astype(np.float64))
