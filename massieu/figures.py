"""Drawing only: tables in, figures out. Matplotlib is loaded when one is drawn; its global state is left alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol, cast

from massieu.report import colours

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.colors import ListedColormap, Normalize
    from matplotlib.figure import Figure
    from torch import Tensor

    from massieu.memory import CapacityRow, Continuous, Sparse

__all__ = [
    "Described",
    "capacity_curve",
    "energy_landscape",
    "head_map",
    "layer_profile",
    "overlap_transition",
    "retrieved_images",
    "save_figures",
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
        _legend(axis)
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
        _legend(axis, size=7)
    return figure


def energy_landscape(memory: Continuous | Sparse, *, points: int = 161, margin: float = 0.6) -> Figure:
    """Energy of a memory of the plane as contours, basins as colours, and the certified ball around each pattern.

    Args:
        memory: with patterns of two coordinates.
        points: along each side of the picture.
        margin: how far the picture goes beyond the patterns, as a share of their extent.

    Example:
        >>> axis = energy_landscape(massieu.memory.Continuous(3 * torch.eye(2), beta=2.0), points=11).axes[0]
        >>> len(axis.patches)
        2
    """
    import torch
    from matplotlib.colors import ListedColormap

    from massieu.memory import certificate

    patterns = memory.patterns.detach().double()
    if patterns.shape[-1] != 2:
        raise ValueError(f"memory must have patterns in the plane, got dimension {memory.dim}; project them first")
    low, high = patterns.amin(0), patterns.amax(0)
    reach = margin * max(float((high - low).max()), 1.0)
    across, up = (torch.linspace(float(low[i]) - reach, float(high[i]) + reach, points).double() for i in (0, 1))
    grid = torch.cartesian_prod(across, up)
    with torch.no_grad():
        energy = memory.energy(grid).reshape(points, points).T
        basin = memory.retrieve(grid, steps=1000, tolerance=1e-6).index.reshape(points, points).T
    figure = _figure(5.0, 4.4)
    axis = figure.subplots()
    _, place = basin.unique(return_inverse=True)
    shades = ListedColormap(colours.lines())
    extent = (float(across[0]), float(across[-1]), float(up[0]), float(up[-1]))
    picture: dict[str, Any] = {"extent": extent, "origin": "lower", "alpha": 0.3, "interpolation": "nearest"}
    axis.imshow((place % shades.N).numpy(), cmap=shades, vmin=-0.5, vmax=shades.N - 0.5, **picture)
    # Close together where the energy is low: the walls would take most of them.
    levels = energy.min() + (energy.max() - energy.min()) * torch.linspace(0, 1, 20)[1:] ** 2
    axis.contour(across.numpy(), up.numpy(), energy.numpy(), levels=levels.numpy(), colors=SOFT, linewidths=0.6)
    axis.plot(patterns[:, 0].numpy(), patterns[:, 1].numpy(), "o", color=INK, markersize=4, label="pattern")
    _balls(axis, patterns, certificate(memory).radius)
    _finish(axis, "Energy, basins and certified balls", "", "")
    axis.grid(False)
    axis.set_aspect("equal")
    _legend(axis, loc="upper left", bbox_to_anchor=(0, -0.06), ncols=2, borderpad=0)
    return figure


def retrieved_images(before: Tensor, after: Tensor, truth: Tensor, *, width: int | None = None) -> Figure:
    """Images as cues, as they were retrieved, and as they were stored: three rows, one column for each.

    Args:
        before: cues, shape ``(images, pixels)``.
        after: what was retrieved, the same shape.
        truth: what was stored, the same shape.
        width: of an image in pixels; by default they are square.
    """
    if not before.shape == after.shape == truth.shape or before.dim() != 2 or not len(before):
        raise ValueError(
            f"before, after and truth must have one shape (images, pixels), got {tuple(before.shape)},"
            f" {tuple(after.shape)} and {tuple(truth.shape)}; take as many of each"
        )
    width = math.isqrt(before.shape[1]) if width is None else width
    if width < 1 or before.shape[1] % width:
        raise ValueError(f"width must divide the {before.shape[1]} pixels, got {width}; give that of the images")
    figure = _figure(0.9 + 0.8 * len(before), 2.8)
    axes = figure.subplots(3, len(before), squeeze=False)
    low, high = float(truth.min()), float(truth.max())
    for name, row, images in zip(("cue", "retrieved", "stored"), axes, (before, after, truth), strict=True):
        for axis, image in zip(row, images.detach().cpu(), strict=True):
            axis.imshow(image.reshape(-1, width).numpy(), cmap="Greys", vmin=low, vmax=high)
            axis.set_xticks([])
            axis.set_yticks([])
            for spine in axis.spines.values():
                spine.set_color(RULE)
        row[0].set_ylabel(name, fontsize=8, color=SOFT)
    return figure


def capacity_curve(measured: Sequence[CapacityRow], formula: float | None = None) -> Figure:
    """How often a criterion held by the number of patterns, with its intervals, and the formula as a line.

    Args:
        measured: rows of :func:`massieu.memory.measure_capacity`.
        formula: what :func:`massieu.memory.capacity` says, if anything.
    """
    if not measured:
        raise ValueError("measured must have a row, got none; measure_capacity gives one for every number")
    rows = sorted(measured, key=lambda row: row.number)
    numbers, rates = [row.number for row in rows], [row.rate for row in rows]
    figure, axis = _shares("Capacity", "patterns", "share of draws")
    reach = [[row.rate - row.low for row in rows], [row.high - row.rate for row in rows]]
    axis.errorbar(
        numbers, rates, yerr=reach, marker="o", markersize=3.5, capsize=2, color=colours.lines()[0], label="measured"
    )
    if formula is not None:
        _mark(axis, formula, "formula")
    _legend(axis)
    return figure


def overlap_transition(shares: Sequence[float], overlaps: Mapping[str, Sequence[float]]) -> Figure:
    """Overlap after retrieval against patterns over dimension, with the transition at 0.138.

    Args:
        shares: N / d.
        overlaps: for each name, such as "d = 1000", the mean overlap at every share.
    """
    for name, values in overlaps.items():
        if len(values) != len(shares):
            raise ValueError(
                f"overlaps must have {len(shares)} values each, as many as shares, got {len(values)} for {name};"
                " measure every share"
            )
    figure, axis = _shares("Overlap after retrieval", "patterns / dimension", "overlap")
    for number, (name, values) in enumerate(overlaps.items()):
        shade = colours.lines()[number % len(colours.lines())]
        axis.plot(shares, values, marker="o", markersize=3.5, color=shade, label=name)
    _mark(axis, 0.138, "0.138")
    _legend(axis)
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


def _balls(axis: Axes, centres: Tensor, radii: Tensor) -> None:
    from matplotlib.patches import Circle

    name = "certified: every start inside is retrieved"
    for centre, radius in zip(centres.tolist(), radii.reshape(-1).tolist(), strict=True):
        if 0 < radius < math.inf:
            ball = Circle((centre[0], centre[1]), radius, fill=False, color=MARK, linewidth=1.2, label=name)
            axis.add_patch(ball)
            name = ""


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


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


def _legend(axis: Axes, size: int = 8, **place: Any) -> None:
    axis.legend(frameon=False, fontsize=size, labelcolor=SOFT, **place)


def _shares(title: str, across: str, up: str) -> tuple[Figure, Axes]:
    """A figure of something between 0 and 1."""
    figure = _figure(4.8, 2.9)
    axis = figure.subplots()
    axis.set_ylim(-0.04, 1.04)
    _finish(axis, title, across, up)
    return figure, axis


def _mark(axis: Axes, place: float, name: str) -> None:
    """A vertical line that no series has the colour of."""
    axis.axvline(place, linestyle=":", color=INK, linewidth=1.2, label=name)


def _few(numbers: list[int]) -> list[int]:
    """At most about sixteen of the numbers, evenly spaced, for ticks."""
    return numbers[:: max(1, math.ceil(len(numbers) / 16))]


def _light(colour: tuple[float, float, float, float]) -> bool:
    red, green, blue = (channel**2.2 for channel in colour[:3])
    return bool(0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.2)
