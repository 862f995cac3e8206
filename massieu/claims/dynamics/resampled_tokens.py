"""Sections 4 and 5 of the paper: tokens as samples of a law, and the number that is enough."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from massieu.claims.claim import Curve, Evidence, Gap, Source, Trial, Verdict
from massieu.claims.experiment import normals, widest
from massieu.claims.registry import claim
from massieu.dynamics import Regime, evolve, halve, resample, token_limit, zca
from massieu.measures import Gaussian
from massieu.statistics import attend, row_statistics


@claim(
    "C27",
    source=Source.PAPER,
    place="section 4",
    title="Tokens discretize a distribution",
    wording=(
        "The tokens can be interpreted as a discretization of a distribution, parallel to an empirical distribution of"
        " samples, with attention as an update of that distribution."
    ),
    reading=(
        "Our reading: attention over N normal tokens is close to the mean map of their law, within a tenth. N = 16384"
        " (262144 in full) in 16 dimensions, 32 queries: as printed for queries drawn from the same law, where it is"
        " not, and for queries of length one, where it is. In the control the tokens come from a law with another mean."
    ),
    reference="the mean map η of a standard normal law",
    formula="Σ_j p_j x_j ≈ m(η) for N tokens x_j ~ h",
    correction=(
        "Attention is importance sampling: the error is small for N ≫ e^{η^⊤Ση}, which for typical queries of the"
        " equilibrium is exponential in the dimension."
    ),
    expected=Verdict.CONDITIONAL,
)
def discretization(trial: Trial) -> Evidence:
    """Relative error of attention over drawn tokens, queries typical and short; the control draws from another law."""
    normal = normals(trial)
    count, dim = trial.size(16384, 262144), 16

    def error(query: Tensor, keys: Tensor) -> float:
        found = attend(query, keys, keys, scale=1.0).output
        return float(((found - query).square().sum(-1).mean() / query.square().sum(-1).mean()).sqrt())

    keys, query = normal(count, dim), normal(32, dim)
    short = torch.nn.functional.normalize(query, dim=-1)
    counts = [2**power for power in range(4, 15, 2)]
    series: dict[str, Sequence[float]] = {}
    for width in (1, 4, 16):
        seen = normal(counts[-1], width)
        wide = normal(64, width)
        series[f"D = {width}"] = [error(wide, seen[:each]) for each in counts]
    return Evidence(
        printed=Gap(error(query, keys), 0.1),
        conditional=Gap(error(short, keys), 0.1),
        control=Gap(error(short, keys + trial.control(1.0, 0.0)), 0.1),
        table={
            "e^{η·η}, typical": float(query.square().sum(-1).mean().exp()),
            "e^{η·η}, short": math.e,
            "tokens": float(count),
        },
        curve=Curve(counts, series, x_label="tokens", y_label="relative error", log_x=True, log_y=True),
    )


@claim(
    "C40",
    source=Source.PAPER,
    place="section 5",
    title="Like bootstrap samples, attention makes N out of N",
    wording=(
        "Sequential Monte Carlo, particularly with bootstrapping, depends on its samples and qualitatively similarly"
        " uses N samples to generate N new ones."
    ),
    reading=(
        "Our reading: a token drawn by the attention weights has attention as its mean and the covariance of attention."
        " 20000 draws for each of 12 tokens in 3 dimensions (200000 in full), within six standard errors. The control"
        " draws without the weights. C55 follows the samples over layers."
    ),
    reference="mean and covariance under softmax weights written out in torch",
    formula="J ~ p(· | η): E[x_J] = m(η), Cov[x_J] = ∇m(η)",
)
def bootstrap(trial: Trial) -> Evidence:
    """Mean and covariance of resampled tokens in standard errors; the control draws without the weights."""
    normal = normals(trial)
    cloud, count = 0.6 * normal(12, 3), trial.size(20000, 200000)
    weights = torch.softmax(cloud @ cloud.T, -1)
    mean = weights @ cloud
    covariance = torch.einsum("qn,nd,ne->qde", weights, cloud, cloud) - mean[:, :, None] * mean[:, None]

    def errors(found: Tensor, expected: Tensor) -> Gap:
        """Return standard errors between sample means and expectations; the largest of 144 seldom exceeds six."""
        return Gap(float(((found.mean(0) - expected).abs() / found.std(0)).max()) * count**0.5, 6.0)

    begin = trial.generator.get_state()

    def gap(beta: float) -> Gap:
        trial.generator.set_state(begin)
        drawn = resample(cloud, generator=trial.generator, beta=beta, count=count)
        centered = drawn - mean
        return widest(errors(drawn, mean), errors(centered[..., None] * centered[..., None, :], covariance))

    size = row_statistics(cloud, cloud).effective_atoms
    return Evidence(
        printed=gap(1.0),
        control=gap(trial.control(0.0, 1.0)),
        table={"draws": float(count), "effective tokens, least": float(size.min()), "most": float(size.max())},
    )


@claim(
    "C55",
    source=Source.OURS,
    place="on sections 5 and 6 of the paper: sequential Monte Carlo over layers",
    title="Drawn tokens follow attention in the mean of a layer only",
    wording=(
        "Tokens that are drawn by their attention weights, instead of averaged, follow attention in the mean of each"
        " layer, and their variance follows another law, which adds the covariance of attention."
    ),
    reading=(
        "16 normal clouds of 128 tokens in 3 dimensions (256 in full) with variance 1/4, over six layers, with a"
        " residual connection and halved. Given the tokens before each layer, means over a cloud differ from attention"
        " by √(C / N), with the covariance C of attention, within a fifth for 32 and 128 tokens (64 and 256 in full),"
        " and slopes on the queries by no more than six standard errors. The variances follow the law that adds C at"
        " each layer within e^{1/2}, with and without the residual connection, and end e^2 above those of attention,"
        " which follow theirs within e^{1/10}. In the control tokens are drawn without weights."
    ),
    reference="variances of Gaussian clouds in closed form, and moments under softmax weights written out in torch",
    formula=(
        "attention v' = (1 + v)^2 v / 4, drawn v' = ((1 + v)^2 v + v) / 4 with the residual connection, halved;"
        " v^3 and v^3 + v without"
    ),
)
def bootstrap_layers(trial: Trial) -> Evidence:
    """Means and variances over six layers of drawn tokens and of attention; the control draws without the weights."""
    normal = normals(trial)
    few, many = (0.5 * zca(normal(16, size, 3)) for size in (trial.size(32, 64), trial.size(128, 256)))
    start = trial.generator.get_state()
    attention = evolve(many, steps=LAYERS, contraction="halve", observe={"variance": _variance}).observables["variance"]

    def drawn(cloud: Tensor, beta: float, residual: bool) -> list[Tensor]:
        trial.generator.set_state(start)
        return _resampled(cloud, trial.generator, beta, residual)

    def off(found: Tensor, law: list[float], allowed: float = 0.5) -> Gap:
        return Gap(float((found / torch.tensor(law)).log().abs().max()), allowed)

    def gap(beta: float) -> tuple[Gap, Tensor]:
        """Distance of means, slopes and variances from the law, and the variances with a residual connection."""
        added, alone = drawn(many, beta, residual=True), drawn(many, beta, residual=False)
        kept, spread = (torch.stack([_variance(cloud) for cloud in clouds]) for clouds in (added, alone))
        # Over six layers the log variance of 2048 tokens in 3 dimensions scatters by a tenth: five standard deviations.
        laws = off(kept, _law(True, True)), off(spread, _law(False, True))
        return widest(_differences(drawn(few, beta, residual=False)), _differences(alone), *laws), kept

    found, measured = gap(1.0)
    series: dict[str, Sequence[float]] = {
        "attention": attention.tolist(),
        "its law": _law(True, False),
        "drawn": measured.tolist(),
        "law with the covariance": _law(True, True),
    }
    above = math.log(float(measured[-1]) / _law(True, False)[-1])
    return Evidence(
        printed=widest(found, off(attention, _law(True, False), 0.1), Gap(2 / max(above, 1e-9), 1.0)),
        control=gap(trial.control(0.0, 1.0))[0],
        table={f"variance after {LAYERS} layers, {name}": values[-1] for name, values in series.items()},
        curve=Curve(list(range(LAYERS + 1)), series, x_label="layers", y_label="variance", log_y=True),
    )


LAYERS = 6


def _resampled(cloud: Tensor, generator: torch.Generator, beta: float, residual: bool) -> list[Tensor]:
    """Draw clouds over layers by their attention weights, added to the old ones and halved or not."""
    clouds = [cloud]
    for _ in range(LAYERS):
        new = resample(clouds[-1], generator=generator, beta=beta)
        clouds.append(halve(clouds[-1] + new) if residual else new)
    return clouds


def _law(residual: bool, drawn: bool) -> list[float]:
    """Variances of a centered Gaussian cloud over layers: attention multiplies by v, and has the covariance v."""
    found = [0.25]
    for _ in range(LAYERS):
        v = found[-1]
        moved = (1 + v) ** 2 * v / 4 if residual else v**3
        found.append(moved + drawn * (v / 4 if residual else v))
    return found


def _variance(cloud: Tensor, regime: Regime | None = None) -> Tensor:
    """Variance of a coordinate of a token, over coordinates, tokens and clouds."""
    return cloud.var(-2, correction=0).mean()


def _differences(clouds: list[Tensor]) -> Gap:
    """Return standard errors by which drawn tokens are off attention: their slopes and spread at each layer.

    The means over each cloud must have such errors of one in root mean square, within a fifth: 288 of them leave 0.04.
    The slope on the queries over all clouds, one for each layer, must be within six.
    """
    means, slopes = [], []
    for before, after in itertools.pairwise(clouds):
        scores = before @ before.mT
        weights = torch.softmax(scores, -1)
        mean, mean_score = weights @ before, (weights * scores).sum(-1)
        variance = (weights @ before.square() - mean.square()).sum(-2)
        along = (weights * scores.square()).sum(-1) - mean_score.square()  # variance of a draw along its query
        means.append((after - mean).sum(-2) / variance.sqrt())
        slopes.append(((after - mean) * before).sum() / along.sum().sqrt())
    size = float(torch.stack(means).square().mean().sqrt())
    return widest(Gap(abs(size - 1), 0.2), Gap(float(torch.stack(slopes).abs().max()), 6.0))


@claim(
    "X9",
    source=Source.OURS,
    place="on section 4 of the paper",
    title="Attention over N tokens errs like importance sampling",
    wording="Attention over N Gaussian tokens errs like importance sampling: by N^{-1/2}, at a price of e^{η^⊤Ση}.",
    reading=(
        "Queries of length 0.3 and 1 in 2 dimensions, 250, 1000 and 2000 tokens, 1500 draws of them (20000 in full):"
        " root mean square errors against the law within 15 percent. The control has the law of plain sampling, without"
        " the exponential."
    ),
    reference="errors over many draws of the tokens against the exact mean Ση",
    formula="rmse^2 = e^{η^⊤Ση} (tr Σ + ‖Ση‖^2) / N",
)
def token_number(trial: Trial) -> Evidence:
    """Root mean square error over many draws of the tokens against that law; the control has it for plain sampling."""
    normal = normals(trial)
    repeats, dim = trial.size(1500, 20000), 2
    sigma = torch.diag(torch.tensor([1.0, 0.8], dtype=torch.float64))
    measure = Gaussian(torch.zeros(dim, dtype=torch.float64), sigma)
    query = torch.tensor([[0.3], [1.0]]) * torch.nn.functional.normalize(normal(1, dim), dim=-1)
    counts = [250, 1000, 2000]
    found: list[float] = []
    for count in counts:
        errors = torch.cat([_errors(normal, measure, query, count) for _ in range(repeats // 250)])
        found += errors.square().sum(-1).mean(0).sqrt().tolist()

    def law(tilt: Tensor) -> list[float]:
        return [rmse for count in counts for rmse in token_limit(measure, tilt, count).rmse.tolist()]

    def gap(tilt: Tensor) -> Gap:
        """The largest relative difference; 1500 draws leave about three percent in each."""
        return Gap(max(abs(one / other - 1) for one, other in zip(found, law(tilt), strict=True)), 0.15)

    return Evidence(
        printed=gap(query),
        control=gap(trial.control(torch.zeros_like(query), query)),
        table={"slope in log N": math.log(found[-1] / found[1]) / math.log(counts[-1] / counts[0])},
        curve=Curve(
            counts,
            {"measured": found[1::2], "law": law(query)[1::2], "plain sampling": law(0 * query)[1::2]},
            x_label="tokens",
            y_label="error",
            log_x=True,
            log_y=True,
        ),
    )


def _errors(normal: Callable[..., Tensor], measure: Gaussian, query: Tensor, count: int) -> Tensor:
    keys = normal(250, count, query.shape[-1]) @ measure.covariance.sqrt()  # diagonal
    return attend(query.expand(250, -1, -1), keys, keys, scale=1.0).output - measure.mean(query)
