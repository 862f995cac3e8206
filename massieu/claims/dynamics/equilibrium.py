"""Theorem 1 of the paper and its stability: Gaussian tokens under attention and a contraction."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from massieu.claims.claim import Curve, Evidence, Gap, Source, Trial, Verdict
from massieu.claims.experiment import above, apart, jacobian, linspace, normals, widest
from massieu.claims.registry import claim
from massieu.dynamics import (
    CONTRACTIONS,
    ascend,
    cumulant_amplification,
    evolve,
    gaussian_moments,
    layer_norm,
    normal_ranks,
    normal_scores,
    renormalization,
    zca,
)
from massieu.measures import Gaussian, Points, Sphere


def covariance(normal: Callable[..., Tensor], dim: int) -> Tensor:
    root: Tensor = torch.eye(dim, dtype=torch.float64) + 0.4 * torch.tanh(normal(dim, dim)) / dim**0.5
    return root @ root.T


def pushed(step: Callable[[Tensor], Tensor], location: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and covariance of a Gaussian after a map, by points on its axes: exact for affine maps."""
    arms = len(location) ** 0.5 * torch.linalg.cholesky(spread).T
    moved = step(location + torch.cat([arms, -arms]))
    return moved.mean(0), torch.cov(moved.T, correction=0)


