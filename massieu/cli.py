"""The command line: parse, run one command, and say in one sentence what went wrong."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import massieu
from massieu.commands import INTERRUPTED, Run, bench, compare, doctor, inspect, learn, merge, verify, watch
from massieu.commands.interrupts import interruptible

__all__ = ["main"]

COMMANDS = (inspect, compare, merge, verify, watch, learn, doctor, bench)
CLOSED = 141  # as shells call a process that ended because nobody read on


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    0 done, 1 a ``--fail-on`` condition holds or a verdict is not the expected one, 2 bad usage or bad input, 3
    attention that cannot be observed, 130 interrupted, 143 terminated.
    """
    options = command_line().parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a console may lack a sign that a sentence has
    try:
        with interruptible():
            code: int = options.run(options)
            sys.stdout.flush()
    except KeyboardInterrupt as interrupt:  # who kept something says what
        word, code = getattr(interrupt, "word", "interrupted"), getattr(interrupt, "code", INTERRUPTED)
        print(f"massieu: {word}; {str(interrupt) or 'nothing was written'}", file=sys.stderr)
        return code
    except BrokenPipeError:  # who read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED
    except (ValueError, TypeError) as error:  # bad input, such as a kernel that does not exist
        if not _is_message(error):
            raise
        print(f"massieu: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        if type(error).__name__ != "NotObservable":
            raise
        print(f"massieu: {error}", file=sys.stderr)
        return 3
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

    def command(name: str, run: Run, help: str) -> Parser:
        added: Parser = commands.add_parser(name, help=help, description=help, allow_abbrev=False)
        added.add_argument("--json", action="store_true", help="print one JSON object")
        added.set_defaults(run=run)
        return added

    for module in COMMANDS:
        module.add(command)
    return parser


def _is_message(error: Exception) -> bool:
    """Whether an error was raised by our own code as a sentence, and not somewhere inside."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and Path(__file__).parent in Path(trace.tb_frame.f_code.co_filename).parents
