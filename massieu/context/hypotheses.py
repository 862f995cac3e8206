"""Does a model retrieve a function it was trained on, or learn one from the examples? The experiment that separates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from massieu.context.baselines import predictors_for
from massieu.context.extras import imported
from massieu.context.predictors import Predictor, check_lengths
from massieu.context.prompts import Prompts
from massieu.context.tasks import Task
from massieu.context.tasks.task import Parameters
from massieu.measures.measure import as_integer

if TYPE_CHECKING:
    import pandas

__all__ = ["Pool", "draw_pool", "separate"]

TASKS = 2048
FLOOR = 1e-3  # least noise, in units of the signal, that a posterior over functions assumes


@dataclass(frozen=True)
class Pool:
    r"""Finitely many functions of a task, each as likely as another: what a model can only retrieve.

    As a predictor it is Bayes for that prior, :math:`\hat y = \sum_k p_k f_k(x)` with
    :math:`p_k \propto \exp(-\sum_{j<i} (y_j - f_k(x_j))^2 / 2 \sigma^2)`: attention over functions.

    Attributes:
        task: of the functions.
        parameters: each with the functions as first axis.
        size: how many there are.

    Source:
        Xie et al. 2021: learning in a context as inference of which of the concepts of training it is.

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

    def draw(self, count: int, examples: int, generator: torch.Generator) -> Prompts:
        """Prompts of functions of the pool."""
        which = torch.randint(self.size, (count,), generator=generator)
        chosen = {name: value[which] for name, value in self.parameters.items()}
        inputs = self.task.draw_inputs(count, examples, generator, torch.get_default_dtype())
        return self.task.ask(inputs, inputs, chosen, generator)

    def predict(self, prompts: Prompts) -> Tensor:
        """The mean of the functions under the posterior after each number of examples, ``(tasks, examples)``."""
        flat = prompts.inputs.flatten(0, 1)[None].expand(self.size, -1, -1)
        values = self.task.values(flat, self.parameters).unflatten(1, prompts.targets.shape)
        variance = max(self.task.noise**2, FLOOR * self.task.signal)
        misfit = (prompts.targets - values).square().cumsum(-1) / (2 * variance)
        before = torch.nn.functional.pad(misfit, (1, 0))[..., :-1]
        mean: Tensor = (torch.softmax(-before, 0) * values).sum(0)
        return mean


def draw_pool(task: Task, size: int, generator: torch.Generator) -> Pool:
    """So many functions of a task."""
    size = as_integer(size, "size", least=1)
    return Pool(task, task.draw_parameters(size, generator, torch.get_default_dtype()), size)


def separate(
    model: Callable[[Prompts], Tensor], task: Task, pool: Pool | None, examples: int, generator: torch.Generator
) -> pandas.DataFrame:
    r"""Where the two hypotheses about learning in a context predict different things, and which the model follows.

    *Retrieval* (Xie et al. 2021): the model infers which function of training it sees, as :class:`Pool` does.
    *Learning* (Garg et al. 2022): it fits any function of the class, as the best predictor for the class does. They
    agree on functions of the pool, and differ on

    ``novel``
        functions of the class that training never saw,
    ``shuffled``
        novel functions with the targets of the examples permuted, so that none of the functions fits: a learner
        answers with what it fits all the same, a retriever with one of its own functions.

    Returns:
        A row for each condition, ``pool``, ``novel`` and ``shuffled``: ``model_error``, ``learning_error`` and
        ``retrieval_error`` against the answers after all examples, the mean squared distances ``to_learning`` and
        ``to_retrieval`` of the predictions of the model, ``size``, the mean square of these, and ``follows``, the
        nearer of the two. Without a pool there is nothing to retrieve, and no such row and figures.

    Example:
        >>> from massieu.context import Ridge, task_named
        >>> task, draws = task_named("linear", dim=3, noise=0.5), torch.Generator().manual_seed(0)
        >>> separate(Ridge(0.25), task, draw_pool(task, 4, draws), 6, draws).follows.tolist()
        ['learning', 'learning', 'learning']
    """
    rows = []
    novel = task.draw(TASKS, examples + 1, generator)
    conditions = {} if pool is None else {"pool": pool.draw(TASKS, examples + 1, generator)}
    order = torch.rand(TASKS, examples, generator=generator).argsort(-1)
    mixed = torch.cat([novel.targets[:, :-1].gather(1, order), novel.targets[:, -1:]], 1)
    conditions |= {"novel": novel, "shuffled": replace(novel, targets=mixed)}
    name, learner = next(iter(predictors_for(task).items()))
    for condition, prompts in conditions.items():
        with torch.no_grad():
            own, fitted = model(prompts)[:, -1], _last(learner, prompts)
            recalled = torch.full_like(own, torch.nan) if pool is None else pool.predict(prompts)[:, -1]
        answers = prompts.answers[:, -1]
        gaps = [_gap(own, fitted), _gap(own, recalled)]
        follows = "learning" if pool is None or gaps[0] < gaps[1] else "retrieval"
        errors = [_gap(found, answers) for found in (own, fitted, recalled)]
        rows.append((condition, name, *errors, *gaps, float(own.square().mean()), follows))
    columns = ["condition", "learner", "model_error", "learning_error", "retrieval_error"]
    columns += ["to_learning", "to_retrieval", "size", "follows"]
    return imported("pandas", "separate").DataFrame(rows, columns=columns)


def _last(predictor: Predictor, prompts: Prompts) -> Tensor:
    return predictor(prompts, check_lengths([prompts.examples - 1], prompts.examples))[:, 0]


def _gap(first: Tensor, second: Tensor) -> float:
    return float((first - second).double().square().mean())
