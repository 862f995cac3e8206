"""Collapse of attention: rows that lose their entropy, and tokens that become equal."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from massieu.claims.claim import Curve, Evidence, Gap, Source, Trial, Verdict
from massieu.claims.experiment import above, apart, normals, widest
from massieu.claims.registry import claim
from massieu.statistics import attend, row_statistics

LAYERS = 3
LINEAR = 1.256  # up to here exp(x) − 1 ≤ 2x


@claim(
    "R2",
    source=Source.ZHAI,
    place="theorem 3.1 (from memory)",
    title="Entropy is bounded below by the norm of the logits",
    wording=(
        "The entropy of an attention row is bounded below by a function of σ = ‖W_K W_Qᵀ‖₂ ‖X Xᵀ‖₂ that falls"
        " exponentially with σ, and the bound is tight."
    ),
    reading=(
        "For 30 draws of 8 tokens in 5 dimensions with weights of random sizes no row is below the bound by more than"
        " 1e-9; descent of the entropy on the sphere of 8 logits of norm σ, from 20 random starts and for six values of"
        " σ from 0.5 to 12, ends at the bound up to 1e-6 from above and never below it; and for X = 1 and W of rank one"
        " the bound is attained to 1e-9."
    ),
    reference="the bound as printed, and descent of the entropy on the sphere of logits, where it is least in the ball",
    formula="Ent ≥ log(1 + (T−1)β) + σ √(T(T−1)) β / (1 + (T−1)β), β = exp(−σ √(T/(T−1)))",
)
def entropy_bound(trial: Trial) -> Evidence:
    """Excess of the bound over entropies, and its distance from the least one; the control takes half of sigma."""
    length, normal = 8, normals(trial)
    x, w = normal(30, length, 5), 0.3 * normal(30, 5, 5) * normal(30, 1, 1).exp()
    rows = row_statistics(x @ w, x).entropy
    norms = torch.linalg.matrix_norm(w, 2) * torch.linalg.matrix_norm(x @ x.mT, 2)
    sizes = torch.tensor([0.5, 1.0, 2.0, 4.0, 8.0, 12.0], dtype=torch.float64)
    least = _least_entropy(sizes[:, None, None] * torch.nn.functional.normalize(normal(6, 20, length), dim=-1))
    spike = torch.eye(length, dtype=torch.float64)[0] - 1 / length
    tight = sizes[:, None, None] * torch.outer(torch.eye(length)[0].double(), spike / spike.norm())
    attained = row_statistics(tight, torch.eye(length, dtype=torch.float64).expand_as(tight)).entropy[:, 0]

    def gap(share: float) -> Gap:
        bound = entropy_floor(share * sizes, length)
        return widest(
            above(entropy_floor(share * norms, length)[:, None], rows),
            above(bound, least),
            apart(attained, bound),
            apart(least, bound, 1e-6),
        )

    grid = torch.linspace(0, 12, 25, dtype=torch.float64)
    return Evidence(
        printed=gap(1.0),
        control=gap(trial.control(0.5, 1.0)),
        table={"least entropy at σ = 12": float(least[-1]), "log T": math.log(length)},
        curve=Curve(grid.tolist(), {"bound": entropy_floor(grid, length).tolist()}, "σ", "entropy"),
    )


@claim(
    "R3",
    source=Source.DONG,
    place="abstract and theorem 2.2 (bound of one layer; norms and γ from memory)",
    title="Pure attention loses rank at a cubic rate",
    wording=(
        "Without skip connections and MLPs the output of stacked self-attention converges doubly exponentially to a"
        " matrix of rank one, the residual of a layer being bounded by a multiple of the cube of that before it."
    ),
    reading=(
        "Our reading: whatever the scores. For five draws of 6 tokens in 4 dimensions three layers bring the residual"
        " below 1e-9 of the first, with scores of 100 ‖x‖² and, under the condition, with small residuals; there the"
        " residual of one layer is also below our form of the bound, and scales with the power 3 up to 0.1 after one"
        " layer and 9 up to 2 after two. Our form has the norm ‖·‖_{1,∞} of both weights, where the theorem has"
        " ‖W_QK‖_1 ‖W_V‖_{1,∞} ≤ β, and a γ computed from the scores and attention of these very draws; it then follows"
        " from the proof. The powers do not depend on it."
    ),
    reference="our form of the cubic bound with its norms written out, and the powers 3 and 9",
    formula="‖res(SA(X))‖_{1,∞} ≤ 4 γ ‖W_QK‖_{1,∞} ‖W_V‖_{1,∞} / √d_qk ‖res(X)‖³_{1,∞}",
    correction=(
        "If scores of the residuals differ by at most 1.256 along a row, as the lemma behind the bound asks. Where"
        " scores are large every token may attend to itself, and nothing collapses."
    ),
    expected=Verdict.CONDITIONAL,
)
def rank_collapse(trial: Trial) -> Evidence:
    """Residuals of layers of attention for large scores and for small ones; the control has skip connections."""
    normal = normals(trial)
    center, deviation, score = normal(5, 1, 4), normal(5, 6, 4), normal(5, 4, 4)
    value = torch.linalg.qr(normal(5, 4, 4)).Q
    deviation = deviation - deviation.mean(-2, keepdim=True)

    def layer(x: Tensor, matrix: Tensor, skip: float) -> Tensor:
        return skip * x + attend(x @ matrix, x, x @ value, scale=0.5, statistics=None).output

    def residuals(size: float, matrix: Tensor, skip: float) -> Tensor:
        x, found = center + size * deviation, []
        for _ in range(LAYERS + 1):
            found.append(composite_norm(x - x.mean(-2, keepdim=True)))
            x = layer(x, matrix, skip)
        return torch.stack(found)

    def falls(size: float, matrix: Tensor, skip: float) -> Gap:
        found = residuals(size, matrix, skip)
        return Gap(float((found[-1] / found[0]).max()), 1e-9)

    def collapse(skip: float) -> Gap:
        # The powers are those of the limit of small residuals; after two layers rounding leaves less room below.
        once, twice = ((residuals(s, score, skip) / residuals(s / 2, score, skip)).log2() for s in (0.005, 0.1))
        powers = widest(Gap(float((once[1] - 3).abs().max()), 0.1), Gap(float((twice[2] - 9).abs().max()), 2.0))
        x = center + 0.1 * deviation
        bound, middle = _cubic_bound(0.1 * deviation, center, score, value)
        excess = composite_norm(layer(x, score, skip) - middle) / bound
        return widest(falls(0.1, score, skip), powers, Gap(float(excess.max()), 1.0))

    keep = 200 * torch.eye(4, dtype=torch.float64).expand(5, -1, -1)
    apart_tokens = residuals(1.0, keep, 0.0)
    return Evidence(
        printed=falls(1.0, keep, 0.0),
        conditional=collapse(0.0),
        control=collapse(trial.control(1.0, 0.0)),
        table={"residual after three layers of large scores": float(apart_tokens[-1].min())},
    )


def entropy_floor(sigma: Tensor, length: int) -> Tensor:
    """Return the least entropy of a softmax over logits of Euclidean norm at most sigma, as printed."""
    beta = torch.exp(-sigma * math.sqrt(length / (length - 1)))
    rest = 1 + (length - 1) * beta
    return rest.log() + sigma * math.sqrt(length * (length - 1)) * beta / rest


def _least_entropy(logits: Tensor, steps: int = 400) -> Tensor:
    """Return the entropy at the end of descent on spheres of logits, the least of several starts."""
    size = logits.norm(dim=-1, keepdim=True)
    for _ in range(steps):
        p = logits.softmax(-1)
        log_p = logits.log_softmax(-1)
        slope = -p * (log_p - (p * log_p).sum(-1, keepdim=True))
        logits = logits - size * torch.nn.functional.normalize(slope, dim=-1) * 0.2
        logits = size * torch.nn.functional.normalize(logits, dim=-1)
    p = logits.softmax(-1)
    return -(p * p.log()).sum(-1).amin(-1)


def composite_norm(x: Tensor) -> Tensor:
    """Return the root of the largest column sum times the largest row sum of absolute values."""
    return (x.abs().sum(-2).amax(-1) * x.abs().sum(-1).amax(-1)).sqrt()


def _cubic_bound(deviation: Tensor, center: Tensor, score: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return our form of the bound on the residual of one layer, and the row that all outputs are close to."""
    inner = 0.5 * deviation @ score @ deviation.mT
    spread = inner.amax(-1) - inner.amin(-1)
    assert float(spread.max()) <= LINEAR
    common = (0.5 * center @ score @ deviation.mT).softmax(-1)
    # γ: the row sums and column sums of the perturbed softmax, in units of the norm of the scores.
    weight = (spread.amax(-1) * spread.sum(-1) * common.amax((-2, -1))).sqrt()
    gamma = weight / (2 * composite_norm(inner))
    bound = 4 * gamma * composite_norm(score) * composite_norm(value) * 0.5 * composite_norm(deviation) ** 3
    return bound, common @ ((center + deviation) @ value)
