"""Sections 2.3, 3.1 and 3.3 of the paper: attention as an operator that moves tokens."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from massieu.claims.claim import Curve, Evidence, Gap, Source, Trial, Verdict
from massieu.claims.experiment import above, apart, jacobian, linspace, normals, widest
from massieu.claims.registry import claim
from massieu.duality import prox
from massieu.dynamics import ascend, evolve, layer_norm
from massieu.measures import Points
from massieu.measures.measure import gradient
from massieu.statistics import attend


@claim(
    "C11",
    source=Source.PAPER,
    place="section 3.1, after Corollary 1",
    title="Residual attention is gradient ascent on log Z",
    wording=(
        "Attention added to the residual connection is a gradient update of the log normalizer with respect to the"
        " hidden states."
    ),
    reading=(
        "64 queries over 12 keys in 4 dimensions (256 in 64 in full): log Z rises by s ‖∇log Z‖^2 at least, for s ="
        " 0.01 to 1000; as printed for free values, where it does not, and for values = keys, where the update is also"
        " the gradient to 1e-9. The control goes backwards."
    ),
    reference="autograd through a log-sum-exp written out in torch",
    formula="η + s Σ_j p_j v_j = η + s ∇log Z(η)",
    correction=(
        "Only if the values are the keys. Then no step is too long: G(η + s ∇G) ≥ G(η) + s ‖∇G‖^2 for every s > 0."
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

    def gap(sign: float) -> Gap:
        return widest(
            apart(ascend(query, keys, step=sign), query + slope),
            *(shortfall(ascend(query, keys, step=sign * step), step) for step in steps),
        )

    update = attend(query, keys, free, scale=1.0).output
    gram = keys @ keys.T
    dominant = (gram.diagonal()[:, None] >= gram).all(-1)
    ends = (evolve(query, steps=50, step=100.0, keys=keys, observe={}).cloud @ keys.T).argmax(-1)
    return Evidence(
        printed=widest(*(shortfall(query + step * update, step) for step in steps)),
        conditional=gap(1.0),
        control=gap(trial.control(-1.0, 1.0)),
        table={
            "self-dominant keys": float(dominant.sum()),
            "keys where the attention of 64 queries ends": float(len(ends.unique())),
            "of these not self-dominant": float((~dominant[ends.unique()]).sum()),
        },
    )


@claim(
    "C12",
    source=Source.PAPER,
    place="sections 4 and 5",
    title="Simultaneous updates of all tokens as one gradient",
    wording=(
        "Attention makes simultaneous gradient updates on each token; why each has one of its own is unclear, and they"
        " are not independent, since they depend on the other hidden states."
    ),
    reading=(
        "Our reading: taken as one, the updates would be the gradient of Σ_i log Z_i, which they are not. As corrected,"
        " for 10 tokens in 4 dimensions (64 in 16 in full): each is the gradient of its own log Z_i with the keys held"
        " fixed, all together are that of E = ½ Σ_i Z_i divided by Z_i, to 1e-9, and Σ_i Z_i never falls in 20 steps of"
        " 0.1. The control has a causal mask."
    ),
    reference="autograd through log-sum-exps of all scores, written out in torch",
    formula="Σ_j p_ij x_j = ∂/∂x_i Σ_l log Z_l, Z_l = Σ_j e^{x_l·x_j}",
    correction=(
        "That gradient has a second part, from the tokens as keys of the others. The update is the gradient of E = ½"
        " Σ_i Z_i in the metric Z_i: ẋ_i = Z_i^{-1} ∂E/∂x_i, so that Σ_i Z_i never falls along the flow."
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

    def gap(causal: bool) -> Gap:
        energy = gradient(lambda tokens: 0.5 * log_z(tokens, causal).exp().sum(), cloud)
        seen = evolve(cloud, steps=20, step=0.1, causal=causal, observe=["log_sum_normalizer"]).observables
        total = seen["log_sum_normalizer"]
        moved = ascend(cloud, causal=causal) - cloud
        own = gradient(lambda tokens: torch.logsumexp(tokens @ cloud.T, -1), cloud)
        return widest(
            apart(moved, own), apart(moved, energy / log_z(cloud, causal).exp()[:, None]), above(total[:-1], total[1:])
        )

    update = ascend(cloud) - cloud
    joint = gradient(lambda tokens: log_z(tokens).sum(), cloud)
    slope = float((joint * update).sum() / update.square().sum())
    return Evidence(
        printed=apart(update, joint),
        corrected=gap(causal=False),
        control=gap(causal=trial.control(True, False)),
        table={
            "missing part, relative to the update": float((joint - update).norm() / update.norm()),
            "d/dt Σ log Z_i over Σ ‖a_i‖^2": slope,
            "conjectured to be at least": 1 + 1 / len(cloud),
        },
    )


@claim(
    "C21",
    source=Source.PAPER,
    place="section 3.3, second paragraph",
    title="With a residual, recentered states move outward",
    wording=(
        "With a residual connection, one could imagine that roughly radially symmetric hidden states, recentered by"
        " layer normalization or another one, push each of them further away from the origin."
    ),
    reading=(
        "64 tokens in 8 dimensions (512 in 64 in full) after layer norm, and recentered normal and lognormal ones, as"
        " keys and values, scores over √d: no token comes closer to the origin in one step, and η·m(η) ≥ G(η) − G(0),"
        " which is not negative for centered keys. Our reading adds pairs, which part by the distance of their updates"
        " at least: ‖Δη'‖^2 ≥ ‖Δη‖^2 + ‖Δm‖^2. In the control a random matrix mixes the values."
    ),
    reference="distances before the update, and G by a log-sum-exp written out in torch",
    formula="Σ_j x_j = 0: η·m(η) ≥ G(η) − G(0) ≥ 0, so ‖η + m‖ ≥ ‖η‖; ‖Δη'‖^2 ≥ ‖Δη‖^2 + ‖Δm‖^2",
)
def expansion(trial: Trial) -> Evidence:
    """Lengths and distances of all tokens, after layer norm and recentered; the control mixes the values freely."""
    normal = normals(trial)
    tokens, dim = trial.size(64, 512), trial.size(8, 64)
    beta = dim**-0.5
    symmetric, skewed = normal(tokens, dim), normal(tokens, dim).exp()
    clouds = [layer_norm(symmetric), *(cloud - cloud.mean(0) for cloud in (symmetric, skewed))]
    around = layer_norm(normal(1, dim))
    one_sided = layer_norm(torch.cat([around + normal(tokens, dim), -around]))
    keys, free = torch.eye(dim, dtype=torch.float64), normal(dim, dim) / dim**0.5

    def gap(mixing: Tensor) -> Gap:
        gaps = []
        for cloud in clouds:
            moved = cloud + attend(cloud, cloud, cloud @ mixing, scale=beta).output
            parted = torch.pdist(moved).square() - torch.pdist(moved - cloud).square()
            rise = (torch.logsumexp(beta * cloud @ cloud.T, -1) - math.log(tokens)) / beta
            gaps += [
                above(cloud.norm(dim=-1), moved.norm(dim=-1)),
                above(torch.pdist(cloud).square(), parted),
                above(rise, (cloud * (moved - cloud)).sum(-1)),
            ]
        return widest(*gaps)

    pulled = ascend(one_sided, beta=1 / dim).norm(dim=-1) < one_sided.norm(dim=-1)
    line, masked = (torch.tensor(each, dtype=torch.float64)[:, None] for each in ([1, 2, -0.6], [3, 0, 0.2]))
    return Evidence(
        printed=gap(keys),
        control=gap(trial.control(free, keys)),
        table={
            "pulled in after layer norm, one token opposite the others": float(pulled[-1]),
            "−0.6 beside 1 and 2 goes to": float(ascend(line)[2]),
            "0.2 behind a causal mask comes to": float(ascend(masked, causal=True)[1:].diff(dim=0)),
        },
    )


@claim(
    "C23",
    source=Source.PAPER,
    place="section 3.3, second paragraph",
    title="Ascent of log Z increases entropy",
    wording=(
        "Since the log normalizer is the dual of maximum entropy, its ascent should increase entropy and expand the"
        " hidden states away from their starting points."
    ),
    reading=(
        "200 queries over 16 centered keys in 4 dimensions (5000 in full): the entropy of the attention distribution"
        " must not fall, as printed, and does. The entropy of the law of the hidden states rises: log volumes of"
        " residual attention with step 0.7 are log det(I + sC) to 1e-9, and a normal law on a line over 12 keys gains E"
        " log(1 + C) ≥ 0 to 1e-7. The control descends."
    ),
    reference="Jacobians by autograd and differences of fourth order, against the covariance of attention",
    formula="H(after) ≥ H(before)",
    correction=(
        "If it is the entropy of the law of the hidden states: it gains E log det(I + sC) ≥ 0, because log Z is convex."
        " The attention distribution, of which log Z is the dual, mostly sharpens."
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
    wider = torch.logdet(identity + 0.7 * measure.fisher(query))

    line, x = Points(torch.tanh(normal(12, 1))), linspace(-9.0, 9.0, 1801)[:, None]
    weight = 0.01 * torch.exp(-0.5 * x[2:-2, 0] ** 2) / math.sqrt(2 * math.pi)

    def gain(step: float) -> Tensor:
        """Return the gain of entropy of the law N(0, 1) of the tokens, by differences of fourth order."""
        moved = ascend(x, line.support, step=step)[:, 0]
        slope = (8 * (moved[3:-1] - moved[1:-3]) - (moved[4:] - moved[:-4])) / 0.12
        return (weight * slope.log()).sum()

    predicted = (weight * torch.log1p(line.fisher(x[2:-2])[:, 0, 0])).sum()

    def gap(sign: float) -> Gap:
        volume = torch.linalg.slogdet(jacobian(lambda eta: ascend(eta, keys, step=0.7 * sign), query)).logabsdet
        gained = gain(sign)
        return widest(apart(gained, predicted, 1e-7), apart(volume, wider), above(torch.zeros_like(gained), gained))

    return Evidence(
        printed=above(before, after),
        conditional=gap(1.0),
        control=gap(trial.control(-1.0, 1.0)),
        table={
            "gain of the hidden law": float(gain(1.0)),
            "E log(1 + C)": float(predicted),
            "share of queries where attention entropy rises": float((after > before).double().mean()),
        },
    )


@claim(
    "C41",
    source=Source.PAPER,
    place="section 2.3",
    title="Residual updates are steps of a differential equation",
    wording="Residual connections have been interpreted as a discretized update to a differential equation.",
    reading=(
        "Our reading: residual attention is Euler's method for η̇ = ∇log Z(η). For 5 tokens over 8 keys in 3 dimensions"
        " the error at time one falls with order 1 ± 0.05 from 128 to 256 steps (256 to 512 in full). The control is"
        " the midpoint rule."
    ),
    reference="a Runge-Kutta solution of fourth order with 256 steps, with a softmax written out in torch",
    formula="η' = η + h m(η): Euler's method for η̇ = ∇log Z(η), of order one",
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

    def error(count: int, midpoint: bool) -> float:
        eta = start
        for _ in range(count):
            middle = ascend(eta, keys, step=0.5 / count) if midpoint else eta
            eta = eta + (ascend(middle, keys, step=1 / count) - middle)
        return float((eta - exact).norm())

    counts = [2**power for power in range(trial.size(9, 10))]

    def order(midpoint: bool) -> float:
        before, after = (error(count, midpoint) for count in counts[-2:])
        return math.log2(before / after)

    errors = [error(count, midpoint=False) for count in counts]
    return Evidence(
        printed=Gap(abs(order(midpoint=False) - 1), 0.05),
        control=Gap(abs(order(midpoint=trial.control(True, False)) - 1), 0.05),
        table={
            "order": order(midpoint=False),
            "first ratio": errors[0] / errors[1],
            "last ratio": errors[-2] / errors[-1],
        },
        curve=Curve(counts, {"Euler": errors}, x_label="steps", y_label="error", log_x=True, log_y=True),
    )


@claim(
    "C48",
    source=Source.OURS,
    place="on the operator theory cited in section 2.3 of the paper",
    title="Residual attention with given keys can be inverted",
    wording="Residual attention with given keys as values can be inverted, whatever its step.",
    reading=(
        "20 tokens over 12 keys in 4 dimensions (256 keys in full), steps 1, 10 and 100: `prox` gives back the tokens"
        " and the log determinant to 1e-9, and brings no pair further apart. In the control the values are free."
    ),
    reference="the tokens before the step, and Jacobians by autograd",
    formula="η + s m(η) = y ⟺ η = prox_{sG}(y), 1-Lipschitz, log volume log det(I + sC)",
)
def monotone_inverse(trial: Trial) -> Evidence:
    """Tokens recovered by prox after steps of 1, 10 and 100, distances, volumes; the control has free values."""
    normal = normals(trial)
    keys, query = normal(trial.size(12, 256), 4), normal(20, 4)
    free = normal(*keys.shape)
    measure = Points(keys)

    def gap(values: Tensor, step: float) -> Gap:
        def move(eta: Tensor) -> Tensor:
            return eta + step * attend(eta, keys, values, scale=1.0).output

        moved = move(query)
        found = prox(measure, moved, step)
        return widest(
            apart(found.natural, query),
            apart(found.log_determinant, torch.linalg.slogdet(jacobian(move, query)).logabsdet),
            above(torch.pdist(found.natural), torch.pdist(moved)),
        )

    def iterated(step: float) -> float:
        moved = eta = ascend(query, keys, step=step)
        for _ in range(40):
            eta = moved - step * measure.mean(eta)
        return apart(eta, query).measured

    steps = (1.0, 10.0, 100.0)
    values = trial.control(free, keys)
    return Evidence(
        printed=widest(*(gap(keys, step) for step in steps)),
        control=widest(*(gap(values, step) for step in steps)),
        table={
            "error of the plain iteration, s = 0.01": iterated(0.01),
            "s = 100": iterated(100.0),
            "largest ‖C‖": float(torch.linalg.eigvalsh(measure.fisher(query)).max()),
        },
    )
