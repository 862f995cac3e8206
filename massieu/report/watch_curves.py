"""Curves, flags and a summary of the log of a watched run, for the terminal and the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["Curves", "Document", "curves_by_layer", "grouped", "recorded", "summary"]

Document = Mapping[str, Any]
Curves = dict[str, list[float | None]]  # "min", "median" and "max" of heads, or "value" of a layer


def curves_by_layer(document: Document) -> dict[str, dict[str, Curves]]:
    """Return the series by quantity and layer, without those of single heads and recorded values."""
    found: dict[str, dict[str, Curves]] = {}
    for name, values in document["series"].items():
        quantity, _, place = name.partition("/")
        if not place:
            continue
        label, *rest = place.split("/")
        key = rest[0] if rest else "value"
        if not key.startswith("head") and any(value is not None for value in values):
            found.setdefault(quantity, {}).setdefault(label, {})[key] = values
    return found


def recorded(document: Document) -> Curves:
    """Return the series of recorded values by name, such as the loss."""
    return {
        name: values
        for name, values in document["series"].items()
        if "/" not in name and any(value is not None for value in values)
    }


def summary(document: Document) -> str:
    """Return the numbers of readings, flags and restarts in one sentence."""
    steps, raised = document["steps"], document["raised"]
    count = f"{len(steps)} readings, steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"
    ever = sum(flag["state"] == "raised" for flag in document["flags"])
    up = f"{len(raised)} flag{'s' * (len(raised) != 1)}"
    parts = [count, f"{up} raised" if ever == len(raised) else f"{up} up now, {ever} raised in all"]
    if document["restarts"]:
        parts.append(f"restarted {document['restarts']} time{'s' * (document['restarts'] != 1)}")
    if document["broken"]:
        parts.append(f"{document['broken']} line{'s' * (document['broken'] != 1)} could not be read")
    return ", ".join(parts)


def grouped(raised: Sequence[Document]) -> list[dict[str, str]]:
    """Group flags by name, each with the places and steps where it was raised and the reason of the latest one."""
    found = []
    for name in dict.fromkeys(flag["name"] for flag in raised):
        own = [flag for flag in raised if flag["name"] == name]
        places = []
        for label in dict.fromkeys(flag["label"] for flag in own):
            heads = sorted(flag["head"] for flag in own if flag["label"] == label and flag["head"] is not None)
            words = f" head{'s' * (len(heads) > 1)} {', '.join(map(str, heads))}" if heads else ""
            places.append(label.replace(".", " ") + words)
        first, last = min(flag["step"] for flag in own), max(flag["step"] for flag in own)
        when = f"since step {first}" if first == last else f"first raised at step {first}, last at step {last}"
        sentence = f"{own[-1]['reason']} [{own[-1]['reference']}]"
        found.append({"name": name, "where": f"in {'; '.join(places)}, {when}", "sentence": sentence})
    return found
