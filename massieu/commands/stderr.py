"""Tell on stderr what a command does besides its result: what it replaces, and what it goes on without."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from massieu.checks import visible

__all__ = ["tell_replaced", "warnings_told"]


def tell_replaced(folder: Path, kind: str, *, quiet: bool = False) -> None:
    """Print which report of the same kind in a folder is replaced, if there is one."""
    from massieu.outputs.folders import replaced

    sentence = None if quiet else replaced(folder, kind)
    if sentence is not None:
        print(visible(sentence), file=sys.stderr)


@contextlib.contextmanager
def warnings_told() -> Iterator[None]:
    """Inside, a warning about checkpoints is one line without the code that gave it."""
    from massieu.engine import CheckpointWarning

    with warnings.catch_warnings():
        usual = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if issubclass(category, CheckpointWarning):
                print(f"massieu: {visible(str(message))}", file=sys.stderr)
            else:
                usual(message, category, *where, **more)

        warnings.showwarning = show
        yield
