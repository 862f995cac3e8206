"""Results of later papers, stated for the same objects."""
