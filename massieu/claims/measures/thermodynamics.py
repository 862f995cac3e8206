"""Section 2.4 and appendix B of the paper: free energy, the evidence bound, and the Ising model behind attention."""

from __future__ import annotations

import torch
from torch import Tensor

from massieu.claims.claim import Curve, Evidence, Gap, Source, Trial, Verdict
from massieu.claims.experiment import above, apart, jacobian, linspace, normals, widest
from massieu.claims.registry import claim
from massieu.measures import Hypercube, Points
from massieu.measures.measure import gradient
from massieu.statistics import row_statistics


@claim(
    "C35",
    source=Source.PAPER,
    place="section 2.4",
    title="log Z is known as the free energy",
    wording="The log normalizer is known in statistical mechanics as free energy.",
    reading=(
        "Our reading: as an equation, log Z = F, with energies −k·q. 16 random keys in 4 dimensions (in full 1024 in"
        " 64) at 31 inverse temperatures from 0.032 to 32, to 1e-9; the corrected form with entropy and heat capacity"
        " too."
    ),
    reference="energies, entropies and derivatives in temperature written out over Boltzmann's law",
    formula="log Z = F",
    correction="The free energy is F = U − T S = −β^{-1} log Z; log Z = S − β U itself is the Massieu potential.",
    expected=Verdict.HOLDS_CORRECTED,
)
def free_energy(trial: Trial) -> Evidence:
    """Energy, entropy and heat capacity written out over temperatures; the control occupies all keys equally."""
    normal = normals(trial)
    atoms, dim = trial.size(16, 1024), trial.size(4, 64)
    keys, query = normal(atoms, dim), normal(1, dim)
    levels = -(keys @ query[0])
    beta = torch.logspace(-1.5, 1.5, 31, dtype=torch.float64)[:, None]

    inverse, found = beta[:, 0], row_statistics(beta * query, keys)
    assert found.score_variance is not None
    variance = found.score_variance

    def gap(bias: float) -> Gap:
        internal, entropy = internal_energy(beta, levels, bias), disorder(beta, levels, bias)
        slope = gradient(lambda each: internal_energy(each, levels, bias), beta)[:, 0]
        return widest(
            apart(-found.log_normalizer / inverse, internal - entropy / inverse),
            apart(found.log_normalizer, entropy - inverse * internal),
            apart(found.entropy, entropy),
            apart(variance, -inverse.square() * slope),  # the heat capacity dU/dT
        )

    entropy = disorder(beta, levels)
    free = internal_energy(beta, levels) - entropy / inverse
    return Evidence(
        printed=apart(found.log_normalizer, free),
        corrected=gap(1.0),
        control=gap(trial.control(0.0, 1.0)),
        curve=Curve(
            x=inverse.tolist(),
            series={"log Z": found.log_normalizer.tolist(), "F": free.tolist(), "S": entropy.tolist()},
            x_label="β",
            log_x=True,
        ),
    )


def log_occupation(beta: Tensor, levels: Tensor, bias: float) -> Tensor:
    """Return logarithms of Boltzmann's law for bias 1; all levels alike for 0."""
    return torch.log_softmax(-bias * beta * levels, -1)


def internal_energy(beta: Tensor, levels: Tensor, bias: float = 1.0) -> Tensor:
    return log_occupation(beta, levels, bias).exp() @ levels


def disorder(beta: Tensor, levels: Tensor, bias: float = 1.0) -> Tensor:
    log_p = log_occupation(beta, levels, bias)
    return -(log_p.exp() * log_p).sum(-1)


@claim(
    "C36",
    source=Source.PAPER,
    place="section 2.4",
    title="log Z is known as the evidence lower bound",
    wording=(
        "With the joint taken as an unnormalized distribution, the log normalizer is known as the evidence lower bound."
    ),
    reading=(
        "Our reading: as an equation, log Z = ELBO, for an approximation other than the posterior. For an Ising model"
        " of 6 spins (in full 12) with random couplings, to 1e-9: log Z against the bound of its mean field, and"
        " instead that the bound is below it by the divergence of the mean field from the posterior, at which both are"
        " equal."
    ),
    reference="sums over all states of the spins",
    formula="log Z = ELBO",
    correction="It is the log evidence; the bound is below it by KL(q ‖ posterior) and equal only at the posterior.",
    expected=Verdict.FAILS,
)
def evidence_bound(trial: Trial) -> Evidence:
    """log evidence of an Ising model against the bound of its mean field; the control takes another posterior."""
    normal = normals(trial)
    spins = trial.size(6, 12)
    states = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=torch.float64)] * spins)
    field, upper = 0.3 * normal(1, spins), torch.triu(normal(spins, spins), 1) / spins**0.5
    coupling = upper + upper.T
    pairs, local = 0.5 * torch.einsum("sd,de,se->s", states, coupling, states), field @ states.T

    def elbo(log_q: Tensor, strength: float = 1.0) -> Tensor:
        return (log_q.exp() * (local + strength * pairs - log_q)).sum(-1)

    evidence, log_q = Points(states, pairs).log_normalizer(field), mean_field(field, coupling, states)
    bound, strengths = elbo(log_q), linspace(0.0, 2.0, 21).tolist()
    posterior = torch.log_softmax(local + pairs, -1)

    def gap(posterior: Tensor) -> Gap:
        divergence = (log_q.exp() * (log_q - posterior)).sum(-1)
        return widest(above(bound, evidence), apart(evidence - bound, divergence), apart(evidence, elbo(posterior)))

    return Evidence(
        printed=apart(evidence, bound),
        instead=gap(posterior),
        control=gap(trial.control(torch.log_softmax(pairs - local, -1), posterior)),
        table={"log evidence": float(evidence), "ELBO of the mean field": float(bound)},
        curve=Curve(
            x=strengths,
            series={
                "log evidence": [float(Points(states, j * pairs).log_normalizer(field)) for j in strengths],
                "ELBO of the mean field": [float(elbo(mean_field(field, j * coupling, states), j)) for j in strengths],
            },
            x_label="strength of the coupling",
        ),
    )


