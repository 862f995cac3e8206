"""Section 3.2 of the paper: divergences, the conjugate of the log normaliser, and the Fisher metric."""

from __future__ import annotations

import torch
from torch import Tensor

from massieu.claims.claim import Evidence, Gap, Trial, Verdict
from massieu.claims.experiment import above, apart, jacobian, normals, widest
from massieu.claims.measures.families import PAPER
from massieu.claims.registry import claim
from massieu.duality import bregman, conjugate, natural_from_mean
from massieu.measures import Points
from massieu.measures.measure import gradient


@claim(
    "C14",
    source=f"{PAPER}, section 3.2",
    statement="The Bregman divergence of log Z between η_1 and η_2 is the Kullback-Leibler divergence of p_1 from p_2.",
    formula="B_G(η_1, η_2) = KL(p_1 ‖ p_2)",
    correction="The order is the other one: B_G(η_1, η_2) = KL(p_2 ‖ p_1), and B_{G*}(ū_1, ū_2) = KL(p_1 ‖ p_2).",
    expected=Verdict.FAILS,
)
def bregman_order(trial: Trial) -> Evidence:
    """Both orders of the divergence, from the probabilities themselves, for log Z and for its conjugate; the control
    takes log Z of the same points with weights, which these probabilities lack.
    """
    normal = normals(trial)
    measure = Points(normal(9, 4))
    first, second = 1.5 * normal(2, 1, 4)
    weighted = Points(measure.support, normal(9))
    log_p, log_q = (torch.log_softmax(each @ measure.support.T, -1) for each in (first, second))
    forward = (log_p.exp() * (log_p - log_q)).sum(-1)
    backward = (log_q.exp() * (log_q - log_p)).sum(-1)

    def divergences(of: Points) -> tuple[Tensor, Tensor]:
        dual = bregman(lambda mean: conjugate(of, mean), of.mean(first), of.mean(second))
        return bregman(of, first, second), dual

    def gap(of: Points) -> Gap:
        found, dual = divergences(of)
        return widest(apart(found, backward), apart(dual, forward))

    found, dual = divergences(measure)
    return Evidence(
        printed=apart(found, forward),
        instead=gap(measure),
        control=gap(trial.control(weighted, measure)),
        table={
            "B_G(η_1, η_2)": float(found),
            "KL(p_1 ‖ p_2)": float(forward),
            "KL(p_2 ‖ p_1)": float(backward),
            "B_{G*}(ū_1, ū_2)": float(dual),
        },
    )


@claim(
    "C15",
    source=f"{PAPER}, equation 6",
    statement="The conjugate of log Z is a supremum over η, attained where the mean of the family is its argument.",
    formula="G*(ū) = sup_η (η·ū − G(η)), ū = ∇log Z(η)",
    expected=Verdict.HOLDS,
)
def conjugate_attained(trial: Trial) -> Evidence:
    """η found from its mean, the value there, and 1280 other values, none larger; the control pairs η with other means.

    It is attained for means inside the hull of the support, which every mean of the family is; outside it is infinite.
    """
    normal = normals(trial)
    support, log_weight, natural = normal(12, 4), 0.5 * normal(12), normal(5, 4)
    measure = Points(support, log_weight)
    mean = torch.softmax(natural @ support.T + log_weight, -1) @ support

    def objective(eta: Tensor, mean: Tensor) -> Tensor:
        return (eta * mean).sum(-1) - torch.logsumexp(eta @ support.T + log_weight, -1)

    others = natural + torch.tensor([0.01, 0.1, 1.0, 10.0])[:, None, None, None] * normal(4, 64, 5, 4)

    def gap(mean: Tensor) -> Gap:
        value = conjugate(measure, mean)
        return widest(
            apart(natural_from_mean(measure, mean).natural, natural),
            apart(value, objective(natural, mean)),
            above(objective(others, mean), value),
        )

    found, far = natural_from_mean(measure, mean), conjugate(measure, 10 * support[:1])
    return Evidence(
        printed=gap(mean),
        control=gap(trial.control(mean.roll(1, 0), mean)),
        table={
            "Newton steps": float(found.steps.max()),
            "residual": float(found.residual.max()),
            "infinite outside the hull": float(torch.isinf(far).item()),
        },
    )


