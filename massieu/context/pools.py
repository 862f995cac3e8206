"""Pools of functions, and the posterior over a pool as a predictor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from massieu.checks import check_count
from massieu.context.prompts import Prompts
from massieu.context.tasks import Logistic, Task
from massieu.context.tasks.task import Parameters

__all__ = ["Pool", "draw_pool"]

FLOOR = 1e-3  # least noise in a posterior over functions, in units of the signal; so for labels
NUMBERS = 2**23  # in memory at a time


@dataclass(frozen=True)
class Pool:
    r"""Finitely many functions of a task, equally likely, for models that retrieve.

    As a predictor it is :math:`\hat y = \sum_k p_k f_k(x)` with
    :math:`p_k \propto \exp(-\sum_{j<i} (y_j - f_k(x_j))^2 / 2 s^2)`, or the likelihood of labels where targets are
    labels: attention over functions. With :math:`s` the noise of the task this is Bayes for that prior. The variance of
    the noise is at least a thousandth of the signal, so that the posterior also exists for functions outside of the
    pool; below, the predictor is smoother than Bayes.

    Attributes:
        task: of the functions.
        parameters: each with the functions as first axis.
        size: number of functions.

    Source:
        Xie et al. 2021: learning in a context as inference of the concept of training. With functions for concepts:
        Raventós et al. 2023, section 2.

    Example:
        >>> from massieu.context import task_named
        >>> pool = draw_pool(task_named("linear", dim=3, noise=0.1), 8, torch.Generator().manual_seed(0))
        >>> prompts = pool.draw(100, 7, torch.Generator().manual_seed(1))
        >>> bool((pool.predict(prompts)[:, -1] - prompts.answers[:, -1]).square().mean() < 0.01)
        True
    """

    task: Task
    parameters: Parameters
    size: int

    @property
    def cost(self) -> int:
        """Numbers in a prediction of all functions for one input."""
        numbers = sum(value[0].numel() for value in self.parameters.values())
        return self.size * max(1, numbers // self.task.dim)

    def draw(self, count: int, examples: int, generator: torch.Generator) -> Prompts:
        """Draw prompts of functions of the pool."""
        which = torch.randint(self.size, (count,), generator=generator)
        chosen = {name: value[which] for name, value in self.parameters.items()}
        inputs, queries = self.task.draw_examples(count, examples, generator, torch.get_default_dtype())
        return self.task.prompts(inputs, queries, chosen, generator)

    def predict(self, prompts: Prompts) -> Tensor:
        """Return the posterior mean of the functions after each number of examples, ``(tasks, examples)``."""
        count = max(1, NUMBERS * self.size // (self.cost * prompts.targets.numel()))
        highest = torch.full_like(prompts.targets, -torch.inf)
        weight, mean = torch.zeros_like(prompts.targets), torch.zeros_like(prompts.targets)
        for start in range(0, self.size, count):
            scores, values = self._scores(prompts, slice(start, start + count))
            # A softmax over all functions in chunks: sums in units of the largest score so far.
            higher = torch.maximum(highest, scores.amax(0))
            shrunk, own = (highest - higher).exp(), (scores - higher).exp()
            weight, mean, highest = weight * shrunk + own.sum(0), mean * shrunk + (own * values).sum(0), higher
        return mean / weight

    def _scores(self, prompts: Prompts, functions: slice) -> tuple[Tensor, Tensor]:
        """Return log likelihoods of the examples before each query, and values at the queries, of some functions."""
        parameters = {name: value[functions] for name, value in self.parameters.items()}
        values = self._values(prompts.inputs, parameters)
        if isinstance(self.task, Logistic):
            misfits = -torch.log1p((prompts.targets * values).clamp_min(FLOOR - 1))
        else:
            misfits = (prompts.targets - values).square() / (2 * max(self.task.noise**2, FLOOR * self.task.signal))
        before = torch.nn.functional.pad(misfits.cumsum(-1), (1, 0))[..., :-1]
        return -before, values if prompts.queries_are_inputs else self._values(prompts.queries, parameters)

    def _values(self, inputs: Tensor, parameters: Parameters) -> Tensor:
        count = len(next(iter(parameters.values())))
        flat = inputs.flatten(0, 1)[None].expand(count, -1, -1)
        found: Tensor = self.task.values(flat, parameters).unflatten(1, inputs.shape[:2])
        return found


def draw_pool(task: Task, size: int, generator: torch.Generator) -> Pool:
    """Draw ``size`` functions of a task."""
    size = check_count(size, "size")
    return Pool(task, task.draw_parameters(size, generator, torch.get_default_dtype()), size)
