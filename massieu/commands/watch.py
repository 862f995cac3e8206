"""``massieu watch``: show the log of a watched training run while it grows."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from massieu.checks import visible
from massieu.commands import Command, check_packages
from massieu.commands.arguments import path

__all__ = ["add", "run"]


def add(command: Command) -> None:
    """Declare the arguments."""
    parser = command("watch", run, "show the log of a watched training run while it grows")
    parser.add_argument(
        "log", type=path, metavar="LOG", help="the .jsonl or .csv file that massieu.watch(log=...) writes"
    )
    parser.add_argument("--once", action="store_true", help="show it as it is now, and end")
    parser.add_argument(
        "--html",
        type=path,
        metavar="PAGE",
        help="write a page with charts of every quantity there, and end (default: the terminal)",
    )


def run(options: argparse.Namespace) -> int:
    """Show the log of a training run, once or while it grows."""
    check_packages("rich", "jinja2")
    from massieu.monitor.logs import Log, read_log
    from massieu.report import watch_terminal
    from massieu.report.terminal import terminal
    from massieu.report.watch_page import save_watch

    console = terminal()
    if console.is_terminal and not (options.once or options.html or options.json):
        live = Log(options.log)
        live.update()
        if live.steps or not live.broken:
            watch_terminal.follow(live, console)
            return 0
    log = read_log(options.log)
    if options.html:
        save_watch(log.to_dict(), Path(options.html))
    if options.json:
        print(json.dumps(log.to_dict(), allow_nan=False))
    elif options.html:
        print(f"page: {visible(options.html)}")
    else:
        console.print(watch_terminal.terminal_view(log.to_dict(), width=console.width))
    return 0
