"""The memory of softmax attention: a log-sum-exp energy on real states."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from massieu import kernels
from massieu.measures import Points
from massieu.memory.memory import Conditions
from massieu.memory.soft import TILE_NUMBERS, Soft, check_scores, largest_eigenvalue
from massieu.statistics import attend, row_statistics

__all__ = ["Continuous"]

WARM = 0.5
"""Below this bound of all scores energies are integrals instead of differences."""

NODES, SHARES = (torch.from_numpy(each) for each in np.polynomial.legendre.leggauss(8))
"""Nodes and half weights of Gauss-Legendre quadrature on -1 to 1."""


class Continuous(Soft):
    r"""Continuous Hopfield memory, whose update is softmax attention over the patterns.

    .. math:: E(\xi) = -\beta^{-1} \log \sum_j w_j e^{\beta x_j \cdot \xi} + \tfrac12 |\xi|^2
              + \beta^{-1} \log \sum_j w_j + \tfrac12 M^2, \qquad
              f(\xi) = \xi - \nabla E(\xi) = \sum_j p_j x_j

    with M the longest pattern; w is one unless log weights are given, and N ones give the usual :math:`\log N`. Then
    :math:`\tfrac12 (|\xi| - M)^2 \le E \le \tfrac12 (|\xi| + M)^2`, and every update descends:
    :math:`E(\xi) - E(f(\xi)) \ge \tfrac12 |f(\xi) - \xi|^2`. The end is a stationary point, perhaps a saddle. A pattern
    itself is not a fixed point at finite beta; one may be close by, see :func:`~massieu.memory.certificate`.

    No tensor of size queries x atoms is held, and all methods are differentiable in state, patterns, beta and log
    weights.

    Args:
        patterns: :math:`x_j`, shape ``(atoms, dim)``.
        beta: inverse temperature, a positive number or a tensor that broadcasts to ``(..., queries)``: one per head has
            shape ``(heads, 1)``. It may be a parameter.
        values: readout in place of the patterns, shape ``(atoms, value_dim)``: hetero-association.
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
        self, patterns: Tensor, beta: float | Tensor, *, values: Tensor | None = None, log_weight: Tensor | None = None
    ) -> None:
        super().__init__(patterns, beta, values, log_weight)

    def hessian(self, state: Tensor) -> Tensor:
        r""":math:`\nabla^2 E = I - \beta\, \mathrm{Cov}_p(x)`, shape ``(..., queries, dim, dim)``."""
        rows, shape, conditions = self._arrange(state)
        jacobian = self._jacobian(rows, **conditions)
        return (torch.eye(self.dim).to(rows) - jacobian).reshape(*shape, self.dim, self.dim)

    def _energy(self, rows: Tensor, **conditions: Tensor) -> Tensor:
        # A stored pattern has an energy far below its square: the difference is taken in double.
        wide = rows.double()
        query, size = self._query(wide, conditions), self._size(**conditions).double()
        warm = check_scores(query.detach().norm(dim=-1) * size.detach()) < WARM
        potential = wide.new_zeros(len(rows))
        for part, method in ((~warm, self._potential), (warm, self._mean_score)):
            (own,) = part.nonzero(as_tuple=True)
            if len(own):
                kept = {name: tensor[own] for name, tensor in conditions.items()}
                potential = potential.index_copy(0, own, method(wide[own], kept))
        energy = 0.5 * (wide.square().sum(-1) + size.square()) - potential
        return energy.to(rows.dtype)

    def _potential(self, rows: Tensor, conditions: Conditions) -> Tensor:
        """Return the logarithm of the mean of exponentials, over beta."""
        beta, weights = self._beta(rows, conditions), self._weights(rows, conditions)
        query, found = rows * beta, []
        for tile, patterns in self._tiles(query, weights):
            own = row_statistics(query, patterns, None if weights is None else weights[..., tile]).log_normalizer
            found.append(own)
        # A tile without visible patterns of a row has no log normalizer.
        log_normalizer = found[0] if len(found) == 1 else torch.stack(found).nan_to_num(nan=-torch.inf).logsumexp(0)
        total = rows.new_tensor(len(self.patterns)).log() if weights is None else weights.logsumexp(-1)
        return (log_normalizer - total) / beta.expand(len(rows), 1)[:, 0]

    def _mean_score(self, rows: Tensor, conditions: Conditions) -> Tensor:
        """Return the same as the mean of the scores over betas from zero up: without a difference over beta."""
        query, weights, mean = self._query(rows, conditions), self._weights(rows, conditions), torch.zeros_like(rows)
        patterns = self.patterns.double()
        for node, share in zip(NODES.tolist(), SHARES.tolist(), strict=True):
            part = 0.5 * (1 + node) * query
            mean = mean + 0.5 * share * attend(part, patterns, patterns, weights, scale=1.0, statistics=None).output
        return (rows * mean).sum(-1)

    def _query(self, rows: Tensor, conditions: Conditions) -> Tensor:
        """Return states times beta, in double where float32 does not hold their scores."""
        query = rows * self._beta(rows, conditions)
        # The kernels handle large patterns.
        if rows.numel() and not float(query.detach().abs().max()) < torch.finfo(torch.float32).max ** 0.75:
            query = check_scores(rows.double() * self._beta(rows.double(), conditions))
        return query

    def _read(self, rows: Tensor, values: Tensor, **conditions: Tensor) -> Tensor:
        query = self._query(rows, conditions)
        patterns, weights = self.patterns.to(query), self._weights(query, conditions)
        output = attend(query, patterns, values.to(query), weights, scale=1.0, statistics=None).output
        return check_scores(output).to(rows.dtype)

    def _peak(self, rows: Tensor, **conditions: Tensor) -> Tensor:
        query = self._query(rows, conditions)
        return row_statistics(query, self.patterns.to(query), self._weights(query, conditions)).peak

    def _index(self, rows: Tensor, **conditions: Tensor) -> Tensor:
        query = self._query(rows, conditions)
        if not len(rows):
            return torch.empty(0, dtype=torch.long, device=rows.device)
        patterns, weights = self.patterns.to(query), self._weights(query, conditions)
        arranged = kernels.arrange(
            query, patterns, None, weights, scale=1.0, sink=None, causal=False, window=None, lengths=None
        )
        best = kernels.retrieve(arranged.inputs, 0, 1).best
        assert best is not None
        return best[1].reshape(-1)

    def _jacobian(self, rows: Tensor, **conditions: Tensor) -> Tensor:
        beta, weights = self._beta(rows, conditions), self._weights(rows, conditions)
        fisher = Points(self.patterns.to(rows), weights).fisher(rows * beta)
        return beta.expand(len(rows), 1)[..., None] * fisher

    def _growth(self, rows: Tensor, held: Tensor | None, **conditions: Tensor) -> Tensor:
        wide = rows.double()
        beta, weights = self._beta(wide, conditions), self._weights(wide, conditions)
        query, center = wide * beta, self.patterns.mean(0).double()
        log_normalizer, moments = wide.new_full((len(rows),), -torch.inf), wide.new_zeros(len(rows), self.dim + 1)
        for tile, patterns in self._tiles(query, weights):
            centered = patterns - center
            value = torch.cat([centered, centered.square().sum(-1, keepdim=True)], -1)
            own = None if weights is None else weights[..., tile]
            output, statistics = attend(query, patterns, value, own, scale=1.0, statistics="light")
            assert statistics is not None
            # A tile without visible patterns of a row has no log normalizer, and no share.
            found = statistics.log_normalizer.nan_to_num(nan=-torch.inf)
            before, log_normalizer = log_normalizer, torch.logaddexp(log_normalizer, found)
            kept, share = ((x - log_normalizer).exp().nan_to_num(nan=0.0)[:, None] for x in (before, found))
            moments = kept * moments + share * output
        mean, spread = moments[:, :-1], moments[:, -1] - moments[:, :-1].square().sum(-1)
        # The trace is an upper bound, which decides for most states at rest, since they are sharp.
        beta = beta.expand(len(rows), 1)[:, 0]
        growth = spread * beta
        for row in (growth > 0.99).nonzero()[:, 0].tolist():
            own = weights if weights is None or weights.dim() == 1 else weights[row]
            jacobian = beta[row] * self._covariance(query[row], log_normalizer[row], center + mean[row], own)
            growth[row] = largest_eigenvalue(jacobian[None], None if held is None else held[row : row + 1])[0]
        return growth

    def _covariance(self, query: Tensor, log_normalizer: Tensor, mean: Tensor, weights: Tensor | None) -> Tensor:
        """Return the covariance of the patterns under the weights of a single row, shape ``(dim, dim)``."""
        covariance = query.new_zeros(self.dim, self.dim)
        for tile, patterns in self._tiles(query, weights):
            scores = patterns @ query - log_normalizer
            weight = (scores if weights is None else scores + weights[tile]).exp()
            centered = patterns - mean
            covariance += (weight[:, None] * centered).T @ centered
        return covariance

    def _tiles(self, query: Tensor, weights: Tensor | None) -> Iterator[tuple[slice, Tensor]]:
        """Yield the patterns in double, in tiles; all at once if they are double, or derivatives hold them anyway."""
        atoms = len(self.patterns)
        followed = any(x is not None and x.requires_grad for x in (query, self.patterns, weights))
        whole = self.patterns.dtype == torch.float64 or (followed and torch.is_grad_enabled())
        height = atoms if whole else max(1, TILE_NUMBERS // self.dim)
        for start in range(0, atoms, height):
            tile = slice(start, start + height)
            yield tile, self.patterns[tile].double()
