"""Benchmarks: ratios of time and memory to baselines, measured side by side on this machine."""

from benchmarks.runner import main

__all__ = ["main"]
