"""Definition of learning a class of functions in a context up to an error, decided from drawn tasks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from statistics import NormalDist
from typing import NamedTuple

import torch
from torch import Tensor

from massieu.checks import UserError, check_count, check_number
from massieu.context.models import ContextModel
from massieu.context.predictors import Predictor
from massieu.context.prompts import Prompts
from massieu.context.tasks import Task

__all__ = ["ContextLearning", "learns_in_context", "squared_error"]

Loss = Callable[[Tensor, Tensor], Tensor]
"""A function of predictions and answers with a loss for each task, shape ``(tasks,)``."""


class ContextLearning(NamedTuple):
    """Risk of a model on a class of functions, with an interval and a verdict.

    Attributes:
        risk: mean loss over the drawn tasks.
        lower: end of the confidence interval of the expected loss.
        upper: other end of it.
        epsilon: the largest error of a model that learns the class.
        verdict: True if ``upper`` is at most ``epsilon``, False if ``lower`` is above it, None if neither is.
    """

    risk: float
    lower: float
    upper: float
    epsilon: float
    verdict: bool | None


LEAST = 100  # tasks for an interval by the central limit theorem


def squared_error(predicted: Tensor, answers: Tensor) -> Tensor:
    """Return the squared error of each task, added up over outputs, shape ``(tasks,)``.

    Example:
        >>> squared_error(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]))
        tensor([0., 4.])
    """
    return (predicted - answers).square().flatten(1).sum(1) if predicted.dim() > 1 else (predicted - answers).square()


def learns_in_context(
    model: Callable[..., Tensor],
    task: Task,
    epsilon: float,
    *,
    examples: int,
    loss: Loss = squared_error,
    tasks: int = 4096,
    confidence: float = 0.99,
    bound: float | None = None,
    generator: torch.Generator,
) -> ContextLearning:
    r"""Decide whether a model learns a class of functions in a context up to :math:`\epsilon`.

    A model M learns :math:`\mathcal F` up to :math:`\epsilon` with respect to :math:`(D_X, D_F)` for a loss
    :math:`\ell` if

    .. math:: E_{(x, f) \sim (D_X, D_F)} [\ell(M(P), f(x_{query}))] \le \epsilon, \qquad
              P = (x_1, f(x_1), \dots, x_n, f(x_n), x_{query})

    The task is the pair of distributions; its noise is added to the targets of the examples, not to the answer. The
    expectation is estimated from independent tasks, with an interval. Without a ``bound`` on the loss it is the normal
    one, :math:`\bar\ell \pm z s / \sqrt m`, which assumes a finite variance and enough tasks; no interval is valid for
    every distribution. With a bound B it is the empirical Bernstein interval, valid for any number of tasks,

    .. math:: \bar\ell \pm \Bigl( s \sqrt{\tfrac{2 \log(4/\delta)}{m}} + \tfrac{7 B \log(4/\delta)}{3 (m - 1)} \Bigr),
              \qquad \delta = 1 - \text{confidence}

    Args:
        model: a :class:`~massieu.context.models.ContextModel`, a :class:`~massieu.context.Predictor`, or a function
            from prompts to predictions of shape ``(tasks, examples)``, of which the last counts.
        task: the distribution of functions and inputs.
        epsilon: :math:`\epsilon`, not negative.
        examples: n, before the query.
        loss: from predictions and answers of shape ``(tasks,)``, or that and the outputs, to losses ``(tasks,)``.
        tasks: m, the number of draws.
        confidence: probability that the interval contains the expected loss.
        bound: B, if the loss always lies between 0 and B.
        generator: draws the tasks.

    Source:
        The definition: Garg et al. 2022, introduction. The interval for bounded losses: Maurer and Pontil 2009,
        theorem 4 (from memory), on both sides.

    Example:
        >>> from massieu.context import LeastSquares, task_named
        >>> from massieu.context.predictors import Averaging
        >>> task, draws = task_named("linear", dim=3), torch.Generator().manual_seed(0)
        >>> learns_in_context(LeastSquares(), task, 1e-6, examples=6, generator=draws).verdict
        True
        >>> learns_in_context(Averaging(), task, 1.0, examples=6, generator=draws).verdict
        False
        >>> learns_in_context(Averaging(), task, 2.0, examples=6, generator=draws).verdict is None  # exactly 2
        True
    """
    examples, tasks = check_count(examples, "examples", least=0), check_count(tasks, "tasks", least=2)
    epsilon = check_number(epsilon, "epsilon", least=0)
    if check_number(confidence, "confidence", least=0) >= 1:
        raise UserError(f"confidence must be below 1, got {confidence!r}; intervals are wider the larger it is")
    if bound is not None:
        check_number(bound, "bound", above=0)
    elif tasks < LEAST:
        raise UserError(
            f"tasks must be at least {LEAST} for a normal interval, got {tasks}; or give a bound of the loss"
        )
    prompts = task.draw(tasks, examples + 1, generator)
    losses = loss(_predictions(model, prompts), prompts.answers[:, -1]).double()
    if losses.shape != (tasks,) or not bool(losses.isfinite().all()):
        got = f"shape {tuple(losses.shape)}" if losses.shape != (tasks,) else "numbers that are not finite"
        raise UserError(f"loss must give a finite number for each of the {tasks} tasks, got {got}; see squared_error")
    if bound is not None and not bool(((losses >= 0) & (losses <= bound)).all()):
        low, high = float(losses.min()), float(losses.max())
        raise UserError(f"losses must lie between 0 and the bound, {bound}, got {low:.4g} to {high:.4g}; raise it")
    risk, spread = float(losses.mean()), float(losses.std())
    half = _half_width(spread, tasks, 1 - confidence, bound)
    lower, upper = risk - half, risk + half
    verdict = True if upper <= epsilon else False if lower > epsilon else None
    return ContextLearning(risk, lower, upper, epsilon, verdict)


def _predictions(model: Callable[..., Tensor], prompts: Prompts) -> Tensor:
    """Return predictions at the last queries, ``(tasks,)`` or that and the outputs; their targets are hidden."""
    targets = torch.cat([prompts.targets[:, :-1], torch.zeros_like(prompts.targets[:, -1:])], 1)
    prompts = replace(prompts, targets=targets, answers=torch.zeros_like(targets), parameters={})
    if isinstance(model, Predictor):
        found: Tensor = model(prompts, [prompts.examples - 1])[:, 0]
        return found
    with torch.no_grad():
        found = model.predict(prompts) if isinstance(model, ContextModel) else model(prompts)
    if found.shape != prompts.targets.shape:
        raise UserError(
            f"model must give predictions of the shape of the targets, {tuple(prompts.targets.shape)}, got"
            f" {tuple(found.shape)}; predict one answer after each number of examples"
        )
    return found[:, -1]


def _half_width(spread: float, tasks: int, failure: float, bound: float | None) -> float:
    """Return half of the length of the confidence interval."""
    if bound is not None:
        nats = math.log(4 / failure)
        return spread * math.sqrt(2 * nats / tasks) + 7 * bound * nats / (3 * (tasks - 1))
    return NormalDist().inv_cdf(1 - failure / 2) * spread / math.sqrt(tasks)
