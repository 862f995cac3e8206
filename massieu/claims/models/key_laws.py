"""The law of the keys of trained heads: one Gaussian, a mixture of Gaussians, or neither."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from massieu.checks import UserError
from massieu.claims.claim import Evidence, Gap, Source, Trial, Verdict
from massieu.claims.models.hidden_clouds import reader
from massieu.claims.registry import claim
from massieu.taps import AttentionCall, tap

COMPONENTS = 8
GAIN = 0.05  # nats for each key; fitted mixtures lose a fifth of a nat on Gaussian samples
MOST = 0.5  # of the heads


@claim(
    "X14",
    source=Source.PAPER,
    place="section 6",
    title="The keys of trained heads are Gaussian",
    wording=(
        "Weighted attention may be making inherent assumptions about Gaussian distributions or mixtures of Gaussians"
        " over the key space."
    ),
    reading=(
        "Our reading, for one Gaussian: a mixture of eight Gaussians with one covariance, fitted by 20 (full: 60) steps"
        " of expectation maximization to the keys of a trained head on half of 24 passages of 64 tokens, predicts its"
        " keys on the other half no better than one Gaussian: in the median head the log likelihood gains at most 0.05"
        " nats for each key."
    ),
    reference=(
        "Gaussian samples with the means and covariances of the keys, and samples of mixtures with these covariances"
    ),
    formula="E log p_mixture(k) − E log p_Gaussian(k) ≤ 0",
    correction=(
        "With a mixture in the place of one Gaussian, as the better of the two: more than half of the heads gain. That"
        " a mixture is their law is not shown."
    ),
    expected=Verdict.HOLDS_CORRECTED,
    on_model=True,
)
def mixtures_of_keys(trial: Trial) -> Evidence:
    """Gain of the median head and share of heads without one; the control samples one Gaussian, or a mixture."""
    keys, generator, steps = keys_of_heads(trial.model), trial.generator, trial.size(20, 60)
    train, test = (
        half.flatten(1, 2) for half in keys[:, torch.randperm(keys.shape[1], generator=generator)].chunk(2, 1)
    )

    def gains(train: Tensor, test: Tensor) -> Tensor:
        one, several = (fit(train, count, steps, generator) for count in (1, COMPONENTS))
        return several.log_density(test).mean(-1) - one.log_density(test).mean(-1)

    def of_samples(law: KeyMixture) -> Gap:
        samples, others = (law.sample(train.shape[1], generator) for _ in range(2))
        return Gap(max(float(gains(samples, others).median()), 0.0), GAIN)

    found, law = gains(train, test), fit(train, 1, 1, generator)
    centers = torch.randn(len(keys), COMPONENTS, keys.shape[-1], generator=generator, dtype=torch.float64)
    apart = KeyMixture(law.log_weight.expand(-1, COMPONENTS), law.location + centers @ law.root.mT, law.root)
    several = fit(train, COMPONENTS, steps, generator)
    samples, others = (several.sample(train.shape[1], generator) for _ in range(2))
    again = fit(samples, COMPONENTS, steps, generator)
    return Evidence(
        printed=Gap(max(float(found.median()), 0.0), GAIN),
        corrected=Gap(float((found <= 0).double().mean()), MOST),
        instead=of_samples(law),
        control=of_samples(trial.control(apart, law)),
        table={
            "heads": float(len(found)),
            "gain of the median head, nats for each key": float(found.median()),
            "gain of the head that gains least": float(found.min()),
            "log likelihood that keys lack beside samples of their mixture, median": lacking(several, test, generator),
            "the same where keys are samples of such a mixture": lacking(again, others, generator),
        },
    )


class KeyMixture(NamedTuple):
    """Gaussian mixtures of one covariance, one for each head.

    Attributes:
        log_weight: shape ``(heads, components)``, up to a constant.
        location: shape ``(heads, components, dim)``.
        root: Cholesky factors of the covariances, ``(heads, dim, dim)``.
    """

    log_weight: Tensor
    location: Tensor
    root: Tensor

    def log_joint(self, x: Tensor) -> Tensor:
        """Return log densities of the components times their weights, ``(heads, rows, components)``."""
        white, center = (torch.linalg.solve_triangular(self.root, y.mT, upper=False).mT for y in (x, self.location))
        square = white.square().sum(-1)[..., None] + center.square().sum(-1)[:, None] - 2 * white @ center.mT
        volume = self.root.diagonal(dim1=-2, dim2=-1).log().sum(-1) + 0.5 * x.shape[-1] * math.log(2 * math.pi)
        joint: Tensor = self.log_weight.log_softmax(-1)[:, None] - 0.5 * square - volume[:, None, None]
        return joint

    def log_density(self, x: Tensor) -> Tensor:
        """Return log densities ``(heads, rows)`` of rows ``(heads, rows, dim)``."""
        density: Tensor = self.log_joint(x).logsumexp(-1)
        return density

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw independent samples, ``(heads, count, dim)``."""
        chosen = torch.multinomial(self.log_weight.softmax(-1), count, replacement=True, generator=generator)
        noise = torch.randn(len(chosen), count, self.root.shape[-1], generator=generator, dtype=torch.float64)
        return self.location.take_along_dim(chosen[..., None], 1) + noise @ self.root.mT


def fit(x: Tensor, components: int, steps: int, generator: torch.Generator) -> KeyMixture:
    """Fit mixtures to rows ``(heads, rows, dim)`` by expectation maximization from random ones."""
    rows, dim = x.shape[1:]
    mean = x.mean(1, keepdim=True)
    spread = (x - mean).mT @ (x - mean) / rows
    ridge = 1e-3 * torch.eye(dim).to(x) * spread.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    location = mean if components == 1 else x[:, torch.randperm(rows, generator=generator)[:components]]
    found = KeyMixture(x.new_zeros(len(x), components), location, torch.linalg.cholesky(spread + ridge))
    for _ in range(steps if components > 1 else 0):
        share = found.log_joint(x).softmax(-1)
        mass = share.sum(1) + 1e-9
        location = share.mT @ x / mass[..., None]
        moved = location - mean
        inside = spread - (mass[..., None] * moved).mT @ moved / rows
        found = KeyMixture(mass.log(), location, torch.linalg.cholesky(inside + ridge))
    return found


def lacking(law: KeyMixture, x: Tensor, generator: torch.Generator) -> float:
    """Return the log likelihood that rows lack beside samples of a law: mean over rows, in the median head."""
    own = law.sample(x.shape[1], generator)
    return float((law.log_density(own).mean(-1) - law.log_density(x).mean(-1)).median())


def keys_of_heads(name: str | None) -> Tensor:
    """Return the keys of every head on passages of the embedded text, ``(heads, passages, tokens, dim)``."""
    model, tokens = reader(name)
    calls: list[AttentionCall] = []
    with torch.no_grad(), tap(model, calls.append, this_thread=True):
        model(input_ids=tokens)
    keys = [call.key.double().transpose(0, 1) for call in calls if call.key is not None]
    if not keys or len({key.shape[1:] for key in keys}) > 1:
        raise UserError(f"the heads of {name} have no keys of one size to be compared; choose another model")
    return torch.cat(keys)
