"""Notices on stderr: reports that a command replaces, and warnings about checkpoints."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from massieu.checks import visible
from massieu.outputs.folders import check_writable, replaced_report

__all__ = ["check_output", "checkpoint_warnings_in_one_line"]


def check_output(folder: str, kind: str, *, quiet: bool = False) -> None:
    """Raise unless a folder can be written to; print which report of the same kind is replaced."""
    check_writable(Path(folder))
    sentence = None if quiet else replaced_report(Path(folder), kind)
    if sentence is not None:
        print(visible(sentence), file=sys.stderr)


@contextlib.contextmanager
def checkpoint_warnings_in_one_line() -> Iterator[None]:
    """Print warnings about checkpoints without their source line."""
    from massieu.engine import CheckpointWarning

    with warnings.catch_warnings():
        default = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
            if issubclass(category, CheckpointWarning):
                print(f"massieu: {visible(str(message))}", file=sys.stderr)
            else:
                default(message, category, *place, **more)

        warnings.showwarning = show
        yield
