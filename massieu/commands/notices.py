"""Notices on stderr: reports that a command replaces, and warnings about checkpoints."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from massieu.checks import visible

__all__ = ["checkpoint_warnings_in_one_line", "print_replaced"]


def print_replaced(folder: Path, kind: str) -> None:
    """Print which report of the same kind in a folder is replaced, if there is one."""
    from massieu.outputs.folders import replaced_report

    sentence = replaced_report(folder, kind)
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
