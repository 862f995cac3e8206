"""Tell on stderr what a command replaces."""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["tell_replaced"]


def tell_replaced(folder: Path, kind: str, *, quiet: bool = False) -> None:
    """Print which report of the same kind in a folder is replaced, if there is one."""
    from massieu.inspection.publishing import replaced

    sentence = None if quiet else replaced(folder, kind)
    if sentence is not None:
        print(sentence, file=sys.stderr)
