"""What a model of a task is compared with: predictors for every prefix, and those that are fitted to few."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from massieu.context.fitted import Boosting, Lasso, TrainedNetwork, Tree
from massieu.context.gradient_predictors import GradientDescent, GradientStep, TunedDescent
from massieu.context.predictors import Averaging, LeastSquares, Neighbours, Predictor, Ridge, bayes_predictor
from massieu.context.tasks import Linear, NoisyLinear, Quadratic, SparseLinear, Task

__all__ = ["LINEAR", "fitted_for", "predictors_for", "second_moment"]

LINEAR = (Ridge, LeastSquares, Averaging, GradientStep, GradientDescent, TunedDescent)
"""Predictors that are linear in the query and can be differentiated in it: their sensitivity is their weight vector."""


def predictors_for(task: Task) -> dict[str, Predictor]:
    """The predictors by name for all prefixes of a task; the best one first where it is known.

    Example:
        >>> from massieu.context import task_named
        >>> list(predictors_for(task_named("linear", dim=5, noise=0.5)))[:4]
        ['ridge (Bayes)', 'least squares', 'gradient step', '5 gradient steps']
        >>> list(predictors_for(task_named("tree", dim=5)))
        ['least squares', '3 neighbours']
    """
    found: dict[str, Predictor] = {}
    if type(task) in (Linear, NoisyLinear):
        found["ridge (Bayes)" if task.noise else "least squares (Bayes)"] = bayes_predictor(task)
    elif type(task) is Quadratic:
        found["ridge on squares (Bayes)"] = _Squares(Ridge(task.noise**2))
    elif task.noise:
        found["ridge"] = Ridge(task.noise**2)
    if "least squares (Bayes)" not in found:
        found["least squares"] = LeastSquares()
    if isinstance(task, Linear) and type(task) in (Linear, NoisyLinear, SparseLinear):
        found |= _descents(task)
    return {**found, "3 neighbours": Neighbours(3)}


def fitted_for(task: Task) -> dict[str, Predictor]:
    """The predictors by name that are fitted to each prefix, so slow that few prefixes of few tasks must do.

    Example:
        >>> from massieu.context import task_named
        >>> list(fitted_for(task_named("linear", dim=5)))
        ['Lasso', 'tree', 'boosting', 'two-layer network']
    """
    found: dict[str, Predictor] = {"Lasso": Lasso(0.1)} if isinstance(task, Linear) else {}
    return {**found, "tree": Tree(4), "boosting": Boosting(50), "two-layer network": TrainedNetwork()}


def second_moment(task: Linear) -> Tensor:
    """That of the weights, on which the best rates and layers depend; the prior itself unless most weights are zero."""
    return task.nonzero / task.dim * task.prior if isinstance(task, SparseLinear) else task.prior


def _descents(task: Linear) -> dict[str, Predictor]:
    """Predictors by gradient descent; those of several steps have the best rates where inputs and weights are round."""
    prior = second_moment(task)
    found: dict[str, Predictor] = {
        "gradient step": GradientStep(covariance=task.covariance, prior=prior, noise=task.noise)
    }
    if _is_multiple_of_one(prior) and torch.allclose(task.covariance, torch.eye(task.dim).to(task.covariance)):
        noise = task.noise / math.sqrt(float(prior[0, 0]))
        found |= {"5 gradient steps": TunedDescent(5, noise), "GD++ of 3 layers": TunedDescent(3, noise, moving=True)}
    else:
        found["5 gradient steps"] = GradientDescent(5)
    return {**found, "averaging": Averaging()}


def _is_multiple_of_one(matrix: Tensor) -> bool:
    return torch.allclose(matrix, matrix[0, 0] * torch.eye(len(matrix)).to(matrix)) and bool(matrix[0, 0] > 0)


class _Squares(Predictor):
    r"""A predictor that sees :math:`x_k^2 / \sqrt 3` in the place of :math:`x_k`, as quadratic functions do."""

    def __init__(self, predictor: Predictor):
        self.predictor = predictor

    def predict(self, inputs: Tensor, targets: Tensor, queries: Tensor, lengths: list[int]) -> Tensor:
        features = [given.square() / math.sqrt(3) for given in (inputs, queries)]
        return self.predictor.predict(features[0], targets, features[1], lengths)
