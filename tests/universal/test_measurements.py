"""Errors against the grid and gaps against the vocabulary, and their plots."""

import pytest
import torch

from massieu.checks import UserError
from massieu.universal import (
    GridAccuracy,
    SeparationGap,
    boltz_gap,
    construct,
    contextual_map,
    grid_errors,
    separation_gaps,
    theorem_spacing,
)

pytest.importorskip("matplotlib")
from massieu.figures import grid_error_curve, separation_curve


def smooth(x):
    return torch.sin(3 * x) + x * x.sum(1, keepdim=True)


def test_errors_are_those_of_the_network_and_of_a_piecewise_constant_function():
    (row,) = grid_errors(smooth, [6], 2, points=500, seed=3)
    points = torch.rand(500, 2, 1, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    with torch.no_grad():
        apart = construct(smooth, 6, 2, steps=30, generator=3)(points) - smooth(points)
    constant = smooth(((6 * points).floor() + 0.5) / 6) - smooth(points)
    assert torch.allclose(apart, constant, rtol=0, atol=1e-12)
    assert row == GridAccuracy(6, float(apart.square().mean().sqrt()), float(apart.abs().max()))


def test_gaps_are_shares_of_the_largest_code():
    (row,) = separation_gaps([5], 3, steps=10, seed=2)
    searched = contextual_map(5, 3, duplicates=False, steps=10, generator=2)
    assert row == SeparationGap(5, boltz_gap(5, 3) / (5 * theorem_spacing(3)), searched.gap)
    assert searched.codes[-1] == 1


def test_an_error_curve_has_two_lines_for_each_run_and_the_rate():
    narrow = [GridAccuracy(4, 0.2, 0.6), GridAccuracy(8, 0.1, 0.3), GridAccuracy(16, 0.05, 0.15)]
    axis = grid_error_curve({"narrow": narrow, "wide": [row._replace(largest=1.0) for row in narrow]}).axes[0]
    assert (axis.get_xscale(), axis.get_yscale()) == ("log", "log")
    assert [line.get_label().split(", ")[-1] for line in axis.lines] == ["root mean square", "largest"] * 2 + ["1 / n"]
    assert list(axis.lines[0].get_ydata()) == [0.2, 0.1, 0.05]
    assert list(axis.lines[3].get_ydata()) == [1.0, 1.0, 1.0]
    first, last = axis.lines[4].get_ydata()
    assert first / last == pytest.approx(4)


def test_a_separation_curve_shows_zero_gaps_and_the_resolution():
    rows = [SeparationGap(3, 1e-3, 1e-1), SeparationGap(6, 1e-9, 1e-2), SeparationGap(9, 0.0, 1e-3)]
    axis = separation_curve(rows).axes[0]
    searched, theorem, gone, resolution = axis.lines
    assert list(searched.get_ydata()) == [1e-1, 1e-2, 1e-3]
    assert list(theorem.get_xdata()) == [3, 6]
    assert list(gone.get_xdata()) == [9]
    assert resolution.get_ydata()[0] == pytest.approx(1e3 * torch.finfo(torch.float64).eps)
    assert axis.get_yscale() == "log"
    assert len(separation_curve(rows[:2]).axes[0].lines) == 3


@pytest.mark.parametrize(
    "call",
    [
        lambda: grid_error_curve({}),
        lambda: grid_error_curve({"a": []}),
        lambda: separation_curve([]),
        lambda: grid_errors(smooth, [4], 2, points=0),
        lambda: grid_errors(smooth, [4], 2, dim=0),
    ],
)
def test_bad_input_is_refused(call):
    with pytest.raises(UserError):
        call()
