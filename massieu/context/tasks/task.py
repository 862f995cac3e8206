"""Base class of all families of functions, with the drawing of prompts."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from massieu.checks import UserError, check_count, check_number
from massieu.context.prompts import Prompts

__all__ = ["Task", "root_of_covariance"]

Parameters = Mapping[str, Tensor]


class Task(ABC):
    r"""A distribution of functions f, inputs and noise: :math:`y_i = f(x_i) + \sigma \varepsilon_i`.

    Args:
        dim: of the inputs.
        noise: :math:`\sigma`, the standard deviation; its square may not exceed the signal :math:`E f(x)^2`.
    """

    def __init__(self, dim: int, noise: float = 0.0):
        self.dim, self.noise = check_count(dim, "dim"), check_number(noise, "noise", least=0)

    @property
    @abstractmethod
    def signal(self) -> float:
        r""":math:`E f(x)^2` over functions and inputs, for each output."""

    @abstractmethod
    def draw_parameters(self, count: int, generator: torch.Generator, dtype: torch.dtype) -> Parameters:
        """Draw the parameters of ``count`` functions, each tensor with the tasks as first axis."""

    @abstractmethod
    def values(self, inputs: Tensor, parameters: Parameters) -> Tensor:
        """Return f at the inputs ``(tasks, points, dim)``, shape ``(tasks, points)`` or that and the outputs."""

    def draw_inputs(self, count: int, examples: int, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        """Draw inputs ``(tasks, examples, dim)``, standard normal by default."""
        return normal((count, examples, self.dim), generator, dtype)

    def draw_examples(
        self, count: int, examples: int, generator: torch.Generator, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Draw inputs and queries; the same tensor twice where the query is the next example."""
        inputs = self.draw_inputs(count, examples, generator, dtype)
        return inputs, inputs

    def observe(self, clean: Tensor, generator: torch.Generator) -> Tensor:
        """Return targets: the clean values with noise."""
        return clean + self.noise * normal(clean.shape, generator, clean.dtype) if self.noise else clean

    def draw(self, count: int, examples: int, generator: torch.Generator, dtype: torch.dtype | None = None) -> Prompts:
        """Draw prompts, each of a function of its own.

        Args:
            count: number of tasks.
            examples: number of examples in each, the query that is the last of them included.
            generator: of everything random; on its device.
            dtype: of all tensors; torch's default if None.
        """
        count, examples = check_count(count, "count"), check_count(examples, "examples")
        if not isinstance(generator, torch.Generator):
            got = type(generator).__name__
            raise UserError(f"generator must be a torch.Generator, got {got}; torch.Generator().manual_seed(0) is one")
        dtype = torch.get_default_dtype() if dtype is None else dtype
        inputs, queries = self.draw_examples(count, examples, generator, dtype)
        return self.prompts(inputs, queries, self.draw_parameters(count, generator, dtype), generator)

    def prompts(self, inputs: Tensor, queries: Tensor, parameters: Parameters, generator: torch.Generator) -> Prompts:
        """Return prompts of given functions at given inputs; with the inputs as queries these are the next examples."""
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
    """Return a root R with R R^T the covariance, None for the identity, and the covariance, in double precision.

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
    """Draw standard normal numbers on the generator's device."""
    return torch.randn(shape, generator=generator, device=generator.device, dtype=dtype)


def uniform(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Draw numbers uniform between 0 and 1 on the generator's device."""
    return torch.rand(shape, generator=generator, device=generator.device, dtype=dtype)
