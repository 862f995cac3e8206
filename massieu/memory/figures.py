"""Figures of memories: landscapes, retrieved images, capacities, and the transition of the overlap."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from massieu.checks import UserError
from massieu.plotting import colors
from massieu.plotting.axes import (
    INK,
    MARK,
    RULE,
    SOFT,
    add_legend,
    finish,
    mark,
    need_matplotlib,
    new_figure,
    share_axes,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import Tensor

    from massieu.memory import CapacityRow, Continuous, Sparse

__all__ = ["capacity_curve", "energy_landscape", "overlap_transition", "retrieved_images"]


def energy_landscape(memory: Continuous | Sparse, *, points: int = 161, margin: float = 0.6) -> Figure:
    """Draw the energy of a memory in the plane as contours, basins as colors, and the certified ball of each pattern.

    Args:
        memory: with patterns of two coordinates.
        points: along each side of the figure.
        margin: around the patterns, as a share of their extent.

    Example:
        >>> axis = energy_landscape(massieu.memory.Continuous(3 * torch.eye(2), beta=2.0), points=11).axes[0]
        >>> len(axis.patches)
        2
    """
    need_matplotlib()
    import torch
    from matplotlib.colors import ListedColormap

    from massieu.memory import certificate

    patterns = memory.patterns.detach().double()
    if patterns.shape[-1] != 2:
        raise UserError(f"memory must have patterns in the plane, got dimension {memory.dim}; project them first")
    low, high = patterns.amin(0), patterns.amax(0)
    reach = margin * max(float((high - low).max()), 1.0)
    across, up = (torch.linspace(float(low[i]) - reach, float(high[i]) + reach, points).double() for i in (0, 1))
    grid = torch.cartesian_prod(across, up)
    with torch.no_grad():
        energy = memory.energy(grid).reshape(points, points).T
        basin = memory.retrieve(grid, steps=1000, tolerance=1e-6).index.reshape(points, points).T
    figure = new_figure(5.0, 4.4)
    axis = figure.subplots()
    _, place = basin.unique(return_inverse=True)
    shades = ListedColormap(colors.lines())
    extent = (float(across[0]), float(across[-1]), float(up[0]), float(up[-1]))
    picture: dict[str, Any] = {"extent": extent, "origin": "lower", "alpha": 0.3, "interpolation": "nearest"}
    axis.imshow((place % shades.N).numpy(), cmap=shades, vmin=-0.5, vmax=shades.N - 0.5, **picture)
    # Dense at low energies: most even levels would lie on the walls.
    levels = energy.min() + (energy.max() - energy.min()) * torch.linspace(0, 1, 20)[1:] ** 2
    axis.contour(across.numpy(), up.numpy(), energy.numpy(), levels=levels.numpy(), colors=SOFT, linewidths=0.6)
    axis.plot(patterns[:, 0].numpy(), patterns[:, 1].numpy(), "o", color=INK, markersize=4, label="pattern")
    _balls(axis, patterns, certificate(memory).radius)
    finish(axis, "Energy, basins and certified balls", "", "")
    axis.grid(False)
    axis.set_aspect("equal")
    add_legend(axis, loc="upper left", bbox_to_anchor=(0, -0.06), ncols=2, borderpad=0)
    return figure


def retrieved_images(before: Tensor, after: Tensor, truth: Tensor, *, width: int | None = None) -> Figure:
    """Draw images as cues, as retrieved, and as stored: three rows, one column for each image.

    Args:
        before: cues, shape ``(images, pixels)``.
        after: retrieved images, the same shape.
        truth: stored images, the same shape.
        width: of an image in pixels; by default they are square.
    """
    if not before.shape == after.shape == truth.shape or before.dim() != 2 or not len(before):
        raise UserError(
            f"before, after and truth must have one shape (images, pixels), got {tuple(before.shape)},"
            f" {tuple(after.shape)} and {tuple(truth.shape)}; take as many of each"
        )
    width = math.isqrt(before.shape[1]) if width is None else width
    if width < 1 or before.shape[1] % width:
        raise UserError(f"width must divide the {before.shape[1]} pixels, got {width}; give that of the images")
    figure = new_figure(0.9 + 0.8 * len(before), 2.8)
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
    """Draw the frequency of a criterion by the number of patterns, with intervals, and the formula as a line.

    Args:
        measured: rows of :func:`massieu.memory.measure_capacity`.
        formula: the value of :func:`massieu.memory.capacity`, or None.
    """
    if not measured:
        raise UserError("measured must have a row, got none; measure_capacity gives one for every number")
    rows = sorted(measured, key=lambda row: row.number)
    numbers, rates = [row.number for row in rows], [row.rate for row in rows]
    figure, axis = share_axes("Capacity", "patterns", "share of draws")
    reach = [[row.rate - row.low for row in rows], [row.high - row.rate for row in rows]]
    axis.errorbar(
        numbers, rates, yerr=reach, marker="o", markersize=3.5, capsize=2, color=colors.lines()[0], label="measured"
    )
    if formula is not None:
        mark(axis, formula, "formula")
    add_legend(axis)
    return figure


def overlap_transition(shares: Sequence[float], overlaps: Mapping[str, Sequence[float]]) -> Figure:
    """Draw the overlap after retrieval by patterns over dimension, with the transition at 0.138.

    Args:
        shares: N / d.
        overlaps: for each name, such as "d = 1000", the mean overlap at every share.
    """
    for name, values in overlaps.items():
        if len(values) != len(shares):
            raise UserError(
                f"overlaps must have {len(shares)} values each, as many as shares, got {len(values)} for {name};"
                " measure every share"
            )
    figure, axis = share_axes("Overlap after retrieval", "patterns / dimension", "overlap")
    for number, (name, values) in enumerate(overlaps.items()):
        shade = colors.lines()[number % len(colors.lines())]
        axis.plot(shares, values, marker="o", markersize=3.5, color=shade, label=name)
    mark(axis, 0.138, "0.138")
    add_legend(axis)
    return figure


def _balls(axis: Axes, centers: Tensor, radii: Tensor) -> None:
    from matplotlib.patches import Circle

    name = "certified: every start inside is retrieved"
    for center, radius in zip(centers.tolist(), radii.reshape(-1).tolist(), strict=True):
        if 0 < radius < math.inf:
            ball = Circle((center[0], center[1]), radius, fill=False, color=MARK, linewidth=1.2, label=name)
            axis.add_patch(ball)
            name = ""
