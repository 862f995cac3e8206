"""Page of an in-context learner: error against examples, sensitivities, matrices, and retrieval against learning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from massieu.report.charts import Line, chart, cloud, matrix_map
from massieu.report.number_format import brief
from massieu.report.pages import page

__all__ = ["render_learning"]

STRONG = ("model", "gradient step", "best linear layer")
ROUNDING = 1e-9
SAME_COSINE = 1e-6  # rounding of cosines of sensitivities in float32
ROOM = 30  # the axis of errors starts at this fraction of the least error of the model, if others are exact


def render_learning(document: Mapping[str, Any]) -> str:
    """Return the page as one file without network requests.

    Args:
        document: as ``massieu learn --json`` prints it.
    """
    curves = _by_predictor(document["curve"])
    last = max(row["examples"] for row in document["curve"])
    ends = {name: rows[-1] for name, rows in curves.items()}
    best = next((name for name in curves if name.endswith("(Bayes)")), None)
    cosines = {row["predictor"]: row for row in document["sensitivities"] if row["examples"] == last}
    values = {
        "errors": _errors(curves, best),
        "training": _training(document["history"]),
        "cosine_chart": _cosines(document["sensitivities"], best, list(curves)),
        "clouds": _clouds(document["slopes"]),
        "maps": _maps(document["matrices"]),
        "last": last,
        "ends": ends,
        "own": ends["model"],
        "over": _over,
        "few": [name for name, row in ends.items() if row["tasks"] < ends["model"]["tasks"]],
        "best": best,
        "nearest": _nearest(list(cosines.values())),
        "cosines": cosines,
        "curves": curves,
        "shifts": _by_shift(document.get("shifts", [])),
        "shift_names": list(dict.fromkeys(row["predictor"] for row in document.get("shifts", []))),
        "undecided": any(row["follows"] == "undecided" for row in document["hypotheses"]),
        "task": {name: _written(value) for name, value in document["facts"]["task"].items() if value is not None},
    }
    return page("learning.html", **{**document, **values})


def _nearest(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return sentences on the predictors nearest to the model."""
    if not rows:
        return ""
    best, *others = sorted(rows, key=lambda row: -row["cosine"])
    text = (
        f"Its sensitivities are nearest to those of {best['predictor']}:"
        f" mean cosine {best['cosine']:.4f} ± {brief(best['standard_error'])}."
    )
    same = [row for row in others if row["behind"] <= max(2 * (row["behind_error"] or 0), SAME_COSINE)]
    behind = [row for row in others if row not in same]
    if same:
        text += f" It cannot be distinguished from {', '.join(map(_behind, same))}."
    if behind:
        text += f" The next is {_behind(behind[0])}."
    return text


def _behind(row: Mapping[str, Any]) -> str:
    return f"{row['predictor']} (behind by {brief(row['behind'])} ± {brief(row['behind_error'])})"


def _over(error: float | None, other: float | None) -> str:
    """Return the ratio of two errors; a dash where the second is zero up to rounding."""
    if error is None or other is None or other <= ROUNDING * error:
        return "–"
    return brief(error / other)


def _written(value: Any) -> str:
    """Return a fact in few words."""
    if not isinstance(value, list):
        return str(value)
    if any(not isinstance(row, list) for row in value):
        return ", ".join(map(str, value))
    one = all(entry == (i == j) for i, row in enumerate(value) for j, entry in enumerate(row))
    return "identity" if one else "; ".join(" ".join(brief(entry) for entry in row) for row in value)


def _by_predictor(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    names = dict.fromkeys(row["predictor"] for row in rows)
    return {name: [row for row in rows if row["predictor"] == name] for name in names}


def _by_shift(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Mapping[str, Any]]]:
    names = dict.fromkeys(row["shift"] for row in rows)
    return {name: {row["predictor"]: row for row in rows if row["shift"] == name} for name in names}


def _errors(curves: Mapping[str, Sequence[Mapping[str, Any]]], best: str | None) -> str:
    most = len(curves["model"])
    lines = [
        Line(
            name,
            [row["examples"] for row in rows],
            [row["error"] for row in rows],
            strong=name in (*STRONG, best),
            dashed=len(rows) < most,
            notes=[f" ± {brief(row['standard_error'])}" for row in rows],
        )
        for name, rows in curves.items()
    ]
    own = [row["error"] for row in curves["model"] if row["error"]]
    known = [value for line in lines for value in line.y if value]
    span = max(min(known), min(own) / ROOM) / 1.2, min(max(known), 2 * max(own))
    return chart(lines, "examples", "squared error", log_y=True, span=span)


def _training(history: Sequence[Mapping[str, Any]]) -> str:
    steps = [row["step"] for row in history]
    names = {"error": "error after all examples", "loss": "training loss"}
    lines = [Line(names[name], steps, [row[name] for row in history], strong=name == "error") for name in names]
    return chart(lines, "step", "squared error", log_y=True)


def _cosines(rows: Sequence[Mapping[str, Any]], best: str | None, names: Sequence[str]) -> str:
    lines = [
        Line(
            name,
            [row["examples"] for row in own],
            [row["cosine"] for row in own],
            strong=name in (*STRONG, best),
            notes=[f", least {brief(row['least_cosine'])}" for row in own],
            color=names.index(name),
        )
        for name, own in _by_predictor(rows).items()
    ]
    return chart(lines, "examples", "mean cosine with the sensitivity of the model")


def _clouds(slopes: Mapping[str, Sequence[Sequence[float]]]) -> list[str]:
    flat = {name: [value for row in rows for value in row] for name, rows in slopes.items()}
    own = flat.pop("model", [])
    return [cloud(values, own, name, "model") for name, values in flat.items()]


def _maps(matrices: Mapping[str, Any] | None) -> list[str]:
    if matrices is None:
        return []
    learned, best = matrices["learned"], matrices["closed form"]
    largest = max(abs(value) for rows in (learned, best) for row in rows for value in row)
    gap = [[a - b for a, b in zip(one, other, strict=True)] for one, other in zip(learned, best, strict=True)]
    parts = (("learned", learned), ("closed form", best), ("learned − closed form", gap))
    return [matrix_map(matrix, largest, title) for title, matrix in parts]
