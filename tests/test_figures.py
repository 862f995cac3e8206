import importlib.util
import io
import math
import re
import sys

import matplotlib.image as plt_image
import pandas
import pytest
import torch
from matplotlib.figure import Figure
from report.sample import inspection

from massieu import cli
from massieu.checks import MissingPackageError, UserError, pip_install
from massieu.figures import (
    approach,
    capacity_curve,
    energy_landscape,
    head_map,
    layer_profile,
    overlap_transition,
    pattern_reach,
    retrieved_images,
    save_figures,
    selection_plane,
    starts_map,
    trajectory,
)
from massieu.figures.inspections import SAVED
from massieu.inspection.quantities import QUANTITIES
from massieu.memory import Continuous, certificate, measure_capacity
from massieu.patterns import star


def tables(*arguments, **options):
    run = inspection(*arguments, **options)
    return pandas.DataFrame(run["heads"]), pandas.DataFrame(run["layers"])


def test_a_map_has_the_values_at_layer_and_head():
    heads, _ = tables(3, 4)
    (image,) = head_map(heads, QUANTITIES["entropy"]).axes[0].images
    for _, row in heads.iterrows():
        assert image.get_array()[row["layer"], row["head"]] == row["entropy"]


@pytest.mark.parametrize(
    ("name", "ends"), [("sink_mass", (0.0, 1.0)), ("gradient_cosine", (-1.0, 1.0)), ("entropy", (0.0, math.log(180)))]
)
def test_the_colors_of_a_map_start_from_what_the_quantity_can_be(name, ends):
    heads, _ = tables(3, 4)
    image = head_map(heads, QUANTITIES[name]).axes[0].images[0]
    assert (image.norm.vmin, image.norm.vmax) == pytest.approx(ends)


def test_a_map_does_not_depend_on_the_order_of_the_rows():
    heads, _ = tables(2, 3)
    first, second = (
        head_map(table, QUANTITIES["entropy"]).axes[0].images[0].get_array() for table in (heads, heads[::-1])
    )
    assert (first == second).all()


@pytest.mark.parametrize("quantity", [name for name, facts in QUANTITIES.items() if facts.table == "heads"])
def test_every_quantity_of_the_heads_can_be_drawn(quantity):
    heads, _ = tables(2, 4)
    assert head_map(heads, QUANTITIES[quantity]).axes[0].get_title(loc="left") == QUANTITIES[quantity].title


def test_stacks_have_their_own_maps_and_profiles():
    heads, layers = tables(2, 3, kind="both")
    titles = [axis.get_title(loc="left") for axis in head_map(heads, QUANTITIES["entropy"]).axes[:3]]
    assert titles == ["Entropy, encoder", "Entropy, decoder", "Entropy, cross"]
    assert len(layer_profile(layers, QUANTITIES["expansion"]).axes) == 2


def test_a_missing_class_is_a_dash():
    heads, _ = tables(2, 3)
    texts = [text.get_text() for text in head_map(heads, QUANTITIES["head_class"]).axes[0].texts]
    assert texts[3:] == ["–"] * 3
    assert set(texts[:3]) <= {"I", "II", "III", "IV"}


@pytest.mark.parametrize(
    ("quantity", "labels"),
    [
        ("expansion", ["measured", "control", "no change"]),
        ("field_symmetry", ["measured", "control", "theory"]),
        ("kurtosis", ["measured", "Gaussian sample", "theory"]),
        ("effective_rank", ["measured"]),
    ],
)
def test_a_profile_shows_control_and_theory(quantity, labels):
    _, layers = tables(3, 2)
    axis = layer_profile(layers, QUANTITIES[quantity]).axes[0]
    assert [text.get_text() for text in axis.get_legend().get_texts()] == labels
    assert list(axis.lines[0].get_ydata()) == list(layers[quantity])


def test_a_profile_without_control_is_drawn():
    _, layers = tables(3, 2)
    axis = layer_profile(layers.drop(columns="expansion_control"), QUANTITIES["expansion"]).axes[0]
    assert [text.get_text() for text in axis.get_legend().get_texts()] == ["measured", "no change"]


def test_a_trajectory_ends_at_the_mean_of_the_last_run():
    runs = {f"step {i}": tables(2, 3, seed=i)[0] for i in range(3)}
    mean = trajectory(runs, QUANTITIES["entropy"]).axes[0].lines[-1]
    assert mean.get_ydata()[-1] == pytest.approx(runs["step 2"]["entropy"].mean())
    assert len(trajectory(runs, QUANTITIES["entropy"]).axes[0].lines) == 3


def test_one_run_is_no_trajectory():
    with pytest.raises(UserError):
        trajectory({"a": tables(1, 1)[0]}, QUANTITIES["entropy"])


def test_a_quantity_of_another_table_is_refused():
    heads, layers = tables(1, 1)
    with pytest.raises(UserError, match="heads"):
        head_map(heads, QUANTITIES["expansion"])
    with pytest.raises(UserError, match="layers"):
        layer_profile(layers.drop(columns="expansion"), QUANTITIES["expansion"])


