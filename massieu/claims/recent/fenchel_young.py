"""Memories with sparse weights: exact retrieval in one step where the margin of the Fenchel-Young loss is met."""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from massieu.claims.claim import Evidence, Gap, Trial, Verdict
from massieu.claims.experiment import above, apart, normals, widest
from massieu.claims.registry import claim
from massieu.claims.sources import SANTOS
from massieu.memory import Sparse

ALPHAS = (1.5, 2.0, 3.0)


@claim(
    "R9",
    source=SANTOS,
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
        " all patterns, one step gives them to 1e-9 from themselves, from ε = 0.2 Δ / M away, for the least Δ, towards"
        " the nearest rival and in a random direction; at 0.98 of it the least separated pattern moves. The control has"
        " softmax in the place of α-entmax."
    ),
    reference="weights by bisection for their threshold, in numpy",
    formula="Δ_i = x_i·x_i − max_{j≠i} x_i·x_j ≥ m / β + 2 M ε",
    expected=Verdict.HOLDS,
)
def exact_retrieval(trial: Trial) -> Evidence:
    """Errors after one step under the conditions, and movement just below; the control has softmax."""
    normal = normals(trial)
    number, dim, length = trial.size(20, 80), trial.size(16, 64), 4.0
    patterns = length * torch.nn.functional.normalize(normal(number, dim), dim=-1)
    rivals = (patterns @ patterns.T).fill_diagonal_(-torch.inf)
    separation = length**2 - rivals.amax(-1)
    least = float(separation.min())
    reach = 0.4 * least / (2 * length)
    ways = (patterns[rivals.argmax(-1)] - patterns, normal(number, dim))
    cues = [patterns + reach * torch.nn.functional.normalize(way, dim=-1) for way in ways]
    step = functools.partial(updated, patterns)

    def gap(alpha: float | None, used: float | None) -> Gap:
        margin = 1.0 if alpha is None else 1 / (alpha - 1)
        # The condition is met with equality, but for rounding.
        at_rest, away = (1 + 1e-12) * margin / least, (1 + 1e-12) * margin / (least - 2 * length * reach)
        gaps = [apart(step(patterns, at_rest, used), patterns)]
        gaps += [apart(step(cue, away, used), patterns) for cue in cues]
        moves = step(patterns, 0.98 * at_rest, used)[separation.argmin()] - patterns[separation.argmin()]
        gaps.append(Gap(1e-6, max(float(moves.norm()), 1e-300)))
        if used is not None:
            scores = at_rest / 3 * cues[1] @ patterns.T
            gaps.append(apart(step(cues[1], at_rest / 3, used), by_bisection(scores, used) @ patterns))
        return widest(*gaps)

    some = cues[1] @ patterns.T / (2 * least)
    best, others = by_bisection(some, None), torch.softmax(normal(100, 1, number), -1)
    warm = Sparse(patterns, 1 / least, alpha=1.0).update(patterns)
    optimal = above(objective(others, some), objective(best, some))
    return Evidence(
        printed=widest(*(gap(alpha, alpha) for alpha in (*ALPHAS, None)), optimal),
        control=widest(*(gap(alpha, trial.control(1.0, alpha)) for alpha in ALPHAS)),
        table={
            "least separation": least,
            "reach": reach,
            "error of softmax at a pattern": float((warm - patterns).norm(dim=-1).max()),
        },
    )


def objective(weight: Tensor, scores: Tensor) -> Tensor:
    """Expected score less the length of the weights, which the weights of the 2-norm entropy maximize."""
    gain: Tensor = (weight * scores).sum(-1) - weight.norm(dim=-1)
    return gain


def updated(patterns: Tensor, states: Tensor, beta: float, alpha: float | None) -> Tensor:
    """One update with α-entmax, or with the weights of the 2-norm entropy."""
    if alpha is None:
        return by_bisection(beta * states @ patterns.T, alpha) @ patterns
    return Sparse(patterns, beta, alpha=alpha).update(states)


def by_bisection(scores: Tensor, alpha: float | None) -> Tensor:
    """Weights of α-entmax, which is softmax at 1, or of the 2-norm entropy: y = [z − τ]_+ / Σ [z − τ]_+ with a τ for
    which Σ [z − τ]_+² = 1.
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
