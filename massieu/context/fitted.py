"""Predictors that are fitted to each prefix of each task: Lasso, trees, boosting, and a network trained by Adam."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from massieu.checks import UserError
from massieu.context.extras import imported
from massieu.context.predictors import Predictor
from massieu.measures.measure import as_integer

__all__ = ["Boosting", "Lasso", "TrainedNetwork", "Tree"]


class Fitted(Predictor):
    """One estimator of scikit-learn for each task, output and length: pass few lengths, or few tasks."""

    def predict(self, inputs: Tensor, targets: Tensor, queries: Tensor, lengths: list[int]) -> Tensor:
        estimator = self._estimator()
        x, y, asked = (tensor.numpy(force=True) for tensor in (inputs, targets, queries))
        found = np.zeros((*asked.shape[:2], y.shape[-1]))
        fits = failures = 0
        for task, place, output in np.ndindex(*found.shape):
            length = lengths[place]
            if length:
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    estimator.fit(x[task, :length], y[task, :length, output])
                fits += 1
                failures += any("converge" in str(warning.message).lower() for warning in caught)
                found[task, place, output] = estimator.predict(asked[task, place][None])[0]
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
        """An estimator with fit and predict."""


class Lasso(Fitted):
    r"""Least squares with a penalty on the sum of absolute weights, by coordinate descent.

    .. math:: \hat w = \arg\min_w \tfrac{1}{2i} \textstyle\sum_{j<i} (y_j - \langle w, x_j \rangle)^2
              + \alpha \|w\|_1

    Args:
        alpha: the penalty.
        steps: most sweeps over the coordinates; a warning counts the fits for which they were too few.

    Source:
        Garg et al. 2022, appendix A.3, for sparse linear functions; there alpha is 1, .1, .01, .001 or .0001.

    Example:
        >>> from massieu.context import task_named
        >>> prompts = task_named("sparse", dim=20).draw(5, 16, torch.Generator().manual_seed(0))
        >>> Lasso(0.1)(prompts, lengths=[15]).shape
        torch.Size([5, 1])
    """

    def __init__(self, alpha: float, steps: int = 10_000):
        if not 0 < alpha < float("inf"):
            raise UserError(f"alpha must be positive and finite, got {alpha!r}; without a penalty take LeastSquares")
        self.alpha, self.steps = float(alpha), as_integer(steps, "steps", least=1)

    def _estimator(self) -> Any:
        model = imported("sklearn.linear_model", "Lasso")
        return model.Lasso(alpha=self.alpha, fit_intercept=False, max_iter=self.steps)


class Tree(Fitted):
    """A regression tree grown greedily.

    Args:
        depth: most questions on the way to a leaf; None grows until leaves are pure.
        seed: breaks ties between equally good questions.

    Example:
        >>> from massieu.context import task_named
        >>> prompts = task_named("tree", dim=4).draw(5, 33, torch.Generator().manual_seed(0))
        >>> Tree(4)(prompts, lengths=[8, 32]).shape
        torch.Size([5, 2])
    """

    def __init__(self, depth: int | None = 4, seed: int = 0):
        self.depth = None if depth is None else as_integer(depth, "depth", least=1)
        self.seed = as_integer(seed, "seed", least=0)

    def _estimator(self) -> Any:
        model = imported("sklearn.tree", "Tree")
        return model.DecisionTreeRegressor(max_depth=self.depth, random_state=self.seed)


class Boosting(Fitted):
    """Regression trees added one by one along the gradient.

    Args:
        trees: how many.
        depth: of each.
        rate: by which each is added.
        seed: breaks ties between equally good questions.

    Example:
        >>> from massieu.context import task_named
        >>> prompts = task_named("tree", dim=4).draw(2, 33, torch.Generator().manual_seed(0))
        >>> Boosting(trees=20)(prompts, lengths=[32]).shape
        torch.Size([2, 1])
    """

    def __init__(self, trees: int = 100, depth: int = 3, rate: float = 0.1, seed: int = 0):
        self.trees, self.depth = as_integer(trees, "trees", least=1), as_integer(depth, "depth", least=1)
        if not 0 < rate < float("inf"):
            raise UserError(f"rate must be positive and finite, got {rate!r}; 0.1 is common")
        self.rate, self.seed = float(rate), as_integer(seed, "seed", least=0)

    def _estimator(self) -> Any:
        model = imported("sklearn.ensemble", "Boosting")
        return model.GradientBoostingRegressor(
            n_estimators=self.trees, max_depth=self.depth, learning_rate=self.rate, random_state=self.seed
        )


class TrainedNetwork(Predictor):
    r"""Two-layer ReLU networks, one for each task and length, trained by Adam on all of its examples in each step.

    The networks of all tasks are trained together: Adam works on each weight by itself, and the loss is a sum over
    tasks, so that each is trained as if it were alone.

    Args:
        hidden: units.
        steps: of Adam.
        rate: of Adam.
        seed: of the weights at the start, the same for each length.

    Source:
        Garg et al. 2022, appendix A.3.

    Example:
        >>> from massieu.context import task_named
        >>> prompts = task_named("network", dim=4, hidden=8).draw(5, 33, torch.Generator().manual_seed(0))
        >>> TrainedNetwork(steps=50)(prompts, lengths=[8, 32]).shape
        torch.Size([5, 2])
    """

    def __init__(self, hidden: int = 100, steps: int = 100, rate: float = 5e-3, seed: int = 0):
        self.hidden, self.steps = as_integer(hidden, "hidden", least=1), as_integer(steps, "steps", least=0)
        if not 0 < rate < float("inf"):
            raise UserError(f"rate must be positive and finite, got {rate!r}; 0.005 is common")
        self.rate, self.seed = float(rate), as_integer(seed, "seed", least=0)

    def predict(self, inputs: Tensor, targets: Tensor, queries: Tensor, lengths: list[int]) -> Tensor:
        # Single precision: what a hundred steps of Adam leave over is far above its rounding.
        x, y, asked = inputs.float(), targets.float(), queries.float()
        found = torch.zeros(*queries.shape[:2], targets.shape[-1], device=inputs.device)
        for place, length in enumerate(lengths):
            if length:
                weights = self._train(x[:, :length], y[:, :length])
                found[:, place] = _network(asked[:, place : place + 1], weights)[:, 0]
        return found.to(inputs)

    def _train(self, inputs: Tensor, targets: Tensor) -> list[Tensor]:
        """Weights of the networks of all tasks, trained on the examples given."""
        weights = self._start(inputs, targets)
        optimizer = torch.optim.Adam(weights, lr=self.rate)
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
