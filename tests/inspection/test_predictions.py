"""Predictions of the theory beside their controls, with verdicts that a short text cannot give."""

import dataclasses
import io

import pandas
import pytest
from report.sample import inspection
from rich.console import Console

from massieu.inspection.predictions import TOKENS_PER_DIMENSION, predictions
from massieu.report import render
from massieu.report.terminal import show_inspection

FACTS = {"model": {"head_width": 32, "hidden": 384}}


def layers(**columns):
    count = len(next(iter(columns.values())))
    return pandas.DataFrame({"stack": "decoder", "layer": range(count), **columns})


def heads(**columns):
    count = len(next(iter(columns.values())))
    return pandas.DataFrame({"stack": "decoder", "layer": 0, "head": range(count), **columns})


def only(*tables, facts=FACTS):
    (found,) = predictions(*tables, facts)
    return found


@pytest.mark.parametrize(("symmetry", "verdict"), [(0.97, "holds"), (0.75, "partly"), (0.52, "fails")])
def test_the_gradient_field_is_judged_between_its_control_and_one(symmetry, verdict):
    found = only(heads(entropy=[1.0]), layers(field_symmetry=[symmetry] * 3, field_symmetry_control=[0.5] * 3))
    assert (found.quantity, found.verdict, found.measured, found.control) == ("field_symmetry", verdict, symmetry, 0.5)


def test_layers_that_differ_are_not_hidden_behind_their_median():
    found = only(heads(entropy=[1.0]), layers(field_symmetry=[0.95, 0.51, 0.5], field_symmetry_control=[0.5] * 3))
    assert (found.lowest, found.highest, found.verdict) == (0.5, 0.95, "fails")
    assert found.sentence == "holds in layer 0"


def test_a_control_below_chance_does_not_help():
    found = only(heads(entropy=[1.0]), layers(corollary_r2=[0.1, 0.1], corollary_control=[-9.0, -9.0]))
    assert found.verdict == "fails"


@pytest.mark.parametrize(("trace", "verdict"), [(31.0, "holds"), (11.0, "partly"), (-40.0, "fails"), (90.0, "fails")])
def test_the_whitened_trace_is_compared_with_the_width_of_a_head(trace, verdict):
    found = only(heads(whitened_trace=[trace] * 2), None)
    assert (found.verdict, found.predicted) == (verdict, 32)
    assert predictions(heads(whitened_trace=[trace] * 2), None, {}) == []


@pytest.mark.parametrize(
    ("kurtosis", "verdict", "where"),
    [
        ([0.05, -0.01, 0.0], "holds", "no layer"),
        ([0.5, 0.01, 0.0], "partly", "layer 0"),
        ([0.5] * 3, "fails", "every layer"),
    ],
)
def test_a_cloud_is_gaussian_where_its_kurtosis_stays_inside_the_band(kurtosis, verdict, where):
    table = layers(kurtosis=kurtosis, kurtosis_band=[0.1] * 3, tokens=[384 * TOKENS_PER_DIMENSION] * 3)
    found = only(heads(entropy=[1.0]), table)
    assert found.verdict == verdict
    assert found.sentence == f"outside the band of a Gaussian sample in {where}"


@pytest.mark.parametrize("tokens", [62, 273, 384 * TOKENS_PER_DIMENSION - 1])
def test_few_tokens_give_no_verdict_on_a_gaussian_cloud(tokens):
    table = layers(kurtosis=[0.0], kurtosis_band=[0.1], tokens=[tokens])
    found = only(heads(entropy=[1.0]), table)
    assert found.verdict == "undecided"
    assert found.measured is None
    assert found.sentence.endswith(f"per dimension, {TOKENS_PER_DIMENSION} are needed")


def test_few_tokens_give_no_verdict_on_inverse_covariances():
    measured, enough = heads(whitened_trace=[0.1]), 384 * TOKENS_PER_DIMENSION
    assert only(measured, layers(tokens=[enough])).verdict == "fails"
    found = only(measured, layers(tokens=[enough - 1]))
    assert (found.verdict, found.measured, found.predicted) == ("undecided", None, 32)


def test_different_models_get_different_tables():
    first = predictions(heads(entropy=[1.0]), layers(ascent_cosine=[0.9, 0.9], ascent_control=[0.0, 0.0]), FACTS)
    second = predictions(heads(entropy=[1.0]), layers(ascent_cosine=[0.9, 0.1], ascent_control=[0.0, 0.0]), FACTS)
    assert [each.sentence for each in first] != [each.sentence for each in second]


def judged():
    """The document of an inspection in which the theory fails beside a control that does worse than chance."""
    found = only(heads(entropy=[1.0]), layers(corollary_r2=[0.1, 0.1], corollary_control=[-9.0, -9.0]))
    return inspection(2, 2) | {"predictions": [dataclasses.asdict(found)]}


def shown(document):
    console = Console(width=400, record=True, file=io.StringIO())
    show_inspection(document, console)
    return console.export_text()


@pytest.mark.parametrize("view", [shown, lambda document: render(document).split('id="theory"')[1].split("<h3>")[1]])
def test_a_prediction_that_fails_is_said_to_be_no_fault_of_the_model(view):
    text = view(judged())
    assert "“fails” describes the theory on this model and is no fault of the model." in text
    assert "A control that does worse than chance counts as chance." in text


def test_nothing_is_said_about_verdicts_where_there_are_none():
    assert "fails" not in shown(inspection(2, 2) | {"predictions": []})


@pytest.mark.parametrize(
    ("number", "words"), [(1, ", 1 document, "), (2, ", 2 documents, "), (1200, ", 1,200 documents, ")]
)
def test_documents_are_counted_in_the_singular_and_in_the_plural(number, words):
    document = inspection(2, 2)
    document["facts"]["text"]["documents"] = number
    assert words in shown(document | {"predictions": []})
