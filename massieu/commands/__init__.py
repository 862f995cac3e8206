"""The commands of the command line, one module each: ``add`` declares the arguments, ``run`` executes the command.

Nothing heavy is imported before a command runs: help is instant.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable

from massieu.checks import MissingPackageError, pip_install

__all__ = ["Command", "REPORT_PACKAGES", "RunCommand", "check_packages"]

REPORT_PACKAGES = ("jinja2", "matplotlib", "pyarrow")

RunCommand = Callable[[argparse.Namespace], int]
"""Execution of a command, which prints and writes its results and returns the exit code."""

Command = Callable[[str, RunCommand, str], argparse.ArgumentParser]
"""Factory of the parser of a command, from its name, its ``run`` and one sentence of help."""


def check_packages(*packages: str, extra: str = "inspect") -> None:
    """Raise unless all packages are installed; the sentence names the extra that brings them."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise MissingPackageError(f"this command needs {', '.join(missing)}, not installed; {pip_install(extra)}")
