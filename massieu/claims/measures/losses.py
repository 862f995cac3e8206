"""Sections 2.2 and 2.4 of the paper: the dual of the loss of boosting, and the speed of contrastive losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from massieu.claims.claim import Curve, Evidence, Gap, Source, Trial, Verdict
from massieu.claims.experiment import apart, minimized, normals, widest
from massieu.claims.measures.conjugates import most_entropic
from massieu.claims.registry import claim
from massieu.contrast import adaboost_step, n_pair

ROUNDS = 1e-8  # left of the slope when rounds of boosting end; weights and losses follow to a small multiple of it


@claim(
    "C51",
    source=Source.PAPER,
    place="section 2.4, on Collins et al.",
    title="AdaBoost's loss is the dual of a generalized KL divergence",
    wording=(
        "The sum of exponentials loss of AdaBoost has been interpreted as the dual form of generalized KL divergence."
    ),
    reading=(
        "Our reading: N less the least loss Σ_i e^{−t_i F(x_i)}, over all weighted sums F of the learners, is the"
        " least generalized KL divergence from weights one of all positive weights under which no learner has an"
        " edge, and the boosted weights are those. Three binary learners on 24 examples (in full 400) with all"
        " eight combinations of errors, boosted in turn until no edge exceeds 1e-8, to 1e-6."
    ),
    reference="Newton steps among the weights without edge, in which no loss occurs",
    formula="N − min_F Σ_i e^{−t_i F(x_i)} = min {Σ_i p_i log p_i − p_i + 1 : Σ_i p_i t_i h_j(x_i) = 0}",
)
def boosting_dual(trial: Trial) -> Evidence:
    """Rounds of boosting against the projection of the weights; the control minimizes the logistic loss instead."""
    count = trial.size(24, 400)
    cells = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=torch.float64)] * 3)
    cell = torch.cat([torch.arange(8), torch.randint(8, (count - 8,), generator=trial.generator)])
    margins = cells[cell].T  # right or wrong of three learners, with an example of each combination
    without_edge = 1 / cell.bincount()[cell].double()
    projected = most_entropic(margins, torch.zeros(count, dtype=torch.float64), without_edge)
    divergence = (torch.xlogy(projected, projected) - projected + 1).sum()

    boosted, loss, rounds = boosted_in_turn(margins)

    def logistic(parameters: Tensor) -> Tensor:
        return softplus(-parameters @ margins).sum()

    best = minimized(logistic, torch.zeros(len(margins), dtype=torch.float64))
    logistic_weights = torch.sigmoid(-best @ margins)

    def gap(weights: Tensor, loss: Tensor) -> Gap:
        return widest(apart(weights, projected, 100 * ROUNDS), apart(count - loss, divergence, 100 * ROUNDS))

    real = boosted, loss
    return Evidence(
        printed=gap(*real),
        control=gap(*trial.control((logistic_weights, logistic(best)), real)),
        table={"rounds": float(rounds), "least loss": float(loss), "least divergence": float(divergence)},
    )


def boosted_in_turn(margins: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return weights e^{−t F(x)}, their sum and the rounds of boosting until no learner has an edge, or 300."""
    log_loss = margins.new_tensor(margins.shape[-1]).log()
    log_weight = -log_loss.expand(margins.shape[-1])
    for rounds in range(300):
        if float((margins @ log_weight.exp()).abs().max()) <= ROUNDS:
            break
        found = adaboost_step(margins[rounds % len(margins)], log_weight)
        log_weight, log_loss = found.log_weight, log_loss + found.log_normalizer
    return (log_loss + log_weight).exp(), log_loss.exp(), rounds


@claim(
    "C52",
    source=Source.PAPER,
    place="section 2.2, on Sohn 2016",
    title="Losses with one negative converge slowly, N-pair faster",
    wording=(
        "Because the Bernoulli contrastive loss and the triplet loss converge slowly, Sohn proposed an exponential dot"
        " product probability over multiple examples."
    ),
    reading=(
        "Our reading: with N pairs a linear map learns in at most half of the steps. It embeds 100 classes (in"
        " full 200) from batches of 24 pairs (in full 48), half of the coordinates being noise, each loss with the"
        " step size of four that has the largest mean accuracy on four data sets, and used on four others; counted"
        " are the steps from which on, read every third of 60, accuracy of retrieval is at least the mean of the last"
        " three of the other loss. N pairs with inner products against the Bernoulli loss of these and the triplet"
        " loss of squared distances with margin one decide the printed form."
    ),
    reference="losses with one negative, written out, trained from the same start on the same batches",
    formula="steps(N-pair) ≤ steps(other) / 2",
    correction=(
        "For losses of the same score: with inner products against the Bernoulli and the triplet loss of these,"
        " and with squared distances against the triplet loss. N pairs with inner products did not reach the"
        " accuracy of the triplet loss of distances, which fit these classes better."
    ),
    expected=Verdict.CONDITIONAL,
    trials=2,
)
def speed_of_contrast(trial: Trial) -> Evidence:
    """Steps to the accuracy that another loss ends with; the control races the triplet loss against itself."""
    task = drawn_task(trial)
    curves = {name: learned(loss, is_distance, task) for name, (loss, is_distance) in LOSSES.items()}

    def share(fast: str, slow: str) -> float:
        """Return the share of steps until one loss stays above the last accuracy of another; 1.05 if never."""
        below = (curves[fast] < curves[slow][-3:].mean()).nonzero()
        return (float(below[-1]) + 2 if len(below) else 1.0) / len(curves[slow])

    def gap(of_distances: str) -> Gap:
        pairs = [("N pairs", "Bernoulli"), ("N pairs", "triplet of products"), (of_distances, "triplet")]
        return Gap(max(share(*pair) for pair in pairs), FASTER)

    return Evidence(
        printed=Gap(max(share("N pairs", "Bernoulli"), share("N pairs", "triplet")), FASTER),
        conditional=gap("N pairs of distances"),
        control=gap(trial.control("triplet", "N pairs of distances")),
        table={
            "N pairs against Bernoulli": share("N pairs", "Bernoulli"),
            "N pairs against triplet of products": share("N pairs", "triplet of products"),
            "N pairs against triplet": share("N pairs", "triplet"),
            "N pairs of distances against triplet": share("N pairs of distances", "triplet"),
        },
        curve=Curve(
            x=torch.arange(EVERY, STEPS + 1, EVERY).double().tolist(),
            series={name: curve.tolist() for name, curve in curves.items()},
            x_label="steps",
            y_label="accuracy of retrieval",
        ),
    )


