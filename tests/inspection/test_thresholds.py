"""Conditions on the tables, as CI would write them."""

import pandas
import pytest

from massieu.inspection.thresholds import crossings, parse_threshold


class Found:
    heads = pandas.DataFrame(
        {
            "stack": ["decoder"] * 2,
            "layer": [0, 0],
            "head": [0, 1],
            "entropy": [0.05, 2.0],
            "sink_mass": [float("nan"), 0.5],
        }
    )
    layers = pandas.DataFrame({"stack": ["decoder"], "layer": [0], "expansion": [1.2]})


@pytest.mark.parametrize(
    ("expression", "number"),
    [
        ("entropy<0.1", 1),
        ("entropy <= 0.05", 1),
        ("entropy<0.05", 0),
        ("entropy>=0.05", 2),
        ("entropy>1e9", 0),
        ("sink_mass>0", 1),
        ("expansion>1.1", 1),
    ],
)
def test_a_condition_names_every_place_where_it_holds(expression, number):
    assert len(crossings(Found, [parse_threshold(expression)])) == number


def test_the_sentence_says_where_and_how_much():
    assert crossings(Found, [parse_threshold("entropy<0.1")]) == ["entropy<0.1: decoder layer 0 head 0 has 0.05"]


@pytest.mark.parametrize(
    "expression", ["", "entropy", "entropy<", "<0.1", "entropy=0.1", "entropy<a", "a b<1", "entropy<<1", "entropy<nan"]
)
def test_what_is_no_condition_is_refused(expression):
    with pytest.raises(ValueError, match="--fail-on must be a column"):
        parse_threshold(expression)


def test_a_column_that_does_not_exist_is_refused_with_those_that_do():
    with pytest.raises(ValueError, match="the column entropi, which no table has; choose one of .*entropy, "):
        parse_threshold("entropi<0.1")
    with pytest.raises(ValueError, match="choose one of entropy, expansion, sink_mass"):
        crossings(Found, [parse_threshold("kurtosis<0.1")])  # a column that this inspection did not measure
