"""Inspections, comparisons, claims and learned models as tables in a terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from massieu.checks import visible
from massieu.report.changes import NO_LOSS, Change, ComparedRuns
from massieu.report.rulers import ABOUT_VERDICTS
from massieu.report.verdicts import CONTROL, UNIT, VERDICTS, outcome

__all__ = [
    "made_visible",
    "plain_table",
    "show_claims",
    "show_comparison",
    "show_inspection",
    "show_learned",
    "show_verdicts",
    "terminal",
]

HEADS = ("entropy", "normalized_entropy", "effective_atoms", "peak", "sink_mass", "previous_mass", "score_variance")
PRIORITY = (
    *("entropy", "effective_atoms", "peak", "sink_mass", "expansion", "expansion_control", "token_cosine"),
    *("normalized_entropy", "previous_mass", "fc_linear_r2", "field_symmetry", "score_variance", "effective_rank"),
)
"""Columns of a narrow terminal."""
HEADINGS = {"effective_atoms": "effective tokens"}
"""Headings as on the page, where they differ from the name of the column."""
LAYERS = ("expansion", "expansion_control", "token_cosine", "effective_rank", "fc_linear_r2", "field_symmetry")


ROOM_FOR_NUMBERS = 120
"""Width of a terminal that has room for all numbers of a claim beside its statement."""


def terminal() -> Console:
    """Return a rich console on standard output that interprets neither markup nor emoji in names."""
    return Console(markup=False, emoji=False)


def plain_table(**options: Any) -> Table:
    """Return a table without lines."""
    return Table(box=None, header_style="bold", pad_edge=False, **options)


def made_visible(value: Any) -> Any:
    r"""Return a document with control characters escaped, so that no text acts as a command of the terminal.

    Example:
        >>> print(made_visible({"name": ["\x1b[2J", 1.5]})["name"][0])
        \x1b[2J
    """
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, Mapping):
        return {made_visible(name): made_visible(own) for name, own in value.items()}
    if isinstance(value, (list, tuple)):
        return [made_visible(own) for own in value]
    return value


def show_inspection(document: Mapping[str, Any], console: Console) -> None:
    """Print the document of an inspection on a rich console."""
    document = made_visible(document)
    facts = document["facts"]
    model, text = facts["model"], facts["text"]
    console.print(Text(f"{model['name']}", style="bold"), Text(f"{model['class']}, {model['parameters']:,} parameters"))
    console.print(
        Text(
            f"{facts['coverage']['sentence']}; {text['counted_tokens']:,} of {text['tokens']:,} tokens counted,"
            f" {text['documents']:,} document{'' if text['documents'] == 1 else 's'}, {facts['seconds']:.1f} s"
        )
    )
    quantities, layers = document["quantities"], {(row["stack"], row["layer"]): row for row in document["layers"]}
    table = plain_table()
    table.add_column("layer", no_wrap=True)
    there = [name for name in LAYERS if any(row.get(name) is not None for row in layers.values())]
    room = max(3, (console.width - 12) // 12)
    shown = set([name for name in PRIORITY if name in HEADS or name in there][:room])
    heads_shown, there = [name for name in HEADS if name in shown], [name for name in there if name in shown]
    for name in (*heads_shown, *there):
        table.add_column(HEADINGS.get(name, name.replace("_", " ")), justify="right", overflow="fold")
    for stack, layer in dict.fromkeys((row["stack"], row["layer"]) for row in document["heads"]):
        heads = [row for row in document["heads"] if (row["stack"], row["layer"]) == (stack, layer)]
        cells = [_cell(_mean([row.get(name) for row in heads]), quantities, name) for name in heads_shown]
        cells += [_cell(layers.get((stack, layer), {}).get(name), quantities, name) for name in there]
        table.add_row(f"{stack} {layer}", *cells)
    console.print(table)
    console.print(Text("means over the heads of a layer; all heads are in the report and in --json", style="dim"))
    for finding in document["findings"]:
        console.print(Text.assemble((f"{finding['title']}: ", "bold"), finding["sentence"]))
    if document.get("predictions"):
        console.print(_predictions_table(document["predictions"]))
        console.print(Text(ABOUT_VERDICTS, style="dim"))
    for note in document["notes"]:
        console.print(Text(note, style="dim"))


def _predictions_table(predictions: Sequence[Mapping[str, Any]]) -> Table:
    table = plain_table()
    table.add_column("prediction of the theory")
    for name in ("measured", "control", "theory"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("verdict", "where"):
        table.add_column(name)
    for row in predictions:
        numbers = [_number(row[name], 2) for name in ("measured", "control", "predicted")]
        table.add_row(row["statement"], *numbers, row["verdict"], row["sentence"])
    return table


def show_comparison(documents: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print several inspections side by side: a table of means and changes, then sentences."""
    compared = ComparedRuns([made_visible(document) for document in documents])
    for which in ("heads", "layers"):
        own = [change for change in compared.changes if compared.quantities[change.quantity]["table"] == which]
        if own:
            console.print(_changes_table(own, which, compared.names))
    for title, sentence, _ in compared.sentences:
        console.print(Text.assemble((f"{title}: ", "bold"), sentence))
    for sentence in (compared.overall, *compared.reservations):
        console.print(Text(sentence))
    console.print(Text(NO_LOSS, style="dim"))


def _changes_table(changes: Sequence[Change], which: str, names: Sequence[str]) -> Table:
    table = plain_table()
    table.add_column(f"mean over {which} of", no_wrap=True)
    for name in (*names, "change", "mean |change|", "beyond 2 s.e."):
        table.add_column(Text(name), justify="right", overflow="fold")
    for each in changes:
        beyond = "-" if each.beyond is None else f"{each.beyond[0]} of {each.beyond[1]}"
        numbers = [_number(value, 3) for value in (*each.means, each.change, each.absolute)]
        table.add_row(each.quantity, *numbers, beyond)
    return table


STYLES = {
    "HOLDS": "green",
    "HOLDS_CORRECTED": "cyan",
    "CONDITIONAL": "cyan",
    "FAILS": "yellow",
    "UNDECIDED": "bold red",
}


def show_verdicts(rows: Sequence[Mapping[str, Any]], seconds: float, console: Console) -> None:
    """Print every claim with its short statement and its verdict; a wide terminal shows all numbers."""
    rows = made_visible(rows)
    table = plain_table()
    for name, wraps in (("claim", False), ("statement", True), ("verdict", True)):
        table.add_column(name, no_wrap=not wraps)
    numbers = ("measured", "control", "seconds") if console.width >= ROOM_FOR_NUMBERS else ("measured",)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        verdict = Text(outcome(row["verdict"], row["expected"]), style=STYLES[row["verdict"]])
        table.add_row(row["claim"], row["statement"], verdict, *(_brief(row[name]) for name in numbers))
    console.print(table)
    known = [row for row in rows if row["expected"] is not None]
    agree = f"{sum(row['expected'] == row['verdict'] for row in known)} of {len(known)} verdicts as expected"
    free = sum(row["expected"] is None and row["verdict"] != "UNDECIDED" for row in rows)
    words = [agree] * bool(known) + [f"{free} measured on your model"] * bool(free) + [f"{seconds:.0f} s"]
    console.print(Text(f"{UNIT} {CONTROL}" if "control" in numbers else UNIT, style="dim"))
    console.print(Text(", ".join(words), style="dim"))


def show_claims(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print the claims with their short statements."""
    table = plain_table()
    for name in ("key", "expected"):
        table.add_column(name, no_wrap=True)
    table.add_column("statement")
    for row in rows:
        table.add_row(row["key"], VERDICTS[row["expected"]], row["title"])
    console.print(table)


def show_learned(document: Mapping[str, Any], console: Console) -> None:
    """Print the errors after all examples, the sensitivities, and retrieval against learning."""
    document = made_visible(document)
    facts, last = document["facts"], max(row["examples"] for row in document["curve"])
    summary = f"{facts['parameters']:,} weights, {facts['cpu_seconds']:.0f} CPU seconds, ended by {facts['ended']}"
    console.print(Text(summary))
    cosines = {row["predictor"]: row["cosine"] for row in document["sensitivities"] if row["examples"] == last}
    table = plain_table()
    for name in (f"error after {last} examples", "error", "± s.e.", "cosine of sensitivities"):
        table.add_column(name, justify="left" if "after" in name else "right")
    for row in document["curve"]:
        if row["examples"] == last:
            values = (row["error"], row["standard_error"], cosines.get(row["predictor"]))
            table.add_row(row["predictor"], *(_number(value, 4) for value in values))
    console.print(table)
    if facts.get("too_short"):
        console.print(Text(facts["too_short"], style="yellow"))
    for row in document["hypotheses"]:
        if row["to_retrieval"] is not None:  # only a pool can be retrieved
            gaps = f"{row['to_learning']:.3g} from {row['learner']}, {row['to_retrieval']:.3g} from retrieval"
            console.print(Text(f"{row['condition']} functions: {row['follows']} ({gaps})", style="dim"))


def _brief(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"


def _cell(value: float | None, quantities: Mapping[str, Any], name: str) -> str:
    return _number(value, quantities.get(name, {}).get("digits", 2))


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.{digits}f}"


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None and not math.isnan(value)]
    return sum(known) / len(known) if known else None
