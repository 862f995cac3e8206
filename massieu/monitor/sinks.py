"""Where readings go: files that survive a crash, the tools that draw curves, or any callable."""

from __future__ import annotations

import csv
import importlib
import io
import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from massieu.checks import MissingPackageError, UserError
from massieu.monitor.lines import Lines
from massieu.monitor.reading import Reading
from massieu.monitor.telling import cause, tell

__all__ = ["CsvLog", "JsonLines", "Scalars", "open_sink"]

ENDINGS = (".jsonl", ".csv")
TOOLS = ("tensorboard", "wandb", "trackio")
Receiver = Callable[[Reading], object]


class Sink(Protocol):
    """What takes readings."""

    def __call__(self, reading: Reading) -> None: ...

    def close(self) -> None:
        """Say that there is no more to come."""


def open_sink(log: Any, *, per_head: bool = False) -> Sink:
    """What takes readings, from what a user writes for ``log=``.

    Args:
        log: a callable, which is given each :class:`Reading`; a path that ends in ``.jsonl`` or ``.csv``, which is
            appended to; "tensorboard", "wandb" or "trackio"; a ``SummaryWriter``; or a list of these.
        per_head: whether logs of single numbers have a series for each head, too. JSON lines hold every head anyway.

    Returns:
        A callable that raises nothing: a log that fails costs readings and a line on the logger ``massieu.watch``, and
        is tried again at the next reading. Call its ``close`` in the end.

    Example:
        >>> steps = []
        >>> sink = open_sink(lambda reading: steps.append(reading.step))
        >>> sink(Reading(100, ()))
        >>> steps
        [100]
    """
    if isinstance(log, (list, tuple)):
        return _Several(log, per_head)
    return _Lenient(_opened(log, per_head), log)


def _opened(log: Any, per_head: bool) -> Receiver:
    if hasattr(log, "add_scalar"):  # before callables: a stand-in may be both
        return Scalars(_tensorboard(log), per_head=per_head)
    if callable(log):
        return log  # type: ignore[no-any-return]
    if isinstance(log, str) and log in TOOLS:
        return Scalars(_open_tool(log), per_head=per_head)
    if isinstance(log, (str, os.PathLike)):
        path = Path(log)
        if path.suffix == ".jsonl":
            return JsonLines(path)
        if path.suffix == ".csv":
            return CsvLog(path, per_head=per_head)
    raise UserError(
        f'log must be a path that ends in .jsonl or .csv, "tensorboard", "wandb", "trackio", a callable or a list of'
        f" these, got {log!r}; JSON lines keep everything"
    )


class JsonLines:
    """One line of JSON for each reading, with every head: :meth:`Reading.to_dict`; an existing file is continued.

    The first line of a run that continues a file says ``"restart": true``, since flags are then raised anew.

    Example:
        >>> import tempfile, pathlib
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "run.jsonl"
        >>> sink = JsonLines(path)
        >>> sink(Reading(100, ()))
        >>> sink.close()
        >>> path.read_text()
        '{"step":100,"places":[],"heads":{},"layers":{},"flags":[]}\\n'
    """

    def __init__(self, path: Path | str) -> None:
        self._lines = Lines(Path(path))
        self._continues = self._lines.whole > 0

    def __call__(self, reading: Reading) -> None:
        values = reading.to_dict() | ({"restart": True} if self._continues else {})
        if self._lines.write(json.dumps(values, separators=(",", ":"), allow_nan=False)):
            self._continues = False

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


class CsvLog:
    """One row for each reading: its step, :meth:`Reading.series`, and its flags as JSON; an existing file is continued.

    The columns are those of the first reading; a file with other ones is left alone. Where a run continues a file, an
    empty line stands before its first row, since flags are then raised anew.
    """

    def __init__(self, path: Path | str, *, per_head: bool = False) -> None:
        self._lines, self._per_head = Lines(Path(path)), per_head
        self._columns: list[str] | None = None
        self._begun = self._told = False

    def __call__(self, reading: Reading) -> None:
        series = reading.series(self._per_head)
        if self._columns is None:
            self._columns = self._chosen(["step", *series, "flags"])
        more = [name for name in series if name not in self._columns]
        if more and not self._told:
            self._told = True
            tell(
                f"{self._lines.path} has no column {more[0]}, which was not part of the first reading, and"
                f" {len(more) - 1} others; log to a .jsonl file to keep everything"
            )
        flags = json.dumps(reading.to_dict()["flags"]) if reading.flags else ""
        row: dict[str, Any] = {**{name: _cell(value) for name, value in series.items()}, "flags": flags}
        line = _joined([str(reading.step), *(row.get(name, "") for name in self._columns[1:])])
        before = "" if self._begun else "\n" if self._lines.whole else f"{_joined(self._columns)}\n"
        self._begun |= self._lines.write(before + line)

    def close(self) -> None:
        """Close the file."""
        self._lines.close()

    def _chosen(self, columns: list[str]) -> list[str]:
        known = next(csv.reader([self._lines.first()]), []) if self._lines.whole else columns
        if known != columns:
            only = [name for name in columns if name not in known] or [name for name in known if name not in columns]
            what = f"{only[0]!r} is only in one of them" if only else "their order differs"
            raise UserError(
                f"{self._lines.path} has {len(known)} columns and this run {len(columns)} ({what}); log to another"
                " file, or watch the same model with the same quantities"
            )
        return known


