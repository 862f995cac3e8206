"""Shared parts of figures: size, axes, legends, color scales, and figures that show themselves in a notebook."""
