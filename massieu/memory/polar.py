"""Memories of states in {-1, 1}: what the classical, the polynomial and the exponential one share."""

from __future__ import annotations

import abc
from typing import Any

import numpy as np
import torch
from torch import Tensor

from massieu.measures.measure import as_integer
from massieu.memory.memory import Conditions, Memory, row_chunks

__all__ = ["Polar", "as_polar"]

ROUNDING = 8 * torch.finfo(torch.float64).eps
"""A field below this share of the terms it is a sum of counts as a tie."""

SEEDS = 1 << 63
"""Generators take no seed beyond."""


class Polar(Memory):
    r"""Patterns and states in :math:`\{-1, 1\}^d`.

    Everything is computed in float64, in which overlaps are exact. An asynchronous update is a sweep that offers each
    coordinate one flip, in an order that depends on the seed and on the number of the sweep alone, so that a
    retrieval can be repeated and does not depend on its batch. A coordinate whose field is zero keeps its value. Where
    a pattern and its negative are stored alike, the index of a retrieval names the pattern for both.

    The kind of a state at rest is told by single flips: a "minimum" is raised by every flip, a "metastable" state is
    lowered by none but left as it is by some, and a "saddle" rests under its rule although some flip would lower it.
    Clamped coordinates do not count.
    """

    def __init__(self, patterns: Tensor, seed: int) -> None:
        self.patterns = as_polar(patterns, "patterns")
        if self.patterns.dim() != 2 or not self.patterns.numel():
            raise ValueError(
                f"patterns must have shape (atoms, dim) with at least one atom, got {tuple(patterns.shape)};"
                " for a single pattern pass patterns[None]"
            )
        self.dim = self.patterns.shape[-1]
        self.seed = as_integer(seed, "seed", least=0)

    def flip_cost(self, state: Tensor) -> Tensor:
        r"""What the flip of each coordinate adds to the energy, :math:`E(\xi^{(l)}) - E(\xi)`, shape as the state."""
        rows, shape, _ = self._arrange(state)
        chunks = row_chunks(len(rows), len(self.patterns))
        costs = [self._flip_cost(rows[chunk], rows[chunk] @ self.patterns.T)[0] for chunk in chunks]
        return torch.cat([rows[:0], *costs]).reshape(*shape, self.dim)

    @abc.abstractmethod
    def _flip_cost(self, rows: Tensor, overlap: Tensor) -> tuple[Tensor, Tensor]:
        """Cost of every flip, and what counts as zero beside it."""

    def _signed_cost(self, rows: Tensor, overlap: Tensor) -> tuple[Tensor, Tensor]:
        """The same up to a monotone function that keeps signs, where the cost itself may be out of range."""
        return self._flip_cost(rows, overlap)

    def _closeness(self, overlap: Tensor) -> Tensor:
        """What is larger for a pattern of larger weight; a pattern may act by its negative."""
        return overlap.abs()

    @abc.abstractmethod
    def _unstable(self, rows: Tensor, overlap: Tensor) -> Tensor:
        """Which coordinates the asynchronous rule would flip, if it came to them now."""

    @abc.abstractmethod
    def _field(self, rows: Tensor, overlap: Tensor) -> tuple[Tensor, Tensor]:
        """Field of the synchronous rule on all coordinates, and what counts as zero beside it."""

    @property
    @abc.abstractmethod
    def _asynchronous(self) -> bool: ...

    def _arrange(self, state: Tensor) -> tuple[Tensor, tuple[int, ...], Conditions]:
        # Numbers 1 and -1 may be integers, here as in the patterns.
        rows, shape, conditions = super()._arrange(as_polar(state, "state"))
        return rows, shape, conditions

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
            # Between two flips nothing changes: every row goes on to its next coordinate that flips.
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
    """The tensor in float64, if all of its entries are 1 or -1; else one sentence."""
    if not isinstance(tensor, Tensor) or tensor.dtype == torch.bool or tensor.is_complex():
        got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TypeError(f"{name} must be a tensor of numbers 1 and -1, got {got}; write 2 * bits - 1 for bits")
    if tensor.numel() and not bool((tensor.detach().abs() == 1).all()):
        other = tensor.detach()[tensor.detach().abs() != 1][0].item()
        raise ValueError(f"{name} must be polar, all entries 1 or -1, got {other:g}; take the sign, or use Continuous")
    return tensor.detach().double()
