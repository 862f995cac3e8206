"""Attention rows as distributions; all exponentials of scores are computed here."""

from massieu.statistics.forward import Attended, RowStatistics, attend, mass_count, probabilities, row_statistics

__all__ = ["Attended", "RowStatistics", "attend", "mass_count", "probabilities", "row_statistics"]