def test_a_map_without_values_is_refused():
    heads, _ = tables(1, 1)
    with pytest.raises(UserError, match="entropy"):
        head_map(heads.assign(entropy=None), QUANTITIES["entropy"])


def test_files_are_the_same_from_run_to_run(tmp_path):
    first, second = (save_figures(*tables(2, 2), QUANTITIES, tmp_path / name) for name in ("first", "second"))
    assert len(first) == 2 * sum(map(len, SAVED.values()))
    assert [path.name for path in first] == [path.name for path in second]
    assert all(one.read_bytes() == other.read_bytes() for one, other in zip(first, second, strict=True))


def test_tables_that_are_empty_give_no_files(tmp_path):
    assert save_figures(pandas.DataFrame(), pandas.DataFrame(), QUANTITIES, tmp_path) == []


def test_a_landscape_has_the_certified_ball_of_every_pattern_and_basins_around_them():
    memory = Continuous(3 * torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]]).double(), beta=2.0)
    axis = energy_landscape(memory, points=21).axes[0]
    assert [patch.get_radius() for patch in axis.patches] == pytest.approx(certificate(memory).radius.tolist())
    assert len(set(axis.images[0].get_array().ravel().tolist())) == 3
    assert len(axis.get_legend().get_texts()) == 2


def test_a_landscape_is_of_the_plane():
    with pytest.raises(UserError):
        energy_landscape(Continuous(torch.eye(3), beta=1.0))


def test_images_stand_below_their_cues():
    before, after, truth = torch.rand(3, 4, 64, generator=torch.Generator().manual_seed(0))
    axes = retrieved_images(before, after, truth).axes
    assert [axis.get_ylabel() for axis in axes[::4]] == ["cue", "retrieved", "stored"]
    assert torch.equal(torch.as_tensor(axes[5].images[0].get_array().data), after[1].reshape(8, 8))


def test_images_that_do_not_fit_are_refused():
    image = torch.zeros(1, 64)
    with pytest.raises(UserError, match="shape"):
        retrieved_images(image, image, torch.zeros(2, 64))
    with pytest.raises(UserError, match="width"):
        retrieved_images(image, image, image, width=7)


def test_a_capacity_curve_has_rates_intervals_and_the_formula():
    rows = measure_capacity("classical", 32, [8, 2], criterion="most_fixed", trials=20)
    axis = capacity_curve(rows, 4.6).axes[0]
    assert list(axis.lines[0].get_xdata()) == [2, 8]
    assert list(axis.lines[0].get_ydata()) == [rows[1].rate, rows[0].rate]
    (bars,) = axis.collections
    assert bars.get_segments()[1][:, 1].tolist() == pytest.approx([rows[0].low, rows[0].high])
    assert axis.lines[-1].get_xdata()[0] == 4.6
    with pytest.raises(UserError):
        capacity_curve([])


def test_a_transition_is_marked_at_its_share():
    axis = overlap_transition([0.1, 0.2], {"d = 100": [0.99, 0.4]}).axes[0]
    assert list(axis.lines[0].get_ydata()) == [0.99, 0.4]
    assert axis.lines[-1].get_xdata()[0] == 0.138
    with pytest.raises(UserError):
        overlap_transition([0.1, 0.2], {"d = 9": [1.0]})


def plane():
    tokens = pandas.DataFrame(
        {
            "sequence": [0, 0, 1, 1],
            "x": [1.0, -0.5, 0.8, 0.0],
            "y": [0.2, 0.4, -0.3, -1.0],
            "selected": [True, False, True, False],
        }
    )
    return tokens, {"gd": pandas.DataFrame({"x": [0.0, 1.0, 9.0], "y": [0.0, 0.5, 2.0]})}


def test_separating_lines_are_across_the_direction_between_selected_and_nearest_rival():
    tokens, paths = plane()
    axis = selection_plane(tokens, paths, (2.0, 0.0)).axes[0]
    lines = [line for line in axis.lines if line.get_linestyle() == ":"]
    assert [list(line.get_xdata()) for line in lines] == [[0.25, 0.25], [0.4, 0.4]]
    assert list(axis.lines[0].get_ydata()) == [0.0, 0.0]
    assert list(axis.lines[1].get_xdata()) == [0.0, 1.0, 9.0]
    assert axis.get_xlim()[1] < 9  # where paths diverge, they leave the frame


def test_a_plane_needs_a_direction_and_its_columns():
    tokens, paths = plane()
    with pytest.raises(UserError, match="direction"):
        selection_plane(tokens, paths, (0.0, 0.0))
    with pytest.raises(UserError, match="tokens"):
        selection_plane(tokens.drop(columns="y"), paths, (1.0, 0.0))


