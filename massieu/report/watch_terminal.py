"""View of a watched training run in the terminal: a line for each layer, redrawn as the log grows."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from massieu.checks import visible
from massieu.report.number_format import brief
from massieu.report.terminal import made_visible, plain_table
from massieu.report.watch_curves import Curves, Document, curves_by_layer, grouped, recorded, summary

__all__ = ["follow", "sparkline", "sparklines", "terminal_view"]

MOST_RECORDED = 4  # lines above the layers
LEAST_SPAN = 0.01  # of a scale, relative to its largest value
BARS = "▁▂▃▄▅▆▇█"
SHARP = ("entropy", "normalized_entropy", "perplexity", "peak", "log_normalizer")
LARGE = ("score_range", "score_max", "score_variance", "qk_norm")


def terminal_view(document: Document, *, width: int = 100, rows: int | None = None) -> Group:
    """Return recorded values, one line for each layer with curves of its entropy and scores, and the raised flags.

    Args:
        document: result of :meth:`massieu.monitor.Log.to_dict`.
        width: columns of the terminal.
        rows: lines of the terminal; None for no limit.

    Returns:
        A renderable of rich.
    """
    document = {**made_visible({**document, "series": {}}), "series": _named_visibly(document["series"])}
    curves, raised = curves_by_layer(document), document["raised"]
    chosen = [found for names in (SHARP, LARGE) if (found := next((x for x in names if x in curves), None))]
    chosen = chosen or list(curves)[:1]
    own = list(recorded(document).items())[:MOST_RECORDED]
    lines: list[Any] = [Text.assemble((document["log"], "bold"), f"  {summary(document)}")]
    lines += [_recorded_table(own, document["steps"], width)] if own else []
    if not chosen:
        return Group(*lines, Text("no value is known so far", style="dim"))
    labels = list(dict.fromkeys(label for name in chosen for label in curves[name]))
    least = None if rows is None else max(1, rows - 5 - len(own) - 4 * len(grouped(raised)))
    lines.append(_layers_table(document, curves, chosen, labels[:least], width))
    if least is not None and len(labels) > least:
        lines.append(Text(f"and {len(labels) - least} more layers; --html PAGE shows all of them", style="dim"))
    lines.append(
        Text(_scales(document, curves, chosen, labels[:least]), style="dim", no_wrap=True, overflow="ellipsis")
    )
    for flag in grouped(raised):
        lines.append(Text.assemble((f"{flag['name']} ", "bold red"), f"{flag['where']}: {flag['sentence']}"))
    if not raised:
        lines.append(Text("no flag is raised", style="dim"))
    return Group(*lines)


def _recorded_table(own: Sequence[tuple[str, Sequence[float | None]]], steps: Sequence[int], width: int) -> Table:
    """Return a table with a line for each recorded value, on a scale of its own."""
    table = plain_table(show_header=False, padding=(0, 2, 0, 0))
    for _ in range(3):
        table.add_column(no_wrap=True, overflow="ellipsis")
    latest = [_latest(values, steps) for _, values in own]
    room = max(1, min(40, width - _widest([name for name, _ in own]) - _widest(latest) - 6))
    for (name, values), words in zip(own, latest, strict=True):
        table.add_row(name, sparkline(values, room), words)
    return table


def _latest(values: Sequence[float | None], steps: Sequence[int]) -> str:
    """Return the last known value, with its step where the last reading has none."""
    value, step = next((x, step) for x, step in zip(reversed(values), reversed(steps), strict=True) if x is not None)
    return brief(value) if step == steps[-1] else f"{brief(value)} at step {step}, – now"


def _layers_table(
    document: Document, curves: Mapping[str, Mapping[str, Curves]], chosen: Sequence[str], shown: list[str], width: int
) -> Table:
    """Return a table with a line for each layer."""
    raised = document["raised"]
    flags = [", ".join(dict.fromkeys(flag["name"] for flag in raised if flag["label"] == label)) for label in shown]
    whole = {name: [_now(curves[name].get(label, {})) for label in shown] for name in chosen}
    short = {name: [_now(curves[name].get(label, {}), ("median",)) for label in shown] for name in chosen}
    # The most detailed form that leaves room for curves; the sentences below the table explain the marks.
    marks = ["●" if flag else "" for flag in flags]
    for values, beside in ((whole, flags), (whole, marks), (short, marks)):
        taken = _widest(["layer", *shown]) + _widest(["flags", *beside]) + 2 + 4 * len(chosen)
        taken += sum(_widest([_header(values[name]), *values[name]]) for name in chosen)
        room = min(40, (width - taken) // max(1, len(chosen)))
        if room >= _widest([_title(document, name) for name in chosen]):
            break
    room = max(room, 1)
    table = plain_table(padding=(0, 2, 0, 0))
    table.add_column("layer", no_wrap=True)
    for name in chosen:
        table.add_column(_title(document, name), no_wrap=True, overflow="ellipsis", max_width=room)
        table.add_column(_header(values[name]), no_wrap=True)
    table.add_column("flags", overflow="ellipsis", no_wrap=True)
    lines = [sparklines([_middle(curves[name].get(label, {})) for label in shown], room) for name in chosen]
    for i, label in enumerate(shown):
        cells = [cell for own, name in zip(lines, chosen, strict=True) for cell in (own[i], values[name][i])]
        table.add_row(label, *cells, Text(beside[i], style="bold red"))
    return table


def _scales(
    document: Document, curves: Mapping[str, Mapping[str, Curves]], chosen: Sequence[str], shown: Sequence[str]
) -> str:
    """Return a sentence on the limits of the scale that the lines of each quantity share."""
    ends = []
    for name in chosen:
        known = [x for label in shown for x in _middle(curves[name].get(label, {})) if x is not None]
        ends += [f"{_title(document, name)} {brief(min(known))} to {brief(max(known))}"] if known else []
    return f"▁ to █ in all layers: {', '.join(ends)}"


def follow(log: Any, console: Console, interval: float = 1.0) -> None:
    """Show a log on a rich console and redraw it as it grows, until Ctrl-C; wait for its first reading.

    Args:
        log: a :class:`massieu.monitor.Log`.
        console: of rich.
        interval: seconds between two reads of the file.
    """

    def view() -> Text | Group:
        if not log.steps:
            return Text.assemble((visible(log.path.name), "bold"), "  waits for the first reading; Ctrl-C ends it")
        return terminal_view(log.to_dict(), width=console.width, rows=console.height)

    with contextlib.suppress(KeyboardInterrupt), Live(view(), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            if log.update():
                live.update(view(), refresh=True)


def sparkline(values: Sequence[float | None], width: int) -> str:
    """Return a curve as one line of text, with a blank for missing values.

    Example:
        >>> sparkline([0.0, 1.0, None, 3.0], 4)
        '▁▃ █'
    """
    return sparklines([values], width)[0]


def sparklines(several: Sequence[Sequence[float | None]], width: int) -> list[str]:
    """Return curves as lines of text on one scale.

    The scale spans at least a hundredth of the largest value, so that rounding errors do not fill it.

    Example:
        >>> sparklines([[0.0, 1.0], [2.0, 3.0]], 2)
        ['▁▃', '▆█']
    """
    kept = [_sampled(values, width) for values in several]
    known = [value for own in kept for value in own if value is not None]
    # Halves, since the span of the largest numbers would overflow.
    low, high = (min(known) / 2, max(known) / 2) if known else (0.0, 0.0)
    span = max(high - low, LEAST_SPAN * max(abs(low), abs(high))) or 1.0
    return ["".join(" " if x is None else BARS[int((x / 2 - low) / span * 7.999)] for x in own) for own in kept]


def _sampled(values: Sequence[float | None], width: int) -> list[float | None]:
    """Return the last known value of each range of steps."""
    count = min(width, len(values))
    shares = [values[len(values) * i // count : len(values) * (i + 1) // count] for i in range(count)]
    return [next((value for value in reversed(share) if value is not None), None) for share in shares]


def _named_visibly(series: Mapping[str, Any]) -> dict[str, Any]:
    return {visible(name): values for name, values in series.items()}


def _title(document: Document, name: str) -> str:
    return str(document["quantities"].get(name, {}).get("title", name)).lower()


def _middle(own: Curves) -> Sequence[float | None]:
    return own.get("median") or own.get("value") or []


def _now(own: Curves, keys: Sequence[str] = ("min", "median", "max")) -> str:
    """Return the values of the last reading; a dash where one is not a number."""
    return " ".join(brief(own[key][-1] if own.get(key) else None) for key in (keys if "median" in own else ("value",)))


def _header(values: Sequence[str]) -> str:
    return "min median max" if any(" " in value for value in values) else "now"


def _widest(texts: Sequence[str]) -> int:
    return max(len(text) for text in texts)
