"""Propositions 1b to 3 and section 4 of the paper: intrinsic measures other than points."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from massieu.claims.claim import Curve, Evidence, Gap, Source, Trial, Verdict
from massieu.claims.experiment import above, apart, linspace, normals, one, widest
from massieu.claims.registry import claim
from massieu.measures import ConjugatePrior, Gamma, Gaussian, GaussianMixture, Points
from massieu.measures.measure import Measure, gradient


@claim(
    "C7",
    source=Source.PAPER,
    place="section 3.1, Proposition 1b",
    title="A tilted member has the mean of the summed parameters",
    wording=(
        "With a member of an exponential family as intrinsic measure, the gradient of log Z is the mean of that"
        " family at the sum of both natural parameters."
    ),
    reading=(
        "Our reading: for one family. A Gamma density of random shape and scale (statistics x and log x), tilted in x"
        " by 8 pairs inside the natural domain, to 1e-9. The appendix has misprints (e^{x·η} for e^{x·η_1}, η_1 + η_2"
        " for η_1 + η), which are not tested."
    ),
    reference="autograd through integrals of the density of torch.distributions over a grid of log x",
    formula="∇log ∫ p_0(x | η_1, η_2) e^{x·η} dx = E[x | η_1 + η, η_2]",
)
def tilt_of_a_tilt(trial: Trial) -> Evidence:
    """Integrals of a Gamma law (statistics x and log x) against its tilts; the control forgets the first tilt."""
    shape, scale = 1.5 + torch.rand(2, generator=trial.generator, dtype=torch.float64)
    family = Gamma(shape, scale)
    first, second = linspace(-1.0, 0.4, 8)[:, None] / scale, linspace(0.5, -2.0, 8)[:, None] / scale
    log_x = linspace(-40.0, 8.0, 1201) + scale.log()
    base = torch.distributions.Gamma(shape, 1 / scale - first).log_prob(log_x.exp()) + log_x
    slope = gradient(lambda eta: torch.logsumexp(base + eta * log_x.exp(), -1), second)

    def gap(first: Tensor) -> Gap:
        return widest(
            apart(family.mean(first + second), slope),
            apart(family.tilt(first).mean(second), slope),
            apart(family.tilt(first).tilt(second).mean(torch.zeros_like(second)), slope),
        )

    return Evidence(
        printed=gap(first),
        control=gap(trial.control(torch.zeros_like(first), first)),
        table={"mean of Gamma(2.5, 0.7) at 0.6": float(Gamma(2.5, 0.7).mean(one(0.6)))},
    )


@claim(
    "C8",
    source=Source.PAPER,
    place="section 3.1, Corollary 1",
    title="A Gaussian intrinsic measure has an affine mean map",
    wording="With a Gaussian intrinsic measure, the gradient of log Z is μ + Σ η.",
    reading="A random Gaussian in the plane at 5 natural parameters, to 1e-9.",
    reference="autograd through integrals of the density of torch.distributions over a grid",
    formula="∇log ∫ N(x; μ, Σ) e^{x·η} dx = μ + Σ η",
)
def gaussian_mean(trial: Trial) -> Evidence:
    """Integrals over the plane against the closed form; the control has atoms of the same mean and covariance."""
    normal = normals(trial)
    location, natural = normal(2), 0.7 * torch.tanh(normal(5, 2))
    root = torch.eye(2, dtype=torch.float64) + 0.4 * torch.tanh(normal(2, 2))
    measure = Gaussian(location, root @ root.T)
    line = linspace(-20.0, 20.0, 161)
    plane = torch.cartesian_prod(line, line)
    log_density = torch.distributions.MultivariateNormal(location, measure.covariance).log_prob(plane)
    slope = gradient(lambda eta: torch.logsumexp(log_density + eta @ plane.T, -1), natural)
    corners = location + 2**0.5 * torch.cat([root.T, -root.T])

    def gap(measure: Measure) -> Gap:
        return apart(measure.mean(natural), slope)

    return Evidence(
        printed=gap(measure),
        control=gap(trial.control(Points(corners), measure)),
        table={
            "covariance of the atoms less Σ": apart(
                Points(corners).fisher(torch.zeros(1, 2, dtype=torch.float64))[0], measure.covariance
            ).measured
        },
    )


@claim(
    "C9",
    source=Source.PAPER,
    place="appendix A, Proposition 2",
    title="Gaussians of one covariance: attention over means plus Σ η",
    wording=(
        "For a mixture of Gaussians with one covariance, the gradient of log Z is Σ η plus the softmax average of"
        " the means."
    ),
    reading=(
        "Four Gaussians on the line with random positive means and random weights that need not sum to one, at 9"
        " natural parameters, to 1e-9. Equation 4, the last step of the printed proof, has a gradient and a logarithm"
        " too many; the table has its error."
    ),
    reference="autograd through integrals of the densities of torch.distributions over a grid",
    formula="∇log Z(η) = Σ η + Σ_n softmax(log π + μ·η)_n μ_n",
)
def equal_covariances(trial: Trial) -> Evidence:
    """Integrals of a mixture against the formula; the control gives the components covariances of their own."""
    normal = normals(trial)
    locations, log_weight = normal(4, 1).abs() + 0.5, normal(4)  # positive: equation 4 takes a logarithm of their mean
    natural = linspace(-1.0, 1.0, 9)[:, None]
    variances = torch.tensor([0.2, 0.5, 1.0, 1.5], dtype=torch.float64)
    x = linspace(-25.0, 25.0, 1001)

    def slope(variances: Tensor) -> Tensor:
        components = log_weight[:, None] + torch.distributions.Normal(locations, variances[:, None].sqrt()).log_prob(x)
        return gradient(lambda eta: torch.logsumexp(components.logsumexp(0) + eta * x, -1), natural)

    def average(eta: Tensor) -> Tensor:
        return Points(locations, log_weight).mean(eta)

    shared = variances.mean()
    formula = shared * natural + average(natural)
    mixture = GaussianMixture(log_weight, locations, shared[None, None])
    literal = shared * natural + gradient(lambda eta: average(eta).log()[..., 0], natural)
    equal = shared.expand(4)

    def gap(variances: Tensor) -> Gap:
        truth = slope(variances)
        return widest(apart(formula, truth), apart(mixture.mean(natural), truth))

    return Evidence(
        printed=gap(equal),
        control=gap(trial.control(variances, equal)),
        table={"equation 4 of the proof as printed": apart(literal, slope(equal)).measured},
    )


@claim(
    "C10",
    source=Source.PAPER,
    place="appendix A, Proposition 3",
    title="The weighted mean of the g_n is a lower bound of log Z",
    wording=(
        "For a mixture of Gaussians with covariances of their own, the weighted mean of the log normalizers of the"
        " components is a lower bound of log Z."
    ),
    reading=(
        "Our reading: for any positive weights, as in Proposition 2, since Proposition 3 states no condition. Three"
        " Gaussians on the line with variances 0.3, 1 and 2, at 81 natural parameters between −2 and 2, to 1e-9:"
        " weights of sum 1.8 and 0.54 decide the printed form; weights of sum one, with the gap too, the conditional"
        " one."
    ),
    reference="log of integrals of the densities of torch.distributions over a grid",
    formula="Σ_n π_n (μ_n·η + ½ η^⊤ Σ_n η) ≤ log Z(η)",
    correction=(
        "Only for weights that sum to one; then the gap is KL(π ‖ r(η)), r_n ∝ π_n e^{g_n}. For weights of sum c the"
        " bound is log c + c^{-1} Σ_n π_n g_n."
    ),
    expected=Verdict.CONDITIONAL,
)
def jensen_bound(trial: Trial) -> Evidence:
    """Excess of the bound over an integrated log Z, for weights of sum 1, 1.8, 0.54; the control is the largest g."""
    normal = normals(trial)
    locations, log_weight = normal(3, 1), torch.log_softmax(normal(3), -1)
    variances = torch.tensor([0.3, 1.0, 2.0], dtype=torch.float64)
    natural = linspace(-2.0, 2.0, 81)[:, None]
    x = linspace(-30.0, 30.0, 1201)
    density = log_weight[:, None] + torch.distributions.Normal(locations, variances[:, None].sqrt()).log_prob(x)
    log_z = torch.logsumexp(density.logsumexp(0) + natural * x, -1) + torch.log(x[1] - x[0])
    exponents = natural * locations.T + 0.5 * natural.square() * variances
    bound = exponents @ log_weight.exp()
    share = torch.log_softmax(log_weight + exponents, -1)
    mixture = GaussianMixture(log_weight, locations, variances[:, None, None])
    divergence = (log_weight.exp() * (log_weight - share)).sum(-1)
    sums = (1.8, 0.54)

    def gap(bound: Tensor) -> Gap:
        return widest(
            above(bound, log_z), apart(log_z - bound, divergence), apart(mixture.log_normalizer(natural), log_z)
        )

    return Evidence(
        printed=widest(*(above(c * bound, log_z + math.log(c)) for c in sums)),
        conditional=gap(mixture.lower_bound(natural)),
        control=gap(trial.control(exponents.amax(-1), mixture.lower_bound(natural))),
        table={f"excess for weights of sum {c}": above(c * bound, log_z + math.log(c)).measured for c in sums},
        curve=Curve(
            x=natural[:, 0].tolist(),
            series={
                "log Z": log_z.tolist(),
                "bound, sum 1": bound.tolist(),
                "bound less log 1.8, sum 1.8": (1.8 * bound - math.log(1.8)).tolist(),
            },
            x_label="η",
        ),
    )


@claim(
    "C28",
    source=Source.PAPER,
    place="section 4",
    title="A conjugate prior can be the intrinsic measure",
    wording="An exponential family can be derived from a conjugate prior as its intrinsic measure.",
    reading=(
        "Our reading: its mean map is that of the prior (ξ + x, ν). A Beta prior with random parameters, in log"
        " odds, at 5 statistics x from 0 to 1, to 1e-9."
    ),
    reference="autograd through integrals of the density over a grid of log odds",
    formula="p(η | ξ, ν) tilted by x: (ξ, ν) → (ξ + x, ν)",
)
def conjugate_prior(trial: Trial) -> Evidence:
    """Integrals of a Beta law in log odds against its mean map; the control updates by Bayes: (ξ + x, ν + 1)."""
    a, b = (1.2 + torch.rand(2, generator=trial.generator, dtype=torch.float64)).tolist()
    prior = ConjugatePrior("categorical", statistic=a, count=a + b)
    x = linspace(0.0, 1.0, 5)[:, None]
    log_odds = linspace(-250.0, 250.0, 10001)
    log_prior = a * log_odds - (a + b) * torch.logaddexp(log_odds, torch.zeros_like(log_odds))
    mean = gradient(lambda tilt: torch.logsumexp(log_prior + tilt * log_odds, -1), x)
    nothing = one(0.0)

    def gap(update: Callable[[Tensor], Measure]) -> Gap:
        updated = torch.cat([update(each).mean(nothing) for each in x])
        return widest(apart(prior.mean(x), mean), apart(updated, mean))

    example, seen = ConjugatePrior("categorical", statistic=1.8, count=4.1), one(0.7)[0]
    return Evidence(
        printed=gap(prior.tilt),
        control=gap(trial.control(prior.observe, prior.tilt)),
        table={
            "mean log odds of Beta(1.8, 2.3) tilted by 0.7": float(example.mean(seen[None])),
            "the same after Bayes": float(example.observe(seen).mean(nothing)),
            "finite at x = b − 0.01": float(prior.contains(one(b - 0.01))),
            "finite at x = b + 0.01": float(prior.contains(one(b + 0.01))),
        },
    )


@claim(
    "C50",
    source=Source.PAPER,
    place="appendix A, Proposition 3, equation 7",
    title="The bound of Proposition 3 has an affine gradient",
    wording=(
        "For a mixture of Gaussians with covariances of their own, a gradient update can be performed on the lower"
        " bound of log Z, whose gradient is the weighted mean of μ_n + Σ_n η."
    ),
    reading=(
        "The gradient of Jensen's bound for three Gaussians in the plane with random means, covariances and weights of"
        " sum one (see C10 for others), at 5 natural parameters, to 1e-9. Our reading: at η = 0 it is that of log Z,"
        " which is compared too; elsewhere the bound has lost the softmax over components, and the table has its"
        " distance, and its angle for eight unit Gaussians in 16 dimensions."
    ),
    reference="autograd through integrals of the densities of torch.distributions over a grid",
    formula="∇G_LB(η) = Σ_n π_n (μ_n + Σ_n η)",
)
def bound_gradient(trial: Trial) -> Evidence:
    """Autograd through the weighted mean of integrated log normalizers; the control takes the gradient of log Z."""
    normal = normals(trial)
    locations, log_weight = normal(3, 2), torch.log_softmax(normal(3), -1)
    scales = torch.tensor([0.7, 1.0, 1.4], dtype=torch.float64)[:, None, None]
    roots = scales * (torch.eye(2, dtype=torch.float64) + 0.2 * torch.tanh(normal(3, 2, 2)))
    natural = torch.cat([torch.zeros(1, 2, dtype=torch.float64), 0.7 * torch.tanh(normal(4, 2))])
    mixture = GaussianMixture(log_weight, locations, roots @ roots.mT)
    line = linspace(-30.0, 30.0, trial.size(181, 301))
    plane = torch.cartesian_prod(line, line)
    log_density = torch.distributions.MultivariateNormal(locations, mixture.covariances).log_prob(plane[:, None]).T

    def potentials(eta: Tensor) -> Tensor:
        """Return log normalizers of the components, up to the area of a cell, one column for each."""
        return torch.logsumexp(log_density + (eta @ plane.T)[:, None], -1)

    bound = gradient(lambda eta: potentials(eta) @ log_weight.exp(), natural)
    exact = gradient(lambda eta: torch.logsumexp(log_weight + potentials(eta), -1), natural)

    def gap(found: Tensor) -> Gap:
        return widest(apart(found, bound), apart(found[:1], exact[:1]))

    wide = GaussianMixture(torch.full((8,), 0.125).double().log(), normal(8, 16), torch.eye(16, dtype=torch.float64))
    there = 2 * torch.nn.functional.normalize(normal(64, 16), dim=-1)
    cosine = torch.cosine_similarity(wide.mean(there), wide.lower_bound_gradient(there), dim=-1)
    return Evidence(
        printed=gap(mixture.lower_bound_gradient(natural)),
        control=gap(trial.control(mixture.mean(natural), mixture.lower_bound_gradient(natural))),
        table={
            "distance from ∇log Z, largest": apart(bound, exact).measured,
            "cosine of both in 16 dimensions at length 2, mean": float(cosine.mean()),
            "cosine, least": float(cosine.min()),
        },
    )
