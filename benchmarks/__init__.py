"""Ratios measured side by side in one process: ours over torch's own attention, on this machine."""

from benchmarks.runner import main

__all__ = ["main"]
