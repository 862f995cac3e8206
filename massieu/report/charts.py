"""Charts of a page: lines with a legend that switches them off and on, scatter plots, and matrices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from markupsafe import Markup, escape

from massieu.plotting import colors

__all__ = ["Line", "chart", "cloud", "linear_scale", "matrix_map"]

WIDTH, HEIGHT = 760, 380
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 26, 44
SIDE = 300  # of a cloud
CELL = 44
LARGEST = 12  # matrices with more rows show no values


@dataclass(frozen=True)
class Line:
    """A line of a chart.

    Attributes:
        name: in the legend.
        x: horizontal positions.
        y: values, None where one is missing.
        strong: drawn thick; others are thin.
        dashed: for lines with few measured points.
        notes: note of each point, such as its error.
        color: number of its color, 0 for that of the text; its position in the chart by default.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    strong: bool = False
    dashed: bool = False
    notes: Sequence[str] = field(default_factory=tuple)
    color: int | None = None


def chart(
    lines: Sequence[Line],
    x_label: str,
    y_label: str,
    *,
    log_y: bool = False,
    span: tuple[float, float] | None = None,
) -> Markup:
    """Return lines with a legend of buttons; without scripts all lines are visible.

    Args:
        lines: the most important first, which has the color of the text.
        x_label: below the axis.
        y_label: above the axis.
        log_y: logarithmic axis, without values that are not positive.
        span: least and largest value of the axis, those of all lines by default; lines continue outside of the frame.
    """
    known = [value for line in lines for value in line.y if value is not None and _shown(value, log_y)]
    if not known:
        return Markup("")
    low, high = span or (min(known), max(known))
    places = [place for line in lines for place in line.x]
    across = linear_scale(min(places), max(places), LEFT + 8, WIDTH - RIGHT - 8)
    up = linear_scale(*((math.log10(low), math.log10(high)) if log_y else (low, high)), HEIGHT - BOTTOM, TOP)

    def height(value: float) -> float:
        return up(math.log10(value) if log_y else value)

    parts = [_axes(x_label, y_label)]
    for tick in _log_ticks(low, high) if log_y else _ticks(low, high):
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{height(tick):.1f}" y2="{height(tick):.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{height(tick) + 4:.1f}" text-anchor="end">{tick:.4g}</text>')
    for tick in _ticks(min(places), max(places), whole=all(place == int(place) for place in places)):
        parts.append(f'<text x="{across(tick):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{tick:g}</text>')
    x, y, width, tall = LEFT, TOP - 6, WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM + 12
    # A nested svg clips the lines without a clip path, whose id another chart could have too.
    inside = [_draw(line, number, across, height, log_y) for number, line in reversed(list(enumerate(lines)))]
    frame = f'x="{x}" y="{y}" width="{width}" height="{tall}" viewBox="{x} {y} {width} {tall}"'
    cut = f"<svg {frame}>{''.join(inside)}</svg>"
    key = "".join(_button(line, number) for number, line in enumerate(lines))
    return Markup(
        f'<figure class="chart"><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(y_label)} against'
        f' {escape(x_label)}">{"".join(parts)}{cut}</svg><div class="key" role="group" aria-label="Lines">{key}</div>'
        "</figure>"
    )


def cloud(x: Sequence[float], y: Sequence[float], x_label: str, y_label: str) -> Markup:
    """Return a scatter plot on a square with its diagonal of equal coordinates."""
    reach = max((abs(value) for value in (*x, *y)), default=0.0) or 1.0
    place = linear_scale(-reach, reach, 10, SIDE - 10)
    dots = "".join(
        f'<circle cx="{place(a):.1f}" cy="{SIDE - place(b):.1f}" r="2.5"/>' for a, b in zip(x, y, strict=True)
    )
    middle, end = SIDE / 2, SIDE - 10
    return Markup(
        f'<figure class="cloud"><svg viewBox="0 0 {SIDE} {SIDE + 22}" role="img" aria-label="{escape(y_label)} against'
        f' {escape(x_label)}"><line x1="10" x2="{end}" y1="{middle}" y2="{middle}"/>'
        f'<line y1="10" y2="{end}" x1="{middle}" x2="{middle}"/>'
        f'<line class="same" x1="10" y1="{end}" x2="{end}" y2="10"/>{dots}'
        f'<text x="12" y="20">{escape(y_label)}</text>'
        f'<text x="{end}" y="{SIDE + 14}" text-anchor="end">{escape(x_label)}</text></svg></figure>'
    )


def matrix_map(matrix: Sequence[Sequence[float]], largest: float, title: str) -> Markup:
    """Return a matrix as squares, blue above zero and orange below, with its values if there is room."""
    scales = colors.diverging(), colors.diverging(True)
    parts = []
    for row, values in enumerate(matrix):
        for column, value in enumerate(values):
            share = max(-1.0, min(1.0, value / largest if largest else 0.0))
            light, dark = (scale[round((share + 1) / 2 * (len(scale) - 1))] for scale in scales)
            paint = f"--light:{light};--dark:{dark};--text-light:{_ink_on(light)};--text-dark:{_ink_on(dark)}"
            x, y = CELL * column, CELL * row
            parts.append(
                f'<rect class="cell" x="{x + 1}" y="{y + 1}" width="{CELL - 2}" height="{CELL - 2}" rx="2"'
                f' style="{paint}"><title>row {row}, column {column}: {value:.4g}</title></rect>'
            )
            if len(matrix) <= LARGEST:
                shown = f"{round(value, 2) + 0.0:.2f}".replace("-", "−")
                middle = f'x="{x + CELL / 2}" y="{y + CELL / 2 + 4}" text-anchor="middle" font-size="12"'
                parts.append(f'<text class="value" {middle} style="{paint}">{shown}</text>')
    size = CELL * len(matrix)
    picture = f'viewBox="0 0 {size} {size}" style="max-width:{min(size * 1.25, 420):.0f}px"'
    return Markup(
        f'<div class="map"><h3>{escape(title)}</h3><div class="box"><svg {picture} role="img"'
        f' aria-label="{escape(title)}">{"".join(parts)}</svg></div></div>'
    )


def _draw(line: Line, number: int, across: Callable[[float], float], up: Callable[[float], float], log_y: bool) -> str:
    points = [
        (across(x), up(y), f"{line.name}, {x:g}: {y:.4g}{note}")
        for x, y, note in zip(line.x, line.y, line.notes or [""] * len(line.x), strict=True)
        if y is not None and _shown(y, log_y)
    ]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in points)
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{3.2 if line.strong else 2.4}"><title>{escape(note)}</title></circle>'
        for x, y, note in points
    )
    return f'<g {_attributes(line, number)}><polyline points="{path}"/>{dots}</g>'


