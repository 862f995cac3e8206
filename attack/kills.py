"""Kills of ``massieu inspect`` at any moment: nothing half-written is taken for a result, and a resumed run is exact.

Each case starts the command in a process of its own and ends it by SIGKILL, SIGTERM or SIGINT after a random time or at
one of its renames, which include those of the final publishing. Then the folder must hold the whole old run, the whole
new one or none; the same command with ``--resume`` must give exactly the tables of an uninterrupted run, and
leave nothing behind.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import massieu.cli
from attack.tiny import make_model, make_text

__all__ = ["COUNT", "attack"]

COUNT = 40
LONGEST = 120.0
"""Time limit of a process in seconds."""

PRELOADED = ("attack.kills", "transformers.models.gpt2.modeling_gpt2", "massieu.inspection.merging", "pyarrow.parquet")
"""Modules loaded once, so that a case takes one second instead of ten."""

ENDS = {signal.SIGKILL: {-9}, signal.SIGTERM: {-15, 143}, signal.SIGINT: {-2, 1, 130}}
"""Exit codes of a killed process; 1 is that of an interrupt before the start of the command."""


@dataclass(frozen=True)
class End:
    """Signal or failure that ends a run.

    Attributes:
        signal: by which signal.
        share: after which share of the time that a whole run takes; None for at a rename.
        rename: at which rename, counted from 0.
    """

    signal: signal.Signals
    share: float | None
    rename: int

    def __str__(self) -> str:
        when = f"at rename {self.rename}" if self.share is None else f"after {self.share:.3f} of its time"
        return f"{self.signal.name} {when}"


def attack(seed: int, count: int) -> Iterator[str | None]:
    """Kill runs, check the files that they left, and resume them."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model")
        for text in ("new", "old"):
            make_text(folder / f"{text}.jsonl", text, 48)
        expected, seconds, renames = {}, 0.0, 0
        for text in ("old", "new"):  # the first run loads what the server has not loaded
            begin = time.perf_counter()
            code, log = _run(folder, text, folder / text)
            seconds = time.perf_counter() - begin
            if code:
                raise RuntimeError(f"an uninterrupted run must end with 0, got {code}: {log}")
            expected[text] = _tables(folder / text)
            renames = int((folder / "renames").read_text())
        for number in range(count):
            case = f"{seed}-{number}"
            chance = random.Random(case)
            share = None if chance.random() < 0.5 else chance.random()
            end = End(chance.choice([*ENDS]), share, chance.randrange(renames))
            before = chance.random() < 0.5
            outcome = _case(folder, folder / "out", end, seconds, expected, before=before)
            what = f"{end}{', over an older run' if before else ''}"
            yield None if outcome is None else f"case {case}: {what}: {outcome}"


def _case(folder: Path, out: Path, end: End, seconds: float, expected: dict[str, Any], *, before: bool) -> str | None:
    """Return the failure of a killed and resumed run, or None."""
    shutil.rmtree(out, ignore_errors=True)
    (folder / "checkpoint").unlink(missing_ok=True)
    if before:
        shutil.copytree(folder / "old", out)
    code, log = _run(folder, "new", out, end, seconds)
    if code not in {0, *ENDS[end.signal]} or "defect" in log:
        return f"it ended with {code}: {log[-300:]!r}"
    old = expected["old"] if before else None
    if (found := _tables(out)) not in (old, expected["new"]):
        return f"the folder then held {'no' if found is None else 'another'} run"
    code, log = _run(folder, "new", out)
    if code:
        return f"resumed, it ended with {code}: {log[-300:]!r}"
    if _tables(out) != expected["new"]:
        return "resumed, it gave other numbers"
    return _left(folder, out)


def _left(folder: Path, out: Path) -> str | None:
    """Return leftover files of a finished run, in words, or None."""
    names = {path.relative_to(out).as_posix() for path in out.rglob("*")}
    odd = sorted(names ^ {path.relative_to(folder / "new").as_posix() for path in (folder / "new").rglob("*")})
    odd += sorted(path.name for path in folder.iterdir() if "checkpoint" in path.name)
    return f"the finished run left or lost {', '.join(odd)}" if odd else None


def _tables(out: Path) -> Any:
    """Return all values of a published run, from its two files; None without a run."""
    from massieu.checks import UserError
    from massieu.inspection import read_inspection
    from massieu.inspection.partial_files import load_partial

    try:
        found = read_inspection(out).to_dict()
    except UserError as error:
        return None if "cannot be read" in str(error) else str(error)
    if load_partial(out).heads.table().to_dict("list")["rows"] != [row["rows"] for row in found["heads"]]:
        return "the tables of one run beside the sums of another"
    for name in ("seconds", "peak_memory_mb", "options"):
        found["facts"].pop(name)
    return json.dumps(found, sort_keys=True)


def _run(folder: Path, text: str, out: Path, end: End | None = None, seconds: float = 0.0) -> tuple[int, str]:
    """Return exit code and output of one run, which is killed if an end is given."""
    multiprocessing.set_forkserver_preload([*PRELOADED])
    context = multiprocessing.get_context("forkserver")
    log = folder / "log"
    log.write_text("")
    process = context.Process(target=_inspect, args=(folder, text, out, end))
    process.start()
    assert process.pid is not None
    if end is not None and end.share is not None:
        process.join(end.share * seconds)
        if process.is_alive():
            os.kill(process.pid, end.signal)
    process.join(LONGEST)
    if process.is_alive():
        process.kill()
        process.join()
        return -1, "it did not end"
    return process.exitcode or 0, log.read_text(errors="replace")


def _inspect(folder: Path, text: str, out: Path, end: End | None) -> None:
    """Run the command in this child process."""
    output = os.open(folder / "log", os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    import torch

    from massieu import figures

    torch.set_num_threads(1)
    replace, done = os.replace, 0

    def counted(source: Any, target: Any) -> None:
        nonlocal done
        if end is not None and end.share is None and done == end.rename:
            os.kill(os.getpid(), end.signal)
        done += 1
        replace(source, target)

    command = ["inspect", str(folder / "model"), "--text", str(folder / f"{text}.jsonl"), "--out", str(out)]
    command += ["--checkpoint", str(folder / "checkpoint"), "--checkpoint-every", "0", "--resume"]
    command += ["--split-bytes", "600", "--partial", "-q"]
    # Drawing takes most of the time, so that it is left out.
    with patch.object(os, "replace", counted), patch.object(figures, "save_figures", _stub_figures):
        code = massieu.cli.main(command)
    if end is None:
        (folder / "renames").write_text(str(done))
    sys.exit(code)


def _stub_figures(heads: Any, layers: Any, quantities: Any, folder: Path) -> None:
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.svg").write_text(str(heads["entropy"].sum()))
