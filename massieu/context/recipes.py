"""How a model is trained, and what is refused before it is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from massieu.checks import UserError
from massieu.context.prompts import layout_named
from massieu.measures.measure import as_integer

__all__ = ["SHAPE", "Model", "Recipe", "Tokens"]

Model = Literal["softmax", "linear"]
Tokens = Literal["pairs", "interleaved"]
SHAPE: dict[str, Any] = {"layout": "pairs", "width": 64, "layers": 4, "heads": 2}  # of a transformer by default


@dataclass(frozen=True)
class Recipe:
    """How a model is trained; a checkpoint only goes on with the same.

    Attributes:
        model: "softmax", a transformer, or "linear", one layer of linear attention.
        layout: of the tokens of a transformer, "pairs" or "interleaved"; None for a linear layer.
        examples: in a prompt before its last query.
        steps: of the optimizer; the rate falls to zero along a cosine.
        batch: tasks in a step, each new.
        rate: the highest learning rate.
        seed: of weights and data.
        pool: train on so many functions only; None draws each function anew.
        width, layers, heads: of a transformer; None for a linear layer.
        evaluate_every: steps between two measurements of the error.
        patience: measurements without a new least error after which training stops; None never stops.
        target: an error at which training stops; None never stops.
    """

    model: Model
    layout: Tokens | None
    examples: int
    steps: int
    batch: int
    rate: float
    seed: int = 0
    pool: int | None = None
    width: int | None = None
    layers: int | None = None
    heads: int | None = None
    evaluate_every: int = 100
    patience: int | None = None
    target: float | None = None

    def __post_init__(self) -> None:
        if self.model not in get_args(Model):
            raise UserError(f'model must be "softmax" or "linear", got {self.model!r}; linear is a single layer')
        if self.model == "linear":
            given = [f"{name}={value!r}" for name in SHAPE if (value := getattr(self, name)) is not None]
            if given:
                raise UserError(
                    f"a linear model is one layer without layout, width, layers or heads, got {', '.join(given)};"
                    " leave that out, or train a softmax model"
                )
        else:
            layout_named(str(self.layout), 1)
            for name in ("width", "layers", "heads"):
                as_integer(getattr(self, name), name, least=1)
        for name in ("examples", "steps", "batch", "evaluate_every"):
            as_integer(getattr(self, name), name, least=1)
        as_integer(self.seed, "seed", least=0)
        for name in ("pool", "patience"):
            if getattr(self, name) is not None:
                as_integer(getattr(self, name), name, least=1)
        if not 0 < self.rate < math.inf:
            raise UserError(f"rate must be positive and finite, got {self.rate!r}; 0.002 suits small transformers")
        if self.target is not None and not self.target > 0:
            raise UserError(f"target must be positive, got {self.target!r}; it is a squared error to stop at")
