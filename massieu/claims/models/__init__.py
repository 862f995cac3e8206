"""Statements of the paper, measured on a trained model."""