def test_an_approach_has_logarithmic_axes_and_a_line_for_each_run_and_the_rate():
    history = pandas.DataFrame({"step": [0, 1, 10, 100], "misalignment_best": [float("nan"), 0.5, 0.1, 1e-3]})
    axis = approach({"ngd": history, "gd": history.assign(misalignment_best=[1.0, 0.5, 0.4, 0.3])}).axes[0]
    assert (axis.get_xscale(), axis.get_yscale()) == ("log", "log")
    assert [line.get_label() for line in axis.lines] == ["ngd", "gd", "1 / k²"]
    assert list(axis.lines[0].get_xdata()) == [1, 10, 100]
    first, last = axis.lines[2].get_ydata()
    assert first / last == pytest.approx(1e4)


def test_an_approach_without_histories_or_values_is_refused():
    with pytest.raises(UserError):
        approach({})
    history = pandas.DataFrame({"step": [0, 1], "misalignment_best": [1.0, float("nan")]})
    with pytest.raises(UserError, match="misalignment"):
        approach({"gd": history})


def test_starts_are_drawn_by_the_selection_they_reach():
    starts = pandas.DataFrame({"x": [1.0, 2.0, -1.0, 0.0], "y": [0.0, 1.0, 0.0, -2.0], "selection": list("aabc")})
    starts["best"], starts["locally_optimal"] = starts.selection == "a", starts.selection != "c"
    figure = starts_map(starts, {"a": (1.0, 1.0), "b": (-3.0, 0.0)})
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["a, best: 50% of starts", "b, locally optimal: 25% of starts", "c, moving: 25% of starts"]
    axis = figure.axes[0]
    assert [len(points.get_offsets()) for points in axis.collections] == [2, 1, 1]
    assert [line.get_xdata()[1] > 0 for line in axis.lines] == [True, False]


@pytest.fixture
def no_matplotlib(monkeypatch):
    """Hide matplotlib; return the command that installs it."""
    usual = importlib.util.find_spec
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else usual(name))
    return pip_install("inspect")


@pytest.mark.parametrize(
    "draw",
    [
        lambda folder: head_map(tables(2, 2)[0], QUANTITIES["entropy"]),
        lambda folder: layer_profile(tables(2, 2)[1], QUANTITIES["expansion"]),
        lambda folder: save_figures(*tables(2, 2), QUANTITIES, folder / "figures"),
        lambda folder: pattern_reach({"star": star()}, length=8, layers=2),
        lambda folder: energy_landscape(Continuous(3 * torch.eye(2), beta=2.0), points=5),
    ],
)
def test_without_matplotlib_one_sentence_names_the_extra_that_brings_it(draw, no_matplotlib, tmp_path):
    with pytest.raises(MissingPackageError, match=re.escape(no_matplotlib)):
        draw(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_a_report_is_refused_before_anything_is_computed(no_matplotlib, tmp_path, capsys):
    assert cli.main(["inspect", "--heads-only", "--limit", "2", "--out", str(tmp_path / "report")]) == 2
    assert capsys.readouterr().err == f"massieu: this command needs matplotlib, not installed; {no_matplotlib}\n"


def shown(figure):
    """Return the size in pixels of a figure in a notebook without a backend."""
    data = figure._repr_png_()
    assert data.startswith(b"\x89PNG\r\n")
    height, width, _ = plt_image.imread(io.BytesIO(data), format="png").shape
    return width, height


def test_a_figure_shows_itself_in_a_notebook():
    heads, layers = tables(2, 3)
    for figure in (head_map(heads, QUANTITIES["entropy"]), layer_profile(layers, QUANTITIES["expansion"])):
        width, height = shown(figure)
        assert width > 100
        assert height > 100
        assert figure.figure is figure
    assert shown(capacity_curve(measure_capacity("classical", 8, [1, 2], criterion="most_fixed", trials=3)))


def test_figures_are_drawn_into_given_axes():
    heads, layers = tables(2, 3)
    whole = Figure()
    left, right = whole.subplots(1, 2)
    assert head_map(heads, QUANTITIES["entropy"], ax=left) is whole
    assert layer_profile(layers, QUANTITIES["expansion"], ax=right) is whole
    assert left.get_title(loc="left") == QUANTITIES["entropy"].title
    assert left.images[0].get_array().shape == (2, 3)
    assert right.get_title(loc="left") == QUANTITIES["expansion"].title
    assert right.lines


def test_as_many_axes_are_needed_as_there_are_stacks():
    heads, layers = tables(2, 3, kind="both")
    axes = Figure().subplots(3)
    head_map(heads, QUANTITIES["entropy"], ax=axes)
    assert [axis.get_title(loc="left") for axis in axes] == ["Entropy, encoder", "Entropy, decoder", "Entropy, cross"]
    with pytest.raises(UserError, match="3 axes"):
        head_map(heads, QUANTITIES["entropy"], ax=axes[0])
    with pytest.raises(UserError, match="str"):
        layer_profile(layers, QUANTITIES["expansion"], ax="here")
