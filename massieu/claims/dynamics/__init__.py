"""Attention as a map of hidden states: ascent, expansion, equilibrium, heads, Hopfield steps."""
