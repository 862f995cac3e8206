"""A stack of layers with set weights for sequences of one length, which checks itself on what it was built for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from massieu.nn import FeedForward
from massieu.universal.realization import Cases, Certificate, certified

__all__ = ["Residual", "Stack"]


class Residual(nn.Module):
    """A feed-forward net beside a residual connection."""

    def __init__(self, feed_forward: FeedForward) -> None:
        super().__init__()
        self.feed_forward = feed_forward

    def forward(self, x: Tensor) -> Tensor:
        """Add the net's output to ``(..., dim)``."""
        found: Tensor = x + self.feed_forward(x)
        return found


class Stack(nn.Module):
    """Layers with set weights, in float64, on tokens padded to the width of the stream.

    Made by :func:`construct_sparse` and :func:`construct_narrow`.

    Args:
        layers: feed-forward nets and attention, in order.
        positions: added to the padded tokens, ``(length, dim)``; all zero for none.
        input_dim: size of the tokens.
        output_dim: size of the values, the first coordinates of the stream.
        margin: least distance between identifiers over machine epsilon times the largest.
        tolerance: default of :meth:`certify` in float64.
        cases: gives what :meth:`certify` goes through.
    """

    def __init__(
        self,
        layers: Iterable[nn.Module],
        positions: Tensor,
        *,
        input_dim: int,
        output_dim: int,
        margin: float,
        tolerance: float = 1e-12,
        cases: Callable[[], Cases],
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.positions = nn.Parameter(positions.double())
        self.input_dim, self.output_dim, self.cases = input_dim, output_dim, cases
        self.margin, self.tolerance = margin, tolerance

    @property
    def num_parameters(self) -> int:
        """Weights and biases that are not zero."""
        return sum(int(parameter.count_nonzero()) for parameter in self.parameters())

    def forward(self, x: Tensor) -> Tensor:
        """Values ``(batch, length, output_dim)`` of sequences ``(batch, length, input_dim)``."""
        length, dim = self.positions.shape
        if not isinstance(x, Tensor) or x.dim() != 3 or x.shape[1:] != (length, self.input_dim):
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"x must have shape (batch, {length}, {self.input_dim}), got {got}")
        if not x.is_floating_point():
            raise TypeError(f"x must be floating, got {x.dtype}; pass what the network was built for")
        dtype = self.positions.dtype
        x = x.to(dtype) if torch.promote_types(x.dtype, dtype) == dtype else x  # nothing is lost
        stream = functional.pad(x, (0, dim - self.input_dim)) + self.positions
        for layer in self.layers:
            stream = layer(stream)
        return stream[..., : self.output_dim]

    def __getstate__(self) -> dict[str, Any]:
        """With the cases themselves in place of the function that gives them, which pickle may not know."""
        return {**self.__dict__, "cases": functools.partial(Cases, *self.cases())}

    def certify(self, tolerance: float | None = None) -> Certificate:
        """Go through all cases; in types other than float64 the tolerance is that of :meth:`Realization.certify`."""
        if tolerance is None and next(self.parameters()).dtype == torch.float64:
            tolerance = self.tolerance
        widest = max(each.in_features for each in self.modules() if isinstance(each, nn.Linear))
        chunk = max(1, 10_000_000 // (len(self.positions) * widest))
        return certified(self, self.cases(), self.margin, tolerance, chunk)
