"""Page of the claims: every statement with its verdict, a chart of the evidence, and the code that produced it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup, escape

from massieu.report.charts import linear_scale
from massieu.report.number_format import is_finite
from massieu.report.pages import page

__all__ = ["CONTROL", "UNIT", "VERDICTS", "gauge", "line_chart", "outcome", "render_verdicts"]

VERDICTS = {
    "HOLDS": "holds",
    "HOLDS_CORRECTED": "holds if corrected",
    "CONDITIONAL": "holds on a condition",
    "FAILS": "false as printed",
    "UNDECIDED": "undecided",
}
UNIT = "Measured values are in units of what is allowed: up to 1 is within the bound."
CONTROL = "A control must be above 1."
MARKS = {
    "printed": "as printed",
    "corrected": "corrected",
    "conditional": "under the condition",
    "instead": "what is true instead",
    "control": "control",
}
DECADES = 10  # of the gauge on each side of the bound
WIDTH, HEIGHT = 420, 190


def outcome(verdict: str, expected: str | None) -> str:
    """Return a verdict in words, with the expected verdict.

    Example:
        >>> outcome("FAILS", "FAILS"), outcome("HOLDS", "CONDITIONAL"), outcome("HOLDS", None)
        ('false as printed, as expected', 'holds, expected: holds on a condition', 'holds')
    """
    if expected is None:
        return VERDICTS[verdict]
    return f"{VERDICTS[verdict]}, {'as expected' if expected == verdict else f'expected: {VERDICTS[expected]}'}"


def render_verdicts(results: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> str:
    """Return the page as one file without network requests.

    Args:
        results: as ``massieu verify --json`` prints them, each with ``listing`` (the code) and ``curve`` (or None).
        facts: of the run: ``seconds``, ``seed``, ``full``, ``model``, ``versions``.
    """
    counts = {verdict: sum(result["verdict"] == verdict for result in results) for verdict in VERDICTS}
    surprises = [result for result in results if result["expected"] not in (None, result["verdict"])]
    values = {"results": results, "facts": facts, "counts": counts, "surprises": surprises}
    tools = {"outcome": outcome, "gauge": gauge, "line_chart": line_chart}
    return page("claims.html", **values, **tools, words=VERDICTS, marks=MARKS, unit=f"{UNIT} {CONTROL}")


def gauge(result: Mapping[str, Any]) -> Markup:
    """Return the gaps of a claim on a logarithmic axis, in units of the bound, which is marked by a line."""
    parts = []
    for row, name in enumerate(name for name in MARKS if result.get(name)):
        share = result[name]["share"]
        at = 150 + 250 * (0.5 if share is None else (_decades(share) + DECADES) / (2 * DECADES))
        y = 16 + 22 * row
        inside = share is not None and share <= 1
        shown = "not finite" if share is None else f"{share:.2g} of what is allowed"
        parts.append(
            f'<text x="142" y="{y + 4}" text-anchor="end">{MARKS[name]}</text>'
            f'<line x1="150" x2="400" y1="{y}" y2="{y}" class="track"/>'
            f'<circle cx="{at:.1f}" cy="{y}" r="5" class="{name} {"inside" if inside else "outside"}">'
            f"<title>{MARKS[name]}: {shown}</title></circle>"
        )
    height = 16 + 22 * len(parts)
    bound = f'<line x1="275" x2="275" y1="4" y2="{height - 8}" class="bound"/>'
    label = f'<text x="275" y="{height + 6}" text-anchor="middle" class="axis">allowed</text>'
    ends = (
        f'<text x="150" y="{height + 6}" class="axis">exact</text>'
        f'<text x="400" y="{height + 6}" text-anchor="end" class="axis">far off</text>'
    )
    return Markup(
        f'<svg class="gauge" viewBox="0 0 410 {height + 12}" role="img" aria-label="gaps in units of what is allowed">'
        f"{''.join(parts)}{bound}{label}{ends}</svg>"
    )


def _decades(share: float) -> float:
    return max(-DECADES, min(DECADES, math.log10(share) if share > 0 else -DECADES))


def line_chart(curve: Mapping[str, Any]) -> Markup:
    """Return the series of a curve as lines with points, on linear or logarithmic axes."""
    x = _axis(curve["x"], curve["log_x"])
    lines = {name: _axis(values, curve["log_y"]) for name, values in curve["series"].items()}
    known = [value for values in lines.values() for value in values if value is not None]
    seen = [value for value in x if value is not None]
    if not known or not seen:
        return Markup("")
    across, up = (
        linear_scale(min(seen), max(seen), 52, WIDTH - 12),
        linear_scale(min(known), max(known), HEIGHT - 34, 26),
    )
    parts = [_grid(seen, known, across, up, curve)]
    for number, values in enumerate(lines.values()):
        points = [(across(a), up(b)) for a, b in zip(x, values, strict=True) if a is not None and b is not None]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        dots = "".join(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.5"/>' for a, b in points)
        parts.append(f'<g class="line l{number % 6}"><polyline points="{path}"/>{dots}</g>')
    key = "".join(f'<span class="l{number % 6}">{escape(name)}</span>' for number, name in enumerate(lines))
    return Markup(
        f'<figure class="curve"><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(curve["y_label"])}">'
        f'{"".join(parts)}</svg><figcaption class="key">{key}</figcaption></figure>'
    )


def _axis(values: Sequence[Any], logarithmic: bool) -> list[float | None]:
    def place(value: Any) -> float | None:
        if not is_finite(value) or (logarithmic and value <= 0):
            return None
        return math.log10(value) if logarithmic else float(value)

    return [place(value) for value in values]


def _grid(seen: Sequence[float], known: Sequence[float], across: Any, up: Any, curve: Mapping[str, Any]) -> str:
    def label(value: float, logarithmic: bool) -> str:
        return f"{10**value if logarithmic else value:.3g}"

    parts = []
    for value in sorted({min(known), max(known)}):
        parts.append(f'<line x1="52" x2="{WIDTH - 12}" y1="{up(value):.1f}" y2="{up(value):.1f}" class="track"/>')
        parts.append(f'<text x="48" y="{up(value) + 4:.1f}" text-anchor="end">{label(value, curve["log_y"])}</text>')
    for value, anchor in zip((min(seen), max(seen)), ("start", "end"), strict=True):
        shown = label(value, curve["log_x"])
        parts.append(f'<text x="{across(value):.1f}" y="{HEIGHT - 18}" text-anchor="{anchor}">{shown}</text>')
    parts.append(f'<text x="{WIDTH / 2 + 20}" y="{HEIGHT - 4}" text-anchor="middle">{escape(curve["x_label"])}</text>')
    parts.append(f'<text x="4" y="10">{escape(curve["y_label"])}</text>')
    return "".join(parts)
