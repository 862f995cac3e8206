"""Parts of a page: colors, formulas, rulers and changes."""

import itertools
import math

import pytest
from report.sample import inspection

from massieu.plotting import colors as colors
from massieu.plotting.color_limits import color_limits, row_length
from massieu.report import rulers
from massieu.report.changes import ComparedRuns, distinct_names
from massieu.report.formula import typeset


def lightness(color: str) -> float:
    red, green, blue = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (red, green, blue)]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return 116 * luminance ** (1 / 3) - 16  # CIE lightness, another space than the one the colors are computed in


@pytest.mark.parametrize("dark", [False, True])
def test_lightness_moves_in_one_direction_by_equal_steps(dark):
    steps = [after - before for before, after in itertools.pairwise(map(lightness, colors.sequential(dark)))]
    assert all(1.0 < (step if dark else -step) < 3.5 for step in steps)


@pytest.mark.parametrize("dark", [False, True])
def test_both_sides_of_a_diverging_scale_are_equally_far_from_its_middle(dark):
    scale = [lightness(color) for color in colors.diverging(dark)]
    assert scale == pytest.approx(scale[::-1], abs=6)
    assert (min if dark else max)(scale) == scale[len(scale) // 2]


def test_lines_are_different():
    assert len(set(colors.lines())) == len(set(colors.lines(True))) == 8


@pytest.mark.parametrize(
    ("formula", "html"),
    [
        ("e^H", "<i>e</i><sup><i>H</i></sup>"),
        ("p_{i−1}", "<i>p</i><sub><i>i</i>−1</sub>"),
        ("e^{s_j}", "<i>e</i><sup><i>s</i><sub><i>j</i></sub></sup>"),
        ("a ridge map of a_i", "a ridge map of <i>a</i><sub><i>i</i></sub>"),
        ("<b> & x", "&lt;<i>b</i>&gt; &amp; <i>x</i>"),
        ("x_{unclosed", "<i>x</i><sub>unclosed</sub>"),
        ("x_", "<i>x</i>_"),
        ("x_<", "<i>x</i><sub>&lt;</sub>"),
    ],
)
def test_formulas_are_set(formula, html):
    assert typeset(formula) == html


def test_a_ruler_runs_from_the_control_to_the_theory():
    run = inspection(2, 1)
    for row, symmetry in zip(run["layers"], (0.5, 0.75), strict=True):
        row |= {"field_symmetry": symmetry, "field_symmetry_control": 0.5}
    (ruler,) = (ruler for ruler in rulers.rulers(run) if ruler.quantity == "field_symmetry")
    assert [point.share for point in ruler.points] == [0.0, 0.5]
    assert ruler.share == 0.25
    assert rulers.place(0.0) == 20
    assert rulers.place(1.0) == 85
    assert rulers.place(-9.0) < rulers.place(0.0) < rulers.place(9.0) < 100


def test_experiments_give_rulers_of_their_own_and_constructed_heads_do_not():
    run = inspection(1, 1)
    row = {"experiment": "C47", "stack": "encoder", "layer": 0, "head": 0, "control": 0.0, "predicted": 32.0}
    run["experiments"] = [
        {**row, "quantity": "whitened_trace", "value": 8.0},
        {**row, "quantity": "whitened_trace", "value": 32.0, "experiment": "C47 constructed"},
    ]
    (ruler,) = (ruler for ruler in rulers.rulers(run) if ruler.quantity == "whitened_trace")
    assert ruler.points == [(0.25, "layer 0, head 0", 8.0)]
    assert [found["count"] for found in rulers.summary(run)] == [1, 1]


def test_a_figure_without_value_or_control_has_no_ruler():
    run = inspection(1, 1) | {"experiments": []}
    run["layers"][0] |= {"field_symmetry": None, "ascent_control": float("nan")}
    names = {ruler.quantity for ruler in rulers.rulers(run)}
    assert "corollary_r2" in names
    assert not names & {"field_symmetry", "ascent_cosine", "kurtosis", "kurtosis_all_tokens"}


@pytest.mark.parametrize(
    ("values", "options", "ends"),
    [
        (
            [3.44, 3.58],
            {"scale": "sequential", "least": 0.0, "most": "log length", "length": 100.0},
            (0, math.log(100)),
        ),
        ([3.44, 4.8], {"scale": "sequential", "least": 0.0, "most": "log length", "length": 100.0}, (0, 4.8)),
        ([2.0, 3.0], {"scale": "sequential"}, (0, 3)),
        ([-2.0, 3.0, None, math.nan], {"scale": "sequential"}, (-2, 3)),
        ([4.0, 5.0], {"scale": "logarithmic", "least": 1.0, "most": "length", "length": 64.0}, (1, 64)),
        ([4.0, 5.0], {"scale": "logarithmic", "least": 1.0, "most": "length"}, (1, 10)),
        ([4.0, 9.0], {"scale": "logarithmic"}, (6 / math.sqrt(10), 6 * math.sqrt(10))),
        ([1.0, 1000.0], {"scale": "logarithmic"}, (1, 1000)),
        ([0.1, 0.2], {"scale": "diverging", "least": -1.0, "most": 1.0, "neutral": 0.0}, (-1, 1)),
        ([2.0, 5.0], {"scale": "diverging", "neutral": 1.0}, (-3, 5)),
        ([], {"scale": "sequential"}, (0, 1)),
    ],
)
def test_a_scale_ends_where_the_quantity_ends_or_the_values_do(values, options, ends):
    assert color_limits(values, **options) == pytest.approx(ends)


def test_the_length_of_a_row_is_its_column_or_follows_from_the_entropies():
    heads = {"entropy": [math.log(50) / 2, None], "normalized_entropy": [0.5, 0.1]}
    assert row_length(heads) == pytest.approx(50)
    assert row_length(heads | {"class_length": [None, 64.0]}) == 64
    assert row_length({}) is None


def test_a_control_that_does_worse_than_chance_counts_as_chance():
    run = inspection(1, 1)
    run["layers"][0] |= {"corollary_r2": 0.25, "corollary_control": -3.0}
    (ruler,) = (ruler for ruler in rulers.rulers(run) if ruler.quantity == "corollary_r2")
    assert ruler.share == 0.25


def checkpoints():
    return [inspection(3, 4, kind="decoder", seed=3, sharp=sharp) for sharp in (0.4, 1.0, 2.2)]


def test_training_that_sharpens_is_said_to_sharpen():
    found = {title: sentence for title, sentence, _ in ComparedRuns(checkpoints()).sentences}
    assert {"Attention gets sharper", "Query-key weights grow"} <= set(found)
    assert found["Attention gets sharper"].count("→") == 2
    reverse = {title for title, _, _ in ComparedRuns(checkpoints()[::-1]).sentences}
    assert {"Attention gets broader", "Query-key weights shrink"} <= reverse


def test_nothing_changes_between_a_run_and_itself():
    run = inspection(2, 2)
    assert ComparedRuns([run, run]).sentences == []
    assert all(row.change == 0 and row.risen == 0 for row in ComparedRuns([run, run]).changes)


def test_changes_are_the_differences_of_the_means():
    first, last = inspection(1, 2), inspection(1, 2)
    for row, entropy in zip(last["heads"], (1.0, 4.0), strict=True):
        row["entropy"] = entropy
    for row, entropy in zip(first["heads"], (2.0, 3.0), strict=True):
        row["entropy"] = entropy
    first["heads"][0]["entropy_se"] = first["heads"][1]["entropy_se"] = 0.1
    (row,) = (row for row in ComparedRuns([first, last]).changes if row.quantity == "entropy")
    assert (row.means, row.change, row.risen, row.errors[0]) == ([2.5, 2.5], 0.0, 0.5, pytest.approx(0.1))


def test_models_of_different_shape_are_compared_by_their_means_alone():
    rows = ComparedRuns([inspection(2, 2), inspection(3, 2)]).changes
    assert {row.risen for row in rows if row.quantity == "entropy"} == {None}


def test_runs_of_one_model_are_told_apart_by_their_folders():
    def run(name, folder=None):
        return {"facts": {"model": {"name": name}, **({"run": folder} if folder else {})}}

    assert distinct_names([run("a", "x"), run("a", "y")]) == ["a (x)", "a (y)"]
    assert distinct_names([run("a", "x"), run("b", "y")]) == ["a", "b"]
    assert distinct_names([run("a", "x"), run("a", "x")]) == ["a (1)", "a (2)"]
    assert distinct_names([run("a"), run("a")]) == ["a (1)", "a (2)"]


def test_the_article_is_no_variable():
    assert "<i>" not in str(typeset("A head of a Hopfield memory"))
    assert "<i>A</i>" in str(typeset("A_h x"))
