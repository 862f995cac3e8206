"""Failure rates of single trials of claims: every claim in many trials, each judged alone, with fresh seeds.

``python -m benchmarks.reliability --trials 100 --first 700000`` runs trials with the seeds 700000, 700001, ...;
``--verify 0 1 2`` runs exactly the trials of ``massieu verify`` with these seeds. Each trial is a line of
build/reliability.jsonl, so that an interrupted run goes on where it was; trials of experiments whose module or package
version changed since are left out and run again. ``--page docs/reliability.md`` writes the table. A trial fails if its
verdict is not the expected one. The exit code is 1 if a claim fails more often than :data:`WANTED`.
"""

from __future__ import annotations

import argparse
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

WANTED = 0.01
CHUNK = 10
SEEDS = 1000  # trials of ``massieu verify --seed S`` have the seeds 1000 S, 1000 S + 1, ...


def main(arguments: list[str] | None = None) -> int:
    """Run the trials that are missing and print the claims that fail."""
    parser = argparse.ArgumentParser(prog="benchmarks.reliability", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("keys", nargs="*", metavar="KEY", help="claims by key or glob (default: all)")
    parser.add_argument("--trials", type=int, help="trials of each claim (default: 100, or none with --verify)")
    parser.add_argument("--first", type=int, default=700_000, help="seed of the first trial (default: 700000)")
    parser.add_argument("--verify", type=int, nargs="+", default=[], metavar="SEED", help="as massieu verify --seed")
    parser.add_argument("--full", action="store_true", help="sizes as in the papers")
    parser.add_argument("--budget", type=float, default=600.0, help="seconds for each claim at most (default: 600)")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes (default: one per core)")
    parser.add_argument("--log", type=Path, default=Path("build/reliability.jsonl"), help="where trials are written")
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
    """Run what the log does not hold yet."""
    done = {(row["key"], row["seed"], row["full"]) for row in read(options.log)}
    parts: list[list[tuple[str, int]]] = []
    together: dict[int, list[tuple[str, int]]] = {}
    share: dict[str, float] = {}  # seconds of the budget for each trial
    for claim in claims.select(options.keys):
        seeds = [SEEDS * seed + number for seed in options.verify for number in range(claim.trials)]
        seeds = list(dict.fromkeys([*seeds, *range(options.first, options.first + options.trials)]))
        left = [(claim.key, seed) for seed in seeds if (claim.key, seed, options.full) not in done]
        share[claim.key] = options.budget / max(len(left), 1)
        if claim.on_model:  # experiments on a model share what they measured, as in massieu verify
            for trial in left:
                together.setdefault(trial[1], []).append(trial)
        else:
            parts += [left[start : start + CHUNK] for start in range(0, len(left), CHUNK)]
    parts = [*together.values(), *parts]
    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
        jobs = [pool.submit(run, part, options.full, sum(share[key] for key, _ in part)) for part in parts]
        for number, job in enumerate(as_completed(jobs), 1):
            yield from job.result()
            print(f"\r{number} of {len(jobs)}", end="", file=sys.stderr, flush=True)


def run(trials: Sequence[tuple[str, int]], full: bool, budget: float) -> list[dict[str, Any]]:
    """Trials, each a key and a seed, one after the other and judged alone, until the budget is spent."""
    import torch

    torch.set_num_threads(1)
    begin, rows = time.perf_counter(), []
    for key, seed in trials:
        (claim,) = claims.select([key])
        started, gaps = time.perf_counter(), None
        try:
            evidence = claim.run(claims.Trial(seed, full))
            verdict, gaps = str(claims.judge(evidence)), {name: list(gap) for name, gap in evidence.gaps.items()}
        except Exception as error:
            verdict = type(error).__name__
        facts = {"verdict": verdict, "failed": verdict != str(claim.expected), "gaps": gaps}
        seconds = round(time.perf_counter() - started, 3)
        rows.append({"key": key, "seed": seed, "full": full, **facts, "seconds": seconds, "digest": digest(key)})
        if time.perf_counter() - begin > budget:
            break
    return rows


@functools.cache
def digest(key: str) -> str:
    """Of the module of an experiment and the version of the package; empty for a claim that is not there."""
    found = [claim for claim in claims.all_claims() if claim.key == key]
    if not found:
        return ""
    text = Path(inspect.getsourcefile(found[0].run) or "").read_text(encoding="utf-8")
    return hashlib.sha256(f"{massieu.__version__}\n{text}".encode()).hexdigest()[:12]


def read(log: Path) -> list[dict[str, Any]]:
    """The trials of a log whose experiments are still the same."""
    rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()] if log.exists() else []
    return [row for row in rows if row.get("digest") and row["digest"] == digest(row["key"])]


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Trials and failures by claim and size, in the order of the claims."""
    table = []
    for full in (False, True):
        for claim in claims.all_claims():
            own = [row for row in rows if row["key"] == claim.key and row["full"] == full]
            if own:
                bad = [row["verdict"] for row in own if row["failed"]]
                seconds = sum(row["seconds"] for row in own) / len(own)
                facts = {"key": claim.key, "title": claim.title, "full": full, "trials": len(own)}
                told = ", ".join(f"{bad.count(each)} {each}" for each in sorted(set(bad)))
                table.append({**facts, "failed": len(bad), "verdicts": told, "seconds": seconds})
    return table


def verified(rows: Sequence[dict[str, Any]]) -> dict[bool, dict[int, list[str]]]:
    """The claims that surprise in massieu verify, by size and seed, for seeds of which the log has all trials.

    Of each claim the worst of its trials counts, which may be as expected where a single trial is not.
    """
    known = {(row["key"], row["seed"], row["full"]): row["gaps"] for row in rows}
    found: dict[bool, dict[int, list[str]]] = {False: {}, True: {}}
    for full, seeds in found.items():
        for seed in sorted({row["seed"] // SEEDS for row in rows if row["full"] == full}):
            trials = {
                claim: [(claim.key, SEEDS * seed + number, full) for number in range(claim.trials)]
                for claim in claims.all_claims()
            }
            if all(trial in known for each in trials.values() for trial in each):
                surprising = (claim for claim, own in trials.items() if surprises(claim, [known[each] for each in own]))
                seeds[seed] = [claim.key for claim in surprising]
    return found


def surprises(claim: claims.Claim, gaps: Sequence[dict[str, list[float]] | None]) -> bool:
    """Whether the worst of these trials gives another verdict than the expected one; None is a trial that raised."""
    whole = [each for each in gaps if each is not None]
    if len(whole) < len(gaps):
        return claim.expected is not claims.Verdict.UNDECIDED
    named: list[dict[str, Any]] = [{name: claims.Gap(*gap) for name, gap in each.items()} for each in whole]
    return claims.judge(claims.worst(claims.Evidence(**each) for each in named)) is not claim.expected


def markdown(table: Sequence[dict[str, Any]], seeds: dict[bool, dict[int, list[str]]]) -> str:
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
