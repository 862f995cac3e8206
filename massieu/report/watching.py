"""A watched training run: the view for the terminal, and the page with every quantity against the step."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from massieu.report.pages import brief, inline_json, page

__all__ = ["follow", "render_watch", "save_watch", "sparkline", "terminal_view"]

Document = Mapping[str, Any]
Curves = dict[str, list[float | None]]  # "min", "median" and "max" of heads, or "value" of a layer
BARS = "▁▂▃▄▅▆▇█"
SHARP = ("entropy", "normalized_entropy", "perplexity", "peak", "log_normalizer")
LARGE = ("score_range", "score_max", "score_variance", "qk_norm")
LARGEST_PAGE = 40_000  # points drawn, over all charts
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 300, 138, 52, 20, 10


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

    curves, raised = _curves(document), document["raised"]
    chosen = [found for names in (SHARP, LARGE) if (found := next((x for x in names if x in curves), None))]
    chosen = chosen or list(curves)[:1]
    labels = list(dict.fromkeys(label for name in chosen for label in curves[name]))
    least = None if rows is None else max(1, rows - 4 - 4 * len(_grouped(raised)))
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
    lines: list[Any] = [Text.assemble((document["log"], "bold"), f"  {_lead(document)}"), table]
    if least is not None and len(labels) > least:
        lines.append(Text(f"and {len(labels) - least} more layers; --html PAGE shows all of them", style="dim"))
    for flag in _grouped(raised):
        lines.append(Text.assemble((f"{flag['name']} ", "bold red"), f"{flag['where']}: {flag['sentence']}"))
    if not raised:
        lines.append(Text("no flag is raised", style="dim"))
    return Group(*lines)


def follow(log: Any, console: Any, interval: float = 1.0) -> None:
    """Show a log on a rich console and again whenever it has grown, until somebody presses Ctrl-C.

    Args:
        log: with ``update``, which says whether there is more, and ``to_dict``; a :class:`massieu.monitor.Log`.
        console: of rich.
        interval: seconds between two looks at the file.
    """
    from rich.live import Live

    def view() -> Any:
        return terminal_view(log.to_dict(), width=console.width, rows=console.height)

    with contextlib.suppress(KeyboardInterrupt), Live(view(), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            if log.update() and log.steps:
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
    low, span = min(known), (max(known) - min(known)) or 1.0
    return "".join(" " if value is None else BARS[int((value - low) / span * 7.999)] for value in kept)


def render_watch(document: Document) -> str:
    """The run as a page of one file: flags, and for each quantity a chart of every layer against the step.

    Args:
        document: as :meth:`massieu.monitor.Log.to_dict` gives it. Everything in it is escaped.
    """
    curves = _curves(document)
    charts = sum(len(layers) for layers in curves.values())
    points = max(24, min(240, LARGEST_PAGE // max(1, charts)))
    steps, thinned = _thin(document["steps"], curves, points)
    sections = [
        {
            "name": name,
            "facts": document["quantities"].get(name, {"title": name, "formula": "", "unit": "", "explanation": ""}),
            "charts": _charts(name, steps, layers, document),
        }
        for name, layers in thinned.items()
    ]
    data = {
        "steps": steps,
        "curves": {
            f"{name}/{label}": {key: [_short(value) for value in values] for key, values in own.items()}
            for name, layers in thinned.items()
            for label, own in layers.items()
        },
    }
    values = {
        "document": document,
        "sections": sections,
        "lead": _lead(document),
        "raised": _grouped(document["raised"]),
    }
    return page("watch.html", **values, data=inline_json(data))


def save_watch(document: Document, path: Path) -> None:
    """Write the page, whole or not at all."""
    text = render_watch(document)
    try:
        with tempfile.TemporaryDirectory(prefix=".massieu-", dir=path.parent) as place:
            (Path(place) / "page").write_text(text, encoding="utf-8")
            os.replace(Path(place) / "page", path)
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}; choose another path") from error


def _curves(document: Document) -> dict[str, dict[str, Curves]]:
    """The series by quantity and layer; those of single heads are left out."""
    found: dict[str, dict[str, Curves]] = {}
    for name, values in document["series"].items():
        quantity, label, *rest = name.split("/")
        key = rest[0] if rest else "value"
        if not key.startswith("head") and any(value is not None for value in values):
            found.setdefault(quantity, {}).setdefault(label, {})[key] = values
    return found


def _thin(
    steps: Sequence[int], curves: dict[str, dict[str, Curves]], points: int
) -> tuple[list[int], dict[str, dict[str, Curves]]]:
    """At most so many points: of a share of the steps the least minimum and the largest maximum, so that peaks stay."""
    count = min(points, len(steps))
    cuts = [len(steps) * i // count for i in range(count + 1)]

    def reduce(values: Sequence[float | None], key: str) -> list[float | None]:
        shares = ([x for x in values[a:b] if x is not None] for a, b in itertools.pairwise(cuts))
        how = {"min": min, "max": max}.get(key, lambda share: share[-1])
        return [how(share) if share else None for share in shares]

    thinned = {
        name: {label: {key: reduce(values, key) for key, values in own.items()} for label, own in layers.items()}
        for name, layers in curves.items()
    }
    return [steps[b - 1] for b in cuts[1:]], thinned


def _charts(name: str, steps: Sequence[int], layers: dict[str, Curves], document: Document) -> list[Markup]:
    known = [value for own in layers.values() for values in own.values() for value in values if value is not None]
    logarithmic = (
        document["quantities"].get(name, {}).get("scale") == "logarithmic"
        and min(known) > 0
        and max(known) > 8 * min(known)
    )
    up = _axis(known, HEIGHT - BOTTOM, TOP, logarithmic)
    across = _axis([float(step) for step in steps], LEFT, WIDTH - 8, False)
    return [
        _chart(name, label, own, steps, across, up, [flag for flag in document["flags"] if flag["label"] == label])
        for label, own in layers.items()
    ]


def _axis(values: Sequence[float], first: float, last: float, logarithmic: bool) -> Any:
    place = math.log10 if logarithmic else float
    low, high = place(min(values)), place(max(values))

    def at(value: float) -> float:
        return first + (last - first) * ((place(value) - low) / (high - low) if high > low else 0.5)

    at.ends = sorted({min(values), max(values)})  # type: ignore[attr-defined]
    return at


def _chart(
    name: str, label: str, own: Curves, steps: Sequence[int], across: Any, up: Any, flags: Sequence[Document]
) -> Markup:
    parts = []
    for value in up.ends:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - 8}" y1="{up(value):.1f}" y2="{up(value):.1f}"/>')
        parts.append(f'<text x="{LEFT - 5}" y="{up(value) + 4:.1f}" text-anchor="end">{brief(value)}</text>')
    for step, anchor in zip(across.ends, ("start", "end"), strict=False):
        parts.append(f'<text x="{across(step):.1f}" y="{HEIGHT - 5}" text-anchor="{anchor}">{_spaced(step)}</text>')
    for low, high in _runs(own.get("min", ()), own.get("max", ()), steps):
        edge = [*((x, y) for x, y in low), *((x, y) for x, y in reversed(high))]
        parts.append(f'<polygon class="band" points="{_points(edge, across, up)}"/>')
    middle = own.get("median") or own.get("value") or []
    for run, _ in _runs(middle, middle, steps):
        parts.append(f'<polyline points="{_points(run, across, up)}"/>')
        if len(run) == 1:
            parts.append(f'<circle cx="{across(run[0][0]):.1f}" cy="{up(run[0][1]):.1f}" r="2.5"/>')
    events = dict.fromkeys((flag["step"], flag["state"], flag["name"]) for flag in flags)
    for step, state, what in events:
        x = across(min(max(step, steps[0]), steps[-1]))
        parts.append(
            f'<g class="{escape(state)}"><line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
            f'<circle cx="{x:.1f}" cy="{TOP}" r="3.5"/>'
            f"<title>{escape(what)} {escape(state)} at step {step}</title></g>"
        )
    last = next((value for value in reversed(middle) if value is not None), None)
    words = f"{name} of {label}, at the end {brief(last)}"
    return Markup(
        f'<figure class="course-of"><figcaption>{escape(label)} <span>{brief(last)}</span></figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(words)}"'
        f' data-curve="{escape(name)}/{escape(label)}">{"".join(parts)}</svg></figure>'
    )


Run = list[tuple[int, float]]


def _runs(low: Sequence[float | None], high: Sequence[float | None], steps: Sequence[int]) -> list[tuple[Run, Run]]:
    """Both lines where both are known, cut where they are not."""
    found: list[tuple[Run, Run]] = []
    ends = True
    for step, a, b in zip(steps, low, high, strict=False):
        if a is None or b is None:
            ends = True
            continue
        if ends:
            found.append(([], []))
            ends = False
        found[-1][0].append((step, a))
        found[-1][1].append((step, b))
    return found


def _points(run: Sequence[tuple[int, float]], across: Any, up: Any) -> str:
    return " ".join(f"{across(step):.1f},{up(value):.1f}" for step, value in run)


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def _spaced(step: float) -> str:
    return f"{step:,.0f}".replace(",", "\u2009")


def _title(document: Document, name: str) -> str:
    return str(document["quantities"].get(name, {}).get("title", name)).lower()


def _now(own: Curves, keys: Sequence[str] = ("min", "median", "max")) -> str:
    """The last figures of a course."""
    shown = []
    for key in keys if "median" in own else ("value",):
        shown.append(brief(next((value for value in reversed(own.get(key, [])) if value is not None), None)))
    return " ".join(shown)


def _header(figures: Sequence[str]) -> str:
    """What stands over such figures."""
    return "min median max" if any(" " in figure for figure in figures) else "now"


def _widest(texts: Sequence[str]) -> int:
    return max(len(text) for text in texts)


def _lead(document: Document) -> str:
    """How much there is to see, in one sentence."""
    steps, raised = document["steps"], document["raised"]
    count = f"{len(steps)} readings, steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"
    parts = [count, f"{len(raised)} flag{'s' * (len(raised) != 1)} raised"]
    if document["restarts"]:
        parts.append(f"restarted {document['restarts']} time{'s' * (document['restarts'] != 1)}")
    if document["broken"]:
        parts.append(f"{document['broken']} line{'s' * (document['broken'] != 1)} could not be read")
    return ", ".join(parts)


def _grouped(raised: Sequence[Document]) -> list[dict[str, str]]:
    """Flags of one name together: where they are raised and since when, and what the latest of them says."""
    found = []
    for name in dict.fromkeys(flag["name"] for flag in raised):
        own = [flag for flag in raised if flag["name"] == name]
        places = []
        for label in dict.fromkeys(flag["label"] for flag in own):
            heads = sorted(flag["head"] for flag in own if flag["label"] == label and flag["head"] is not None)
            words = f" head{'s' * (len(heads) > 1)} {', '.join(map(str, heads))}" if heads else ""
            places.append(label.replace(".", " ") + words)
        first = min(flag["step"] for flag in own)
        sentence = f"{own[-1]['reason']} [{own[-1]['reference']}]"
        found.append({"name": name, "where": f"in {'; '.join(places)}, since step {first}", "sentence": sentence})
    return found
