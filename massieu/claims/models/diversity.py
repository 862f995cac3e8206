"""The diversity of pretraining tasks: transformers trained on few functions, on more, and on all."""

from __future__ import annotations

import torch

from massieu.claims.claim import Evidence, Gap, Source, Trial
from massieu.claims.experiment import widest
from massieu.claims.models.learners import pool_of, trained
from massieu.claims.registry import claim
from massieu.context import Linear, Ridge, separate

TASK, EXAMPLES = Linear(3, noise=0.5), 8
FEW, MANY = 2, 64


@claim(
    "R10",
    source=Source.RAVENTOS,
    place="abstract",
    title="Models of few tasks retrieve, of many tasks learn",
    wording=(
        "Below a threshold of the number of pretraining tasks a transformer cannot solve unseen regression tasks and"
        " behaves like the Bayesian estimator whose prior are the pretraining tasks; beyond it, it aligns with ridge"
        " regression and significantly outperforms that estimator."
    ),
    reading=(
        "Our reading: on unseen tasks in 3 dimensions with noise 0.5 and 8 examples, a transformer of two blocks of"
        " width 64 is nearer to the posterior mean over its pool than to ridge regression after training on 2 functions"
        " (500 steps; full: 3,000), and nearer to ridge regression after training on 64 (1,200 steps; full: 3,000): the"
        " share of ridge in the mixture of both nearest to it is at most and at least one half, where both are equally"
        " far in mean square. In full the latter also errs less than the posterior mean over its pool, which shorter"
        " training does not reach, and a pool of 8 is shown. No threshold is located, and no alignment closer than that"
        " is required."
    ),
    reference="ridge regression and the posterior mean over the pool, both exact",
    formula="M ≈ s · ridge + (1 − s) · dMMSE, s(2) ≤ 1/2 ≤ s(64)",
    trials=1,
    slow=True,
)
def task_diversity(trial: Trial) -> Evidence:
    """Shares of ridge regression on unseen tasks; the control swaps the exact predictors for the two models."""
    sizes = [FEW, MANY, *([8] if trial.full else [])]
    table: dict[str, float] = {}

    def row(size: int, exact: bool) -> dict[str, float]:
        pool = pool_of(TASK, size, trial.seed)
        swapped = Ridge(TASK.noise**2) if size == FEW else pool.predict
        steps = trial.size(500 if size == FEW else 1200, 3000)
        ask = swapped if exact else trained(TASK, EXAMPLES, steps, 64, trial.seed, size).predict
        found = separate(ask, TASK, pool, EXAMPLES, torch.Generator().manual_seed(trial.seed + 2))
        novel: dict[str, float] = found.set_index("condition").loc["novel"].to_dict()
        return novel

    def gap(rows: dict[int, dict[str, float]]) -> Gap:
        few, many = rows[FEW], rows[MANY]
        shares = [Gap(max(0.0, few["share"]), 0.5), Gap(max(0.0, 1 - many["share"]), 0.5)]
        return widest(*shares, *([Gap(many["model_error"] / many["retrieval_error"], 1.0)] if trial.full else []))

    own = {size: row(size, False) for size in sizes}
    for size, each in sorted(own.items()):
        table[f"share of ridge, {size} functions"] = each["share"]
        table[f"error on unseen tasks, {size} functions"] = each["model_error"]
        table[f"of the posterior mean over {size}"] = each["retrieval_error"]
    table["of ridge regression"] = own[FEW]["learning_error"]
    swapped = trial.control({size: row(size, True) for size in (FEW, MANY)}, own)
    return Evidence(printed=gap(own), control=gap(swapped), table=table)
