"""Signals of a command: Ctrl-C ends it as an interrupt and SIGTERM as a termination, even inside other libraries."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

__all__ = ["INTERRUPTED", "Interrupt", "Termination", "interruptible"]

INTERRUPTED = 130
_RECEIVED: list[int] = []


class Interrupt(KeyboardInterrupt):
    """SIGINT; a class of its own since ``python -m`` ends by the signal if a plain one passed through ``exec``."""

    code, word = INTERRUPTED, "interrupted"


class Termination(Interrupt):
    """SIGTERM, by which Slurm and Kubernetes end a job; handled like an interrupt."""

    code, word = 143, "terminated"


KINDS: dict[int, type[Interrupt]] = {signal.SIGINT: Interrupt, signal.SIGTERM: Termination}
DEFAULTS: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Raise an interrupt for SIGINT and SIGTERM, also where a library turned it into another error.

    Libraries may report it as a failed import or an unreadable file, which would count as bad input. A process that
    ignores these signals, or has handlers of its own, keeps them.
    """
    before = len(_RECEIVED)
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: _RECEIVED.__delitem__(slice(before, None)))
        if threading.current_thread() is threading.main_thread():
            for number, default in DEFAULTS.items():
                if (handler := signal.getsignal(number)) in (default, _receive):
                    stack.callback(signal.signal, number, handler)
                    signal.signal(number, _receive)
        try:
            yield
        except Exception as error:
            if len(_RECEIVED) > before:
                raise KINDS[_RECEIVED[-1]] from error
            raise


def _receive(number: int, frame: object) -> None:
    repeated = number in _RECEIVED
    _RECEIVED.append(number)
    if number == signal.SIGTERM and repeated:
        return  # a repeated signal of a scheduler does not cut off the last checkpoint
    raise KINDS[number]
