"""Section 3.2 of the paper: divergences, the conjugate of the log normaliser, and the Fisher metric."""

from __future__ import annotations

import torch

from massieu.claims.claim import Evidence, Gap, Trial, Verdict
from massieu.claims.families import PAPER, TIGHT
from massieu.claims.registry import claim
from massieu.duality import bregman
from massieu.measures import Points


@claim(
    "C14",
    source=f"{PAPER}, section 3.2",
    statement="The Bregman divergence of log Z between η_1 and η_2 is the Kullback-Leibler divergence of p_1 from p_2.",
    formula="B_G(η_1, η_2) = KL(p_1 ‖ p_2)",
    correction="The order is the other one: B_G(η_1, η_2) = KL(p_2 ‖ p_1).",
    expected=Verdict.FAILS,
)
def bregman_order(trial: Trial) -> Evidence:
    """Both orders of the divergence, from the probabilities themselves."""
    measure = Points(torch.randn(9, 4, generator=trial.generator, dtype=torch.float64))
    first, second = 1.5 * torch.randn(2, 1, 4, generator=trial.generator, dtype=torch.float64)
    log_p, log_q = (torch.log_softmax(each @ measure.support.T, -1) for each in (first, second))
    forward = float((log_p.exp() * (log_p - log_q)).sum())
    backward = float((log_q.exp() * (log_q - log_p)).sum())
    found = float(bregman(measure.log_normalizer, first, second))
    return Evidence(
        printed=Gap(abs(found - forward), TIGHT),
        instead=Gap(abs(found - backward), TIGHT),
        control=Gap(abs(found - float(bregman(measure.log_normalizer, second, first))), TIGHT),
        table={"B_G(η_1, η_2)": found, "KL(p_1 ‖ p_2)": forward, "KL(p_2 ‖ p_1)": backward},
    )
