"""Weighted points, the measure of attention: keys are atoms and the query is the natural parameter."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from massieu.checks import UserError
from massieu.measures.measure import Measure, as_log_weight, as_parameter, common_batch, row_space
from massieu.measures.remainders import cumulant_remainder
from massieu.statistics import attend, probabilities, row_statistics

__all__ = ["Points"]

# Largest number of entries of centered supports at a time.
FISHER_NUMBERS = 1 << 24


class Points(Measure):
    r"""A sum of weighted atoms, :math:`h = \sum_j w_j \delta_{x_j}`: its mean map is attention.

    .. math:: G(\eta) = \log \sum_j w_j e^{x_j \cdot \eta}, \qquad
              m(\eta) = \sum_j p_j x_j, \quad p_j = w_j e^{x_j \cdot \eta - G(\eta)}

    Args:
        support: atoms :math:`x_j` (keys), shape ``(..., atoms, dim)``.
        log_weight: :math:`\log w_j`, broadcasting to ``(..., queries, atoms)``; minus infinity means absent.

    Source:
        "A Probabilistic Interpretation of Transformers", Proposition 1a. The mean map is one-to-one only if the atoms
        affinely span the space, which never holds with no more atoms than dimensions.

    Example:
        >>> # attend(query, keys, keys, scale=1.0) has the same output
        >>> keys = torch.tensor([[0.0], [1.0]])
        >>> Points(keys).mean(torch.tensor([[0.0]]))
        tensor([[0.5000]])
    """

    reference = "counting"

    def __init__(self, support: Tensor, log_weight: Tensor | None = None) -> None:
        support = as_parameter(support, "support")
        if support.dim() < 2 or support.shape[-2] == 0:
            raise UserError(
                f"support must have shape (..., atoms, dim) with at least one atom, got {tuple(support.shape)};"
                " for a single atom pass support[None]"
            )
        self.support = support
        self.log_weight = None if log_weight is None else as_log_weight(log_weight, support.shape[-2])
        self.dim = support.shape[-1]
        self.batch_shape = tuple(support.shape[:-2])
        if self.log_weight is not None:
            self.batch_shape = common_batch(self.batch_shape, tuple(self.log_weight.shape[:-2]))

    def log_normalizer(self, natural: Tensor) -> Tensor:
        natural, support, log_weight = self._operands(natural)
        return row_statistics(natural, support, log_weight).log_normalizer

    def mean(self, natural: Tensor) -> Tensor:
        natural, support, log_weight = self._operands(natural)
        return attend(natural, support, support, log_weight, scale=1.0, statistics=None).output

    def fisher(self, natural: Tensor) -> Tensor:
        natural, support, _ = self._operands(natural)
        if not self.batch_shape and (self.log_weight is None or self.log_weight.dim() == 1) and natural.dim() > 2:
            return self.fisher(natural.flatten(0, -2)).reshape(*natural.shape, self.dim)
        mean, weight = self.mean(natural), self.probabilities(natural)
        batch = math.prod(natural.shape[:-2])
        rows = max(1, FISHER_NUMBERS // (batch * support.shape[-2] * self.dim))
        blocks = []
        for m, p in zip(mean.split(rows, -2), weight.split(rows, -2), strict=True):
            # Centered on the mean of each query: a sharp row has a variance far below its second moment.
            centered = support[..., None, :, :] - m[..., :, None, :]
            blocks.append((p[..., None] * centered).mT @ centered)
        return torch.cat(blocks, -3)

    def remainder(self, natural: Tensor, step: Tensor) -> Tensor:
        r""":math:`\log E_p[e^u]` with :math:`u_j = (x_j - m) \cdot \delta`, without cancellation; by blocks of rows."""
        natural, support, log_weight = self._operands(natural)
        natural, step = torch.broadcast_tensors(natural, step)
        support = support - support.mean(-2, keepdim=True)  # changes no distribution and keeps the digits of far points
        rows = max(1, FISHER_NUMBERS // max(1, math.prod(natural.shape[:-2]) * support.shape[-2]))
        blocks = []
        for start in range(0, natural.shape[-2], rows):
            block = slice(start, start + rows)
            scores = natural[..., block, :] @ support.mT
            if log_weight is not None:
                own = log_weight if log_weight.dim() < 2 or log_weight.shape[-2] == 1 else log_weight[..., block, :]
                scores = scores + own
            blocks.append(cumulant_remainder(torch.log_softmax(scores, -1), step[..., block, :] @ support.mT))
        return torch.cat(blocks, -1) if blocks else step.new_zeros(step.shape[:-1])

    def entropy(self, natural: Tensor) -> Tensor:
        natural, support, log_weight = self._operands(natural)
        return row_statistics(natural, support, log_weight).entropy

    def expected_log_density(self, natural: Tensor) -> Tensor:
        weight = self.probabilities(natural)
        if self.log_weight is None:
            return torch.zeros_like(weight[..., 0])
        return (weight * self.log_weight.to(weight).masked_fill(self.log_weight == -torch.inf, 0.0)).sum(-1)

    def probabilities(self, natural: Tensor) -> Tensor:
        r"""Weights :math:`p_j`, shape ``(..., queries, atoms)``, for small problems."""
        natural, support, log_weight = self._operands(natural)
        return probabilities(natural @ support.mT, log_weight)

    def _draw(self, natural: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
        weight = self.probabilities(natural)
        if count == 0:
            return natural.new_empty(0, *natural.shape)
        drawn = torch.multinomial(weight.flatten(0, -2), count, replacement=True, generator=generator)
        drawn = drawn.reshape(*weight.shape[:-2], -1, 1)
        support = self.support.to(natural).expand(*weight.shape[:-2], *self.support.shape[-2:])
        atoms = torch.take_along_dim(support, drawn, dim=-2)
        return atoms.reshape(*weight.shape[:-1], count, self.dim).movedim(-2, 0)

    def support_function(self, direction: Tensor) -> Tensor:
        reach = direction @ self.support.to(direction).mT
        if self.log_weight is not None:
            reach = reach.masked_fill(self.log_weight == -torch.inf, -torch.inf)
        return reach.amax(-1)

    def affine_span(self, at: Tensor | None = None) -> Tensor:
        support = self.support.double()[..., None, :, :]
        if self.log_weight is None:
            present = torch.ones_like(support[..., :1])
        else:
            present = (self.log_weight > -torch.inf).double().unsqueeze(-1)
            present = present.expand(*present.shape[:-2], support.shape[-2], 1)
        center = (present * support).sum(-2, keepdim=True) / present.sum(-2, keepdim=True)
        # Coordinates of very different scale are no less independent, and each rounds in proportion to its own size.
        size = support.abs().amax(-2, keepdim=True)
        size = torch.where(size > 0, size, 1.0)
        _, spread, axes = torch.linalg.svd(present * (support - center) / size, full_matrices=False)
        floor = max(support.shape[-2:]) * torch.finfo(support.dtype).eps
        kept = spread > floor * spread[..., :1].clamp(min=1.0)
        return row_space(kept[..., None] * axes * size, kept.sum(-1, keepdim=True))

    def _operands(self, natural: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        natural = self.expect(natural)
        log_weight = None if self.log_weight is None else self.log_weight.to(natural)
        return natural, self.support.to(natural), log_weight

    def __repr__(self) -> str:
        return f"Points(atoms={self.support.shape[-2]}, dim={self.dim})"
