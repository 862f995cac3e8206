"""Words for rows of tables: counts, places, ranges of layers, numbers as in print."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas

__all__ = [
    *(
        "above",
        "capital",
        "count",
        "decimals",
        "head_name",
        "known",
        "layer_ranges",
        "number",
        "percent",
        "places",
        "stacks",
    ),
    "stack_word",
]


def known(table: pandas.DataFrame | None, *columns: str) -> pandas.DataFrame:
    """Return the rows with a finite number in every one of the columns; none where a column is missing."""
    import pandas

    if table is None or any(column not in table for column in columns):
        return pandas.DataFrame(columns=["stack", "layer", "head", *columns])
    filled = table.assign(**{column: pandas.to_numeric(table[column], errors="coerce") for column in columns})
    return filled[filled[list(columns)].abs().lt(float("inf")).all(axis=1)]


def stacks(table: pandas.DataFrame | None) -> Iterator[tuple[str, pandas.DataFrame]]:
    """Yield the blocks of each stack in order, with a word to tell the stacks apart where there are several."""
    if table is None or "layer" not in table or table.empty:
        return
    if "stack" not in table:
        yield "", table.sort_values("layer")
        return
    for stack in table["stack"].unique():
        several = table["stack"].nunique() > 1
        yield f"{stack_word(stack)} " if several else "", table[table["stack"] == stack].sort_values("layer")


def layer_ranges(rows: pandas.DataFrame) -> str:
    """Name the layers of some rows, by stack where there are several.

    Example:
        >>> import pandas
        >>> layer_ranges(pandas.DataFrame({"stack": "decoder", "layer": [3, 4, 4, 5, 6, 7, 9]}))
        'layers 3 to 7 and 9'
        >>> layer_ranges(pandas.DataFrame({"stack": ["encoder", "cross"], "layer": [0, 1]}))
        'encoder layer 0 and cross-attention layer 1'
    """
    named = []
    for stack, own in stacks(rows):
        numbers = sorted({int(layer) for layer in own["layer"]})
        named.append(f"{stack}layer{'s' if len(numbers) > 1 else ''} {_listed(_runs(numbers))}")
    return _listed(named)


def _runs(numbers: list[int]) -> Iterator[str]:
    """Yield consecutive numbers as one range, pairs as two numbers."""
    start = 0
    for end in range(1, len(numbers) + 1):
        if end < len(numbers) and numbers[end] == numbers[end - 1] + 1:
            continue
        run = numbers[start:end]
        yield from [f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run)
        start = end


def _listed(words: Iterable[str]) -> str:
    found = list(words)
    return " and ".join(part for part in (", ".join(found[:-1]), found[-1] if found else "") if part)


def stack_word(stack: str) -> str:
    """Return the name of a stack as it stands before the word layer."""
    return "cross-attention" if stack == "cross" else stack


def head_name(row: pandas.Series, heads: pandas.DataFrame) -> str:
    """Name a head; its stack only where the table has several."""
    several = "stack" in heads and heads["stack"].nunique() > 1
    return f"head {int(row['head'])} of {stack_word(row['stack']) + ' ' if several else ''}layer {int(row['layer'])}"


def places(rows: pandas.DataFrame) -> tuple[tuple[str, int, int], ...]:
    """Return stack, layer and head of every row."""
    return tuple((str(row.get("stack", "")), int(row["layer"]), int(row["head"])) for _, row in rows.iterrows())


def count(some: int, total: int, noun: str) -> str:
    """Say how many of how many.

    Example:
        >>> count(1, 72, "head"), count(72, 72, "head"), count(1, 1, "layer")
        ('1 of 72 heads', 'all 72 heads', 'the only layer')
    """
    if total == 1:
        return f"the only {noun}" if some else f"no {noun}"
    if some == total == 2:
        return f"both {noun}s"
    return f"all {total} {noun}s" if some == total else f"{some} of {total} {noun}s"


def decimals(value: float) -> str:
    """Write two decimals, or one significant digit where they would show zero."""
    return f"{value:.1g}" if 0 < abs(value) < 0.005 else f"{value:.2f}"


def above(share: float, bound: float) -> str:
    """Write a share in percent, with as many decimals as it takes to look larger than a bound below it.

    Example:
        >>> above(0.77, 0.4), above(0.404, 0.4)
        ('77%', '40.4%')
    """
    written = (f"{share:.{digits}%}" for digits in range(9) if f"{share:.{digits}%}" != f"{bound:.{digits}%}")
    return next(written, f"{share:.9%}")


def number(value: float) -> str:
    """Write two decimals with a true minus sign."""
    return f"{round(value, 2) + 0.0:.2f}".replace("-", "−")  # plus zero: no −0.00


def capital(sentence: str) -> str:
    """Begin a sentence with a capital."""
    return sentence[:1].upper() + sentence[1:]


def percent(sentence: str) -> str:
    """Begin with a capital and set, as in print, a narrow space that does not break before the percent sign."""
    return capital(sentence).replace("%", "\u202f%")
