"""Attention sinks: tokens that take the mass of rows with nothing to say."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from massieu.claims.claim import Evidence, Gap, Source, Trial
from massieu.claims.experiment import apart, fit, normals, widest
from massieu.claims.registry import claim

CONTENT, TOKENS = 4, 5  # coordinates of the content; tokens of a sequence, the start among them


class Head(NamedTuple):
    """Outputs and weights of a head on sequences, and its map from contents to values."""

    output: Tensor
    weights: Tensor
    value: Tensor


@claim(
    "R12",
    source=Source.RAN_MILO,
    place="abstract (arXiv 2603.11487); the bound is ours",
    title="A trigger-conditional mean needs a sink",
    wording=(
        "A softmax head that returns the average of all preceding tokens at a trigger token, and zero otherwise, must"
        " put the mass of all other rows on a fixed token; attention by ReLU without normalization solves the task"
        " without a sink."
    ),
    reading=(
        "Our reading: for one head of size seven trained, from up to six starts, on 200 random sequences of a start"
        " token and four tokens with contents of norm two in four dimensions. On 500 unseen ones its root mean square"
        " error is below 0.03, rows of tokens that are no triggers have a mass of at least 0.9 on the start on average,"
        " and no such row has more mass off it than √k ‖o‖ / s, with its output o, k contents and s the least singular"
        " value of their values away from that of the start. A head of ReLUs with weights that we set solves the task"
        " to 1e-12 with no mass on the start in any row; as the control it fails by that mass alone."
    ),
    reference="the task written out, and the bound by singular values, which holds for any row of any head",
    formula="‖o‖ = ‖Σ_j p_j v_j‖ ≥ s ‖p_content‖₂ ≥ s m / √k",
)
def necessary_sink(trial: Trial) -> Evidence:
    """Errors, mass on the start and the bound on mass off it; the control is a head of ReLUs."""
    inputs, targets = _sequences(trial, 200)
    trained = _train(trial, inputs, targets)
    unseen, expected = _sequences(trial, 500)
    plain = unseen[:, 1:, 1] == 0

    def gap(head: Head) -> Gap:
        error = float((head.output - expected)[:, 1:].square().mean().sqrt())
        on, off = head.weights[:, 1:, 0][plain], head.weights[:, 1:, 1:].sum(-1)
        excess = (off - _allowed(unseen, head))[plain]
        return widest(Gap(error, 0.03), Gap(float(1 - on.mean()), 0.1), Gap(max(float(excess.max()), 0.0), 1e-6))

    softmax, relu = _softmax_head(unseen, *trained), _relu_head(unseen)
    solved = apart(relu.output[:, 1:], expected[:, 1:], 1e-12)
    return Evidence(
        printed=widest(gap(softmax), solved, Gap(float(relu.weights[:, 1:, 0].abs().max()), 1e-12)),
        control=gap(trial.control(relu, softmax)),
        table={
            "largest error of the head of ReLUs": solved.measured,
            "mass of plain rows on the start": float(softmax.weights[:, 1:, 0][plain].mean()),
            "mass of triggers on the start": float(softmax.weights[:, 1:, 0][~plain].mean()),
            "mass of plain rows of ReLUs, start and contents": float(relu.weights[:, 1:].sum(-1)[plain].max()),
        },
    )


def _sequences(trial: Trial, count: int) -> tuple[Tensor, Tensor]:
    """Draw tokens (start, trigger, one, content) and targets: the mean of the contents before a trigger."""
    content = 2 * torch.nn.functional.normalize(normals(trial)(count, TOKENS, CONTENT), dim=-1)
    place = torch.randint(2, TOKENS, (count,), generator=trial.generator)
    trigger = torch.nn.functional.one_hot(place, TOKENS).double()[..., None]
    start = torch.zeros(count, TOKENS, 1, dtype=torch.float64)
    start[:, 0] = 1
    content = content * (1 - trigger) * (1 - start)
    before = torch.ones(TOKENS, TOKENS, dtype=torch.float64).tril(-1)
    mean = before @ content / (torch.arange(TOKENS)[:, None] - 1).clamp(min=1)
    return torch.cat([start, trigger, torch.ones_like(start), content], -1), trigger * mean


def _softmax_head(x: Tensor, score: Tensor, value: Tensor) -> Head:
    absent = torch.full((TOKENS, TOKENS), -torch.inf, dtype=torch.float64).triu(1)
    weights = (x @ score @ x.mT + absent).softmax(-1)
    return Head(weights @ x @ value, weights, value)


def _relu_head(x: Tensor) -> Head:
    """Return scores of one for contents under a trigger and of zero elsewhere, over the place of the trigger."""
    score = torch.zeros(x.shape[-1], x.shape[-1], dtype=torch.float64)
    score[1, 2], score[1, 0], score[1, 1] = 1.0, -1.0, -1.0
    place = (torch.arange(TOKENS)[:, None] - 1).clamp(min=1)
    weights = (x @ score @ x.mT).tril().relu() / place
    value = torch.nn.functional.pad(torch.eye(CONTENT, dtype=torch.float64), (0, 0, 3, 0))
    return Head(weights @ x @ value, weights, value)


def _train(trial: Trial, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Fit score and value maps by L-BFGS from small random ones, again where it ends in a local minimum."""
    normal, size, found = normals(trial), x.shape[-1], []

    def loss(score: Tensor, value: Tensor) -> Tensor:
        return (_softmax_head(x, score, value).output - targets)[:, 1:].square().mean()

    for _ in range(6):
        score, value = (0.1 * normal(size, size)).requires_grad_(), (0.1 * normal(size, CONTENT)).requires_grad_()
        fit(functools.partial(loss, score, value), [score, value], max_iter=trial.size(150, 600))
        found.append((float(loss(score, value).detach()), score.detach(), value.detach()))
        if found[-1][0] < 2e-4:
            break
    return min(found, key=lambda each: each[0])[1:]


def _allowed(x: Tensor, head: Head) -> Tensor:
    """Return the most mass of every row that may lie off the start, given its output."""
    values = x @ head.value
    start = values[:, :1]
    away = values - (values @ start.mT) * start / start.square().sum(-1, keepdim=True).clamp(min=1e-300)
    bounds = []
    for row in range(1, TOKENS):
        least = torch.linalg.svdvals(away[:, 1 : row + 1])[:, -1]
        bounds.append(math.sqrt(row) * head.output[:, row].norm(dim=-1) / least.clamp(min=1e-300))
    return torch.stack(bounds, -1)
