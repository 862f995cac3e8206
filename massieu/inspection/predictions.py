"""Predictions of the theory beside what was measured: a table with control and verdict for each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from massieu.inspection.wording import known, layer_ranges

if TYPE_CHECKING:
    import pandas

__all__ = ["TOKENS_PER_DIMENSION", "Prediction", "predictions", "tokens_per_dimension"]

TOKENS_PER_DIMENSION = 10  # fewer tokens give no verdict on their cloud and its covariance
NEAR, FAR = 0.8, 0.2  # of the way from the control to the theory


@dataclass(frozen=True)
class Prediction:
    """A prediction of the theory and its verdict for one model.

    Attributes:
        statement: the prediction in words.
        quantity: the column that tests it.
        measured: median over layers (or heads); of the Gaussian cloud, the share of layers inside its band.
        lowest: of the layers or heads.
        highest: of the layers or heads.
        control: median of the control, or the value by chance.
        predicted: value that the theory asks for.
        verdict: "holds", "partly" and "fails" for at least 80 %, at least 20 % and less of the way from the control to
            the theory; "undecided" where the text is too short to tell.
        sentence: where it holds, or what is missing.
    """

    statement: str
    quantity: str
    measured: float | None
    lowest: float | None
    highest: float | None
    control: float | None
    predicted: float
    verdict: Literal["holds", "partly", "fails", "undecided"]
    sentence: str


class _Tested(NamedTuple):
    """A prediction, its column and control, and what chance gives where there is no control."""

    statement: str
    table: str
    column: str
    control: str
    chance: float


TESTED = (
    _Tested("The attention field is a gradient", "layers", "field_symmetry", "field_symmetry_control", 0.5),
    _Tested("Updates climb the log normalizer", "layers", "ascent_cosine", "ascent_control", 0.0),
    _Tested("Attention makes its rows sharper", "layers", "entropy_fall_share", "", 0.5),
    _Tested("Heads write what they read", "heads", "gradient_cosine", "gradient_cosine_control", 0.0),
    _Tested("Linear response predicts head outputs", "layers", "corollary_r2", "corollary_control", 0.0),
)


def predictions(heads: pandas.DataFrame, layers: pandas.DataFrame | None, facts: dict[str, Any]) -> list[Prediction]:
    """Return every prediction that the tables can test.

    Args:
        heads: one row per head.
        layers: one row per block, or None.
        facts: as in ``inspection.json``; widths of heads and of the model are read from it.

    Example:
        >>> import pandas
        >>> layers = pandas.DataFrame({"layer": [0, 1], "field_symmetry": [0.9, 0.6], "field_symmetry_control": 0.5})
        >>> [found] = predictions(pandas.DataFrame(), layers, {})
        >>> found.measured, found.control, found.verdict, found.sentence
        (0.75, 0.5, 'partly', 'holds in layer 0')
    """
    tables = {"heads": heads, "layers": layers}
    found = [prediction for tested in TESTED for prediction in _between(tables[tested.table], tested)]
    return [*found, *_whitened(heads, layers, facts), *_gaussian(layers, facts)]


def tokens_per_dimension(layers: pandas.DataFrame | None, facts: dict[str, Any]) -> float:
    """Return the least number of tokens of a layer for each dimension in which it was measured; inf if unknown."""
    from massieu.inspection.layer_statistics import NARROW, WIDEST

    hidden, counted = facts.get("model", {}).get("hidden"), known(layers, "tokens")["tokens"]
    if not isinstance(hidden, int) or counted.empty:
        return float("inf")
    return float(counted.min()) / (hidden if hidden <= WIDEST else NARROW)


def _between(table: pandas.DataFrame | None, tested: _Tested) -> Iterator[Prediction]:
    rows = known(table, tested.column)
    if rows.empty:
        return
    values = rows[tested.column]
    controls = (
        known(rows, tested.control)[tested.control].reindex(rows.index) if tested.control else values * float("nan")
    )
    control = float(controls.median()) if controls.notna().any() else tested.chance
    # A control that is itself worse than chance must not make it easier to come near the theory.
    own = controls.fillna(control).clip(lower=tested.chance)
    shares = ((values - own) / (1 - own)).where(own < 1, 0.0)
    yield _judged(tested.statement, tested.column, rows, values, control, 1.0, shares)


def _whitened(heads: pandas.DataFrame, layers: pandas.DataFrame | None, facts: dict[str, Any]) -> Iterator[Prediction]:
    statement = "Query-key forms are inverse covariances"
    rows, width = known(heads, "whitened_trace"), facts.get("model", {}).get("head_width")
    if rows.empty or not isinstance(width, int):
        return
    enough = tokens_per_dimension(layers, facts)
    if enough < TOKENS_PER_DIMENSION:  # the covariances are those of the tokens, and few tokens lack directions
        yield _undecided(statement, "whitened_trace", float(width), enough)
        return
    values = rows["whitened_trace"]
    shares = 1 - (values / width - 1).abs()
    yield _judged(statement, "whitened_trace", rows, values, 0.0, float(width), shares)


def _undecided(statement: str, column: str, predicted: float, enough: float) -> Prediction:
    """A prediction about which a text with ``enough`` tokens per dimension says nothing."""
    sentence = f"too few tokens to tell: {enough:.1f} per dimension, {TOKENS_PER_DIMENSION} are needed"
    return Prediction(statement, column, None, None, None, None, predicted, "undecided", sentence)


def _judged(
    statement: str,
    column: str,
    rows: pandas.DataFrame,
    values: pandas.Series[float],
    control: float,
    predicted: float,
    shares: pandas.Series[float],
) -> Prediction:
    share = float(shares.median())
    verdict: Literal["holds", "partly", "fails"] = "holds" if share >= NEAR else "partly" if share >= FAR else "fails"
    spread = float(values.median()), float(values.min()), float(values.max())
    return Prediction(statement, column, *spread, control, predicted, verdict, _where(rows[shares >= NEAR], rows))


def _where(holding: pandas.DataFrame, rows: pandas.DataFrame) -> str:
    """Say in which layers (or in how many heads) a prediction holds."""
    if "head" in rows and rows["head"].notna().all():
        return f"holds in {len(holding)} of {len(rows)} heads"
    if len(holding) in (0, len(rows)):
        return "holds in every layer" if len(holding) else "holds in no layer"
    return f"holds in {layer_ranges(holding)}"


def _gaussian(layers: pandas.DataFrame | None, facts: dict[str, Any]) -> Iterator[Prediction]:
    statement = "Hidden states form a Gaussian cloud (share of layers)"
    rows = known(layers, "kurtosis", "kurtosis_band")
    if rows.empty:
        return
    enough = tokens_per_dimension(rows, facts)
    if enough < TOKENS_PER_DIMENSION:
        yield _undecided(statement, "kurtosis", 1.0, enough)
        return
    inside = rows["kurtosis"].abs() <= rows["kurtosis_band"].abs()
    share = float(inside.mean())
    verdict: Literal["holds", "partly", "fails"] = "holds" if share == 1 else "partly" if share > 0 else "fails"
    outside = layer_ranges(rows[~inside]) if not inside.all() else "no layer"
    sentence = f"outside the band of a Gaussian sample in {outside if inside.any() else 'every layer'}"
    yield Prediction(statement, "kurtosis", share, None, None, None, 1.0, verdict, sentence)
