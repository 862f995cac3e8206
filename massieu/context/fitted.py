"""Predictors that are fitted to each prefix of each task: Lasso, trees, boosting, and a network trained by Adam."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from massieu.checks import check_count, check_number, optional_package
from massieu.context.predictors import Predictor

__all__ = ["Boosting", "Lasso", "TrainedNetwork", "Tree"]


class Fitted(Predictor):
    """Predictor with an estimator of scikit-learn for each task, output and length: pass few lengths, or few tasks."""

    def predict(self, inputs: Tensor, targets: Tensor, queries: Tensor, lengths: list[int]) -> Tensor:
        estimator = self._estimator()
        x, y, points = (tensor.numpy(force=True) for tensor in (inputs, targets, queries))
        found = np.zeros((*points.shape[:2], y.shape[-1]))
        fits = failures = 0
        for task, place, output in np.ndindex(*found.shape):
            length = lengths[place]
            if length:
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    estimator.fit(x[task, :length], y[task, :length, output])
                fits += 1
                failures += any("converge" in str(warning.message).lower() for warning in caught)
                found[task, place, output] = estimator.predict(points[task, place][None])[0]
        if failures:
            warnings.warn(
                f"{failures} of {fits} fits of {type(self).__name__} stopped before they converged;"
                " their predictions are those of the last step, so raise the penalty or the number of steps",
                RuntimeWarning,
                stacklevel=3,
            )
        return torch.from_numpy(found).to(inputs)

    @abstractmethod
    def _estimator(self) -> Any:
        """Return an estimator with fit and predict."""


class Lasso(Fitted):
    r"""Least squares with a penalty on the sum of absolute weights, by coordinate descent.

    .. math:: \hat w = \arg\min_w \tfrac{1}{2i} \textstyle\sum_{j<i} (y_j - \langle w, x_j \rangle)^2
              + \alpha \|w\|_1

    Args:
        alpha: the penalty.
        steps: sweeps over the coordinates at most; a warning counts the fits that did not converge.

    Source:
        Garg et al. 2022, appendix A.3, for sparse linear functions; there alpha is 1, .1, .01, .001 or .0001.

    Example:
        >>> from massieu.context import task_named
        >>> prompts = task_named("sparse", dim=20).draw(5, 16, torch.Generator().manual_seed(0))
        >>> Lasso(0.1)(prompts, lengths=[15]).shape
        torch.Size([5, 1])
    """

    def __init__(self, alpha: float, steps: int = 10_000):
        self.alpha = check_number(alpha, "alpha", above=0, remedy="without a penalty take LeastSquares")
        self.steps = check_count(steps, "steps")

    def _estimator(self) -> Any:
        model = optional_package("sklearn.linear_model", "Lasso", "verify")
        return model.Lasso(alpha=self.alpha, fit_intercept=False, max_iter=self.steps)


class Tree(Fitted):
    """Regression tree grown greedily.

    Args:
        depth: splits on the way to a leaf at most; None grows until leaves are pure.
        seed: for ties between equally good splits.

    Example:
        >>> from massieu.context import task_named
        >>> prompts = task_named("tree", dim=4).draw(5, 33, torch.Generator().manual_seed(0))
        >>> Tree(4)(prompts, lengths=[8, 32]).shape
        torch.Size([5, 2])
    """

    def __init__(self, depth: int | None = 4, seed: int = 0):
        self.depth = None if depth is None else check_count(depth, "depth")
        self.seed = check_count(seed, "seed", least=0)

    def _estimator(self) -> Any:
        model = optional_package("sklearn.tree", "Tree", "verify")
        return model.DecisionTreeRegressor(max_depth=self.depth, random_state=self.seed)


class Boosting(Fitted):
    """Gradient boosting of regression trees.

    Args:
        trees: number of trees.
        depth: of each.
        learning_rate: factor of each.
        seed: for ties between equally good splits.

    Example:
        >>> from massieu.context import task_named
        >>> prompts = task_named("tree", dim=4).draw(2, 33, torch.Generator().manual_seed(0))
        >>> Boosting(trees=20)(prompts, lengths=[32]).shape
        torch.Size([2, 1])
    """

    def __init__(self, trees: int = 100, depth: int = 3, learning_rate: float = 0.1, seed: int = 0):
        self.trees, self.depth = check_count(trees, "trees"), check_count(depth, "depth")
        self.learning_rate = check_number(learning_rate, "learning_rate", above=0)
        self.seed = check_count(seed, "seed", least=0)

    def _estimator(self) -> Any:
        model = optional_package("sklearn.ensemble", "Boosting", "verify")
        return model.GradientBoostingRegressor(
            n_estimators=self.trees, max_depth=self.depth, learning_rate=self.learning_rate, random_state=self.seed
        )


class TrainedNetwork(Predictor):
    r"""Two-layer ReLU networks, one for each task and length, trained by Adam on all of its examples in each step.

    The networks of all tasks are trained together with the same result as alone: Adam works on each weight by itself,
    and the loss is a sum over tasks.

    Args:
        hidden: units.
        steps: of Adam.
        learning_rate: of Adam.
        seed: of the weights at the start, the same for each length.

    Source:
        Garg et al. 2022, appendix A.3.

    Example:
        >>> from massieu.context import task_named
        >>> prompts = task_named("network", dim=4, hidden=8).draw(5, 33, torch.Generator().manual_seed(0))
        >>> TrainedNetwork(steps=50)(prompts, lengths=[8, 32]).shape
        torch.Size([5, 2])
    """

    def __init__(self, hidden: int = 100, steps: int = 100, learning_rate: float = 5e-3, seed: int = 0):
        self.hidden, self.steps = check_count(hidden, "hidden"), check_count(steps, "steps", least=0)
        self.learning_rate = check_number(learning_rate, "learning_rate", above=0)
        self.seed = check_count(seed, "seed", least=0)

    def predict(self, inputs: Tensor, targets: Tensor, queries: Tensor, lengths: list[int]) -> Tensor:
        # Single precision: the error after a hundred steps of Adam is far above its rounding.
        x, y, points = inputs.float(), targets.float(), queries.float()
        found = torch.zeros(*queries.shape[:2], targets.shape[-1], device=inputs.device)
        for place, length in enumerate(lengths):
            if length:
                weights = self._train(x[:, :length], y[:, :length])
                found[:, place] = _network(points[:, place : place + 1], weights)[:, 0]
        return found.to(inputs)

    def _train(self, inputs: Tensor, targets: Tensor) -> list[Tensor]:
        """Return weights of the networks of all tasks, trained on these examples."""
        weights = self._start(inputs, targets)
        optimizer = torch.optim.Adam(weights, lr=self.learning_rate)
        with torch.enable_grad():
            for _ in range(self.steps):
                optimizer.zero_grad()
                loss = (_network(inputs, weights) - targets).square().mean((1, 2)).sum()
                loss.backward()
                optimizer.step()
        return [weight.detach() for weight in weights]

    def _start(self, inputs: Tensor, targets: Tensor) -> list[Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        tasks, dim, outputs = inputs.shape[0], inputs.shape[-1], targets.shape[-1]
        weights = []
        for ins, outs in ((dim, self.hidden), (self.hidden, outputs)):
            for rows in (ins, 1):  # a matrix and its bias, uniform as in torch.nn.Linear
                drawn = torch.rand(tasks, rows, outs, generator=generator) * 2 - 1
                weights.append((drawn / ins**0.5).to(inputs).requires_grad_())
        return weights


def _network(inputs: Tensor, weights: list[Tensor]) -> Tensor:
    first, first_bias, second, second_bias = weights
    return torch.relu(inputs @ first + first_bias) @ second + second_bias
