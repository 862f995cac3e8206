"""Models: loading, fingerprint, residual stream, head weights, projections, tokenization."""
