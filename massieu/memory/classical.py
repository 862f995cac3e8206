"""Memory of Hopfield: a quadratic energy on polar states."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from massieu.checks import check_choice, check_floating, check_shape
from massieu.memory.polar import ROUNDING, Polar

__all__ = ["Classical"]


class Classical(Polar):
    r"""Hopfield's memory with Hebb's rule.

    .. math:: E(\xi) = -\tfrac12\, \xi^T W \xi + b \cdot \xi, \qquad W = \sum_i x_i x_i^T, \qquad
              \xi_l \mapsto \mathrm{sgn}\,((W \xi)_l - b_l)

    Asynchronously the energy never rises and the state comes to rest. Synchronously it ends at rest or in a cycle of
    two states, which is reported; with the diagonal W is positive semidefinite and the synchronous energy does not
    rise either.

    Args:
        patterns: :math:`x_i`, entries 1 and -1, shape ``(atoms, dim)``.
        rule: "async" (one coordinate after the other, in random order) or "sync" (all at once).
        bias: b, shape ``(dim,)``.
        diagonal: keep the diagonal of W. With it nearly every state is a fixed point once there are many more
            patterns than dimensions, and capacities mean nothing.
        generator: of the order of the sweeps, or a seed.

    Source:
        Hopfield 1982. A tie keeps the coordinate.

    Example:
        >>> memory = Classical(torch.tensor([[1.0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, -1, -1, -1]]))
        >>> found = memory.retrieve(torch.tensor([[1.0, 1, 1, -1, -1, -1, -1]]))
        >>> found.state.tolist(), found.kind.tolist()
        ([[1.0, 1.0, 1.0, 1.0, -1.0, -1.0, -1.0]], ['minimum'])
        >>> Classical(torch.tensor([[1.0, -1.0]]), "sync").retrieve(torch.tensor([[1.0, 1.0]])).kind.tolist()
        ['cycle']
    """

    def __init__(
        self,
        patterns: Tensor,
        rule: Literal["async", "sync"] = "async",
        *,
        bias: Tensor | None = None,
        diagonal: bool = False,
        generator: torch.Generator | int = 0,
    ) -> None:
        super().__init__(patterns, generator)
        check_choice(rule, "rule", ("async", "sync"))
        self.rule, self.diagonal = rule, bool(diagonal)
        if bias is None:
            bias = torch.zeros(self.dim, dtype=torch.float64)
        check_floating(bias, "bias", finite=True)
        check_shape(bias, "bias", self.dim)
        self.bias = bias.detach().double()

    @property
    def _asynchronous(self) -> bool:
        return self.rule == "async"

    def _energy(self, rows: Tensor, **conditions: Tensor) -> Tensor:
        # On polar states the diagonal is a constant: every coordinate squares to one.
        constant = 0.0 if self.diagonal else 0.5 * self.patterns.numel()
        return constant - 0.5 * (rows @ self.patterns.T).square().sum(-1) + rows @ self.bias

    def _field(self, rows: Tensor, overlap: Tensor) -> tuple[Tensor, Tensor]:
        own = 0 if self.diagonal else len(self.patterns)
        return overlap @ self.patterns - own * rows - self.bias, self._zero(overlap)

    def _flip_cost(self, rows: Tensor, overlap: Tensor) -> tuple[Tensor, Tensor]:
        field = overlap @ self.patterns - len(self.patterns) * rows - self.bias
        return 2 * rows * field, 2 * self._zero(overlap)

    def _unstable(self, rows: Tensor, overlap: Tensor) -> Tensor:
        field, zero = self._field(rows, overlap)
        return (field.abs() > zero) & (field.sign() != rows)

    def _zero(self, overlap: Tensor) -> Tensor:
        return ROUNDING * (overlap.abs().sum(-1, keepdim=True) + self.bias.abs().max())
