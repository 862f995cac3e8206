"""Self-contained HTML pages from inspections: ``render`` shows one, ``compare`` lays two or more side by side."""

from massieu.report.pages import compare, render

__all__ = ["compare", "render"]
