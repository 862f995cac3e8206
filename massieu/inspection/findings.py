"""What a reader wants to know first, in sentences that are computed from the tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import pandas

__all__ = ["Finding", "findings"]

MOST = 5
SHARP_TOKENS = 2.0
SINK = 0.3
LOCAL = 0.4
BEYOND_CONTROL = 0.01
NEARLY_LINEAR = 0.8
COSINE_RISE = 0.1
RANK_FALL = 0.1
WARMER = 0.1  # nats
NEAR, FAR = 0.8, 0.2  # of the way from the control to the theory


@dataclass(frozen=True)
class Finding:
    """One observation.

    Attributes:
        title: a few words.
        sentence: the observation with its figures.
        quantity: the column that shows it best.
        where: the heads it names, each as ``(stack, layer, head)``.
    """

    title: str
    sentence: str
    quantity: str
    where: tuple[tuple[str, int, int], ...] = ()


class _Prediction(NamedTuple):
    """A figure that the theory wants to be one, and what to say if it is, if it is not quite, and if it is not."""

    table: str
    column: str
    control: str
    chance: float
    figure: str
    holds: str
    partly: str
    fails: str


PREDICTIONS = (
    _Prediction(
        "layers",
        "field_symmetry",
        "field_symmetry_control",
        0.5,
        "symmetry",
        "the attention field is nearly a gradient",
        "the attention field is part of the way to a gradient",
        "the attention field is hardly nearer to a gradient than its control",
    ),
    _Prediction(
        "layers",
        "ascent_cosine",
        "ascent_control",
        0.0,
        "cosine",
        "its updates climb the log normaliser",
        "its updates lean towards climbing the log normaliser",
        "its updates do not climb the log normaliser",
    ),
    _Prediction(
        "heads",
        "gradient_cosine",
        "gradient_cosine_control",
        0.0,
        "cosine of the weights",
        "heads write what they read",
        "heads partly write what they read",
        "heads do not write what they read",
    ),
)


def findings(heads: pandas.DataFrame, layers: pandas.DataFrame | None, facts: dict[str, Any]) -> list[Finding]:
    """The most interesting observations, at most five; what the theory says about this model is always among them.

    Args:
        heads: one row per head.
        layers: one row per block, or None. Columns may be missing or nan: then nothing is said about them.
        facts: as in ``inspection.json``; the width of the heads is read from it.

    Example:
        >>> import pandas
        >>> row = {"stack": "decoder", "layer": 0, "head": 0, "perplexity": 1.5, "entropy": 0.3}
        >>> heads = pandas.DataFrame([row])
        >>> findings(heads, None, {})[0].sentence
        'The only head effectively reads fewer than two tokens: its entropy is 0.30 nats (1.5 tokens).'
    """
    observed = [
        *_broken(heads),
        *_sharp(heads),
        *_sinks(heads),
        *_collapse(layers),
        *_expanding(layers),
        *_neighbours(heads, "previous_mass", "the token before", "Heads that look one token back"),
        *_neighbours(heads, "next_mass", "the next token", "Heads that look one token ahead"),
        *_linear(layers),
        *_neighbours(heads, "self_mass", "the token itself", "Heads that look at themselves"),
        *_broad(heads),
        *_not_expanding(layers),
        *_classes(heads),
        *_temperature(heads),
    ]
    theory = list(_theory(heads, layers, facts))
    return [*observed[: MOST - len(theory)], *theory]


def _broken(heads: pandas.DataFrame) -> Iterator[Finding]:
    known = _known(heads, "broken_rows", "rows")
    broken = known[known["broken_rows"] > 0]
    if broken.empty:
        return
    order = broken["stack"].map({"encoder": 0}).fillna(1)  # an encoder runs first
    first = broken.assign(order=order).sort_values(["order", "layer", "broken_rows"], ascending=[True, True, False])
    row = first.iloc[0]
    lost, kept = int(row["broken_rows"]), int(row["rows"])
    sentence = (
        f"{lost} of {lost + kept} attention rows of {_named(row, heads)}, the first layer with such rows, have scores"
        f" that are nan or infinite. {_count(len(broken), len(known), 'head').capitalize()} of the model"
        f" {'is' if len(broken) == 1 else 'are'} affected; all other values describe the intact rows only. Try --dtype"
        " float32; if the rows stay broken, weights or embeddings of the model are damaged."
    )
    yield Finding("Broken attention rows", sentence, "broken_rows", _places(broken))


def _sharp(heads: pandas.DataFrame) -> Iterator[Finding]:
    known = _known(heads, "perplexity", "entropy")
    few = known[known["perplexity"] < SHARP_TOKENS].sort_values("entropy")
    if few.empty:
        return
    reads = f"effectively {'reads' if len(few) == 1 else 'read'} fewer than two tokens"
    sharpest, amount = few.iloc[0], _amount(few.iloc[0])
    if len(known) == 1:
        sentence = f"The only head {reads}: its entropy is {amount}."
    else:
        who = f"the sharpest, {_named(sharpest, heads)},"
        sentence = f"{_capital(_count(len(few), len(known), 'head'))} {reads}; {who} has an entropy of {amount}."
    yield Finding("Sharp heads" if len(few) > 1 else "A sharp head", sentence, "entropy", _places(few))


def _broad(heads: pandas.DataFrame) -> Iterator[Finding]:
    known = _known(heads, "perplexity", "entropy").sort_values("entropy")
    if known.empty or (known["perplexity"] < SHARP_TOKENS).any():
        return
    sharpest, amount = known.iloc[0], _amount(known.iloc[0])
    who = f"the sharpest, {_named(sharpest, heads)}," if len(known) > 1 else "the only one"
    sentence = f"No head is sharp: {who} has an entropy of {amount}."
    yield Finding("Broad attention", sentence, "entropy", (_place(sharpest),))


def _amount(row: pandas.Series) -> str:
    return f"{_with_error(row, 'entropy')} nats ({row['perplexity']:.1f} tokens)"


def _sinks(heads: pandas.DataFrame) -> Iterator[Finding]:
    known = _known(heads, "sink_mass")
    sinks = known[known["sink_mass"] > SINK].sort_values("sink_mass", ascending=False)
    if sinks.empty:
        return
    strongest = sinks.iloc[0]
    count = f"{_count(len(sinks), len(known), 'head')} {'puts' if len(sinks) == 1 else 'put'}"
    sentence = f"{count} more than {SINK:.0%} of the attention on the first token"
    if len(sinks) > 1:
        sentence += f"; the strongest, {_named(strongest, heads)}, puts {strongest['sink_mass']:.0%} there"
    else:
        sentence += f": {_named(strongest, heads)} with {strongest['sink_mass']:.0%}"
    yield Finding("Attention sinks", f"{_percent(sentence)}.", "sink_mass", _places(sinks))


def _neighbours(heads: pandas.DataFrame, column: str, token: str, title: str) -> Iterator[Finding]:
    known = _known(heads, column)
    local = known[known[column] > LOCAL].sort_values(column, ascending=False)
    if local.empty:
        return
    first = local.iloc[0]
    sentence = f"{_capital(_named(first, heads))} gives {first[column]:.0%} of its attention to {token}"
    if len(local) > 1:
        sentence += f", and {len(local) - 1} more {'give' if len(local) > 2 else 'gives'} it over {LOCAL:.0%}"
    yield Finding(title, f"{_percent(sentence)}.", column, _places(local))


def _collapse(layers: pandas.DataFrame | None) -> Iterator[Finding]:
    for stack, block in _stacks(layers):
        parts = []
        cosine, rank = _known(block, "token_cosine"), _known(block, "effective_rank")
        if len(cosine) > 1:
            first, last = cosine["token_cosine"].iloc[0], cosine["token_cosine"].iloc[-1]
            if last < first + COSINE_RISE:
                continue
            parts.append(f"the mean similarity of two tokens rises from {first:.2f} to {last:.2f}")
        if len(rank) > 1:
            first, last = rank["effective_rank"].iloc[0], rank["effective_rank"].iloc[-1]
            if last > first * (1 - RANK_FALL):
                continue
            parts.append(f"the effective rank of the tokens falls from {first:.0f} to {last:.0f}")
        if parts:
            quantity = "token_cosine" if len(cosine) > 1 else "effective_rank"
            sentence = f"From the first to the last {stack}layer {' and '.join(parts)}."
            yield Finding("Tokens grow alike", sentence, quantity)
            return


def _expanding(layers: pandas.DataFrame | None) -> Iterator[Finding]:
    for stack, known in _expansions(layers):
        beyond = known[known["clear"]]
        if beyond.empty:
            continue
        numbers = [int(layer) for layer in beyond["layer"]]
        which = f"{stack}layer{'s' if len(numbers) > 1 else ''} {_listed(numbers)}"
        if len(numbers) == len(known) > 1:
            which = f"every {stack}layer"
        sentence = (
            f"Attention pushes tokens further apart than its permuted control in {which}, most in"
            f" {_growth(beyond.loc[beyond['beyond'].idxmax()])}."
        )
        yield Finding("Expanding layers", sentence, "expansion")
        return


def _not_expanding(layers: pandas.DataFrame | None) -> Iterator[Finding]:
    found = list(_expansions(layers))
    if not found or any(known["clear"].any() for _, known in found):
        return
    closest = max((known.loc[known["beyond"].idxmax()] for _, known in found), key=lambda row: float(row["beyond"]))
    sentence = (
        f"In no layer does attention clearly push tokens further apart than its permuted control; the nearest is"
        f" {_growth(closest)}."
    )
    yield Finding("No expansion beyond the control", sentence, "expansion")


def _expansions(layers: pandas.DataFrame | None) -> Iterator[tuple[str, pandas.DataFrame]]:
    """Layers with their expansion beyond the control, and whether it is clear: by an amount and by its error."""
    for stack, block in _stacks(layers):
        known = _known(block, "expansion", "expansion_control")
        if len(known):
            beyond = known["expansion"] - known["expansion_control"]
            squares = [known[name].fillna(0) ** 2 for name in ("expansion_se", "expansion_control_se") if name in known]
            clear = (beyond > BEYOND_CONTROL) & (beyond > 2 * sum(squares, 0 * beyond) ** 0.5)
            yield stack, known.assign(beyond=beyond, clear=clear)


def _growth(row: pandas.Series) -> str:
    grow = f"distances grow by a factor of {row['expansion']:.3f} against {row['expansion_control']:.3f}"
    return f"layer {int(row['layer'])}: {grow}"


def _linear(layers: pandas.DataFrame | None) -> Iterator[Finding]:
    known = _known(layers, "fc_linear_r2")
    linear = known[known["fc_linear_r2"] > NEARLY_LINEAR]
    if linear.empty:
        return
    most = linear.loc[linear["fc_linear_r2"].idxmax()]
    control = _known(linear, "fc_linear_control")
    against = f" (shuffled control {control['fc_linear_control'].median():.2f})" if len(control) else ""
    sentence = (
        f"In {_count(len(linear), len(known), 'layer')} a single matrix explains more than {NEARLY_LINEAR:.0%} of the"
        f" MLP on unseen tokens, most in layer {int(most['layer'])} with an R² of {most['fc_linear_r2']:.2f}{against}."
    )
    yield Finding("Nearly linear MLPs", _percent(sentence), "fc_linear_r2")


def _classes(heads: pandas.DataFrame) -> Iterator[Finding]:
    if "head_class" not in heads or len(heads) < 2:
        return
    classes = heads["head_class"].dropna()
    if classes.empty:
        return
    broad, single = int((classes == "I").sum()), int((classes == "IV").sum())
    sentence = (
        f"{_capital(_count(broad, len(classes), 'head'))} {'averages' if broad == 1 else 'average'} over most of what"
        f" {'it sees' if broad == 1 else 'they see'} (class I) and {single} {'picks' if single == 1 else 'pick'} a few"
        " tokens (class IV)"
    )
    lengths = _known(heads, "class_length")["class_length"] if "class_length" in heads else heads.iloc[:0]
    if len(lengths):
        sentence += f", in rows that see {lengths.mean():.0f} tokens on average; longer rows give higher classes"
    yield Finding("What the heads are", f"{sentence}.", "head_class")


def _temperature(heads: pandas.DataFrame) -> Iterator[Finding]:
    for stack, block in _stacks(heads):
        means = _known(block, "entropy").groupby("layer")["entropy"].mean()
        if len(means) < 2:
            continue
        low, high = means.idxmin(), means.idxmax()
        if means[high] - means[low] < WARMER:
            continue
        sentence = (
            f"The mean entropy of the {stack}heads is lowest in layer {low} ({means[low]:.2f} nats) and highest in"
            f" layer {high} ({means[high]:.2f} nats)."
        )
        yield Finding("Cold and warm layers", sentence, "entropy")
        return


def _theory(heads: pandas.DataFrame, layers: pandas.DataFrame | None, facts: dict[str, Any]) -> Iterator[Finding]:
    tables = {"heads": heads, "layers": layers}
    clauses = [(each.column, _between(tables[each.table], each)) for each in PREDICTIONS]
    clauses += [("whitened_trace", _whitened(heads, facts)), ("kurtosis", _gaussian(layers))]
    said = [(column, clause) for column, clause in clauses if clause]
    if said:
        sentence = " ".join(f"{_capital(clause)}." for _, clause in said)
        yield Finding("What the theory predicts", sentence, said[0][0])


def _between(table: pandas.DataFrame | None, prediction: _Prediction) -> str | None:
    """Where the median stands between its control and the prediction of one, in words and figures."""
    known = _known(table, prediction.column)
    if known.empty:
        return None
    value = known[prediction.column].median()
    controls = _known(known, prediction.control)[prediction.control]
    control = float(controls.median()) if len(controls) else prediction.chance
    name = "control" if len(controls) else "by chance"
    share = (value - control) / (1 - control) if control < 1 else 0.0
    verdict = prediction.holds if share >= NEAR else prediction.partly if share >= FAR else prediction.fails
    low, high = _figure(known[prediction.column].min()), _figure(known[prediction.column].max())
    span = f", from {low} to {high}" if low != high else ""
    where = "median " if len(known) > 1 else ""
    return f"{verdict} ({where}{prediction.figure} {_figure(value)}{span}, {name} {_figure(control)}, theory 1)"


def _whitened(heads: pandas.DataFrame, facts: dict[str, Any]) -> str | None:
    known = _known(heads, "whitened_trace")
    model = facts.get("model", {})
    width = model.get("head_width")
    if known.empty or not isinstance(width, int):
        return None
    value = float(known["whitened_trace"].median())
    near = "as" if NEAR <= value / width <= 1 / NEAR else "not as"
    return (
        f"query-key forms are {near} inverse covariances would be (whitened trace {_figure(value)}, theory {width:.0f})"
    )


def _gaussian(layers: pandas.DataFrame | None) -> str | None:
    known = _known(layers, "kurtosis", "kurtosis_band")
    if known.empty:
        return None
    outside = known[known["kurtosis"].abs() > known["kurtosis_band"].abs()]
    if outside.empty:
        return "the hidden states cannot be told from a Gaussian cloud in any layer"
    where = _count(len(outside), len(known), "layer")
    return f"the hidden states lie outside the band of a Gaussian cloud in {where}"


def _known(table: pandas.DataFrame | None, *columns: str) -> pandas.DataFrame:
    """The rows with a finite number in every one of the columns; none where a column is missing."""
    import pandas

    if table is None or any(column not in table for column in columns):
        return pandas.DataFrame(columns=["stack", "layer", "head", *columns])
    filled = table.assign(**{column: pandas.to_numeric(table[column], errors="coerce") for column in columns})
    return filled[filled[list(columns)].abs().lt(float("inf")).all(axis=1)]


def _stacks(table: pandas.DataFrame | None) -> Iterator[tuple[str, pandas.DataFrame]]:
    """The blocks of each stack in order, with a word to tell the stacks apart where there are several."""
    if table is None or "layer" not in table or table.empty:
        return
    if "stack" not in table:
        yield "", table.sort_values("layer")
        return
    for stack in table["stack"].unique():
        several = table["stack"].nunique() > 1
        yield f"{_stack_word(stack)} " if several else "", table[table["stack"] == stack].sort_values("layer")


def _stack_word(stack: str) -> str:
    return "cross-attention" if stack == "cross" else stack


def _named(row: pandas.Series, heads: pandas.DataFrame) -> str:
    several = "stack" in heads and heads["stack"].nunique() > 1
    return f"head {int(row['head'])} of {_stack_word(row['stack']) + ' ' if several else ''}layer {int(row['layer'])}"


def _place(row: pandas.Series) -> tuple[str, int, int]:
    return str(row.get("stack", "")), int(row["layer"]), int(row["head"])


def _places(rows: pandas.DataFrame) -> tuple[tuple[str, int, int], ...]:
    return tuple(_place(row) for _, row in rows.iterrows())


def _with_error(row: pandas.Series, column: str) -> str:
    error = row.get(f"{column}_se")
    return _decimals(row[column]) + (f" ± {error:.2f}" if error is not None and error >= 0.005 else "")


def _decimals(value: float) -> str:
    """Two decimals, or one significant digit where they would show zero."""
    return f"{value:.1g}" if 0 < abs(value) < 0.005 else f"{value:.2f}"


def _figure(value: float) -> str:
    return f"{round(value, 2) + 0.0:.2f}".replace("-", "−")  # plus zero: no −0.00


def _count(some: int, total: int, noun: str) -> str:
    """
    Example:
        >>> _count(1, 72, "head"), _count(72, 72, "head"), _count(1, 1, "layer")
        ('1 of 72 heads', 'all 72 heads', 'the only layer')
    """
    if total == 1:
        return f"the only {noun}" if some else f"no {noun}"
    if some == total == 2:
        return f"both {noun}s"
    return f"all {total} {noun}s" if some == total else f"{some} of {total} {noun}s"


def _listed(numbers: list[int]) -> str:
    """
    Example:
        >>> _listed([1, 2, 5])
        '1, 2 and 5'
    """
    return " and ".join(part for part in (", ".join(map(str, numbers[:-1])), str(numbers[-1])) if part)


def _capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def _percent(sentence: str) -> str:
    """A capital first and, as in print, a narrow space that does not break before the percent sign."""
    return _capital(sentence).replace("%", "\u202f%")
