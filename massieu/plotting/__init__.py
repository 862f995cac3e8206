"""Shared parts of figures: axes, legends, color scales and their limits, display in a notebook."""
