"""Sections 2.3, 3.1 and 3.3 of the paper: attention as an operator that moves tokens."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from massieu.claims.claim import Curve, Evidence, Gap, Trial, Verdict
from massieu.claims.families import PAPER, above, apart, jacobian, linspace, normals, widest
from massieu.claims.registry import claim
from massieu.duality import prox
from massieu.dynamics import ascend, evolve
from massieu.measures import Points
from massieu.measures.measure import gradient
from massieu.statistics import attend


@claim(
    "C11",
    source=f"{PAPER}, section 3.1, after Corollary 1",
    statement="Attention added to the residual connection is a step of gradient ascent on the log normaliser.",
    formula="η + s Σ_j p_j v_j = η + s ∇log Z(η)",
    correction=(
        "Only if the values are the keys. Then no step is too long: G(η + s ∇G) ≥ G(η) + s ‖∇G‖^2 for every s > 0, and"
        " the iteration ends at keys with ‖x_n‖^2 > x_n·x_k for all others."
    ),
    expected=Verdict.CONDITIONAL,
)
def ascent(trial: Trial) -> Evidence:
    """Rise of log Z against s ‖∇G‖^2, steps 0.01 to 1000, values free or the keys; the control goes backwards."""
    normal = normals(trial)
    atoms, dim = trial.size(12, 256), trial.size(4, 64)
    keys, free, query = normal(atoms, dim), normal(atoms, dim), normal(64, dim)
    steps = [0.01, 0.1, 1.0, 10.0, 1000.0]

    def log_z(eta: Tensor) -> Tensor:
        return torch.logsumexp(eta @ keys.T, -1)

    slope = gradient(log_z, query)

    def shortfall(moved: Tensor, step: float) -> Gap:
        promised = log_z(query) + step * slope.square().sum(-1)
        return above(promised / (1 + promised.abs()), log_z(moved) / (1 + promised.abs()))

    update = attend(query, keys, free, scale=1.0).output
    gram = keys @ keys.T
    dominant = (gram.diagonal()[:, None] >= gram).all(-1)
    ends = (evolve(query, steps=50, step=100.0, keys=keys, observe={}).cloud @ keys.T).argmax(-1)
    return Evidence(
        printed=widest(*(shortfall(query + step * update, step) for step in steps)),
        conditional=widest(
            apart(ascend(query, keys), query + slope),
            *(shortfall(ascend(query, keys, step=step), step) for step in steps),
        ),
        control=widest(*(shortfall(ascend(query, keys, step=-step), step) for step in steps[:3])),
        table={
            "self-dominant keys": float(dominant.sum()),
            "keys where 64 queries end": float(len(ends.unique())),
            "of these not self-dominant": float((~dominant[ends.unique()]).sum()),
        },
    )


@claim(
    "C12",
    source=f"{PAPER}, sections 4 and 5",
    statement="Attention moves all tokens at once, each along the gradient of its own log normaliser.",
    formula="ẋ = ∇_x Σ_i log Z_i, Z_i = Σ_j e^{x_i·x_j}",
    correction=(
        "That gradient has a second part, from the tokens as keys of the others. The update is the gradient of"
        " E = ½ Σ_i Z_i in the metric Z_i: ẋ_i = Z_i^{-1} ∂E/∂x_i, so that Σ_i Z_i never falls."
    ),
    expected=Verdict.HOLDS_CORRECTED,
)
def simultaneous(trial: Trial) -> Evidence:
    """The joint update against both gradients by autograd, and ΣZ_i over steps; the control has a causal mask."""
    normal = normals(trial)
    cloud = 0.6 * normal(trial.size(10, 64), trial.size(4, 16))

    def log_z(tokens: Tensor, causal: bool = False) -> Tensor:
        scores = tokens @ tokens.T
        hidden = torch.ones_like(scores).triu(1) if causal else torch.zeros_like(scores)
        return torch.logsumexp(scores.masked_fill(hidden.bool(), -torch.inf), -1)

    def metric_gradient(causal: bool) -> Tensor:
        energy = gradient(lambda tokens: 0.5 * log_z(tokens, causal).exp().sum(), cloud)
        return energy / log_z(cloud, causal).exp()[:, None]

    update = ascend(cloud) - cloud
    joint = gradient(lambda tokens: log_z(tokens).sum(), cloud)
    total = evolve(cloud, steps=20, step=0.1, observe=["log_sum_normalizer"]).observables["log_sum_normalizer"]
    slope = float((joint * update).sum() / update.square().sum())
    return Evidence(
        printed=apart(update, joint),
        corrected=widest(apart(update, metric_gradient(False)), above(total[:-1], total[1:])),
        control=apart(ascend(cloud, causal=True) - cloud, metric_gradient(True)),
        table={
            "missing part, relative to the update": float((joint - update).norm() / update.norm()),
            "d/dt Σ log Z_i over Σ ‖a_i‖^2": slope,
            "conjectured to be at least": 1 + 1 / len(cloud),
        },
    )


@claim(
    "C21",
    source=f"{PAPER}, section 3.3",
    statement="With the residual connection and layer normalisation, symmetric states are pushed away from the origin.",
    formula="‖η + m(η)‖ ≥ ‖η‖",
    correction=(
        "Layer normalisation does not centre the keys, and off the centre tokens may be pulled in. Centred keys do,"
        " without symmetry: η·m(η) ≥ G(η) − G(0) ≥ 0. Pairs part in any case: ‖Δη'‖^2 ≥ ‖Δη‖^2 + ‖Δm‖^2."
    ),
    expected=Verdict.HOLDS_CORRECTED,
)
def expansion(trial: Trial) -> Evidence:
    """Lengths after layer norm and in skewed centred clouds, distances in all; the control mixes the values freely."""
    normal = normals(trial)
    tokens, dim = trial.size(64, 512), trial.size(8, 64)
    around = torch.nn.functional.normalize(normal(1, dim), dim=-1) * dim**0.5
    normed = torch.nn.functional.layer_norm(torch.cat([around + normal(tokens, dim), -around]), (dim,))
    skewed = normal(tokens, dim).exp()
    centred, beta = skewed - skewed.mean(0), 1 / dim

    def shrinkage(cloud: Tensor) -> Gap:
        return above(cloud.norm(dim=-1), ascend(cloud, beta=beta).norm(dim=-1))

    def contraction(cloud: Tensor, values: Tensor) -> Tensor:
        update = attend(cloud, cloud, values, scale=beta).output
        before, change = torch.pdist(cloud).square(), torch.pdist(update).square()
        moved = ascend(cloud, beta=beta) if values is cloud else cloud + update
        return before + change - torch.pdist(moved).square()

    free = contraction(centred, centred @ normal(dim, dim) / dim**0.5)
    clouds = [contraction(each, each) for each in (normed, skewed, centred)]
    line, masked = (torch.tensor(each, dtype=torch.float64)[:, None] for each in ([1, 2, -0.6], [3, 0, 0.2]))
    return Evidence(
        printed=shrinkage(normed),
        corrected=widest(shrinkage(centred), *(above(each, torch.zeros_like(each)) for each in clouds)),
        control=above(free, torch.zeros_like(free)),
        table={
            "free values, share of pairs that lose": float((free > 0).double().mean()),
            "−0.6 beside 1 and 2 goes to": float(ascend(line)[2]),
            "0.2 behind a causal mask comes to": float(ascend(masked, causal=True)[1:].diff(dim=0)),
        },
    )


@claim(
    "C23",
    source=f"{PAPER}, section 3.3",
    statement="Ascent of the log normaliser, the dual of maximum entropy, increases entropy and spreads hidden states.",
    formula="H(after) ≥ H(before)",
    correction=(
        "It depends on whose: the attention distribution, of which log Z is the dual, mostly sharpens. The law of the"
        " hidden states gains E log det(I + sC) ≥ 0, because log Z is convex."
    ),
    expected=Verdict.CONDITIONAL,
)
def entropy_gain(trial: Trial) -> Evidence:
    """Entropy of attention, and of tokens by the slope of their map against the Fisher matrix; the control descends."""
    normal = normals(trial)
    keys, query = normal(16, 4), normal(trial.size(200, 5000), 4)
    keys = keys - keys.mean(0)
    measure = Points(keys)
    before, after = measure.entropy(query), measure.entropy(ascend(query, keys))
    identity = torch.eye(4, dtype=torch.float64)
    volume = torch.logdet(jacobian(lambda eta: ascend(eta, keys, step=0.7), query))

    line, x = Points(torch.tanh(normal(12, 1))), linspace(-9.0, 9.0, 1801)[:, None]
    weight = 0.01 * torch.exp(-0.5 * x[2:-2, 0] ** 2) / math.sqrt(2 * math.pi)

    def gain(step: float) -> Tensor:
        """What the law N(0, 1) of the tokens gains, by differences of fourth order."""
        moved = ascend(x, line.support, step=step)[:, 0]
        slope = (8 * (moved[3:-1] - moved[1:-3]) - (moved[4:] - moved[:-4])) / 0.12
        return (weight * slope.log()).sum()

    predicted = (weight * torch.log1p(line.fisher(x[2:-2])[:, 0, 0])).sum()
    nothing = torch.zeros_like(predicted)
    return Evidence(
        printed=above(before, after),
        conditional=widest(
            apart(gain(1.0), predicted, 1e-7),
            apart(volume, torch.logdet(identity + 0.7 * measure.fisher(query))),
            above(nothing, gain(1.0)),
        ),
        control=above(nothing, gain(-0.5)),
        table={
            "gain of the hidden law": float(gain(1.0)),
            "E log(1 + C)": float(predicted),
            "share of queries where attention entropy rises": float((after > before).double().mean()),
        },
    )


@claim(
    "C41",
    source=f"{PAPER}, section 2.3",
    statement="Residual updates are the steps of a discretised differential equation.",
    formula="η' = η + h m(η): Euler's method for η̇ = ∇log Z(η), of order one",
    expected=Verdict.HOLDS,
)
def euler_steps(trial: Trial) -> Evidence:
    """Order of the error against a Runge-Kutta solution as steps are halved; the control is the midpoint rule."""
    normal = normals(trial)
    keys, start = normal(8, 3), normal(5, 3)
    exact, fine = start, 1 / 256
    for _ in range(256):

        def field(eta: Tensor) -> Tensor:
            return torch.softmax(eta @ keys.T, -1) @ keys

        first = field(exact)
        second = field(exact + fine / 2 * first)
        third = field(exact + fine / 2 * second)
        exact = exact + fine / 6 * (first + 2 * second + 2 * third + field(exact + fine * third))

    def error(count: int, midpoint: bool = False) -> float:
        eta = start
        for _ in range(count):
            middle = ascend(eta, keys, step=0.5 / count) if midpoint else eta
            eta = eta + (ascend(middle, keys, step=1 / count) - middle)
        return float((eta - exact).norm())

    counts = [2**power for power in range(trial.size(7, 10))]
    errors = [error(count) for count in counts]
    last = [error(count, midpoint=True) for count in counts[-2:]]
    order = math.log2(errors[-2] / errors[-1])
    return Evidence(
        printed=Gap(abs(order - 1), 0.05),
        control=Gap(abs(math.log2(last[0] / last[1]) - 1), 0.05),
        table={"order": order, "first ratio": errors[0] / errors[1], "last ratio": errors[-2] / errors[-1]},
        curve=Curve(counts, {"Euler": errors}, x_label="steps", y_label="error", log_x=True, log_y=True),
    )


@claim(
    "C48",
    source=f"{PAPER}, section 2.3",
    statement="Read as operators, layers are solved by iterating to a fixed point, as for monotone operators.",
    formula="η ← y − s m(η) solves η + s m(η) = y",
    correction=(
        "The iteration needs s ‖C‖ < 1. Because ∇G is monotone, prox_{sG} solves it for every s: residual attention"
        " with given keys as values is exactly invertible, the inverse is 1-Lipschitz, log volumes are log det(I + sC)."
    ),
    expected=Verdict.HOLDS_CORRECTED,
)
def monotone_inverse(trial: Trial) -> Evidence:
    """Tokens recovered after steps of 1, 10 and 100, by iteration and by prox; the control undoes a descent."""
    normal = normals(trial)
    keys, query = normal(trial.size(12, 256), 4), normal(20, 4)
    measure = Points(keys)

    def iterated(point: Tensor, step: float) -> Tensor:
        eta = point
        for _ in range(40):
            eta = point - step * attend(eta, keys, keys, scale=1.0).output
        return eta

    plain, exact = [], []
    for step in (1.0, 10.0, 100.0):
        moved = ascend(query, keys, step=step)
        found = prox(measure, moved, step)
        volume = torch.logdet(jacobian(lambda eta, step=step: ascend(eta, keys, step=step), query))  # type: ignore[misc]
        plain.append(apart(iterated(moved, step), query))
        exact += [
            apart(found.natural, query),
            apart(found.log_determinant, volume),
            above(torch.pdist(found.natural), torch.pdist(moved)),
        ]
    return Evidence(
        printed=widest(*plain),
        corrected=widest(*exact),
        control=apart(prox(measure, ascend(query, keys, step=-1.0), 1.0).natural, query),
        table={"largest ‖C‖": float(torch.linalg.eigvalsh(measure.fisher(query)).max())},
    )
