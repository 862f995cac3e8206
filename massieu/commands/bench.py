"""``massieu bench``: measure the ratios of ``benchmarks/`` on this machine."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from massieu.commands import Command

__all__ = ["add", "run"]

ROOT = Path(__file__).resolve().parents[2]


def add(command: Command) -> None:
    """Declare the arguments."""
    parser = command("bench", run, "measure the ratios of benchmarks/ on this machine")
    names = "forward, forward_bfloat16, forward_grouped, forward_backward, retrieval, scale, memory, inspection, "
    words = f"some of {names}engine, contrast, dynamics, learning, margin, patterns, watch (default: all of them)"
    parser.add_argument("names", nargs="*", metavar="NAME", help=words)


def run(options: argparse.Namespace) -> int:
    """Run the benchmarks of the repository around this package."""
    if not (ROOT / "benchmarks" / "__init__.py").exists():
        print(
            "massieu bench: the benchmarks are not part of the installed package;"
            " run it from a clone of the repository, installed with pip install -e .",
            file=sys.stderr,
        )
        return 2
    # First on the path: other distributions install a top-level package of the same name.
    sys.path.insert(0, str(ROOT))
    code: int | None = importlib.import_module("benchmarks").main(options.names, json=options.json)
    return code or 0
