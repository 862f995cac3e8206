"""Section 3.1 of the paper: exponential families from an intrinsic measure, and attention as one of them."""

from __future__ import annotations

import torch

from massieu.claims.claim import Evidence, Gap, Trial, Verdict
from massieu.claims.registry import claim
from massieu.measures import Gamma, Points

PAPER = "A Probabilistic Interpretation of Transformers"
TIGHT = 1e-9  # of closed forms against each other in float64


@claim(
    "C1",
    source=f"{PAPER}, equations 1 and 2",
    statement="The normaliser of an exponential family is the Laplace transform of its intrinsic measure.",
    formula="Z(η) = (L h)(η)",
    correction="The two-sided Laplace transform is taken at −η, Z(η) = (L h)(−η), and only where it is finite.",
    expected=Verdict.HOLDS_CORRECTED,
)
def laplace_transform(trial: Trial) -> Evidence:
    """Integrals of a Gamma law against its closed log normaliser, with both signs; the control integrates another."""
    shape, scale = (1.5 + torch.rand(2, generator=trial.generator, dtype=torch.float64)).tolist()
    measure = Gamma(shape, scale)
    natural = torch.linspace(-2.0, 0.5, 11, dtype=torch.float64)[:, None] / scale
    log_normalizer = measure.log_normalizer(natural)
    x = torch.linspace(0.0, 200.0 * scale, 2**18 + 1, dtype=torch.float64)[1:]

    def gap(sign: float, shape: float) -> Gap:
        log_density = torch.distributions.Gamma(shape, 1 / scale).log_prob(x)
        transform = torch.trapezoid((log_density - sign * natural * x).exp(), x, dim=-1).log()
        return Gap(float((transform - log_normalizer).abs().max()), 1e-4)

    edges = torch.tensor([[0.99 / scale], [1.01 / scale]], dtype=torch.float64)
    inside, outside = measure.contains(edges).tolist()
    return Evidence(
        printed=gap(1.0, shape),
        corrected=gap(-1.0, shape),
        control=gap(-1.0, shape + 0.1),
        table={"finite below 1 / scale": float(inside), "finite above": float(outside)},
    )


@claim(
    "C4",
    source=f"{PAPER}, equation 4",
    statement="The mean of the sufficient statistic is the gradient of log Z and a one-to-one function of η.",
    formula="E[u] = ∇log Z(η), injective",
    correction="One-to-one only if the support spans the space; with N ≤ D tokens, m(η + v) = m(η) for v ⟂ k_i − k_j.",
    expected=Verdict.CONDITIONAL,
)
def one_to_one(trial: Trial) -> Evidence:
    """How far the mean moves when η moves by 3: along the null directions of 8 keys, and with keys that span."""
    few = torch.randn(8, 16, generator=trial.generator, dtype=torch.float64)
    many = torch.randn(64, 16, generator=trial.generator, dtype=torch.float64)
    natural = torch.randn(1, 16, generator=trial.generator, dtype=torch.float64)
    null = torch.linalg.svd(few[1:] - few[:1]).Vh[-1:]

    def still(keys: torch.Tensor) -> float:
        """What must at least be seen of a motion, in units of what is seen."""
        moved = Points(keys).mean(natural + 3 * null) - Points(keys).mean(natural)
        return 1e-6 / max(float(moved.norm()), 1e-18)

    return Evidence(
        printed=Gap(still(few), 1.0),
        conditional=Gap(still(many), 1.0),
        control=Gap(still(many[:1]), 1.0),
        table={"null directions of 8 keys in 16 dimensions": 16.0 - 7.0},
    )
