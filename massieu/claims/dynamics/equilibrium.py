"""Theorem 1 of the paper and what becomes of it: Gaussian tokens under attention and a contraction."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from massieu.claims.claim import Curve, Evidence, Gap, Trial, Verdict
from massieu.claims.experiment import above, apart, linspace, normals, widest
from massieu.claims.measures.families import PAPER
from massieu.claims.registry import claim
from massieu.dynamics import (
    CONTRACTIONS,
    ascend,
    cumulant_amplification,
    evolve,
    gaussian_moments,
    layer_norm,
    renormalization,
)
from massieu.measures import Gaussian, Points, Sphere


def covariance(normal: Callable[..., Tensor], dim: int) -> Tensor:
    """A random covariance that is well conditioned."""
    root: Tensor = torch.eye(dim, dtype=torch.float64) + 0.4 * torch.tanh(normal(dim, dim)) / dim**0.5
    return root @ root.T


def pushed(step: Callable[[Tensor], Tensor], location: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and covariance of a Gaussian after a map, by points on its axes, which is exact for affine maps."""
    arms = len(location) ** 0.5 * torch.linalg.cholesky(spread).T
    moved = step(location + torch.cat([arms, -arms]))
    return moved.mean(0), torch.cov(moved.T, correction=0)


@claim(
    "C24",
    source=f"{PAPER}, Theorem 1",
    statement="Attention and renormalisation by the mean of η and of η η^⊤ leave N(Σ^{-1}μ, Σ^{-1}) as it is.",
    formula="RN ∘ A (p_eq) = p_eq, η → η_0 + Λ_0^{1/2} E[η η^⊤]^{-1/2} (η − η̄)",
    correction=(
        "With the covariance in the place of E[η η^⊤], or if μ = 0. Then RN ∘ A is even the identity of every token;"
        " RN after any other affine map keeps the law too."
    ),
    expected=Verdict.HOLDS_CORRECTED,
)
def theorem_1(trial: Trial) -> Evidence:
    """Moments and tokens after both maps, with both matrices; the control has keys of an unrelated covariance."""
    normal = normals(trial)
    dim = trial.size(4, 64)
    key_location, sigma, other, around = normal(dim), covariance(normal, dim), covariance(normal, dim), normal(5, dim)

    def after(centred: bool, key_location: Tensor, sigma: Tensor, keys: Tensor) -> tuple[Gap, Gap, Tensor]:
        """How far moments and tokens are from what they were, and the covariance."""
        precision = torch.linalg.inv(sigma)
        location = precision @ key_location
        measure = Gaussian(key_location, keys)

        def attention(eta: Tensor) -> Tensor:
            return eta + measure.mean(eta)

        mean, spread = pushed(attention, location, precision)
        second = spread if centred else spread + torch.outer(mean, mean)
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
    source=f"{PAPER}, section 3.3 and Theorem 1",
    statement="Before renormalisation, attention expands the Gaussian of the equilibrium, centred or not.",
    formula="(I + Σ) Σ^{-1} (I + Σ) ≻ Σ^{-1}, entropy gain log det(I + Σ)",
    expected=Verdict.HOLDS,
)
def gaussian_expansion(trial: Trial) -> Evidence:
    """Covariances before and after, from points moved by the mean map; the control turns the values round."""
    normal = normals(trial)
    dim = trial.size(4, 64)

    def gap(key_location: Tensor, sigma: Tensor, sign: float) -> tuple[Gap, Tensor, Tensor]:
        precision = torch.linalg.inv(sigma)
        measure = Gaussian(key_location, sigma)
        mean, spread = pushed(lambda eta: eta + sign * measure.mean(eta), precision @ key_location, precision)
        law = gaussian_moments(precision @ key_location, precision, sigma, sign * sigma)
        wider = torch.linalg.eigvalsh(spread - precision)
        gain = 0.5 * (torch.logdet(spread) - torch.logdet(precision))
        expected = torch.logdet(torch.eye(len(sigma), dtype=torch.float64) + sigma)
        same = widest(apart(mean, law[0]), apart(spread, law[1]))
        return widest(same, apart(gain, expected), above(-wider, torch.zeros_like(wider))), wider, gain

    key_location, sigma = normal(dim), covariance(normal, dim)
    known = torch.tensor([1.0, -1.0], dtype=torch.float64), torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
    _, wider, gain = gap(*known, 1.0)
    return Evidence(
        printed=gap(key_location, sigma, 1.0)[0],
        control=gap(key_location, sigma, trial.control(-0.5, 1.0))[0],
        table={
            "least eigenvalue of the difference, Σ = (2 1; 1 2)": float(wider[0]),
            "largest": float(wider[1]),
            "gain of entropy": float(gain),
        },
    )


