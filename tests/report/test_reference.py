"""Usual values: their table, the command that writes it, and their section of a page."""

import json

import pandas
import pytest
from report.sample import inspection

import massieu
from benchmarks import reference as command
from massieu import assets
from massieu.inspection.quantities import QUANTITIES
from massieu.report import compare, render
from massieu.report.reference import FILE, reference, usual


def test_the_table_is_small_and_says_what_it_was_made_of():
    found = reference()
    assert FILE.stat().st_size < 40_000
    assert set(found["versions"]) >= {"massieu", "torch", "transformers"}
    assert found["text"]["documents"] > 0
    assert [model["kind"] for model in found["models"]] == ["trained"] * 3 + ["random"] * 3
    for model in found["models"]:
        assert model["tokens"] > 1000
        assert model["row_length"] > 10
        assert {"entropy", "sink_mass", "expansion", "effective_rank", "fc_linear_r2"} <= set(model["values"])
        assert set(model["values"]) <= set(QUANTITIES)
        assert all(low <= median <= high for median, low, high in model["values"].values())


def test_the_table_agrees_with_an_inspection_of_today():
    texts = assets.documents()[: reference()["text"]["documents"]]
    heads = massieu.inspect_model(texts=texts, experiments="heads").heads
    stored = reference()["models"][0]["values"]
    for name in ("entropy", "peak", "sink_mass", "previous_mass"):
        expected = [heads[name].median(), heads[name].min(), heads[name].max()]
        assert stored[name] == pytest.approx(expected, rel=2e-3, abs=1e-5)


def test_a_summary_has_median_and_range_over_heads():
    found = massieu.inspect_model(texts=assets.documents()[:2], experiments="heads")
    summary = command.summary(found)
    median, low, high = summary["values"]["entropy"]
    ordered = sorted(found.heads["entropy"])
    assert (low, high) == pytest.approx((ordered[0], ordered[-1]), rel=1e-3)
    assert median == pytest.approx((ordered[9] + ordered[10]) / 2, rel=1e-3)
    assert not {"rows", "head_class", "expansion"} & set(summary["values"])
    assert summary["tokens"] == found.facts["text"]["counted_tokens"]


def test_the_command_refuses_a_folder_without_a_model(tmp_path, capsys):
    place = tmp_path / "table.json"
    assert command.main(str(tmp_path), place) == 2
    assert "FOLDER must hold SmolLM2" in capsys.readouterr().err
    assert not place.exists()


def test_a_page_shows_usual_values_beside_each_quantity():
    run = inspection(3, 4)
    found = {row.quantity: row for row in usual(run)}
    assert found["entropy"].own.median == pytest.approx(pandas.DataFrame(run["heads"])["entropy"].median())
    page = render(run)
    assert 'id="reference"' in page
    for model in reference()["models"]:
        assert f"<th>{model['name']}<" in page
        median, low, high = model["values"]["entropy"]
        assert f"<td>{median:.3g}<small>{low:.3g} to {high:.3g}</small>" in page
    assert reference()["versions"]["transformers"] in page
    assert 'id="reference"' not in compare([run, run])


@pytest.mark.parametrize(("value", "lies"), [(0.0, "below"), (1e6, "above"), (1.4, "within")])
def test_a_median_outside_of_all_trained_models_is_marked(value, lies):
    run = inspection(2, 2)
    for row in run["layers"]:
        row["mlp_expansion"] = value
    assert {row.quantity: row.lies for row in usual(run)}["mlp_expansion"] == lies


def test_quantities_that_an_inspection_lacks_are_left_out():
    run = inspection(1, 1) | {"layers": []}
    assert {QUANTITIES[row.quantity].table for row in usual(run)} == {"heads"}
    json.dumps([row.own for row in usual(run)])
