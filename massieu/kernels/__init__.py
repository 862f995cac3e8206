"""Kernels, which compute scores tile by tile behind one interface.

A kernel takes :class:`~massieu.kernels.rows.Inputs` and has three functions: ``forward`` (output and row statistics),
``backward`` (gradients by recomputation) and ``mass_count``. Autograd is applied outside.
"""

from massieu.kernels.blocks import LN2, LOG2E, hidden
from massieu.kernels.dispatch import backend, backward, forward, mass_count, reason, retrieve
from massieu.kernels.results import Best, Found, Gradients, Slope
from massieu.kernels.rows import Inputs, Plan, Rows, arrange
from massieu.kernels.visibility import visible, visible_count

__all__ = [
    "Best",
    "Found",
    "Gradients",
    "Inputs",
    "LN2",
    "LOG2E",
    "Plan",
    "Rows",
    "Slope",
    "arrange",
    "backend",
    "backward",
    "forward",
    "hidden",
    "mass_count",
    "reason",
    "retrieve",
    "visible",
    "visible_count",
]
