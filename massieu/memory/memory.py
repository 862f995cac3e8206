"""Base of all associative memories: conversion of arguments, and retrieval that stops for each sample by itself."""

from __future__ import annotations

import abc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from massieu.checks import UserError, check_count, check_floating, check_number, check_shape
from massieu.kernels.blocks import ABSENT
from massieu.measures.measure import as_log_weight

__all__ = ["Memory", "Retrieval", "as_log_weights", "as_mask", "as_seed", "broadcast", "check_patterns", "row_chunks"]

CHUNK_NUMBERS = 1 << 22
"""Largest size of a matrix rows x atoms, where one is needed; rows are taken in chunks."""

Conditions = dict[str, Tensor]
"""Tensors of a flattened batch beside the state, with rows as first axis."""


@dataclass(frozen=True, repr=False)
class Retrieval:
    r"""Final states of a retrieval, and the outcome for every sample.

    Attributes:
        state: shape ``(..., queries, dim)``.
        index: the pattern of largest weight in the state, shape ``(..., queries)``.
        energy: shape ``(..., queries)``.
        steps: updates made (sweeps, if asynchronous), shape ``(..., queries)``.
        converged: True if the residual is within the tolerance, shape ``(..., queries)``.
        kind: class of the state, an array of words of shape ``(..., queries)``: "minimum", "saddle", "metastable", as
            the class of the memory defines them; "cycle" for a state that alternates with another, by more than its
            last digits; "moving" where the steps did not suffice.
        residual: :math:`|f(\xi) - \xi|`, shape ``(..., queries)``.
        value: readout of the values of the memory at the state, shape ``(..., queries, value_dim)``; None without.
    """

    state: Tensor
    index: Tensor
    energy: Tensor
    steps: Tensor
    converged: Tensor
    kind: np.ndarray[Any, np.dtype[np.str_]]
    residual: Tensor
    value: Tensor | None = None

    @property
    def message(self) -> str:
        """Outcome of all samples, a sentence."""
        title = f"Retrieval of {self.index.numel()} states in {self.state.shape[-1]} dimensions"
        if not self.index.numel():
            return title
        return (
            f"{title}: {int(self.converged.sum())} converged, steps at most {int(self.steps.max())},"
            f" residual at most {self.residual.max():.2g}"
        )

    def __repr__(self) -> str:
        if not self.index.numel():
            return self.message
        kinds, numbers = np.unique(self.kind, return_counts=True)
        counted = ", ".join(f"{number} {kind}" for kind, number in zip(kinds, numbers, strict=True))
        return (
            f"{self.message}\nkinds: {counted}; {len(self.index.unique())} different patterns in index\n"
            "A minimum need not be the right pattern: massieu.memory.certificate(memory).covers(cue)."
        )


