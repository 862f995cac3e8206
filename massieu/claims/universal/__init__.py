"""Universal approximation: contextual maps, networks and sparse patterns."""
