"""Plots of universal approximation: error by grid, and separation of contexts by vocabulary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from massieu.checks import UserError
from massieu.plotting import colors
from massieu.plotting.axes import INK, MARK, add_legend, finish, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from massieu.universal import GridAccuracy, SeparationGap

__all__ = ["grid_error_curve", "separation_curve"]

RESOLUTION = 1e3 * 2.0**-52  # a thousand machine epsilons of float64


def grid_error_curve(runs: Mapping[str, Sequence[GridAccuracy]]) -> Figure:
    """Plot root mean square error (solid) and largest error (dashed) against the cells along an axis, beside 1 / n.

    Args:
        runs: of :func:`massieu.universal.grid_errors`, by name, such as one for each width of the strips.

    Example:
        >>> from massieu.universal import GridAccuracy
        >>> axis = grid_error_curve({"narrow": [GridAccuracy(4, 0.2, 0.5), GridAccuracy(8, 0.1, 0.25)]}).axes[0]
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
            ("-", "root mean square", [row.root_mean_square for row in rows]),
            ("--", "largest", [row.largest for row in rows]),
        ):
            axis.plot(cells, values, style, color=color, marker="o", markersize=3, label=f"{name}, {label}")
    first = next(iter(runs.values()))
    ends = [first[0].cells, first[-1].cells]
    level = 0.7 * first[0].root_mean_square * ends[0]
    axis.plot(ends, [level / cells for cells in ends], ":", color=INK, linewidth=1.2, label="1 / n")
    axis.set(xscale="log", yscale="log")
    ticks = sorted({row.cells for rows in runs.values() for row in rows})
    axis.set_xticks(ticks, [str(cells) for cells in ticks])
    axis.set_xticks([], minor=True)
    finish(axis, "Error of a construction", "cells along an axis, n", "error")
    figure.legend(*axis.get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=8)
    return figure


def separation_curve(rows: Sequence[SeparationGap]) -> Figure:
    """Plot the least distance of two contexts against the vocabulary, at the theorem's scale and for searched codes.

    Gaps below the dotted line are below the resolution of float64; crosses at the bottom are zero gaps.

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
        positive = [(vocabulary, gap) for vocabulary, gap in gaps if gap > 0]
        if positive:
            axis.plot(*zip(*positive, strict=True), color=color, marker="o", markersize=4, label=name)
    zero = [row.vocabulary for row in rows if row.theorem == 0]
    if zero:
        axis.plot(zero, [floor] * len(zero), "x", color=MARK, markersize=6, label="zero in float64")
    axis.axhline(RESOLUTION, linestyle=":", color=INK, linewidth=1.2, label="resolution of float64")
    axis.set(yscale="log", ylim=(floor / 10, 1.0))
    sizes = [row.vocabulary for row in rows]
    axis.set_xticks(sizes, [str(size) for size in sizes])
    finish(axis, "Least distance between two contexts", "tokens in the vocabulary", "share of the largest code")
    add_legend(axis, loc="center right", bbox_to_anchor=(1, 0.55))
    return figure
