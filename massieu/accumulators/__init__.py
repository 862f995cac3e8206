"""Mergeable statistics: means, moments, histograms, samples, regression; serialized by their fields."""
