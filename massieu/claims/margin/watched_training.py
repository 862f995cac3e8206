"""The three motivations of the slides, watched while small transformers train from scratch.

Every number is one of a curve over the training steps, so that the verdicts do not depend on the length of a run.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from massieu.claims.claim import Curve, Evidence, Gap, Source, Trial, Verdict
from massieu.claims.experiment import widest
from massieu.claims.margin.selection_models import SETBACK, SPARSE, setback
from massieu.claims.registry import claim
from massieu.claims.training_runs import Kind, TrainingRun, training_run

EVERY = 20  # steps between readings
ATOMS = 32.5  # that a row sees: the mean over the rows of a causal window of 64
HALF = 0.5  # of these
FEW = 0.25  # of the heads: a clear minority
RISE = 0.005  # of the mean: half of the rise in the first runs


@claim(
    "S4",
    source=Source.SLIDES,
    place="optimization, motivation 1",
    title="Attention maps are sparse while a small model learns",
    wording="The attention map is sparse.",
    reading=(
        "Our reading, for models in training and with sparse as at most a quarter: after a run of 120 steps (full: 480)"
        " of a transformer of three layers on text, 1 / Σ p² over the number of tokens that a row sees, each averaged"
        " over rows and their ratio over heads, is at most 1/4."
    ),
    reference="the same measurement in a run with much too high learning rates, whose heads do get sparse",
    formula="1 / (N Σ p²) ≤ 1/4",
    correction=(
        "At every reading of these runs rows rest, on average, on more than half of their tokens: on 98% untrained, 96%"
        " to 97% at the end of 120 steps, about 80% at the end of 480. Maps do get sparse in runs that fail because of"
        " much too high learning rates."
    ),
    expected=Verdict.FAILS,
    trials=2,
)
def sparse_while_learning(trial: Trial) -> Evidence:
    """Effective share of the visible tokens after a run and at its lowest; the control trains unstably."""
    run = watched("stable", trial.seed, trial.size(120, 480))
    shares = heads_of(run, "effective_atoms") / ATOMS

    def gap(kind: Kind) -> Gap:
        found = heads_of(watched(kind, trial.seed, trial.size(120, 480)), "effective_atoms").mean(-1) / ATOMS
        return Gap(1 - float(found.min()), HALF)

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
    source=Source.OURS,
    place="on motivation 2 of the slides: the first steps of training",
    title="Attention maps first get more diffuse, then sparser",
    wording="While a small transformer learns, its attention maps first get more diffuse, and sparser from then on.",
    reading=(
        "In 20 steps of training a transformer of three layers on text the mean over its heads of 1 / Σ p² rises by at"
        " least half a percent, while the model learns the frequencies of words; from then to the end of 120 steps"
        " (full: 480) it rises in at most a quarter of the heads. The control reads the run backwards. The slides say"
        " that maps get sparser as training evolves, which S2 tests with longer training."
    ),
    reference="the number of tokens on which a row rests before training",
    formula="1 / Σ p² rises in 20 steps, and falls from step 20 on",
    trials=2,
)
def sparser_while_learning(trial: Trial) -> Evidence:
    """Rise of effective tokens in 20 steps, share of heads that rise later; the control is the run backwards."""
    run = watched("stable", trial.seed, trial.size(120, 480))
    atoms = heads_of(run, "effective_atoms")
    order = torch.arange(len(atoms))

    def gap(given: Tensor) -> Gap:
        mean = atoms[given].mean(-1)
        rise = float(mean[1] / mean[0]) - 1
        return widest(Gap(RISE / max(rise, 1e-9), 1.0), Gap(_share_above(atoms[given][1:]), FEW))

    means = atoms.mean(-1)
    below = (means[1:] < means[0]).nonzero().flatten() + 1
    return Evidence(
        printed=gap(order),
        control=gap(trial.control(order.flip(0), order)),
        table={
            "heads more diffuse after 20 steps than untrained": _share_above(atoms[:2]),
            "heads more diffuse at the end than after 20 steps": _share_above(atoms[1:]),
            "heads more diffuse at the end than untrained": _share_above(atoms),
            "most diffuse at step": float(means.argmax() * EVERY),
            "most diffuse over first": float(means.max() / means[0]),
            "below its start from step": float(below[0] * EVERY) if len(below) else float("nan"),
            "last over first": float(means[-1] / means[0]),
        },
        curve=_curve(run, "effective_atoms", "perplexity"),
    )


@claim(
    "S6",
    source=Source.SLIDES,
    place="optimization, motivation 3",
    title="Attention weights grow while a small model learns",
    wording="Attention weights increase in norm.",
    reading=(
        "In 120 steps (full: 480) of training a transformer of three layers on text, the mean over its heads of the"
        " Frobenius norm of the score matrix falls from one reading, every 20 steps, to a later one by at most a"
        " tenth of its whole change."
    ),
    reference="the same run read backwards",
    formula="‖W_Q^⊤ W_K‖_F rises from reading to reading",
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
            "heads that end above their start": _share_above(norms),
            "variance of the scores, last over first": float(variance[-1] / variance[0]),
            "and its smallest over first": float(variance.min() / variance[0]),
        },
        curve=_curve(run, "qk_size", "qk_norm"),
    )


@functools.lru_cache(maxsize=16)
def watched(kind: Kind, seed: int, steps: int) -> TrainingRun:
    """A run that is read at its last step too, trained once in a process."""
    return training_run(kind, seed, every=EVERY, steps=steps + 1)


def heads_of(run: TrainingRun, quantity: str) -> Tensor:
    """A quantity of every head at every reading, ``(readings, heads of all layers)``."""
    return torch.stack([reading.heads[quantity].flatten() for reading in run.readings])


def _share_above(values: Tensor) -> float:
    return float((values[-1] > values[0]).double().mean())


def _curve(run: TrainingRun, *quantities: str) -> Curve:
    means = {name: heads_of(run, name).mean(-1) for name in quantities}
    series: dict[str, Sequence[float]] = {name.replace("_", " "): mean.tolist() for name, mean in means.items()}
    return Curve([reading.step for reading in run.readings], series, "training step", "mean over heads")
