"""Shared style of all figures: colors, axes, legends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from massieu.checks import UserError, optional_package

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "INK",
    "MARK",
    "RULE",
    "SOFT",
    "add_legend",
    "check_columns",
    "finish",
    "given_axes",
    "mark",
    "need_matplotlib",
    "new_figure",
    "share_axes",
]

INK, SOFT, RULE, MARK = "#1d1f24", "#5b5f68", "#e3dfd5", "#b3541e"


def need_matplotlib() -> None:
    """Raise unless matplotlib is installed."""
    optional_package("matplotlib", "a figure", "inspect")


def new_figure(width: float, height: float) -> Figure:
    need_matplotlib()
    from massieu.plotting.notebook import NotebookFigure

    return NotebookFigure(figsize=(width, height), layout="constrained", facecolor="white")


def given_axes(ax: Any, stacks: Sequence[str]) -> list[Axes]:
    """Return the axes of the caller, one for each stack."""
    need_matplotlib()
    from matplotlib.axes import Axes

    axes = list(getattr(ax, "flat", ax)) if isinstance(ax, Iterable) else [ax]
    if not axes or not all(isinstance(axis, Axes) for axis in axes):
        raise UserError(f"ax must be matplotlib axes, got {type(ax).__name__}; make some with plt.subplots()")
    if len(axes) != len(stacks):
        raise UserError(
            f"ax must be {len(stacks)} axes, one for each of {', '.join(stacks)}, got {len(axes)}; pass a list of them"
        )
    return axes


def finish(axis: Axes, title: str, across: str, up: str) -> None:
    axis.set_title(title, loc="left", fontsize=10, color=INK)
    axis.set_xlabel(across, fontsize=8, color=SOFT)
    axis.set_ylabel(up, fontsize=8, color=SOFT)
    axis.tick_params(labelsize=8, labelcolor=SOFT, color=RULE)
    axis.grid(axis="y", color=RULE, linewidth=0.8)
    axis.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.spines["bottom"].set_color(RULE)


def add_legend(axis: Axes, size: int = 8, **place: Any) -> None:
    axis.legend(frameon=False, fontsize=size, labelcolor=SOFT, **place)


def share_axes(title: str, across: str, up: str) -> tuple[Figure, Axes]:
    """Return a figure with a vertical axis from 0 to 1."""
    figure = new_figure(4.8, 2.9)
    axis = figure.subplots()
    axis.set_ylim(-0.04, 1.04)
    finish(axis, title, across, up)
    return figure, axis


def mark(axis: Axes, place: float, name: str) -> None:
    """Draw a vertical line."""
    axis.axvline(place, linestyle=":", color=INK, linewidth=1.2, label=name)


def check_columns(table: pandas.DataFrame, columns: tuple[str, ...], which: str) -> None:
    missing = [name for name in columns if name not in table]
    if missing or len(table) == 0:
        raise UserError(
            f"{which} must be a table with rows and the columns {', '.join(columns)}; got {len(table)} rows of"
            f" {', '.join(map(str, table)) or 'none'}"
        )
