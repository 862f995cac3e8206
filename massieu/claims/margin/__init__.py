"""Token selection: attention as a support vector machine, its rates, and trained models."""
