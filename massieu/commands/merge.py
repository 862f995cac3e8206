"""``massieu merge``: merge inspections of different texts into one."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from massieu.checks import UserError, visible
from massieu.commands import REPORT_PACKAGES, Command, check_packages
from massieu.commands.arguments import add_loading, add_results, loading, path
from massieu.commands.notices import check_output

__all__ = ["add", "run"]


def add(command: Command) -> None:
    """Declare the arguments."""
    parser = command(
        "merge", run, "merge inspections of different texts into one, as if the texts had been read together"
    )
    parser.add_argument("runs", nargs="+", type=path, metavar="RUN", help="folder that massieu inspect --out wrote")
    add_results(parser, "report.html, tables, JSON and figures", quiet="no table")
    parser.add_argument(
        "--model",
        type=path,
        metavar="MODEL",
        help="model of the runs; a model named only by the runs is not loaded (default: the embedded model)",
    )
    add_loading(parser)


def run(options: argparse.Namespace) -> int:
    """Merge inspections; write and print the result."""
    check_packages("transformers", "pandas", "rich", *(REPORT_PACKAGES if options.out else ()))
    from massieu.inspection import merging

    if options.out:
        runs = [Path(os.path.realpath(run)) for run in options.runs]  # Path.resolve raises at a loop of links
        if Path(os.path.realpath(options.out)) in (run.parent if run.is_file() else run for run in runs):
            raise UserError(f"--out must be another folder than those of the runs, got {options.out}; name a new one")
        check_output(options.out, "inspection", quiet=options.quiet)
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
