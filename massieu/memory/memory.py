"""What every associative memory shares: checks at the border, and retrieval that stops for each sample by itself."""

from __future__ import annotations

import abc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from massieu.checks import check_floating
from massieu.kernels.blocks import ABSENT
from massieu.measures.measure import as_integer

__all__ = ["Memory", "Retrieval", "as_mask", "lowest_log_weight", "row_chunks"]

CHUNK_NUMBERS = 1 << 22
"""Rows are taken so many at a time that rows x atoms does not exceed this, where such a matrix is needed at all."""

Conditions = dict[str, Tensor]
"""What belongs to the single rows of a flattened batch, beside the state: first axis rows."""


@dataclass(frozen=True, repr=False)
class Retrieval:
    r"""Where a retrieval ended, and how, for every sample.

    Attributes:
        state: shape ``(..., queries, dim)``.
        index: the pattern that has most weight in the state, shape ``(..., queries)``.
        energy: shape ``(..., queries)``.
        steps: updates (sweeps, if asynchronous) that were made, shape ``(..., queries)``.
        converged: whether the residual is within the tolerance, shape ``(..., queries)``.
        kind: what the state is, an array of words of shape ``(..., queries)``: "minimum", "saddle", "metastable", as
            the class of the memory defines them; "cycle" for a state that alternates with another, by more than its
            last digits; "moving" where the steps did not suffice.
        residual: :math:`|f(\xi) - \xi|`, shape ``(..., queries)``.
        value: what the values of the memory say at the state, shape ``(..., queries, value_dim)``; None without values.
    """

    state: Tensor
    index: Tensor
    energy: Tensor
    steps: Tensor
    converged: Tensor
    kind: np.ndarray[Any, np.dtype[np.str_]]
    residual: Tensor
    value: Tensor | None = None

    def __repr__(self) -> str:
        title = f"Retrieval of {self.index.numel()} states in {self.state.shape[-1]} dimensions"
        if not self.index.numel():
            return title
        kinds, numbers = np.unique(self.kind, return_counts=True)
        counted = ", ".join(f"{number} {kind}" for kind, number in zip(kinds, numbers, strict=True))
        return (
            f"{title}: {int(self.converged.sum())} converged, steps at most {int(self.steps.max())},"
            f" residual at most {self.residual.max():.2g}\n"
            f"kinds: {counted}; {len(self.index.unique())} different patterns have most weight (index)\n"
            "A minimum need not be the right pattern: massieu.memory.certificate(memory).covers(cue)."
        )


