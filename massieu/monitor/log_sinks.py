"""Destinations for readings: files that survive a crash, experiment trackers, or any callable."""

from __future__ import annotations

import csv
import importlib
import io
import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from massieu.checks import MissingPackageError, UserError
from massieu.monitor.display import flag_sentences
from massieu.monitor.flags import nearest_to_flags
from massieu.monitor.line_file import LineFile
from massieu.monitor.messages import error_summary, log_message
from massieu.monitor.reading import Reading

__all__ = ["CsvLog", "JsonLines", "ScalarLog", "Sink", "Tracker", "open_sink", "short_series", "tensorboard_in"]

TRACKERS = ("tensorboard", "wandb", "trackio")
Receiver = Callable[[Reading], object]


class Sink(Protocol):
    """Destination for readings."""

    def __call__(self, reading: Reading) -> None: ...

    def close(self) -> None:
        """Finish writing."""


class Tracker(NamedTuple):
    """Functions of an experiment tracker.

    Attributes:
        write: called with a step and numbers by name.
        text: called with a step and lines of Markdown; None for trackers without text.
        close: called at the end.
    """

    write: Callable[[int, dict[str, float]], object]
    text: Callable[[int, str], object] | None = None
    close: Callable[[], object] = lambda: None


def open_sink(log: Any, *, per_head: bool = False, short: bool = False) -> Sink:
    """Open the destination for readings that ``log=`` of :func:`massieu.watch` names.

    Args:
        log: a callable, called with each :class:`Reading`; a path that ends in ``.jsonl`` or ``.csv``, which is
            appended to; "tensorboard", "wandb" or "trackio"; a ``SummaryWriter``; a :class:`Tracker`; or a list of
            these.
        per_head: whether logs of single numbers have a series for each head, too. JSON lines hold every head anyway.
        short: whether trackers get the :func:`short_series` only.

    Returns:
        A callable that raises nothing: a log that fails misses readings, is reported once on the logger
        ``massieu.watch``, and is tried again at the next reading. Call its ``close`` at the end.

    Example:
        >>> steps = []
        >>> sink = open_sink(lambda reading: steps.append(reading.step))
        >>> sink(Reading(100, ()))
        >>> steps
        [100]
    """
    if isinstance(log, (list, tuple)) and not isinstance(log, Tracker):
        return _SinkList(log, per_head, short)
    return _SafeSink(_opened(log, per_head, short), log)