@claim(
    "C26",
    source=f"{PAPER}, abstract and section 3.3",
    statement="The expansion by attention is counterbalanced by the contraction of layer normalisation.",
    formula="LN(η + s m(η)) = η for normalised η",
    correction=(
        "If the intrinsic measure is invariant under rotations, so that m(η) is parallel to η. Layer normalisation acts"
        " on each token and undoes nothing else."
    ),
    expected=Verdict.CONDITIONAL,
)
def counterbalance(trial: Trial) -> Evidence:
    """Normalised tokens after a block, keys at random and on a whole sphere; the control leaves the norm out.

    The table has the excess kurtosis of normalised Gaussian tokens, −6 / (n + 2) in n = D − 1 dimensions.
    """
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
    source="mathematics of this project, on Theorem 1 of the paper",
    statement="The Gaussian equilibrium is a fixed point and unstable: small cumulants grow, the more the higher.",
    formula="κ_k' = (1 + kr) κ_k for k ≥ 3, r = sσ / (1 + sσ)",
    expected=Verdict.HOLDS,
)
def unstable(trial: Trial) -> Evidence:
    """A Gaussian and its small cumulants after a block, by quadrature; the control has an affine map for attention."""
    step, sigma = map(float, 0.5 + torch.rand(2, generator=trial.generator, dtype=torch.float64))
    z = linspace(-9.0, 9.0, trial.size(361, 1441))
    weight = torch.softmax(-0.5 * z.square(), -1)
    waves = {3: z**2 - 1, 4: z**3 - 3 * z, 5: z**4 - 6 * z**2 + 3}

    def cumulant(order: int, x: Tensor) -> Tensor:
        """Of numbers with mean zero and variance one."""
        return weight @ x**order - {3: 0.0, 4: 3.0, 5: 10 * float(weight @ x**3)}[order]

    def standard(x: Tensor) -> Tensor:
        x = x - weight @ x
        return x / (weight @ x.square()).sqrt()

    def attention(eta: Tensor) -> Tensor:
        return Points(sigma * eta, weight.log()).mean(eta)

    def affine(eta: Tensor) -> Tensor:
        return sigma * eta + 1

    def block(x: Tensor, field: Callable[[Tensor], Tensor]) -> Tensor:
        eta = x[:, None] / sigma**0.5
        return standard((eta + step * field(eta))[:, 0])

    def growth(order: int, field: Callable[[Tensor], Tensor]) -> float:
        start = standard(z + 1e-4 * waves[order] / math.factorial(order))
        return float(cumulant(order, block(start, field)) / cumulant(order, start))

    def gap(field: Callable[[Tensor], Tensor]) -> Gap:
        still = (weight @ (block(z, field) - standard(z)).square()).sqrt()
        off = [growth(order, field) / cumulant_amplification(order, step, sigma) - 1 for order in waves]
        return widest(Gap(float(still), 1e-5), *(Gap(abs(each), 0.01) for each in off))

    seen, cloud = [], standard(z + 1e-4 * waves[4] / 24)
    for _ in range(7):
        seen.append(float(cumulant(4, cloud)))
        cloud = block(cloud, attention)
    law = [seen[0] * cumulant_amplification(4, step, sigma) ** each for each in range(7)]
    return Evidence(
        printed=gap(attention),
        control=gap(trial.control(affine, attention)),
        table={f"growth of κ_{order}": growth(order, attention) for order in waves}
        | {f"1 + {order} r": cumulant_amplification(order, step, sigma) for order in waves},
        curve=Curve(list(range(7)), {"κ_4": seen, "κ_4 (1 + 4r)^n": law}, x_label="blocks", y_label="κ_4", log_y=True),
    )


@claim(
    "C45",
    source=f"{PAPER}, section 6",
    statement="Layer normalisation induces a Gaussian equilibrium.",
    formula="K(η + m(η)) stays Gaussian for K = LN",
    correction="With the tokens as keys, clusters form within some thirty blocks.",
    expected=Verdict.FAILS,
)
def gaussian_layers(trial: Trial) -> Evidence:
    """Cumulants after many blocks in units of Gaussian samples, and clusters; the control leaves attention out."""
    return gathering(trial, ["layer_norm"])


@claim(
    "X11",
    source="mathematics of this project, on a question of section 6 of the paper",
    statement="Some other contraction in the place of layer normalisation keeps a Gaussian cloud Gaussian.",
    formula="K(η + m(η)) stays Gaussian for some K ≠ LN",
    correction="None of seven does: with the tokens as keys, clusters form within some thirty blocks under all.",
    expected=Verdict.FAILS,
)
def other_contractions(trial: Trial) -> Evidence:
    """As for layer normalisation; the one that stays closest to a Gaussian counts, and the one with most clusters."""
    return gathering(trial, [name for name in CONTRACTIONS if name != "layer_norm"])


def gathering(trial: Trial, contractions: Sequence[str]) -> Evidence:
    """How far a Gaussian cloud is from a Gaussian after many blocks, and into how few clusters it has gathered."""
    normal = normals(trial)
    tokens, dim, blocks = trial.size(320, 1000), 8, trial.size(30, 60)
    names = ["third_cumulant", "excess_kurtosis"]
    samples = evolve(normal(8, tokens, dim), steps=0, observe=names).observables
    bands = {name: float(samples[name].abs().max()) for name in names}
    cloud = normal(tokens, dim)

    def run(step: float) -> dict[str, dict[str, Tensor]]:
        watched = [*names, "clusters"]
        return {
            name: evolve(cloud, step=step, steps=blocks, contraction=name, observe=watched, every=blocks).observables
            for name in contractions
        }

    def departure(seen: dict[str, Tensor]) -> float:
        return max(abs(float(seen[name][-1])) / bands[name] for name in names)

    def left(runs: dict[str, dict[str, Tensor]]) -> dict[str, float]:
        return {name: float(seen["clusters"][-1]) / tokens for name, seen in runs.items()}

    found = run(1.0)
    return Evidence(
        printed=Gap(min(map(departure, found.values())), 1.5),
        instead=Gap(max(left(found).values()), 0.25),
        control=Gap(max(left(run(trial.control(0.0, 1.0))).values()), 0.25),
        table={f"clusters per token, {name}": share for name, share in left(found).items()}
        | {f"excess kurtosis, {name}": float(seen["excess_kurtosis"][-1]) for name, seen in found.items()},
    )
