"""Small watched training runs on the embedded text: one that learns, and two that fail in different ways.

All use the recipe of the embedded model (:mod:`massieu.assets.train`) at a smaller size: a causal transformer with
learned positions and a tied embedding, Muon for matrices, AdamW for the rest. A run takes a few seconds on one core.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from massieu import assets
from massieu.assets.train import END, TrainingRecipe, batches, share_of_rate
from massieu.checks import check_choice, check_count, optional_package
from massieu.monitor import RULES, Collected, Flag, Reading, Rule, collect, watch
from massieu.nn import Transformer

if TYPE_CHECKING:
    import pandas

__all__ = ["Kind", "TrainingRun", "alarms", "training_run", "training_tokens"]

Kind = Literal["stable", "unstable", "exploding"]

DIVERGED = 2.0  # times the smallest loss so far


@dataclass(frozen=True)
class Setting:
    """Changes of the recipe; learning rates are multiples of the recipe's."""

    steps: int
    warmup: int
    norm: Literal["layer"] | None
    scores: float  # learning rate of W_Q and W_K
    values: float  # of W_V and W_O
    feed_forward: float
    embeddings: float  # and of vectors


SETTINGS: dict[Kind, Setting] = {
    "stable": Setting(120, 12, "layer", 1, 1, 1, 1),
    # The residual stream of a model without norms stays bounded at these rates while attention is diffuse, and grows
    # when every head attends to single tokens, which W_Q and W_K reach within twenty steps.
    "unstable": Setting(120, 0, None, 512, 32, 4, 2),
    # The same high rate for all matrices: the residual stream itself grows, whatever attention does.
    "exploding": Setting(120, 0, None, 32, 32, 32, 2),
}


@dataclass(frozen=True, eq=False)
class TrainingRun:
    """Losses, gradients and readings of a training run, until its end or its divergence.

    Attributes:
        kind: "stable", "unstable" or "exploding".
        seed: seed of its weights and batches.
        losses: nats per token of each step's batch, without penalty.
        gradient_norms: norm of each step before clipping; a step that diverged has none.
        readings: readings of :func:`massieu.watch`.
    """

    kind: Kind
    seed: int
    losses: tuple[float, ...]
    gradient_norms: tuple[float, ...]
    readings: tuple[Reading, ...]

    @property
    def flags(self) -> tuple[tuple[int, Flag], ...]:
        """All raised flags, each with its step."""
        return tuple((each.step, flag) for each in self.readings for flag in each.flags if flag.state == "raised")

    @property
    def diverged_at(self) -> int | None:
        """First step with a loss above twice the smallest before it, or not finite; None if there is none."""
        return _first_above(self.losses, DIVERGED, min)

    def series(self, quantity: str, over: Callable[[Tensor], Tensor]) -> tuple[list[int], list[float]]:
        """Steps, and for each reading a quantity of all heads ``(layers, heads)``, or all layers, reduced to a number.

        Example:
            >>> reading = Reading(5, (), heads={"entropy": torch.tensor([[1.0, 2.0]])})
            >>> TrainingRun("stable", 0, (), (), (reading,)).series("entropy", torch.amin)
            ([5], [1.0])
        """
        found = [{**each.heads, **each.layers}[quantity] for each in self.readings]
        return [each.step for each in self.readings], [float(over(values)) for values in found]

    @property
    def table(self) -> pandas.DataFrame:
        """Table with a row for each step: loss, smallest median of the normalized entropy of a layer, largest score."""
        pandas = optional_package("pandas", "TrainingRun.table", "inspect")
        steps, entropy = self.series("normalized_entropy", lambda heads: heads.quantile(0.5, -1).amin())
        score = self.series("score_max", torch.amax)[1]
        read = pandas.DataFrame({"step": steps, "normalized_entropy": entropy, "score_max": score})
        losses = pandas.DataFrame({"step": range(len(self.losses)), "loss": self.losses})
        return losses.merge(read, on="step", how="left")


