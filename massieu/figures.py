"""Drawing only: tables in, figures out. Matplotlib is loaded when one is drawn; its global state is left alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol, cast

from massieu.report import colours

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.colors import ListedColormap, Normalize
    from matplotlib.figure import Figure

__all__ = [
    "Described",
    "approach",
    "head_map",
    "layer_profile",
    "save_figures",
    "selection_plane",
    "starts_map",
    "trajectory",
]

CLASSES = ("I", "II", "III", "IV")
INK, SOFT, RULE, MARK = "#1d1f24", "#5b5f68", "#e3dfd5", "#b3541e"
SAVED = {
    "heads": ("entropy", "score_variance", "sink_mass", "gradient_cosine"),
    "layers": ("expansion", "effective_rank", "token_cosine", "kurtosis", "fc_linear_r2", "field_symmetry"),
}


class Described(Protocol):
    """What a figure must know of a quantity, as every entry of ``massieu.inspection.quantities.QUANTITIES`` says it."""

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


def head_map(heads: pandas.DataFrame, quantity: Described) -> Figure:
    """A quantity of every head as colours, layers by heads; encoder, decoder and cross-attention apart.

    Args:
        heads: the heads table of an inspection.
        quantity: one of its columns, such as ``QUANTITIES["entropy"]``.

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
        raise ValueError(
            f"the heads table must have a value of {quantity.name}, got none; see the notes of the inspection"
        )
    colour_map, norm = _scale(quantity, [value for value in values if value == value])
    stacks = [(stack, heads[heads["stack"] == stack]) for stack in heads["stack"].unique()]
    sizes = [(table["layer"].nunique(), int(table["head"].max()) + 1) for _, table in stacks]
    figure = _figure(1.6 + 0.42 * max(width for _, width in sizes), sum(0.9 + 0.42 * height for height, _ in sizes))
    axes = figure.subplots(len(stacks), squeeze=False, gridspec_kw={"height_ratios": [height for height, _ in sizes]})[
        :, 0
    ]
    for axis, (stack, table) in zip(axes, stacks, strict=True):
        _draw_cells(axis, table, values.loc[table.index], quantity, colour_map, norm)
        axis.set_title(quantity.title + (f", {stack}" if len(stacks) > 1 else ""), loc="left", fontsize=10, color=INK)
    bar = figure.colorbar(axes[0].images[0], ax=list(axes), fraction=0.04, pad=0.02)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8, color=SOFT, labelcolor=SOFT)
    bar.set_label(quantity.unit, fontsize=8, color=SOFT)
    if quantity.scale == "class":
        bar.set_ticks(range(len(CLASSES)), labels=CLASSES)
    elif hasattr(bar.formatter, "set_useOffset"):
        bar.formatter.set_useOffset(False)  # figures as they are, also where they hardly differ
    return figure


def layer_profile(layers: pandas.DataFrame, quantity: Described) -> Figure:
    """A quantity over the layers, its control dashed, what the theory predicts dotted; one panel for each stack.

    Args:
        layers: the layers table of an inspection.
        quantity: one of its columns, such as ``QUANTITIES["entropy"]``.
    """
    _check(layers, quantity, "layers")
    import pandas

    stacks = list(layers["stack"].unique())
    figure = _figure(1.2 + 3.6 * len(stacks), 2.7)
    for axis, stack in zip(figure.subplots(1, len(stacks), squeeze=False)[0], stacks, strict=True):
        table = layers[layers["stack"] == stack].sort_values("layer")
        x, values = table["layer"], _numbers(table, quantity)
        axis.plot(x, values, marker="o", markersize=3.5, color=colours.lines()[0], label="measured")
        control = quantity.control if quantity.control in table else None
        if control and quantity.name == "kurtosis":
            band = pandas.to_numeric(table[control]).abs()
            axis.fill_between(
                x, -band, band, color=colours.lines()[0], alpha=0.15, linewidth=0, label="Gaussian sample"
            )
        elif control:
            axis.plot(x, pandas.to_numeric(table[control]), "--", color=SOFT, linewidth=1.2, label="control")
        level = quantity.neutral if quantity.predicted is None else quantity.predicted
        if level is not None:
            label = "no change" if quantity.predicted is None else "theory"
            axis.axhline(level, linestyle=":", color=MARK, linewidth=1.2, label=label)
        _finish(axis, quantity.title + (f", {stack}" if len(stacks) > 1 else ""), "layer", quantity.unit)
        axis.set_xticks(_few(list(x)))
        axis.legend(frameon=False, fontsize=8, labelcolor=SOFT)
    return figure


