"""An attention row as a distribution: the one place where scores are exponentiated."""

from massieu.statistics.forward import Attended, RowStatistics, attend, mass_count, probabilities, row_statistics

__all__ = ["Attended", "RowStatistics", "attend", "mass_count", "probabilities", "row_statistics"]
