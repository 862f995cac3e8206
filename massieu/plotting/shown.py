"""Figures that show themselves in a notebook, whatever it has set up for drawing."""

from __future__ import annotations

import io

from matplotlib.figure import Figure

__all__ = ["ShownFigure"]


class ShownFigure(Figure):
    """A matplotlib figure with the picture that a notebook asks its results for."""

    def _repr_png_(self) -> bytes:
        """The figure as PNG; where ``%matplotlib inline`` is active, that draws it instead."""
        buffer = io.BytesIO()
        self.savefig(buffer, format="png")
        return buffer.getvalue()