def trajectory(runs: Mapping[str, pandas.DataFrame], quantity: Described) -> Figure:
    """The mean of a quantity over the heads of each layer from run to run, deep layers dark, and the mean of all.

    Args:
        runs: heads tables by name, in order; of checkpoints, the earliest first.
        quantity: a column of the tables.
    """
    if len(runs) < 2:
        raise ValueError(f"a trajectory needs two or more runs, got {len(runs)}; head_map shows a single one")
    for table in runs.values():
        _check(table, quantity, "heads")
    figure = _figure(1.2 + 0.9 * max(len(runs), 4), 3.0)
    axis = figure.subplots()
    means = [
        table.assign(value=_numbers(table, quantity)).groupby(["stack", "layer"])["value"].mean()
        for table in runs.values()
    ]
    places = list(dict.fromkeys(place for mean in means for place in mean.index))
    shades = colours.sequential()[8:]
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
    _finish(axis, quantity.title, "", quantity.unit)
    if len(places) <= 8:
        axis.legend(frameon=False, fontsize=7, labelcolor=SOFT)
    return figure


def selection_plane(tokens: pandas.DataFrame, paths: Mapping[str, pandas.DataFrame], direction: Any) -> Figure:
    """Tokens in the plane, paths of W z in training, the max-margin direction, and the lines that separate.

    Sequences share a query z, so that W z is one vector. The direction is solid; dotted, for each sequence, is the line
    across it half-way between the selected token and its nearest rival. Paths leave the frame where they diverge.

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
    _need(tokens, ("sequence", "x", "y", "selected"), "tokens")
    across, up = (float(number) for number in direction)
    length = math.hypot(across, up)
    if not length > 0:
        raise ValueError(f"direction must be two numbers that are not both zero, got {across} and {up}")
    across, up = across / length, up / length
    reach = 2 * float(tokens[["x", "y"]].abs().max().max())
    figure = _figure(6.4, 4.2)
    axis = figure.subplots()
    axis.plot([0, 2 * reach * across], [0, 2 * reach * up], color=INK, linewidth=1.6, label="max-margin direction")
    for number, (name, path) in enumerate(paths.items()):
        _need(path, ("x", "y"), "paths")
        colour = colours.lines()[number % len(colours.lines())]
        width = 3.2 / (1 + number)  # paths may coincide; the first is the widest
        axis.plot(path["x"], path["y"], color=colour, linewidth=width, marker="o", markersize=3, label=name)
    markers = "osD^vP"
    for number, (name, group) in enumerate(tokens.groupby("sequence")):
        along = group["x"] * across + group["y"] * up
        level = (along[group["selected"]].max() + along[~group["selected"]].max()) / 2
        ends = [(level * across - t * up, level * up + t * across) for t in (-3 * reach, 3 * reach)]
        shade = (INK, "#7d828c", "#b0a998")[number % 3]
        axis.plot(*zip(*ends, strict=True), ":", color=shade, linewidth=1.2)
        for chosen, face in ((True, shade), (False, "white")):
            part = group[group["selected"] == chosen]
            axis.scatter(
                part["x"],
                part["y"],
                s=42,
                marker=markers[number % 6],
                facecolors=face,
                edgecolors=shade,
                zorder=3,
                label=f"sequence {name}" if chosen else None,
            )
    _finish(axis, "W z in training", "", "")
    axis.set(xlim=(-reach, reach), ylim=(-reach, reach), aspect="equal")
    axis.grid(visible=False)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=8)
    return figure


def approach(histories: Mapping[str, pandas.DataFrame], column: str = "misalignment_best") -> Figure:
    """One minus the correlation with the max-margin direction against the step, on logarithmic axes, for several runs.

    Args:
        histories: of training runs, by name.
        column: which misalignment, with the best or with the selected tokens.

    Example:
        >>> import pandas
        >>> history = pandas.DataFrame({"step": [0, 1, 10], "misalignment_best": [1.0, 0.5, 5e-3]})
        >>> approach({"ngd": history}).axes[0].get_xscale()
        'log'
    """
    if not histories:
        raise ValueError("there must be a history to draw, got none")
    figure = _figure(5.0, 3.2)
    axis = figure.subplots()
    ends = []
    for number, (name, history) in enumerate(histories.items()):
        _need(history, ("step", column), "history")
        later = history[(history["step"] > 0) & (history[column] > 0)]
        if len(later) == 0:
            raise ValueError(f"{name} must have a positive {column} after its start, got none; was the data feasible?")
        colour = colours.lines()[number % len(colours.lines())]
        axis.plot(later["step"], later[column], color=colour, linewidth=1.6, label=name)
        ends.append((float(later[column].iloc[-1]), float(later["step"].iloc[-1])))
    least, last = min(ends)
    steps = [last / 100, last]
    axis.plot(steps, [3 * least * (last / step) ** 2 for step in steps], ":", color=MARK, linewidth=1.2, label="1 / k²")
    axis.set(xscale="log", yscale="log")
    _finish(axis, "Distance from the max-margin direction", "step k", "1 − correlation")
    axis.legend(frameon=False, fontsize=8, labelcolor=SOFT)
    return figure


def starts_map(starts: pandas.DataFrame, directions: Mapping[str, Any]) -> Figure:
    """Which selection training reaches from which start in the plane, with the max-margin direction of each.

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
    _need(starts, ("x", "y", "selection", "best", "locally_optimal"), "starts")
    figure = _figure(6.6, 3.9)
    axis = figure.subplots()
    reach = 1.1 * float(starts[["x", "y"]].abs().max().max())
    order = starts["selection"].value_counts(sort=True).index
    for number, name in enumerate(order):
        group = starts[starts["selection"] == name]
        colour = colours.lines()[number % len(colours.lines())]
        kind = "best" if group["best"].all() else "locally optimal" if group["locally_optimal"].all() else "moving"
        label = f"{name}, {kind}: {len(group) / len(starts):.0%} of starts"
        marker = {"best": "o", "locally optimal": "s", "moving": "x"}[kind]
        axis.scatter(group["x"], group["y"], s=16, marker=marker, color=colour, label=label)
        if name in directions:
            across, up = (float(number) for number in directions[name])
            size = 2 * reach / math.hypot(across, up)
            axis.plot([0, size * across], [0, size * up], color=colour, linewidth=1.8)
    _finish(axis, "Selection reached from each start", "", "")
    axis.set(xlim=(-reach, reach), ylim=(-reach, reach), aspect="equal")
    axis.grid(visible=False)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=8)
    return figure


