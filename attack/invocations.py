"""Bad invocations of every command: options, values, paths and environments.

A case breaks if it shows a traceback, calls a mistake of the user a defect, says more than one sentence about it,
prints control characters, ends with success but without the files it promised, or leaves files after a failure.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from attack.children import is_control
from massieu import assets, cli

__all__ = ["COUNT", "attack"]

COUNT = 260
EVERY = 20  # one case in twenty runs in a child process
PATIENCE = 60  # seconds for one case
NUMBERS = ("0", "-1", "1.5", "nan", "inf", "-inf", "1e300", "1e999", "x", "", " 3", "0x10", "١", "1" * 5000, "9" * 30)
SMALL = ("1", "2", "3", "7")
WORDS = ("", " ", "x", "\x1b[2J", "a\nb", "[bold]x[/]", "=cmd|' /C calc'!A0", "💥", "a" * 300, "../..", "%s%n", "a\0b")
CONDITIONS = (
    *("entropy", "entropy<", "entropi<1", "entropy<nan", "head_class>2", "median(entropy) < 1", "share(entropy) > 1"),
    *("median(entropy by layer < 1", "max(expansion) > 1", "entropy<0.1;rm", "\x1b[2J<1", "layer>0", "rows<1e9"),
)
NOWHERE = (
    "",
    " ",
    "~nosuchuser/x",
    "a\0b",
    "a\udcff",
    "a" * 300,
    "\x1b[2J",
    "a\nb",
    "/dev/null",
    "/dev/null/x",
    "/proc/x",
)
PLACES = ("out", "deep/er/out", "there", "file.txt", "file.txt/out", "loop", "dangling", "closed/out", ".")
TEXTS = (
    "file.txt",
    "empty.txt",
    "binary.txt",
    "bad.jsonl",
    "bad.csv",
    "bad.parquet",
    "bad.txt.gz",
    "none.txt",
    "*.none",
)
MODELS = ("", "none/none", "file.txt", "there", "texts", "headless", "nested", "weightless", ".", "torch", "~")
RUNS = (
    "there",
    "none",
    "file.txt",
    "run-empty",
    "run-list",
    "run-cut",
    "run-nan",
    "run-deep",
    "run-part",
    "texts",
    ".",
)
LOGS = ("log.jsonl", "log.csv", "none.csv", "file.txt", "log-cut.jsonl", "log-step.jsonl", "log-binary.csv", "texts")
ENVIRONMENTS: tuple[dict[str, str], ...] = (
    {},
    {"MASSIEU_KERNEL": "typo"},
    {"PYTHONIOENCODING": "ascii", "COLUMNS": "0"},
    {"LC_ALL": "C", "TERM": "dumb", "COLUMNS": "-7"},
    {"HOME": "/none", "TMPDIR": "/none"},
    {"OMP_NUM_THREADS": "7", "OMP_WAIT_POLICY": "ACTIVE"},
    {"HF_HOME": "/dev/null", "NO_COLOR": "1"},
)
PROMISED = {
    "inspect": ("report.html", "inspection.json", "heads.csv"),
    "merge": ("report.html", "inspection.json", "partial.safetensors"),
    "compare": ("comparison.html",),
    "learn": ("learned.html", "learned.json", "history.csv"),
    "verify": ("claims.html",),
}
QUICK = {
    "inspect": ["--heads-only", "--limit", "2"],
    "learn": ["--steps", "2", "--fitted", "0", "--dim", "2", "--examples", "3"],
    "verify": ["--list"],
    "bench": ["no-such-benchmark"],
    "watch": ["--once"],
}
"""Options that keep a valid command short."""

LISTED: tuple[tuple[str, ...], ...] = (
    (),
    ("--version",),
    ("--help",),
    ("inspect", "--txt", "file.txt"),
    ("inspect", "-q", "--out", ""),
    ("inspect", "~nosuchuser/model"),
    ("inspect", "a" * 300),
    ("inspect", "--device", "meta", "--heads-only", "--limit", "2"),
    ("inspect", "headless", "--heads-only"),
    ("inspect", "nested", "--heads-only"),
    ("inspect", "--text", "file.txt", "--checkpoint", "file.txt", "--heads-only"),
    ("inspect", "--heads-only", "--limit", "2", "--out", "out", "--checkpoint", "out"),
    (
        "inspect",
        "--resume",
    ),
    ("inspect", "--engine", "dask", "--scheduler-file", "file.txt"),
    ("learn", "linear", "--noise", "1e300"),
    ("learn", "linear", "--resume", "--out", "there"),
    ("compare", "there"),
    ("compare", "run-nan", "there"),
    ("merge", "there", "there", "--out", "there"),
    ("merge", "run-part", "there"),
    ("verify", "--list", "--out", "out"),
    ("verify", "no-such-claim"),
    ("watch", "log-step.jsonl", "--html", "file.txt/page.html"),
    ("watch", "log.csv", "--html", "texts"),
    ("doctor", "texts"),
    ("bench", "\x1b[2J"),
)


@dataclass(frozen=True)
class Ended:
    """Result of an invocation."""

    code: int
    out: str
    err: str
    surroundings: Mapping[str, str] = field(default_factory=dict)


def attack(seed: int, count: int) -> Iterator[str | None]:
    """Run bad invocations, each in a new folder."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory(prefix="attack-") as place, _offline():
        _furnish(Path(place))
        try:
            for number in range(count):
                chance = random.Random(f"{seed}-{number}")
                arguments = _arguments(number, chance)
                surroundings = chance.choice(ENVIRONMENTS) if number % EVERY == 0 else None
                home = Path(place, str(number))
                _move_in(Path(place, "furniture"), home)
                os.chdir(home)
                wrong = _wrong(arguments, surroundings)
                os.chdir(before)
                shutil.rmtree(home, ignore_errors=True)
                yield wrong and f"case {number}: {_shown(arguments, surroundings)}: {wrong}"
        finally:
            os.chdir(before)


