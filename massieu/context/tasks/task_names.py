"""Tasks and shifts by name."""

from __future__ import annotations

import inspect
from typing import Any

from massieu.checks import UserError, check_choice
from massieu.context.tasks.linear import Linear, Logistic, NoisyLinear, Quadratic, SparseLinear
from massieu.context.tasks.nonlinear import DecisionTree, Sine, TwoLayer
from massieu.context.tasks.shifts import OrthogonalQueries, Quadrants, Scaled, Shifted, Skewed
from massieu.context.tasks.task import Task

__all__ = ["SHIFTS", "TASKS", "shifted", "task_named"]

TASKS: dict[str, type[Task]] = {
    "linear": Linear,
    "sparse": SparseLinear,
    "ridge": NoisyLinear,
    "quadratic": Quadratic,
    "logistic": Logistic,
    "tree": DecisionTree,
    "network": TwoLayer,
    "sine": Sine,
}
"""Families of functions by their names in :func:`task_named`."""

SHIFTS: dict[str, type[Shifted]] = {
    "scale": Scaled,
    "skew": Skewed,
    "orthogonal": OrthogonalQueries,
    "quadrants": Quadrants,
}
"""Shifts of the inputs by their names in :func:`shifted`."""


def task_named(name: str, **options: Any) -> Task:
    """Return a task: one of "linear", "sparse", "ridge", "quadratic", "logistic", "tree", "network", "sine".

    Args:
        name: of the family.
        options: of its class, such as ``dim`` and ``noise``.

    Example:
        >>> task = task_named("linear", dim=5, noise=0.5)
        >>> type(task).__name__, task.signal
        ('Linear', 5.0)
    """
    check_choice(name, "task", TASKS)
    _check_options(TASKS[name], f"task {name}", options)
    return TASKS[name](**options)


def shifted(task: Task, name: str, **options: Any) -> Task:
    """Return the task with inputs moved by a shift: "scale", "skew", "orthogonal" or "quadrants".

    Example:
        >>> shifted(task_named("linear", dim=5), "scale", factor=3.0).factor
        3.0
    """
    check_choice(name, "shift", SHIFTS)
    _check_options(SHIFTS[name], f"shift {name}", {"task": task, **options})
    return SHIFTS[name](task, **options)


def _check_options(kind: type[Task], what: str, options: dict[str, Any]) -> None:
    """Raise unless these are options of the class and none is missing."""
    known = inspect.signature(kind).parameters
    unknown = [name for name in options if name not in known]
    missing = [
        name for name, parameter in known.items() if parameter.default is parameter.empty and name not in options
    ]
    if unknown or missing:
        got = f"got {', '.join(unknown)}" if unknown else f"{', '.join(missing)} is missing"
        raise UserError(f"{what} takes {', '.join(n for n in known if n != 'task')}, {got}; pass only these by name")