def save_figures(inspection: Mapping[str, Any], folder: str | Path) -> list[Path]:
    """Write the main maps and profiles of an inspection as SVG and PNG.

    Args:
        inspection: the document of ``inspection.json``.
        folder: where to; made if it does not exist.

    Returns:
        The files, in the order in which they were written.
    """
    import matplotlib
    import pandas

    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    written = []
    for which, draw in (("heads", head_map), ("layers", layer_profile)):
        table = pandas.DataFrame.from_records(list(inspection[which]))
        for name in SAVED[which]:
            if name not in table or table[name].isna().all():
                continue
            figure = draw(table, cast(Described, SimpleNamespace(**inspection["quantities"][name])))
            # Without a date and with a fixed salt the same inspection gives the same bytes.
            with matplotlib.rc_context({"svg.hashsalt": "massieu", "svg.fonttype": "none"}):
                for path, options in (
                    (place / f"{which}_{name}.svg", {"metadata": {"Date": None}}),
                    (place / f"{which}_{name}.png", {"dpi": 160}),
                ):
                    figure.savefig(path, **options)
                    figure.set_layout_engine("none")  # it is laid out now, and that takes half of the time
                    written.append(path)
    return written


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def _need(table: pandas.DataFrame, columns: tuple[str, ...], which: str) -> None:
    missing = [name for name in columns if name not in table]
    if missing or len(table) == 0:
        raise ValueError(
            f"{which} must be a table with rows and the columns {', '.join(columns)}; got {len(table)} rows of"
            f" {', '.join(map(str, table)) or 'none'}"
        )