class Memory(abc.ABC):
    """Stored patterns with an energy, and an update that descends it.

    A new memory writes the methods with an underscore, which see rows of a flattened batch, ``(rows, dim)``; what
    belongs to each row apart from its state comes as keyword arguments with rows as first axis.
    """

    patterns: Tensor
    dim: int

    def energy(self, state: Tensor) -> Tensor:
        """Energy of the states, shape ``(..., queries)``."""
        rows, shape, conditions = self._arrange(state)
        return self._energy(rows, **conditions).reshape(shape)

    def update(self, state: Tensor) -> Tensor:
        """The states after one update (one sweep, if asynchronous), shape ``(..., queries, dim)``."""
        rows, shape, conditions = self._arrange(state)
        return self._move(rows, 0, None, **conditions).reshape(*shape, self.dim)

    def retrieve(
        self, state: Tensor, *, steps: int = 100, tolerance: float | None = None, clamp: Tensor | None = None
    ) -> Retrieval:
        r"""Update until nothing moves; each sample stops by itself, whatever else is in its batch.

        Args:
            state: cues, shape ``(..., queries, dim)``.
            steps: updates at most.
            tolerance: a sample has converged when :math:`|f(\xi) - \xi|` is at most so much of the longest pattern; by
                default what the dtype can tell.
            clamp: boolean, broadcasting to the state: coordinates that keep the value of the cue.

        Returns:
            The states, and for every sample how it ended. Derivatives pass through the updates that were made.
        """
        return self._settle(*self._arrange(state), steps, tolerance, clamp)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(atoms={self.patterns.shape[-2]}, dim={self.dim})"

    def _arrange(self, state: Tensor) -> tuple[Tensor, tuple[int, ...], Conditions]:
        """States as rows, the shape ``(..., queries)`` they had, and what belongs to each row."""
        check_floating(state, "state")
        if state.dim() < 2 or state.shape[-1] != self.dim:
            remedy = "for a single vector pass state[None]" if state.dim() == 1 else "check its last axis"
            raise ValueError(
                f"state of {type(self).__name__} must have shape (..., queries, {self.dim}), got {tuple(state.shape)};"
                f" {remedy}"
            )
        if not bool(torch.isfinite(state.detach()).all()):
            raise ValueError("state must be finite, got nan or infinity; fill unknown coordinates with a number")
        return state.reshape(-1, self.dim), tuple(state.shape[:-1]), {}

    @abc.abstractmethod
    def _energy(self, rows: Tensor, **conditions: Tensor) -> Tensor: ...

    @abc.abstractmethod
    def _move(self, rows: Tensor, number: int, held: Tensor | None, **conditions: Tensor) -> Tensor:
        """The rows after update ``number``; ``held`` coordinates may move only if the caller can put them back."""

    @abc.abstractmethod
    def _index(self, rows: Tensor, **conditions: Tensor) -> Tensor: ...

    @abc.abstractmethod
    def _kind(self, rows: Tensor, held: Tensor | None, **conditions: Tensor) -> np.ndarray[Any, np.dtype[np.str_]]:
        """Words for rows at rest."""

    @abc.abstractmethod
    def _size(self, **conditions: Tensor) -> Tensor:
        """Norm of the longest pattern, for each row or for all."""

    def _value(self, rows: Tensor, **conditions: Tensor) -> Tensor | None:
        return None

    def _settle(
        self,
        rows: Tensor,
        shape: tuple[int, ...],
        conditions: Conditions,
        steps: int,
        tolerance: float | None,
        clamp: Tensor | None,
    ) -> Retrieval:
        steps = as_integer(steps, "steps", least=0)
        size = self._size(**conditions).detach().expand(len(rows))
        allowed, rounding = _tolerance(tolerance, rows.dtype) * size, _tolerance(None, rows.dtype) * size
        held = None if clamp is None else as_mask(clamp, "clamp", (*shape, self.dim)).reshape(-1, self.dim)
        active = torch.arange(len(rows), device=rows.device)
        taken = torch.zeros_like(active)
        converged, cycles, resting = (torch.zeros_like(active, dtype=torch.bool) for _ in range(3))
        residual = rows.new_full((len(rows),), torch.inf)
        before = torch.full_like(rows, torch.nan)
        for number in range(steps + 1):  # the last one only tells whether the state rests
            if not len(active):
                break
            now, own = rows[active], {name: tensor[active] for name, tensor in conditions.items()}
            fixed = None if held is None else held[active]
            moved = self._move(now, number, fixed, **own)
            if fixed is not None:
                moved = torch.where(fixed, now, moved)
            change = (moved - now).detach().norm(dim=-1)
            rests = change <= allowed[active]
            back = ~rests & (moved.detach() == before[active]).all(-1)
            # A real state that alternates in its last digits is at rest, though not within a tolerance below them.
            dithers = back & (change <= rounding[active])
            residual[active], converged[active] = change, rests
            cycles[active], resting[active] = back & ~dithers, rests | dithers
            going = ~(rests | back)
            if number == steps or not bool(going.any()):
                break
            active, moved = active[going], moved[going]
            before[active], taken[active] = now[going].detach(), taken[active] + 1
            rows = rows.index_copy(0, active, moved)  # a new tensor: derivatives pass through every update
        with torch.no_grad():
            kind = np.full(len(rows), "moving", dtype="U10")
            kind[cycles.cpu().numpy()] = "cycle"
            (still,) = resting.nonzero(as_tuple=True)
            own = {name: tensor[still] for name, tensor in conditions.items()}
            fixed = None if held is None else held[still]
            if len(still):
                kind[still.cpu().numpy()] = self._kind(rows[still], fixed, **own)
            index = self._index(rows, **conditions)
        value = self._value(rows, **conditions)
        return Retrieval(
            state=rows.reshape(*shape, self.dim),
            index=index.reshape(shape),
            energy=self._energy(rows, **conditions).reshape(shape),
            steps=taken.reshape(shape),
            converged=converged.reshape(shape),
            kind=kind.reshape(shape),
            residual=residual.reshape(shape),
            value=None if value is None else value.reshape(*shape, value.shape[-1]),
        )


def as_mask(mask: Any, name: str, shape: tuple[int, ...]) -> Tensor:
    """A boolean tensor of this shape, or one sentence."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"{name} must be a boolean tensor, got {got}; write it as a comparison")
    try:
        return mask.expand(shape)
    except RuntimeError:
        raise ValueError(
            f"{name} must broadcast to the shape {shape} of the state, got {tuple(mask.shape)};"
            " give every coordinate its own entry"
        ) from None


def lowest_log_weight(dtype: torch.dtype) -> float:
    """At most this is absent: models mask by a very negative number."""
    return max(0.3 * ABSENT, torch.finfo(dtype).min / 2)


def row_chunks(rows: int, atoms: int) -> Iterator[slice]:
    """Slices of the rows that keep rows x atoms small."""
    height = max(1, CHUNK_NUMBERS // max(1, atoms))
    return (slice(start, start + height) for start in range(0, rows, height))


def _tolerance(tolerance: float | None, dtype: torch.dtype) -> float:
    if tolerance is None:
        return float(8 * torch.finfo(dtype).eps ** 0.85)
    if isinstance(tolerance, bool) or not isinstance(tolerance, (int, float)) or not 0 <= tolerance < float("inf"):
        raise ValueError(f"tolerance must be a number of at least zero, got {tolerance!r}; 1e-6 is common")
    return float(tolerance)
