"""Changes between inspections: paired head by head, so that opposite changes do not cancel."""

import io
import math
from statistics import fmean, pstdev

import pytest
from report.sample import inspection
from rich.console import Console

import massieu
from massieu import assets
from massieu.inspection.comparison import compare_means, compare_runs
from massieu.models.loading import load
from massieu.report import changes, compare
from massieu.report.changes import ComparedRuns
from massieu.report.terminal import show_comparison


def moved(by, column="entropy", shape=(2, 4)):
    """Return a run and a copy in which a column of the heads is shifted."""
    first, last = inspection(*shape), inspection(*shape)
    for row, amount in zip(last["heads"], by, strict=True):
        row[column] += amount
    return first, last


def change_of(quantity, runs):
    return next(row for row in ComparedRuns(runs).changes if row.quantity == quantity)


def test_opposite_changes_do_not_cancel():
    row = change_of("entropy", moved([1, -1] * 4))
    assert row.change == pytest.approx(0)
    assert row.absolute == pytest.approx(1)
    assert row.risen == 0.5


def test_size_is_the_mean_absolute_change_in_units_of_the_spread():
    first, last = moved([0.5, -0.5] * 4)
    values = [row["entropy"] for row in first["heads"]]
    assert change_of("entropy", [first, last]).size == pytest.approx(0.5 / pstdev(values))


def test_heads_beyond_two_standard_errors_are_counted():
    first, last = moved([0.5, 0.2, -0.5, 0.0, 0, 0, 0, 0])
    for row in (*first["heads"], *last["heads"]):
        row["entropy_se"] = 0.1  # of a difference: the root of 0.02, so that two of them are 0.28
    assert change_of("entropy", [first, last]).beyond == (2, 8)
    assert change_of("qk_norm", [first, last]).beyond is None


def test_opposite_changes_are_told():
    found = {title: sentence for title, sentence, _ in ComparedRuns(moved([1, -1] * 4)).sentences}
    sentence = found["Entropy changes in both directions"]
    assert "changes by 1.00 nats on average" in sentence
    assert "rises in 50\u202f% of the heads" in sentence


def test_a_layer_that_holds_most_of_a_change_is_named():
    runs = moved([0.1, -0.1] * 2 + [1, -1] * 2 + [0.1, 0.1], shape=(5, 2))
    assert change_of("entropy", runs).layer is None  # layers 2 and 3 hold two each of 4.6
    runs = moved([0.1, -0.1] * 2 + [1, -1] + [0.1, -0.1] * 2, shape=(5, 2))
    assert change_of("entropy", runs).layer == "layer 2"
    found = {title: sentence for title, sentence, _ in ComparedRuns(runs).sentences}
    assert (
        "A head changes by 0.28 nats on average, most of it in layer 2; it rises in"
        in found["Entropy changes mostly in layer 2"]
    )
    assert not any("both directions" in title for title in found)
    assert "on average over the heads, most of it in layer 2, " in ComparedRuns(runs).overall


def test_heads_that_do_not_change_do_not_count_as_a_direction():
    titles = {title for title, _, _ in ComparedRuns(moved([1.0, 0, 0, 0] * 2)).sentences}
    assert titles == {"Attention gets broader"}
    titles = {title for title, _, _ in ComparedRuns(moved([-1.0, 0, 0, 0] * 2)).sentences}
    assert titles == {"Attention gets sharper"}


def test_a_layer_that_only_leads_is_not_said_to_hold_most_of_a_change():
    for by in ([1.0, -1.0] * 4, [0.5] * 8):  # two layers with half each
        runs = moved(by)
        assert change_of("entropy", runs).layer is None
        assert "most of it" not in ComparedRuns(runs).overall
    only = moved([1.0, -1.0], shape=(1, 2))
    assert change_of("entropy", only).layer is None
    assert "Entropy changes in both directions" in {title for title, _, _ in ComparedRuns(only).sentences}


def test_a_layer_of_one_among_several_stacks_is_named_with_its_stack():
    first, last = inspection(2, 2, kind="both"), inspection(2, 2, kind="both")
    for row in last["heads"]:
        row["entropy"] += 1.0 * (row["stack"] == "cross" and row["layer"] == 1)
    assert change_of("entropy", (first, last)).layer == "cross layer 1"


