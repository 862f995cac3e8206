"""Base of the memories of states in {-1, 1}: classical, polynomial and exponential."""

from __future__ import annotations

import abc
from typing import Any

import numpy as np
import torch
from torch import Tensor

from massieu.checks import UserError
from massieu.memory.memory import Conditions, Memory, as_seed, check_patterns, row_chunks

__all__ = ["Polar", "as_polar"]

ROUNDING = 8 * torch.finfo(torch.float64).eps
"""A field below this share of the sum of its terms' sizes counts as a tie."""

SEEDS = 1 << 63
"""Number of seeds of a generator."""


class Polar(Memory):
    r"""Patterns and states in :math:`\{-1, 1\}^d`.

    All computations are in float64, in which overlaps are exact. An asynchronous update is a sweep that may flip each
    coordinate once, in an order that depends on the seed and on the number of the sweep alone, so that a retrieval can
    be repeated and does not depend on its batch. A coordinate whose field is zero keeps its value. Where a pattern and
    its negative are stored alike, the index of a retrieval is that of the pattern for both.

    Single flips decide the kind of a state at rest: every flip raises the energy of a "minimum", none lowers that of a
    "metastable" state but some leave it unchanged, and a "saddle" rests under its rule although some flip would lower
    its energy. Clamped coordinates do not count.
    """

    def __init__(self, patterns: Tensor, generator: torch.Generator | int) -> None:
        self.patterns = as_polar(patterns, "patterns")
        check_patterns(self.patterns)
        self.dim = self.patterns.shape[-1]
        self.seed = as_seed(generator)

    def flip_cost(self, state: Tensor) -> Tensor:
        r"""Return the energy change of flipping each coordinate, :math:`E(\xi^{(l)}) - E(\xi)`, shape as the state."""
        rows, shape, _ = self._arrange(state)
        chunks = row_chunks(len(rows), len(self.patterns))
        costs = [self._flip_cost(rows[chunk], rows[chunk] @ self.patterns.T)[0] for chunk in chunks]
        return torch.cat([rows[:0], *costs]).reshape(*shape, self.dim)

    @abc.abstractmethod
    def _flip_cost(self, rows: Tensor, overlap: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cost of every flip, and the size of costs that count as zero."""

    def _signed_cost(self, rows: Tensor, overlap: Tensor) -> tuple[Tensor, Tensor]:
        """Return the same up to a monotone function that keeps signs, where the cost itself may be out of range."""
        return self._flip_cost(rows, overlap)

    def _closeness(self, overlap: Tensor) -> Tensor:
        """Return a monotone function of the weight of each pattern; a pattern may act by its negative."""
        return overlap.abs()

    @abc.abstractmethod
    def _unstable(self, rows: Tensor, overlap: Tensor) -> Tensor:
        """Return flags of the coordinates that the asynchronous rule would flip next."""

    @abc.abstractmethod
    def _field(self, rows: Tensor, overlap: Tensor) -> tuple[Tensor, Tensor]:
        """Return the field of the synchronous rule on all coordinates, and the size of fields that count as zero."""

    @property
    @abc.abstractmethod
    def _asynchronous(self) -> bool: ...

    def _arrange(self, state: Tensor) -> tuple[Tensor, tuple[int, ...], Conditions]:
        return super()._arrange(as_polar(state, "state"))  # states may be integers

    def _move(self, rows: Tensor, number: int, held: Tensor | None, **conditions: Tensor) -> Tensor:
        step = self._sweep if self._asynchronous else self._jump
        fixed = torch.zeros_like(rows, dtype=torch.bool) if held is None else held
        moved = [step(rows[chunk], number, fixed[chunk]) for chunk in row_chunks(len(rows), len(self.patterns))]
        return torch.cat([rows[:0], *moved])

    def _jump(self, rows: Tensor, number: int, held: Tensor) -> Tensor:
        field, zero = self._field(rows, rows @ self.patterns.T)
        return torch.where(held | (field.abs() <= zero), rows, field.sign())

    def _sweep(self, rows: Tensor, number: int, held: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(((self.seed << 20) + number) % SEEDS)
        order = torch.randperm(self.dim, generator=generator)
        place = torch.arange(self.dim)
        state, overlap = rows.clone(), rows @ self.patterns.T
        active, reached = torch.arange(len(rows)), torch.zeros(len(rows), dtype=torch.long)
        while len(active):
            # Skip to the next coordinate that flips in every row: the state is constant between two flips.
            flips = self._unstable(state[active], overlap[active]) & ~held[active]
            flips = flips[:, order] & (place >= reached[active, None])
            going = flips.any(-1)
            active, first = active[going], flips[going].int().argmax(-1)
            coordinate = order[first]
            own = state[active, coordinate]
            overlap[active] -= 2 * own[:, None] * self.patterns[:, coordinate].T
            state[active, coordinate], reached[active] = -own, first + 1
        return state

    def _index(self, rows: Tensor, **conditions: Tensor) -> Tensor:
        chunks = row_chunks(len(rows), len(self.patterns))
        found = [self._closeness(rows[chunk] @ self.patterns.T).argmax(-1) for chunk in chunks]
        return torch.cat([torch.empty(0, dtype=torch.long), *found])

    def _kind(self, rows: Tensor, held: Tensor | None, **conditions: Tensor) -> np.ndarray[Any, np.dtype[np.str_]]:
        words = []
        for chunk in row_chunks(len(rows), len(self.patterns)):
            cost, zero = self._signed_cost(rows[chunk], rows[chunk] @ self.patterns.T)
            if held is not None:
                cost = cost.masked_fill(held[chunk], torch.inf)
            lowers, keeps = (cost < -zero).any(-1).numpy(), (cost.abs() <= zero).any(-1).numpy()
            words.append(np.where(lowers, "saddle", np.where(keeps, "metastable", "minimum")))
        return np.concatenate(words)

    def _size(self, **conditions: Tensor) -> Tensor:
        return torch.tensor(float(self.dim) ** 0.5, dtype=torch.float64)


def as_polar(tensor: Any, name: str) -> Tensor:
    """Return the tensor in float64; raise unless all of its entries are 1 or -1."""
    if not isinstance(tensor, Tensor) or tensor.dtype == torch.bool or tensor.is_complex():
        got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise UserError(f"{name} must be a tensor of numbers 1 and -1, got {got}; write 2 * bits - 1 for bits")
    if tensor.numel() and not bool((tensor.detach().abs() == 1).all()):
        other = tensor.detach()[tensor.detach().abs() != 1][0].item()
        raise UserError(f"{name} must be polar, all entries 1 or -1, got {other:g}; take the sign, or use Continuous")
    return tensor.detach().double()
