"""Small training runs on real text to look at: one that learns, and two that fail, each in another way.

All of them shrink the recipe of the embedded model (:mod:`massieu.assets.train`): a causal transformer with learned
positions and a tied embedding, Muon for matrices, AdamW for the rest, and the embedded tokenizer, on the embedded text.
A run takes a few seconds on one core.
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
from massieu.checks import MissingPackageError, UserError, pip_install
from massieu.monitor.flags import RULES, Rule
from massieu.monitor.reading import Flag, Reading
from massieu.monitor.regularizers import Collected, collect
from massieu.monitor.watch_session import watch
from massieu.nn import Transformer

if TYPE_CHECKING:
    import pandas

__all__ = ["Kind", "Run", "alarms", "training_run", "training_tokens"]

Kind = Literal["stable", "unstable", "exploding"]

DIVERGED = 2.0  # times the smallest loss so far


@dataclass(frozen=True)
class Setting:
    """What a kind of run changes in the recipe; rates are multiples of the recipe's."""

    steps: int
    warmup: int
    norm: Literal["layer"] | None
    scores: float  # rate of W_Q and W_K
    values: float  # of W_V and W_O
    feed_forward: float
    embeddings: float  # and of vectors


SETTINGS: dict[Kind, Setting] = {
    "stable": Setting(120, 12, "layer", 1, 1, 1, 1),
    # Rates at which the stream of a model without norms stays bounded while attention is diffuse, and not when every
    # head hands over single tokens. W_Q and W_K are fast enough to get there within twenty steps.
    "unstable": Setting(120, 0, None, 512, 32, 4, 2),
    # The same high rate for all matrices: the stream itself grows, whatever attention does.
    "exploding": Setting(120, 0, None, 32, 32, 32, 2),
}


@dataclass(frozen=True, eq=False)
class Run:
    """What happened in a run, until its end or until it diverged.

    Attributes:
        kind: which run.
        seed: of its weights and batches.
        losses: nats per token of each step's batch, without penalty.
        gradient_norms: of each step, before clipping; a step that diverged has none.
        readings: of :func:`massieu.watch`.
    """

    kind: Kind
    seed: int
    losses: tuple[float, ...]
    gradient_norms: tuple[float, ...]
    readings: tuple[Reading, ...]

    @property
    def flags(self) -> tuple[tuple[int, Flag], ...]:
        """Every flag that was raised, with its step."""
        return tuple((each.step, flag) for each in self.readings for flag in each.flags if flag.state == "raised")

    @property
    def diverged_at(self) -> int | None:
        """The first step whose loss is above twice the smallest before it, or not finite; None if there is none."""
        return _first_above(self.losses, DIVERGED, min)

    def series(self, quantity: str, over: Callable[[Tensor], Tensor]) -> tuple[list[int], list[float]]:
        """Steps and one number for each reading: a quantity of all heads ``(layers, heads)``, or layers, reduced.

        Example:
            >>> reading = Reading(5, (), heads={"entropy": torch.tensor([[1.0, 2.0]])})
            >>> Run("stable", 0, (), (), (reading,)).series("entropy", torch.amin)
            ([5], [1.0])
        """
        found = [{**each.heads, **each.layers}[quantity] for each in self.readings]
        return [each.step for each in self.readings], [float(over(values)) for values in found]

    @property
    def table(self) -> pandas.DataFrame:
        """A row for each step: loss, normalized entropy of the median head where it is smallest, largest score."""
        try:
            import pandas
        except ModuleNotFoundError:
            raise MissingPackageError("a table of a run needs pandas; pip install pandas, or use Run.series") from None
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
) -> Run:
    r"""Train a small language model from scratch under :func:`massieu.watch`, and return what was seen.

    ``"stable"``
        The recipe of the embedded model, made small: it learns, and nothing is flagged.
    ``"unstable"``
        High learning rates, most of all for queries and keys, no warm-up, no normalization. Scores grow until every
        head looks at single tokens; then the loss diverges. A floor under the entropy prevents it.
    ``"exploding"``
        One learning rate for all matrices, 32 times as high, no warm-up, no normalization. The hidden states grow
        while attention stays diffuse: no flag announces it, and a penalty on attention does not help.

    A run ends early at the step whose loss exceeds twice its minimum so far, or is not finite.

    Args:
        kind: which of them.
        seed: of the weights and of the order of the text.
        every: steps between two readings.
        steps: how long it is planned to be, if not as the kind has it: the learning rate falls until there.
        penalty: added to the loss, of what :func:`collect` heard: ``lambda heard: 10 * entropy_floor(heard, 1.0)``.
        rules: when to raise flags.

    Example:
        >>> run = training_run("exploding", every=5)
        >>> run.diverged_at == len(run.losses) - 1
        True
    """
    if kind not in get_args(Kind):
        raise UserError(f"kind must be one of {', '.join(get_args(Kind))}, got {kind!r}; stable is the one that learns")
    setting = SETTINGS[kind]
    steps = setting.steps if steps is None else steps
    if not isinstance(steps, int) or isinstance(steps, bool) or steps <= setting.warmup:
        raise UserError(
            f"steps must be a whole number above the {setting.warmup} of the warm-up, got {steps!r};"
            f" {setting.steps} are usual"
        )
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**63:
        raise UserError(f"seed must be a whole number from 0 below 2**63, got {seed!r}; 0 is usual")
    recipe = TrainingRecipe(seed=seed, layers=3, width=64, context=64, batch=4, steps=steps, warmup=setting.warmup)
    model = _model(recipe, setting.norm)
    both = _optimizers(model, recipe, setting)
    schedules = [torch.optim.lr_scheduler.LambdaLR(each, lambda step: share_of_rate(step, recipe)) for each in both]
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
            for optimizer, schedule in zip(both, schedules, strict=True):
                optimizer.step()
                schedule.step()
            model.zero_grad()
    return Run(kind, seed, tuple(losses), tuple(norms), tuple(watched.readings))


def alarms(run: Run) -> dict[str, int | None]:
    """The first step of each flag, of two alarms that need no reading of attention, and of the divergence.

    The others are a loss above 1.2 times its minimum so far, and a gradient norm above ten times its median so far.

    Example:
        >>> run = Run("stable", 0, (6.0, 5.0, 7.0, 11.0), (1.0, 1.0, 2.0), ())
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
    """The embedded documents, each closed by the end token, by the embedded tokenizer.

    Example:
        >>> training_tokens().shape, int(training_tokens().max()) < 2048
        (torch.Size([9031]), True)
    """
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:
        raise MissingPackageError(f"training runs need tokenizers; {pip_install('inspect')}") from None
    tokenizer = Tokenizer.from_file(str(assets.MODEL / "tokenizer.json"))
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
    """As :func:`massieu.assets.train.optimizers`, with rates by the part of the model."""
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
    """Nats per token, without and with the penalty."""
    if penalty is None:
        loss = _nats(model, rows)
        return loss, loss
    with collect(model) as heard:
        loss = _nats(model, rows)
    return loss, loss + penalty(heard)


def _nats(model: Transformer, rows: Tensor) -> Tensor:
    return functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def _first_above(values: Sequence[float], factor: float, level: Callable[[Sequence[float]], float]) -> int | None:
    """The first value that is not finite, or above a multiple of the level of those before it."""
    for step, value in enumerate(values):
        if not math.isfinite(value) or (step and value > factor * level(values[:step])):
            return step
    return None
