"""The command line: parse, call one function, print."""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import massieu

__all__ = ["main"]

ROOT = Path(__file__).resolve().parents[1]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 2 bad usage or bad input."""
    options = command_line().parse_args(arguments)
    try:
        code: int = options.run(options)
    except ValueError as error:  # bad input, such as a kernel that does not exist
        print(f"massieu: {error}", file=sys.stderr)
        return 2
    return code


class Parser(argparse.ArgumentParser):
    """A parser that answers bad usage with one sentence."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def command_line() -> Parser:
    """The parser of all commands; each sets ``run``, a function of the options that returns the exit code."""
    parser = Parser(prog="massieu", description="Softmax attention as an exponential family.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"massieu {massieu.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    doctor = commands.add_parser("doctor", help="say what is installed and which kernel is in use", allow_abbrev=False)
    doctor.add_argument("--json", action="store_true", help="print one JSON object")
    doctor.set_defaults(run=run_doctor)

    bench = commands.add_parser("bench", help="measure the ratios of benchmarks/ on this machine", allow_abbrev=False)
    names = "forward, forward_bfloat16, forward_grouped, forward_backward, retrieval, memory"
    bench.add_argument("names", nargs="*", metavar="NAME", help=f"some of {names}; all of them when none is named")
    bench.add_argument("--json", action="store_true", help="print one JSON object")
    bench.set_defaults(run=run_bench)
    return parser


def run_doctor(options: argparse.Namespace) -> int:
    """Print what is installed."""
    import numpy
    import torch

    from massieu import kernels

    facts = {
        "massieu": massieu.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "threads": torch.get_num_threads(),
        "kernel": kernels.backend(),
        "reason": kernels.reason(),
    }
    print(json.dumps(facts) if options.json else "\n".join(f"{name:<8} {fact}" for name, fact in facts.items()))
    return 0


def run_bench(options: argparse.Namespace) -> int:
    """Run the benchmarks of the repository that this package was imported from."""
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
