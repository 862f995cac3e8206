"""Time of ``massieu inspect`` on a quiet machine and beside processes that keep all cores busy.

``python -m benchmarks.busy`` measures how threads of OpenMP wait for each other: those that spin where a loop ends take
the processor from each other and from other programs. The command line chooses how long they spin
(``massieu.cli.SPINS``); the other rows are what it could have chosen instead. The exit code is 1 if the
choice takes more than :data:`WANTED` times its quiet time.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping

WANTED = 4.0
SETTINGS: dict[str, dict[str, str]] = {
    "chosen": {},
    "spinning, as libgomp does by itself": {"GOMP_SPINCOUNT": "300000"},
    "sleeping at once": {"OMP_WAIT_POLICY": "PASSIVE"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
DECIDES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "KMP_BLOCKTIME")
COMMAND = (sys.executable, "-m", "massieu", "inspect", "-q")
BUSY = (sys.executable, "-c", "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass")


def main(arguments: list[str] | None = None) -> int:
    """Print a table of the measurements."""
    parser = argparse.ArgumentParser(prog="benchmarks.busy", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each, of which the median counts")
    parser.add_argument("--only", choices=list(SETTINGS), help="one setting (default: all)")
    options = parser.parse_args(arguments)
    names = [options.only] if options.only else list(SETTINGS)
    quiet: dict[str, list[float]] = {name: [] for name in names}
    busy: dict[str, list[float]] = {name: [] for name in names}
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before the first measurement", flush=True)
    for _ in range(options.rounds):  # in turns, so that other load affects all of them
        for name in names:
            quiet[name].append(seconds(SETTINGS[name]))
            with all_cores_busy():
                busy[name].append(seconds(SETTINGS[name]))
            print(f"{name}: {quiet[name][-1]:.1f} s quiet, {busy[name][-1]:.1f} s busy", file=sys.stderr, flush=True)
    print(f"{'threads':<36} {'quiet':>8} {'busy':>8} {'ratio':>6}")
    ratios = {}
    for name in names:
        alone, beside = statistics.median(quiet[name]), statistics.median(busy[name])
        ratios[name] = beside / alone
        print(f"{name:<36} {alone:>6.1f} s {beside:>6.1f} s {ratios[name]:>6.2f}")
    return int(ratios.get("chosen", 0.0) > WANTED)


def seconds(setting: Mapping[str, str]) -> float:
    """Return the wall time of one inspection of the embedded model."""
    environment = {name: value for name, value in os.environ.items() if name not in DECIDES} | dict(setting)
    begin = time.perf_counter()
    subprocess.run(COMMAND, env=environment, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin


@contextlib.contextmanager
def all_cores_busy() -> Iterator[None]:
    """Keep all cores busy with one process for each."""
    running = [subprocess.Popen(BUSY) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


if __name__ == "__main__":
    sys.exit(main())