def _button(line: Line, number: int) -> str:
    return f'<button type="button" aria-pressed="true" {_attributes(line, number)}><i></i>{escape(line.name)}</button>'


def _attributes(line: Line, number: int) -> str:
    kind = " ".join(["series", *(["strong"] if line.strong else []), *(["dashed"] if line.dashed else [])])
    color = _color(number if line.color is None else line.color)
    return f'class="{kind}" data-line="{number}" style="{color}"'


def _color(number: int) -> str:
    if not number:
        return "--light:var(--ink);--dark:var(--ink)"
    light, dark = (scale[(number - 1) % len(scale)] for scale in (colors.lines(), colors.lines(True)))
    return f"--light:{light};--dark:{dark}"


def _axes(x_label: str, y_label: str) -> str:
    middle = (LEFT + WIDTH - RIGHT) / 2
    return (
        f'<text x="{LEFT}" y="12">{escape(y_label)}</text>'
        f'<text x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>'
    )


def _shown(value: float, log_y: bool) -> bool:
    return math.isfinite(value) and (value > 0 or not log_y)


def linear_scale(low: float, high: float, first: float, last: float) -> Callable[[float], float]:
    """Return the map of values from ``low`` to ``high`` to positions from ``first`` to ``last``."""
    return lambda value: first + (last - first) * ((value - low) / (high - low) if high > low else 0.5)


def _ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    """Return about six round numbers within a range."""
    rough = (high - low) / 6 or 1.0
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    step = max(1.0, float(round(step))) if whole else step
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Return the powers of ten within a range; of a short range also twice and five times the powers."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1,) if math.log10(high) - math.log10(low) > 4 else (1, 2, 5)
    ticks = [factor * 10.0**decade for decade in decades for factor in factors]
    return [tick for tick in ticks if low <= tick <= high]


def _ink_on(color: str) -> str:
    red, green, blue = (int(color[start : start + 2], 16) / 255 for start in (1, 3, 5))
    return "#15171b" if 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2 > 0.2 else "#ffffff"
