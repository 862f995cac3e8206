"""Figures that are displayed in a notebook under every backend of matplotlib."""

from __future__ import annotations

import io

from matplotlib.figure import Figure

__all__ = ["NotebookFigure"]


class NotebookFigure(Figure):
    """A matplotlib figure with the representation that notebooks display."""

    def _repr_png_(self) -> bytes:
        """Return the figure as PNG; ``%matplotlib inline`` takes precedence where it is active."""
        buffer = io.BytesIO()
        self.savefig(buffer, format="png")
        return buffer.getvalue()
