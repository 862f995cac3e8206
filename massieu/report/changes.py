"""What differs between inspections: a table of means, and sentences computed from it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any

from markupsafe import Markup

__all__ = ["Change", "course", "reservations", "sentences", "table"]

Document = Mapping[str, Any]
DIFFERENT_TEXTS = "These runs read different texts, so a difference may come from the text and not from the model."
COMMON = 0.75  # of the heads or layers that must change in the direction of the mean before it is news


@dataclass(frozen=True)
class Change:
    """One quantity over the runs.

    Attributes:
        quantity: the name of the column.
        means: its mean over heads or layers in every run; None where it was not measured.
        errors: standard errors of these means from those of the heads; None where heads have none.
        change: last mean minus first.
        size: the change in units of the spread among the heads or layers of the first run.
        risen: the share of heads or layers that are higher in the last run than in the first; None where they differ.
    """

    quantity: str
    means: list[float | None]
    errors: list[float | None]
    change: float
    size: float
    risen: float | None


def table(runs: Sequence[Document]) -> list[Change]:
    """Every quantity that the first and the last run share, the largest change first."""
    quantities = {name: facts for run in runs for name, facts in run["quantities"].items()}
    found = [
        change
        for name, facts in quantities.items()
        if facts.get("group") != "Controls" and facts["scale"] != "class" and name not in ("rows", "tokens")
        if (change := _change(name, facts["table"], runs)) is not None
    ]
    return sorted(found, key=lambda change: -abs(change.size))


def _change(name: str, which: str, runs: Sequence[Document]) -> Change | None:
    values = [_values(run, which, name) for run in runs]
    if not values[0] or not values[-1]:
        return None
    means = [fmean(found.values()) if found else None for found in values]
    first, last = values[0], values[-1]
    change = fmean(last.values()) - fmean(first.values())
    spread = pstdev(first.values()) or abs(fmean(first.values())) or 1.0
    risen = fmean(last[place] > first[place] for place in first) if first.keys() == last.keys() else None
    return Change(name, means, [_error(run, which, name) for run in runs], change, change / spread, risen)


def _values(run: Document, which: str, name: str) -> dict[tuple[Any, ...], float]:
    rows = run[which]
    return {
        (row.get("stack"), row.get("layer"), row.get("head")): row[name]
        for row in rows
        if isinstance(row.get(name), (int, float)) and math.isfinite(row[name])
    }


def _error(run: Document, which: str, name: str) -> float | None:
    # Heads see the same text, so their errors are not independent: the mean of the errors is the safe side.
    errors = _values(run, which, f"{name}_se")
    return fmean(errors.values()) if errors else None


def reservations(runs: Sequence[Document]) -> list[str]:
    """What a reader of the comparison has to keep in mind."""
    different = len({run["facts"]["text"]["sha256"] for run in runs}) > 1
    return [DIFFERENT_TEXTS] if different else []


def sentences(runs: Sequence[Document]) -> list[tuple[str, str, str]]:
    """Title, sentence and quantity of what a reader of checkpoints asks first; nothing where nothing changed."""
    changes = {change.quantity: change for change in table(runs)}
    found = []
    for name, fallen, risen, words in (
        ("entropy", "Attention gets sharper", "Attention gets broader", "the mean entropy of a head"),
        ("qk_norm", "Query-key weights shrink", "Query-key weights grow", "the mean largest query-key gain of a head"),
        (
            "ov_norm",
            "Output-value weights shrink",
            "Output-value weights grow",
            "the mean largest output-value gain of a head",
        ),
        ("sink_mass", "Sinks fade", "Sinks form", "the mean attention on the first token"),
        ("token_cosine", "Tokens become less alike", "Tokens become more alike", "the mean similarity of the tokens"),
        ("effective_rank", "Tokens lose directions", "Tokens gain directions", "the mean effective rank of the tokens"),
    ):
        change = changes.get(name)
        if change is None or abs(change.size) < 0.1 or not _is_common(change):
            continue
        facts = next(run["quantities"][name] for run in runs if name in run["quantities"])
        unit = f" {facts['unit']}" if facts["unit"] else ""
        path = " → ".join("–" if mean is None else f"{mean:.{facts['digits']}f}" for mean in change.means)
        sentence = f"{words[0].upper()}{words[1:]} goes {path}{unit}{_paired(change, facts['table'])}."
        found.append((risen if change.change > 0 else fallen, sentence, name))
    return found


def _is_common(change: Change) -> bool:
    """Whether most heads or layers change in the direction of the mean."""
    return change.risen is None or (change.risen if change.change > 0 else 1 - change.risen) >= COMMON


def _paired(change: Change, which: str) -> str:
    if change.risen is None:
        return ""
    share = change.risen if change.change > 0 else 1 - change.risen
    where = f"every {which[:-1]}" if share == 1 else f"{100 * share:.0f}\u202f% of the {which}"
    return f"; it {'rises' if change.change > 0 else 'falls'} in {where}"


def course(means: Sequence[float | None]) -> Markup:
    """The means over the runs as a line as small as a word."""
    known = [(number, mean) for number, mean in enumerate(means) if mean is not None]
    low, high = min(mean for _, mean in known), max(mean for _, mean in known)
    points = [
        (4 + 64 * number / max(len(means) - 1, 1), 17 - 14 * ((mean - low) / (high - low) if high > low else 0.5))
        for number, mean in known
    ]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2"/>' for x, y in points)
    return Markup(f'<svg class="course" viewBox="0 0 72 20" aria-hidden="true"><polyline points="{line}"/>{dots}</svg>')