def test_a_change_of_layers_names_the_layer_that_holds_most_of_it():
    first, last = inspection(4, 2), inspection(4, 2)
    last["layers"][3]["token_cosine"] += 0.5
    (sentence,) = (
        sentence for _, sentence, quantity in ComparedRuns([first, last]).sentences if quantity == "token_cosine"
    )
    assert "on average, most of it in layer 3;" in sentence


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_no_change_is_divided_by_a_spread_near_zero(value):
    first, last = inspection(2, 2), inspection(2, 2)
    for number, row in enumerate(first["heads"]):
        row |= {"sink_mass": value + 1e-9 * number, "sink_mass_se": 0.0}
    for row in last["heads"]:
        row |= {"sink_mass": value + 0.01, "sink_mass_se": 0.0}
    size = change_of("sink_mass", [first, last]).size
    assert 0 < size <= 2 / changes.LEAST_SPREAD
    assert math.isfinite(size)


def test_a_change_is_not_called_a_multiple_of_a_spread_that_is_not_there():
    first, last = inspection(2, 2), inspection(2, 2)
    for rows, value in ((first["heads"], 0.5), (last["heads"], 0.9)):
        for row in rows:
            row |= {"sink_mass": value, "sink_mass_se": 0.0}
    assert change_of("sink_mass", [first, last]).unit == "a hundredth of the values"
    sentence = ComparedRuns([first, last]).overall
    assert "Mass on the first token: 0.40 on average over the heads, 57.1 times a hundredth of the values" in sentence
    assert "spread" not in sentence
    assert change_of("entropy", [inspection(2, 4), inspection(2, 4, seed=1)]).unit == "the spread among the heads"


def test_a_single_layer_is_compared_in_units_of_its_own_size():
    first, last = inspection(1, 1), inspection(1, 1)
    last["layers"][0]["effective_rank"] = 1.5 * first["layers"][0]["effective_rank"]
    assert math.isfinite(change_of("effective_rank", [first, last]).size)


def test_equal_runs_are_said_to_be_equal_and_others_are_not():
    run = inspection(2, 4)
    assert ComparedRuns([run, run]).sentences == []
    assert ComparedRuns([run, run]).overall == "No value differs between the first and the last run."
    slight = moved([1e-3, -1e-3] * 4)
    assert ComparedRuns(slight).sentences == []
    sentence = ComparedRuns(slight).overall
    assert sentence.startswith("The largest change is that of Entropy: 0.001 nats on average over the heads")
    assert "No quantity" not in compare(slight)
    assert sentence in compare(slight)


def test_models_of_different_shape_have_no_paired_changes():
    row = change_of("entropy", [inspection(2, 2), inspection(3, 2)])
    assert row.absolute is row.risen is row.beyond is None
    assert math.isfinite(row.size)


@pytest.fixture(scope="module")
def rounded():
    """Inspections of the embedded model, and of a copy whose matrices are rounded to two bits."""
    loaded = load(str(assets.MODEL))
    texts = assets.documents()[:12]
    before = massieu.inspect_model(loaded.model, texts, tokenizer=loaded.tokenizer, experiments="heads")
    for name, weight in loaded.model.named_parameters():
        if weight.ndim == 2 and name.startswith("h."):
            step = weight.data.abs().amax(0, keepdim=True)
            weight.data = (weight.data / step).round() * step
    return before, massieu.inspect_model(loaded.model, texts, tokenizer=loaded.tokenizer, experiments="heads")


def test_damage_by_rounding_to_two_bits_is_not_denied(rounded):
    documents = [each.to_dict() for each in rounded]
    first, last = ([row["entropy"] for row in each["heads"]] for each in documents)
    absolute = fmean(abs(a - b) for a, b in zip(first, last, strict=True))
    assert absolute > 0.1 * pstdev(first)  # otherwise there is no damage to deny
    row = change_of("entropy", documents)
    assert row.absolute == pytest.approx(absolute)
    assert "entropy" in {quantity for _, _, quantity in ComparedRuns(documents).sentences}


def test_means_stand_beside_absolute_changes_and_counts_of_heads(rounded):
    table = compare_means(compare_runs(rounded)).set_index("quantity")
    assert (table["absolute_change"] >= table["change"].abs() - 1e-9).all()
    assert 0 < table.loc["entropy", "changed"] <= table.loc["entropy", "compared"] == len(rounded[0].heads)


def test_the_terminal_says_over_what_a_mean_is_taken(rounded):
    console = Console(width=120, record=True, file=io.StringIO())
    show_comparison([each.to_dict() for each in rounded], console)
    text = console.export_text()
    assert "mean over heads of" in text
    assert "mean |change|" in text
    assert "beyond 2 s.e." in text
    assert "does not measure the loss" in text


def test_a_name_in_brackets_is_no_markup():
    console = Console(width=120, record=True, file=io.StringIO())
    show_comparison([inspection(1, 2, name="[red]x[/red]"), inspection(1, 2, name="[/]")], console)
    assert "[red]x[/red]" in console.export_text()
