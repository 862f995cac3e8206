"""The memory of softmax attention: a log-sum-exp energy on real states."""

from __future__ import annotations

import torch
from torch import Tensor

from massieu.measures import Points
from massieu.memory.memory import row_chunks
from massieu.memory.soft import Soft
from massieu.statistics import attend, row_statistics

__all__ = ["Continuous", "largest_eigenvalue"]


class Continuous(Soft):
    r"""Continuous Hopfield memory, whose update is softmax attention over the patterns.

    .. math:: E(\xi) = -\beta^{-1} \log \sum_j w_j e^{\beta x_j \cdot \xi} + \tfrac12 |\xi|^2
              + \beta^{-1} \log \sum_j w_j + \tfrac12 M^2, \qquad
              f(\xi) = \xi - \nabla E(\xi) = \sum_j p_j x_j

    with M the longest pattern; w is one unless log weights are given, and N ones give the usual :math:`\log N`. Then
    :math:`\tfrac12 (|\xi| - M)^2 \le E \le \tfrac12 (|\xi| + M)^2`, and every update descends:
    :math:`E(\xi) - E(f(\xi)) \ge \tfrac12 |f(\xi) - \xi|^2`. The end is a stationary point, perhaps a saddle. A pattern
    itself is not a fixed point at finite beta; one may be close by, see :func:`~massieu.memory.certificate`.

    Nothing of size queries x atoms is held, and everything can be differentiated in state, patterns, beta and log
    weights.

    Args:
        patterns: :math:`x_j`, shape ``(atoms, dim)``.
        beta: inverse temperature, a positive number or a tensor that broadcasts to ``(..., queries)``: one per head has
            shape ``(heads, 1)``. It may be a parameter.
        values: what is read out in place of the patterns, shape ``(atoms, value_dim)``: hetero-association.
        log_weight: :math:`\log w`, broadcasting to ``(..., queries, atoms)``; minus infinity, or False in a boolean
            mask, takes a pattern away.

    Source:
        Ramsauer et al. 2020, eq. 2 and 3.

    Example:
        >>> memory = Continuous(2 * torch.eye(3), beta=4.0)
        >>> found = memory.retrieve(torch.tensor([[1.0, 0.2, 0.0], [1.0, 1.0, 0.0]]))
        >>> found.state.round(decimals=3)
        tensor([[2., 0., 0.],
                [1., 1., 0.]])
        >>> found.index.tolist(), found.kind.tolist()
        ([0, 0], ['minimum', 'saddle'])
    """

    def __init__(
        self,
        patterns: Tensor,
        beta: float | Tensor,
        *,
        values: Tensor | None = None,
        log_weight: Tensor | None = None,
    ) -> None:
        super().__init__(patterns, beta, values, log_weight)

    def hessian(self, state: Tensor) -> Tensor:
        r""":math:`\nabla^2 E = I - \beta\, \mathrm{Cov}_p(x)`, shape ``(..., queries, dim, dim)``."""
        rows, shape, conditions = self._arrange(state)
        jacobian = self._jacobian(rows, **conditions)
        return (torch.eye(self.dim).to(rows) - jacobian).reshape(*shape, self.dim, self.dim)

    def _energy(self, rows: Tensor, **conditions: Tensor) -> Tensor:
        # A stored pattern has an energy far below its square: the difference is taken in double.
        wide, patterns = rows.double(), self.patterns.double()
        beta, weights = self._temperature(wide, conditions), self._weights(wide, conditions)
        log_normalizer = row_statistics(wide * beta, patterns, weights).log_normalizer
        total = wide.new_tensor(len(patterns)).log() if weights is None else weights.logsumexp(-1)
        potential = (log_normalizer - total) / beta.expand(len(rows), 1)[:, 0]
        energy = 0.5 * (wide.square().sum(-1) + self._size(**conditions).double().square()) - potential
        return energy.to(rows.dtype)

    def _read(self, rows: Tensor, values: Tensor, **conditions: Tensor) -> Tensor:
        query, weights = rows * self._temperature(rows, conditions), self._weights(rows, conditions)
        patterns = self.patterns.to(rows)
        return attend(query, patterns, values.to(rows), weights, scale=1.0, statistics=None).output

    def _peak(self, rows: Tensor, **conditions: Tensor) -> Tensor:
        query, weights = rows * self._temperature(rows, conditions), self._weights(rows, conditions)
        return row_statistics(query, self.patterns.to(rows), weights).peak

    def _index(self, rows: Tensor, **conditions: Tensor) -> Tensor:
        query, weights = rows * self._temperature(rows, conditions), self._weights(rows, conditions)
        patterns, found = self.patterns.to(rows), []
        for chunk in row_chunks(len(rows), len(patterns)):
            scores = query[chunk] @ patterns.T
            if weights is not None:
                scores = scores + (weights if weights.dim() == 1 else weights[chunk])
            found.append(scores.argmax(-1))
        return torch.cat([torch.empty(0, dtype=torch.long, device=rows.device), *found])

    def _jacobian(self, rows: Tensor, **conditions: Tensor) -> Tensor:
        beta, weights = self._temperature(rows, conditions), self._weights(rows, conditions)
        fisher = Points(self.patterns.to(rows), weights).fisher(rows * beta)
        return beta.expand(len(rows), 1)[..., None] * fisher

    def _growth(self, rows: Tensor, held: Tensor | None, **conditions: Tensor) -> Tensor:
        rows, beta = rows.double(), self._temperature(rows, conditions).double()
        centre = self.patterns.double().mean(0)
        squares = (self.patterns.double() - centre).square().sum(-1, keepdim=True)
        mean = self._read(rows, self.patterns, **conditions) - centre
        spread = self._read(rows, squares, **conditions)[:, 0] - mean.square().sum(-1)
        # The trace is an upper bound, and most states at rest are so sharp that it tells enough.
        growth = spread * beta.expand(len(rows), 1)[:, 0]
        for row in (growth > 0.99).nonzero()[:, 0].tolist():
            own = {name: tensor[row : row + 1] for name, tensor in conditions.items()}
            jacobian = self._jacobian(rows[row : row + 1], **own)
            growth[row] = largest_eigenvalue(jacobian, None if held is None else held[row : row + 1])[0]
        return growth


def largest_eigenvalue(jacobian: Tensor, held: Tensor | None) -> Tensor:
    """Of symmetric matrices ``(rows, dim, dim)``, without the coordinates that are held."""
    if held is not None:
        free = (~held).to(jacobian)
        jacobian = jacobian * free[:, :, None] * free[:, None, :]
    largest: Tensor = torch.linalg.eigvalsh(jacobian)[..., -1]
    return largest
