"""``massieu merge``: one inspection of all the texts that several have read."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from massieu.checks import UserError, visible
from massieu.commands import Command
from massieu.commands.arguments import add_loading, loading, path
from massieu.commands.packages import REPORT, need
from massieu.commands.stderr import tell_replaced

__all__ = ["add", "run"]


def add(command: Command) -> None:
    """Declare the arguments."""
    parser = command("merge", run, "merge inspections of different texts into one, as if all had been read at once")
    parser.add_argument("runs", nargs="+", type=path, metavar="RUN", help="folder that massieu inspect --out wrote")
    parser.add_argument(
        "--out", type=path, metavar="DIR", help="write report.html, tables, JSON and figures there (default: nowhere)"
    )
    parser.add_argument(
        "--model",
        type=path,
        metavar="MODEL",
        help="model of the runs; one that only the runs name is not loaded (default: the embedded model)",
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="no table")
    add_loading(parser)


def run(options: argparse.Namespace) -> int:
    """Merge inspections, write and print what they say together."""
    need("transformers", "pandas", "rich", *(REPORT if options.out else ()))
    from massieu.inspection import merging, result

    if options.out:
        runs = [Path(os.path.realpath(run)) for run in options.runs]  # Path.resolve raises at a loop of links
        if Path(os.path.realpath(options.out)) in (run.parent if run.is_file() else run for run in runs):
            raise UserError(f"--out must be another folder than those of the runs, got {options.out}; name a new one")
        result.check_writable(Path(options.out))
        tell_replaced(Path(options.out), "inspection", quiet=options.quiet)
    found = merging.merge_runs(options.runs, model=options.model, **loading(options))
    report = found.save(options.out, partial=True) if options.out else None
    if options.json:
        print(json.dumps(found.to_dict(), allow_nan=False))
        return 0
    if not options.quiet:
        from massieu.report.terminal import show_inspection, terminal

        show_inspection(found.to_dict(), terminal())
    if report is not None:
        print(f"report: {visible(str(report))}")
    elif not options.quiet:
        print("pass --out DIR for the report, the tables and the figures")
    return 0
