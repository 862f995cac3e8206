"""Lines on the console of a training: flags when they are first raised, and the path of the log."""

from __future__ import annotations

import os
import sys

from torch import distributed as dist

from massieu.checks import visible
from massieu.monitor.display import flag_places
from massieu.monitor.reading import Flag, Reading

__all__ = ["Console"]


class Console:
    """Printer to stderr, in the main process only, that keeps progress bars of tqdm intact and never raises.

    Args:
        enabled: whether to print at all.

    Example:
        >>> Console(False).print("nothing")
    """

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._shown: set[tuple[str, str, int, int | None]] = set()

    def show(self, reading: Reading) -> None:
        """Print the newly raised flags: a line for each name, with its reason the first time."""
        known = {name for name, *_ in self._shown}
        fresh = [flag for flag in reading.flags if flag.state == "raised" and _place(flag) not in self._shown]
        self._shown |= {_place(flag) for flag in fresh}
        for name in dict.fromkeys(flag.name for flag in fresh):
            own = [flag for flag in fresh if flag.name == name]
            reason = "" if name in known else f": {own[0].reason}"
            self.print(f"step {reading.step}: ", name, f" in {flag_places(own, reading)}{reason}")

    def print(self, before: str, bold: str = "", after: str = "") -> None:
        """Print one line, its middle in red where colors are shown."""
        if not self._enabled or not _is_main_process():
            return
        try:
            _write(_styled(visible(f"massieu: {before}"), visible(bold), visible(after)))
        except Exception:  # a closed terminal does not end a training
            return


def _place(flag: Flag) -> tuple[str, str, int, int | None]:
    return flag.name, flag.stack, flag.layer, flag.head


def _is_main_process() -> bool:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    return os.environ.get("RANK", "0") == "0"  # set by torchrun, before the process group exists


def _styled(before: str, bold: str, after: str) -> str:
    try:
        from rich.console import Console as RichConsole
        from rich.text import Text
    except ImportError:
        return f"{before}{bold}{after}"
    console = RichConsole(file=sys.stderr, force_jupyter=False)
    with console.capture() as captured:
        console.print(Text.assemble(before, (bold, "bold red"), after), soft_wrap=True, end="")
    return captured.get()


def _write(line: str) -> None:
    bars = getattr(sys.modules.get("tqdm.std"), "tqdm", None)
    if bars is not None and getattr(bars, "_instances", None):
        bars.write(line, file=sys.stderr)
    else:
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
