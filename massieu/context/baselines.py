"""Baselines of a task: predictors for every prefix, predictors fitted to few prefixes, and a learner."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from massieu.context.fitted import Boosting, Lasso, TrainedNetwork, Tree
from massieu.context.gradient_predictors import GradientDescent, GradientStep, TunedDescent
from massieu.context.pools import draw_pool
from massieu.context.predictors import Averaging, LeastSquares, Neighbors, Predictor, Ridge, bayes_predictor
from massieu.context.prompts import Prompts
from massieu.context.tasks import (
    DecisionTree,
    Linear,
    Logistic,
    NoisyLinear,
    Quadratic,
    Sine,
    SparseLinear,
    Task,
    TwoLayer,
)

__all__ = ["LINEAR", "Learner", "fitted_for", "learner_for", "predictors_for", "second_moment"]

SAMPLES = 4096
LINEAR = (Ridge, LeastSquares, Averaging, GradientStep, GradientDescent, TunedDescent)
"""Predictors that are linear and differentiable in the query: their sensitivity is their weight vector."""


def predictors_for(task: Task) -> dict[str, Predictor]:
    """Return the predictors by name for all prefixes of a task; the best one first if there is a closed form.

    Example:
        >>> from massieu.context import task_named
        >>> list(predictors_for(task_named("linear", dim=5, noise=0.5)))[:4]
        ['ridge (Bayes)', 'least squares', 'gradient step', '5 gradient steps']
        >>> list(predictors_for(task_named("tree", dim=5)))
        ['least squares', '3 neighbors']
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
    return {**found, "3 neighbors": Neighbors(3)}


def fitted_for(task: Task) -> dict[str, Predictor]:
    """Return the predictors by name that are fitted to each prefix, which are slow: pass few prefixes of few tasks.

    Example:
        >>> from massieu.context import task_named
        >>> list(fitted_for(task_named("linear", dim=5)))
        ['Lasso', 'tree', 'boosting', 'two-layer network']
    """
    found: dict[str, Predictor] = {"Lasso": Lasso(0.1)} if isinstance(task, Linear) else {}
    return {**found, "tree": Tree(4), "boosting": Boosting(50), "two-layer network": TrainedNetwork()}


class Learner(NamedTuple):
    """A predictor that represents learning the functions of a class.

    Attributes:
        name: of the predictor.
        predict: from prompts to predictions after all examples, ``(tasks,)``.
        best: no predictor has a smaller mean error; otherwise it is an approximation.
        tasks: number of tasks to predict, at most.
        needs: a package that it needs, or None.
    """

    name: str
    predict: Callable[[Prompts], Tensor]
    best: bool
    tasks: int
    needs: str | None = None


def learner_for(task: Task, examples: int) -> Learner:
    """Return the predictor for learning the functions of a task from this number of examples.

    The predictor of Bayes where it has a closed form; Lasso for sparse functions, a greedy tree, a trained network;
    for labels and sines the posterior over many functions drawn from the task, a rough one in more than a few
    dimensions.

    Example:
        >>> from massieu.context import task_named
        >>> [learner_for(task_named(name, dim=3), 6).name for name in ("ridge", "tree", "sine")]
        ['ridge (Bayes)', 'tree', 'posterior over 4,096 functions']
    """
    many, few = 2048, 256
    if type(task) in (Linear, NoisyLinear, Quadratic):
        name, predictor = next(iter(predictors_for(task).items()))
        return Learner(name, _last(predictor), True, many)
    if isinstance(task, (Logistic, Sine)):
        pool = draw_pool(task, SAMPLES, torch.Generator().manual_seed(0))
        some = min(few, max(64, 2**25 // (SAMPLES * (examples + 1))))
        return Learner(f"posterior over {SAMPLES:,} functions", lambda found: pool.predict(found)[:, -1], False, some)
    if isinstance(task, TwoLayer):
        network = TrainedNetwork(task.hidden)
        return Learner("two-layer network", _last(network), False, min(few, max(64, 20 * few // examples)))
    if isinstance(task, DecisionTree) and task.depth:
        return Learner("tree", _last(Tree(task.depth)), False, few, "sklearn")
    if isinstance(task, SparseLinear):
        return Learner("Lasso", _last(Lasso(max(0.01, 0.2 * task.noise))), False, few, "sklearn")
    name, predictor = next(iter(predictors_for(task).items()))
    return Learner(name, _last(predictor), False, many)


def second_moment(task: Linear) -> Tensor:
    """Return the second moment of the weights: the prior itself unless the weights are sparse."""
    return task.nonzero / task.dim * task.prior if isinstance(task, SparseLinear) else task.prior


def _descents(task: Linear) -> dict[str, Predictor]:
    """Return predictors by gradient descent; several steps have the best sizes for isotropic inputs and weights."""
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


def _last(predictor: Predictor) -> Callable[[Prompts], Tensor]:
    return lambda prompts: predictor(prompts, [prompts.examples - 1])[:, 0]


def _is_multiple_of_one(matrix: Tensor) -> bool:
    return torch.allclose(matrix, matrix[0, 0] * torch.eye(len(matrix)).to(matrix)) and bool(matrix[0, 0] > 0)


class _Squares(Predictor):
    r"""A predictor on the features :math:`x_k^2 / \sqrt 3` of quadratic functions."""

    def __init__(self, predictor: Predictor):
        self.predictor = predictor

    def predict(self, inputs: Tensor, targets: Tensor, queries: Tensor, lengths: list[int]) -> Tensor:
        features = [given.square() / math.sqrt(3) for given in (inputs, queries)]
        return self.predictor.predict(features[0], targets, features[1], lengths)
