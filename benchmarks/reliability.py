"""Failure rates of single trials of claims: every claim in many trials, each judged alone, with fresh seeds.

``python -m benchmarks.reliability --trials 100 --first 700000`` runs trials with the seeds 700000, 700001, ... and
writes a line for each to build/reliability.jsonl, so that an interrupted run goes on where it was; ``--page
docs/reliability.md`` writes the table. A trial fails if its verdict is not the expected one. The exit code is 1 if a
claim fails more often than :data:`WANTED`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

WANTED = 0.01
CHUNK = 10


def main(arguments: list[str] | None = None) -> int:
    """Run the trials that are missing and print the claims that fail."""
    parser = argparse.ArgumentParser(prog="benchmarks.reliability", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("keys", nargs="*", metavar="KEY", help="claims by key or glob (default: all)")
    parser.add_argument("--trials", type=int, default=100, help="trials of each claim (default: 100)")
    parser.add_argument("--first", type=int, default=700_000, help="seed of the first trial (default: 700000)")
    parser.add_argument("--full", action="store_true", help="sizes as in the papers")
    parser.add_argument("--budget", type=float, default=600.0, help="seconds for each claim at most (default: 600)")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes (default: one per core)")
    parser.add_argument("--log", type=Path, default=Path("build/reliability.jsonl"), help="where trials are written")
    parser.add_argument("--page", type=Path, help="write the table of all trials in the log there")
    options = parser.parse_args(arguments)
    options.log.parent.mkdir(parents=True, exist_ok=True)
    for row in fresh(options):
        with options.log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    table = summary(read(options.log))
    if options.page is not None:
        options.page.write_text(markdown(table), encoding="utf-8")
    bad = [row for row in table if row["failed"] > WANTED * row["trials"]]
    for row in bad:
        size = "full" if row["full"] else "quick"
        print(f"{row['key']} ({size}): {row['failed']} of {row['trials']} trials fail: {row['verdicts']}")
    print(f"{len(table) - len(bad)} of {len(table)} rows fail in at most 1 of {1 / WANTED:.0f} trials")
    return int(bool(bad))


def fresh(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Run what the log does not hold yet."""
    from massieu.claims import select

    done = {(row["key"], row["seed"], row["full"]) for row in read(options.log)}
    wanted = range(options.first, options.first + options.trials)
    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
        jobs = []
        for claim in select(options.keys):
            seeds = [seed for seed in wanted if (claim.key, seed, options.full) not in done]
            chunks = [seeds[start : start + CHUNK] for start in range(0, len(seeds), CHUNK)]
            budget = options.budget / max(len(chunks), 1)
            jobs += [pool.submit(run, claim.key, chunk, options.full, budget) for chunk in chunks]
        for number, job in enumerate(as_completed(jobs), 1):
            yield from job.result()
            print(f"\r{number} of {len(jobs)}", end="", file=sys.stderr, flush=True)


def run(key: str, seeds: Sequence[int], full: bool, budget: float) -> list[dict[str, Any]]:
    """Trials of one claim, each judged alone, until the budget is spent."""
    import torch

    from massieu.claims import Trial, judge, select

    torch.set_num_threads(1)
    (claim,) = select([key])
    begin, rows = time.perf_counter(), []
    for seed in seeds:
        started = time.perf_counter()
        try:
            verdict = str(judge(claim.run(Trial(seed, full))))
        except Exception as error:
            verdict = type(error).__name__
        failed = verdict != str(claim.expected)
        seconds = round(time.perf_counter() - started, 3)
        rows.append({"key": key, "seed": seed, "full": full, "verdict": verdict, "failed": failed, "seconds": seconds})
        if time.perf_counter() - begin > budget:
            break
    return rows


def read(log: Path) -> list[dict[str, Any]]:
    """The trials of a log."""
    return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()] if log.exists() else []


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Trials and failures by claim and size, in the order of the claims."""
    from massieu.claims import all_claims

    table = []
    for full in (False, True):
        for claim in all_claims():
            own = [row for row in rows if row["key"] == claim.key and row["full"] == full]
            if own:
                bad = [row["verdict"] for row in own if row["failed"]]
                seconds = sum(row["seconds"] for row in own) / len(own)
                facts = {"key": claim.key, "title": claim.title, "full": full, "trials": len(own)}
                told = ", ".join(f"{bad.count(each)} {each}" for each in sorted(set(bad)))
                table.append({**facts, "failed": len(bad), "verdicts": told, "seconds": seconds})
    return table


def markdown(table: Sequence[dict[str, Any]]) -> str:
    """The table as a page of the documentation."""
    from scipy.stats import beta

    lines = [
        "# How often trials of claims fail",
        "",
        "Written by `python -m benchmarks.reliability --page docs/reliability.md`. Every claim in single trials, each"
        " judged alone, with seeds chosen after the experiments were written; `massieu verify` takes the worst of"
        " a few. A trial fails if its verdict is not the expected one. At most: the upper end of a 95 % interval of the"
        " share that fails.",
    ]
    for full in (False, True):
        own = [row for row in table if row["full"] == full]
        if own:
            total, failed = (sum(row[name] for row in own) for name in ("trials", "failed"))
            lines += ["", f"## {'Full' if full else 'Quick'} sizes", "", f"{total} trials, {failed} failed.", ""]
            lines += ["| claim | statement | trials | failed | at most | seconds |", "|---|---|---|---|---|---|"]
            for row in own:
                most = float(beta.ppf(0.95, row["failed"] + 1, row["trials"] - row["failed"]))
                counts = f"{row['trials']} | {row['failed']} | {100 * min(most, 1.0):.2g} %"
                title = row["title"].replace("|", "\\|")
                lines.append(f"| {row['key']} | {title} | {counts} | {row['seconds']:.2g} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
