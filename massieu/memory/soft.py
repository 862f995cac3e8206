"""Memories whose update is a weighted mean of the patterns: what softmax, entmax and kernel ones share."""

from __future__ import annotations

import abc
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from massieu.checks import check_floating
from massieu.measures.measure import as_log_weight, as_parameter
from massieu.memory.memory import Conditions, Memory, lowest_log_weight

__all__ = ["Soft", "TILE_NUMBERS", "check_scores"]

TILE_NUMBERS = 1 << 18
"""So many numbers of the patterns are converted to double at a time."""


class Soft(Memory):
    r"""Updates :math:`f(\xi) = \sum_j p_j(\xi)\, x_j` with weights p that sum to one.

    The kind of a state at rest: a "saddle" if the update repels in some direction (its Jacobian has an eigenvalue
    above one; where the update descends a smooth energy, the Hessian :math:`I - J` has a negative one); otherwise a
    "minimum" if one pattern has more than half of the weight, and "metastable" if none has, as between patterns that
    resemble each other. Clamped coordinates do not count.
    """

    def __init__(
        self, patterns: Tensor, beta: float | Tensor, values: Tensor | None, log_weight: Tensor | None
    ) -> None:
        self.patterns = as_parameter(patterns, "patterns")
        if self.patterns.dim() != 2 or not self.patterns.numel():
            raise ValueError(
                f"patterns must have shape (atoms, dim) with at least one atom, got {tuple(self.patterns.shape)};"
                " for a single pattern pass patterns[None]"
            )
        atoms, self.dim = self.patterns.shape
        self.beta = _as_beta(beta)
        if log_weight is not None and isinstance(log_weight, Tensor) and log_weight.dtype == torch.bool:
            log_weight = torch.zeros(log_weight.shape, dtype=self.patterns.dtype).masked_fill(~log_weight, -torch.inf)
        if log_weight is not None:
            check_floating(log_weight, "log_weight", "take the logarithm of the weights")
            least = lowest_log_weight(log_weight.dtype)
            log_weight = as_log_weight(log_weight.masked_fill(log_weight <= least, -torch.inf), atoms)
            log_weight = log_weight.expand(*log_weight.shape[:-1], atoms)
        self.log_weight = log_weight
        self.values = None if values is None else as_parameter(values, "values")
        if self.values is not None and (self.values.dim() != 2 or len(self.values) != atoms):
            raise ValueError(
                f"values must have shape ({atoms}, value_dim), got {tuple(self.values.shape)};"
                " every pattern needs one value"
            )

    def read(self, state: Tensor) -> Tensor:
        r"""What the values say at the state, :math:`\sum_j p_j v_j`, shape ``(..., queries, value_dim)``.

        With values of another space the memory is hetero-associative: retrieval runs among the patterns, and the last
        state is read out. Without values the patterns are their own.
        """
        rows, shape, conditions = self._arrange(state)
        values = self.patterns if self.values is None else self.values
        return self._read(rows, values, **conditions).reshape(*shape, values.shape[-1])

    @abc.abstractmethod
    def _read(self, rows: Tensor, values: Tensor, **conditions: Tensor) -> Tensor: ...

    @abc.abstractmethod
    def _peak(self, rows: Tensor, **conditions: Tensor) -> Tensor:
        """The largest weight of each row."""

    @abc.abstractmethod
    def _growth(self, rows: Tensor, held: Tensor | None, **conditions: Tensor) -> Tensor:
        """The largest eigenvalue of the update's Jacobian on the free coordinates; or a bound, if that is below one."""

    def _arrange(self, state: Tensor) -> tuple[Tensor, tuple[int, ...], Conditions]:
        rows, shape, conditions = super()._arrange(state)
        dtype = torch.promote_types(torch.promote_types(state.dtype, self.patterns.dtype), torch.float32)
        rows = rows.to(dtype)
        weights = None if self.log_weight is None or self.log_weight.dim() < 2 else self.log_weight
        beta = self.beta if isinstance(self.beta, Tensor) and self.beta.dim() else None
        if weights is None and beta is None:
            return rows, shape, conditions
        shapes = [
            shape,
            () if beta is None else tuple(beta.shape),
            () if weights is None else tuple(weights.shape[:-1]),
        ]
        try:
            full = np.broadcast_shapes(*shapes)
        except ValueError:
            raise ValueError(
                f"beta and log_weight must broadcast against the (..., queries) of the state, got {shapes[0]} with"
                f" {shapes[1]} and {shapes[2]}; one beta per head has shape (heads, 1)"
            ) from None
        rows = rows.reshape(*shape, self.dim).expand(*full, self.dim).reshape(-1, self.dim)
        if beta is not None:
            wide = torch.promote_types(dtype, beta.dtype)  # float32 may not hold what a beta in double is
            conditions["beta"] = beta.to(wide).expand(full).reshape(-1, 1)
        if weights is not None:
            conditions["log_weight"] = weights.expand(*full, weights.shape[-1]).reshape(-1, weights.shape[-1])
        return rows, full, conditions

    def _temperature(self, rows: Tensor, conditions: Conditions) -> Tensor:
        """Beta for each row, or for all, in the dtype of the rows."""
        beta = conditions.get("beta", self.beta)
        return beta.to(rows) if isinstance(beta, Tensor) else torch.as_tensor(beta, dtype=torch.float64).to(rows)

    def _weights(self, rows: Tensor, conditions: Conditions) -> Tensor | None:
        weights = conditions.get("log_weight", self.log_weight)
        return None if weights is None else weights.to(rows)

    def _present(self, conditions: Conditions) -> Tensor:
        """Which patterns are there, for each row or for all."""
        weights = conditions.get("log_weight", self.log_weight)
        if weights is None:
            return self.patterns.new_ones(len(self.patterns), dtype=torch.bool)
        return ~weights.isneginf()

    def _inner(self, rows: Tensor) -> Tensor:
        """Inner products of rows in double with all patterns, which are converted a few at a time."""
        height = max(1, TILE_NUMBERS // self.dim)
        tiles = [self.patterns] if self.patterns.dtype == torch.float64 else self.patterns.split(height)
        return check_scores(torch.cat([rows @ tile.double().T for tile in tiles], -1))

    def _move(self, rows: Tensor, number: int, held: Tensor | None, **conditions: Tensor) -> Tensor:
        return self._read(rows, self.patterns, **conditions)

    def _value(self, rows: Tensor, **conditions: Tensor) -> Tensor | None:
        return None if self.values is None else self._read(rows, self.values, **conditions)

    def _size(self, **conditions: Tensor) -> Tensor:
        lengths = self.patterns.norm(dim=-1)
        return torch.where(self._present(conditions), lengths, 0.0).amax(-1)

    def _kind(self, rows: Tensor, held: Tensor | None, **conditions: Tensor) -> np.ndarray[Any, np.dtype[np.str_]]:
        slack = torch.finfo(rows.dtype).eps ** 0.5
        repels = self._growth(rows, held, **conditions) > 1 + slack
        single = self._peak(rows, **conditions) > 0.5 + slack
        words = np.where(single.cpu().numpy(), "minimum", "metastable")
        return np.where(repels.cpu().numpy(), "saddle", words)


def check_scores(scores: Tensor) -> Tensor:
    """The scores, if all of them are numbers; else one sentence."""
    # Any that is not makes a nan of the product; nothing as large as the scores is made.
    if scores.numel() and not bool(torch.isfinite(torch.stack([*scores.detach().aminmax()])).all()):
        raise ValueError(
            "beta, patterns and state must have finite scores, got some beyond float64; lower beta, or rescale both"
        )
    return scores


def _as_beta(beta: Any) -> float | Tensor:
    number = isinstance(beta, (int, float, np.integer, np.floating, Tensor)) and not isinstance(beta, bool)
    if not number or (isinstance(beta, Tensor) and not beta.is_floating_point()):
        got = beta.dtype if isinstance(beta, Tensor) else type(beta).__name__
        raise TypeError(f"beta must be a positive number or a floating-point tensor, got {got}; convert it")
    if isinstance(beta, Tensor) and not beta.numel():
        raise ValueError(f"beta must have an entry, got shape {tuple(beta.shape)}; one per head has shape (heads, 1)")
    lowest = float(beta.detach().amin()) if isinstance(beta, Tensor) else float(beta)
    highest = float(beta.detach().amax()) if isinstance(beta, Tensor) else float(beta)
    if not lowest > 0 or not highest < math.inf:
        raise ValueError(
            f"beta must be positive and finite, got {lowest:g}; it is the inverse temperature, a small one averages"
        )
    return beta if isinstance(beta, Tensor) else float(beta)