def _arguments(number: int, chance: random.Random) -> list[str]:
    if number < len(LISTED):
        return list(LISTED[number])
    commands = _commands()
    name = chance.choices(sorted(commands), [5 if each in ("inspect", "learn") else 2 for each in sorted(commands)])[0]
    given, quick = [name], {option for option in QUICK.get(name, ()) if option.startswith("-")}
    for action in commands[name]._actions:
        if not action.option_strings and (action.nargs not in ("?", "*") or chance.random() < 0.6):
            given += _some(action, name, chance)
    options = [each for each in commands[name]._actions if each.option_strings and each.dest != "help"]
    for action in chance.sample(options, min(len(options), chance.choice((1, 2, 2, 3, 4)))):
        quick -= set(action.option_strings)
        given += [chance.choice(action.option_strings), *([] if action.nargs == 0 else _some(action, name, chance))]
    if chance.random() < 0.15:
        given.insert(chance.randrange(1, len(given) + 1), chance.choice(("--txt", "-z", "--jsn", "--", "--out", "@x")))
    return [*given, *_kept(QUICK.get(name, []), quick)]


def _kept(defaults: Sequence[str], wanted: set[str]) -> list[str]:
    """Return the options that keep a command short, except those of the case."""
    found: list[str] = []
    for i, word in enumerate(defaults):
        if word in wanted or (not word.startswith("-") and (i == 0 or defaults[i - 1] in wanted)):
            found.append(word)
    return found


def _commands() -> dict[str, argparse.ArgumentParser]:
    actions = cli.command_line()._actions
    return next(dict(each.choices) for each in actions if isinstance(each.choices, dict))


def _some(action: argparse.Action, command: str, chance: random.Random) -> list[str]:
    """Return random values of an argument; one in three is bad for any argument of its kind."""
    likely, unlikely = _values(action, command)
    several = 1 if action.nargs in (None, "?") else chance.choice((1, 2, 2, 3))
    return [chance.choice(chance.choice((likely, likely, unlikely))) for _ in range(several)]


def _values(action: argparse.Action, command: str) -> tuple[Sequence[str], Sequence[str]]:
    by_name: dict[str, tuple[Sequence[str], Sequence[str]]] = {
        "model": (("softmax", "linear"), WORDS) if command == "learn" else (MODELS, NOWHERE),
        "text": (TEXTS, NOWHERE),
        "runs": (RUNS, NOWHERE),
        "log": (LOGS, NOWHERE),
        "task": (("linear", "sine", "tree"), ("lineal", *WORDS)),
        "fail_on": (CONDITIONS, WORDS),
        "keys": (("C14", "X*"), WORDS),
        "address": (("127.0.0.1:1:1", "x"), WORDS),
        "engine": (("local",), WORDS),
        "dataset": (("none", "a:b:c:d"), WORDS),
        "device": (("cpu", "cuda", "meta", "cpu:7"), WORDS),
        "dtype": (("float32", "bfloat16", "float64", "int8"), WORDS),
    }
    numeric = getattr(action.type, "__name__", "") in ("positive", "count", "whole", "seed", "number", "_rows")
    if action.dest in by_name:
        return by_name[action.dest]
    if action.dest in ("out", "html", "checkpoint", "scheduler_file"):
        return PLACES, NOWHERE
    if numeric:
        return SMALL, NUMBERS
    return [str(choice) for choice in action.choices or ()] or WORDS, WORDS


