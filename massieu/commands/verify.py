"""``massieu verify``: test every statement of the sources by an experiment with a control."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from massieu.checks import UserError, visible
from massieu.commands import Command, check_packages
from massieu.commands.arguments import add_engine, add_results, engine, path, positive, seed
from massieu.commands.notices import check_output
from massieu.outputs.progress import command_progress

__all__ = ["add", "run"]


def add(command: Command) -> None:
    """Declare the arguments."""
    parser = command("verify", run, "test every statement of the sources by an experiment with a control")
    parser.add_argument(
        "keys", nargs="*", metavar="KEY", help="claims by key or glob, such as C14 or 'X*' (default: all)"
    )
    parser.add_argument("--list", action="store_true", help="show the claims and run nothing")
    parser.add_argument("--full", action="store_true", help="sizes as in the papers: minutes instead of a minute")
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="seed of all random choices (default: 0)")
    parser.add_argument(
        "--model",
        type=path,
        metavar="MODEL",
        help="model of experiments on a trained model (default: the embedded one)",
    )
    parser.add_argument("--workers", type=positive, metavar="N", help="processes (default: one per core)")
    add_engine(parser)
    add_results(parser, "a page with figures and code, and JSON,")


def run(options: argparse.Namespace) -> int:
    """Run claims; write and print their verdicts; return 1 if one differs from the expected verdict."""
    check_packages("transformers", "pandas", "rich", "scipy", extra="verify")
    from massieu import claims

    chosen = claims.select(options.keys)
    if options.list and options.out:
        raise UserError(f"--list runs nothing, so nothing can be written to {options.out}; leave out --list or --out")
    if options.list:
        return _list_claims(chosen, options.json)
    notes: list[str] = []
    if options.model is not None and any(claim.on_model for claim in chosen):
        from massieu.models.loading import load

        notes = load(options.model).notes  # report a bad model before any work
    if options.out:
        check_output(options.out, "verification", quiet=options.quiet)
    begin = time.perf_counter()
    choices = {"seed": options.seed, "full": options.full, "model": options.model}
    with contextlib.ExitStack() as stack:
        where = None
        if options.engine == "dask" or options.address or options.scheduler_file:
            where = stack.enter_context(contextlib.closing(engine(options, options.workers)))
        progress = stack.enter_context(command_progress(options.quiet or options.json, first="starting"))
        found = claims.verify(chosen, **choices, workers=options.workers, engine=where, progress=progress)
    facts = {"seconds": round(time.perf_counter() - begin, 1), **choices, "notes": " ".join(notes) or None}
    page = None
    if options.out:
        from massieu.claims import publication

        page = publication.save(found, Path(options.out), facts)
    if options.json:
        print(json.dumps({"facts": facts, "claims": [each.to_dict() for each in found]}, allow_nan=False))
    elif not options.quiet:
        from massieu.report.terminal import show_verdicts, terminal

        show_verdicts([_verdict_row(each) for each in found], facts["seconds"], terminal())
        for note in notes:
            print(visible(note))
    if page is not None and not options.json:
        print(f"page: {visible(str(page))}")
    from massieu.report.verdicts import outcome

    for each in found:
        if each.surprises or each.reason:
            reason = f" ({each.reason})" if each.reason else ""
            verdict = outcome(each.verdict, each.expected)
            print(f"massieu: {each.claim.key} {verdict}{visible(reason)}", file=sys.stderr)
    return 1 if any(each.surprises for each in found) else 0


def _verdict_row(found: Any) -> dict[str, Any]:
    decisive, evidence = found.decisive, found.evidence
    return {
        "claim": found.claim.key,
        "statement": found.claim.title,
        "verdict": str(found.verdict),
        "expected": None if found.expected is None else str(found.expected),
        "measured": None if decisive is None else decisive.share,
        "control": None if evidence is None else evidence.gaps["control"].share,
        "seconds": found.seconds,
    }


def _list_claims(chosen: Sequence[Any], as_json: bool) -> int:
    names = ("key", "expected", "source", "place", "title", "wording", "reading", "reference")
    rows = [{name: str(getattr(each, name)) for name in names} for each in chosen]
    if as_json:
        print(json.dumps({"claims": rows}))
        return 0
    from massieu.report.terminal import show_claims, terminal

    show_claims(rows, terminal())
    return 0
