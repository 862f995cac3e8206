"""Plots of sparse patterns: reach by layer, and growth of connections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from massieu.checks import UserError
from massieu.patterns import Pattern, Schedule, reach, reach_by_layer
from massieu.patterns.pattern import as_schedule
from massieu.plotting import colors
from massieu.plotting.axes import INK, SOFT, add_legend, finish, need_matplotlib, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["connection_growth", "pattern_reach"]


def pattern_reach(schedules: Mapping[str, Pattern | Schedule], length: int = 32, layers: int = 4) -> Figure:
    """Plot the reach of every token after each layer, one row of squares for each schedule.

    A square has a line for each token and a column for each token that it reaches: dark for direct connections, light
    for those through other tokens. Its title is the share of pairs; the label at the end of a row is the number of
    layers to full reach.

    Args:
        schedules: patterns or schedules by name.
        length: number of tokens.
        layers: number of squares in a row.

    Example:
        >>> from massieu.patterns import star, window
        >>> figure = pattern_reach({"window": window(1), "star": star()}, length=16, layers=3)
        >>> [axis.get_title() for axis in figure.axes[3:]]
        ['18%', '100%', '100%']
    """
    if not schedules or layers < 1:
        raise UserError(f"there must be a schedule and a layer to draw, got {len(schedules)} and {layers}")
    need_matplotlib()
    from matplotlib.colors import ListedColormap

    shades = ListedColormap(["#f6f4ee", "#b9c7dd", colors.lines()[0]])
    figure = new_figure(1.35 * layers + 1.6, 1.5 * len(schedules) + 0.3)
    axes = figure.subplots(len(schedules), layers, squeeze=False)
    for row, (name, schedule) in zip(axes, schedules.items(), strict=True):
        patterns = as_schedule(schedule)
        for layer, (axis, sets) in enumerate(zip(row, reach_by_layer(patterns, length, layers), strict=True)):
            own = patterns[layer].at(length)
            reached = sets.unpack().astype(int)
            axis.imshow(reached + (own & sets).unpack(), cmap=shades, vmin=0, vmax=2, interpolation="nearest")
            axis.set_title(f"{sets.connections / length**2:.0%}", fontsize=8, color=SOFT)
            axis.set(xticks=[], yticks=[])
            for side in axis.spines.values():
                side.set_visible(False)
        row[0].set_ylabel(name, fontsize=9, color=INK)
        found = reach(patterns, length)
        end = f"all after {found.layers}" if found.layers else "never all"
        if found.causal_layers:
            end = f"earlier after {found.causal_layers}"
        row[-1].yaxis.set_label_position("right")
        row[-1].set_ylabel(end, fontsize=8, color=SOFT)
    for layer, axis in enumerate(axes[-1], 1):
        axis.set_xlabel(f"layer {layer}", fontsize=8, color=SOFT)
    return figure


def connection_growth(schedules: Mapping[str, Pattern | Schedule], lengths: Sequence[int]) -> Figure:
    """Plot the connections of all patterns of each schedule against the length, with the exponents of growth.

    Example:
        >>> from massieu.patterns import full, star_ring
        >>> figure = connection_growth({"full": full(), "star and ring": star_ring()}, [64, 256])
        >>> [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
        ['full: T^2.00', 'star and ring: T^1.01']
    """
    if not schedules or len(lengths) < 2:
        raise UserError(f"there must be a schedule and two lengths, got {len(schedules)} and {len(lengths)}")
    figure = new_figure(5.0, 3.2)
    axis = figure.subplots()
    for number, (name, schedule) in enumerate(schedules.items()):
        patterns = as_schedule(schedule)
        counts = [sum(patterns.connections(length)) for length in lengths]
        label = f"{name}: T^{patterns.growth(min(lengths), max(lengths)):.2f}"
        color = colors.lines()[number % len(colors.lines())]
        axis.plot(lengths, counts, color=color, linewidth=1.6, marker="o", markersize=3, label=label)
    axis.set(xscale="log", yscale="log")
    finish(axis, "Connections by length", "tokens T", "connections")
    add_legend(axis)
    return figure
