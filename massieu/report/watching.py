"""A watched training run in the terminal: a line for each layer, redrawn as the log grows."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from massieu.checks import visible
from massieu.report.courses import Curves, Document, courses, grouped, lead
from massieu.report.pages import brief
from massieu.report.terminal import made_visible

__all__ = ["follow", "sparkline", "terminal_view"]

BARS = "▁▂▃▄▅▆▇█"
SHARP = ("entropy", "normalized_entropy", "perplexity", "peak", "log_normalizer")
LARGE = ("score_range", "score_max", "score_variance", "qk_norm")


def terminal_view(document: Document, *, width: int = 100, rows: int | None = None) -> Any:
    """One line for each layer with the course of its entropy and scores, then the flags that are raised.

    Args:
        document: as :meth:`massieu.monitor.Log.to_dict` gives it.
        width: columns of the terminal.
        rows: lines of the terminal, if it should fit.

    Returns:
        What a rich console prints.
    """
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    document = {**made_visible({**document, "series": {}}), "series": _named_visibly(document["series"])}
    curves, raised = courses(document), document["raised"]
    chosen = [found for names in (SHARP, LARGE) if (found := next((x for x in names if x in curves), None))]
    chosen = chosen or list(curves)[:1]
    title = Text.assemble((document["log"], "bold"), f"  {lead(document)}")
    if not chosen:
        return Group(title, Text("no figure is known so far", style="dim"))
    labels = list(dict.fromkeys(label for name in chosen for label in curves[name]))
    least = None if rows is None else max(1, rows - 4 - 4 * len(grouped(raised)))
    shown = labels[:least]
    flags = [", ".join(dict.fromkeys(flag["name"] for flag in raised if flag["label"] == label)) for label in shown]
    whole = {name: [_now(curves[name].get(label, {})) for label in shown] for name in chosen}
    short = {name: [_now(curves[name].get(label, {}), ("median",)) for label in shown] for name in chosen}
    # The most of these that leaves room for courses; the sentences below say what a mark stands for.
    marks = ["●" if flag else "" for flag in flags]
    for figures, beside in ((whole, flags), (whole, marks), (short, marks)):
        taken = _widest(["layer", *labels]) + _widest(["flags", *beside]) + 2 + 4 * len(chosen)
        taken += sum(_widest([_header(figures[name]), *figures[name]]) for name in chosen)
        room = min(40, (width - taken) // max(1, len(chosen)))
        if room >= _widest([_title(document, name) for name in chosen]):
            break
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("layer", no_wrap=True)
    for name in chosen:
        table.add_column(_title(document, name), no_wrap=True, overflow="ellipsis", max_width=max(room, 1))
        table.add_column(_header(figures[name]), no_wrap=True)
    table.add_column("flags", overflow="ellipsis", no_wrap=True)
    for i, label in enumerate(shown):
        cells: list[Any] = []
        for name in chosen:
            own = curves[name].get(label, {})
            cells += [sparkline(own.get("median") or own.get("value") or [], max(room, 1)), figures[name][i]]
        table.add_row(label, *cells, Text(beside[i], style="bold red"))
    lines: list[Any] = [title, table]
    if least is not None and len(labels) > least:
        lines.append(Text(f"and {len(labels) - least} more layers; --html PAGE shows all of them", style="dim"))
    for flag in grouped(raised):
        lines.append(Text.assemble((f"{flag['name']} ", "bold red"), f"{flag['where']}: {flag['sentence']}"))
    if not raised:
        lines.append(Text("no flag is raised", style="dim"))
    return Group(*lines)


def follow(log: Any, console: Any, interval: float = 1.0) -> None:
    """Show a log on a rich console and again whenever it has grown, until somebody presses Ctrl-C.

    A log without a reading is waited for.

    Args:
        log: a :class:`massieu.monitor.Log`.
        console: of rich.
        interval: seconds between two looks at the file.
    """
    from rich.live import Live
    from rich.text import Text

    def view() -> Any:
        if not log.steps:
            return Text.assemble((visible(log.path.name), "bold"), "  waits for the first reading; Ctrl-C ends it")
        return terminal_view(log.to_dict(), width=console.width, rows=console.height)

    with contextlib.suppress(KeyboardInterrupt), Live(view(), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            if log.update():
                live.update(view(), refresh=True)


def sparkline(values: Sequence[float | None], width: int) -> str:
    """A course in one line of text, low to high; a blank where nothing is known.

    Example:
        >>> sparkline([0.0, 1.0, None, 3.0], 4)
        '▁▃ █'
    """
    # Each sign is the last known value of its share of the steps.
    count = min(width, len(values))
    shares = [values[len(values) * i // count : len(values) * (i + 1) // count] for i in range(count)]
    kept = [next((value for value in reversed(share) if value is not None), None) for share in shares]
    known = [value for value in kept if value is not None]
    if not known:
        return " " * count
    # Halves, since the span of the largest numbers would overflow.
    low, span = min(known) / 2, (max(known) / 2 - min(known) / 2) or 1.0
    return "".join(" " if value is None else BARS[int((value / 2 - low) / span * 7.999)] for value in kept)


def _named_visibly(series: Mapping[str, Any]) -> dict[str, Any]:
    return {visible(name): values for name, values in series.items()}


def _title(document: Document, name: str) -> str:
    return str(document["quantities"].get(name, {}).get("title", name)).lower()


def _now(own: Curves, keys: Sequence[str] = ("min", "median", "max")) -> str:
    """What the last reading found; a dash where that was no number, whatever was there before."""
    return " ".join(brief(own[key][-1] if own.get(key) else None) for key in (keys if "median" in own else ("value",)))


def _header(figures: Sequence[str]) -> str:
    """What stands over such figures."""
    return "min median max" if any(" " in figure for figure in figures) else "now"


def _widest(texts: Sequence[str]) -> int:
    return max(len(text) for text in texts)