def _wrong(arguments: Sequence[str], surroundings: Mapping[str, str] | None) -> str | None:
    """Return the failure of an invocation, or None."""
    before = _state(Path())
    try:
        ended = _inside(arguments) if surroundings is None else _outside(arguments, surroundings)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    after = _state(Path())
    said = [line for line in ended.err.splitlines() if not _is_progress(line)]
    command = arguments[0] if arguments else ""
    if ended.code not in (0, 1, 2, 3):
        return f"exit code {ended.code}, {ended.err[-300:]!r}"
    if "Traceback (most recent call last)" in ended.err and "--debug" not in arguments:
        return f"a traceback, {ended.err[-300:]!r}"
    if strange := {sign for sign in ended.out + ended.err if is_control(sign) and sign != "\n"}:
        return f"control characters {strange!r} are printed"
    if ended.code >= 2:
        gone = sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
        if gone:
            return f"exit code {ended.code}, but these files are new, changed or gone: {gone[:5]}"
        if (len(said) != 1 or ended.out) and "--debug" not in arguments and command not in ("doctor", "bench"):
            return (
                f"exit code {ended.code} with {len(said)} lines of complaint {said[:4]} and output {ended.out[:99]!r}"
            )
        return None
    return _promise_broken(command, list(arguments), ended, before, after)


def _promise_broken(
    command: str, arguments: list[str], ended: Ended, before: Mapping[str, str], after: Mapping[str, str]
) -> str | None:
    """Return missing or leftover output of a successful command, or None."""
    if hidden := [name for name in after if "/.massieu-" in f"/{name}" and name not in before]:
        return f"hidden files stay: {hidden[:3]}"
    if before["file.txt"] != after.get("file.txt") and arguments[-2:] != ["--html", "file.txt"] and command != "watch":
        return "the file of a user was changed"
    if "--help" in arguments or "-h" in arguments:
        return None
    if "--json" in arguments and command:
        try:
            json.loads(ended.out)
        except ValueError:
            return f"--json printed no JSON: {ended.out[:100]!r}"
    if "--out" in arguments and command in PROMISED:
        folder = Path(_last(arguments, "--out")).expanduser()
        missing = [name for name in PROMISED[command] if not (folder / name).is_file()]
        missing = [name for name in missing if name != "partial.safetensors" or "--no-partial" not in arguments]
        if missing:
            return f"exit code {ended.code}, but {folder} holds no {', '.join(missing)}"
    if "--html" in arguments and not Path(_last(arguments, "--html")).expanduser().is_file():
        return "exit code 0, but no page was written"
    return None


def _last(arguments: Sequence[str], option: str) -> str:
    return arguments[len(arguments) - arguments[::-1].index(option)]


def _is_progress(line: str) -> bool:
    return line.endswith(" ...") or line.startswith(("replaces the ", "going on from ", "beginning, since "))


