"""A watch in one line and as a table in a notebook, and the flags of a reading in words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from massieu.monitor.quantities import WATCHED
from massieu.monitor.reading import Flag, Reading, summary

__all__ = ["in_one_line", "last_reading", "sentences", "where"]

MOST = 4  # layers, or heads of a layer, that a line names
SHOWN = ("entropy", "normalized_entropy", "score_max", "sink_mass", "token_cosine", "update_ratio")


def in_one_line(readings: Sequence[Reading], flags: Sequence[Flag]) -> list[str]:
    """How many layers, readings and flags there are.

    Example:
        >>> in_one_line([], [])
        ['no reading yet', 'no flag']
    """
    names = list(dict.fromkeys(flag.name for flag in flags))
    raised = f"{_count(len(flags), 'flag')}: {', '.join(names)}" if flags else "no flag"
    if not readings:
        return ["no reading yet", raised]
    last = readings[-1]
    return [_count(len(last.places), "layer"), f"{_count(len(readings), 'reading')} to step {last.step}", raised]


def last_reading(title: str, reading: Reading | None, flags: Sequence[Flag]) -> str:
    """The title and a table with a row for each layer of a reading, as HTML."""
    if reading is None:
        return f"<p>{escape(title)}</p>"
    names = [name for name in SHOWN if name in reading.heads or name in reading.layers]
    head = "".join(
        f'<th title="{escape(WATCHED[name].explanation)}">{escape(_title(name, reading))}</th>' for name in names
    )
    rows = []
    for i, (place, label) in enumerate(zip(reading.places, reading.labels, strict=True)):
        cells = "".join(f"<td>{_cell(reading, name, i)}</td>" for name in names)
        own = dict.fromkeys(flag.name for flag in flags if (flag.stack, flag.layer) == (place.stack, place.layer))
        rows.append(f"<tr><th>{label}</th>{cells}<td>{escape(', '.join(own))}</td></tr>")
    recorded = "".join(f", {escape(name)} {value:.4g}" for name, value in reading.recorded.items())
    return (
        f"<p>{escape(title)}</p><table><caption>step {reading.step}{recorded}</caption>"
        f"<thead><tr><th>layer</th>{head}<th>flags</th></tr></thead><tbody>{''.join(rows)}</tbody></table>"
    )


def sentences(reading: Reading) -> list[str]:
    """A sentence for the flags of a reading that have one name and state."""
    groups: dict[tuple[str, str], list[Flag]] = {}
    for flag in reading.flags:
        groups.setdefault((flag.name, flag.state), []).append(flag)
    return [
        f"{name} {state} in {where(flags, reading)}: {flags[0].reason} [{flags[0].reference}]"
        for (name, state), flags in groups.items()
    ]


def where(flags: Sequence[Flag], reading: Reading) -> str:
    """Layers and heads of flags of a reading, the first few of them by name.

    Example:
        >>> reading = Reading(0, (massieu.monitor.Place("decoder", 3, "h.3", heads=8),))
        >>> flags = [Flag("logit growth", "decoder", 3, head, 120.0, 100.0, "", "") for head in (2, 5)]
        >>> where(flags, reading)
        'layer03 (heads 2, 5)'
    """
    labels = {(place.stack, place.layer): label for place, label in zip(reading.places, reading.labels, strict=True)}
    heads: dict[str, list[int]] = {}
    for flag in flags:
        own = heads.setdefault(labels[flag.stack, flag.layer], [])
        own += [] if flag.head is None else [flag.head]
    words = [f"{label}{_heads(own)}" for label, own in heads.items()]
    more = len(words) - MOST
    return ", ".join(words[:MOST]) + (f" and {more} more layer{'s' * (more > 1)}" if more > 0 else "")


def _heads(heads: Sequence[int]) -> str:
    if not heads:
        return ""
    if len(heads) > MOST:
        return f" ({len(heads)} heads)"
    return f" (head{'s' * (len(heads) > 1)} {', '.join(map(str, heads))})"


def _title(name: str, reading: Reading) -> str:
    return f"{WATCHED[name].title}{' (min median max)' * (name in reading.heads)}"


def _cell(reading: Reading, name: str, i: int) -> str:
    if name in reading.layers:
        return _number(reading.layers[name][i].item())
    own = reading.heads[name][i, : reading.places[i].heads].tolist()
    return " ".join(_number(value) for value in summary(own).values())


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.3g}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
