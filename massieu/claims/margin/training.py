"""The three motivations of the slides, watched while small transformers train from scratch."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from massieu.claims.claim import Curve, Evidence, Gap, Trial, Verdict
from massieu.claims.margin.selection_models import MOTIVATION, SETBACK, SPARSE, setback
from massieu.claims.registry import claim
from massieu.monitor.runs import Kind, Run, training_run

EVERY = 20  # steps between readings
ATOMS = 32.5  # that a row sees: the mean over the rows of a causal window of 64
FEW = 0.25  # of the heads


@claim(
    "S4",
    source=f'{MOTIVATION} 1, "Attention map is sparse"',
    statement="Attention maps are sparse: rows of a model that has begun to learn text rest on few of their tokens.",
    formula="1 / (N Σ p²) ≤ 1/4",
    correction=(
        "A model that has left the unigram loss behind reads nearly all tokens, hardly fewer than untrained: maps"
        " that are sparse come later in training, or where it fails."
    ),
    expected=Verdict.FAILS,
    trials=2,
)
def sparse_while_learning(trial: Trial) -> Evidence:
    """Effective share of the visible tokens, mean over heads, after a run, and what is missing to all of them; the
    control trains by the unstable recipe, whose heads do get sparse."""
    steps = trial.size(120, 480)
    run = watched("stable", trial.seed, steps)
    shares = heads_of(run, "effective_atoms") / ATOMS

    def gap(kind: Kind) -> Gap:
        return Gap(1 - float(heads_of(watched(kind, trial.seed, steps), "effective_atoms")[-1].mean()) / ATOMS, 0.1)

    return Evidence(
        printed=Gap(float(shares[-1].mean()), SPARSE),
        instead=gap("stable"),
        control=gap(trial.control("unstable", "stable")),
        table={
            "effective share, untrained": float(shares[0].mean()),
            "in the sparsest head": float(shares[-1].min()),
            "mass of the top token": float(heads_of(run, "peak")[-1].mean()),
            "mass of the top token, untrained": float(heads_of(run, "peak")[0].mean()),
            "loss of the last ten steps": sum(run.losses[-10:]) / 10,
        },
    )


@claim(
    "S5",
    source=f'{MOTIVATION} 2, "Attention map gets sparser as training evolves"',
    statement="Attention maps get sparser from the first steps of training on.",
    formula="1 / Σ p² falls from reading to reading",
    correction=(
        "At first they get more diffuse, while the model learns how often words occur and all tokens look alike. After"
        " that they get sparser, and heads end sparser than they began, if only by some percent."
    ),
    expected=Verdict.HOLDS_CORRECTED,
    trials=2,
)
def sparser_while_learning(trial: Trial) -> Evidence:
    """Rises of the mean effective number of tokens over its whole change, and the share of heads that end with more of
    them than they began with; the control reads the run backwards."""
    run = watched("stable", trial.seed, trial.size(120, 480))
    atoms = heads_of(run, "effective_atoms")
    means, order = atoms.mean(-1), torch.arange(len(atoms))

    def gap(given: Tensor) -> Gap:
        return Gap(1 - _share_below(atoms[given]), FEW)

    return Evidence(
        printed=Gap(float(setback(-means)), SETBACK),
        corrected=gap(order),
        control=gap(trial.control(order.flip(0), order)),
        table={
            "most diffuse at step": float(means.argmax() * EVERY),
            "most diffuse over first": float(means.max() / means[0]),
            "last over first": float(means[-1] / means[0]),
        },
        curve=_curve(run, "effective_atoms", "perplexity"),
    )


@claim(
    "S6",
    source=f'{MOTIVATION} 3, "Attention weights increase in norm"',
    statement="Attention weights increase in norm while a model learns.",
    formula="‖W_Q^⊤ W_K‖_F rises from reading to reading",
    expected=Verdict.HOLDS,
    trials=2,
)
def growing_while_learning(trial: Trial) -> Evidence:
    """Falls of the mean norm over its whole change; the control reads the run backwards."""
    run = watched("stable", trial.seed, trial.size(120, 480))
    norms = heads_of(run, "qk_size")
    order = torch.arange(len(norms))

    def gap(given: Tensor) -> Gap:
        return Gap(float(setback(norms[given].mean(-1))), SETBACK)

    variance = heads_of(run, "score_variance").mean(-1)
    return Evidence(
        printed=gap(order),
        control=gap(trial.control(order.flip(0), order)),
        table={
            "last over first": float(norms[-1].mean() / norms[0].mean()),
            "heads that end above their start": 1 - _share_below(norms),
            "variance of the scores, last over first": float(variance[-1] / variance[0]),
            "and its smallest over first": float(variance.min() / variance[0]),
        },
        curve=_curve(run, "qk_size", "qk_norm"),
    )


@functools.lru_cache(maxsize=16)
def watched(kind: Kind, seed: int, steps: int) -> Run:
    """A run that is read at its last step too, trained once in a process."""
    return training_run(kind, seed, every=EVERY, steps=steps + 1)


def heads_of(run: Run, quantity: str) -> Tensor:
    """A quantity of every head at every reading, ``(readings, heads of all layers)``."""
    return torch.stack([reading.heads[quantity].flatten() for reading in run.readings])


def _share_below(values: Tensor) -> float:
    """How many heads end below their start."""
    return float((values[-1] < values[0]).double().mean())


def _curve(run: Run, *quantities: str) -> Curve:
    means = {name: heads_of(run, name).mean(-1) for name in quantities}
    series: dict[str, Sequence[float]] = {name.replace("_", " "): mean.tolist() for name, mean in means.items()}
    return Curve([reading.step for reading in run.readings], series, "training step", "mean over heads")
