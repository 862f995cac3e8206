"""Where scores are computed tile by tile; one interface, whichever kernel serves it.

A kernel sees :class:`~massieu.kernels.rows.Rows` and offers three functions: ``forward`` (output and row
statistics), ``backward`` (gradients by recomputation) and ``mass_count``. It knows nothing of autograd.
"""

from massieu.kernels.blocks import hidden
from massieu.kernels.rows import Plan, Rows, arrange
from massieu.kernels.tiles import Moments, Slope, backward, forward, mass_count

__all__ = ["Moments", "Plan", "Rows", "Slope", "arrange", "backend", "backward", "forward", "hidden", "mass_count"]


def backend() -> str:
    """Name of the kernel in use."""
    return "torch"
