"""Self-contained HTML pages of inspections: ``render`` of one, ``compare`` of several side by side."""

from massieu.report.pages import compare, render

__all__ = ["compare", "render"]
