"""Figures of universal approximation: error against the grid, and the separation of contexts against the vocabulary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from massieu.checks import UserError
from massieu.plotting import colors
from massieu.plotting.axes import INK, MARK, add_legend, finish, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from massieu.universal import GridError, SeparationGap

__all__ = ["grid_error_curve", "separation_curve"]

RESOLUTION = 1e3 * 2.0**-52  # a thousand machine epsilons of float64


def grid_error_curve(runs: Mapping[str, Sequence[GridError]]) -> Figure:
    """Root mean square error (solid) and largest error (dashed) against the cells along an axis, beside 1 / n.

    Args:
        runs: of :func:`massieu.universal.grid_errors`, by name, such as one for each width of the strips.

    Example:
        >>> from massieu.universal import GridError
        >>> axis = grid_error_curve({"narrow": [GridError(4, 0.2, 0.5), GridError(8, 0.1, 0.25)]}).axes[0]
        >>> [line.get_label() for line in axis.lines]
        ['narrow, root mean square', 'narrow, largest', '1 / n']
    """
    if not runs or not all(runs.values()):
        raise UserError("there must be errors to draw in every run, got none; measure some with grid_errors")
    figure = new_figure(6.6, 3.4)
    axis = figure.subplots()
    for number, (name, rows) in enumerate(runs.items()):
        color = colors.lines()[number % len(colors.lines())]
        cells = [row.cells for row in rows]
        for style, label, values in (
            ("-", "root mean square", [row.mean_square for row in rows]),
            ("--", "largest", [row.largest for row in rows]),
        ):
            axis.plot(cells, values, style, color=color, marker="o", markersize=3, label=f"{name}, {label}")
    first = next(iter(runs.values()))
    ends = [first[0].cells, first[-1].cells]
    level = 0.7 * first[0].mean_square * ends[0]
    axis.plot(ends, [level / cells for cells in ends], ":", color=INK, linewidth=1.2, label="1 / n")
    axis.set(xscale="log", yscale="log")
    ticks = sorted({row.cells for rows in runs.values() for row in rows})
    axis.set_xticks(ticks, [str(cells) for cells in ticks])
    axis.set_xticks([], minor=True)
    finish(axis, "Error of a construction", "cells along an axis, n", "error")
    figure.legend(*axis.get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=8)
    return figure


def separation_curve(rows: Sequence[SeparationGap]) -> Figure:
    """The least distance of two contexts against the vocabulary, at the theorem's scale and with codes searched for.

    Below the dotted line float64 does not resolve it; gaps that are zero are crosses at the foot.

    Args:
        rows: of :func:`massieu.universal.separation_gaps`.

    Example:
        >>> from massieu.universal import SeparationGap
        >>> axis = separation_curve([SeparationGap(4, 1e-4, 1e-2), SeparationGap(9, 0.0, 1e-3)]).axes[0]
        >>> [line.get_label() for line in axis.lines]
        ['searched codes', "the theorem's spacing", 'zero in float64', 'resolution of float64']
    """
    if not rows:
        raise UserError("there must be gaps to draw, got none; measure some with separation_gaps")
    figure = new_figure(5.4, 3.4)
    axis = figure.subplots()
    floor = 1e-17
    for name, color, gaps in (
        ("searched codes", colors.lines()[0], [(row.vocabulary, row.searched) for row in rows]),
        ("the theorem's spacing", MARK, [(row.vocabulary, row.theorem) for row in rows]),
    ):
        seen = [(vocabulary, gap) for vocabulary, gap in gaps if gap > 0]
        if seen:
            axis.plot(*zip(*seen, strict=True), color=color, marker="o", markersize=4, label=name)
    gone = [row.vocabulary for row in rows if row.theorem == 0]
    if gone:
        axis.plot(gone, [floor] * len(gone), "x", color=MARK, markersize=6, label="zero in float64")
    axis.axhline(RESOLUTION, linestyle=":", color=INK, linewidth=1.2, label="resolution of float64")
    axis.set(yscale="log", ylim=(floor / 10, 1.0))
    sizes = [row.vocabulary for row in rows]
    axis.set_xticks(sizes, [str(size) for size in sizes])
    finish(axis, "Least distance between two contexts", "tokens in the vocabulary", "share of the largest code")
    add_legend(axis, loc="center right", bbox_to_anchor=(1, 0.55))
    return figure
