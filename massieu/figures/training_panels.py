"""Figures of training runs: the loss and watched quantities, run beside run."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from massieu.checks import UserError
from massieu.plotting import colors
from massieu.plotting.axes import INK, add_legend, check_columns, finish, new_figure

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

__all__ = ["training_panels"]

MARKS = ((0, (1, 1.2)), (0, (5, 2)), (0, (6, 2, 1, 2)), "solid")


def training_panels(
    runs: Mapping[str, pandas.DataFrame],
    marks: Mapping[str, Mapping[str, int]] | None = None,
    log: Collection[str] = ("score_max",),
) -> Figure:
    """Draw a column of panels for each run and a row for each column of its table, against the step, on shared axes.

    Args:
        runs: by title; columns ``step``, ``loss`` and others, the same in all; nan between readings.
        marks: by title of the run, steps to mark by a vertical line, by the name of the event.
        log: columns on a logarithmic axis.

    Example:
        >>> import pandas
        >>> run = pandas.DataFrame({"step": [0, 1], "loss": [7.0, 6.0], "score_max": [1.0, 200.0]})
        >>> figure = training_panels({"unstable": run}, {"unstable": {"logit growth": 1}})
        >>> [axis.get_ylabel() for axis in figure.axes], figure.axes[0].get_title("left")
        (['loss', 'score max'], 'unstable')
    """
    if not runs:
        raise UserError("there must be runs to draw, got none; make one with massieu.claims.training_runs.training_run")
    for table in runs.values():
        check_columns(table, ("step", "loss"), "each run")
    marks = {} if marks is None else marks
    unknown = [title for title in marks if title not in runs]
    if unknown:
        raise UserError(f"marks must belong to a run, got {', '.join(unknown)}; the runs are {', '.join(runs)}")
    names = [name for name in next(iter(runs.values())) if name != "step"]
    for table in runs.values():
        check_columns(table, tuple(names), "each run")
    events = list(dict.fromkeys(event for own in marks.values() for event in own))
    figure = new_figure(0.6 + 3.6 * len(runs), 0.6 + 1.7 * len(names))
    axes = figure.subplots(len(names), len(runs), sharex=True, sharey="row", squeeze=False)
    for across, (title, table) in enumerate(runs.items()):
        for down, name in enumerate(names):
            axis = axes[down, across]
            seen = table[table[name].notna()]
            axis.plot(seen["step"], seen[name], color=colors.lines()[0], linewidth=1.6)
            for event, step in marks.get(title, {}).items():
                style = MARKS[events.index(event) % len(MARKS)]
                axis.axvline(step, linestyle=style, color=INK, linewidth=1.1, label=event)
            last = down == len(names) - 1
            words = name.replace("_", " ")
            finish(axis, "" if down else title, "step" if last else "", "" if across else words)
            if name in log and all(float(each[name].min()) > 0 for each in runs.values()):
                axis.set_yscale("log")
                axis.minorticks_off()
        if marks.get(title):
            add_legend(axes[0, across], loc="best")
    top = max(_largest(table["loss"]) for table in runs.values())
    axes[0, 0].set_ylim(top=1.05 * top)
    return figure


def _largest(values: pandas.Series) -> float:
    return max((float(value) for value in values if math.isfinite(value)), default=1.0)
