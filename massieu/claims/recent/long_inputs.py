"""Long inputs: softmax of bounded scores spreads out, and the Lipschitz constant of self-attention grows."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from massieu.claims.claim import Curve, Evidence, Gap, Source, Trial
from massieu.claims.experiment import above, apart, normals, widest
from massieu.claims.registry import claim
from massieu.statistics import attend

PLAIN, ADAPTIVE, SHARPER = "softmax", "adaptive temperature", "times ln n"
COEFFICIENTS = (-0.037, 0.481, -2.3, 4.917, -1.791)  # of the polynomial of the entropy, highest power first
STEEPEST = 2.43  # its maximum above 0.5 nats, rounded up
RADIUS = 8.0  # lengths below e^{R² / 4} are reasonable


@claim(
    "R1",
    source=Source.VELICKOVIC,
    place="lemma 2.1, softmax must disperse; code of the adaptive temperature (figure 4, as others quote it)",
    title="With bounded scores softmax disperses",
    wording="If scores lie between m and M, every softmax coefficient is Θ(1 / n) as their number n grows.",
    reading=(
        "For 16 queries and n keys in a ball, n of 16 to 4096 (full: 65536), at random and with one key against all"
        " others: every coefficient lies between e^{−δ} / n and e^δ / n with δ = M − m, entropies are at least"
        " ln n − δ, and the largest coefficient against all others falls as n^{−1}, to 0.03 in the exponent. Our"
        " reading of the adaptive temperature: the polynomial of the entropy, above 0.5 nats and at least 1, is 2.43 at"
        " most, so that coefficients lie between e^{−2.43 δ} / n and e^{2.43 δ} / n and disperse too. In the control"
        " scores are multiplied by ln n, which is ours."
    ),
    reference="the bounds by the least and the largest score; 1 / (1 + (n − 1) e^{−δ}) for one key against all others",
    formula="e^{−δ} / n ≤ p_j ≤ e^δ / n, δ = max s − min s",
)
def dispersion(trial: Trial) -> Evidence:
    """Coefficients beyond their bounds and the exponent of the largest; the control sharpens with ln n."""
    normal, top = normals(trial), trial.size(12, 16)
    numbers, dim, radius = [1 << power for power in range(4, top + 1, 2)], 8, 1.0
    axis = radius * torch.nn.functional.normalize(normal(1, dim), dim=-1)
    ball = {number: normal(number, dim) for number in numbers}
    queries = radius * torch.nn.functional.normalize(normal(16, dim), dim=-1)

    def against_others(number: int) -> Tensor:
        return axis * torch.tensor([[1.0]] + [[-1.0]] * (number - 1)).double()

    @functools.cache
    def largest(number: int, name: str) -> float:
        return float(_extremes(axis, against_others(number), name)[0][0, 0])

    def beyond(number: int, name: str) -> Gap:
        inside = radius * ball[number] / ball[number].norm(dim=-1).amax()
        return widest(_beyond(queries, inside, name), _beyond(axis, against_others(number), name))

    def gap(name: str) -> Gap:
        spread = 2 * radius**2
        gaps = [Gap(abs(slope([largest(each, name) for each in numbers[-3:]], numbers[-3:]) + 1), 0.03)]
        for number in numbers:
            written_out = -math.log1p((number - 1) * math.exp(-spread))
            gaps += [beyond(number, name), Gap(abs(largest(number, name) - written_out), 1e-9)]
        return widest(*gaps)

    series: dict[str, Sequence[float]] = {
        name: [math.exp(largest(each, name)) for each in numbers] for name in (PLAIN, ADAPTIVE, SHARPER)
    }
    return Evidence(
        printed=widest(gap(PLAIN), *(beyond(number, ADAPTIVE) for number in numbers)),
        control=gap(trial.control(SHARPER, PLAIN)),
        table={f"largest of {numbers[at]}, {name}": values[at] for name, values in series.items() for at in (1, -1)},
        curve=Curve(numbers, series, x_label="keys", y_label="largest coefficient", log_x=True, log_y=True),
    )


def _sharpened(query: Tensor, keys: Tensor, name: str) -> Tensor:
    """Return queries times the factor of their scores: a polynomial of their entropy, or ln n."""
    if name == SHARPER:
        return math.log(len(keys)) * query
    if name == PLAIN:
        return query
    shares = (query @ keys.T).softmax(-1)
    entropy = -torch.xlogy(shares, shares).sum(-1, keepdim=True)
    factor = functools.reduce(lambda value, each: value * entropy + each, COEFFICIENTS, torch.zeros_like(entropy))
    return torch.where(entropy > 0.5, factor.clamp(min=1.0), 1.0) * query


def _extremes(query: Tensor, keys: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return log coefficients of the extreme keys of any query, entropies, and δ before sharpening."""
    scores = query @ keys.T
    chosen = torch.cat([scores.argmax(-1), scores.argmin(-1)])
    one_hot = torch.zeros(len(keys), len(chosen), dtype=torch.float64)
    one_hot[chosen, torch.arange(len(chosen))] = 1.0
    found = attend(_sharpened(query, keys, name), keys, one_hot, scale=1.0)
    assert found.statistics is not None
    return found.output.log(), found.statistics.entropy, scores.amax(-1) - scores.amin(-1)


