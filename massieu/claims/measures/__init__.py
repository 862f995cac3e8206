"""Exponential families, their duality and thermodynamics, and contrastive learning."""