def transported(step: Callable[[Tensor], Tensor], law: MultivariateNormal, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return tokens after a map, and the log density of the law there, by a change of variables."""
    return step(tokens), law.log_prob(tokens) - torch.linalg.slogdet(jacobian(step, tokens)).logabsdet


@claim(
    "C24",
    source=Source.PAPER,
    place="appendix A, Theorem 1",
    title="Attention and renormalization leave a Gaussian as it is",
    wording=(
        "Residual attention over keys x = Σ η and renormalization with the second moment E[η η^⊤] together leave the"
        " law N(Σ^{-1} μ, Σ^{-1}) of the tokens as it is."
    ),
    reading=(
        "Mean and covariance of that law after both maps, for a random μ and Σ in 4 dimensions (64 in full), to 1e-9:"
        " with E[η η^⊤] as printed, and with the covariance, where also five single tokens must come back. In the"
        " control the keys have an unrelated covariance."
    ),
    reference="the law and the tokens before both maps, which move exact moments of an affine map",
    formula="RN ∘ A (p_eq) = p_eq, η → η_0 + Λ_0^{1/2} E[η η^⊤]^{-1/2} (η − η̄)",
    correction=(
        "With the covariance in the place of E[η η^⊤], or if μ = 0. Then RN ∘ A is even the identity of every token."
    ),
    expected=Verdict.HOLDS_CORRECTED,
)
def theorem_1(trial: Trial) -> Evidence:
    """Moments and tokens after both maps, with both matrices; the control has keys of an unrelated covariance."""
    normal = normals(trial)
    dim = trial.size(4, 64)
    key_location, sigma, other, around = normal(dim), covariance(normal, dim), covariance(normal, dim), normal(5, dim)

    def after(centered: bool, key_location: Tensor, sigma: Tensor, keys: Tensor) -> tuple[Gap, Gap, Tensor]:
        """Largest change of moments and tokens, and the covariance."""
        precision = torch.linalg.inv(sigma)
        location = precision @ key_location
        measure = Gaussian(key_location, keys)

        def attention(eta: Tensor) -> Tensor:
            return eta + measure.mean(eta)

        mean, spread = pushed(attention, location, precision)
        second = spread if centered else spread + torch.outer(mean, mean)
        block = renormalization(mean, second, location, precision)
        law = pushed(lambda eta: block(attention(eta)), location, precision)
        tokens = location + around[:, : len(location)]
        moments = widest(apart(law[0], location), apart(law[1], precision))
        return moments, apart(block(attention(tokens)), tokens), law[1]

    known = torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=torch.float64), torch.tensor([1.0, -1.0], dtype=torch.float64)
    literal = after(False, known[1], known[0], known[0])[2]
    one = torch.ones(1, 1, dtype=torch.float64)
    return Evidence(
        printed=after(False, key_location, sigma, sigma)[0],
        corrected=widest(*after(True, key_location, sigma, sigma)[:2]),
        control=widest(*after(True, key_location, sigma, trial.control(other, sigma))[:2]),
        table={
            "66 times the variance as printed, Σ = (2 1; 1 2), μ = (1, −1)": 66 * float(literal[0, 0]),
            "66 times the covariance": 66 * float(literal[0, 1]),
            "variance as printed, Σ = 1, μ = 2": float(after(False, 2 * one[0], one, one)[2]),
        },
    )


@claim(
    "C25",
    source=Source.PAPER,
    place="section 3.3, before Theorem 1; appendix A, equation 8 and the sentence behind it",
    title="Attention expands the Gaussian of the equilibrium",
    wording="At equilibrium, attention expands the hidden states also of uncentered Gaussian distributions.",
    reading=(
        "Our reading: before renormalization, the covariance of the law N(Σ^{-1} μ, Σ^{-1}) grows in every direction"
        " and its entropy by log det(I + Σ), for a random μ and Σ in 4 dimensions (64 in full), to 1e-9. As equation 8"
        " has it, tokens go to μ + (I + Σ) η, and the law stays Gaussian: at five of them its density after the step is"
        " the normal one. Theorem 1 itself says only that the law comes back after renormalization. In the control half"
        " of attention is subtracted."
    ),
    reference=(
        "the covariance (I + Σ) Σ^{-1} (I + Σ) and the mean Σ^{-1} μ + 2 μ, written out, and densities by a change of"
        " variables against torch.distributions"
    ),
    formula="(I + Σ) Σ^{-1} (I + Σ) ≻ Σ^{-1}, entropy gain log det(I + Σ)",
)
def gaussian_expansion(trial: Trial) -> Evidence:
    """Covariances before and after, from points moved by the mean map; the control subtracts half of attention."""
    normal = normals(trial)
    dim = trial.size(4, 64)
    key_location, sigma, around = normal(dim), covariance(normal, dim), normal(5, dim)

    def gap(key_location: Tensor, sigma: Tensor, sign: float) -> tuple[Gap, Tensor, Tensor]:
        precision, wider = torch.linalg.inv(sigma), torch.eye(len(sigma), dtype=torch.float64) + sigma
        start, tokens = precision @ key_location, precision @ key_location + around[:, : len(sigma)]

        def step(eta: Tensor) -> Tensor:
            return eta + sign * Gaussian(key_location, sigma).mean(eta)

        mean, spread = pushed(step, start, precision)
        law = gaussian_moments(start, precision, sigma, sign * sigma)
        closed = start + 2 * key_location, wider @ precision @ wider
        moved, density = transported(step, MultivariateNormal(start, precision), tokens)
        growth = torch.linalg.eigvalsh(spread - precision)
        gain = 0.5 * (torch.logdet(spread) - torch.logdet(precision))
        same = [apart(*pair) for pair in zip((mean, spread, *law), closed * 2, strict=True)]
        affine = (
            apart(moved, key_location + tokens @ wider),
            apart(density, MultivariateNormal(*closed).log_prob(moved)),
        )
        found = widest(*same, *affine, apart(gain, torch.logdet(wider)), above(-growth, torch.zeros_like(growth)))
        return found, growth, gain

    known = torch.tensor([1.0, -1.0], dtype=torch.float64), torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
    _, growth, gain = gap(*known, 1.0)
    return Evidence(
        printed=gap(key_location, sigma, 1.0)[0],
        control=gap(key_location, sigma, trial.control(-0.5, 1.0))[0],
        table={
            "least eigenvalue of the difference, Σ = (2 1; 1 2)": float(growth[0]),
            "largest": float(growth[1]),
            "gain of entropy": float(gain),
        },
    )


@claim(
    "C26",
    source=Source.PAPER,
    place="abstract; section 3.3",
    title="Layer normalization undoes the expansion by attention",
    wording="The expansion of points by attention is counterbalanced by a contraction from layer normalization.",
    reading=(
        "Our reading: layer normalization brings every token back to where it was. 50 normalized tokens in 8 dimensions"
        " after a residual step and layer normalization: over 40 random keys as printed; over a uniform law on the"
        " sphere, with steps 0.5, 1 and 10, to 1e-9. The control leaves layer normalization out."
    ),
    reference="the tokens before the block",
    formula="LN(η + s m(η)) = η for normalized η",
    correction=(
        "If the intrinsic measure is invariant under rotations, so that m(η) is parallel to η. Layer normalization acts"
        " on each token and undoes nothing else."
    ),
    expected=Verdict.CONDITIONAL,
)
def counterbalance(trial: Trial) -> Evidence:
    """Normalized tokens after a block, over random keys and over a sphere; the control leaves the norm out."""
    normal = normals(trial)
    dim = 8
    tokens, keys = layer_norm(normal(50, dim)), normal(40, dim)
    sphere = Sphere(dim)

    def unchanged(cloud: Tensor) -> Tensor:
        return cloud

    def gap(norm: Callable[[Tensor], Tensor]) -> Gap:
        return widest(*(apart(norm(tokens + step * sphere.mean(tokens)), tokens) for step in (0.5, 1.0, 10.0)))

    cloud = layer_norm(normal(trial.size(20000, 1000000), dim))
    direction = torch.tensor([[1.0], [-1.0], *[[0.0]] * (dim - 2)], dtype=torch.float64)
    projected = cloud @ direction
    kurtosis = projected.pow(4).mean() / projected.square().mean().square() - 3
    return Evidence(
        printed=apart(layer_norm(ascend(tokens, keys)), tokens),
        conditional=gap(layer_norm),
        control=gap(trial.control(unchanged, layer_norm)),
        table={"excess kurtosis on the sphere": float(kurtosis), "−6 / (n + 2)": -6 / (dim + 1)},
    )


@claim(
    "X8",
    source=Source.OURS,
    place="on Theorem 1 of the paper",
    title="The Gaussian equilibrium is unstable",
    wording=(
        "The equilibrium of Theorem 1 is a fixed point and unstable: small cumulants of order k ≥ 3 grow by 1 + kr."
    ),
    reading=(
        "In one dimension, for random s and σ between 0.5 and 1.5: a Gaussian comes back to 1e-5 after attention over"
        " itself and standardization, and cumulants of order 3, 4 and 5 of about 1e-4 grow by 1 + kr within a"
        " hundredth. The control has an affine map in the place of attention."
    ),
    reference="cumulants by sums over a grid of normal weights, before and after the block",
    formula="κ_k' = (1 + kr) κ_k for k ≥ 3, r = sσ / (1 + sσ)",
)
def unstable(trial: Trial) -> Evidence:
    """A Gaussian and its small cumulants after a block, by quadrature; the control has an affine map for attention."""
    step, sigma = map(float, 0.5 + torch.rand(2, generator=trial.generator, dtype=torch.float64))
    z = linspace(-9.0, 9.0, trial.size(361, 1441))
    weight = torch.softmax(-0.5 * z.square(), -1)
    waves = {3: z**2 - 1, 4: z**3 - 3 * z, 5: z**4 - 6 * z**2 + 3}

    def attention(eta: Tensor) -> Tensor:
        return Points(sigma * eta, weight.log()).mean(eta)

    def affine(eta: Tensor) -> Tensor:
        return sigma * eta + 1

    def block(x: Tensor, field: Callable[[Tensor], Tensor]) -> Tensor:
        eta = x[:, None] / sigma**0.5
        return _standard((eta + step * field(eta))[:, 0], weight)

    def growth(order: int, field: Callable[[Tensor], Tensor]) -> float:
        start = _standard(z + 1e-4 * waves[order] / math.factorial(order), weight)
        return float(_cumulant(order, block(start, field), weight) / _cumulant(order, start, weight))

    def gap(field: Callable[[Tensor], Tensor]) -> Gap:
        still = (weight @ (block(z, field) - _standard(z, weight)).square()).sqrt()
        off = [growth(order, field) / cumulant_amplification(order, step, sigma) - 1 for order in waves]
        return widest(Gap(float(still), 1e-5), *(Gap(abs(each), 0.01) for each in off))

    seen, cloud = [], _standard(z + 1e-4 * waves[4] / 24, weight)
    for _ in range(7):
        seen.append(float(_cumulant(4, cloud, weight)))
        cloud = block(cloud, attention)
    law = [seen[0] * cumulant_amplification(4, step, sigma) ** each for each in range(7)]
    return Evidence(
        printed=gap(attention),
        control=gap(trial.control(affine, attention)),
        table={f"growth of κ_{order}": growth(order, attention) for order in waves}
        | {f"1 + {order} r": cumulant_amplification(order, step, sigma) for order in waves},
        curve=Curve(list(range(7)), {"κ_4": seen, "κ_4 (1 + 4r)^n": law}, x_label="blocks", y_label="κ_4", log_y=True),
    )


def _cumulant(order: int, x: Tensor, weight: Tensor) -> Tensor:
    """Cumulant of order 3, 4 or 5 of weighed numbers with mean zero and variance one."""
    return weight @ x**order - {3: 0.0, 4: 3.0, 5: 10 * float(weight @ x**3)}[order]


def _standard(x: Tensor, weight: Tensor) -> Tensor:
    x = x - weight @ x
    return x / (weight @ x.square()).sqrt()


@claim(
    "C45",
    source=Source.PAPER,
    place="section 6",
    title="Layer normalization induces a Gaussian equilibrium",
    wording="Layer normalization is assumed to induce a Gaussian as equilibrium distribution.",
    reading=(
        "Our reading: 320 Gaussian tokens in 8 dimensions stay Gaussian in 30 blocks of residual attention over"
        " themselves and layer normalization (600 tokens, 60 blocks in full): third and fourth cumulants of projections"
        " within 1.5 times the largest of eight Gaussian samples. Instead: they end in at most a quarter as many"
        " clusters as tokens. The control leaves attention out."
    ),
    reference="the cumulants of Gaussian samples of the same size",
    formula="K(η + m(η)) stays Gaussian for K = LN",
    correction="With the tokens as keys, clusters form within some thirty blocks.",
    expected=Verdict.FAILS,
)
def gaussian_layers(trial: Trial) -> Evidence:
    """Cumulants after many blocks in units of Gaussian samples, and clusters; the control leaves attention out."""
    cloud, bands = gaussian_cloud(trial)
    found, still = (observed(after_blocks(trial, cloud, layer_norm, step)) for step in (1.0, trial.control(0.0, 1.0)))
    return Evidence(
        printed=Gap(departure(found, bands), DEPARTED),
        instead=Gap(found["clusters"], GATHERED),
        control=Gap(still["clusters"], GATHERED),
        table={"clusters per token": found["clusters"], "excess kurtosis": found["excess_kurtosis"]},
    )


@claim(
    "X11",
    source=Source.OURS,
    place="on section 6 of the paper: other contractive mappings",
    title="Normal points for ranks keep a Gaussian cloud Gaussian",
    wording=(
        "Under attention over itself a Gaussian cloud stays Gaussian, and spread out, if tokens are assigned to fixed"
        " normal points after each step; layer normalization and eight other contractions do not keep it Gaussian."
    ),
    reading=(
        "320 tokens in 8 dimensions, 30 blocks (600 and 60 in full): `normal_ranks`, the assignment, keeps the"
        " cumulants within 1.5 times the largest of eight Gaussian samples and at least three clusters for four"
        " tokens, and in one dimension `normal_scores`, ranks to normal quantiles, gives back every token after 20"
        " blocks. The other eight of `CONTRACTIONS` (RMS norm, halving, global RMS, tanh, batch norm, ball clipping,"
        " whitening, normal scores of each feature) leave the bounds on cumulants; C45 has layer normalization. In the"
        " control whitening takes the place of `normal_ranks`."
    ),
    reference="the cumulants of Gaussian samples of the same size, and normal quantiles of torch.distributions",
    formula="K(η + m(η)) stays Gaussian for some K ≠ LN",
)
def other_contractions(trial: Trial) -> Evidence:
    """Cumulants and clusters of every contraction and of the one that holds; the control exchanges them."""
    cloud, bands = gaussian_cloud(trial)
    named = {name: shrink for name, shrink in CONTRACTIONS.items() if name != "layer_norm"}
    found = {name: observed(after_blocks(trial, cloud, shrink)) for name, shrink in named.items()}
    levels = (torch.arange(len(cloud), dtype=torch.float64) + 0.5) / len(cloud)
    quantiles = torch.distributions.Normal(0.0, 1.0).icdf(levels)[cloud[:, 0].argsort().argsort()]
    moved = evolve(normal_scores(cloud[:, :1]), steps=20, contraction=normal_scores, observe={}).cloud

    def kept(shrink: Callable[[Tensor], Tensor]) -> Gap:
        seen = observed(after_blocks(trial, cloud, shrink))
        return widest(Gap(departure(seen, bands), DEPARTED), Gap(1 - seen["clusters"], GATHERED))

    lost = [Gap(DEPARTED / departure(seen, bands), 1.0) for seen in found.values()]
    return Evidence(
        printed=widest(kept(normal_ranks), apart(moved[:, 0], quantiles), *lost),
        control=kept(trial.control(zca, normal_ranks)),
        table={f"clusters per token, {name}": seen["clusters"] for name, seen in found.items()}
        | {f"excess kurtosis, {name}": seen["excess_kurtosis"] for name, seen in found.items()},
    )


DEPARTED = 1.5
"""A cloud whose cumulants exceed those of eight Gaussian samples by this factor is not Gaussian."""

GATHERED = 0.25
"""A cloud with at most so many clusters per token has gathered."""

CUMULANTS = ("third_cumulant", "excess_kurtosis")


def gaussian_cloud(trial: Trial) -> tuple[Tensor, dict[str, float]]:
    """Draw a cloud of normal tokens, and the largest cumulants of eight others of its size."""
    normal = normals(trial)
    tokens, dim = trial.size(320, 600), 8
    samples = evolve(normal(8, tokens, dim), steps=0, observe=CUMULANTS).observables
    return normal(tokens, dim), {name: float(samples[name].abs().max()) for name in CUMULANTS}


def after_blocks(trial: Trial, cloud: Tensor, shrink: Callable[[Tensor], Tensor], step: float = 1.0) -> Tensor:
    return evolve(cloud, step=step, steps=trial.size(30, 60), contraction=shrink, observe={}).cloud


def observed(cloud: Tensor) -> dict[str, float]:
    seen = evolve(cloud, steps=0, observe=[*CUMULANTS, "clusters"]).observables
    return {name: float(values) for name, values in seen.items()} | {"clusters": float(seen["clusters"]) / len(cloud)}


def departure(seen: dict[str, float], bands: dict[str, float]) -> float:
    """Return the distance of cumulants from zero in units of Gaussian samples; infinite for nan, a single point."""
    share = max(abs(seen[name]) / bands[name] for name in CUMULANTS)
    return math.inf if math.isnan(share) else share