def _beyond(query: Tensor, keys: Tensor, name: str) -> Gap:
    """Return the excess of coefficients and entropies over their bounds; extreme keys are among those chosen."""
    log_share, entropy, delta = _extremes(query, keys, name)
    even, delta = math.log(len(keys)), delta * (STEEPEST if name == ADAPTIVE else 1.0)
    low = above(even - delta, entropy)
    return widest(low, above(log_share, delta[:, None] - even), above(-delta[:, None] - even, log_share))


@claim(
    "R7",
    source=Source.CASTIN,
    place="abstract; theorem on the general upper bound and proposition on its tightness from memory",
    title="The Lipschitz constant of attention grows as √n",
    wording=(
        "For inputs of length n in a compact set the Lipschitz constant of self-attention is bounded by √n up to a"
        " constant factor, and this bound is tight for reasonable sequence lengths."
    ),
    reading=(
        "Our reading: for identity weights in a ball of radius R = 8 of the plane, n of 4 to 64 (full: 256). No"
        " Jacobian, at random clouds, at two poles and, for n = 8, in 20 (full: 60) steps of ascent of its norm, is"
        " larger than √(3 (R^4 (4 n + 1) + n)), and where all tokens attend one, at least √(n − 1) / (1 + (n − 1)"
        " e^{−R²/4}), with an exponent of n of 0.5 to 0.03. At R = 1 lengths are not reasonable, and the norm there"
        " does not grow."
    ),
    reference="the Jacobian written out in torch, and both bounds of Castin et al. 2024",
    formula="Lip ≤ √3 (‖A‖^2 R^4 (4 n + 1) + n)^{1/2}, Lip ≥ √(n − 1) / (1 + (n − 1) e^{−R²/4})",
)
def lipschitz(trial: Trial) -> Evidence:
    """Norms of Jacobians against bounds, and the exponent of the length; the control has a small ball."""
    normal, top = normals(trial), trial.size(6, 8)
    numbers = [1 << power for power in range(2, top + 1)]
    axes = torch.linalg.qr(normal(2, 2)).Q
    noise = {number: normal(number, 2) for number in numbers}

    @functools.cache
    def norm(number: int, radius: float) -> float:
        """Return the norm for one token at the border and all others halfway to it, which attend the first."""
        return spectral(radius * torch.tensor([[1.0]] + [[0.5]] * (number - 1)).double() @ axes[:1])

    def gap(radius: float) -> Gap:
        gaps = [Gap(abs(slope([math.log(norm(each, radius)) for each in numbers], numbers) - 0.5), 0.03)]
        for number in numbers:
            least = math.sqrt(number - 1) / (1 + (number - 1) * math.exp(-(radius**2) / 4))
            largest = max(norm(number, radius), *(spectral(each) for each in clouds(noise[number], axes, radius)))
            gaps += [exceeding(largest, general_bound(number, radius)), exceeding(least, norm(number, radius))]
        return widest(*gaps)

    some = clipped(noise[8], 2.0)
    by_autograd = torch.autograd.functional.jacobian(self_attention, some).reshape(16, 16)
    climbed = ascended(noise[8], RADIUS, trial.size(20, 60))
    ascent = exceeding(climbed, general_bound(8, RADIUS))
    return Evidence(
        printed=widest(gap(RADIUS), apart(by_autograd, written_out(some)), ascent),
        control=gap(trial.control(1.0, RADIUS)),
        table={f"norm, {number} tokens": norm(number, RADIUS) for number in numbers}
        | {"after ascent, 8 tokens": climbed},
        curve=Curve(
            numbers,
            {f"R = {radius:g}": [norm(each, radius) for each in numbers] for radius in (RADIUS, 1.0)},
            x_label="tokens",
            y_label="norm of the Jacobian",
            log_x=True,
            log_y=True,
        ),
    )


