"""Families of functions from which prompts are drawn, and shifts of their inputs."""

from massieu.context.tasks.linear import Linear, Logistic, NoisyLinear, Quadratic, SparseLinear
from massieu.context.tasks.nonlinear import DecisionTree, Sine, TwoLayer
from massieu.context.tasks.shifts import OrthogonalQueries, Quadrants, Scaled, Skewed
from massieu.context.tasks.task import Task
from massieu.context.tasks.task_names import SHIFTS, TASKS, shifted, task_named

__all__ = [
    "DecisionTree",
    "Linear",
    "Logistic",
    "NoisyLinear",
    "OrthogonalQueries",
    "Quadrants",
    "Quadratic",
    "SHIFTS",
    "Scaled",
    "Sine",
    "Skewed",
    "SparseLinear",
    "TASKS",
    "Task",
    "TwoLayer",
    "shifted",
    "task_named",
]