def _opened(log: Any, per_head: bool, short: bool) -> Receiver:
    if hasattr(log, "add_scalar"):  # before callables: a stand-in may be both
        log = _tensorboard(log)
    if isinstance(log, Tracker):
        return ScalarLog(log, per_head=per_head, short=short)
    if callable(log):
        return log  # type: ignore[no-any-return]
    if isinstance(log, str) and log in TRACKERS:
        return ScalarLog(_open_tracker(log), per_head=per_head, short=short)
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
    """JSON lines of readings, :meth:`Reading.to_dict`; an existing file is continued.

    The first line of a run that continues a file has ``"restart": true``, since it raises its flags anew.

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
        self._file = LineFile(Path(path))
        self._continues = self._file.whole > 0

    def __call__(self, reading: Reading) -> None:
        values = reading.to_dict() | ({"restart": True} if self._continues else {})
        if self._file.write(json.dumps(values, separators=(",", ":"), allow_nan=False)):
            self._continues = False

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class CsvLog:
    """CSV rows of readings: step, :meth:`Reading.series`, and flags as JSON; an existing file is continued.

    The columns are those of the first reading; a file with others is refused. A run that continues a file begins with
    an empty line, since it raises its flags anew.
    """

    def __init__(self, path: Path | str, *, per_head: bool = False) -> None:
        self._file, self._per_head = LineFile(Path(path)), per_head
        self._columns: list[str] | None = None
        self._begun = self._warned = False

    def __call__(self, reading: Reading) -> None:
        series = reading.series(self._per_head)
        if self._columns is None:
            self._columns = self._check_columns(["step", *series, "flags"])
        more = [name for name in series if name not in self._columns]
        if more and not self._warned:
            self._warned = True
            log_message(
                f"{self._file.path} has no column for {more[0]} and {len(more) - 1} other series that the first"
                " reading did not have; log to a .jsonl file to keep everything"
            )
        flags = json.dumps(reading.to_dict()["flags"]) if reading.flags else ""
        row: dict[str, Any] = {**{name: _cell(value) for name, value in series.items()}, "flags": flags}
        line = _joined([str(reading.step), *(row.get(name, "") for name in self._columns[1:])])
        before = "" if self._begun else "\n" if self._file.whole else f"{_joined(self._columns)}\n"
        self._begun |= self._file.write(before + line)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _check_columns(self, columns: list[str]) -> list[str]:
        known = next(csv.reader([self._file.first()]), []) if self._file.whole else columns
        if known != columns:
            only = [name for name in columns if name not in known] or [name for name in known if name not in columns]
            what = f"{only[0]!r} is only in one of them" if only else "their order differs"
            raise UserError(
                f"{self._file.path} has {len(known)} columns and this run {len(columns)} ({what}); log to another"
                " file, or watch the same model with the same quantities"
            )
        return known


class ScalarLog:
    """Numbers by name and step for an experiment tracker; every name begins with ``massieu/``.

    Args:
        tracker: destination; numbers that are not finite are left out.
        per_head: whether there is a series for each head, too.
        short: whether to write the :func:`short_series` only.

    ``massieu/flags/raised`` and ``massieu/flags/cleared`` count the flags of the reading; trackers with text get a
    sentence for each name of a flag.
    """

    def __init__(self, tracker: Tracker, *, per_head: bool = False, short: bool = False) -> None:
        self._tracker, self._per_head, self._short = tracker, per_head, short

    def __call__(self, reading: Reading) -> None:
        numbers = short_series(reading) if self._short else reading.series(self._per_head)
        for state in ("raised", "cleared"):
            numbers[f"flags/{state}"] = float(sum(flag.state == state for flag in reading.flags))
        self._tracker.write(reading.step, {f"massieu/{name}": x for name, x in numbers.items() if math.isfinite(x)})
        if reading.flags and self._tracker.text is not None:
            self._tracker.text(reading.step, "\n\n".join(flag_sentences(reading)))

    def close(self) -> None:
        """Close a tracker of our own."""
        self._tracker.close()


def short_series(reading: Reading) -> dict[str, float]:
    """Return a few numbers for a tracker that draws a chart of each.

    These are the recorded values, for each quantity with a flag the value nearest to it (see
    :func:`massieu.monitor.flags.nearest_to_flags`), and the median normalized entropy of each layer.
    """
    name = "normalized_entropy"
    medians = {key: x for key, x in reading.series().items() if key.startswith(f"{name}/") and key.endswith("/median")}
    return {**reading.recorded, **nearest_to_flags(reading), **medians}


class _SafeSink:
    """Log with failures that do not end the training."""

    def __init__(self, sink: Receiver, log: Any) -> None:
        self._sink, self._warned = sink, False
        self._name = log if isinstance(log, (str, os.PathLike)) else getattr(log, "__name__", type(log).__name__)

    def __call__(self, reading: Reading) -> None:
        self._try(lambda: self._sink(reading), f"at step {reading.step}")

    def close(self) -> None:
        self._try(getattr(self._sink, "close", lambda: None), "when it was closed")

    def _try(self, call: Callable[[], object], when: str) -> None:
        try:
            call()
        except Exception as error:
            if self._warned:
                return
            self._warned = True
            log_message(
                f"log={self._name} failed {when} with {error_summary(error)}; the training goes on, and Watch.readings"
                " keeps the readings that this log misses"
            )


class _SinkList:
    def __init__(self, logs: Sequence[Any], per_head: bool, short: bool) -> None:
        self._sinks: list[Sink] = []
        try:
            for log in logs:
                self._sinks.append(open_sink(log, per_head=per_head, short=short))
        except BaseException:
            self.close()
            raise

    def __call__(self, reading: Reading) -> None:
        for sink in self._sinks:
            sink(reading)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


def _open_tracker(name: str) -> Tracker:
    """Open a tracker by name; a run of the user is used and left open."""
    if name == "tensorboard":
        return tensorboard_in(None)
    tool = _import(name, name)
    running = tool.run if name == "wandb" else tool.context_vars.current_run.get()
    own = tool.init(project="massieu") if running is None else None
    if name == "wandb":
        # An axis of our own: the step of a run with other writers may only increase.
        tool.define_metric("massieu/*", step_metric="massieu/step")

        def write_wandb(step: int, numbers: dict[str, float]) -> None:
            tool.log({"massieu/step": step, **numbers})

        return Tracker(write_wandb) if own is None else Tracker(write_wandb, close=own.finish)

    def write_trackio(step: int, numbers: dict[str, float]) -> None:
        tool.log(numbers, step=step)

    return Tracker(write_trackio) if own is None else Tracker(write_trackio, close=tool.finish)


def tensorboard_in(folder: str | None) -> Tracker:
    """Open a new event file in a folder; by default in a new one under ``runs``."""
    writer = _import("torch.utils.tensorboard", "tensorboard").SummaryWriter(folder)
    return _tensorboard(writer)._replace(close=writer.close)


def _tensorboard(writer: Any) -> Tracker:
    """Return the tracker of a ``SummaryWriter``, which its owner closes."""

    def write(step: int, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    def text(step: int, words: str) -> None:
        writer.add_text("massieu/flags", words, step)
        writer.flush()

    return Tracker(write, text if hasattr(writer, "add_text") else None)


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