def training_run(
    kind: Kind = "stable",
    seed: int = 0,
    *,
    every: int = 1,
    steps: int | None = None,
    penalty: Callable[[Collected], Tensor] | None = None,
    rules: Sequence[Rule] = RULES,
) -> TrainingRun:
    r"""Train a small language model from scratch under :func:`massieu.watch`.

    ``"stable"``
        The recipe of the embedded model at a smaller size: it learns, and nothing is flagged.
    ``"unstable"``
        High learning rates, most of all for queries and keys, no warm-up, no normalization. Scores grow until every
        head attends to single tokens; then the loss diverges. A floor under the entropy prevents it.
    ``"exploding"``
        One learning rate for all matrices, 32 times as high, no warm-up, no normalization. The hidden states grow
        while attention stays diffuse: no flag announces it, and a penalty on attention does not help.

    A run ends early at the first step with a loss that exceeds twice its minimum so far, or is not finite.

    Args:
        kind: recipe of the run.
        seed: seed of the weights and of the order of the text.
        every: steps between two readings.
        steps: planned length, at which the learning rate reaches its end; by default that of the kind.
        penalty: term of the loss, computed from collected attention: ``lambda seen: 10 * entropy_floor(seen, 1.0)``.
        rules: rules of the flags.

    Example:
        >>> run = training_run("exploding", every=5)
        >>> run.diverged_at == len(run.losses) - 1
        True
    """
    check_choice(kind, "kind", get_args(Kind))
    setting = SETTINGS[kind]
    steps = setting.steps if steps is None else steps
    check_count(
        steps, "steps", least=setting.warmup + 1, remedy=f"a run is longer than its {setting.warmup} of warm-up"
    )
    check_count(seed, "seed", least=0)
    recipe = TrainingRecipe(seed=seed, layers=3, width=64, context=64, batch=4, steps=steps, warmup=setting.warmup)
    model = _model(recipe, setting.norm)
    optimizers = _optimizers(model, recipe, setting)
    schedules = [torch.optim.lr_scheduler.LambdaLR(own, lambda step: share_of_rate(step, recipe)) for own in optimizers]
    source = batches(training_tokens(), recipe, torch.Generator().manual_seed(seed))
    losses: list[float] = []
    norms: list[float] = []
    with watch(model, every=every, rules=rules, console=False) as watched:
        for _ in range(steps):
            loss, total = _losses(model, next(source), penalty)
            losses.append(loss.item())
            if not losses[-1] <= DIVERGED * min(losses):  # nan, too
                break
            total.backward()
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)))
            for optimizer, schedule in zip(optimizers, schedules, strict=True):
                optimizer.step()
                schedule.step()
            model.zero_grad()
    return TrainingRun(kind, seed, tuple(losses), tuple(norms), tuple(watched.readings))


def alarms(run: TrainingRun) -> dict[str, int | None]:
    """Return the first step of each flag, of two alarms without attention, and of the divergence.

    The two are a loss above 1.2 times its minimum so far, and a gradient norm above ten times its median so far.

    Example:
        >>> run = TrainingRun("stable", 0, (6.0, 5.0, 7.0, 11.0), (1.0, 1.0, 2.0), ())
        >>> alarms(run)
        {'loss above 1.2 minima': 2, 'gradient above 10 medians': None, 'divergence': 3}
    """
    flags: dict[str, int | None] = {}
    for step, flag in run.flags:
        flags.setdefault(flag.name, step)
    return flags | {
        "loss above 1.2 minima": _first_above(run.losses, 1.2, min),
        "gradient above 10 medians": _first_above(run.gradient_norms, 10.0, statistics.median),
        "divergence": run.diverged_at,
    }


@functools.lru_cache(maxsize=1)
def training_tokens() -> Tensor:
    """Return the tokens of the embedded documents, each followed by the end token.

    Example:
        >>> training_tokens().shape, int(training_tokens().max()) < 2048
        (torch.Size([9031]), True)
    """
    tokenizers = optional_package("tokenizers", "a training run", "inspect")
    tokenizer = tokenizers.Tokenizer.from_file(str(assets.MODEL / "tokenizer.json"))
    return torch.tensor([token for text in assets.documents() for token in tokenizer.encode(text + END).ids])


def _model(recipe: TrainingRecipe, norm: Literal["layer"] | None) -> Transformer:
    model = Transformer(
        recipe.width,
        recipe.layers,
        recipe.heads,
        vocabulary=recipe.vocabulary,
        max_length=recipe.context,
        positions="learned",
        activation="gelu_tanh",
        norm=norm,
        generator=torch.Generator().manual_seed(recipe.seed),
    )
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.mul_(recipe.initial_spread / 0.02)  # the spread that the weights were drawn with
    return model


def _optimizers(model: Transformer, recipe: TrainingRecipe, setting: Setting) -> list[torch.optim.Optimizer]:
    """Return :func:`massieu.assets.train.optimizers` with learning rates by the part of the model."""
    parts: dict[str, list[nn.Parameter]] = {"scores": [], "values": [], "feed_forward": [], "embeddings": []}
    vectors = []
    for name, weight in model.named_parameters():
        if weight.dim() < 2:
            vectors.append(weight)
            continue
        words = {"q_proj": "scores", "k_proj": "scores", "v_proj": "values", "out_proj": "values"}
        found = [part for word, part in words.items() if word in name]
        parts[found[0] if found else "feed_forward" if "feed_forward" in name else "embeddings"].append(weight)
    rate, other = recipe.learning_rate, recipe.other_learning_rate * setting.embeddings
    matrices = [
        {"params": parts[name], "lr": rate * getattr(setting, name)} for name in ("scores", "values", "feed_forward")
    ]
    rest = [
        {"params": parts["embeddings"], "weight_decay": recipe.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=recipe.weight_decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=other, betas=recipe.betas, fused=True),
    ]


def _losses(model: Transformer, rows: Tensor, penalty: Callable[[Collected], Tensor] | None) -> tuple[Tensor, Tensor]:
    """Return nats per token, without and with the penalty."""
    if penalty is None:
        loss = _nats(model, rows)
        return loss, loss
    with collect(model) as attention:
        loss = _nats(model, rows)
    return loss, loss + penalty(attention)


def _nats(model: Transformer, rows: Tensor) -> Tensor:
    return functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def _first_above(values: Sequence[float], factor: float, level: Callable[[Sequence[float]], float]) -> int | None:
    """Return the first step with a value not finite, or above a multiple of the level of those before it."""
    for step, value in enumerate(values):
        if not math.isfinite(value) or (step and value > factor * level(values[:step])):
            return step
    return None
