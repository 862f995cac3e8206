"""Figures of token selection: training in the plane, approach to a direction, and selections reached from starts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from massieu.checks import UserError
from massieu.plotting import colors
from massieu.plotting.axes import INK, add_legend, check_columns, finish, new_figure

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

__all__ = ["approach", "selection_plane", "starts_map"]


def selection_plane(tokens: pandas.DataFrame, paths: Mapping[str, pandas.DataFrame], direction: Any) -> Figure:
    """Draw tokens in the plane, paths of W z in training, the max-margin direction, and the separating lines.

    Sequences share a query z, so that W z is one vector. The direction is solid; the dotted line across it lies, for
    each sequence, half-way between the selected token and its nearest rival. Diverging paths leave the frame.

    Args:
        tokens: columns ``sequence``, ``x``, ``y`` and ``selected``, which is true for one token of each sequence.
        paths: by name, columns ``x`` and ``y`` in the order of the steps.
        direction: the max-margin W z, two numbers.

    Example:
        >>> import pandas
        >>> tokens = pandas.DataFrame({"sequence": 0, "x": [1.0, 0.0], "y": [0.0, 1.0], "selected": [True, False]})
        >>> path = pandas.DataFrame({"x": [0.0, 2.0], "y": [0.0, -1.5]})
        >>> selection_plane(tokens, {"gd": path}, (0.5, -0.5)).axes[0].get_title("left")
        'W z in training'
    """
    check_columns(tokens, ("sequence", "x", "y", "selected"), "tokens")
    across, up = (float(number) for number in direction)
    length = math.hypot(across, up)
    if not length > 0:
        raise UserError(f"direction must be two numbers that are not both zero, got {across} and {up}")
    across, up = across / length, up / length
    reach = 2 * float(tokens[["x", "y"]].abs().max().max())
    figure = new_figure(6.4, 4.2)
    axis = figure.subplots()
    axis.plot([0, 2 * reach * across], [0, 2 * reach * up], color=INK, linewidth=1.6, label="max-margin direction")
    for number, (name, path) in enumerate(paths.items()):
        check_columns(path, ("x", "y"), "paths")
        color = colors.lines()[number % len(colors.lines())]
        width = 3.2 / (1 + number)  # paths may coincide; the first is the widest
        axis.plot(path["x"], path["y"], color=color, linewidth=width, marker="o", markersize=3, label=name)
    style: dict[str, Any] = {"s": 42, "zorder": 3}
    for number, (name, group) in enumerate(tokens.groupby("sequence")):
        along = group["x"] * across + group["y"] * up
        level = (along[group["selected"]].max() + along[~group["selected"]].max()) / 2
        ends = [(level * across - t * up, level * up + t * across) for t in (-3 * reach, 3 * reach)]
        shade = (INK, "#7d828c", "#b0a998")[number % 3]
        axis.plot(*zip(*ends, strict=True), ":", color=shade, linewidth=1.2)
        for chosen, face in ((True, shade), (False, "white")):
            part = group[group["selected"] == chosen]
            label = f"sequence {name}" if chosen else None
            style |= {"marker": "osD^vP"[number % 6], "facecolors": face, "edgecolors": shade, "label": label}
            axis.scatter(part["x"], part["y"], **style)
    return _framed(figure, "W z in training", reach)


def approach(histories: Mapping[str, pandas.DataFrame], column: str = "misalignment_best") -> Figure:
    """Draw one minus the correlation with the max-margin direction by step, on logarithmic axes.

    Args:
        histories: of training runs, by name.
        column: misalignment with the best or with the selected tokens.

    Example:
        >>> import pandas
        >>> history = pandas.DataFrame({"step": [0, 1, 10], "misalignment_best": [1.0, 0.5, 5e-3]})
        >>> approach({"ngd": history}).axes[0].get_xscale()
        'log'
    """
    if not histories:
        raise UserError("histories must hold at least one, got none")
    figure = new_figure(5.0, 3.2)
    axis = figure.subplots()
    ends = []
    for number, (name, history) in enumerate(histories.items()):
        check_columns(history, ("step", column), "history")
        later = history[(history["step"] > 0) & (history[column] > 0)]
        if len(later) == 0:
            raise UserError(f"{name} must have a positive {column} after its start, got none; was the data feasible?")
        color = colors.lines()[number % len(colors.lines())]
        axis.plot(later["step"], later[column], color=color, linewidth=1.6, label=name)
        ends.append((float(later[column].iloc[-1]), float(later["step"].iloc[-1])))
    least, last = min(ends)
    steps = [last / 100, last]
    axis.plot(steps, [3 * least * (last / step) ** 2 for step in steps], ":", color=INK, linewidth=1.2, label="1 / k²")
    axis.set(xscale="log", yscale="log")
    finish(axis, "Distance from the max-margin direction", "step k", "1 − correlation")
    add_legend(axis)
    return figure


def starts_map(starts: pandas.DataFrame, directions: Mapping[str, Any]) -> Figure:
    """Draw starts in the plane by the selection that training reaches, with the max-margin direction of each.

    Args:
        starts: columns ``x`` and ``y`` of W z at the start, ``selection``, a name, ``best`` and ``locally_optimal``.
        directions: the max-margin W z of every selection, two numbers each, by the same names.

    Example:
        >>> import pandas
        >>> starts = pandas.DataFrame(
        ...     {"x": [1.0, -1.0], "y": [0.0, 0.0], "selection": ["a", "b"], "best": [True, False]}
        ... ).assign(locally_optimal=True)
        >>> figure = starts_map(starts, {"a": (1.0, 0.5), "b": (-1.0, 0.0)})
        >>> [text.get_text() for text in figure.legends[0].get_texts()]
        ['a, best: 50% of starts', 'b, locally optimal: 50% of starts']
    """
    check_columns(starts, ("x", "y", "selection", "best", "locally_optimal"), "starts")
    figure = new_figure(6.6, 3.9)
    axis = figure.subplots()
    reach = 1.1 * float(starts[["x", "y"]].abs().max().max())
    order = starts["selection"].value_counts(sort=True).index
    for number, name in enumerate(order):
        group = starts[starts["selection"] == name]
        color = colors.lines()[number % len(colors.lines())]
        kind = "best" if group["best"].all() else "locally optimal" if group["locally_optimal"].all() else "moving"
        label = f"{name}, {kind}: {len(group) / len(starts):.0%} of starts"
        marker = {"best": "o", "locally optimal": "s", "moving": "x"}[kind]
        axis.scatter(group["x"], group["y"], s=16, marker=marker, color=color, label=label)
        if name in directions:
            across, up = (float(number) for number in directions[name])
            size = 2 * reach / math.hypot(across, up)
            axis.plot([0, size * across], [0, size * up], color=color, linewidth=1.8)
    return _framed(figure, "Selection reached from each start", reach)


def _framed(figure: Figure, title: str, reach: float) -> Figure:
    """Finish a figure of the plane, with the legend outside."""
    (axis,) = figure.axes
    finish(axis, title, "", "")
    axis.set(xlim=(-reach, reach), ylim=(-reach, reach), aspect="equal")
    axis.grid(visible=False)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=8)
    return figure
