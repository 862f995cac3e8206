"""``massieu compare``: show two or more inspections side by side."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from massieu.checks import UserError, visible
from massieu.commands import REPORT_PACKAGES, Command, check_packages
from massieu.commands.arguments import path
from massieu.commands.notices import check_output

__all__ = ["add", "run"]


def add(command: Command) -> None:
    """Declare the arguments."""
    parser = command("compare", run, "show two or more inspections side by side")
    parser.add_argument("runs", nargs="+", type=path, metavar="RUN", help="folder that massieu inspect --out wrote")
    parser.add_argument(
        "--out", type=path, metavar="DIR", help="write the page and the tables there (default: nowhere)"
    )


def run(options: argparse.Namespace) -> int:
    """Show inspections side by side."""
    check_packages("pandas", "rich", *(REPORT_PACKAGES if options.out else ()))
    from massieu.inspection import comparison, result

    if len(options.runs) < 2:
        raise UserError(f"compare needs at least two inspections, got {len(options.runs)}; name another folder")
    inspections = [result.read_inspection(run) for run in options.runs]
    for run, inspection in zip(options.runs, inspections, strict=True):
        inspection.facts["run"] = Path(run).resolve().name
    compared = comparison.compare_runs(inspections)
    if options.out:
        check_output(options.out, "comparison")
        page = comparison.save_comparison(inspections, compared, Path(options.out))
    if options.json:
        tables = {"means": comparison.compare_means(compared), "heads": comparison.compare_heads(inspections)}
        found = {name: result.records(table) for name, table in tables.items()}
        print(json.dumps({**found, "notes": compared.reservations}))
        return 0
    from massieu.report.terminal import show_comparison, terminal

    show_comparison(compared.runs, terminal())
    print(f"page: {visible(str(page))}" if options.out else "pass --out DIR for the page and the tables")
    return 0
