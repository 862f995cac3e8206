"""Out-of-distribution prompts: functions and noise of a task, with inputs of another distribution."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from massieu.checks import UserError, check_number
from massieu.context.tasks.task import Parameters, Task, normal

__all__ = ["OrthogonalQueries", "Quadrants", "Scaled", "Skewed"]


class Shifted(Task):
    """A task with shifted inputs; ``signal`` is that of the task on its own inputs."""

    def __init__(self, task: Task):
        if not isinstance(task, Task):
            raise UserError(f'task must be a task, got {type(task).__name__}; task_named("linear", dim=5) is one')
        super().__init__(task.dim, task.noise)
        self.task = task

    @property
    def signal(self) -> float:
        return self.task.signal

    def draw_parameters(self, count: int, generator: torch.Generator, dtype: torch.dtype) -> Parameters:
        return self.task.draw_parameters(count, generator, dtype)

    def values(self, inputs: Tensor, parameters: Parameters) -> Tensor:
        return self.task.values(inputs, parameters)

    def observe(self, clean: Tensor, generator: torch.Generator) -> Tensor:
        return self.task.observe(clean, generator)

    def draw_examples(
        self, count: int, examples: int, generator: torch.Generator, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        inputs, queries = self.task.draw_examples(count, examples, generator, dtype)
        if queries is not inputs:
            raise UserError(
                f"the task of {type(self).__name__} must have the next examples as queries, got"
                f" {type(self.task).__name__}; put the shift of the queries outermost"
            )
        return self._move(inputs, generator)

    @abstractmethod
    def _move(self, inputs: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return inputs and queries for the inputs of the task."""


class Scaled(Shifted):
    """Inputs times a factor.

    Example:
        >>> from massieu.context import task_named
        >>> task = task_named("linear", dim=3)
        >>> plain, moved = (t.draw(1, 4, torch.Generator().manual_seed(0)) for t in (task, Scaled(task, 2.0)))
        >>> torch.equal(moved.inputs, 2 * plain.inputs), torch.equal(moved.answers, 2 * plain.answers)
        (True, True)
    """

    def __init__(self, task: Task, factor: float):
        super().__init__(task)
        self.factor = check_number(factor, "factor", above=0)

    def _move(self, inputs: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        moved = self.factor * inputs
        return moved, moved


class Skewed(Shifted):
    r"""Inputs stretched along random orthogonal axes, drawn for each task: covariance :math:`U \Lambda U^\top`.

    Args:
        task: with isotropic inputs, for the covariance to be this one.
        spectrum: the variances :math:`\Lambda` up to a factor, which is set for their mean to be 1, so that the length
            of an input keeps its mean square; :math:`1/k^2` by default.

    Source:
        Garg et al. 2022, section 4.

    Example:
        >>> from massieu.context import task_named
        >>> prompts = Skewed(task_named("linear", dim=3)).draw(1, 20000, torch.Generator().manual_seed(0))
        >>> torch.linalg.eigvalsh(prompts.inputs[0].T.cov()).round(decimals=1)  # proportional to 1/9, 1/4 and 1
        tensor([0.2000, 0.6000, 2.2000])
    """

    def __init__(self, task: Task, spectrum: Sequence[float] | Tensor | None = None):
        super().__init__(task)
        if spectrum is None:
            spectrum = torch.arange(1, self.dim + 1, dtype=torch.float64) ** -2.0
        values = torch.as_tensor(spectrum, dtype=torch.float64)
        if values.shape != (self.dim,) or not bool((values >= 0).all()) or not 0 < float(values.sum()) < math.inf:
            raise UserError(
                f"spectrum must be {self.dim} non-negative variances, not all zero, got {values.tolist()};"
                " give one for each dimension"
            )
        self.spectrum = values / values.mean()

    def _move(self, inputs: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        gaussian = normal((inputs.shape[0], self.dim, self.dim), generator, inputs.dtype)
        axes, triangle = torch.linalg.qr(gaussian)
        axes = axes * triangle.diagonal(dim1=-2, dim2=-1).sign()[:, None]  # else not uniform among rotations
        moved = inputs * self.spectrum.sqrt().to(inputs) @ axes.mT
        return moved, moved


class OrthogonalQueries(Shifted):
    """Queries orthogonal to all examples before them, with the length of the next input.

    The examples of a linear function are of no use there: the best prediction is 0.

    Example:
        >>> from massieu.context import task_named
        >>> prompts = OrthogonalQueries(task_named("linear", dim=5)).draw(1, 5, torch.Generator().manual_seed(0))
        >>> bool((prompts.queries[0] @ prompts.inputs[0].T).tril(-1).abs().max() < 1e-5)
        True
    """

    def _move(self, inputs: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        examples = inputs.shape[1]
        if examples > self.dim:
            raise UserError(
                f"examples must be at most dim, {self.dim}, for orthogonal queries, got {examples}; draw fewer"
            )
        axes, triangle = torch.linalg.qr(inputs.mT)
        signs = triangle.diagonal(dim1=-2, dim2=-1).sign()
        return inputs, axes.mT * (signs * inputs.norm(dim=-1))[..., None]


class Quadrants(Shifted):
    """Examples in one orthant, drawn for each task, and queries elsewhere.

    Args:
        task: with inputs whose signs are independent of their sizes, for the orthant to be the only change.
        opposite: queries in the opposite orthant; otherwise anywhere.

    Source:
        Garg et al. 2022, section 4.

    Example:
        >>> from massieu.context import task_named
        >>> prompts = Quadrants(task_named("linear", dim=5)).draw(1, 8, torch.Generator().manual_seed(0))
        >>> first = prompts.inputs[:, :1]
        >>> bool((first * prompts.inputs > 0).all()), bool((first * prompts.queries < 0).all())
        (True, True)
    """

    def __init__(self, task: Task, *, opposite: bool = True):
        super().__init__(task)
        self.opposite = opposite

    def _move(self, inputs: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        shape = (inputs.shape[0], 1, self.dim)
        signs = 2 * torch.randint(2, shape, generator=generator, device=generator.device).to(inputs) - 1
        moved = inputs.abs() * signs
        return moved, -moved if self.opposite else inputs
