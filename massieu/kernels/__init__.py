"""Where scores are computed tile by tile; one interface, whichever kernel serves it.

A kernel sees :class:`~massieu.kernels.rows.Inputs` and offers three functions: ``forward`` (output and row
statistics), ``backward`` (gradients by recomputation) and ``mass_count``. It knows nothing of autograd.
"""

from massieu.kernels.blocks import LN2, LOG2E, hidden
from massieu.kernels.results import Best, Found, Gradients, Slope
from massieu.kernels.rows import Inputs, Plan, Rows, arrange
from massieu.kernels.visibility import visible, visible_count
from massieu.kernels.dispatch import backend, backward, forward, mass_count, reason, retrieve

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