def exceeding(found: float, bound: float) -> Gap:
    return Gap(max(found - bound, 0.0), 1e-9)


def general_bound(number: int, radius: float) -> float:
    """Return the bound on the Lipschitz constant, as printed, for identity weights."""
    return math.sqrt(3 * (radius**4 * (4 * number + 1) + number))


def self_attention(cloud: Tensor) -> Tensor:
    """Return self-attention with identity matrices and scores x_i·x_j."""
    return attend(cloud, cloud, cloud, scale=1.0, statistics=None).output


def written_out(cloud: Tensor) -> Tensor:
    """Return the Jacobian of :func:`self_attention` as a matrix, term by term."""
    share = torch.softmax(cloud @ cloud.T, -1)
    away = cloud - (share @ cloud)[:, None]
    covariance = torch.einsum("ij,ija,ijb->iab", share, away, away)
    of_keys = torch.einsum("ij,ija,ib->iajb", share, away, cloud)
    of_values = torch.einsum("ij,ab->iajb", share, torch.eye(cloud.shape[1]).to(cloud))
    of_queries = torch.einsum("ij,iab->iajb", torch.eye(len(cloud)).to(cloud), covariance)
    return (of_keys + of_values + of_queries).reshape(cloud.numel(), cloud.numel())


def spectral(cloud: Tensor) -> float:
    return float(torch.linalg.matrix_norm(written_out(cloud), 2))


def clouds(noise: Tensor, axes: Tensor, radius: float) -> list[Tensor]:
    """Draw clouds in a ball, and tokens at two opposite poles of the ball and of one of a tenth of its radius."""
    poles = radius * axes[:1] * torch.where(torch.arange(len(noise)) % 2 == 0, 1.0, -1.0).double()[:, None]
    return [clipped(radius * noise, radius), clipped(0.3 * noise, radius), 0.1 * poles, poles]


def clipped(cloud: Tensor, radius: float) -> Tensor:
    share: Tensor = (radius / cloud.norm(dim=-1, keepdim=True)).clamp(max=1.0)
    return cloud * share


def ascended(start: Tensor, radius: float, steps: int) -> float:
    """Return the largest norm of the Jacobian in a ball along an ascent from a cloud, by steps of length 1."""
    cloud, best = start, 0.0
    for _ in range(steps):
        leaf = clipped(cloud, radius).requires_grad_()
        size = torch.linalg.matrix_norm(written_out(leaf), 2)
        (uphill,) = torch.autograd.grad(size, leaf)
        best = max(best, float(size.detach()))
        cloud = leaf.detach() + uphill / uphill.norm()
    return best


def slope(logs: list[float], numbers: list[int]) -> float:
    """Return the slope of logarithms against the logarithms of numbers, by least squares."""
    x = torch.tensor(numbers, dtype=torch.float64).log()
    y = torch.tensor(logs, dtype=torch.float64)
    x = x - x.mean()
    return float((x * y).sum() / x.square().sum())
