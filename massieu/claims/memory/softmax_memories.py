"""The slides on memories of real states, appendix B of the paper, and the memory as a density."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from massieu.claims.claim import Evidence, Gap, Source, Trial, Verdict
from massieu.claims.experiment import above, apart, jacobian, linspace, normals, widest
from massieu.claims.registry import claim
from massieu.measures.measure import gradient
from massieu.memory import Continuous, denoise, log_density


@claim(
    "M5",
    source=Source.SLIDES,
    place="memorization, properties of the continuous update; theorems 1 and 2 of Ramsauer et al. 2020",
    title="Global convergence to a local minimum",
    wording="The update of the continuous network has global convergence to a local minimum.",
    reading=(
        "Our reading: from every start. One start on the axis on which 8 patterns of length 3 in 4 (full: 17)"
        " dimensions are symmetric, and 20 random ones, end where no curvature of the energy is negative. Corrected:"
        " where its slope is zero to 1e-9, and one update lowers the energy by at least half the square of its length."
    ),
    reference="slopes and curvatures by autograd of the energy written out as a log-sum-exp",
    formula="∇E = 0, ∇^2 E ≥ 0 where it ends",
    correction="To a stationary point, perhaps a saddle: E(ξ) − E(f(ξ)) ≥ ½ ‖f(ξ) − ξ‖^2, and ∇E = ξ − f(ξ) → 0.",
    expected=Verdict.HOLDS_CORRECTED,
)
def stationary_points(trial: Trial) -> Evidence:
    """Slope and least curvature where retrieval ends, falls on the way; the control updates at another β."""
    normal = normals(trial)
    # So long that the curvature at 0 is at most 1 − 9 / 4 in some direction, whatever the directions of the patterns.
    half, across = 3 * torch.nn.functional.normalize(normal(4, trial.size(3, 16)), dim=-1), normal(1)
    patterns = torch.nn.functional.pad(torch.cat([half, -half]), (0, 1))  # the last axis and 0 are a plane of symmetry
    on_axis = torch.nn.functional.pad(across[:, None], (half.shape[1], 0))
    memory, starts = Continuous(patterns, beta=1.0), torch.cat([on_axis, 2 * normal(20, patterns.shape[1])])

    def energy(state: Tensor) -> Tensor:
        return log_sum_exp_energy(patterns, 1.0, state)

    def slope(beta: float) -> Gap:
        mover = Continuous(patterns, beta=beta)
        moved = mover.update(starts)
        fall = above(energy(moved) + 0.5 * (moved - starts).square().sum(-1), energy(starts))
        end = mover.retrieve(starts, steps=20_000).state
        return widest(fall, apart(gradient(energy, end), torch.zeros_like(end)))

    found = memory.retrieve(starts, steps=20_000)
    curvature = torch.linalg.eigvalsh(jacobian(lambda each: gradient(energy, each), found.state)).amin(-1)
    pair = Continuous(torch.tensor([[2.0, 0.0], [-2.0, 0.0]]).double(), beta=1.0)
    saddle = pair.retrieve(torch.tensor([[0.0, 5.0]]).double())
    return Evidence(
        printed=above(-curvature, torch.zeros_like(curvature)),
        corrected=slope(1.0),
        control=slope(trial.control(2.0, 1.0)),
        table={
            "least curvature from generic starts": float(curvature[1:].min()),
            "energy of (0, 5) after retrieval among ±(2, 0)": float(saddle.energy),
            "its least curvature": float(torch.linalg.eigvalsh(pair.hessian(saddle.state)).min()),
        },
    )


@claim(
    "M10",
    source=Source.SLIDES,
    place="memorization, attention from the update rule, and summary, item 4",
    title="Attention is the update of the continuous network",
    wording=(
        "With queries as states, keys as patterns and β = 1 / √d_k, the update multiplied by W_V is attention with"
        " V = K W_V = Y W_K W_V."
    ),
    reading=(
        "Our reading: for any matrix of values. Attention with free values, 40 tokens (full: 512) of width 24 (256), 10"
        " queries and keys of dimension 6 (64), is the update times the best matrix, to 1e-9. Under the condition:"
        " values Y W_K W_V; and with free values the memory that has them as values of its own reads the same."
    ),
    reference="scaled_dot_product_attention of torch; least squares for the best matrix",
    formula="Z = softmax(Q K^T / √d) V, V = K W_V = Y W_K W_V",
    correction=(
        "Only for values in the column space of W_K, a restriction that heads do not have: with a free W_V attention is"
        " hetero-association, and the iteration runs among the keys alone."
    ),
    expected=Verdict.CONDITIONAL,
)
def value_map(trial: Trial) -> Evidence:
    """Attention against an update times the best matrix, W_V free and through W_K; the control has β = 1."""
    normal = normals(trial)
    tokens, width, dim = trial.size(40, 512), trial.size(24, 256), trial.size(6, 64)
    source, queries = normal(tokens, width), normal(10, dim)
    to_keys, free = normal(width, dim) / width**0.5, normal(width, dim) / width**0.5
    keys, through = source @ to_keys, to_keys @ normal(dim, dim)

    def gap(to_values: Tensor, beta: float) -> Gap:
        matrix = torch.linalg.lstsq(to_keys, to_values).solution
        update = Continuous(keys, beta).update(queries)
        return apart(scaled_dot_product_attention(queries, keys, source @ to_values), update @ matrix)

    beta = dim**-0.5
    read = Continuous(keys, beta, values=source @ free).read(queries)
    left = free - to_keys @ torch.linalg.lstsq(to_keys, free).solution
    return Evidence(
        printed=gap(free, beta),
        conditional=widest(gap(through, beta), apart(scaled_dot_product_attention(queries, keys, source @ free), read)),
        control=gap(through, trial.control(1.0, beta)),
        table={"share of a free W_V outside the columns of W_K": float(left.norm() / free.norm())},
    )


@claim(
    "M11",
    source=Source.PAPER,
    place="appendix B, last paragraph",
    title="The quadratic term seems to model the skip",
    wording="The quadratic term also seems to fulfill another duty of modeling the skip connection.",
    reading=(
        "Our reading: a step of length 1 down the Hopfield energy is the state plus its update. Corrected: a step of"
        " length γ is (1 − γ) ξ + γ f(ξ), for γ of 0.1, 0.5, 1 and 1.5, 20 states and 8 patterns in 4 dimensions (full:"
        " 256 in 64), to 1e-9."
    ),
    reference="autograd of the energy written out as a log-sum-exp",
    formula="ξ − ∇E(ξ) = ξ + f(ξ)",
    correction=(
        "It removes the skip: a descent step of length 1 is f(ξ) alone, one of length γ is (1 − γ) ξ + γ f(ξ). Only up"
        " to a factor, which a layer norm takes away, is that ξ + s f(ξ) (C38, X10)."
    ),
    expected=Verdict.HOLDS_CORRECTED,
)
def skip_connection(trial: Trial) -> Evidence:
    """Steps down the energy by autograd against mixtures of state and update; the control has no quadratic term."""
    normal = normals(trial)
    patterns, state = normal(trial.size(8, 256), trial.size(4, 64)), normal(20, trial.size(4, 64))
    update = Continuous(patterns, beta=1.5).update(state)

    def gap(step: float, kept: float, quadratic: float = 0.5) -> Gap:
        def energy(xi: Tensor) -> Tensor:
            return log_sum_exp_energy(patterns, 1.5, xi) + (quadratic - 0.5) * xi.square().sum(-1)

        return apart(state - step * gradient(energy, state), kept * state + step * update)

    steps = (0.1, 0.5, 1.0, 1.5)
    axes = Continuous(2 * torch.eye(2).double(), beta=1.0)
    query = torch.tensor([[1.0, 0.2]]).double()
    return Evidence(
        printed=gap(1.0, 1.0),
        corrected=widest(*(gap(step, 1 - step) for step in steps)),
        control=widest(*(gap(step, 1 - step, trial.control(0.0, 0.5)) for step in steps)),
        table={
            "energy of (1, 0.2) among 2 I": float(axes.energy(query)),
            "after the update": float(axes.energy(axes.update(query))),
            "after the update added to the state": float(axes.energy(query + axes.update(query))),
        },
    )


@claim(
    "M12",
    source=Source.PAPER,
    place="section 6, on the quadratic term of the Hopfield energy",
    title="The Hopfield energy suggests Gaussian distributions",
    wording=(
        "The quadratic term of the Hopfield energy strongly suggests that we work with Gaussian distributions, perhaps"
        " mixtures of them over the keys."
    ),
    reading=(
        "Our reading: e^{−β E} is up to its constant a mixture of Gaussians of variance 1 / β around the patterns,"
        " whose weights grow with their lengths; 6 patterns in the plane, 50 states, β = 1.7, to 1e-9, and it"
        " integrates to 1."
    ),
    reference="MixtureSameFamily of torch, and the integral by the trapezoidal rule",
    formula="e^{−β E(ξ)} ∝ Σ_i e^{β ‖x_i‖^2 / 2} e^{−β ‖ξ − x_i‖^2 / 2}",
)
def gaussian_mixture(trial: Trial) -> Evidence:
    """The density against mixtures of torch and an integral; the control weighs all patterns alike."""
    normal = normals(trial)
    patterns, state, beta = normal(6, 2), 2 * normal(50, 2), 1.7
    memory = Continuous(patterns, beta)
    line = linspace(-9.0, 9.0, trial.size(241, 1201))
    plane = log_density(memory, torch.cartesian_prod(line, line))
    total = plane.logsumexp(-1) + 2 * torch.log(line[1] - line[0])

    def gap(excess: float) -> Gap:
        density = mixture(patterns, beta, excess).log_prob(state)
        scaled = -beta * memory.energy(state)
        offset = (scaled - density)[:1]
        return widest(apart(log_density(memory, state), density), apart(scaled - density, offset))

    return Evidence(
        printed=widest(gap(1.0), apart(total, torch.zeros_like(total))),
        control=gap(trial.control(0.0, 1.0)),
        table={"weight of the longest over the shortest": float((beta / 2 * _spread(patterns)).exp())},
    )


@claim(
    "M13",
    source=Source.OURS,
    place="docs/memory.md, on `denoise`",
    title="An update is the ideal denoiser",
    wording="An update is the best denoiser at noise 1 / β, by the formula of Tweedie, and a step of mean shift.",
    reading=(
        "For 8 patterns in 4 dimensions (full: 500 in 64) and 20 states at β = 1.3: the update is the state plus 1 / β"
        " times the slope of the log density, the posterior mean under Gaussian noise, and, for patterns of one length,"
        " the mean of the patterns weighed by a Gaussian kernel; all to 1e-9."
    ),
    reference="autograd of MixtureSameFamily of torch, the rule of Bayes and a Gaussian kernel written out",
    formula="f(ξ) = ξ + β^{-1} ∇log p(ξ) = E[x | x + β^{-1/2} ε = ξ]",
)
def tweedie(trial: Trial) -> Evidence:
    """Updates against slopes of a mixture, the rule of Bayes and mean shift; the control has half of the noise."""
    normal = normals(trial)
    atoms, dim, beta = trial.size(8, 500), trial.size(4, 64), 1.3
    patterns, state = normal(atoms, dim), normal(20, dim)
    level = torch.nn.functional.normalize(patterns, dim=-1)

    def gap(noise: float) -> Gap:
        memory = Continuous(patterns, beta)
        law = mixture(patterns, 1 / noise, 1.0)
        slope = gradient(law.log_prob, state)
        likelihood = -torch.cdist(state, patterns).square() / (2 * noise)
        posterior = torch.softmax(likelihood + law.mixture_distribution.logits, -1)
        shifted = torch.softmax(-torch.cdist(state, level).square() / (2 * noise), -1) @ level
        return widest(
            apart(denoise(memory, state), state + noise * slope),
            apart(memory.update(state), posterior @ patterns),
            apart(Continuous(level, beta).update(state), shifted),
        )

    return Evidence(printed=gap(1 / beta), control=gap(trial.control(0.5 / beta, 1 / beta)))


@claim(
    "M15",
    source=Source.SLIDES,
    place="memorization, energy function for continuous patterns, citing Krotov and Hopfield 2020",
    title="The continuous energy is of Krotov and Hopfield",
    wording=(
        "The energy is generalized to continuous valued patterns, citing Krotov and Hopfield 2020:"
        " E = −lse(β, X^T ξ) + ½ ξ^T ξ + β^{-1} log N + ½ M^2."
    ),
    reading=(
        "Our reading: the energy of Krotov and Hopfield 2020 is this one up to its constant, for 20 states with hidden"
        " layers at random, 8 patterns in 4 dimensions (full: 500 in 64), β = 1.3, to 1e-9. Under the condition: hidden"
        " layers at rest."
    ),
    reference="the energy of two layers written out in torch",
    formula="E(v, h) = ½ ‖v‖^2 + h·p − β^{-1} ln Σ_i e^{β h_i} − p·X v, p = softmax(β h)",
    correction=(
        "It is that of Ramsauer et al. 2020. The energy of Krotov and Hopfield has two layers, and is the other up to a"
        " constant where the hidden one rests, h = X v."
    ),
    expected=Verdict.CONDITIONAL,
)
def two_layers(trial: Trial) -> Evidence:
    """Both energies without their constants, hidden neurons at rest or not; the control is at another β."""
    normal = normals(trial)
    atoms, dim, beta = trial.size(8, 500), trial.size(4, 64), 1.3
    patterns, state, hidden = normal(atoms, dim), normal(20, dim), normal(20, atoms)
    memory = Continuous(patterns, beta)
    constant = math.log(atoms) / beta + 0.5 * patterns.square().sum(-1).max()

    def gap(layer: Tensor, cold: float) -> Gap:
        active = torch.softmax(cold * layer, -1)
        of_hidden = (layer * active).sum(-1) - torch.logsumexp(cold * layer, -1) / cold
        energy = 0.5 * state.square().sum(-1) + of_hidden - (active * (state @ patterns.T)).sum(-1)
        return apart(memory.energy(state) - constant, energy)

    rest = state @ patterns.T
    return Evidence(
        printed=gap(hidden, beta), conditional=gap(rest, beta), control=gap(rest, trial.control(2 * beta, beta))
    )


def log_sum_exp_energy(patterns: Tensor, beta: float, state: Tensor) -> Tensor:
    return 0.5 * state.square().sum(-1) - torch.logsumexp(beta * state @ patterns.T, -1) / beta


def mixture(patterns: Tensor, beta: float, excess: float) -> torch.distributions.MixtureSameFamily:
    """Return Gaussians of variance 1 / β around the patterns, of weights e^{excess β ‖x‖^2 / 2}."""
    weights = torch.distributions.Categorical(logits=excess * beta / 2 * patterns.square().sum(-1))
    around = torch.distributions.Normal(patterns, beta**-0.5)
    return torch.distributions.MixtureSameFamily(weights, torch.distributions.Independent(around, 1))


def _spread(patterns: Tensor) -> Tensor:
    squares = patterns.square().sum(-1)
    return squares.max() - squares.min()
