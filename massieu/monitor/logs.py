"""Logs of watched training runs, read at the end or while they grow."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from massieu.checks import UserError
from massieu.monitor.quantities import WATCHED
from massieu.monitor.reading import Flag, Reading

__all__ = ["Log", "read_log"]


class Log:
    """Readings of a log file; :meth:`update` adds those written since.

    A restarted run supersedes the readings from its first new step on, which stay in the file. It raises its flags
    anew, so earlier ones count no more.

    Attributes:
        path: path of the file.
        steps: steps of the readings.
        rows: numbers of each reading by name, as in :meth:`Reading.series`; without nan.
        flags: flags raised and cleared, each with its ``step``.
        restarts: number of restarts of the run.
        broken: number of lines that are no readings.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        if self.path.suffix not in (".jsonl", ".csv"):
            raise UserError(f"a log ends in .jsonl or .csv, got {str(path)!r}; give the path that watch(log=...) had")
        self._clear()

    def update(self) -> bool:
        """Read the new lines, and return whether there were any."""
        try:
            size = self.path.stat().st_size
            if size < self._offset:  # the file was replaced
                self._clear()
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError as error:
            raise UserError(
                f"{self.path} cannot be read: {error.strerror}; give the path that watch(log=...) had"
            ) from error
        whole = data[: data.rfind(b"\n") + 1]  # an incomplete line follows
        self._offset += len(whole)
        lines = whole.decode("utf-8", errors="replace").splitlines()
        for line in lines:
            self._take(line)
        return bool(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON and pages: ``steps``, ``series`` (None if undefined), ``flags``, ``raised``."""
        names = dict.fromkeys(name for row in self.rows for name in row)
        used = {name.split("/")[0] for name in names}
        words = ("name", "table", "title", "symbol", "formula", "unit", "explanation", "scale", "digits")
        facts = {
            name: {key: value for key, value in asdict(quantity).items() if key in words}
            for name, quantity in WATCHED.items()
            if name in used
        }
        return {
            "schema": "massieu.watch/1",
            "log": self.path.name,
            "restarts": self.restarts,
            "broken": self.broken,
            "steps": self.steps,
            "series": {name: [_finite(row.get(name)) for row in self.rows] for name in names},
            "flags": self.flags,
            "raised": self.raised,
            "quantities": facts,
        }

    @property
    def raised(self) -> list[dict[str, Any]]:
        """Flags raised and not cleared since the run began, or restarted."""
        found: dict[tuple[Any, ...], dict[str, Any]] = {}
        for flag in self.flags[self._before :]:
            key = tuple(flag[name] for name in ("name", "stack", "layer", "head"))
            found.pop(key, None)
            if flag["state"] == "raised":
                found[key] = flag
        return list(found.values())

    def _clear(self) -> None:
        self.steps: list[int] = []
        self.rows: list[dict[str, float]] = []
        self.flags: list[dict[str, Any]] = []
        self.restarts = self.broken = self._offset = 0
        self._before = 0  # number of flags before the last restart
        self._restart = False
        self._columns: list[str] = []

    def _take(self, line: str) -> None:
        if self.path.suffix == ".csv" and not self._columns:
            self._columns = line.split(",")
            if not _is_header(self._columns):
                raise UserError(
                    f"{self.path} must begin with the columns of massieu.watch, step first and flags last, got"
                    f" {line[:40]!r}; give the path that watch(log=...) had"
                )
            return
        if not line and self.path.suffix == ".csv":
            self._restart = True
            return
        try:
            step, row, flags = self._from_row(line) if self.path.suffix == ".csv" else self._from_json(line)
        except (ValueError, KeyError, TypeError, RecursionError):
            self.broken += 1
            return
        if self.steps and (self._restart or step <= self.steps[-1]):
            self.restarts += 1
            kept = sum(each < step for each in self.steps)
            del self.steps[kept:], self.rows[kept:]
            self.flags = [flag for flag in self.flags if flag["step"] < step]
            self._before = len(self.flags)
        self._restart = False
        self.steps.append(step)
        self.rows.append(row)
        self.flags += [{"step": step, "label": _label(flag, row), **flag} for flag in flags]

    def _from_json(self, line: str) -> tuple[int, dict[str, float], list[dict[str, Any]]]:
        values = json.loads(line)
        reading = Reading.from_dict(values)
        self._restart |= bool(values.get("restart"))
        row = {name: value for name, value in reading.series().items() if not math.isnan(value)}
        return reading.step, row, reading.to_dict()["flags"]

    def _from_row(self, line: str) -> tuple[int, dict[str, float], list[dict[str, Any]]]:
        # Not csv.reader, which limits the length of cells: the flags of many heads are longer. They alone are quoted.
        cells = line.split(",", len(self._columns) - 1)
        named = dict(zip(self._columns, cells, strict=True))
        step, flags = int(named.pop("step")), named.pop("flags")
        if not 0 <= step < 2**63:
            raise ValueError(f"a step from zero expected, got {step}")
        row = {name: float(cell) for name, cell in named.items() if cell}
        return step, row, [Flag.from_dict(flag).to_dict() for flag in json.loads(_unquoted(flags))] if flags else []


def read_log(path: Path | str) -> Log:
    """Return the readings of a log, to the last whole line.

    Args:
        path: a ``.jsonl`` or ``.csv`` file of :func:`massieu.watch`, complete or growing.

    Example:
        >>> import tempfile, pathlib
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "run.jsonl"
        >>> sink = massieu.monitor.open_sink(path)
        >>> place = massieu.monitor.Place("decoder", 0, "h.0.attn", heads=2)
        >>> for step in (0, 100):
        ...     sink(Reading(step, (place,), {"entropy": torch.tensor([[1.0, 2.0]])}))
        >>> log = massieu.monitor.read_log(path)
        >>> log.steps, log.rows[1]["entropy/layer00/median"]
        ([0, 100], 1.5)
    """
    log = Log(path)
    log.update()
    if not log.steps:
        if log.broken:
            lines = f"its {log.broken} line{'s' * (log.broken != 1)}"
            raise UserError(f"{log.path} holds no reading in {lines}; pass a file that massieu.watch(log=...) wrote")
        raise UserError(f"{log.path} holds no reading so far; the first one comes with the first training step")
    return log


def _label(flag: dict[str, Any], names: Sequence[str] | dict[str, float]) -> str:
    """Return the label of a flag's layer in the names of series: with the stack where there are several."""
    label = f"layer{flag['layer']:02d}"
    return f"{flag['stack']}.{label}" if any(f"/{flag['stack']}.{label}" in name for name in names) else label


def _is_header(columns: Sequence[str]) -> bool:
    """Return whether these are the columns of a log: recorded values and series of quantities."""
    names = columns[1:-1]
    known = all("/" in name or name.isidentifier() for name in names) and any("/" in name for name in names)
    return columns[0] == "step" and columns[-1] == "flags" and (known or not names)


def _unquoted(cell: str) -> str:
    return cell[1:-1].replace('""', '"') if cell[:1] == cell[-1:] == '"' else cell


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
