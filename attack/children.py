"""Commands of massieu in child processes, with limits of time and memory."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import time
import traceback
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = ["Ended", "complaint", "is_control", "run", "warm_up"]

SECONDS = 60.0
MEGABYTES = 2500
CEILING = 12 << 30
"""Limit of address space of a command, in bytes."""


class Ended(NamedTuple):
    """End of a command.

    Attributes:
        code: exit code; None if it did not end in time, negative for the signal that ended it.
        out: standard output.
        err: standard error.
        megabytes: the most memory that it had.
    """

    code: int | None
    out: str
    err: str
    megabytes: float


def warm_up() -> None:
    """Import the modules of all commands once: children are forked from this process."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "COLUMNS": "120"}
    import pandas  # noqa: F401
    import torch
    import transformers.models.gpt2.modeling_gpt2
    import transformers.models.gpt2.tokenization_gpt2  # noqa: F401

    import massieu.cli
    import massieu.inspection
    import massieu.report.terminal  # noqa: F401

    torch.set_num_threads(1)


def run(arguments: Sequence[str], place: Path, *, seconds: float = SECONDS) -> Ended:
    """Run a command in a child process, with the folder ``place`` for its output."""
    streams = [place / "stdout", place / "stderr"]
    for stream in streams:
        stream.write_bytes(b"")
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        _become_command(arguments, streams)
    code, megabytes = _waited(child, seconds)
    out, err = (stream.read_bytes().decode("utf-8", "replace") for stream in streams)
    return Ended(code, out, err, megabytes)


def _become_command(arguments: Sequence[str], streams: Sequence[Path]) -> None:
    """Run the command in this process and exit without the cleanup of Python."""
    code = 99
    try:
        for number, stream in enumerate(streams, 1):
            os.dup2(os.open(stream, os.O_WRONLY | os.O_APPEND), number)
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdout, sys.stderr = (open(number, "w", encoding="utf-8", closefd=False) for number in (1, 2))  # noqa: SIM115
        resource.setrlimit(resource.RLIMIT_AS, (CEILING, CEILING))
        from massieu import cli

        code = cli.main(list(arguments))
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _waited(child: int, seconds: float) -> tuple[int | None, float]:
    """Return exit code and memory of a child; kill it after a time limit."""
    end = time.monotonic() + seconds
    while True:
        found, status, usage = os.wait4(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status), usage.ru_maxrss / 1024
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            os.wait4(child, 0)
            return None, 0.0
        time.sleep(0.02)


def is_control(sign: str) -> bool:
    """Return True if a character is neither printable nor a space of any width."""
    return not sign.isprintable() and unicodedata.category(sign) != "Zs"


def complaint(ended: Ended) -> str | None:
    """Return a failure of any command: a hang, a crash, too much memory, or control characters in the output."""
    return next(_complaints(ended), None)


def _complaints(ended: Ended) -> Iterator[str]:
    last = ended.err.strip().splitlines()[-1:] or [""]
    if ended.code is None:
        yield "did not end in time"
    elif "Traceback" in ended.err:
        yield f"showed a traceback ({last[0][:200]})"
    elif ended.code not in (0, 1, 2, 3):
        yield f"ended with {ended.code} ({last[0][:300]})"
    elif ended.code in (2, 3) and not last[0].startswith("massieu"):
        yield f"ended with {ended.code} and no sentence ({last[0][:200]})"
    elif ended.code in (2, 3) and len(last[0]) > 900:
        yield f"said {len(last[0])} characters instead of a sentence ({last[0][:200]})"
    if ended.megabytes > MEGABYTES:
        yield f"took {ended.megabytes:.0f} MB"
    for stream in (ended.out, ended.err):
        odd = [sign for sign in stream if is_control(sign) and sign not in "\n\r\t"]
        if odd:
            yield f"wrote the control character {odd[0]!r}"
