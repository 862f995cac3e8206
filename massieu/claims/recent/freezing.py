"""The log normalizer of exponentially many random keys: a random energy model, which freezes at a critical norm."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from massieu.claims.claim import Curve, Evidence, Gap, Source, Trial
from massieu.claims.experiment import linspace, widest
from massieu.claims.registry import claim
from massieu.statistics import row_statistics

EULER = 0.5772156649015329
LOAD = 0.5  # α: there are e^{α d} keys
CRITICAL = math.sqrt(2 * LOAD)  # of the query's norm over √d, where the entropy α − β² / 2 of the average vanishes


def limit(beta: float) -> float:
    """Return the limit of log Z / d: annealed below the critical norm, and frozen beyond it."""
    return LOAD + beta**2 / 2 if beta < CRITICAL else beta * CRITICAL


def correction(beta: float, dim: int) -> float:
    """Return the next terms of the mean of log Z in the frozen phase, by the largest scores, a Poisson process."""
    ratio = beta / CRITICAL
    heavy = ratio * math.lgamma(1 - 1 / ratio) + EULER * (ratio - 1)
    return heavy - 0.5 * ratio * math.log(4 * math.pi * LOAD * dim)


@functools.lru_cache
def mean_log_normalizer(beta: float, dim: int) -> float:
    """Return the mean of log Z of e^{α d} independent normal scores of variance β² d, by two integrals.

    E log Z = c + ∫ (e^{−e^t} − (1 − g(t − c))^N) dt for any c, with g(u) = E[1 − exp(−e^{u + s})] for a single score s.
    """
    log_count, spread, center = LOAD * dim, beta * math.sqrt(dim), dim * limit(beta)
    tail = 40 * max(1.0, beta / CRITICAL)  # the law of log Z decays to the right as that of its largest score
    level = linspace(-tail, 40.0, 400)[:, None]
    peak = min(spread, math.sqrt(2 * log_count))
    first, last = peak - 9, peak + 9 + tail / spread
    score = linspace(first, last, max(200, round(2 * spread * (last - first))))
    log_weight = -score.square() / 2 + torch.log((score[1] - score[0]) / math.sqrt(2 * math.pi))
    power = level - center + spread * score
    # 1 − exp(−e^x) is e^x where x is small
    log_share = torch.where(power < -20, power, torch.log(-torch.expm1(-torch.exp(power.clamp(-20, 6)))))
    log_g = torch.logsumexp(log_share + log_weight, -1)
    g = torch.exp(log_g)
    log_power = torch.where(g < 1e-8, log_g, torch.log(-torch.log1p(-g.clamp(1e-8, 1 - 1e-12))))
    missed = torch.exp(-torch.exp(log_count + log_power))
    return center + float(torch.trapezoid(torch.exp(-torch.exp(level[:, 0])) - missed, level[:, 0]))


@claim(
    "R6",
    source=Source.LUCIBELLO,
    place="section on the random energy model (from memory; the abstract and the condensation transition were seen)",
    title="log Z of exponentially many keys freezes",
    wording=(
        "The sum over e^{α d} random patterns is the partition function of a random energy model: its logarithm per"
        " dimension follows the annealed form up to a critical β, and beyond it is linear in β."
    ),
    reading=(
        "Our reading: for α = 1/2, Gaussian keys in 16 dimensions (24 with full sizes) and queries of norm β √d, β ="
        " 0.5, 1.5, 2 and 3, the mean of log Z / d over 128 (96) queries is within 5 standard errors that of e^{α d}"
        " independent levels; for d = 1024 the latter is within 0.02 of α + β² / 2 below β_c = 1 and of β √(2α) above,"
        " there to 0.001 with the correction of order log d / d. The control continues the annealed form past β_c."
    ),
    reference="quadrature of the mean of log Z of independent normal scores, and the correction by a Poisson process",
    formula="log Z / d → α + β² / 2 for β < √(2α), β √(2α) − β log(4π α d) / (2 √(2α) d) + O(1 / d) beyond",
    correction="",
)
def frozen(trial: Trial) -> Evidence:
    """Means of log Z: sampled against finite size, finite size against the limit; the control has the annealed form."""
    dim, betas, large = trial.size(16, 24), (0.5, 1.5, 2.0, 3.0), 1024
    sampled = sampled_logs(trial, dim, betas)
    finite = {beta: mean_log_normalizer(beta, dim) / dim for beta in betas}
    grown = {beta: mean_log_normalizer(beta, large) / large for beta in betas}

    def mean(beta: float, expected: float) -> Gap:
        values = sampled[beta]
        return Gap(abs(float(values.mean()) - expected), 5 * float(values.std()) / math.sqrt(len(values)))

    def gap(annealed: bool) -> Gap:
        if annealed:
            return widest(*(mean(beta, LOAD + beta**2 / 2) for beta in betas))
        sizes = [Gap(abs(grown[beta] - limit(beta)), 0.02) for beta in betas]
        near = [
            Gap(abs(grown[beta] - limit(beta) - correction(beta, large) / large), 1e-3)
            for beta in betas
            if beta > CRITICAL
        ]
        return widest(*(mean(beta, finite[beta]) for beta in betas), *sizes, *near)

    return Evidence(
        printed=gap(annealed=False),
        control=gap(trial.control(True, False)),
        table={f"log Z / d at β = {beta:g}, d = {dim}": float(sampled[beta].mean()) for beta in betas}
        | {f"its limit at β = {beta:g}": limit(beta) for beta in betas},
        curve=Curve(
            betas,
            {
                f"d = {dim}": [float(sampled[beta].mean()) for beta in betas],
                f"d = {large}": list(grown.values()),
                "limit": [limit(beta) for beta in betas],
                "annealed": [LOAD + beta**2 / 2 for beta in betas],
            },
            x_label="β = ‖q‖ / √d",
            y_label="log Z / d",
        ),
    )


def sampled_logs(trial: Trial, dim: int, betas: tuple[float, ...]) -> dict[float, Tensor]:
    """Return log Z / d at orthogonal queries of several norms, for 8 draws of the keys (4 with full sizes)."""
    directions = torch.linalg.qr(torch.randn(dim, dim, generator=trial.generator, dtype=torch.float64))[0]
    found: dict[float, list[Tensor]] = {beta: [] for beta in betas}
    for _ in range(trial.size(8, 4)):
        # Orthogonal queries see independent scores of Gaussian keys.
        keys = torch.randn(round(math.exp(LOAD * dim)), dim, generator=trial.generator, dtype=torch.float64)
        for beta in betas:
            found[beta].append(row_statistics(beta * math.sqrt(dim) * directions, keys).log_normalizer / dim)
    return {beta: torch.cat(parts) for beta, parts in found.items()}
