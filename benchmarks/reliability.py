"""Failure rates of single trials of claims: every claim in many trials, each judged alone, with fresh seeds.

``python -m benchmarks.reliability --trials 100 --first 700000`` runs trials with the seeds 700000, 700001, ...;
``--verify 0 1 2`` runs exactly the trials of ``massieu verify`` with these seeds. The log is written after every few
trials, so that an interrupted run goes on where it was; trials of experiments whose code or package version changed are
left out and run again. ``--page docs/reliability.md`` writes the table. A trial fails if its verdict is not the one
expected. The exit code is 1 if a claim fails more often than :data:`WANTED`.
"""

from __future__ import annotations

import argparse
import ast
import functools
import hashlib
import inspect
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import massieu
from massieu import claims

LOG = Path(__file__).with_suffix(".jsonl")
WANTED = 0.01
CHUNK = 10
SEEDS = 1000  # trials of ``massieu verify --seed S`` have the seeds 1000 S, 1000 S + 1, ...


def main(arguments: list[str] | None = None) -> int:
    """Run missing trials and print the claims that fail."""
    parser = argparse.ArgumentParser(prog="benchmarks.reliability", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("keys", nargs="*", metavar="KEY", help="claims by key or glob (default: all)")
    parser.add_argument("--trials", type=int, help="trials of each claim (default: 100, or none with --verify)")
    parser.add_argument("--first", type=int, default=700_000, help="seed of the first trial (default: 700000)")
    parser.add_argument("--verify", type=int, nargs="+", default=[], metavar="SEED", help="as massieu verify --seed")
    parser.add_argument("--full", action="store_true", help="sizes as in the papers")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes (default: one per core)")
    parser.add_argument("--log", type=Path, default=LOG, help="where trials are written")
    parser.add_argument("--page", type=Path, help="write the table of all trials in the log there")
    options = parser.parse_args(arguments)
    if options.trials is None:
        options.trials = 0 if options.verify else 100
    options.log.parent.mkdir(parents=True, exist_ok=True)
    for row in fresh(options):
        with options.log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    rows = read(options.log)
    table = summary(rows)
    if options.page is not None:
        options.page.write_text(markdown(table, verified(rows)), encoding="utf-8")
    bad = [row for row in table if row["failed"] > WANTED * row["trials"]]
    for row in bad:
        size = "full" if row["full"] else "quick"
        print(f"{row['key']} ({size}): {row['failed']} of {row['trials']} trials fail: {row['verdicts']}")
    print(f"{len(table) - len(bad)} of {len(table)} rows fail in at most 1 of {1 / WANTED:.0f} trials")
    return int(bool(bad))


def fresh(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Run trials that are not in the log and return a row for each group of trials."""
    done = {(row["key"], seed, row["full"]) for row in read(options.log) for seed in seeds_of(row)}
    parts: list[list[tuple[str, list[int]]]] = []
    together: dict[int, list[tuple[str, list[int]]]] = {}
    for claim in claims.select(options.keys):
        wanted = [range(SEEDS * seed, SEEDS * seed + claim.trials) for seed in options.verify]
        last = options.first + options.trials
        wanted += [range(first, min(first + CHUNK, last)) for first in range(options.first, last, CHUNK)]
        for chunk in wanted:
            left = [seed for seed in chunk if (claim.key, seed, options.full) not in done]
            if left and claim.on_model:  # experiments on a model share what they measured, as in massieu verify
                together.setdefault(left[0], []).append((claim.key, left))
            elif left:
                parts.append([(claim.key, left)])
    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
        jobs = [pool.submit(run, part, options.full) for part in [*together.values(), *parts]]
        for number, job in enumerate(as_completed(jobs), 1):
            yield from job.result()
            print(f"\r{number} of {len(jobs)}", end="", file=sys.stderr, flush=True)


def run(part: Sequence[tuple[str, Sequence[int]]], full: bool) -> list[dict[str, Any]]:
    """Run single trials of some claims and return a row for each claim and range of seeds."""
    import torch

    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for key, seeds in part:
        (claim,) = claims.select([key])
        for seed in seeds:
            started = time.perf_counter()
            try:
                verdict = str(claims.judge(claim.run(claims.Trial(seed, full))))
            except Exception as error:
                verdict = type(error).__name__
            odd = {} if verdict == str(claim.expected) else {str(seed): verdict}
            seconds = time.perf_counter() - started
            if rows and rows[-1]["key"] == key and rows[-1]["first"] + rows[-1]["trials"] == seed:
                row = rows.pop()
                facts = {"trials": row["trials"] + 1, "odd": row["odd"] | odd, "seconds": row["seconds"] + seconds}
                rows.append({**row, **facts})
            else:
                facts = {"first": seed, "trials": 1, "odd": odd, "seconds": seconds}
                rows.append({"key": key, "full": full, "digest": digest(key), **facts})
    return [{**row, "seconds": round(row["seconds"], 2)} for row in rows]


@functools.cache
def digest(key: str) -> str:
    """Return a digest of the code of an experiment's module, without docstrings, and of the package version.

    Empty for a claim that is not there.
    """
    found = [claim for claim in claims.all_claims() if claim.key == key]
    if not found:
        return ""
    tree = ast.parse(Path(inspect.getsourcefile(found[0].run) or "").read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "claim":
            node.keywords = [word for word in node.keywords if word.arg in ("expected", "trials", "on_model")]
        body = getattr(node, "body", None)
        if (
            isinstance(body, list)
            and body
            and isinstance(body[0], ast.Expr)
            and isinstance(body[0].value, ast.Constant)
        ):
            body[0].value.value = ""  # a docstring
    return hashlib.sha256(f"{massieu.__version__}\n{ast.dump(tree)}".encode()).hexdigest()[:12]


def read(log: Path) -> list[dict[str, Any]]:
    """Return the rows of a log with unchanged experiments."""
    rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()] if log.exists() else []
    return [row for row in rows if row["digest"] == digest(row["key"]) != ""]


def seeds_of(row: dict[str, Any]) -> range:
    """Return the seeds of the trials of a row."""
    return range(row["first"], row["first"] + row["trials"])


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return trials and failures by claim and size, in the order of the claims."""
    table = []
    for full in (False, True):
        for claim in claims.all_claims():
            own = [row for row in rows if row["key"] == claim.key and row["full"] == full]
            if own:
                trials = sum(row["trials"] for row in own)
                bad = [verdict for row in own for verdict in row["odd"].values()]
                told = ", ".join(f"{bad.count(each)} {each}" for each in sorted(set(bad)))
                facts = {"key": claim.key, "title": claim.title, "full": full, "trials": trials, "failed": len(bad)}
                table.append({**facts, "verdicts": told, "seconds": sum(row["seconds"] for row in own) / trials})
    return table


def verified(rows: Sequence[dict[str, Any]]) -> dict[bool, dict[int, list[str]]]:
    """Return the claims with a failed trial, by size and seed of massieu verify, for seeds with all trials."""
    found: dict[bool, dict[int, list[str]]] = {False: {}, True: {}}
    for full, seeds in found.items():
        known = {
            (row["key"], seed): row["odd"].get(str(seed))
            for row in rows
            if row["full"] == full
            for seed in seeds_of(row)
        }
        for seed in sorted({trial // SEEDS for _, trial in known}):
            trials = [
                (each.key, SEEDS * seed + number) for each in claims.all_claims() for number in range(each.trials)
            ]
            if all(trial in known for trial in trials):
                seeds[seed] = list(dict.fromkeys(trial[0] for trial in trials if known[trial] is not None))
    return found


def markdown(table: Sequence[dict[str, Any]], seeds: dict[bool, dict[int, list[str]]]) -> str:
    """Return the table as a page of the documentation."""
    from scipy.stats import beta

    lines = [
        "# How often trials of claims fail",
        "",
        "Written by `python -m benchmarks.reliability --page docs/reliability.md`. Every claim in single trials, each"
        " judged alone, with seeds chosen after the experiments were written; `massieu verify` takes the worst of"
        " a few. A trial fails if its verdict is not the expected one. At most: the upper end of a 95 % interval of the"
        " share that fails.",
    ]
    for full, own in seeds.items():
        if own:
            good = sum(not surprising for surprising in own.values())
            odd = "; ".join(f"seed {seed}: {', '.join(keys)}" for seed, keys in own.items() if keys)
            command = f"massieu verify{' --full' if full else ''}"
            lines += [
                "",
                f"`{command}`: every verdict as expected for {good} of {len(own)} seeds{odd and f' ({odd})'}.",
            ]
    for full in (False, True):
        own_rows = [row for row in table if row["full"] == full]
        if own_rows:
            total, failed = (sum(row[name] for row in own_rows) for name in ("trials", "failed"))
            lines += ["", f"## {'Full' if full else 'Quick'} sizes", "", f"{total} trials, {failed} failed.", ""]
            lines += ["| claim | statement | trials | failed | at most | seconds |", "|---|---|---|---|---|---|"]
            for row in own_rows:
                most = float(beta.ppf(0.95, row["failed"] + 1, row["trials"] - row["failed"]))
                counts = f"{row['trials']} | {row['failed']} | {100 * min(most, 1.0):.2g} %"
                title = row["title"].replace("|", "\\|")
                lines.append(f"| {row['key']} | {title} | {counts} | {row['seconds']:.2g} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