def mean_field(field: Tensor, coupling: Tensor, states: Tensor) -> Tensor:
    """Return log probabilities of states under independent spins in the mean field, by damped iteration."""
    natural, spins = field, Hypercube(states.shape[-1])
    for _ in range(300):
        natural = 0.5 * natural + 0.5 * (field + spins.mean(natural) @ coupling)
    return natural @ states.T - spins.log_normalizer(natural)[:, None]


@claim(
    "C37",
    source=Source.PAPER,
    place="section 3.2, footnote 1; section 5; appendix B",
    title="Attention as mean field, linear attention as Hopfield layer",
    wording=(
        "Attention has been called a mean-field approximation; perhaps linear attention can be seen as a layer of"
        " the original Hopfield network, and softmax attention as one of a modern network."
    ),
    reading=(
        "Our reading: the derivative of attention at zero is the Hebbian matrix (1/N) X^⊤ X, for 7 random real patterns"
        " in 5 dimensions (in full 32 in 9), to 1e-9. The corrected form centers it, and adds that the mean field of"
        " free spins is the mean map of their measure and that both energies are log sums over hidden units,"
        " for the original network with two of the patterns."
    ),
    reference=(
        "all states of the spins enumerated, a Jacobian by autograd, and hidden units summed or integrated over a grid"
    ),
    formula="∇log Z(β η) ≈ β (1/N) X^⊤X η",
    correction=(
        "On the spins {±1}^D the mean map is the mean field, tanh. The linear part of attention is the Hebbian field"
        " of centered patterns, around their mean. The energy of the original network is the log normalizer of"
        " Gaussian hidden units, that of attention is one of a single hidden unit with N states."
    ),
    expected=Verdict.HOLDS_CORRECTED,
)
def ising(trial: Trial) -> Evidence:
    """Enumerated spins, the Jacobian of attention at 0, summed hidden units; the control has spins {−1, 0, 1}."""
    normal = normals(trial)
    spins, count = trial.size(5, 9), trial.size(7, 32)
    values = torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)
    two, three = (torch.cartesian_prod(*[each] * spins) for each in (values[::2], values))
    patterns, natural, origin = normal(count, spins), normal(4, spins), torch.zeros(1, spins, dtype=torch.float64)
    center = patterns.mean(0)
    hebb, centered_hebb = (each.T @ each / count for each in (patterns, patterns - center))
    attention, spin_means = Points(patterns), Hypercube(spins).mean(natural)
    slope = jacobian(attention.mean, origin)[0]
    overlap = two @ patterns[:2].T / spins**0.5

    betas = torch.logspace(-3, 0, 13, dtype=torch.float64)
    exact = attention.mean(betas[:, None, None] * natural) - center
    linear = betas[:, None, None] * natural @ centered_hebb
    error = ((exact - linear).norm(dim=(1, 2)) / exact.norm(dim=(1, 2))).tolist()
    hidden_units = widest(
        apart(_gaussian_units(overlap), 0.5 * overlap.square().sum(-1)),
        apart((two @ patterns.T).exp().sum(-1).log(), attention.log_normalizer(two)),  # one hidden unit of N states
    )

    def gap(states: Tensor) -> Gap:
        return widest(apart(Points(states).mean(natural), spin_means), apart(slope, centered_hebb), hidden_units)

    return Evidence(
        printed=apart(slope, hebb),
        corrected=gap(two),
        control=gap(trial.control(three, two)),
        table={f"error of the linear part at β = {10.0**-i:g}": error[12 - 4 * i] for i in range(3)},
        curve=Curve(
            x=betas.tolist(), series={"relative error of the linear part": error}, x_label="β", log_x=True, log_y=True
        ),
    )


def _gaussian_units(overlap: Tensor) -> Tensor:
    """Return log of the integral over two normal hidden units y of e^{y·overlap}, by a sum over a grid."""
    line = linspace(-20.0, 20.0, 121)
    hidden = torch.cartesian_prod(line, line)
    log_density = torch.distributions.Normal(0.0, 1.0).log_prob(hidden).sum(-1)
    return torch.logsumexp(log_density + overlap @ hidden.T, -1) + 2 * torch.log(line[1] - line[0])
