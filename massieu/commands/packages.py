"""Packages that a command needs beyond torch and numpy."""

from __future__ import annotations

import importlib.util

from massieu.checks import MissingPackageError, pip_install

__all__ = ["REPORT", "need"]

REPORT = ("jinja2", "matplotlib", "pyarrow")
"""Packages that write a report."""


def need(*packages: str, extra: str = "inspect") -> None:
    """Say in a sentence which packages are not installed, and which extra brings them."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise MissingPackageError(f"this command needs {', '.join(missing)}, not installed; {pip_install(extra)}")