def _inside(arguments: Sequence[str]) -> Ended:
    """Run the command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), _patient():
        try:
            code = cli.main(list(arguments))
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    return Ended(code, out.getvalue(), err.getvalue())


def _outside(arguments: Sequence[str], surroundings: Mapping[str, str]) -> Ended:
    """Run the command in a child process; arguments have no NUL, and may not be UTF-8."""
    words = [word.replace("\0", "\n") for word in arguments]
    ended = subprocess.run(
        [sys.executable, "-m", "massieu", *words],
        env={**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1]), "PYTHONUTF8": "1", **surroundings},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=PATIENCE,
        errors="replace",
        encoding="utf-8",
    )
    return Ended(ended.returncode, ended.stdout, ended.stderr, surroundings)


@contextlib.contextmanager
def _patient() -> Iterator[None]:
    """Interrupt a case in this process after a time limit."""

    def end(*_: object) -> None:
        raise TimeoutError(f"not done after {PATIENCE} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(PATIENCE)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    before = os.environ.copy()
    os.environ.update(HF_HUB_OFFLINE="1", COLUMNS="200")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _state(folder: Path) -> dict[str, str]:
    """Return every path below a folder, with the digests of files."""
    found = {}
    for path in sorted(folder.rglob("*")):
        is_file = path.is_file() and not path.is_symlink()
        found[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest() if is_file else "-"
    return found


def _shown(arguments: Sequence[str], surroundings: Mapping[str, str] | None) -> str:
    words = [*(f"{name}={value}" for name, value in (surroundings or {}).items()), "massieu"]
    return " ".join([*words, *(shlex.quote(word) if word.isprintable() else repr(word) for word in arguments)])


def _furnish(place: Path) -> None:
    """Write the good and bad inputs of the cases."""
    root = place / "furniture"
    root.mkdir()
    _write_texts(root)
    _write_models(root)
    _write_logs(root)
    with contextlib.redirect_stdout(io.StringIO()):
        assert cli.main(["inspect", "-q", *QUICK["inspect"], "--out", str(root / "there")]) == 0
    shutil.rmtree(root / "there" / "figures")
    _write_runs(root)
    (root / "loop").symlink_to("loop")
    (root / "dangling").symlink_to("none/none")


def _write_texts(root: Path) -> None:
    (root / "texts").mkdir()
    noise = random.Random(0).randbytes(2000)
    for name, content in {
        "file.txt": b"Call me Ishmael. Some years ago, never mind how long precisely.\n",
        "empty.txt": b"",
        "binary.txt": noise,
        "bad.jsonl": b'{"text": "one"}\n{\n[[[[\n"two"\n{"text": {"text": 1}}\n' + b"[" * 100_000,
        "bad.csv": b'text,other\n"never closed\n\x00,\xff\n',
        "bad.parquet": b"PAR1" + noise + b"PAR1",
        "bad.txt.gz": b"\x1f\x8b" + noise,
        "texts/a.txt": b"Call me Ishmael.\n\nCall me again.\n",
    }.items():
        (root / name).write_bytes(content)


def _write_models(root: Path) -> None:
    config = json.loads((assets.MODEL / "config.json").read_text())
    contents = {
        "headless": json.dumps({**config, "n_head": 0}),
        "nested": "[" * 100_000,
        "weightless": json.dumps(config),
    }
    for name, content in contents.items():
        (root / name).mkdir()
        for path in assets.MODEL.iterdir():
            if path.is_file() and not (name == "weightless" and path.suffix == ".safetensors"):
                os.link(path, root / name / path.name) if path.suffix == ".safetensors" else shutil.copy(
                    path, root / name
                )
        (root / name / "config.json").write_text(content)


def _write_logs(root: Path) -> None:
    import torch

    from massieu.monitor import Place, Reading, open_sink

    place = Place("decoder", 0, "attn\x1b[2J", 2)
    for suffix in ("jsonl", "csv"):
        sink = open_sink(root / f"log.{suffix}")
        for step in range(3):
            sink(Reading(step, (place,), {"entropy": torch.tensor([[1.0, float("nan")]], dtype=torch.float64)}))
        sink.close()
    lines = (root / "log.jsonl").read_bytes()
    (root / "log-cut.jsonl").write_bytes(lines[: len(lines) // 2])
    (root / "log-step.jsonl").write_bytes(b'{"step": 1e999}\n{"step": -1}\n[]\n' + b"[" * 100_000 + b"\n")
    (root / "log-binary.csv").write_bytes(random.Random(1).randbytes(3000))


def _write_runs(root: Path) -> None:
    whole = (root / "there" / "inspection.json").read_text()
    document = json.loads(whole)
    heads = [{**row, "entropy": None, "layer": "\x1b[2J"} for row in document["heads"]]
    contents = {
        "run-empty": "",
        "run-list": "[]",
        "run-cut": whole[: len(whole) // 2],
        "run-nan": json.dumps({**document, "heads": heads}).replace("null", "NaN", 5),
        "run-deep": "[" * 100_000,
        "run-part": whole,
        "run-twice": whole,
    }
    for name, content in contents.items():
        (root / name).mkdir()
        (root / name / "inspection.json").write_text(content)
    part = (root / "there" / "partial.safetensors").read_bytes()
    (root / "run-part" / "partial.safetensors").write_bytes(part[: len(part) // 2])


def _move_in(furniture: Path, home: Path) -> None:
    """Copy the inputs, so that a case changes only its own."""
    shutil.copytree(furniture, home, symlinks=True, copy_function=_link_weights)


def _link_weights(source: str, target: str) -> None:
    if source.endswith("model.safetensors"):
        os.link(source, target)
    else:
        shutil.copy2(source, target)
