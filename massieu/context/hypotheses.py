"""Does a model retrieve a function it was trained on, or learn one from the examples? The experiment that separates."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from massieu.context.baselines import predictors_for
from massieu.context.extras import imported
from massieu.context.predictors import Predictor, check_lengths
from massieu.context.prompts import Prompts
from massieu.context.tasks import Logistic, Task
from massieu.context.tasks.task import Parameters
from massieu.measures.measure import as_integer

if TYPE_CHECKING:
    import pandas

__all__ = ["Pool", "draw_pool", "separate"]

TASKS = 2048
FLOOR = 1e-3  # least noise, in units of the signal, that a posterior over functions assumes; so for labels


@dataclass(frozen=True)
class Pool:
    r"""Finitely many functions of a task, each as likely as another: what a model can only retrieve.

    As a predictor it is Bayes for that prior, :math:`\hat y = \sum_k p_k f_k(x)` with
    :math:`p_k \propto \exp(-\sum_{j<i} (y_j - f_k(x_j))^2 / 2 \sigma^2)`, or the likelihood of labels where targets are
    labels: attention over functions.

    Attributes:
        task: of the functions.
        parameters: each with the functions as first axis.
        size: how many there are.

    Source:
        Xie et al. 2021: learning in a context as inference of which of the concepts of training it is. With functions
        for concepts: Raventós et al. 2023, section 2.

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
        if isinstance(self.task, Logistic):
            misfits = -torch.log1p((prompts.targets * values).clamp_min(FLOOR - 1))
        else:
            misfits = (prompts.targets - values).square() / (2 * max(self.task.noise**2, FLOOR * self.task.signal))
        before = torch.nn.functional.pad(misfits.cumsum(-1), (1, 0))[..., :-1]
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
    *Learning* (Garg et al. 2022): it fits any function of the class, as the best predictor for the class does. Both do
    well on functions of the ``pool``, and they differ on

    ``novel``
        functions of the class that training never saw: a learner is as good as ever, a retriever answers with those
        of its own functions that come nearest,
    ``shuffled``
        functions of training with the targets of the examples permuted, so that no function fits: a learner answers
        with what it fits all the same, a retriever with its own functions.

    Without a pool every function was one of training, and the posterior over all of them is the best predictor of the
    class: the two hypotheses are one. What is left to ask is whether the model uses the examples as that one does,
    rather than answer with the mean function, zero.

    Returns:
        A row for each condition: ``model_error``, ``learning_error`` and ``retrieval_error`` against the answers after
        all examples; mean squared distances ``to_learning`` and ``to_retrieval`` of the predictions of the model, and
        ``apart``, that of the two hypotheses; ``share``, the part :math:`s` of learning in the mixture
        :math:`s \cdot \text{learning} + (1 - s) \cdot \text{retrieval}` that is nearest to the model; ``follows``, the
        hypothesis to which the model is nearer than half the way between the two, "learning" or "retrieval", and
        "neither" where it is near none. Without a pool there is no row ``pool``, zero stands for retrieval in
        ``apart`` and ``share``, and the other columns of retrieval are NaN.

    Example:
        >>> from massieu.context import Ridge, task_named
        >>> task, draws = task_named("linear", dim=3, noise=0.5), torch.Generator().manual_seed(0)
        >>> pool = draw_pool(task, 4, draws)
        >>> separate(Ridge(0.25), task, pool, 6, draws).follows.tolist()
        ['learning', 'learning', 'learning']
        >>> separate(pool.predict, task, pool, 6, draws).follows.tolist()
        ['retrieval', 'retrieval', 'retrieval']
        >>> separate(lambda prompts: 0 * prompts.targets, task, None, 6, draws).follows.tolist()
        ['neither', 'neither']
    """
    novel = task.draw(TASKS, examples + 1, generator)
    trained = novel if pool is None else pool.draw(TASKS, examples + 1, generator)
    conditions = {} if pool is None else {"pool": trained}
    conditions |= {"novel": novel, "shuffled": _shuffled(trained, generator)}
    name, learner = next(iter(predictors_for(task).items()))
    rows = []
    for condition, prompts in conditions.items():
        with torch.no_grad():
            own, fitted = model(prompts)[:, -1], _last(learner, prompts)
            recalled = torch.zeros_like(own) if pool is None else pool.predict(prompts)[:, -1]
        errors = [_gap(found, prompts.answers[:, -1]) for found in (own, fitted, recalled)]
        gaps, apart = [_gap(own, fitted), _gap(own, recalled)], _gap(fitted, recalled)
        names = ("learning", "retrieval" if pool is not None else "neither")
        follows = next((name for name, gap in zip(names, gaps, strict=True) if gap < apart / 4), "neither")
        # |own - recalled - s (fitted - recalled)|^2 is least at this s.
        share = (gaps[1] - gaps[0] + apart) / (2 * apart) if apart else math.nan
        if pool is None:
            errors[2] = gaps[1] = math.nan
        rows.append((condition, name, *errors, *gaps, apart, share, follows))
    columns = ["condition", "learner", "model_error", "learning_error", "retrieval_error"]
    columns += ["to_learning", "to_retrieval", "apart", "share", "follows"]
    return imported("pandas", "separate").DataFrame(rows, columns=columns)


def _shuffled(prompts: Prompts, generator: torch.Generator) -> Prompts:
    """The targets of the examples of each prompt in another order; the query at the end keeps its own."""
    order = torch.rand(prompts.tasks, prompts.examples - 1, generator=generator).argsort(-1)
    targets = torch.cat([prompts.targets[:, :-1].gather(1, order), prompts.targets[:, -1:]], 1)
    return replace(prompts, targets=targets)


def _last(predictor: Predictor, prompts: Prompts) -> Tensor:
    return predictor(prompts, check_lengths([prompts.examples - 1], prompts.examples))[:, 0]


def _gap(first: Tensor, second: Tensor) -> float:
    return float((first - second).double().square().mean())