@claim(
    "C16",
    source=f"{PAPER}, section 3.2, after equation 6",
    statement="The conjugate is minus what is left of the entropy when the mean of log h is taken off.",
    formula="G*(ū) = −(H(p) − E_p[log h])",
    correction="The parenthesis closes earlier: G*(ū) = −H(p) − E_p[log h] = KL(p ‖ h).",
    expected=Verdict.HOLDS_CORRECTED,
)
def parenthesis(trial: Trial) -> Evidence:
    """The conjugate at a mean against entropies written out, with both signs; the control leaves log h out."""
    normal = normals(trial)
    support, log_weight, natural = normal(9, 4), normal(9), normal(5, 4)
    measure = Points(support, log_weight)
    log_p = torch.log_softmax(natural @ support.T + log_weight, -1)
    mean, entropy = log_p.exp() @ support, -(log_p.exp() * log_p).sum(-1)
    log_density = log_p.exp() @ log_weight
    value = conjugate(measure, mean)

    def gap(log_density: Tensor) -> Gap:
        return widest(
            apart(value, -entropy - log_density),
            apart(measure.conjugate(natural), value),
            apart(measure.entropy(natural), entropy),
        )

    return Evidence(
        printed=gap(-log_density),
        corrected=gap(log_density),
        control=gap(trial.control(torch.zeros_like(log_density), log_density)),
        table={
            "G*": float(value[0]),
            "−H − E[log h]": float((-entropy - log_density)[0]),
            "as printed": float((log_density - entropy)[0]),
        },
    )


@claim(
    "C17",
    source=f"{PAPER}, section 3.2, after equation 6",
    statement="The dual problem of attention is a variant of the maximum entropy problem.",
    formula="−G*(ū) = max {H(p) + E_p[log h] : E_p[x] = ū}",
    expected=Verdict.HOLDS,
)
def maximum_entropy(trial: Trial) -> Evidence:
    """The maximum over all probabilities of a given mean, by Newton steps among them; the control maximises H alone."""
    normal = normals(trial)
    atoms, dim = trial.size(10, 60), trial.size(3, 16)
    support, log_weight = normal(atoms, dim), normal(atoms)
    feasible = torch.softmax(0.5 * normal(atoms), -1)
    mean = (feasible @ support)[None]
    measure = Points(support, log_weight)

    def objective(p: Tensor) -> Tensor:
        return (p * (log_weight - p.log())).sum()

    value, member = -conjugate(measure, mean)[0], measure.probabilities(natural_from_mean(measure, mean).natural)[0]

    def gap(log_weight: Tensor) -> Gap:
        best = _most_entropic(support, log_weight, feasible)
        return widest(apart(objective(best), value), apart(best, member))

    nothing = torch.zeros_like(log_weight)
    return Evidence(
        printed=gap(log_weight),
        control=gap(trial.control(nothing, log_weight)),
        table={
            "maximum": float(objective(_most_entropic(support, log_weight, feasible))),
            "−G*": float(value),
            "at the start": float(objective(feasible)),
            "where H alone is largest": float(objective(_most_entropic(support, nothing, feasible))),
        },
    )


def _most_entropic(support: Tensor, log_weight: Tensor, start: Tensor) -> Tensor:
    """The p with the mean of ``start`` and the largest H(p) + E_p[log h], by damped Newton steps from there."""
    fixed = torch.cat([support, torch.ones_like(support[:, :1])], -1).T
    free = torch.linalg.svd(fixed).Vh[len(fixed) :]
    p = start
    for _ in range(60):
        step = free.T @ torch.linalg.solve((free / p) @ free.T, free @ (log_weight - p.log()))
        # Half of the way to the boundary at most.
        p = p + step * (-0.5 / (step / p).min().clamp(max=-0.5))
    return p


@claim(
    "C18",
    source=f"{PAPER}, section 3.2",
    statement="The Hessian of log Z, the Fisher information, is the second moment of the sufficient statistic.",
    formula="∇^2 log Z(η) = E[u u^⊤]",
    correction="It is the centred one: ∇^2 log Z = E[u u^⊤] − ū ū^⊤; E[u u^⊤] = ∇^2 Z / Z, the same only where ū = 0.",
    expected=Verdict.FAILS,
)
def uncentred_hessian(trial: Trial) -> Evidence:
    """The Hessian by autograd against both moments and the variance of the score; the control takes another query."""
    normal = normals(trial)
    dim = trial.size(5, 16)
    support, natural = normal(9 * dim // 5, dim), normal(4, dim)

    def slope(eta: Tensor) -> Tensor:
        return gradient(lambda each: torch.logsumexp(each @ support.T, -1), eta)

    truth = jacobian(slope, natural)
    second = torch.einsum("qn,nd,ne->qde", torch.softmax(natural @ support.T, -1), support, support)

    def gap(natural: Tensor) -> Gap:
        p = torch.softmax(natural @ support.T, -1)
        score = jacobian(lambda eta: torch.log_softmax(eta @ support.T, -1), natural)  # of every atom
        variance = torch.einsum("qn,qnd,qne->qde", p, score, score)
        return widest(apart(truth, Points(support).fisher(natural)), apart(truth, variance))

    return Evidence(
        printed=apart(truth, second),
        instead=gap(natural),
        control=gap(trial.control(-natural, natural)),
        table={"E[u u^⊤], relative error": float((second - truth).norm() / truth.norm())},
    )
