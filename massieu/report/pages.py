"""Pages of one inspection and of several side by side, from the documents of ``inspection.json``."""

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
from massieu.plotting.color_limits import color_limits, row_length
from massieu.report import SCHEMA, rulers
from massieu.report.changes import NO_LOSS, ComparedRuns, distinct_names, sparkline_svg
from massieu.report.formula import typeset
from massieu.report.glossary import WORDS
from massieu.report.number_format import brief, fixed, small_number, thousands
from massieu.report.reference import reference, usual

__all__ = ["compare", "inline_json", "page", "render", "render_comparison"]

PROSE = {"name", "formula", "explanation", "symbol", "least", "most"}
"""Fields of a quantity that only the glossary of a page shows; its scripts do not read them."""
Document = Mapping[str, Any]


def render(inspection: Document) -> str:
    """Return the page of an inspection: findings, maps of the heads, profiles of the layers, tables, provenance.

    Args:
        inspection: the document of ``inspection.json``. Everything in it is escaped.

    Returns:
        HTML with its styles, scripts and figures inside; it makes no network requests.
    """
    _check(inspection)
    values = {"rulers": rulers.rulers(inspection), "experiments": rulers.summary(inspection)}
    values |= {"usual": usual(inspection), "reference": reference(), "about_verdicts": rulers.ABOUT_VERDICTS}
    return _page("inspection.html", [inspection], run={"predictions": [], **inspection}, **values)


def compare(inspections: Sequence[Document]) -> str:
    """Return the page of several inspections side by side: maps on one scale, differences, overlaid profiles.

    Args:
        inspections: documents of ``inspection.json``; of checkpoints, the earliest first.
    """
    if len(inspections) < 2:
        raise UserError(f"compare needs two or more inspections, got {len(inspections)}; render shows a single one")
    for inspection in inspections:
        _check(inspection)
    return render_comparison(ComparedRuns(inspections))


def render_comparison(compared: ComparedRuns) -> str:
    """Return the page of inspections that are compared already."""
    return _page("comparison.html", compared.runs, compared=compared, no_loss=NO_LOSS)


def _check(inspection: Document) -> None:
    schema = inspection.get("schema") if isinstance(inspection, Mapping) else None
    if schema != SCHEMA:
        raise UserError(
            f"an inspection must have the schema {SCHEMA!r}, got {schema!r};"
            " pass an inspection.json written by massieu inspect"
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
            continue  # not measured, so not explained
        groups.setdefault(quantity.get("group") or quantity["table"], []).append({**quantity, "name": name})
    values |= {"groups": groups, "data": inline_json(data), "row_length": runs[0]["row_length"]}
    text = page(template, runs=inspections, names=names, **values)
    return re.sub(r"\n[ \t]+", "\n", text)  # without the indentation of the templates


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
    """Return a rendered template of this package."""
    text: str = _environment().get_template(template).render(**values)
    return text


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return a table by columns, with six significant digits and errors with three: half as long as a list of rows."""
    names = {name: None for row in rows for name in row}
    return {name: [_plain(row.get(name), 3 if name.endswith("_se") else 6) for row in rows] for name in names}


def _plain(value: Any, digits: int) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    return value


def inline_json(data: Any) -> str:
    """Return data as JSON for a script element of a page.

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
        "thousands": thousands,
        "number": fixed,
        "error": small_number,
        "brief": brief,
    }
    assets = files("massieu.report") / "assets"
    functions: dict[str, Any] = {
        "asset": lambda name: (assets / name).read_text(encoding="utf-8"),
        "place": rulers.place,
        "beyond": rulers.beyond,
        "track": (rulers.CONTROL, rulers.THEORY),
        "words": WORDS,
        "sparkline": sparkline_svg,
    }
    environment.globals |= functions
    return environment
