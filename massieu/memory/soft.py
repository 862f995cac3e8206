"""Base of the memories whose update is a weighted mean of the patterns: softmax, entmax and kernels."""

from __future__ import annotations

import abc
from typing import Any

import numpy as np
import torch
from torch import Tensor

from massieu.checks import UserError, check_floating, check_number, check_shape
from massieu.measures.measure import as_parameter
from massieu.memory.memory import Conditions, Memory, as_log_weights, check_patterns

__all__ = ["Soft", "TILE_NUMBERS", "check_scores", "largest_eigenvalue"]

TILE_NUMBERS = 1 << 18
"""Numbers of the patterns that are converted to double at a time."""


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
        check_patterns(self.patterns)
        atoms, self.dim = self.patterns.shape
        self.beta = _as_beta(beta)
        if log_weight is not None:
            log_weight = as_log_weights(log_weight, atoms, self.patterns.dtype)
            log_weight = log_weight.expand(*log_weight.shape[:-1], atoms)
        self.log_weight = log_weight
        self.values = None if values is None else as_parameter(values, "values")
        if self.values is not None:
            check_shape(self.values, "values", atoms, "value_dim", remedy="every pattern needs one value")

    def read(self, state: Tensor) -> Tensor:
        r"""Return the readout at the state, :math:`\sum_j p_j v_j`, shape ``(..., queries, value_dim)``.

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
        """Return the largest weight of each row."""

    @abc.abstractmethod
    def _growth(self, rows: Tensor, held: Tensor | None, **conditions: Tensor) -> Tensor:
        """Return the largest eigenvalue of the update's Jacobian on the free coordinates, or a bound if below one."""

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
            raise UserError(
                f"beta and log_weight must broadcast against the (..., queries) of the state, got {shapes[0]} with"
                f" {shapes[1]} and {shapes[2]}; one beta per head has shape (heads, 1)"
            ) from None
        rows = rows.reshape(*shape, self.dim).expand(*full, self.dim).reshape(-1, self.dim)
        if beta is not None:
            wide = torch.promote_types(dtype, beta.dtype)  # float32 may not hold a beta in double
            conditions["beta"] = beta.to(wide).expand(full).reshape(-1, 1)
        if weights is not None:
            conditions["log_weight"] = weights.expand(*full, weights.shape[-1]).reshape(-1, weights.shape[-1])
        return rows, full, conditions

    def _beta(self, rows: Tensor, conditions: Conditions) -> Tensor:
        """Return beta for each row, or for all, in the dtype of the rows."""
        beta = conditions.get("beta", self.beta)
        return beta.to(rows) if isinstance(beta, Tensor) else torch.as_tensor(beta, dtype=torch.float64).to(rows)

    def _weights(self, rows: Tensor, conditions: Conditions) -> Tensor | None:
        weights = conditions.get("log_weight", self.log_weight)
        return None if weights is None else weights.to(rows)

    def _present(self, conditions: Conditions) -> Tensor:
        """Return flags of the present patterns, for each row or for all."""
        weights = conditions.get("log_weight", self.log_weight)
        if weights is None:
            return self.patterns.new_ones(len(self.patterns), dtype=torch.bool)
        return ~weights.isneginf()

    def _inner(self, rows: Tensor) -> Tensor:
        """Return the inner products of rows in double with all patterns, which are converted in tiles."""
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
    """Return the scores; raise if some are not finite."""
    # Through the extremes, without a mask as large as the scores.
    if scores.numel() and not bool(torch.isfinite(torch.stack([*scores.detach().aminmax()])).all()):
        raise UserError(
            "beta, patterns and state must have finite scores, got some beyond float64; lower beta, or rescale both"
        )
    return scores


def largest_eigenvalue(jacobian: Tensor, held: Tensor | None) -> Tensor:
    """Return the largest eigenvalue of symmetric matrices ``(rows, dim, dim)``, without the held coordinates."""
    if held is not None:
        free = (~held).to(jacobian)
        jacobian = jacobian * free[:, :, None] * free[:, None, :]
    largest: Tensor = torch.linalg.eigvalsh(jacobian)[..., -1]
    return largest


def _as_beta(beta: Any) -> float | Tensor:
    if not isinstance(beta, Tensor):
        return check_number(beta, "beta", above=0)
    check_floating(beta, "beta", finite=True)
    if not beta.numel() or not bool((beta > 0).all()):
        raise UserError("beta must be positive; one per head has shape (heads, 1)")
    return beta
