"""Inspections side by side: of checkpoints of one training, or of different models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from massieu.inspection.quantities import QUANTITIES
from massieu.outputs.folders import written_together
from massieu.outputs.spreadsheets import write_csv
from massieu.report import changes
from massieu.report.pages import distinct_names

if TYPE_CHECKING:
    import pandas

    from massieu.inspection.result import Inspection

__all__ = ["compare_heads", "compare_means", "reservations", "save_comparison"]

KEYS = ["stack", "layer", "head"]


def compare_heads(inspections: Sequence[Inspection]) -> pandas.DataFrame:
    """One row per head and quantity, one column per inspection; heads that a model lacks have nan."""
    import pandas

    parts = []
    for name, inspection in zip(_names(inspections), inspections, strict=True):
        table = inspection.heads
        values = [each for each in QUANTITIES if each in table and table[each].dtype.kind == "f"]
        long = table.melt(KEYS, values, "quantity", name).set_index([*KEYS, "quantity"])
        parts.append(long[~long.index.duplicated()])
    return pandas.concat(parts, axis=1).reset_index()


def compare_means(inspections: Sequence[Inspection]) -> pandas.DataFrame:
    """One row per quantity, controls left out: means over heads (or layers), and the changes from first to last.

    Columns are ``table``, ``quantity``, the mean of each inspection, ``change`` of the mean, ``absolute_change`` (mean
    over heads of the absolute change, in which opposite changes do not cancel), and ``changed``: how many of the
    ``compared`` heads change by more than two standard errors. They are nan where there is nothing to compare.
    """
    import pandas

    names, order = _names(inspections), list(QUANTITIES)
    found = changes.table([inspection.to_dict() for inspection in inspections])
    rows: list[dict[str, Any]] = []
    for each in sorted(found, key=lambda change: order.index(change.quantity)):
        changed, compared = each.beyond or (None, None)
        rows.append({"table": QUANTITIES[each.quantity].table, "quantity": each.quantity})
        rows[-1] |= dict(zip(names, each.means, strict=True))
        rows[-1] |= {"change": each.change, "absolute_change": each.absolute, "changed": changed, "compared": compared}
    return pandas.DataFrame(rows)


def reservations(inspections: Sequence[Inspection]) -> list[str]:
    """What a reader of the comparison has to keep in mind."""
    return changes.reservations([{"facts": inspection.facts} for inspection in inspections])


def save_comparison(inspections: Sequence[Inspection], folder: Path) -> Path:
    """Write the page and the tables into a folder; all of them or none. Returns the path of the page."""
    from massieu.report import compare

    with written_together(folder, "comparison", ", ".join(_names(inspections))) as place:
        (place / "comparison.html").write_text(compare([each.to_dict() for each in inspections]), encoding="utf-8")
        for name, table in (("means", compare_means(inspections)), ("heads", compare_heads(inspections))):
            write_csv(table, place / f"comparison_{name}.csv")
            table.to_parquet(place / f"comparison_{name}.parquet", index=False)
    return folder / "comparison.html"


def _names(inspections: Sequence[Inspection]) -> list[str]:
    return distinct_names([{"facts": inspection.facts} for inspection in inspections])
