"""Ctrl-C stays an interrupt, whatever it meets on its way."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import NoReturn

__all__ = ["Interrupt", "interruptible"]

_CAME: list[int] = []


class Interrupt(KeyboardInterrupt):
    """Of a kind of its own: ``python -m`` ends by the signal if a plain one ever passed through ``exec``."""


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """What an interrupt inside became is an interrupt again.

    Libraries may take it for a module that cannot be imported or a file that cannot be read, which we would call bad
    input. A process that ignores interrupts, or has a handler of its own, keeps it.
    """
    before, handler = len(_CAME), signal.getsignal(signal.SIGINT)
    main = threading.current_thread() is threading.main_thread()
    if not main or handler not in (signal.default_int_handler, _come):
        yield
        return
    signal.signal(signal.SIGINT, _come)
    try:
        yield
    except Exception as error:
        if len(_CAME) > before:
            raise Interrupt from error
        raise
    finally:
        signal.signal(signal.SIGINT, handler)


def _come(number: int, frame: object) -> NoReturn:
    _CAME.append(number)
    raise Interrupt
