"""The command line: parse, run one command, and report an error in one sentence."""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

import massieu
from massieu.checks import UserError, did_you_mean, visible
from massieu.commands import RunCommand, bench, compare, doctor, inspect, learn, merge, verify, watch
from massieu.commands.interrupts import INTERRUPTED, interruptible

__all__ = ["main"]

COMMANDS = (inspect, compare, merge, verify, watch, learn, doctor, bench)
USAGE = UserError.exit_code
DEFECT = 70  # EX_SOFTWARE of sysexits.h
CLOSED = 141  # as shells report a broken pipe: 128 + SIGPIPE
EXIT_CODES = (
    "exit codes: 0 done; 1 a --fail-on condition holds, or a verdict is not the expected one; 2 bad usage or bad input,"
    " or a disk that fails; 3 attention that cannot be observed; 4 a lost cluster; 5 identifiers of contexts below the"
    " resolution of floating point; 70 a defect of massieu itself; 130 interrupted; 143 terminated; 141 closed output"
)
# Threads of OpenMP spin for milliseconds at the end of a loop, and take the processor from other threads and programs:
# beside two busy processes an inspection took 2.4, 6 and 53 times as long as alone. Spinning for some microseconds
# costs 5 % on a quiet machine and a factor of two beside them; not spinning at all costs 50 % (benchmarks/busy.py).
SPINS = {"GOMP_SPINCOUNT": "1000"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code, one of :data:`EXIT_CODES`."""
    _limit_spinning()
    _open_streams()
    options = argparse.Namespace(debug=False)
    try:
        with interruptible():
            code = _run(arguments, options)
    except (Exception, KeyboardInterrupt) as error:
        code, sentence = _ending(error)
        if options.debug:
            sentence = "".join(traceback.format_exception(error)) + sentence
        if sentence:
            with contextlib.suppress(OSError):
                print(sentence, file=sys.stderr, flush=True)
        _discard_unwritable_output()
    return code


def _run(arguments: Sequence[str] | None, options: argparse.Namespace) -> int:
    try:
        command_line().parse_args(arguments, options)
        code: int = options.run(options)
    except SystemExit:  # after help or bad usage
        sys.stdout.flush()
        raise
    sys.stdout.flush()
    return code


def _ending(error: BaseException) -> tuple[int, str]:
    """Return the exit code and the sentence for an error that ended a command."""
    if isinstance(error, BrokenPipeError):
        return CLOSED, ""
    if isinstance(error, KeyboardInterrupt):  # its message names the files that were kept
        word, code = getattr(error, "word", "interrupted"), getattr(error, "code", INTERRUPTED)
        return code, f"massieu: {word}; {visible(str(error)) or 'nothing was written'}"
    if isinstance(error, UserError):
        return error.exit_code, f"massieu: {visible(str(error))}"
    if isinstance(error, OSError) and error.errno is not None:
        place = "the output" if error.filename is None else str(error.filename)
        what = f"{place} cannot be read or written: {error.strerror}; check the path, its permissions and the disk"
        return USAGE, f"massieu: {visible(what)}"
    what = visible(f"{type(error).__name__}: {error}")[:300]
    return DEFECT, (
        f"massieu: this is a defect of massieu, not of your input ({what}); please report it with the command and the"
        " output of massieu doctor; --debug shows the traceback"
    )


def _limit_spinning() -> None:
    """Let waiting threads of OpenMP sleep, unless torch is loaded already or the user has set a policy."""
    if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
        for name, value in SPINS.items():
            os.environ.setdefault(name, value)


def _open_streams() -> None:
    """Replace a closed standard stream by the null device, and replace characters that a console lacks."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  # as long as the process
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _discard_unwritable_output() -> None:
    """Redirect buffered output that cannot be written to the null device, since Python reports it again at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_commands(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    parser.print_help()
    return 0


class Parser(argparse.ArgumentParser):
    """Argument parser whose errors are one sentence, with the nearest known option or command."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: {visible(message)}; see {self.prog} --help\n")

    def _print_message(self, message: str, file: Any = None) -> None:
        """Write without hiding the errors of a full disk, as the base class does."""
        if message and file is not None:
            file.write(message)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Reject unknown arguments here, so that the message names the help of the command."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            words = (f"{word}{did_you_mean(word, self._option_string_actions)}" for word in unknown)
            self.error(f"unrecognized arguments: {' '.join(words)}")
        return found, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            near = did_you_mean(str(value), known)
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}{near} (choose from {', '.join(known)})")


def command_line() -> Parser:
    """Return the parser of all commands; each sets ``run``, a function of the options that returns the exit code."""
    description = "Softmax attention as an exponential family."
    parser = Parser(prog="massieu", description=description, epilog=EXIT_CODES, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"massieu {massieu.__version__}")
    parser.set_defaults(run=functools.partial(_print_commands, parser))
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    def command(name: str, run: RunCommand, help: str) -> Parser:
        added: Parser = commands.add_parser(
            name, help=help, description=help, epilog="massieu --help explains the exit codes", allow_abbrev=False
        )
        added.add_argument("--json", action="store_true", help="print one JSON object")
        added.add_argument("--debug", action="store_true", help="show the traceback of an error")
        added.set_defaults(run=run)
        return added

    for module in COMMANDS:
        module.add(command)
    return parser
