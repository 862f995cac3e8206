"""Observations that a reader wants first, in sentences that are computed from the tables.

Each has one idea, names the layers it is about and says what follows. None contradicts a note of the inspection: below
a stated number of tokens per dimension nothing is said about ranks and linear fits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from massieu.inspection.predictions import tokens_per_dimension
from massieu.inspection.wording import (
    above,
    capital,
    count,
    decimals,
    head_name,
    known,
    layer_ranges,
    number,
    percent,
    places,
    stacks,
)

if TYPE_CHECKING:
    import pandas

__all__ = ["Finding", "findings"]

MOST = 6
COLLAPSED = 0.1  # nats, of the median over the heads of a layer: the gate ``median(entropy) by layer < 0.1``
SHARP_TOKENS = 2.0
SINK = 0.3
ONLY = 0.99  # of the attention on the first token: next to nothing is left for other tokens
RESTS = 0.5  # of the attention of a sharp head on the first token: it is sharp because it is a sink
LOCAL = 0.4
BEYOND_CONTROL = 0.01
NEARLY_LINEAR = 0.8
COSINE_TURN = 0.1
RANK_TURN = 0.1  # of the logarithm of the rank: about a tenth of the rank
CHANGES = 4  # told of a course over the layers, the largest
WARMER = 0.1  # nats
ENOUGH_TOKENS = 64  # content tokens; with fewer, findings begin with a warning
ENOUGH_FOR_FITS = 2  # tokens per dimension for ranks and linear fits, as in the notes of the layers


@dataclass(frozen=True)
class Finding:
    """One observation.

    Attributes:
        title: a few words.
        sentence: the observation with its values, and what follows.
        quantity: the column that shows it best.
        where: the heads it names, each as ``(stack, layer, head)``.
    """

    title: str
    sentence: str
    quantity: str
    where: tuple[tuple[str, int, int], ...] = ()


def findings(heads: pandas.DataFrame, layers: pandas.DataFrame | None, facts: dict[str, Any]) -> list[Finding]:
    """Return the most interesting observations, at most six.

    Args:
        heads: one row per head.
        layers: one row per block, or None. Columns may be missing or nan: then nothing is said about them.
        facts: as in ``inspection.json``; the width of the model is read from it.

    Example:
        >>> import pandas
        >>> row = {"stack": "decoder", "layer": 0, "head": 0, "perplexity": 1.5, "entropy": 0.3}
        >>> heads = pandas.DataFrame([row])
        >>> findings(heads, None, {})[0].sentence
        'The only head effectively reads fewer than two tokens: its entropy is 0.30 nats (mean perplexity 1.5 tokens).'
    """
    fitted = layers if tokens_per_dimension(layers, facts) >= ENOUGH_FOR_FITS else None
    observed = [
        *_short(heads, facts),
        *_broken(heads, facts),
        *_collapsed(heads),
        *_sharp(heads),
        *_sinks(heads),
        *_resting(heads),
        *_massive(layers),
        *_rank(fitted),
        *_similarity(layers),
        *(found for kind in DISTANCES for found in _distances(layers, kind)),
        *_neighbors(heads, "previous_mass", "the token before", "Heads that look one token back"),
        *_neighbors(heads, "next_mass", "the token after", "Heads that look one token ahead"),
        *_linear(fitted),
        *_neighbors(heads, "self_mass", "the token itself", "Heads that look at themselves"),
        *_broad(heads),
        *_as_the_control(layers),
        *_classes(heads),
        *_temperature(heads),
    ]
    return observed[:MOST]


def _short(heads: pandas.DataFrame, facts: dict[str, Any]) -> Iterator[Finding]:
    tokens = facts.get("text", {}).get("counted_tokens")
    if not isinstance(tokens, int) or tokens >= ENOUGH_TOKENS or known(heads, "rows").empty:
        return
    sentence = (
        f"Only {tokens} content {'token was' if tokens == 1 else 'tokens were'} counted: the findings describe this"
        f" text rather than the model. Give at least {ENOUGH_TOKENS} tokens, better a few thousand."
    )
    yield Finding("A very short text", sentence, "rows")


def _broken(heads: pandas.DataFrame, facts: dict[str, Any]) -> Iterator[Finding]:
    measured = known(heads, "broken_rows", "rows")
    broken = measured[measured["broken_rows"] > 0]
    if broken.empty:
        return
    order = broken["stack"].map({"encoder": 0}).fillna(1)  # an encoder runs first
    first = broken.assign(order=order).sort_values(["order", "layer", "broken_rows"], ascending=[True, True, False])
    row = first.iloc[0]
    lost, kept = int(row["broken_rows"]), int(row["rows"])
    rounded = str(facts.get("model", {}).get("dtype")).endswith("float16")
    cause = (
        "Try --dtype float32; if the rows stay broken, weights or embeddings of the model are damaged."
        if rounded
        else "Weights or embeddings of the model are damaged, or its activations overflow."
    )
    sentence = (
        f"{lost} of {lost + kept} attention rows of {head_name(row, heads)}, the first layer with such rows, have"
        f" scores that are nan or infinite. {capital(count(len(broken), len(measured), 'head'))} of the model"
        f" {'is' if len(broken) == 1 else 'are'} affected; all other values describe the intact rows only. {cause}"
    )
    yield Finding("Broken attention rows", sentence, "broken_rows", places(broken))


def _collapsed(heads: pandas.DataFrame) -> Iterator[Finding]:
    """Layers whose median entropy is near zero although their heads do not rest on the first token."""
    low = _low_layers(heads)
    found = low[~low["rests"]]
    if len(found):
        sentence = (
            f"{_low_sentence(found)}: almost every row of these heads reads one token. Training such a layer"
            " gets little gradient; compare with an earlier checkpoint."
        )
        yield Finding("Collapsed attention", sentence, "entropy", places(found[found["entropy"] < COLLAPSED]))


def _resting(heads: pandas.DataFrame) -> Iterator[Finding]:
    """Layers whose median entropy is near zero because their heads rest on the first token."""
    low = _low_layers(heads)
    found = low[low["rests"]]
    if len(found):
        sentence = (
            f"{_low_sentence(found)}, because most heads rest on the first token: such sinks are common in healthy"
            " models, so a low median entropy there is by itself no sign of collapsed attention."
        )
        yield Finding(
            "Layers that rest on the first token", sentence, "sink_mass", places(found[found["entropy"] < COLLAPSED])
        )


def _low_layers(heads: pandas.DataFrame) -> pandas.DataFrame:
    """Return the heads of layers with a median entropy near zero, with it and whether most rest on the first token."""
    measured = known(heads, "entropy")
    resting = known(measured, "sink_mass").query("sink_mass > @RESTS").index
    by = [name for name in ("stack", "layer") if name in measured]
    layers = measured.assign(rests=measured.index.isin(resting)).groupby(by)
    median, rests = layers["entropy"].transform("median"), layers["rests"].transform("mean") > 0.5
    return measured.assign(median=median, rests=rests)[median < COLLAPSED]


def _low_sentence(heads: pandas.DataFrame) -> str:
    which = layer_ranges(heads)
    several = "layers" in which or " and " in which
    median = f"{'lowest ' * several}median {decimals(heads['median'].min())} nats"
    return f"In {which} at least half of the heads have an entropy below {COLLAPSED} nats ({median})"


def _sharp(heads: pandas.DataFrame) -> Iterator[Finding]:
    """Sharp heads without sinks, which are sharp because they rest on the first token."""
    measured, sharp, sinks = _sharp_and_sinks(heads)
    if sharp.empty:
        return
    first, reads = sharp.iloc[0], f"effectively {'reads' if len(sharp) == 1 else 'read'} fewer than two tokens"
    who, amount = capital(count(len(sharp), len(measured), "head")), _amount(first)
    if len(measured) == 1:
        yield Finding("A sharp head", f"{who} {reads}: its entropy is {amount}.", "entropy", places(sharp))
        return
    apart = f", apart from {_sinks_counted(len(sinks))}" if len(sinks) else ""
    if len(sharp) == 1:
        sentence = f"{who} {reads}{apart}: {head_name(first, heads)}, with an entropy of {amount}."
    else:
        sharpest = f"the sharpest, {head_name(first, heads)}, has an entropy of {amount}"
        sentence = f"{who}, in {layer_ranges(sharp)}, {reads}{apart}; {sharpest}."
    title = "Sharp heads" if len(sharp) > 1 else "A sharp head"
    follows = "What such a head writes is nearly the value of one token."
    yield Finding(title, f"{sentence} {follows}", "entropy", places(sharp))


def _broad(heads: pandas.DataFrame) -> Iterator[Finding]:
    measured, sharp, sinks = _sharp_and_sinks(heads)
    others = measured.drop(sinks.index)
    if others.empty or len(sharp) or len(_without_sinks(measured)) < len(measured) / 2:
        return
    who = (
        f"the sharpest, {head_name(others.iloc[0], heads)},"
        if len(others) > 1
        else f"the only {'other ' * bool(len(sinks))}one"
    )
    apart = f"Apart from {_sinks_counted(len(sinks))}, no head" if len(sinks) else "No head"
    follows = f"{'each of the others' if len(sinks) else 'every head'} writes a mean of several values"
    sentence = f"{apart} is sharp: {who} has an entropy of {_amount(others.iloc[0])}, so {follows}."
    yield Finding("Broad attention", sentence, "entropy", places(others[:1]))


def _sharp_and_sinks(heads: pandas.DataFrame) -> tuple[pandas.DataFrame, pandas.DataFrame, pandas.DataFrame]:
    """Return all measured heads, and those that read fewer than two tokens: sharp heads, and sinks."""
    measured = known(heads, "perplexity", "entropy").sort_values("entropy")
    few = measured[measured["perplexity"] < SHARP_TOKENS]
    resting = few.index.isin(known(few, "sink_mass").query("sink_mass > @RESTS").index)
    return measured, few[~resting], few[resting]


def _sinks_counted(number: int) -> str:
    return "1 sink, which rests on the first token" if number == 1 else f"{number} sinks, which rest on the first token"


def _amount(row: pandas.Series) -> str:
    error = row.get("entropy_se")
    spread = f" ± {error:.2f}" if error is not None and error >= 0.005 else ""
    return f"{decimals(row['entropy'])}{spread} nats (mean perplexity {row['perplexity']:.1f} tokens)"


def _sinks(heads: pandas.DataFrame) -> Iterator[Finding]:
    measured = known(heads, "sink_mass")
    sinks = measured[measured["sink_mass"] > SINK].sort_values("sink_mass", ascending=False)
    if sinks.empty:
        return
    strongest = sinks.iloc[0]
    who = f"{count(len(sinks), len(measured), 'head')}, in {layer_ranges(sinks)},"
    sentence = f"{who} {'puts' if len(sinks) == 1 else 'put'} more than {SINK:.0%} of the attention on the first token"
    if len(sinks) > 1:
        sentence += f"; the strongest, {head_name(strongest, heads)}, puts {above(strongest['sink_mass'], SINK)} there"
    else:
        sentence += f": {head_name(strongest, heads)} with {above(strongest['sink_mass'], SINK)}"
    yield Finding("Attention sinks", percent(f"{sentence}. {_elsewhere(sinks)}"), "sink_mass", places(sinks))


def _elsewhere(sinks: pandas.DataFrame) -> str:
    """Say whether sinks read other tokens than the first."""
    only = int((sinks["sink_mass"] > ONLY).sum())
    if only == 0:
        return "A sink does not make a head idle: the mean hides the rows on which it reads elsewhere."
    if len(sinks) == 1:
        return "On this text it reads almost nothing else."
    who = "Each of them puts" if only == len(sinks) else f"{only} of them {'puts' if only == 1 else 'put'}"
    reads = "they read" if 1 < only < len(sinks) else "it reads"
    others = {
        0: "",
        1: " The other is not idle: the mean hides the rows on which it reads elsewhere.",
    }.get(len(sinks) - only, " The others are not idle: the mean hides the rows on which they read elsewhere.")
    return f"{who} more than {ONLY:.0%} there: on this text {reads} almost nothing else.{others}"


def _without_sinks(heads: pandas.DataFrame) -> pandas.DataFrame:
    return heads.drop(known(heads, "sink_mass").query("sink_mass > @SINK").index)


FOLLOWS = {
    "previous_mass": "such a head carries the value of a token to the token after it, as induction needs",
    "next_mass": "such a head carries the value of a token to the token before it",
    "self_mass": "such a head acts on each token alone, as an MLP does",
}


def _massive(layers: pandas.DataFrame | None) -> Iterator[Finding]:
    """Tokens with massive activations, and what they would do to the values of the layer where they are largest."""
    for stack, block in stacks(layers):
        measured = known(block, "massive_tokens", "massive_norm")
        massive = measured[measured["massive_tokens"] > 0]
        if massive.empty:
            continue
        largest, most = massive.loc[massive["massive_norm"].idxmax()], int(massive["massive_tokens"].max())
        share = largest.get("massive_first_share", float("nan"))
        which = " (all of them the first token of a passage)" if share == 1 else ""
        who = "one token has" if most == 1 else f"up to {most} tokens have"
        sentence = (
            f"From {stack}layer {int(massive['layer'].iloc[0])} on, {who} a massive activation{which}: the norm reaches"
            f" {largest['massive_norm']:.0f} times the median of its passage in layer {int(largest['layer'])}."
            f" The values of the layers leave these tokens out{_with_massive(largest)}."
        )
        yield Finding("Massive activations", sentence, "massive_norm")
        return


def _with_massive(row: pandas.Series) -> str:
    pair = row.get("effective_rank"), row.get("effective_rank_all_tokens")
    if any(value is None or not abs(value) < float("inf") for value in pair):
        return ""
    return f"; with them, the effective rank there would be {pair[1]:.0f} instead of {pair[0]:.0f}"


def _neighbors(heads: pandas.DataFrame, column: str, token: str, title: str) -> Iterator[Finding]:
    measured = known(heads, column)
    local = measured[measured[column] > LOCAL].sort_values(column, ascending=False)
    if local.empty:
        return
    who = f"{count(len(local), len(measured), 'head')}, in {layer_ranges(local)},"
    sentence = f"{who} {'gives' if len(local) == 1 else 'give'} more than {LOCAL:.0%} of the attention to {token}"
    share = above(local.iloc[0][column], LOCAL)
    first = f"{'most ' if len(local) > 1 else ''}{head_name(local.iloc[0], heads)} with {share}"
    yield Finding(title, f"{percent(f'{sentence}, {first}')}: {FOLLOWS[column]}.", column, places(local))


def _rank(layers: pandas.DataFrame | None) -> Iterator[Finding]:
    """The course of the effective rank over all layers."""
    for stack, block in stacks(layers):
        measured = known(block, "effective_rank")
        measured = measured[measured["effective_rank"] > 0]
        turns = _turns([math.log(rank) for rank in measured["effective_rank"]], RANK_TURN)
        if len(turns) < 2:
            continue
        lowest = int(measured.loc[measured["effective_rank"].idxmin(), "layer"])
        title, follows = "Rank of the tokens", f"in {stack}layer {lowest} the tokens differ in the fewest directions"
        if len(turns) == 2:
            gains = measured["effective_rank"].iloc[turns[1]] > measured["effective_rank"].iloc[0]
            title = f"Tokens {'gain' if gains else 'lose'} directions"
        sentence = (
            f"The effective rank of the tokens is {_course(measured, 'effective_rank', turns, stack, 0)}: {follows}."
        )
        yield Finding(title, sentence, "effective_rank")
        return


def _similarity(layers: pandas.DataFrame | None) -> Iterator[Finding]:
    """The course of the similarity of tokens over all layers."""
    for stack, block in stacks(layers):
        measured = known(block, "token_cosine")
        values = list(measured["token_cosine"])
        turns = _turns(values, COSINE_TURN)
        if len(turns) < 2:
            continue
        title, follows = "Similarity of the tokens", "layers in which it falls tell the tokens apart again"
        if len(turns) == 2 and values[turns[1]] > values[0]:
            title, follows = "Tokens grow alike", "tokens that point the same way get more similar scores and updates"
        course = _course(measured, "token_cosine", turns, stack, 2)
        yield Finding(title, f"The mean similarity of two tokens is {course}: {follows}.", "token_cosine")
        return


def _course(block: pandas.DataFrame, column: str, turns: Sequence[int], stack: str, digits: int) -> str:
    rows = [block.iloc[place] for place in turns]
    words = [f"{rows[0][column]:.{digits}f} in {stack}layer {int(rows[0]['layer'])}"]
    for before, row in itertools.pairwise(rows):
        verb = "rises" if row[column] > before[column] else "falls"
        words.append(f"{verb} to {row[column]:.{digits}f} in layer {int(row['layer'])}")
    return f"{', '.join(words[:-1])} and {words[-1]}"


def _turns(values: Sequence[float], least: float) -> list[int]:
    """Return the places where a course begins, turns and ends, without changes below ``least``.

    Of the changes that remain the smallest are left out until there are :data:`CHANGES`.

    Example:
        >>> _turns([170, 171, 40, 42, 186, 85], 5)
        [0, 2, 4, 5]
        >>> _turns([170, 171], 5)
        [0]
    """
    kept = _extremes(values)
    while len(kept) > 1:
        changes = [abs(values[after] - values[before]) for before, after in itertools.pairwise(kept)]
        smallest = changes.index(min(changes))
        if changes[smallest] >= least and len(changes) <= CHANGES:
            break
        # A change inside the course goes with both of its ends; the first place of the course stays.
        inside = 0 < smallest < len(changes) - 1
        del kept[smallest if inside else smallest + 1 : smallest + 2]
    return kept


def _extremes(values: Sequence[float]) -> list[int]:
    """Return the first and the last place and every place between at which the course turns."""
    kept: list[int] = []
    for place, value in enumerate(values):
        if len(kept) > 1 and (values[kept[-1]] - values[kept[-2]]) * (value - values[kept[-1]]) >= 0:
            kept[-1] = place
        else:
            kept.append(place)
    return kept


class _Distances(NamedTuple):
    """A way in which attention changes distances between tokens: signs against the control and against no change."""

    beyond: int
    change: int
    title: str
    verb: str
    follows: str


DISTANCES = (
    _Distances(
        1,
        1,
        "Expanding layers",
        "pushes tokens further apart than",
        "there attention makes tokens easier to tell apart",
    ),
    _Distances(
        -1,
        -1,
        "Contracting layers",
        "pulls tokens closer together than",
        "there attention makes tokens more alike",
    ),
    _Distances(
        -1,
        1,
        "Weakly expanding layers",
        "pushes tokens apart less than",
        "there tokens move apart, but their own updates add less distance than those of other tokens would",
    ),
    _Distances(
        1,
        -1,
        "Weakly contracting layers",
        "pulls tokens together less than",
        "there tokens move closer, but their own updates take away less distance than those of other tokens would",
    ),
)


def _distances(layers: pandas.DataFrame | None, kind: _Distances) -> Iterator[Finding]:
    for stack, measured in _expansions(layers):
        changing = kind.change * (measured["expansion"] - 1) > 2 * _column(measured, "expansion_se")
        clear = measured[measured["clear"] & (kind.beyond * measured["beyond"] > 0) & changing]
        if clear.empty:
            continue
        which = layer_ranges(clear.drop(columns="stack", errors="ignore")).replace("layer", f"{stack}layer", 1)
        if len(clear) == len(measured) > 1:
            which = f"every {stack}layer"
        most = _factors(clear.loc[(kind.beyond * clear["beyond"]).idxmax()])
        where = f"{which}, most in {most}" if len(clear) > 1 else f"{stack}{most}"
        sentence = f"Attention {kind.verb} its permuted control does in {where}: {kind.follows}."
        yield Finding(kind.title, sentence, "expansion")
        return


def _as_the_control(layers: pandas.DataFrame | None) -> Iterator[Finding]:
    found = list(_expansions(layers))
    if not found or any(measured["clear"].any() for _, measured in found):
        return
    closest = max(
        (measured.loc[measured["beyond"].abs().idxmax()] for _, measured in found),
        key=lambda row: abs(float(row["beyond"])),
    )
    sentence = (
        "In no layer do distances between tokens change clearly more or less than with permuted updates; the largest"
        f" difference is in {_factors(closest)}: which token an update belongs to does not matter for distances."
    )
    yield Finding("Distances as in the control", sentence, "expansion")


def _expansions(layers: pandas.DataFrame | None) -> Iterator[tuple[str, pandas.DataFrame]]:
    """Layers with their expansion beyond the control, and whether it is clear: by an amount and by its error."""
    for stack, block in stacks(layers):
        measured = known(block, "expansion", "expansion_control")
        if len(measured):
            beyond = measured["expansion"] - measured["expansion_control"]
            squares = _column(measured, "expansion_se") ** 2 + _column(measured, "expansion_control_se") ** 2
            clear = (beyond.abs() > BEYOND_CONTROL) & (beyond.abs() > 2 * squares**0.5)
            yield stack, measured.assign(beyond=beyond, clear=clear)


def _column(table: pandas.DataFrame, name: str) -> pandas.Series[float]:
    """Return a column with zeros where it has no value or is missing."""
    import pandas

    return table[name].fillna(0.0) if name in table else pandas.Series(0.0, index=table.index)


def _factors(row: pandas.Series) -> str:
    change = f"by a factor of {row['expansion']:.3f} against {row['expansion_control']:.3f}"
    return f"layer {int(row['layer'])} ({change})"


def _linear(layers: pandas.DataFrame | None) -> Iterator[Finding]:
    measured = known(layers, "fc_linear_r2")
    linear = measured[measured["fc_linear_r2"] > NEARLY_LINEAR]
    if linear.empty:
        return
    most = linear.loc[linear["fc_linear_r2"].idxmax()]
    control = known(linear, "fc_linear_control")
    against = f"; shuffled control {number(control['fc_linear_control'].median())}" if len(control) else ""
    fit = f"R² {most['fc_linear_r2']:.2f}{against}"
    which = "every layer" if len(linear) == len(measured) > 1 else layer_ranges(linear)
    best = fit if len(linear) == 1 else f"most in layer {int(most['layer'])}, {fit}"
    sentence = (
        f"In {which} a single matrix explains more than {NEARLY_LINEAR:.0%} of the MLP on unseen tokens ({best}):"
        " there a matrix could replace most of the MLP."
    )
    yield Finding("Nearly linear MLPs", percent(sentence), "fc_linear_r2")


def _classes(heads: pandas.DataFrame) -> Iterator[Finding]:
    from massieu.plotting.color_limits import row_length

    if "head_class" not in heads or len(heads) < 2:
        return
    classes = heads["head_class"].dropna()
    if classes.empty:
        return
    length = row_length(heads)
    at = f"On rows of about {length:,.0f} tokens, " if length else ""
    broad, single = int((classes == "I").sum()), int((classes == "IV").sum())
    sentence = (
        f"{at}{count(broad, len(classes), 'head')} {'needs' if broad == 1 else 'need'} more than half of the tokens in"
        f" sight for 90% of the attention (class I) and {single} at most a 32nd of them (class IV). Classes change with"
        " the length of the text: compare them at one length only."
    )
    yield Finding("Classes of the heads", percent(sentence), "head_class")


def _temperature(heads: pandas.DataFrame) -> Iterator[Finding]:
    for stack, block in stacks(heads):
        measured = known(block, "entropy")
        selecting = _without_sinks(measured)
        means = selecting.groupby("layer")["entropy"].mean()
        if len(means) < 2:
            continue
        low, high = means.idxmin(), means.idxmax()
        if means[high] - means[low] < WARMER:
            continue
        which = f"{stack}heads{' that are no sinks' * (len(selecting) < len(measured))}"
        sentence = (
            f"The mean entropy of the {which} is lowest in layer {low} ({means[low]:.2f} nats) and highest in"
            f" layer {high} ({means[high]:.2f} nats): layer {low} selects the most, layer {high} averages the most."
        )
        yield Finding("Cold and warm layers", sentence, "entropy")
        return
