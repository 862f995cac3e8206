"""A trained model beside predictors: errors, sensitivities to the query, and the matrix it has learned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from massieu.context.curves import error_curve
from massieu.context.extras import imported
from massieu.context.gradient_predictors import GradientStep
from massieu.context.models import ContextModel, LinearModel
from massieu.context.optimum import Optimum, optimal_linear_attention
from massieu.context.predictors import Averaging, LeastSquares, Neighbours, Predictor, Ridge, bayes_predictor
from massieu.context.prompts import Prompts
from massieu.context.tasks import Linear, NoisyLinear, Task

if TYPE_CHECKING:
    import pandas

__all__ = ["Comparison", "compare", "predictors_for", "sensitivities"]

LINEAR = (Ridge, LeastSquares, Averaging, GradientStep)
"""Predictors that are linear in the query, so that their sensitivity is a vector of weights."""


@dataclass(frozen=True)
class Comparison:
    """How a model compares after training.

    Attributes:
        curve: as of :func:`massieu.context.error_curve`, of the model, called "model", and of predictors.
        sensitivities: for each predictor that is linear in the query, the mean and the least cosine of its
            sensitivity with that of the model after all examples, and the root mean square of the difference.
        matrices: "learned" and "closed form" as lists of rows, with the losses of both; None unless linear.
    """

    curve: pandas.DataFrame
    sensitivities: pandas.DataFrame
    matrices: dict[str, object] | None

    @property
    def best_cosine(self) -> float:
        """The largest mean cosine."""
        return float(self.sensitivities["cosine"].max())

    def ratio(self, predictor: str) -> float:
        """Error of the model after all examples, in units of that of a predictor."""
        last = self.curve[self.curve["examples"] == self.curve["examples"].max()].set_index("predictor")["error"]
        return float(last["model"] / last[predictor])

    def tables(self) -> dict[str, pandas.DataFrame]:
        return {"curve": self.curve, "sensitivities": self.sensitivities}


def compare(model: ContextModel, task: Task, prompts: Prompts) -> Comparison:
    """Errors of model and predictors on the same prompts, their sensitivities, and matrices where there are any.

    Example:
        >>> from massieu.context import LinearModel, task_named
        >>> task, draws = task_named("linear", dim=2), torch.Generator().manual_seed(0)
        >>> found = compare(LinearModel(2, generator=draws), task, task.draw(50, 5, draws))
        >>> sorted(found.curve.predictor.unique())[:3], sorted(found.matrices)[:2]
        (['averaging', 'best linear layer', 'gradient step'], ['closed form', 'learned'])
    """
    others = predictors_for(task)
    optimum = _optimum(task, prompts.examples - 1) if isinstance(model, LinearModel) else None
    if optimum is not None:
        others["best linear layer"] = _Layer(optimum.matrix)
    with torch.no_grad():
        curve = error_curve(prompts, {"model": model, **others})
    own, rows = sensitivities(model, prompts), []
    for name, predictor in others.items():
        if isinstance(predictor, (*LINEAR, _Layer)):
            other = sensitivities(predictor, prompts)
            cosines = torch.nn.functional.cosine_similarity(own, other, dim=-1)
            rows.append(
                (name, float(cosines.mean()), float(cosines.min()), float((own - other).square().mean().sqrt()))
            )
    frames = imported("pandas", "compare")
    table = frames.DataFrame(rows, columns=["predictor", "cosine", "least_cosine", "difference"])
    return Comparison(curve, table, None if optimum is None else _matrices(model, optimum, prompts))


def predictors_for(task: Task) -> dict[str, Predictor]:
    """The predictors by name that a model of this task is compared with; the best one first where it is known."""
    found: dict[str, Predictor] = {}
    if type(task) in (Linear, NoisyLinear):
        found["ridge (Bayes)" if task.noise else "least squares (Bayes)"] = bayes_predictor(task)
    elif task.noise:
        found["ridge"] = Ridge(task.noise**2)
    if "least squares (Bayes)" not in found:
        found["least squares"] = LeastSquares()
    return {**found, "gradient step": GradientStep(), "averaging": Averaging(), "3 neighbours": Neighbours(3)}


def sensitivities(predict: Callable[[Prompts], Tensor], prompts: Prompts) -> Tensor:
    r"""Derivatives :math:`\partial \hat y / \partial x` in the query after all examples, ``(tasks, dim)``."""
    query = prompts.inputs[:, -1:].detach().clone().requires_grad_()
    asked = torch.cat([prompts.inputs[:, :-1].detach(), query], 1)
    # A predictor reads the query among the queries, a model as its last input.
    inputs = prompts.inputs.detach() if isinstance(predict, Predictor) else asked
    found = predict(replace(prompts, inputs=inputs, queries=asked))
    (slope,) = torch.autograd.grad(found[:, -1].sum(), query)
    return slope[:, 0]


class _Layer(Predictor):
    r"""The predictor :math:`z^\top A x` with :math:`z = \frac1n \sum_i y_i x_i`."""

    def __init__(self, matrix: Tensor):
        self.matrix = matrix

    def predict(self, inputs: Tensor, targets: Tensor, queries: Tensor, lengths: list[int]) -> Tensor:
        return Averaging().predict(inputs, targets, queries @ self.matrix.mT, lengths)


def _optimum(task: Task, examples: int) -> Optimum | None:
    if not isinstance(task, Linear) or type(task) not in (Linear, NoisyLinear):
        return None  # no closed form: the weights have another prior, or the function is another
    return optimal_linear_attention(task.covariance, task.prior, noise=task.noise, examples=examples)


def _matrices(model: ContextModel, optimum: Optimum, prompts: Prompts) -> dict[str, object]:
    assert isinstance(model, LinearModel)
    matrix = model.matrix.detach().double()
    best = _Layer(optimum.matrix)
    with torch.no_grad():
        errors = [
            float((found - prompts.answers[:, -1]).double().square().mean())
            for found in (model(prompts)[:, -1], best(prompts, [prompts.examples - 1])[:, 0])
        ]
    return {
        "learned": matrix.tolist(),
        "closed form": optimum.matrix.tolist(),
        "loss": float(optimum.loss_of(matrix)),
        "best loss": optimum.loss,
        "measured": errors[0],
        "best measured": errors[1],
    }
