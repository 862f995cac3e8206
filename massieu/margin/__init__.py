"""Attention as max-margin token selection: the programs, their certificates, and how training approaches them."""

from massieu.margin.problem import Assumptions, TokenSelection

__all__ = ["Assumptions", "TokenSelection"]
