"""Section 3.2 of the paper: divergences, the conjugate of the log normaliser, and the Fisher metric."""

from __future__ import annotations

import torch
from torch import Tensor

from massieu.claims.claim import Evidence, Trial, Verdict
from massieu.claims.families import PAPER, above, apart, jacobian, normals, widest
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
    """Both orders of the divergence, from the probabilities themselves, for log Z and for its conjugate."""
    normal = normals(trial)
    measure = Points(normal(9, 4))
    first, second = 1.5 * normal(2, 1, 4)
    log_p, log_q = (torch.log_softmax(each @ measure.support.T, -1) for each in (first, second))
    forward = (log_p.exp() * (log_p - log_q)).sum(-1)
    backward = (log_q.exp() * (log_q - log_p)).sum(-1)
    found = bregman(measure, first, second)
    dual = bregman(lambda mean: conjugate(measure, mean), measure.mean(first), measure.mean(second))
    return Evidence(
        printed=apart(found, forward),
        instead=widest(apart(found, backward), apart(dual, forward)),
        control=apart(found, bregman(measure, second, first)),
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

    found, value = natural_from_mean(measure, mean), conjugate(measure, mean)
    others = natural + torch.tensor([0.01, 0.1, 1.0, 10.0])[:, None, None, None] * normal(4, 64, 5, 4)
    strange = mean.roll(1, 0)
    far = conjugate(measure, 10 * support[:1])
    return Evidence(
        printed=widest(
            apart(found.natural, natural),
            apart(value, objective(natural, mean)),
            above(objective(others, mean), value),
        ),
        control=apart(conjugate(measure, strange), objective(natural, strange)),
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
    return Evidence(
        printed=apart(value, -(entropy - log_density)),
        corrected=widest(
            apart(value, -entropy - log_density),
            apart(measure.conjugate(natural), value),
            apart(measure.entropy(natural), entropy),
        ),
        control=apart(value, -entropy),
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
    best, plain = (_most_entropic(support, each, feasible) for each in (log_weight, torch.zeros_like(log_weight)))

    def objective(p: Tensor) -> Tensor:
        return (p * (log_weight - p.log())).sum()

    value, member = -conjugate(measure, mean)[0], measure.probabilities(natural_from_mean(measure, mean).natural)[0]
    return Evidence(
        printed=widest(apart(objective(best), value), apart(best, member)),
        control=apart(plain, member),
        table={
            "maximum": float(objective(best)),
            "−G*": float(value),
            "at the start": float(objective(feasible)),
            "where H alone is largest": float(objective(plain)),
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
    p = torch.softmax(natural @ support.T, -1)
    second = torch.einsum("qn,nd,ne->qde", p, support, support)
    score = jacobian(lambda eta: torch.log_softmax(eta @ support.T, -1), natural)  # of every atom
    fisher = Points(support).fisher(natural)
    return Evidence(
        printed=apart(truth, second),
        instead=widest(apart(truth, fisher), apart(truth, torch.einsum("qn,qnd,qne->qde", p, score, score))),
        control=apart(truth, Points(support).fisher(-natural)),
        table={"E[u u^⊤], relative error": float((second - truth).norm() / truth.norm())},
    )
