"""Memory whose weights can be exactly zero, so that patterns are exact fixed points."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from massieu.memory.memory import Conditions, row_chunks
from massieu.memory.soft import Soft, largest_eigenvalue
from massieu.memory.tsallis import bregman, check_alpha, entmax

__all__ = ["Sparse"]


class Sparse(Soft):
    r"""Hopfield memory with :func:`~massieu.memory.entmax` in place of softmax.

    .. math:: E(\xi) = -\beta^{-1}\, \Omega^*(\beta X \xi + \ell) + \tfrac12 |\xi|^2 + \beta^{-1} \Omega^*(\ell)
              + \tfrac12 M^2, \qquad \Omega^*(z) = \max_p\; p \cdot z + H_\alpha(p)

    with the entropy :math:`H_\alpha` of Tsallis and log weights :math:`\ell`, zero unless given: then the constant
    :math:`\Omega^*(0)` is the entropy of N equal weights. The energy is never negative; alpha 1 is
    :class:`~massieu.memory.Continuous`. Every update descends by at least :math:`\tfrac12 |f(\xi) - \xi|^2`. A pattern
    is an exact fixed point if and only if it is separated from the others by :math:`\Delta_i \ge 1 / (\beta (\alpha -
    1))`.

    Args:
        patterns: :math:`x_j`, shape ``(atoms, dim)``.
        beta: as for :class:`~massieu.memory.Continuous`.
        alpha: at least 1; 2 is sparsemax.
        values: as for :class:`~massieu.memory.Continuous`.
        log_weight: added to the scores; minus infinity, or False in a boolean mask, takes a pattern away.

    Source:
        Santos et al. 2024, "Sparse and structured Hopfield networks". Rows are taken in chunks, since a threshold
        needs all scores of a row.

    Example:
        >>> memory = Sparse(torch.eye(3), beta=2.0, alpha=2.0)
        >>> memory.update(torch.tensor([[0.9, 0.3, 0.1]]))
        tensor([[1., 0., 0.]])
    """

    def __init__(
        self,
        patterns: Tensor,
        beta: float | Tensor,
        alpha: float,
        *,
        values: Tensor | None = None,
        log_weight: Tensor | None = None,
    ) -> None:
        super().__init__(patterns, beta, values, log_weight)
        self.alpha = check_alpha(alpha)

    def weights(self, state: Tensor) -> Tensor:
        """Return the weights, shape ``(..., queries, atoms)``."""
        rows, shape, conditions = self._arrange(state)
        found = self._by_chunks(rows, conditions, lambda weight, scores, chunk: weight.to(rows))
        return found.reshape(*shape, len(self.patterns))

    def _energy(self, rows: Tensor, **conditions: Tensor) -> Tensor:
        wide = rows.double()
        beta, offsets = self._beta(wide, conditions).expand(len(rows), 1)[:, 0], self._weights(wide, conditions)
        if offsets is None:
            offsets = wide.new_zeros(len(self.patterns))
        start = entmax(offsets, self.alpha)

        def potential(weight: Tensor, scores: Tensor, chunk: slice) -> Tensor:
            # The difference of the two conjugates is p . z minus a divergence, which vanishes at small beta.
            own, first = (x if x.dim() == 1 else x[chunk] for x in (offsets, start))
            inner = self._inner(wide[chunk])
            most = ((weight - first) * inner).sum(-1).clamp_min(0.0)
            return (weight * inner).sum(-1) - torch.minimum(bregman(weight, first, own, self.alpha) / beta[chunk], most)

        found = self._by_chunks(wide, conditions, potential)
        energy = 0.5 * (wide.square().sum(-1) + self._size(**conditions).double().square()) - found
        return energy.to(rows.dtype)

    def _read(self, rows: Tensor, values: Tensor, **conditions: Tensor) -> Tensor:
        values = values.to(rows)
        return self._by_chunks(rows, conditions, lambda weight, scores, chunk: weight.to(rows) @ values)

    def _peak(self, rows: Tensor, **conditions: Tensor) -> Tensor:
        return self._by_chunks(rows, conditions, lambda weight, scores, chunk: weight.amax(-1))

    def _index(self, rows: Tensor, **conditions: Tensor) -> Tensor:
        return self._by_chunks(rows, conditions, lambda weight, scores, chunk: scores.argmax(-1))

    def _growth(self, rows: Tensor, held: Tensor | None, **conditions: Tensor) -> Tensor:
        wide, patterns = rows.double(), self.patterns.double()
        beta = self._beta(wide, conditions).expand(len(rows), 1)[:, 0]

        def growth(weight: Tensor, scores: Tensor, chunk: slice) -> Tensor:
            found = weight.new_zeros(len(weight))
            for row in ((weight > 0).sum(-1) > 1).nonzero()[:, 0].tolist():
                kept = weight[row] > 0
                share, atoms = weight[row, kept, None] ** (2 - self.alpha), patterns[kept]
                centered = atoms - (share * atoms).sum(0) / share.sum()
                jacobian = (share * centered).T @ centered
                found[row] = largest_eigenvalue(jacobian[None], None if held is None else held[chunk][row][None])[0]
            return found * beta[chunk]

        return self._by_chunks(wide, conditions, growth)

    def _by_chunks(
        self, rows: Tensor, conditions: Conditions, reduce: Callable[[Tensor, Tensor, slice], Tensor]
    ) -> Tensor:
        """Return ``reduce`` of weights, scores and slice of each chunk of rows, concatenated."""
        wide, found = rows.double(), []
        query, offsets = wide * self._beta(wide, conditions), self._weights(wide, conditions)
        for chunk in row_chunks(max(1, len(rows)), len(self.patterns)):
            # In double: the threshold is sharp, and large scores have no digits left for it otherwise.
            scores = self._inner(query[chunk])
            if offsets is not None:
                scores = scores + (offsets if offsets.dim() == 1 else offsets[chunk])
            found.append(reduce(entmax(scores, self.alpha), scores, chunk))
        return torch.cat(found)
