"""The commands of the command line, one file for each: ``add`` declares its arguments, ``run`` does what they ask for.

Nothing heavy is imported before a command runs: help is instant.
"""

from __future__ import annotations

import argparse
from typing import Protocol

__all__ = ["Command", "INTERRUPTED", "Run"]

INTERRUPTED = 130


class Run(Protocol):
    """What a command does: prints and writes what the options ask for, and returns the exit code."""

    def __call__(self, options: argparse.Namespace, /) -> int: ...


class Command(Protocol):
    """Makes the parser of a command by its name, what it runs and one sentence of help."""

    def __call__(self, name: str, run: Run, help: str) -> argparse.ArgumentParser: ...
