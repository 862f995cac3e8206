"""Plots of patterns."""

import numpy as np
import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("pandas")
from massieu.checks import UserError
from massieu.figures import connection_growth, pattern_reach
from massieu.patterns import causal, dilated, fixed, full, reach_by_layer, star_ring, window


def test_squares_are_dark_for_direct_connections_and_light_for_reach():
    schedules = {"window": window(1), "fixed": fixed(4), "causal": causal(), "dilated": dilated(1, 2)}
    figure = pattern_reach(schedules, length=16, layers=3)
    squares = np.array(figure.axes).reshape(4, 3)
    for row, schedule in zip(squares, schedules.values(), strict=True):
        for layer, (axis, sets) in enumerate(zip(row, reach_by_layer(schedule, 16, 3), strict=True)):
            shown = axis.images[0].get_array()
            own = schedule[layer] if hasattr(schedule, "patterns") else schedule
            assert np.array_equal(shown > 0, sets.unpack())
            assert np.array_equal(shown == 2, own.mask(16).numpy() & sets.unpack())
            assert axis.get_title() == f"{sets.connections / 256:.0%}"
    assert [axis.get_ylabel() for axis in squares[:, -1]] == [
        "all after 15",
        "all after 2",
        "earlier after 1",
        "never all",
    ]
    assert [axis.get_ylabel() for axis in squares[:, 0]] == list(schedules)
    assert [axis.get_xlabel() for axis in squares[-1]] == ["layer 1", "layer 2", "layer 3"]


def test_growth_has_a_line_and_an_exponent_for_each_schedule():
    figure = connection_growth({"full": full(), "fixed": fixed(), "star": star_ring()}, [64, 256, 1024])
    axis = figure.axes[0]
    assert list(axis.lines[1].get_ydata()) == [sum(fixed().connections(length)) for length in (64, 256, 1024)]
    assert (axis.get_xscale(), axis.get_yscale()) == ("log", "log")
    assert [text.get_text() for text in axis.get_legend().get_texts()] == [
        "full: T^2.00",
        "fixed: T^1.49",
        "star: T^1.00",
    ]


def test_nothing_to_draw_is_refused():
    with pytest.raises(UserError):
        pattern_reach({})
    with pytest.raises(UserError):
        connection_growth({"full": full()}, [4])
