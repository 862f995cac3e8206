"""Texts about a watch: a line, a table for notebooks, and sentences for flags."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from massieu.monitor.quantities import WATCHED
from massieu.monitor.reading import Flag, Reading, summary

__all__ = ["flag_places", "flag_sentences", "reading_table", "state_words"]

MOST = 4  # layers, or heads of a layer, named in a line
SHOWN = ("entropy", "normalized_entropy", "score_max", "sink_mass", "token_cosine", "update_ratio")


def state_words(readings: Sequence[Reading], flags: Sequence[Flag]) -> list[str]:
    """Return the numbers of layers, readings and flags as words.

    Example:
        >>> state_words([], [])
        ['no reading yet', 'no flag']
    """
    names = list(dict.fromkeys(flag.name for flag in flags))
    raised = f"{_count(len(flags), 'flag')}: {', '.join(names)}" if flags else "no flag"
    if not readings:
        return ["no reading yet", raised]
    last = readings[-1]
    return [_count(len(last.places), "layer"), f"{_count(len(readings), 'reading')} to step {last.step}", raised]


def reading_table(title: str, reading: Reading | None, flags: Sequence[Flag]) -> str:
    """Return HTML with the title and a table of a reading, a row for each layer."""
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


def flag_sentences(reading: Reading) -> list[str]:
    """Return a sentence for each name and state of the flags of a reading."""
    groups: dict[tuple[str, str], list[Flag]] = {}
    for flag in reading.flags:
        groups.setdefault((flag.name, flag.state), []).append(flag)
    return [
        f"{name} {state} in {flag_places(flags, reading)}: {flags[0].reason} [{flags[0].reference}]"
        for (name, state), flags in groups.items()
    ]


def flag_places(flags: Sequence[Flag], reading: Reading) -> str:
    """Return the layers and heads of some flags of a reading, the first few by name.

    Example:
        >>> reading = Reading(0, (massieu.monitor.Place("decoder", 3, "h.3", heads=8),))
        >>> flags = [Flag("logit growth", "decoder", 3, head, 120.0, 100.0, "", "") for head in (2, 5)]
        >>> flag_places(flags, reading)
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
