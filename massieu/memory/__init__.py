"""Associative memories: stored patterns with an energy, and their retrieval."""

from massieu.memory.scale import Retrieved, retrieve_at_scale

__all__ = ["Retrieved", "retrieve_at_scale"]
