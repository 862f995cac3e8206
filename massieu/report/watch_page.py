"""Page of a watched training run: every quantity of every layer against the step."""

from __future__ import annotations

import itertools
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from markupsafe import Markup, escape

from massieu.checks import UserError
from massieu.report.charts import linear_scale
from massieu.report.number_format import brief
from massieu.report.pages import inline_json, page
from massieu.report.watch_curves import Curves, Document, curves_by_layer, grouped, recorded, summary

__all__ = ["render_watch", "save_watch"]

LARGEST_PAGE = 40_000  # points drawn, over all charts
MOST_COLUMNS = 4  # of recorded values in the table of flags
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 300, 138, 70, 20, 10
RIGHT = WIDTH - 8


def render_watch(document: Document) -> str:
    """Return the run as one file: flags, and for each quantity a chart of every layer against the step.

    Args:
        document: result of :meth:`massieu.monitor.Log.to_dict`. Everything in it is escaped.
    """
    curves = curves_by_layer(document)
    own = {"recorded": {name: {"value": values} for name, values in recorded(document).items()}}
    charts = sum(len(layers) for layers in (*curves.values(), *own.values()))
    points = max(24, min(240, LARGEST_PAGE // max(1, charts)))
    steps, thinned = _thin(document["steps"], curves, points)
    beside = _thin(document["steps"], own, points)[1]["recorded"]
    flags = {label: [flag for flag in document["flags"] if flag["label"] == label] for label in _labels(curves)}
    sections = [
        {
            "name": name,
            "facts": document["quantities"].get(name, {"title": name, "formula": "", "unit": "", "explanation": ""}),
            "charts": _charts(name, steps, layers, document, flags),
        }
        for name, layers in thinned.items()
    ]
    data = {
        "edges": [LEFT, RIGHT],
        "steps": steps,
        "curves": {
            f"{name}/{label}": {key: [_short(value) for value in values] for key, values in own.items()}
            for name, layers in {**thinned, "": beside}.items()
            for label, own in layers.items()
        },
    }
    values = {
        "document": document,
        "sections": sections,
        "summary": summary(document),
        "raised": grouped(document["raised"]),
        "recorded": [
            chart
            for name, curve in beside.items()
            for chart in _charts("", steps, {name: curve}, document, {name: document["flags"]})
        ],
        "numbers": _at_flags(document),
    }
    return page("watch.html", **values, data=inline_json(data))


def save_watch(document: Document, path: Path) -> None:
    """Write the page atomically."""
    text = render_watch(document)
    try:
        with tempfile.TemporaryDirectory(prefix=".massieu-", dir=path.parent) as place:
            (Path(place) / "page").write_text(text, encoding="utf-8")
            os.replace(Path(place) / "page", path)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}; choose another path") from error


def _thin(
    steps: Sequence[int], curves: dict[str, dict[str, Curves]], points: int
) -> tuple[list[int], dict[str, dict[str, Curves]]]:
    """Reduce the curves to at most ``points``, with minima and maxima over each range of steps, so that peaks stay."""
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


def _labels(curves: dict[str, dict[str, Curves]]) -> list[str]:
    return list(dict.fromkeys(label for layers in curves.values() for label in layers))


def _at_flags(document: Document) -> dict[str, list[float | None]]:
    """Return by name the recorded value at the step of each flag."""
    at = {step: i for i, step in enumerate(document["steps"])}
    rows = [at.get(flag["step"]) for flag in document["flags"]]
    return {
        name: [None if row is None else values[row] for row in rows]
        for name, values in list(recorded(document).items())[:MOST_COLUMNS]
    }


def _charts(
    name: str,
    steps: Sequence[int],
    layers: dict[str, Curves],
    document: Document,
    flags: Mapping[str, Sequence[Document]],
) -> list[Markup]:
    """Return a chart for each layer, all on one scale, with the flags of the layer."""
    known = [value for own in layers.values() for values in own.values() for value in values if value is not None]
    logarithmic = (
        document["quantities"].get(name, {}).get("scale") == "logarithmic"
        and min(known) > 0
        and max(known) > 8 * min(known)
    )
    up = Axis(known, HEIGHT - BOTTOM, TOP, logarithmic)
    across = Axis(steps, LEFT, RIGHT)
    return [_chart(name, label, own, steps, across, up, flags.get(label, ())) for label, own in layers.items()]


class Axis:
    """Map from values to positions between ``first`` and ``last``, with the least and the largest value as ends."""

    def __init__(self, values: Sequence[float], first: float, last: float, logarithmic: bool = False) -> None:
        self.ends, self.logarithmic = sorted({min(values), max(values)}), logarithmic
        self._position = linear_scale(self._transformed(self.ends[0]), self._transformed(self.ends[-1]), first, last)

    def _transformed(self, value: float) -> float:
        return math.log10(value) if self.logarithmic else value / 2  # half, as the span of the largest overflows

    def __call__(self, value: float) -> float:
        return self._position(self._transformed(value))


def _chart(
    name: str, label: str, own: Curves, steps: Sequence[int], across: Axis, up: Axis, flags: Sequence[Document]
) -> Markup:
    parts = []
    for value in up.ends:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{up(value):.1f}" y2="{up(value):.1f}"/>')
        parts.append(f'<text x="{LEFT - 5}" y="{up(value) + 4:.1f}" text-anchor="end">{_label(value)}</text>')
    if up.logarithmic:
        center = (TOP + HEIGHT - BOTTOM) / 2 + 4
        parts.append(f'<text x="{LEFT - 5}" y="{center:.1f}" text-anchor="end">log scale</text>')
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
    for step, state, flag in sorted(events, key=lambda event: event[1] == "raised"):  # drawn last, on top
        x = across(min(max(step, steps[0]), steps[-1]))
        parts.append(
            f'<g class="{escape(state)}"><line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
            f'<circle cx="{x:.1f}" cy="{TOP}" r="3.5"/>'
            f"<title>{escape(flag)} {escape(state)} at step {step}</title></g>"
        )
    last = next((value for value in reversed(middle) if value is not None), None)
    words = f"{f'{name} of ' * bool(name)}{label}, at the end {brief(last)}{', logarithmic axis' * up.logarithmic}"
    return Markup(
        f'<figure class="curve-chart"><figcaption>{escape(label)} <span>{brief(last)}</span></figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(words)}"'
        f' data-curve="{escape(name)}/{escape(label)}">{"".join(parts)}</svg></figure>'
    )


Run = list[tuple[int, float]]


def _runs(low: Sequence[float | None], high: Sequence[float | None], steps: Sequence[int]) -> list[tuple[Run, Run]]:
    """Return the segments of both lines in which both are known."""
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


def _points(run: Sequence[tuple[int, float]], across: Axis, up: Axis) -> str:
    return " ".join(f"{across(step):.1f},{up(value):.1f}" for step, value in run)


def _short(value: float | None) -> float | None:
    if value is None:
        return None
    rounded = float(f"{value:.4g}")
    return rounded if math.isfinite(rounded) else value


def _label(value: float) -> str:
    """Return a number in its shortest form for an axis: 1.39e3, −2.5e−7."""
    number, _, exponent = brief(value).partition("e")
    return f"{number}e{exponent[:1].strip('+')}{exponent[1:].lstrip('0')}" if exponent else number


def _spaced(step: float) -> str:
    return f"{step:,.0f}".replace(",", "\u2009")
