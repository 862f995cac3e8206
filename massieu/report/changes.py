"""Comparison of inspections: a table of changes, paired head by head, and sentences computed from it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, pstdev
from typing import Any

from markupsafe import Markup

from massieu.report.number_format import is_finite, small_number

__all__ = ["NO_LOSS", "Change", "ComparedRuns", "distinct_names", "sparkline_svg"]

Document = Mapping[str, Any]
Place = tuple[Any, ...]
DIFFERENT_TEXTS = "These runs read different texts, so a difference may come from the text and not from the model."
NO_LOSS = "A comparison of attention does not measure the loss: evaluate the models as well before you call them equal."
COMMON = 0.75  # smallest share of the changing heads or layers that makes the direction of the mean a common one
DOMINANT = 0.5 + 1e-9  # of the summed absolute changes, without the rounding of equal halves
NOTABLE = 0.1  # size from which a change gets a sentence
LEAST_SPREAD = 0.01  # of the mean magnitude; a smaller spread is not used as a unit

TITLES = {
    "entropy": ("Attention gets sharper", "Attention gets broader"),
    "qk_norm": ("Query-key weights shrink", "Query-key weights grow"),
    "ov_norm": ("Output-value weights shrink", "Output-value weights grow"),
    "sink_mass": ("Sinks fade", "Sinks form"),
    "token_cosine": ("Tokens become less alike", "Tokens become more alike"),
    "effective_rank": ("Tokens lose directions", "Tokens gain directions"),
}
"""Quantities of the first sentences, with the titles of a fall and of a rise."""


@dataclass(frozen=True)
class Change:
    """Change of one quantity over the runs.

    Attributes:
        quantity: the name of the column.
        means: mean over heads or layers in every run; None where it was not measured.
        errors: standard errors of the means from those of the heads; None where heads have none.
        change: last mean minus first.
        absolute: mean over heads or layers of the absolute change from the first run to the last, in which opposite
            changes do not cancel; None if the runs have different heads or layers.
        size: the absolute change, or without one the change of the mean, as a multiple of ``unit``.
        unit: the spread among the heads or layers of the first run, or, where they are larger, the standard error or a
            hundredth of the values.
        risen: share of heads or layers that are higher in the last run than in the first; None if they differ.
        fallen: share of heads or layers that are lower.
        beyond: number of heads or layers that change by more than two standard errors of the difference, and number of
            those with standard errors; None if there are none. The errors are added as if the runs had read different
            texts: on the same text smaller changes may be real as well.
        layer: name of the layer that holds more than half of the summed absolute changes; None if there is none.
    """

    quantity: str
    means: list[float | None]
    errors: list[float | None]
    change: float
    absolute: float | None
    size: float
    unit: str
    risen: float | None
    fallen: float | None
    beyond: tuple[int, int] | None
    layer: str | None


@dataclass(frozen=True)
class ComparedRuns:
    """Inspections side by side; the changes are computed once.

    Attributes:
        runs: documents of ``inspection.json``; of checkpoints, the earliest first.
    """

    runs: Sequence[Document]

    @cached_property
    def names(self) -> list[str]:
        """Distinct names of the runs."""
        return distinct_names(self.runs)

    @cached_property
    def quantities(self) -> dict[str, Document]:
        """Quantities of all runs by name."""
        return {name: facts for run in self.runs for name, facts in run["quantities"].items()}

    @cached_property
    def changes(self) -> list[Change]:
        """Changes of every quantity shared by the first and the last run, in the order of the quantities."""
        return [
            change
            for name, facts in self.quantities.items()
            if facts.get("group") != "Controls" and facts["scale"] != "class" and name not in ("rows", "tokens")
            if (change := _change(name, facts["table"], self.runs)) is not None
        ]

    @cached_property
    def largest_first(self) -> list[Change]:
        """The changes in descending order of their size."""
        return sorted(self.changes, key=lambda change: -change.size)

    @property
    def reservations(self) -> list[str]:
        """Sentences that limit the conclusions from the comparison."""
        different = len({run["facts"]["text"]["sha256"] for run in self.runs}) > 1
        return [DIFFERENT_TEXTS] if different else []

    @property
    def sentences(self) -> list[tuple[str, str, str]]:
        """Title, sentence and quantity of every notable change among the usual quantities, and of the largest one."""
        selected = [change for name in TITLES for change in self.changes if change.quantity == name]
        selected += [change for change in self.largest_first[:1] if change.quantity not in TITLES]
        return [_described(change, self.quantities[change.quantity]) for change in selected if change.size >= NOTABLE]

    @property
    def overall(self) -> str:
        """One sentence on the largest change, whatever its size."""
        if not self.changes:
            return "The runs share no quantity that could be compared."
        change = self.largest_first[0]
        if change.size == 0:
            return "No value differs between the first and the last run."
        facts = self.quantities[change.quantity]
        which = facts["table"]
        if change.absolute is None:
            amount = f"{_amount(abs(change.change), facts)} in the mean over the {which}"
        else:
            amount = f"{_amount(change.absolute, facts)} on average over the {which}{_mostly(change)}"
        times = "less than a tenth of" if change.size < NOTABLE else f"{change.size:.1f} times"
        return (
            f"The largest change is that of {facts['title']}: {amount}, {times} {change.unit}{_beyond(change, which)}."
        )


def distinct_names(runs: Sequence[Document]) -> list[str]:
    """Return the names of the models; repeated names with the folders of their runs, or numbered."""
    names = [str(run["facts"]["model"].get("name") or "unnamed model") for run in runs]
    folders = [run["facts"].get("run") for run in runs]
    if len(set(names)) < len(names) and len(set(folders)) == len(folders) and all(folders):
        return [f"{name} ({folder})" for name, folder in zip(names, folders, strict=True)]
    return [f"{name} ({names[: i + 1].count(name)})" if names.count(name) > 1 else name for i, name in enumerate(names)]


def _change(name: str, which: str, runs: Sequence[Document]) -> Change | None:
    values = [_values(run, which, name) for run in runs]
    first, last = values[0], values[-1]
    if not first or not last:
        return None
    means = [fmean(found.values()) if found else None for found in values]
    errors = [_error(run, which, name) for run in runs]
    change = fmean(last.values()) - fmean(first.values())
    paired = _paired(first, last) if _places(runs[0], which) == _places(runs[-1], which) else {}
    absolute = fmean(map(abs, paired.values())) if paired else None
    size = abs(change) if absolute is None else absolute
    magnitude = fmean(map(abs, (*first.values(), *last.values())))
    units = {
        f"the spread among the {which}": pstdev(first.values()),
        "the standard error": errors[0] or 0.0,
        "a hundredth of the values": LEAST_SPREAD * magnitude,
    }
    unit = max(units, key=units.__getitem__)
    risen = fmean(difference > 0 for difference in paired.values()) if paired else None
    fallen = fmean(difference < 0 for difference in paired.values()) if paired else None
    beyond = _count_beyond(paired, *(_values(run, which, f"{name}_se") for run in (runs[0], runs[-1])))
    size = size / units[unit] if size else 0.0
    return Change(name, means, errors, change, absolute, size, unit, risen, fallen, beyond, _dominant(paired))


def _dominant(paired: Mapping[Place, float]) -> str | None:
    """Name the layer that holds more than half of the absolute changes, with its stack if there are several."""
    sums: dict[Place, float] = {}
    for (stack, layer, _), difference in paired.items():
        sums[stack, layer] = sums.get((stack, layer), 0.0) + abs(difference)
    total = sum(sums.values())
    if len(sums) < 2 or not total:
        return None
    stack, layer = largest = max(sums, key=sums.__getitem__)
    if sums[largest] / total <= DOMINANT:
        return None
    several = len({each for each, _ in sums}) > 1
    return f"{stack} layer {layer}" if several else f"layer {layer}"


def _paired(first: Mapping[Place, float], last: Mapping[Place, float]) -> dict[Place, float]:
    return {place: last[place] - value for place, value in first.items() if place in last}


def _count_beyond(paired: Mapping[Place, float], *errors: Mapping[Place, float]) -> tuple[int, int] | None:
    known = [place for place in paired if all(place in found for found in errors)]
    count = sum(abs(paired[place]) > 2 * math.hypot(*(found[place] for found in errors)) for place in known)
    return (count, len(known)) if known else None


def _values(run: Document, which: str, name: str) -> dict[Place, float]:
    return {_place(row): row[name] for row in run[which] if is_finite(row.get(name))}


def _place(row: Document) -> Place:
    return row.get("stack"), row.get("layer"), row.get("head")


def _places(run: Document, which: str) -> set[Place]:
    return {_place(row) for row in run[which]}


def _error(run: Document, which: str, name: str) -> float | None:
    # Heads read the same text, so their errors are dependent: the mean of the errors is an upper bound.
    errors = _values(run, which, f"{name}_se")
    return fmean(errors.values()) if errors else None


def _described(change: Change, facts: Document) -> tuple[str, str, str]:
    rises = change.change > 0
    along, against = (change.risen, change.fallen) if rises else (change.fallen, change.risen)
    if along is not None and against is not None and along < COMMON * (along + against):
        title = f"{facts['title']} changes {f'mostly in {change.layer}' if change.layer else 'in both directions'}"
    else:
        title = TITLES.get(change.quantity, (f"A fall of “{facts['title']}”", f"A rise of “{facts['title']}”"))[rises]
    return title, " ".join(_clauses(change, facts)), change.quantity


def _clauses(change: Change, facts: Document) -> Iterator[str]:
    which, unit = facts["table"], f" {facts['unit']}" if facts["unit"] else ""
    path = " → ".join("–" if mean is None else f"{mean:.{facts['digits']}f}" for mean in change.means)
    yield f"The mean over {which} of “{facts['title']}” goes {path}{unit}."
    if change.absolute is not None and change.risen is not None:
        where = f"every {which[:-1]}" if change.risen == 1 else f"{100 * change.risen:.0f}\u202f% of the {which}"
        amount = f"A {which[:-1]} changes by {_amount(change.absolute, facts)} on average{_mostly(change)}"
        yield f"{amount}; it rises in {where}{_beyond(change, which)}."


def _mostly(change: Change) -> str:
    return f", most of it in {change.layer}" if change.layer else ""


def _beyond(change: Change, which: str) -> str:
    if change.beyond is None:
        return ""
    beyond, known = change.beyond
    return f", and {beyond} of {known} {which} change by more than two standard errors"


def _amount(value: float, facts: Document) -> str:
    return f"{small_number(value, facts['digits'])} {facts['unit']}".strip()


def sparkline_svg(means: Sequence[float | None]) -> Markup:
    """Return the means over the runs as a line of the size of a word."""
    known = [(number, mean) for number, mean in enumerate(means) if mean is not None]
    low, high = min(mean for _, mean in known), max(mean for _, mean in known)
    points = [
        (4 + 64 * number / max(len(means) - 1, 1), 17 - 14 * ((mean - low) / (high - low) if high > low else 0.5))
        for number, mean in known
    ]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2"/>' for x, y in points)
    return Markup(
        f'<svg class="sparkline" viewBox="0 0 72 20" aria-hidden="true"><polyline points="{line}"/>{dots}</svg>'
    )
