"""Caches of causal layers for generation step by step."""

from __future__ import annotations

import torch
from torch import Tensor

from massieu.checks import UserError, check_count

__all__ = ["KeyValueCache", "LinearCache"]


class KeyValueCache:
    """Keys and values of the tokens seen so far, in buffers that double when they are full.

    Pass one to every call of one layer, in the order of the tokens and under ``torch.no_grad()``.

    Args:
        capacity: number of tokens to reserve memory for at the first call.

    Example:
        >>> layer = massieu.nn.MeasureAttention(8, 2, causal=True)
        >>> x, cache = torch.randn(1, 5, 8), KeyValueCache()
        >>> with torch.no_grad():
        ...     parts = [layer(x[:, :3], cache=cache), layer(x[:, 3:], cache=cache)]
        >>> cache.length, torch.allclose(torch.cat(parts, 1), layer(x), atol=1e-6)
        (5, True)
    """

    def __init__(self, capacity: int = 0) -> None:
        self.capacity = check_count(capacity, "capacity", least=0)
        self.length = 0
        self._buffers: list[Tensor] = []

    def append(self, key: Tensor, value: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Store the next tokens and return all of them, as views.

        Args:
            key: shape ``(batch, key_heads, tokens, dim)``.
            value: shape ``(batch, key_heads, tokens, value_dim)``; None where the values are the keys.

        Returns:
            Keys and values of all tokens so far, ``(batch, key_heads, length, ...)``.
        """
        new = [key] if value is None else [key, value]
        check_no_grad(*new)
        if not self._buffers:
            self._buffers = [self._room(x, max(self.capacity, x.shape[-2])) for x in new]
        stored, given = ([(*x.shape[:2], x.shape[3], x.dtype) for x in group] for group in (self._buffers, new))
        if stored != given:
            raise UserError(
                f"the cache holds (batch, heads, dim, dtype) {stored}, got {given};"
                " use a new cache for another batch or layer"
            )
        start, self.length = self.length, self.length + key.shape[-2]
        if self.length > self._buffers[0].shape[-2]:
            grown = [self._room(x, max(2 * x.shape[-2], self.length)) for x in self._buffers]
            for old, buffer in zip(self._buffers, grown, strict=True):
                buffer[:, :, :start] = old[:, :, :start]
            self._buffers = grown
        for buffer, x in zip(self._buffers, new, strict=True):
            buffer[:, :, start : self.length] = x
        views = [buffer[:, :, : self.length] for buffer in self._buffers]
        return views[0], views[-1]

    @staticmethod
    def _room(x: Tensor, tokens: int) -> Tensor:
        return x.new_empty(*x.shape[:2], tokens, x.shape[3])


class LinearCache:
    r"""Sums over earlier tokens for causal linear attention, of fixed size.

    Attributes:
        length: number of tokens seen.
        state: :math:`\sum_j k_j v_j^\top`, shape ``(batch, heads, dim, value_dim)``; None before the first call.
    """

    def __init__(self) -> None:
        self.length = 0
        self.state: Tensor | None = None

    def recall(self, key: Tensor, value: Tensor) -> Tensor:
        """Return the sums so far, zero at first, for the next keys and values."""
        shape = (*key.shape[:2], key.shape[-1], value.shape[-1])
        if self.state is None:
            return key.new_zeros(shape)
        if self.state.shape != shape or self.state.dtype != key.dtype:
            raise UserError(
                f"the cache holds (batch, heads, dim, dim) {tuple(self.state.shape)} {self.state.dtype},"
                f" got {shape} {key.dtype}; use a new cache for another batch or layer"
            )
        return self.state

    def store(self, state: Tensor, tokens: int) -> None:
        """Replace the sums after ``tokens`` more tokens."""
        check_no_grad(state)
        self.state = state
        self.length += tokens


def check_no_grad(*tensors: Tensor) -> None:
    """Raise if a cached tensor would be differentiated: buffers are overwritten in place."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise RuntimeError(
            "a cache must be filled without gradients, got a tensor that requires grad;"
            " call the model under torch.no_grad(), or without a cache"
        )
