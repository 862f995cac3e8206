"""Capture the attention calls of a running model."""

from massieu.taps.calls import AttentionCall
from massieu.taps.tap import Tap, tap

__all__ = ["AttentionCall", "Tap", "tap"]