class Memory(abc.ABC):
    """Stored patterns with an energy, and an update that descends it.

    A new memory implements the methods with an underscore, on rows of a flattened batch, ``(rows, dim)``; tensors of
    each row beside its state are keyword arguments with rows as first axis.
    """

    patterns: Tensor
    dim: int

    def energy(self, state: Tensor) -> Tensor:
        """Return the energy of the states, shape ``(..., queries)``."""
        rows, shape, conditions = self._arrange(state)
        return self._energy(rows, **conditions).reshape(shape)

    def update(self, state: Tensor) -> Tensor:
        """Return the states after one update (one sweep, if asynchronous), shape ``(..., queries, dim)``."""
        rows, shape, conditions = self._arrange(state)
        return self._move(rows, 0, None, **conditions).reshape(*shape, self.dim)

    def retrieve(
        self, state: Tensor, *, steps: int = 100, tolerance: float | None = None, clamp: Tensor | None = None
    ) -> Retrieval:
        r"""Update until all states rest; each sample stops by itself, independent of its batch.

        Args:
            state: cues, shape ``(..., queries, dim)``.
            steps: updates allowed.
            tolerance: a sample has converged when :math:`|f(\xi) - \xi|` is at most this share of the longest pattern;
                by default near the resolution of the dtype.
            clamp: boolean, broadcasting to the state: coordinates that keep the value of the cue.

        Returns:
            The states, and the outcome of every sample. Derivatives pass through the updates that were made.
        """
        return self._settle(*self._arrange(state), steps, tolerance, clamp)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(atoms={self.patterns.shape[-2]}, dim={self.dim})"

    def _arrange(self, state: Tensor) -> tuple[Tensor, tuple[int, ...], Conditions]:
        """Return states as rows, their shape ``(..., queries)``, and other tensors of each row."""
        check_floating(state, "state", finite=True)
        check_shape(state, "state", "...", "queries", self.dim)
        return state.reshape(-1, self.dim), tuple(state.shape[:-1]), {}

    @abc.abstractmethod
    def _energy(self, rows: Tensor, **conditions: Tensor) -> Tensor: ...

    @abc.abstractmethod
    def _move(self, rows: Tensor, number: int, held: Tensor | None, **conditions: Tensor) -> Tensor:
        """Return the rows after update ``number``; the caller resets ``held`` coordinates that move."""

    @abc.abstractmethod
    def _index(self, rows: Tensor, **conditions: Tensor) -> Tensor: ...

    @abc.abstractmethod
    def _kind(self, rows: Tensor, held: Tensor | None, **conditions: Tensor) -> np.ndarray[Any, np.dtype[np.str_]]:
        """Return the class of rows at rest."""

    @abc.abstractmethod
    def _size(self, **conditions: Tensor) -> Tensor:
        """Return the norm of the longest pattern, for each row or for all."""

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
        steps = check_count(steps, "steps", least=0)
        size = self._size(**conditions).detach().expand(len(rows))
        allowed, rounding = _tolerance(tolerance, rows.dtype) * size, _tolerance(None, rows.dtype) * size
        held = None if clamp is None else as_mask(clamp, "clamp", (*shape, self.dim)).reshape(-1, self.dim)
        active = torch.arange(len(rows), device=rows.device)
        taken = torch.zeros_like(active)
        converged, cycles, resting = (torch.zeros_like(active, dtype=torch.bool) for _ in range(3))
        residual = rows.new_full((len(rows),), torch.inf)
        before = torch.full_like(rows, torch.nan)
        for number in range(steps + 1):  # the last one only tests if the state rests
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


def check_patterns(patterns: Tensor) -> None:
    """Raise unless patterns have shape ``(atoms, dim)``, with at least one atom."""
    check_shape(patterns, "patterns", "atoms", "dim", remedy="for a single pattern pass patterns[None]")
    if not patterns.numel():
        raise UserError(f"patterns must hold at least one atom, got shape {tuple(patterns.shape)}")


def as_mask(mask: Any, name: str, shape: tuple[int, ...]) -> Tensor:
    """Return a boolean tensor expanded to this shape."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise UserError(f"{name} must be a boolean tensor, got {got}; write it as a comparison")
    return broadcast(mask, name, shape)


def broadcast(tensor: Tensor, name: str, shape: tuple[int, ...]) -> Tensor:
    try:
        return tensor.expand(shape)
    except RuntimeError:
        raise UserError(f"{name} must broadcast to the shape {shape}, got {tuple(tensor.shape)}") from None


def as_log_weights(log_weight: Any, atoms: int, dtype: torch.dtype) -> Tensor:
    """Return log weights, minus infinity for absent patterns: False in a mask, or the very negative number of models.

    Args:
        log_weight: a mask, or log weights whose last axis is the patterns.
        atoms: number of patterns.
        dtype: of log weights made from a mask.
    """
    if isinstance(log_weight, Tensor) and log_weight.dtype == torch.bool:
        log_weight = torch.zeros(log_weight.shape, dtype=dtype).masked_fill(~log_weight, -torch.inf)
    check_floating(log_weight, "log_weight", "take the logarithm of the weights")
    lowest = max(0.3 * ABSENT, torch.finfo(log_weight.dtype).min / 2)
    return as_log_weight(log_weight.masked_fill(log_weight <= lowest, -torch.inf), atoms)


def as_seed(generator: torch.Generator | int) -> int:
    """Return a seed: the number itself, or one drawn from the generator."""
    if isinstance(generator, torch.Generator):
        return int(torch.randint(1 << 62, (), generator=generator))
    return check_count(generator, "generator", least=0)


def row_chunks(rows: int, atoms: int) -> Iterator[slice]:
    """Yield slices of the rows that keep rows x atoms small."""
    height = max(1, CHUNK_NUMBERS // max(1, atoms))
    return (slice(start, start + height) for start in range(0, rows, height))


def _tolerance(tolerance: float | None, dtype: torch.dtype) -> float:
    if tolerance is None:
        return float(8 * torch.finfo(dtype).eps ** 0.85)
    return check_number(tolerance, "tolerance", least=0, remedy="1e-6 is common")
