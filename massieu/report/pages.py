"""The two pages, from the documents that ``inspection.json`` holds to text that a browser opens without a network."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from massieu.checks import UserError
from massieu.plotting import colors
from massieu.report import changes, theory
from massieu.report.formula import typeset
from massieu.report.reference import reference, usual
from massieu.report.scales import color_limits, row_length
from massieu.report.words import WORDS

__all__ = ["brief", "compare", "distinct_names", "inline_json", "page", "render"]

SCHEMA = "massieu.inspection/2"
PROSE = {"name", "formula", "explanation", "symbol", "least", "most"}
"""What the scripts of a page do not read of a quantity: the glossary has it."""
Document = Mapping[str, Any]


def render(inspection: Document) -> str:
    """One inspection as a page: findings, maps of the heads, profiles of the layers, tables, meaning and provenance.

    Args:
        inspection: the document of ``inspection.json``. Everything in it is escaped.

    Returns:
        HTML with its styles, scripts and figures inside; it asks the network for nothing.
    """
    _check(inspection)
    values = {"rulers": theory.rulers(inspection), "experiments": theory.summary(inspection)}
    values |= {"usual": usual(inspection), "reference": reference(), "about_verdicts": theory.ABOUT_VERDICTS}
    return _page("inspection.html", [inspection], run={"predictions": [], **inspection}, **values)


def compare(inspections: Sequence[Document]) -> str:
    """Two or more inspections side by side, in the given order: maps on one scale, differences, profiles overlaid.

    Args:
        inspections: documents of ``inspection.json``; of checkpoints, the earliest first.
    """
    if len(inspections) < 2:
        raise UserError(f"compare needs two or more inspections, got {len(inspections)}; render shows a single one")
    for inspection in inspections:
        _check(inspection)
    found = {"rows": changes.table(inspections), "sentences": changes.sentences(inspections)}
    found |= {"overall": changes.overall(inspections), "no_loss": changes.NO_LOSS}
    return _page("comparison.html", inspections, **found, reservations=changes.reservations(inspections))


def _check(inspection: Document) -> None:
    schema = inspection.get("schema") if isinstance(inspection, Mapping) else None
    if schema != SCHEMA:
        raise UserError(
            f"an inspection must have the schema {SCHEMA!r}, got {schema!r};"
            " give the inspection.json that massieu inspect has written"
        )


def _page(template: str, inspections: Sequence[Document], **values: Any) -> str:
    names = distinct_names(inspections)
    quantities = {name: facts for run in inspections for name, facts in run["quantities"].items()}
    runs = [_run(name, run) for name, run in zip(names, inspections, strict=True)]
    data = {
        "runs": runs,
        "quantities": {name: _for_scripts(facts) for name, facts in quantities.items()},
        "limits": {name: _limits(name, facts, runs) for name, facts in quantities.items() if facts["table"] == "heads"},
        "findings": [dict(found) for run in inspections[:1] for found in run.get("findings", [])],
        "colors": {
            scale.__name__: [scale(), scale(True)]
            for scale in (colors.sequential, colors.diverging, colors.classes, colors.lines)
        },
    }
    groups: dict[str, list[dict[str, Any]]] = {}
    for name, quantity in quantities.items():
        if not any(run[quantity["table"]] for run in inspections):
            continue  # what was not measured need not be explained
        groups.setdefault(quantity.get("group") or quantity["table"], []).append({**quantity, "name": name})
    values |= {"groups": groups, "data": inline_json(data), "row_length": runs[0]["row_length"]}
    text = page(template, runs=inspections, names=names, **values)
    return re.sub(r"\n[ \t]+", "\n", text)  # indentation is of use in the sources only


def _run(name: str, run: Document) -> dict[str, Any]:
    heads = _columns(run["heads"])
    length = row_length(heads)
    rounded = None if length is None else round(length)
    return {"name": name, "heads": heads, "layers": _columns(run["layers"]), "row_length": rounded}


def _for_scripts(quantity: Document) -> dict[str, Any]:
    return {key: value for key, value in quantity.items() if key not in PROSE and value not in (None, "")}


def _limits(name: str, quantity: Document, runs: Sequence[Document]) -> list[float]:
    """Return the ends of the color scale that all runs share."""
    values = [value for run in runs for value in run["heads"].get(name, ())]
    length = max((run["row_length"] for run in runs if run["row_length"]), default=None)
    possible = quantity.get("least"), quantity.get("most")  # documents of earlier versions have neither
    return list(color_limits(values, quantity["scale"], *possible, neutral=quantity["neutral"], length=length))


def page(template: str, **values: Any) -> str:
    """A template of this package with its values."""
    text: str = _environment().get_template(template).render(**values)
    return text


def distinct_names(inspections: Sequence[Document]) -> list[str]:
    """The names of the models; where they repeat, with the folders of their runs, or numbered."""
    names = [str(run["facts"]["model"].get("name") or "unnamed model") for run in inspections]
    folders = [run["facts"].get("run") for run in inspections]
    if len(set(names)) < len(names) and len(set(folders)) == len(folders) and all(folders):
        return [f"{name} ({folder})" for name, folder in zip(names, folders, strict=True)]
    return [f"{name} ({names[: i + 1].count(name)})" if names.count(name) > 1 else name for i, name in enumerate(names)]


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """A table by columns, with six significant digits, errors with three: less than half as long as rows of objects."""
    names = {name: None for row in rows for name in row}
    return {name: [_plain(row.get(name), 3 if name.endswith("_se") else 6) for row in rows] for name in names}


def _plain(value: Any, digits: int) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    return value


def inline_json(data: Any) -> str:
    """Data as JSON that may stand in a script element of a page.

    Example:
        >>> inline_json({"name": "</script>"})
        '{"name":"\\\\u003c/script>"}'
    """
    # Only "</script" and "<!--" could end the element early: no "<" leaves this function.
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("massieu.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "typeset": typeset,
        "thousands": _thousands,
        "number": number,
        "error": error,
        "brief": brief,
    }
    assets = files("massieu.report") / "assets"
    functions: dict[str, Any] = {
        "asset": lambda name: (assets / name).read_text(encoding="utf-8"),
        "place": theory.place,
        "beyond": theory.beyond,
        "track": (theory.CONTROL, theory.THEORY),
        "words": WORDS,
        "course": changes.course,
    }
    environment.globals |= functions
    return environment


def _thousands(value: Any) -> str:
    """A count with thin spaces between thousands, as an article sets it."""
    return "–" if value is None else f"{value:,}".replace(",", "\u2009") if isinstance(value, int) else str(value)


def number(value: float | None, digits: int = 2) -> str:
    """A figure with a true minus sign; a dash where there is none."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{round(value, digits) + 0.0:.{digits}f}".replace("-", "−")  # plus zero: no −0.00


def brief(value: float | None) -> str:
    """A figure in three digits, whatever its size."""
    return "–" if value is None or not math.isfinite(value) else f"{value:.3g}".replace("-", "−")


def error(value: float, digits: int = 2) -> str:
    """A standard error, with one significant digit where the decimals of its figure would show zero."""
    return f"{value:.{digits}f}" if value >= 0.5 * 10**-digits or value == 0 else f"{value:.1g}"