class Scalars:
    """Single numbers by name and step, for tools that draw curves.

    Args:
        write: called with a step and numbers by name; those that are not finite are left out.
        close: called in the end.
        per_head: whether there is a series for each head, too.

    Flags are numbers as well: ``flags/raised`` and ``flags/cleared`` count those of the reading.
    """

    def __init__(
        self, write: tuple[Callable[[int, dict[str, float]], object], Callable[[], object]], *, per_head: bool = False
    ) -> None:
        (self._write, self._close), self._per_head = write, per_head

    def __call__(self, reading: Reading) -> None:
        numbers = {name: value for name, value in reading.series(self._per_head).items() if math.isfinite(value)}
        for state in ("raised", "cleared"):
            numbers[f"flags/{state}"] = float(sum(flag.state == state for flag in reading.flags))
        self._write(reading.step, numbers)

    def close(self) -> None:
        """Say that there is no more to come."""
        self._close()


class _Lenient:
    """A log whose failures do not end the training."""

    def __init__(self, sink: Receiver, log: Any) -> None:
        self._sink, self._warned = sink, False
        self._name = log if isinstance(log, (str, os.PathLike)) else getattr(log, "__name__", type(log).__name__)

    def __call__(self, reading: Reading) -> None:
        self._try(lambda: self._sink(reading), f"at step {reading.step}")

    def close(self) -> None:
        self._try(getattr(self._sink, "close", _nothing), "when it was closed")

    def _try(self, call: Callable[[], object], when: str) -> None:
        try:
            call()
        except Exception as error:
            if self._warned:
                return
            self._warned = True
            tell(
                f"log={self._name} failed {when} with {cause(error)}; the training goes on, and what this log misses is"
                " in Watch.readings"
            )


class _Several:
    def __init__(self, logs: Sequence[Any], per_head: bool) -> None:
        self._sinks: list[Sink] = []
        try:
            for log in logs:
                self._sinks.append(open_sink(log, per_head=per_head))
        except BaseException:
            self.close()
            raise

    def __call__(self, reading: Reading) -> None:
        for sink in self._sinks:
            sink(reading)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


def _open_tool(name: str) -> tuple[Callable[[int, dict[str, float]], object], Callable[[], object]]:
    """How to write numbers to a tool, and how to end; a run that the user has begun is used and left open."""
    if name == "tensorboard":
        writer = _import("torch.utils.tensorboard", "tensorboard").SummaryWriter()
        write, _ = _tensorboard(writer)
        return write, writer.close
    tool = _import(name, name)
    running = tool.run if name == "wandb" else tool.context_vars.current_run.get()
    own = tool.init(project="massieu") if running is None else None
    if name == "wandb":
        # An axis of our own: the step of a run that others write to as well may only rise.
        tool.define_metric("massieu/*", step_metric="massieu/step")

        def write_wandb(step: int, numbers: dict[str, float]) -> None:
            tool.log({"massieu/step": step, **{f"massieu/{key}": value for key, value in numbers.items()}})

        return write_wandb, _nothing if own is None else own.finish

    def write_trackio(step: int, numbers: dict[str, float]) -> None:
        tool.log({f"massieu/{key}": value for key, value in numbers.items()}, step=step)

    return write_trackio, _nothing if own is None else tool.finish


def _tensorboard(writer: Any) -> tuple[Callable[[int, dict[str, float]], object], Callable[[], object]]:
    def write(step: int, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return write, _nothing


def _nothing() -> None:
    """What others opened they close."""


def _import(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise MissingPackageError(
            f'log="{package}" needs {package}, which is not installed; pip install {package}, or log to a .jsonl file'
        ) from None


def _cell(value: float) -> str:
    return "" if math.isnan(value) else repr(value)


def _joined(cells: Sequence[str]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(cells)
    return line.getvalue()
