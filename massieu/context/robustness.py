"""Errors of a model and of predictors on prompts with other inputs than in training."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from massieu.checks import optional_package
from massieu.context.baselines import predictors_for
from massieu.context.curves import error_curve
from massieu.context.models import ContextModel
from massieu.context.predictors import LeastSquares
from massieu.context.prompts import Prompts
from massieu.context.tasks import Task, shifted

if TYPE_CHECKING:
    import pandas

__all__ = ["errors_under_shifts"]

TASKS = 2048
NUMBERS = 2**23  # in the inputs of these at most
FACTORS = {"scale 3": 3.0, "scale 1/3": 1 / 3}


def errors_under_shifts(model: ContextModel, task: Task, examples: int, generator: torch.Generator) -> pandas.DataFrame:
    """Return errors on prompts out of distribution, of a model and of predictors without training.

    The shifts are those of :func:`massieu.context.shifted`: inputs of three times and a third of their size, skewed
    ones, queries orthogonal to the examples, and queries in the orthant opposite to that of the examples; and none.

    Args:
        model: after training.
        task: of its training.
        examples: before the query; for orthogonal queries at most one less than the dimension.
        generator: draws the prompts.

    Returns:
        A row for each shift and each of the model, the first of :func:`massieu.context.predictors_for`, least squares
        and "zero", with columns ``shift``, ``predictor``, ``examples``, ``error``, ``standard_error`` and ``tasks``.

    Source:
        Garg et al. 2022, section 4.

    Example:
        >>> from massieu.context import LinearModel, task_named
        >>> draws = torch.Generator().manual_seed(0)
        >>> found = errors_under_shifts(LinearModel(2, generator=draws), task_named("linear", dim=2), 4, draws)
        >>> list(found["shift"].unique())
        ['none', 'scale 3', 'scale 1/3', 'skew', 'orthogonal', 'quadrants']
    """
    cases: dict[str, tuple[Task, int]] = {"none": (task, examples)}
    cases |= {name: (shifted(task, "scale", factor=factor), examples) for name, factor in FACTORS.items()}
    cases["skew"] = shifted(task, "skew"), examples
    if task.dim > 1:
        cases["orthogonal"] = shifted(task, "orthogonal"), min(examples, task.dim - 1)
    cases["quadrants"] = shifted(task, "quadrants"), examples
    known = predictors_for(task)
    first = next(iter(known))
    others = {first: known[first], **{name: each for name, each in known.items() if isinstance(each, LeastSquares)}}
    tables = []
    for name, (moved, length) in cases.items():
        tasks = min(TASKS, max(1, NUMBERS // ((length + 1) * task.dim)))
        prompts = moved.draw(tasks, length + 1, generator).truncated(length)
        with torch.no_grad():
            table = error_curve(prompts, {"model": model.predict, **others, "zero": _zero}, [length])
        tables.append(table.assign(shift=name, tasks=tasks))
    columns = ["shift", "predictor", "examples", "error", "standard_error", "tasks"]
    return optional_package("pandas", "errors_under_shifts", "verify").concat(tables, ignore_index=True)[columns]


def _zero(prompts: Prompts) -> Tensor:
    return torch.zeros_like(prompts.targets)
