"""Comparison of inspections: of checkpoints of one training, or of different models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from massieu.inspection.quantities import QUANTITIES
from massieu.outputs.folders import publish
from massieu.outputs.spreadsheets import write_csv
from massieu.report.changes import ComparedRuns, distinct_names

if TYPE_CHECKING:
    import pandas

    from massieu.inspection.result import Inspection

__all__ = ["compare_heads", "compare_means", "compare_runs", "save_comparison"]

KEYS = ["stack", "layer", "head"]


def compare_heads(inspections: Sequence[Inspection]) -> pandas.DataFrame:
    """One row per head and quantity, one column per inspection; heads that a model lacks have nan."""
    import pandas

    parts = []
    names = distinct_names([{"facts": inspection.facts} for inspection in inspections])
    for name, inspection in zip(names, inspections, strict=True):
        table = inspection.heads
        values = [each for each in QUANTITIES if each in table and table[each].dtype.kind == "f"]
        long = table.melt(KEYS, values, "quantity", name).set_index([*KEYS, "quantity"])
        parts.append(long[~long.index.duplicated()])
    return pandas.concat(parts, axis=1).reset_index()


def compare_runs(inspections: Sequence[Inspection]) -> ComparedRuns:
    """Return the changes of every quantity, computed from the documents of the inspections."""
    return ComparedRuns([inspection.to_dict() for inspection in inspections])


def compare_means(compared: ComparedRuns) -> pandas.DataFrame:
    """One row per quantity, controls left out: means over heads (or layers), and the changes from first to last.

    Columns are ``table``, ``quantity``, the mean of each inspection, ``change`` of the mean, ``absolute_change`` (mean
    over heads of the absolute change, in which opposite changes do not cancel), and ``changed``: the number of the
    ``compared`` heads that change by more than two standard errors. They are nan where there is nothing to compare.
    """
    import pandas

    rows: list[dict[str, Any]] = []
    for each in compared.changes:
        changed, known = each.beyond or (None, None)
        rows.append({"table": compared.quantities[each.quantity]["table"], "quantity": each.quantity})
        rows[-1] |= dict(zip(compared.names, each.means, strict=True))
        rows[-1] |= {"change": each.change, "absolute_change": each.absolute, "changed": changed, "compared": known}
    return pandas.DataFrame(rows)


def save_comparison(inspections: Sequence[Inspection], compared: ComparedRuns, folder: Path) -> Path:
    """Write the page and the tables into a folder; all of them or none. Returns the path of the page."""
    from massieu.report.pages import render_comparison

    with publish(folder, "comparison", ", ".join(compared.names)) as place:
        (place / "comparison.html").write_text(render_comparison(compared), encoding="utf-8")
        for name, table in (("means", compare_means(compared)), ("heads", compare_heads(inspections))):
            write_csv(table, place / f"comparison_{name}.csv")
            table.to_parquet(place / f"comparison_{name}.parquet", index=False)
    return folder / "comparison.html"