def _check(table: pandas.DataFrame, quantity: Described, which: str) -> None:
    if quantity.table != which or quantity.name not in table:
        known = ", ".join(name for name in table if not name.endswith("_se"))
        raise ValueError(f"quantity must be a column of the {which} table, got {quantity.name}; it has {known}")


def _numbers(table: pandas.DataFrame, quantity: Described) -> pandas.Series:
    """A column as floats; classes by their rank, what is missing as nan."""
    import pandas

    column = table[quantity.name]
    if quantity.scale == "class":
        column = column.map({name: float(rank) for rank, name in enumerate(CLASSES)})
    return pandas.to_numeric(column, errors="coerce").astype(float)


def _scale(quantity: Described, values: list[float]) -> tuple[ListedColormap, Normalize]:
    from matplotlib.colors import BoundaryNorm, LinearSegmentedColormap, ListedColormap, LogNorm, Normalize

    low, high = min(values), max(values)
    if quantity.scale == "class":
        return ListedColormap(colours.classes()), BoundaryNorm([rank - 0.5 for rank in range(5)], 4)
    shades = colours.diverging() if quantity.scale == "diverging" else colours.sequential()
    smooth = LinearSegmentedColormap.from_list("massieu", shades)
    if quantity.scale == "diverging":
        middle = quantity.neutral or 0.0
        reach = max(high - middle, middle - low) or 1.0
        return smooth, Normalize(middle - reach, middle + reach)  # type: ignore[return-value]
    if quantity.scale == "logarithmic" and 0 < low < high:
        return smooth, LogNorm(low, high)  # type: ignore[return-value]
    return smooth, Normalize(low, high if high > low else low + 1.0)  # type: ignore[return-value]


def _draw_cells(
    axis: Axes, table: pandas.DataFrame, values: pandas.Series, quantity: Described, colour_map: Any, norm: Any
) -> None:
    import numpy

    layers = sorted(table["layer"].unique())
    grid = numpy.full((len(layers), int(table["head"].max()) + 1), numpy.nan)
    for layer, head, value in zip(table["layer"], table["head"], values, strict=True):
        grid[layers.index(layer), int(head)] = value
    axis.imshow(grid, cmap=colour_map, norm=norm, aspect="auto")
    axis.set_facecolor("#f4f2ec")
    if grid.shape[1] <= 16:
        for (line, head), value in numpy.ndenumerate(grid):
            missing = math.isnan(value)
            text = (
                "–" if missing else CLASSES[int(value)] if quantity.scale == "class" else f"{value:.{quantity.digits}f}"
            )
            ink = INK if missing or _light(colour_map(norm(value))) else "white"
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


def _finish(axis: Axes, title: str, across: str, up: str) -> None:
    axis.set_title(title, loc="left", fontsize=10, color=INK)
    axis.set_xlabel(across, fontsize=8, color=SOFT)
    axis.set_ylabel(up, fontsize=8, color=SOFT)
    axis.tick_params(labelsize=8, labelcolor=SOFT, color=RULE)
    axis.grid(axis="y", color=RULE, linewidth=0.8)
    axis.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.spines["bottom"].set_color(RULE)


def _few(numbers: list[int]) -> list[int]:
    """At most about sixteen of the numbers, evenly spaced, for ticks."""
    return numbers[:: max(1, math.ceil(len(numbers) / 16))]


def _light(colour: tuple[float, float, float, float]) -> bool:
    red, green, blue = (channel**2.2 for channel in colour[:3])
    return bool(0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.2)
