"""Figures of inspections: maps of the heads, profiles of the layers, trajectories over several runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from massieu.checks import UserError
from massieu.plotting import colors
from massieu.plotting.axes import INK, MARK, SOFT, add_legend, finish, given_axes, need_matplotlib, new_figure
from massieu.plotting.color_limits import Limit, color_limits, row_length

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.colors import ListedColormap, Normalize
    from matplotlib.figure import Figure

__all__ = ["SAVED", "Described", "head_map", "layer_profile", "save_figures", "trajectory"]

CLASSES = ("I", "II", "III", "IV")
SAVED = {
    "heads": ("entropy", "score_variance", "sink_mass", "gradient_cosine"),
    "layers": ("expansion", "effective_rank", "token_cosine", "kurtosis", "fc_linear_r2", "field_symmetry"),
}


class Described(Protocol):
    """Interface of a quantity, such as an entry of ``massieu.inspection.quantities.QUANTITIES``."""

    @property
    def name(self) -> str: ...
    @property
    def table(self) -> str: ...
    @property
    def title(self) -> str: ...
    @property
    def unit(self) -> str: ...
    @property
    def scale(self) -> str: ...
    @property
    def control(self) -> str | None: ...
    @property
    def predicted(self) -> float | None: ...
    @property
    def neutral(self) -> float | None: ...
    @property
    def digits(self) -> int: ...
    @property
    def least(self) -> float | None: ...
    @property
    def most(self) -> Limit: ...


def head_map(heads: pandas.DataFrame, quantity: Described, *, ax: Any = None) -> Figure:
    """Draw a quantity of every head as colors, layers by heads, with one map for each stack.

    Args:
        heads: the heads table of an inspection.
        quantity: one of its columns, such as ``QUANTITIES["entropy"]``.
        ax: axes to draw into, one for each stack; None for a new figure.

    Returns:
        The figure, that of ``ax`` if they are given.

    Example:
        >>> import pandas
        >>> from massieu.inspection.quantities import QUANTITIES
        >>> table = pandas.DataFrame({"stack": "decoder", "layer": [0, 0], "head": [0, 1], "entropy": [0.3, 2.1]})
        >>> head_map(table, QUANTITIES["entropy"]).axes[0].get_title("left")
        'Entropy'
    """
    _check(heads, quantity, "heads")
    values = _numbers(heads, quantity)
    if not values.notna().any():
        raise UserError(
            f"the heads table must have a value of {quantity.name}, got none; see the notes of the inspection"
        )
    color_map, norm = _scale(quantity, [value for value in values if value == value], row_length(heads))
    stacks = [(stack, heads[heads["stack"] == stack]) for stack in heads["stack"].unique()]
    sizes = [(table["layer"].nunique(), int(table["head"].max()) + 1) for _, table in stacks]
    figure, axes = _map_axes(sizes) if ax is None else _given(ax, [stack for stack, _ in stacks])
    for axis, (stack, table) in zip(axes, stacks, strict=True):
        _draw_cells(axis, table, values.loc[table.index], quantity, color_map, norm)
        axis.set_title(quantity.title + (f", {stack}" if len(stacks) > 1 else ""), loc="left", fontsize=10, color=INK)
    bar = figure.colorbar(axes[0].images[0], ax=list(axes), fraction=0.04, pad=0.02)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8, color=SOFT, labelcolor=SOFT)
    bar.set_label(quantity.unit, fontsize=8, color=SOFT)
    if quantity.scale == "class":
        bar.set_ticks(range(len(CLASSES)), labels=CLASSES)
    elif hasattr(bar.formatter, "set_useOffset"):
        bar.formatter.set_useOffset(False)  # full values, also where they hardly differ
    return figure


def layer_profile(layers: pandas.DataFrame, quantity: Described, *, ax: Any = None) -> Figure:
    """Draw a quantity over the layers, its control dashed, the prediction dotted; one panel for each stack.

    Args:
        layers: the layers table of an inspection.
        quantity: one of its columns, such as ``QUANTITIES["entropy"]``.
        ax: axes to draw into, one for each stack; None for a new figure.

    Returns:
        The figure, that of ``ax`` if they are given.
    """
    _check(layers, quantity, "layers")
    stacks = list(layers["stack"].unique())
    if ax is None:
        figure = new_figure(1.2 + 3.6 * len(stacks), 2.7)
        axes = list(figure.subplots(1, len(stacks), squeeze=False)[0])
    else:
        figure, axes = _given(ax, stacks)
    for axis, stack in zip(axes, stacks, strict=True):
        table = layers[layers["stack"] == stack].sort_values("layer")
        x, values = table["layer"], _numbers(table, quantity)
        axis.plot(x, values, marker="o", markersize=3.5, color=colors.lines()[0], label="measured")
        control = quantity.control if quantity.control in table else None
        if control and quantity.name == "kurtosis":
            band = _floats(table[control]).abs()
            axis.fill_between(x, -band, band, color=colors.lines()[0], alpha=0.15, linewidth=0, label="Gaussian sample")
        elif control:
            axis.plot(x, _floats(table[control]), "--", color=SOFT, linewidth=1.2, label="control")
        level = quantity.neutral if quantity.predicted is None else quantity.predicted
        if level is not None:
            label = "no change" if quantity.predicted is None else "theory"
            axis.axhline(level, linestyle=":", color=MARK, linewidth=1.2, label=label)
        finish(axis, quantity.title + (f", {stack}" if len(stacks) > 1 else ""), "layer", quantity.unit)
        axis.set_xticks(_few(list(x)))
        add_legend(axis)
    return figure


def trajectory(runs: Mapping[str, pandas.DataFrame], quantity: Described) -> Figure:
    """Draw the mean over the heads of each layer from run to run, deep layers dark, and the mean over all heads.

    Args:
        runs: heads tables by name, in order; of checkpoints, the earliest first.
        quantity: a column of the tables.
    """
    if len(runs) < 2:
        raise UserError(f"a trajectory needs two or more runs, got {len(runs)}; head_map shows a single one")
    for table in runs.values():
        _check(table, quantity, "heads")
    figure = new_figure(1.2 + 0.9 * max(len(runs), 4), 3.0)
    axis = figure.subplots()
    means = [
        table.assign(value=_numbers(table, quantity)).groupby(["stack", "layer"])["value"].mean()
        for table in runs.values()
    ]
    places = list(dict.fromkeys(place for mean in means for place in mean.index))
    shades = colors.sequential()[8:]
    for number, place in enumerate(places):
        shade = shades[round(number * (len(shades) - 1) / max(len(places) - 1, 1))]
        values = [mean.get(place, math.nan) for mean in means]
        axis.plot(range(len(runs)), values, color=shade, linewidth=1, label=f"{place[0]} layer {place[1]}")
    axis.plot(range(len(runs)), [mean.mean() for mean in means], color=INK, linewidth=2.2, marker="o", label="mean")
    axis.set_xticks(
        range(len(runs)),
        labels=list(runs),
        rotation=20 if len(runs) > 3 else 0,
        ha="right" if len(runs) > 3 else "center",
    )
    finish(axis, quantity.title, "", quantity.unit)
    if len(places) <= 8:
        add_legend(axis, size=7)
    return figure


def save_figures(
    heads: pandas.DataFrame, layers: pandas.DataFrame, quantities: Mapping[str, Described], folder: str | Path
) -> list[Path]:
    """Write the main maps and profiles of an inspection as SVG and PNG.

    Args:
        heads: the heads table of an inspection.
        layers: its layers table.
        quantities: the columns by name, such as ``massieu.inspection.quantities.QUANTITIES``.
        folder: where to; made if it does not exist.

    Returns:
        The files, in the order in which they were written.
    """
    need_matplotlib()
    import matplotlib

    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    written = []
    for which, table, draw in (("heads", heads, head_map), ("layers", layers, layer_profile)):
        for name in SAVED[which]:
            if name not in table or not _numbers(table, quantities[name]).notna().any():
                continue
            figure = draw(table, quantities[name])
            # Without a date and with a fixed salt the same inspection gives the same bytes.
            with matplotlib.rc_context({"svg.hashsalt": "massieu", "svg.fonttype": "none"}):
                for path, options in (
                    (place / f"{which}_{name}.svg", {"metadata": {"Date": None}}),
                    (place / f"{which}_{name}.png", {"dpi": 160}),
                ):
                    figure.savefig(path, **options)
                    figure.set_layout_engine("none")  # laid out already: saves half of the time
                    written.append(path)
    return written


def _map_axes(sizes: list[tuple[int, int]]) -> tuple[Figure, list[Axes]]:
    """Return a new figure with axes for maps of these numbers of layers and heads."""
    figure = new_figure(1.6 + 0.42 * max(width for _, width in sizes), sum(0.9 + 0.42 * height for height, _ in sizes))
    ratios = {"height_ratios": [height for height, _ in sizes]}
    return figure, list(figure.subplots(len(sizes), squeeze=False, gridspec_kw=ratios)[:, 0])


def _given(ax: Any, stacks: list[str]) -> tuple[Figure, list[Axes]]:
    """Return the axes of the caller and their figure."""
    axes = given_axes(ax, stacks)
    return cast("Figure", axes[0].figure), axes


def _check(table: pandas.DataFrame, quantity: Described, which: str) -> None:
    if quantity.table != which or quantity.name not in table:
        known = ", ".join(name for name in table if not name.endswith("_se"))
        raise UserError(f"quantity must be a column of the {which} table, got {quantity.name}; it has {known}")


def _numbers(table: pandas.DataFrame, quantity: Described) -> pandas.Series:
    """Return a column as floats; classes as their rank."""
    column = table[quantity.name]
    if quantity.scale == "class":
        column = column.map({name: float(rank) for rank, name in enumerate(CLASSES)})
    return _floats(column)


def _floats(column: pandas.Series) -> pandas.Series:
    """Return a column as floats; missing and infinite values as nan."""
    import pandas

    numbers = pandas.to_numeric(column, errors="coerce").astype(float)
    return numbers.where(numbers.abs() < math.inf)


def _scale(quantity: Described, values: list[float], length: float | None) -> tuple[ListedColormap, Normalize]:
    need_matplotlib()
    from matplotlib.colors import BoundaryNorm, LinearSegmentedColormap, ListedColormap, LogNorm, Normalize

    if quantity.scale == "class":
        return ListedColormap(colors.classes()), BoundaryNorm([rank - 0.5 for rank in range(5)], 4)
    shades = colors.diverging() if quantity.scale == "diverging" else colors.sequential()
    smooth = LinearSegmentedColormap.from_list("massieu", shades)
    possible = quantity.least, quantity.most
    low, high = color_limits(values, quantity.scale, *possible, neutral=quantity.neutral, length=length)
    if quantity.scale == "logarithmic" and low > 0:
        return smooth, LogNorm(low, high)  # type: ignore[return-value]
    return smooth, Normalize(low, high)  # type: ignore[return-value]


def _draw_cells(
    axis: Axes, table: pandas.DataFrame, values: pandas.Series, quantity: Described, color_map: Any, norm: Any
) -> None:
    import numpy

    layers = sorted(table["layer"].unique())
    grid = numpy.full((len(layers), int(table["head"].max()) + 1), numpy.nan)
    for layer, head, value in zip(table["layer"], table["head"], values, strict=True):
        grid[layers.index(layer), int(head)] = value
    axis.imshow(grid, cmap=color_map, norm=norm, aspect="auto")
    axis.set_facecolor("#f4f2ec")
    if grid.shape[1] <= 16:
        for (line, head), value in numpy.ndenumerate(grid):
            missing = math.isnan(value)
            text = (
                "–" if missing else CLASSES[int(value)] if quantity.scale == "class" else f"{value:.{quantity.digits}f}"
            )
            ink = INK if missing or _light(color_map(norm(value))) else "white"
            axis.text(head, line, text.replace("-", "−"), ha="center", va="center", fontsize=6.5, color=ink)
    axis.set_xticks(_few(list(range(grid.shape[1]))))
    rows = _few(list(range(len(layers))))
    axis.set_yticks(rows, labels=[str(layers[row]) for row in rows])
    axis.set_xlabel("head", fontsize=8, color=SOFT)
    axis.set_ylabel("layer", fontsize=8, color=SOFT)
    axis.tick_params(length=0, labelsize=8, labelcolor=SOFT)
    for spine in axis.spines.values():
        spine.set_visible(False)
    # White lines between the cells.
    axis.set_xticks([head - 0.5 for head in range(1, grid.shape[1])], minor=True)
    axis.set_yticks([line - 0.5 for line in range(1, len(layers))], minor=True)
    axis.grid(which="minor", color="white", linewidth=1)
    axis.tick_params(which="minor", length=0)


def _few(numbers: list[int]) -> list[int]:
    """Return about sixteen of the numbers, evenly spaced, for ticks."""
    return numbers[:: max(1, math.ceil(len(numbers) / 16))]


def _light(color: tuple[float, float, float, float]) -> bool:
    red, green, blue = (channel**2.2 for channel in color[:3])
    return bool(0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.2)