STEPS, EVERY = 60, 3
FASTER = 0.5
RATES = (0.05, 0.1, 0.2, 0.4)


def other(keys: Tensor) -> Tensor:
    return keys.roll(1, -2)


def apart_squared(anchor: Tensor, keys: Tensor) -> Tensor:
    return (anchor - keys).square().sum(-1)


def n_pair_of_distances(anchor: Tensor, keys: Tensor) -> Tensor:
    """N-pair loss with minus squared distances as scores; those of an anchor share its own square."""
    scores = 2 * anchor @ keys.mT - keys.square().sum(-1)[..., None, :]
    return scores.logsumexp(-1) - scores.diagonal(dim1=-1, dim2=-2)


Loss = Callable[[Tensor, Tensor], Tensor]
LOSSES: dict[str, tuple[Loss, bool]] = {  # each with whether it retrieves by distance
    "N pairs": (lambda a, k: n_pair(a, k, reduction="none"), False),
    "N pairs of distances": (n_pair_of_distances, True),
    "Bernoulli": (lambda a, k: softplus(-(a * k).sum(-1)) + softplus((a * other(k)).sum(-1)), False),
    "triplet": (lambda a, k: (1 + apart_squared(a, k) - apart_squared(a, other(k))).clamp(min=0), True),
    "triplet of products": (lambda a, k: (1 + (a * (other(k) - k)).sum(-1)).clamp(min=0), False),
}


class RetrievalTask(NamedTuple):
    """Batches of pairs on eight data sets, a pair of every class to test on, and the first weights."""

    anchors: Tensor
    partners: Tensor
    queries: Tensor
    keys: Tensor
    start: Tensor


def drawn_task(trial: Trial) -> RetrievalTask:
    """Draw classes with centers in half of 24 coordinates and noise in the others, mixed by a rotation."""
    normal = normals(trial)
    sets, classes, pairs = 8, trial.size(100, 200), trial.size(24, 48)
    centers, mixing = normal(sets, classes, 12), torch.linalg.qr(normal(sets, 24, 24)).Q

    def drawn(chosen: Tensor) -> Tensor:
        signal = centers[:, chosen] + 0.4 * normal(sets, *chosen.shape, 12)
        noisy = torch.cat([signal, normal(sets, *chosen.shape, 12)], -1)
        return torch.einsum("s...d,sde->s...e", noisy, mixing)

    chosen = torch.rand(STEPS, classes, generator=trial.generator).argsort(-1)[:, :pairs]
    every = torch.arange(classes)
    return RetrievalTask(drawn(chosen), drawn(chosen), drawn(every), drawn(every), 0.1 * normal(sets, 24, 8))


def learned(loss: Loss, is_distance: bool, task: RetrievalTask) -> Tensor:
    """Return mean accuracies of retrieval in training on four data sets, at the best step size of four others."""
    rates = torch.tensor(RATES, dtype=torch.float64)[:, None, None, None]
    weights = task.start.expand(len(RATES), *task.start.shape)
    right, accuracies = torch.arange(task.keys.shape[1]), []
    for step in range(STEPS):
        weights = weights.detach().requires_grad_()
        losses = loss(task.anchors[:, step] @ weights, task.partners[:, step] @ weights)
        (slope,) = torch.autograd.grad(losses.mean(-1).sum(), weights)
        weights = (weights - rates * slope).detach()
        if (step + 1) % EVERY == 0:
            query, key = task.queries @ weights, task.keys @ weights
            scores = query @ key.mT - (0.5 * key.square().sum(-1)[..., None, :] if is_distance else 0.0)
            accuracies.append((scores.argmax(-1) == right).double().mean(-1))
    accuracy = torch.stack(accuracies, -1)  # (rates, sets, times)
    half = accuracy.shape[1] // 2
    best = accuracy[:, :half].mean((1, 2)).argmax()
    return accuracy[best, half:].mean(0)
