"""Section 6 of the paper: keys that pass through a nonlinear activation where the family is not Gaussian."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from massieu.claims.claim import Evidence, Gap, Trial, Verdict
from massieu.claims.experiment import apart, normals, widest
from massieu.claims.registry import claim
from massieu.claims.sources import PAPER
from massieu.measures import Gaussian, Hypercube, Measure, Poisson
from massieu.nn import MeasureAttention

Means = Callable[[Tensor], Tensor]

DIM, RATE = 5, 0.5
OFF = 0.05  # a tenth of a typical output, a mean of a few standard normal tokens; rounding would be 1e-15


@claim(
    "C53",
    source=PAPER,
    place="section 6, last paragraph",
    title="Non-Gaussian keys need a nonlinear activation",
    wording=(
        "Non-Gaussian exponential families do not map the natural parameter to the expected statistic by an affine map;"
        " there a nonlinear activation would have to be applied before the dot product, and its affine approximation is"
        " the Fisher information matrix."
    ),
    reading=(
        "Our reading: for spins and Poisson counts, beside a Gaussian. Attention of 16 queries over 40 tokens (in full"
        " 400) of random natural parameters in 5 dimensions, whose keys are the expected statistics: the layer with"
        " the activation returns it to 1e-9 for all three. Layers with the Fisher matrix at zero, and with the affine"
        " map of least squares over these very tokens, return it to 1e-9 for the Gaussian; for the others some output"
        " of each is off by more than 0.05. At 8 of the tokens, the error of the affine approximation by the Fisher"
        " matrix of spins and counts falls with the distance to the power 2 ± 0.1."
    ),
    reference="expected statistics as sums over all states of the spins, over counts to 240, and over a grid",
    formula="p_ij ∝ e^{η_i·∇G(η_j)}, ∇G(η + δ) = ∇G(η) + ∇^2 G(η) δ + O(‖δ‖^2)",
    expected=Verdict.HOLDS,
)
def activated_keys(trial: Trial) -> Evidence:
    """Layers with an activation, a fitted map or a Fisher matrix against attention over summed means; the control has
    the fitted map in place of the activation.
    """
    normal = normals(trial)
    tokens, query = normal(1, trial.size(40, 400), DIM), normal(1, 16, DIM)
    law = torch.distributions.Normal(normal(DIM), 0.5 + torch.rand(DIM, generator=trial.generator, dtype=torch.float64))
    families: dict[str, tuple[Measure, Means]] = {
        "spins": (Hypercube(DIM), spin_means),
        "counts": (Poisson(torch.full((DIM,), RATE, dtype=torch.float64)), count_means),
        "Gaussian": (Gaussian(law.loc, torch.diag(law.variance)), lambda natural: gaussian_means(natural, law)),
    }
    directions, origin = normal(8, DIM), torch.zeros(1, DIM, dtype=torch.float64)
    gaps: dict[tuple[str, str], Gap] = {}
    for name, (family, means) in families.items():
        exact = torch.softmax(query @ means(tokens).mT, -1) @ tokens
        layers = {
            "activation": identity_layer(family, torch.eye(DIM, dtype=torch.float64)),
            "fitted map": identity_layer(None, affine_fit(tokens, means(tokens))),
            "Fisher matrix": identity_layer(None, family.fisher(origin)[0]),
        }
        for kind, layer in layers.items():
            gaps[name, kind] = apart(layer(query, context=tokens), exact)
    curved, affine = ("spins", "counts"), ("fitted map", "Fisher matrix")
    orders = {name: fisher_order(*families[name], tokens[0, :8], directions) for name in curved}
    least = min(gaps[name, kind].measured for name in curved for kind in affine)
    conditions = [
        *(gaps["Gaussian", kind] for kind in affine),
        Gap(OFF / least if least > 0 else math.inf, 1.0),
        *(Gap(abs(orders[name] - 2), 0.1) for name in curved),
    ]
    return Evidence(
        printed=widest(*(gaps[name, "activation"] for name in families), *conditions),
        control=widest(*(gaps[name, trial.control("fitted map", "activation")] for name in families), *conditions),
        table={
            **{f"{kind}, {name}": gaps[name, kind].measured for name in families for kind in affine},
            **{f"order of the error of the Fisher matrix, {name}": orders[name] for name in curved},
        },
    )


def identity_layer(activation: Measure | None, key_map: Tensor) -> MeasureAttention:
    """One head that attends from queries to mapped keys and returns tokens as they are."""
    layer = MeasureAttention(DIM, 1, bias=False, scale=1.0, activation=activation, dtype=torch.float64)
    layer.requires_grad_(False)
    layer.k_proj.weight.copy_(key_map)
    for projection in (layer.q_proj, layer.v_proj, layer.out_proj):
        assert projection is not None
        projection.weight.copy_(torch.eye(DIM, dtype=torch.float64))
    return layer


def affine_fit(tokens: Tensor, means: Tensor) -> Tensor:
    """The matrix of the affine map of least squares; its constant is the same for all keys and changes no weight."""
    inputs = torch.cat([tokens[0], torch.ones_like(tokens[0, :, :1])], -1)
    matrix: Tensor = torch.linalg.lstsq(inputs, means[0]).solution[:-1].mT
    return matrix


def fisher_order(family: Measure, means: Means, natural: Tensor, direction: Tensor) -> float:
    """The power of the distance with which the affine approximation by the Fisher matrix errs."""

    def error(distance: float) -> Tensor:
        linear = means(natural) + distance * torch.einsum("qde,qe->qd", family.fisher(natural), direction)
        length: Tensor = (means(natural + distance * direction) - linear).norm()
        return length

    return float((error(1e-3) / error(1e-4)).log10())


def spin_means(natural: Tensor) -> Tensor:
    """Expected spins, by summing over all of their states."""
    states = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=torch.float64)] * DIM)
    expected: Tensor = torch.softmax(natural @ states.mT, -1) @ states
    return expected


def count_means(natural: Tensor) -> Tensor:
    """Expected counts, by summing to 240 in each coordinate."""
    counts = torch.arange(241, dtype=torch.float64)
    log_density = torch.distributions.Poisson(torch.tensor(RATE, dtype=torch.float64)).log_prob(counts)
    expected: Tensor = torch.softmax(log_density + natural[..., None] * counts, -1) @ counts
    return expected


def gaussian_means(natural: Tensor, law: torch.distributions.Normal) -> Tensor:
    """Expected values of independent Gaussian coordinates, by a grid in each."""
    x = torch.linspace(-40, 40, 801, dtype=torch.float64)
    log_density = law.log_prob(x[:, None]).T
    expected: Tensor = torch.softmax(log_density + natural[..., None] * x, -1) @ x
    return expected
