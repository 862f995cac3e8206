"""A memory by similarity, in which only the coordinates that were observed count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from massieu.memory.continuous import largest_eigenvalue
from massieu.memory.memory import Conditions, Retrieval, as_mask, row_chunks
from massieu.memory.soft import Soft
from massieu.statistics import probabilities

__all__ = ["Kernel"]

PIECE_NUMBERS = 1 << 22
"""Differences of states and patterns are formed for this many numbers at a time."""


class Kernel(Soft):
    r"""Memory that compares by a similarity of states and patterns, over the coordinates that were observed.

    .. math:: E(\xi) = -\beta^{-1} \log \sum_j \frac{w_j}{\sum w} e^{\beta s(\xi, x_j)}, \qquad
              f(\xi) = \sum_j p_j x_j, \quad p_j \propto w_j e^{\beta s(\xi, x_j)}

    with s one of ``"l2"``: :math:`-\tfrac12 \sum_l o_l (\xi_l - x_{jl})^2`, ``"l1"``:
    :math:`-\sum_l o_l |\xi_l - x_{jl}|`, ``"cosine"``: the cosine of the observed parts (zero if one of them is zero).
    The mask o says what was observed; by default everything. A coordinate that was not observed has no influence on the
    result, whatever stands there: it is filled in from the patterns that agree elsewhere. Zeros in place of the unknown
    would be taken for data.

    With ``"l2"`` an update is a mean-shift step and lowers the energy by at least half the square of its observed part;
    the other two similarities come without such a guarantee, and "minimum" then says that the update attracts.

    Args:
        patterns: :math:`x_j`, shape ``(atoms, dim)``.
        similarity: "l2", "l1" or "cosine".
        beta: as for :class:`~massieu.memory.Continuous`.
        values: as for :class:`~massieu.memory.Continuous`.
        log_weight: as for :class:`~massieu.memory.Continuous`.

    Source:
        Millidge et al. 2022, "Universal Hopfield networks", without masks.

    Example:
        >>> memory = Kernel(torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 5.0]]), "l2", beta=50.0)
        >>> cue, observed = torch.tensor([[1.0, 2.0, 0.0]]), torch.tensor([[True, True, False]])
        >>> memory.retrieve(cue, observed=observed).state
        tensor([[1., 2., 3.]])
    """

    def __init__(
        self,
        patterns: Tensor,
        similarity: Literal["l2", "l1", "cosine"] = "l2",
        beta: float | Tensor = 1.0,
        *,
        values: Tensor | None = None,
        log_weight: Tensor | None = None,
    ) -> None:
        super().__init__(patterns, beta, values, log_weight)
        if similarity not in SIMILARITIES:
            raise ValueError(
                f'similarity must be "l2", "l1" or "cosine", got {similarity!r}; "l2" suits Gaussian noise'
            )
        self.similarity = similarity

    def energy(self, state: Tensor, *, observed: Tensor | None = None) -> Tensor:
        """As :meth:`Memory.energy`; ``observed`` is boolean and broadcasts to the state."""
        rows, shape, conditions = self._arrange_observed(state, observed)
        return self._energy(rows, **conditions).reshape(shape)

    def update(self, state: Tensor, *, observed: Tensor | None = None) -> Tensor:
        """As :meth:`Memory.update`; ``observed`` is boolean and broadcasts to the state."""
        rows, shape, conditions = self._arrange_observed(state, observed)
        return self._move(rows, 0, None, **conditions).reshape(*shape, self.dim)

    def read(self, state: Tensor, *, observed: Tensor | None = None) -> Tensor:
        """As :meth:`Soft.read`; ``observed`` is boolean and broadcasts to the state."""
        rows, shape, conditions = self._arrange_observed(state, observed)
        values = self.patterns if self.values is None else self.values
        return self._read(rows, values, **conditions).reshape(*shape, values.shape[-1])

    def retrieve(
        self,
        state: Tensor,
        *,
        steps: int = 100,
        tolerance: float | None = None,
        clamp: Tensor | None = None,
        observed: Tensor | None = None,
    ) -> Retrieval:
        """As :meth:`Memory.retrieve`; ``observed`` is boolean and broadcasts to the state.

        Observed coordinates move like the others, towards the patterns; ``clamp=observed`` holds them.
        """
        return self._settle(*self._arrange_observed(state, observed), steps, tolerance, clamp)

    def _arrange_observed(self, state: Tensor, observed: Tensor | None) -> tuple[Tensor, tuple[int, ...], Conditions]:
        rows, shape, conditions = self._arrange(state)
        if observed is not None:
            mask = as_mask(observed, "observed", (*shape, self.dim)).reshape(-1, self.dim)
            if not bool(mask.any(-1).all()):
                raise ValueError(
                    "observed must leave one coordinate in each row, got a row without any; nothing could be compared"
                )
            conditions["observed"] = mask
        return rows, shape, conditions

    def _energy(self, rows: Tensor, **conditions: Tensor) -> Tensor:
        wide = rows.double()
        beta, offsets = self._temperature(wide, conditions), self._weights(wide, conditions)
        total = wide.new_tensor(len(self.patterns)).log() if offsets is None else offsets.logsumexp(-1)
        potential = self._by_chunks(wide, conditions, lambda scores, chunk: scores.logsumexp(-1)) - total
        return (-potential / beta.expand(len(rows), 1)[:, 0]).to(rows.dtype)

    def _read(self, rows: Tensor, values: Tensor, **conditions: Tensor) -> Tensor:
        values = values.to(rows)
        return self._by_chunks(rows, conditions, lambda scores, chunk: probabilities(scores) @ values)

    def _peak(self, rows: Tensor, **conditions: Tensor) -> Tensor:
        return self._by_chunks(rows, conditions, lambda scores, chunk: probabilities(scores).amax(-1))

    def _index(self, rows: Tensor, **conditions: Tensor) -> Tensor:
        return self._by_chunks(rows, conditions, lambda scores, chunk: scores.argmax(-1))

    def _growth(self, rows: Tensor, held: Tensor | None, **conditions: Tensor) -> Tensor:
        rows, growth = rows.double(), []
        for row in range(len(rows)):
            own = {name: tensor[row : row + 1] for name, tensor in conditions.items()}
            with torch.enable_grad():
                jacobian = torch.autograd.functional.jacobian(
                    lambda point, own=own: self._read(point[None], self.patterns, **own)[0], rows[row]
                )
            free = rows.new_ones(self.dim) if held is None else (~held[row]).to(rows)
            if "observed" in own:  # what was not observed acts on nothing
                free = free * own["observed"][0]
            jacobian = jacobian * free[:, None] * free
            if self.similarity == "l2":
                growth.append(largest_eigenvalue(jacobian[None], None)[0])
            else:
                growth.append(torch.linalg.eigvals(jacobian).abs().max())
        return torch.stack(growth)

    def _by_chunks(self, rows: Tensor, conditions: Conditions, reduce: Callable[[Tensor, slice], Tensor]) -> Tensor:
        """What is made of scores, log weights included, for a few rows at a time."""
        beta = self._temperature(rows, conditions).expand(len(rows), 1)
        offsets, observed = self._weights(rows, conditions), conditions.get("observed")
        patterns, compare, found = self.patterns.to(rows), SIMILARITIES[self.similarity], []
        for chunk in row_chunks(max(1, len(rows)), len(patterns)):
            own, seen = rows[chunk], None if observed is None else observed[chunk].to(rows)
            if observed is not None:  # what was not observed may hold anything, even what overflows in a square
                own = torch.where(observed[chunk], own, 0.0)
            scores = beta[chunk] * compare(own, patterns, seen)
            if offsets is not None:
                scores = scores + (offsets if offsets.dim() == 1 else offsets[chunk])
            found.append(reduce(scores, chunk))
        return torch.cat(found)


def _l2(state: Tensor, patterns: Tensor, observed: Tensor | None) -> Tensor:
    return -0.5 * _sum_of_differences(state, patterns, observed, torch.square)


def _l1(state: Tensor, patterns: Tensor, observed: Tensor | None) -> Tensor:
    return -_sum_of_differences(state, patterns, observed, torch.abs)


def _cosine(state: Tensor, patterns: Tensor, observed: Tensor | None) -> Tensor:
    tiny = torch.finfo(state.dtype).tiny
    seen = torch.ones_like(state) if observed is None else observed
    lengths = (state * seen).square().sum(-1, keepdim=True) * (seen @ patterns.square().T)
    return (state * seen) @ patterns.T / torch.where(lengths > tiny, lengths, 1.0).sqrt()


def _sum_of_differences(
    state: Tensor, patterns: Tensor, observed: Tensor | None, size: Callable[[Tensor], Tensor]
) -> Tensor:
    """Sums over coordinates of the size of differences: no cancellation, unlike squares of sums."""
    width = max(1, PIECE_NUMBERS // max(1, state.numel()))
    pieces = []
    for atoms in patterns.split(width):
        sizes = size(state[:, None] - atoms)
        pieces.append(sizes.sum(-1) if observed is None else torch.einsum("qnd,qd->qn", sizes, observed))
    return torch.cat(pieces, -1)


SIMILARITIES: dict[str, Callable[[Tensor, Tensor, Tensor | None], Tensor]] = {"l2": _l2, "l1": _l1, "cosine": _cosine}
