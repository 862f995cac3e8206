"""Quantities: the meaning of every column of an inspection, read from ``quantities.toml``.

Formulas are plain text: ``_`` and ``^`` lower and raise what follows them (a letter, or a group in braces). They read
well in a terminal, and the report sets them as mathematics.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

__all__ = ["ALL_TOKENS", "GEOMETRY", "QUANTITIES", "Quantity", "describe"]

GEOMETRY = "Geometry of the weights"

Scale = Literal["sequential", "logarithmic", "diverging", "class"]


@dataclass(frozen=True)
class Quantity:
    """One column of the heads or the layers table.

    Attributes:
        name: the column; a mean has its standard error in the column ``<name>_se``.
        table: "heads" or "layers".
        group: the heading under which a report shows it.
        title: a few words.
        symbol: as short as an axis label must be.
        formula: how it is computed, as plain text.
        unit: "nats", "tokens" and so on; empty for a pure number.
        explanation: what a reader should think of.
        scale: how colors follow the values.
        control: the column with the same measurement on a case where the effect must be absent.
        predicted: the value that the theory asks for.
        neutral: the value that means nothing happened; the middle of a diverging scale.
        digits: decimals worth printing.
        least: smallest possible value, where the colors of a map begin; None if there is none.
        most: largest possible value, where they end; "length" is the number of tokens that a row sees.
    """

    name: str
    table: Literal["heads", "layers"]
    group: str
    title: str
    symbol: str
    formula: str
    unit: str
    explanation: str
    scale: Scale = "sequential"
    control: str | None = None
    predicted: float | None = None
    neutral: float | None = None
    digits: int = 2
    least: float | None = None
    most: float | Literal["length", "log length"] | None = None


def describe() -> dict[str, dict[str, object]]:
    """Return every quantity as plain values, as ``inspection.json`` carries them.

    Example:
        >>> describe()["entropy"]["unit"]
        'nats'
    """
    return {name: asdict(quantity) for name, quantity in QUANTITIES.items()}


def _measured() -> Iterator[Quantity]:
    """Quantities of the file, in its order."""
    tables: Any = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    for table, groups in tables.items():
        for group, columns in groups.items():
            for name, fields in columns.items():
                yield Quantity(name=name, table=table, group=group, **{"unit": "", **fields})


ALL_TOKENS = (
    *("effective_rank", "token_cosine", "kurtosis", "fc_identity_r2", "fc_identity_offset_r2"),
    *("log_volume_attention", "log_volume_mlp", "log_volume_norm"),
)
"""Quantities of layers that are given with the massive tokens too, in columns ``<name>_all_tokens``."""


def _with_massive(measured: list[Quantity]) -> Iterator[Quantity]:
    for quantity in measured:
        if quantity.name in ALL_TOKENS:
            yield replace(
                quantity,
                name=f"{quantity.name}_all_tokens",
                group="Massive activations",
                title=f"{quantity.title}, massive tokens included",
                explanation=f"The same measurement as in “{quantity.title}” with the massive tokens.",
            )


def _controls(measured: list[Quantity]) -> Iterator[Quantity]:
    yield Quantity(
        "kurtosis_band",
        "layers",
        "Controls",
        "Sampling band of the Gaussianity",
        "± κ",
        "half width of the band of a Gaussian sample of the same size",
        "",
        "A kurtosis inside plus or minus this band cannot be told from that of a Gaussian cloud.",
        digits=3,
    )
    for quantity in measured:
        if quantity.control and quantity.control not in ("kurtosis_band", "fc_linear_control"):
            yield _control_of(quantity)
    yield _control_of(next(quantity for quantity in measured if quantity.name == "fc_linear_r2"))


def _control_of(quantity: Quantity) -> Quantity:
    assert quantity.control is not None
    title = f"Control: {quantity.title}"
    explanation = f"The same measurement as in “{quantity.title}” on a case where the effect must be absent."
    return replace(
        quantity,
        name=quantity.control,
        group="Controls",
        title=title,
        explanation=explanation,
        control=None,
        predicted=None,
    )


_MEASURED = [*_measured()]
_MEASURED += _with_massive(_MEASURED)

QUANTITIES: dict[str, Quantity] = {quantity.name: quantity for quantity in (*_MEASURED, *_controls(_MEASURED))}
