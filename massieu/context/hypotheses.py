"""Experiment that separates retrieval of a function of training from learning a function from examples."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from massieu.checks import optional_package
from massieu.context.baselines import learner_for
from massieu.context.pools import Pool
from massieu.context.prompts import Prompts
from massieu.context.tasks import Task

if TYPE_CHECKING:
    import pandas

__all__ = ["separate"]

WORK = 2**26  # values of the functions of a pool, above which there are fewer tasks
LEAST = 64  # tasks at least


def separate(
    model: Callable[[Prompts], Tensor], task: Task, pool: Pool | None, examples: int, generator: torch.Generator
) -> pandas.DataFrame:
    r"""Compare a model with the two hypotheses about learning in a context where their predictions differ.

    *Retrieval* (Xie et al. 2021): the model infers which function of training the examples have, as :class:`Pool`.
    *Learning* (Garg et al. 2022): it fits any function of the class, as :func:`massieu.context.baselines.learner_for`.
    Both do well on functions of the ``pool`` once the examples distinguish functions of the class, and they differ on

    ``novel``
        functions of the class that are not from training: learning is as good as before, retrieval predicts with the
        nearest functions of training,
    ``shuffled``
        functions of training with the targets of the examples permuted, so that no function fits: learning predicts
        with its fit all the same, retrieval with the functions of training.

    Without a pool every function was one of training, and the posterior over all of them is the best predictor of the
    class: the two hypotheses are one. Then the alternative to learning is the mean function, zero.

    Where the learner is not the best predictor of the class, a better model would be some way from it. There is a
    verdict only if the exact answers would pass for learning; otherwise, as for few examples of a tree and for
    shuffled targets, the condition is "undecided".

    Returns:
        A row for each condition: ``learner``, its name; ``tasks``, their number; ``model_error``, ``learning_error``
        and ``retrieval_error`` against the answers after all examples; mean squared distances ``to_learning`` and
        ``to_retrieval`` of the predictions of the model, and ``apart``, that of the two hypotheses; ``share``, the part
        :math:`s` of learning in the mixture :math:`s \cdot \text{learning} + (1 - s) \cdot \text{retrieval}` nearest to
        the model; ``share_error``, its standard error over tasks; ``follows``, the hypothesis to which the model is
        nearer than half the way between the two, "learning" or "retrieval", "neither", or "undecided", without a
        share. Without a pool there is no row ``pool``, zero replaces retrieval in ``apart`` and ``share``, and the
        other columns of retrieval are NaN.

    Example:
        >>> from massieu.context import Ridge, draw_pool, task_named
        >>> task, draws = task_named("linear", dim=3, noise=0.5), torch.Generator().manual_seed(0)
        >>> pool = draw_pool(task, 4, draws)
        >>> separate(Ridge(0.25), task, pool, 6, draws).follows.tolist()
        ['learning', 'learning', 'learning']
        >>> separate(pool.predict, task, pool, 6, draws).follows.tolist()
        ['retrieval', 'retrieval', 'retrieval']
        >>> separate(lambda prompts: 0 * prompts.targets, task, None, 6, draws).follows.tolist()
        ['neither', 'neither']
    """
    learner = learner_for(task, examples)
    tasks = learner.tasks
    if pool is not None:
        tasks = min(tasks, max(LEAST, WORK // (pool.cost * (examples + 1))))
    novel = task.draw(tasks, examples + 1, generator)
    trained = novel if pool is None else pool.draw(tasks, examples + 1, generator)
    conditions = {} if pool is None else {"pool": trained}
    conditions |= {"novel": novel, "shuffled": _shuffled(trained, generator)}
    rows = []
    for condition, prompts in conditions.items():
        with torch.no_grad():
            own, fitted = model(prompts)[:, -1], learner.predict(prompts)
            recalled = torch.zeros_like(own) if pool is None else pool.predict(prompts)[:, -1]
        errors = [_gap(found, prompts.answers[:, -1]) for found in (own, fitted, recalled)]
        gaps, apart = [_gap(own, fitted), _gap(own, recalled)], _gap(fitted, recalled)
        names = ("learning", "retrieval" if pool is not None else "neither")
        follows = next((name for name, gap in zip(names, gaps, strict=True) if gap < apart / 4), "neither")
        # |own - recalled - s (fitted - recalled)|^2 is least at this s.
        share = (gaps[1] - gaps[0] + apart) / (2 * apart) if apart else math.nan
        share_error = _share_error(own - recalled, fitted - recalled, share)
        if not learner.best and errors[1] >= apart / 4:
            follows, share, share_error = "undecided", math.nan, math.nan
        if pool is None:
            errors[2] = gaps[1] = math.nan
        rows.append((condition, learner.name, tasks, *errors, *gaps, apart, share, share_error, follows))
    columns = ["condition", "learner", "tasks", "model_error", "learning_error", "retrieval_error"]
    columns += ["to_learning", "to_retrieval", "apart", "share", "share_error", "follows"]
    return optional_package("pandas", "separate", "verify").DataFrame(rows, columns=columns)


def _shuffled(prompts: Prompts, generator: torch.Generator) -> Prompts:
    """Permute the targets of the examples of each prompt; the query at the end keeps its own."""
    order = torch.rand(prompts.tasks, prompts.examples - 1, generator=generator).argsort(-1)
    targets = torch.cat([prompts.targets[:, :-1].gather(1, order), prompts.targets[:, -1:]], 1)
    return replace(prompts, targets=targets)


def _share_error(own: Tensor, apart: Tensor, share: float) -> float:
    """Return the standard error of a ratio of sums over tasks, from the residuals of the share."""
    residual = (own - share * apart).double() * apart.double()
    total = float(apart.double().square().sum())
    return float(residual.square().sum().sqrt()) / total if total else math.nan


def _gap(first: Tensor, second: Tensor) -> float:
    return float((first - second).double().square().mean())
