"""Options of a training run, with their defaults and checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from massieu.checks import UserError, check_choice, check_count, check_number
from massieu.context.prompts import LAYOUTS

__all__ = ["SHAPE", "LearningRecipe", "Model", "Tokens"]

Model = Literal["softmax", "linear"]
Tokens = Literal["pairs", "interleaved"]
SHAPE = ("layout", "width", "layers", "heads")  # of a transformer; a linear layer has none
DEFAULTS: dict[str, dict[str, Any]] = {
    "softmax": {
        **{"layout": "pairs", "width": 64, "layers": 4, "heads": 2},
        **{"steps": 9000, "batch": 64, "learning_rate": 4e-3},
    },
    "linear": {"steps": 3000, "batch": 1024, "learning_rate": 1e-2},
}


@dataclass(frozen=True)
class LearningRecipe:
    """Options of a training run; a checkpoint can only be resumed with the same.

    Attributes:
        model: "softmax", a transformer, or "linear", one layer of linear attention.
        layout: of the tokens of a transformer, "pairs" or "interleaved"; None for a linear layer.
        examples: in a prompt before its last query; None for twice the dimension of the task.
        steps: of the optimizer; the learning rate falls to zero along a cosine. By default 9000, linear 3000.
        batch: tasks in a step, each new. By default 64, linear 1024.
        learning_rate: the highest. By default 4e-3, linear 1e-2.
        seed: of weights and data.
        pool: size of the pool of functions to train on; None draws each function anew.
        width, layers, heads: of a transformer, by default 64, 4 and 2; None for a linear layer.
        evaluate_every: steps between two measurements of the error.
        patience: measurements without a new least error after which training stops; None never stops.
        target: an error at which training stops; None never stops.

    Example:
        >>> LearningRecipe(model="linear", examples=10).steps
        3000
    """

    model: Model = "softmax"
    layout: Tokens | None = None
    examples: int | None = None
    steps: int = None  # type: ignore[assignment]  # set for each model after construction
    batch: int = None  # type: ignore[assignment]
    learning_rate: float = None  # type: ignore[assignment]
    seed: int = 0
    pool: int | None = None
    width: int | None = None
    layers: int | None = None
    heads: int | None = None
    evaluate_every: int = 100
    patience: int | None = None
    target: float | None = None

    def __post_init__(self) -> None:
        check_choice(self.model, "model", get_args(Model))
        given = [f"{name}={getattr(self, name)!r}" for name in SHAPE if getattr(self, name) is not None]
        if self.model == "linear" and given:
            raise UserError(
                f"a linear model is one layer without layout, width, layers or heads, got {', '.join(given)};"
                " leave that out, or train a softmax model"
            )
        for name, value in DEFAULTS[self.model].items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        if self.model == "softmax":
            check_choice(self.layout, "layout", LAYOUTS)
        for name in ("steps", "batch", "evaluate_every"):
            check_count(getattr(self, name), name)
        for name in ("examples", "pool", "patience", "width", "layers", "heads"):
            if getattr(self, name) is not None:
                check_count(getattr(self, name), name)
        check_count(self.seed, "seed", least=0)
        check_number(self.learning_rate, "learning_rate", above=0)
        if self.target is not None:
            check_number(self.target, "target", above=0)
