"""Hear every attention call inside a running model, whoever wrote the model."""

from massieu.taps.calls import AttentionCall
from massieu.taps.tap import Tap, tap

__all__ = ["AttentionCall", "Tap", "tap"]
