"""Attacks on the library and its commands: random and hostile input, kills, damaged files.

Each module of :data:`NAMES` has ``COUNT``, the number of cases of a full run, and ``attack(seed, count)``, which yields
None for every case that passed, and for every case that failed a sentence on how to reproduce it. A case is determined
by the seed and its number.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Sequence

__all__ = ["NAMES", "main"]

NAMES = ("kernels", "parts", "flips", "folders", "texts", "kills", "invocations")


def main(names: Sequence[str], *, seed: int = 0, share: float = 1.0) -> int:
    """Run the named attacks, print the failures, and return the exit code: 1 if there are any."""
    broken = 0
    for name in names or NAMES:
        module = importlib.import_module(f"attack.{name}")
        count = max(1, round(module.COUNT * share))
        begin, found, done = time.perf_counter(), 0, 0
        for outcome in module.attack(seed, count):
            done += 1
            if outcome is not None:
                found += 1
                print(f"{name}: {outcome}", flush=True)
            if sys.stderr.isatty():
                print(f"\r{name}: {done:,} of {count:,}", end="\r", file=sys.stderr, flush=True)
        print(f"{name}: {done:,} cases, {found} broken, {time.perf_counter() - begin:.0f} s", flush=True)
        if done < count:
            print(f"{name}: expected {count:,} cases, ran {done:,}", flush=True)
            found += 1
        broken += found
    return 1 if broken else 0
