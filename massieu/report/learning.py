"""The page of a training run: error against examples, sensitivities, matrices, and retrieval against learning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from massieu.report.pages import page
from massieu.report.verdicts import line_chart

__all__ = ["heat_map", "render_learning"]

CELL = 26


def render_learning(document: Mapping[str, Any]) -> str:
    """The page as one file without network requests.

    Args:
        document: as ``massieu learn --json`` prints it.
    """
    names = list(dict.fromkeys(row["predictor"] for row in document["curve"]))
    rows = {name: [row for row in document["curve"] if row["predictor"] == name] for name in names}
    errors = _chart(
        [row["examples"] for row in rows[names[0]]],
        {name: [row["error"] for row in own] for name, own in rows.items()},
        "examples",
        "squared error",
    )
    history = document["history"]
    training = _chart(
        [row["step"] for row in history],
        {name: [row[name] for row in history] for name in ("loss", "error")},
        "step",
        "training loss, and error after all examples",
    )
    last = [own[-1] for own in rows.values()]
    own = next(row["error"] for row in last if row["predictor"] == "model")
    cosines = {row["predictor"]: row for row in document["sensitivities"]}
    values = {"errors": errors, "training": training, "last": last, "own": own, "cosines": cosines}
    return page("learning.html", **document, **values, line_chart=line_chart, heat_map=heat_map)


def heat_map(matrix: Sequence[Sequence[float]], largest: float, name: str) -> Markup:
    """A matrix as squares whose opacity is the size of an entry; negative entries have the other colour."""
    size = CELL * len(matrix)
    cells = "".join(
        f'<rect x="{CELL * j}" y="{CELL * i}" width="{CELL - 1}" height="{CELL - 1}"'
        f' fill="{"#00548a" if value >= 0 else "#b5432a"}" fill-opacity="{_share(value, largest):.3f}">'
        f"<title>{value:.4f}</title></rect>"
        for i, row in enumerate(matrix)
        for j, value in enumerate(row)
    )
    return Markup(f'<svg viewBox="0 0 {size} {size}" width="{min(size, 320)}" role="img">{{}}{cells}</svg>').format(
        Markup("<title>{}</title>").format(name)
    )


def _share(value: float, largest: float) -> float:
    return min(1.0, abs(value) / largest) if largest else 0.0


def _chart(x: list[Any], series: dict[str, list[Any]], x_label: str, y_label: str) -> dict[str, Any]:
    return {"x": x, "series": series, "log_x": False, "log_y": True, "x_label": x_label, "y_label": y_label}
