"""What all families of functions share: how prompts are drawn, and what is refused."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from massieu.checks import UserError
from massieu.context.prompts import Prompts
from massieu.measures.measure import as_integer

__all__ = ["Task", "root_of_covariance"]

Parameters = Mapping[str, Tensor]


class Task(ABC):
    r"""A distribution of functions f, inputs and noise: :math:`y_i = f(x_i) + \sigma \varepsilon_i`.

    Args:
        dim: of the inputs.
        noise: :math:`\sigma`, the standard deviation; its square may not exceed the signal :math:`E f(x)^2`.
    """

    def __init__(self, dim: int, noise: float = 0.0):
        self.dim = _dimension(dim)
        self.noise = _number(noise, "noise")

    @property
    @abstractmethod
    def signal(self) -> float:
        r""":math:`E f(x)^2` over functions and inputs, for each output."""

    @abstractmethod
    def draw_parameters(self, count: int, generator: torch.Generator, dtype: torch.dtype) -> Parameters:
        """The parameters of so many functions, each tensor with the tasks as first axis."""

    @abstractmethod
    def values(self, inputs: Tensor, parameters: Parameters) -> Tensor:
        """f at the inputs ``(tasks, points, dim)``, shape ``(tasks, points)`` or that and the outputs."""

    def draw_inputs(self, count: int, examples: int, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        """Inputs of shape ``(tasks, examples, dim)``: standard normal unless the task says otherwise."""
        return normal((count, examples, self.dim), generator, dtype)

    def draw_examples(
        self, count: int, examples: int, generator: torch.Generator, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Inputs and queries; the same tensor twice where the next example is asked."""
        inputs = self.draw_inputs(count, examples, generator, dtype)
        return inputs, inputs

    def observe(self, clean: Tensor, generator: torch.Generator) -> Tensor:
        """The targets that are seen in place of the clean values."""
        return clean + self.noise * normal(clean.shape, generator, clean.dtype) if self.noise else clean

    def draw(self, count: int, examples: int, generator: torch.Generator, dtype: torch.dtype | None = None) -> Prompts:
        """Draw prompts, each of a function of its own.

        Args:
            count: number of tasks.
            examples: number of examples in each, the query that is the last of them included.
            generator: of everything random; on its device.
            dtype: of all tensors; torch's default if None.
        """
        count, examples = as_integer(count, "count", least=1), as_integer(examples, "examples", least=1)
        if not isinstance(generator, torch.Generator):
            got = type(generator).__name__
            raise UserError(f"generator must be a torch.Generator, got {got}; torch.Generator().manual_seed(0) is one")
        dtype = torch.get_default_dtype() if dtype is None else dtype
        inputs, queries = self.draw_examples(count, examples, generator, dtype)
        return self.ask(inputs, queries, self.draw_parameters(count, generator, dtype), generator)

    def ask(self, inputs: Tensor, queries: Tensor, parameters: Parameters, generator: torch.Generator) -> Prompts:
        """Prompts of given functions at given inputs; pass the inputs as queries to ask for the next example."""
        clean = self.values(inputs, parameters)
        answers = clean if queries is inputs else self.values(queries, parameters)
        return Prompts(inputs, self.observe(clean, generator), queries, answers, parameters)

    def _check_noise(self) -> None:
        if self.noise > (most := math.sqrt(self.signal)):  # its square may overflow
            raise UserError(
                f"noise must have at most the variance of the signal, {self.signal:.4g}, got {self.noise}^2;"
                f" lower it to {most:.4g} or less"
            )


def root_of_covariance(matrix: Any, name: str, dim: int) -> tuple[Tensor | None, Tensor]:
    """A root R with R R^T the covariance, None for the identity, and the covariance; both in double precision.

    Args:
        matrix: None for the identity, a number for a multiple of it, variances ``(dim,)`` or a matrix ``(dim, dim)``.
        name: of the argument.
        dim: of the vectors.
    """
    eye = torch.eye(dim, dtype=torch.float64)
    if matrix is None:
        return None, eye
    given = torch.as_tensor(matrix, dtype=torch.float64).detach()
    full = given.expand(dim).diag() if given.dim() == 0 else given.diag() if given.dim() == 1 else given
    if full.shape != (dim, dim):
        raise UserError(
            f"{name} must be a number, {dim} variances or a ({dim}, {dim}) matrix, got shape {tuple(given.shape)};"
            f" the dimension is {dim}"
        )
    if not bool(full.isfinite().all()) or not torch.allclose(full, full.mT, rtol=1e-6, atol=0):
        raise UserError(f"{name} must be finite and symmetric, got another matrix; it is a covariance")
    values, vectors = torch.linalg.eigh(full)
    if values[-1] <= 0 or values[0] < -1e-9 * values[-1]:
        raise UserError(
            f"{name} must be positive semidefinite and not zero, got eigenvalues from {float(values[0]):.4g} to"
            f" {float(values[-1]):.4g}; it is a covariance"
        )
    return vectors * values.clamp_min(0).sqrt(), full


def normal(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Standard normal numbers on the generator's device."""
    return torch.randn(shape, generator=generator, device=generator.device, dtype=dtype)


def uniform(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Numbers uniform between 0 and 1 on the generator's device."""
    return torch.rand(shape, generator=generator, device=generator.device, dtype=dtype)


def _dimension(dim: Any) -> int:
    if isinstance(dim, bool) or not isinstance(dim, int) or dim < 1:
        raise UserError(f"dim must be an integer of at least 1, got {dim!r}; it is the dimension of the inputs")
    return dim


def _number(value: Any, name: str, *, positive: bool = False) -> float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < 0 or (positive and value == 0):
        kind = "positive" if positive else "non-negative"
        raise UserError(f"{name} must be a {kind} finite number, got {value!r}; it is a standard deviation")
    return float(value)
