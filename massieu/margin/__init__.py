"""Attention as max-margin token selection: the programs, their certificates, and how training approaches them."""

from massieu.margin.problem import Assumptions, TokenSelection
from massieu.margin.solver import MaxMargin, direction_bound, max_margin

__all__ = ["Assumptions", "MaxMargin", "TokenSelection", "direction_bound", "max_margin"]
