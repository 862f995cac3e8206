"""Geometry of heads, token clouds and Jacobians, independent of models."""

from massieu.geometry.matrices import (
    LowRank,
    Spectrum,
    WhitenedHead,
    cosine,
    effective_rank,
    floored_spectrum,
    output_map,
    power_cosine,
    projector_maps,
    random_maps,
    score_map,
    singular_values,
    symmetric_fraction,
    whiten,
    whitened_head,
)

__all__ = [
    "LowRank",
    "Spectrum",
    "WhitenedHead",
    "cosine",
    "effective_rank",
    "floored_spectrum",
    "output_map",
    "power_cosine",
    "projector_maps",
    "random_maps",
    "score_map",
    "singular_values",
    "symmetric_fraction",
    "whiten",
    "whitened_head",
]
