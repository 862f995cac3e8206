"""Ctrl-C stays an interrupt and SIGTERM a termination, whatever they meet on their way."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

__all__ = ["Interrupt", "Termination", "interruptible"]

_CAME: list[int] = []


class Interrupt(KeyboardInterrupt):
    """Of a kind of its own: ``python -m`` ends by the signal if a plain one ever passed through ``exec``."""

    code, word = 130, "interrupted"


class Termination(Interrupt):
    """SIGTERM, by which Slurm and Kubernetes end a job; what an interrupt writes, this writes too."""

    code, word = 143, "terminated"


KINDS: dict[int, type[Interrupt]] = {signal.SIGINT: Interrupt, signal.SIGTERM: Termination}
USUAL: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """What an interrupt inside became is an interrupt again, and SIGTERM is one.

    Libraries may take it for a module that cannot be imported or a file that cannot be read, which we would call bad
    input. A process that ignores these signals, or has handlers of its own, keeps them.
    """
    before = len(_CAME)
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: _CAME.__delitem__(slice(before, None)))
        if threading.current_thread() is threading.main_thread():
            for number, usual in USUAL.items():
                if (handler := signal.getsignal(number)) in (usual, _come):
                    stack.callback(signal.signal, number, handler)
                    signal.signal(number, _come)
        try:
            yield
        except Exception as error:
            if len(_CAME) > before:
                raise KINDS[_CAME[-1]] from error
            raise


def _come(number: int, frame: object) -> None:
    again = number in _CAME
    _CAME.append(number)
    if number == signal.SIGTERM and again:
        return  # a scheduler that repeats itself does not cut off the last checkpoint
    raise KINDS[number]
