"""Deep networks with explicit weights: a stack of layers for sequences of one length."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from massieu.nn import FeedForward
from massieu.universal.realization import CertifiedNetwork

__all__ = ["Residual", "Stack"]


class Residual(nn.Module):
    """Feed-forward net with a residual connection."""

    def __init__(self, feed_forward: FeedForward) -> None:
        super().__init__()
        self.feed_forward = feed_forward

    def forward(self, x: Tensor) -> Tensor:
        """Add the net's output to ``(..., dim)``."""
        found: Tensor = x + self.feed_forward(x)
        return found


class Stack(CertifiedNetwork):
    """Layers with explicit weights, in float64, on tokens padded to the width of the stream.

    Made by :func:`construct_sparse` and :func:`construct_narrow`.

    Args:
        layers: feed-forward nets and attention, in order.
        positions: added to the padded tokens, ``(length, dim)``.
        settings: those of :class:`CertifiedNetwork`.
    """

    def __init__(self, layers: Iterable[nn.Module], positions: Tensor, **settings: Any) -> None:
        super().__init__(length=len(positions), **settings)
        self.layers = nn.ModuleList(layers)
        self.positions = nn.Parameter(positions.double())

    @property
    def _units(self) -> int:
        return max(each.in_features for each in self.modules() if isinstance(each, nn.Linear))

    def forward(self, x: Tensor) -> Tensor:
        """Return values ``(batch, length, output_dim)`` of sequences ``(batch, length, input_dim)``."""
        stream = self.padded(x, self.positions.shape[1]) + self.positions
        for layer in self.layers:
            stream = layer(stream)
        return stream[..., : self.output_dim]
