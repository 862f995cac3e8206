"""Associative memories: classical, dense, exponential and continuous."""
