import math

import numpy as np
import pandas
import pytest
from report.sample import inspection

from massieu.inspection.findings import Finding, findings
from massieu.inspection.quantities import QUANTITIES

FACTS = {"model": {"head_width": 32}}


def heads(stack="decoder", **columns):
    count = len(next(iter(columns.values())))
    places = {"stack": stack, "layer": [i // 2 for i in range(count)], "head": [i % 2 for i in range(count)]}
    return pandas.DataFrame({**places, **columns})


def layers(stack="decoder", **columns):
    count = len(next(iter(columns.values())))
    return pandas.DataFrame({"stack": stack, "layer": range(count), **columns})


def titled(title, *arguments) -> Finding | None:
    return next((found for found in findings(*arguments) if found.title == title), None)


def test_sharp_heads_are_counted_and_the_sharpest_is_named():
    table = heads(perplexity=[1.2, 9.0, 1.9, 40.0], entropy=[0.15, 2.1, 0.6, 3.6], entropy_se=[0.01, 0.1, 0.1, 0.1])
    found = titled("Sharp heads", table, None, FACTS)
    assert found.sentence == (
        "2 of 4 heads effectively read fewer than two tokens; the sharpest, head 0 of layer 0, has an entropy of"
        " 0.15 ± 0.01 nats (1.2 tokens)."
    )
    assert found.where == (("decoder", 0, 0), ("decoder", 1, 0))


def test_an_entropy_that_two_decimals_cannot_show_is_not_zero():
    table = heads(perplexity=[1.0, 9.0], entropy=[0.0042, 2.1])
    assert "entropy of 0.004 nats" in titled("A sharp head", table, None, FACTS).sentence


def test_broad_heads_are_not_called_sharp():
    table = heads(perplexity=[5.0, 9.0], entropy=[1.6, 2.1])
    assert titled("Sharp heads", table, None, FACTS) is titled("A sharp head", table, None, FACTS) is None
    assert "No head is sharp: the sharpest, head 0 of layer 0" in titled("Broad attention", table, None, FACTS).sentence


def test_sinks_need_more_than_three_tenths_of_the_mass():
    found = titled("Attention sinks", heads(sink_mass=[0.1, 0.81, 0.35, 0.3]), None, FACTS)
    assert found.sentence == (
        "2 of 4 heads put more than 30\u202f% of the attention on the first token; the strongest, head 1 of layer 0, puts"
        " 81\u202f% there."
    )
    assert titled("Attention sinks", heads(sink_mass=[0.1, 0.3]), None, FACTS) is None


@pytest.mark.parametrize(
    ("column", "title", "words"),
    [
        ("previous_mass", "Heads that look one token back", "to the token before"),
        ("next_mass", "Heads that look one token ahead", "to the next token"),
        ("self_mass", "Heads that look at themselves", "to the token itself"),
    ],
)
def test_local_heads_are_named(column, title, words):
    found = titled(title, heads(**{column: [0.1, 0.7, 0.5, 0.2]}), None, FACTS)
    assert (
        found.sentence
        == f"Head 1 of layer 0 gives 70\u202f% of its attention {words}, and 1 more gives it over 40\u202f%."
    )
    assert titled(title, heads(**{column: [0.1, 0.2]}), None, FACTS) is None


def test_collapse_needs_rising_similarity_and_falling_rank():
    table = heads(entropy=[1.0])
    both = layers(token_cosine=[0.1, 0.3, 0.6], effective_rank=[90.0, 70.0, 40.0])
    assert titled("Tokens grow alike", table, both, FACTS).sentence == (
        "From the first to the last layer the mean similarity of two tokens rises from 0.10 to 0.60 and the effective rank of"
        " the tokens falls from 90 to 40."
    )
    for steady in (
        layers(token_cosine=[0.1, 0.15], effective_rank=[90.0, 40.0]),
        layers(token_cosine=[0.1, 0.6], effective_rank=[90.0, 95.0]),
        layers(token_cosine=[0.6], effective_rank=[40.0]),
    ):
        assert titled("Tokens grow alike", table, steady, FACTS) is None


def test_only_expansion_beyond_the_control_counts():
    table = heads(entropy=[1.0])
    found = titled(
        "Expanding layers", table, layers(expansion=[1.1, 1.3, 1.2], expansion_control=[1.2, 1.1, 1.1]), FACTS
    )
    assert "in layers 1 and 2, most in layer 1: distances grow by a factor of 1.300 against 1.100." in found.sentence
    below = layers(expansion=[1.1, 1.3], expansion_control=[1.2, 1.3])
    assert titled("Expanding layers", table, below, FACTS) is None
    assert (
        "the nearest is layer 1: distances grow by a factor of 1.300 against 1.300."
        in titled("No expansion beyond the control", table, below, FACTS).sentence
    )


def test_nearly_linear_layers_are_counted():
    table = heads(entropy=[1.0])
    found = titled("Nearly linear MLPs", table, layers(fc_linear_r2=[0.5, 0.9], fc_linear_control=[0.0, 0.01]), FACTS)
    assert found.sentence == (
        "In 1 of 2 layers a single matrix explains more than 80\u202f% of the MLP on unseen tokens, most in layer 1 with an R²"
        " of 0.90 (shuffled control 0.01)."
    )
    assert titled("Nearly linear MLPs", table, layers(fc_linear_r2=[0.5, 0.7]), FACTS) is None


@pytest.mark.parametrize(
    ("symmetry", "words"),
    [
        (0.97, "nearly a gradient (median symmetry 0.97, control 0.50, theory 1)"),
        (0.75, "part of the way to a gradient"),
        (0.52, "hardly nearer to a gradient than its control"),
    ],
)
def test_the_gradient_field_is_judged_between_its_control_and_one(symmetry, words):
    table = layers(field_symmetry=[symmetry] * 3, field_symmetry_control=[0.5] * 3)
    assert words in titled("What the theory predicts", heads(entropy=[1.0]), table, FACTS).sentence


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"ascent_cosine": [0.9, 0.9], "ascent_control": [0.0, 0.0]}, "Its updates climb the log normaliser"),
        ({"ascent_cosine": [0.1, 0.1], "ascent_control": [0.09, 0.1]}, "Its updates do not climb the log normaliser"),
        (
            {"kurtosis": [0.5, 0.01], "kurtosis_band": [0.1, 0.1]},
            "outside the band of a Gaussian cloud in 1 of 2 layers",
        ),
        ({"kurtosis": [0.05, -0.01], "kurtosis_band": [0.1, 0.1]}, "cannot be told from a Gaussian cloud"),
    ],
)
def test_other_claims_of_the_theory_are_judged(columns, words):
    assert words in titled("What the theory predicts", heads(entropy=[1.0]), layers(**columns), FACTS).sentence


@pytest.mark.parametrize(("trace", "words"), [(31.0, "are as inverse"), (11.0, "are not as inverse")])
def test_the_whitened_trace_is_compared_with_the_width_of_a_head(trace, words):
    found = titled("What the theory predicts", heads(whitened_trace=[trace] * 2), None, FACTS)
    assert words in found.sentence
    assert f"(whitened trace {trace:.2f}, theory 32)" in found.sentence
    assert titled("What the theory predicts", heads(whitened_trace=[trace] * 2), None, {}) is None


def test_stacks_are_told_apart():
    table = pandas.concat(
        [heads("encoder", sink_mass=[0.1, 0.1]), heads("cross", sink_mass=[0.1, 0.9])], ignore_index=True
    )
    found = titled("Attention sinks", table, None, FACTS)
    assert "head 1 of cross-attention layer 0" in found.sentence
    assert found.where == (("cross", 0, 1),)


@pytest.mark.parametrize("kind", ["encoder", "decoder", "both"])
@pytest.mark.parametrize("shape", [(1, 1), (6, 12)])
def test_three_to_five_sentences_end_with_the_theory(kind, shape):
    document = inspection(*shape, kind=kind)
    found = findings(pandas.DataFrame(document["heads"]), pandas.DataFrame(document["layers"]), document["facts"])
    assert 3 <= len(found) <= 5
    assert found[-1].title == "What the theory predicts"
    assert all(each.sentence[0].isupper() or each.sentence[0].isdigit() for each in found)
    assert all(each.sentence.endswith(".") and "nan" not in each.sentence for each in found)
    assert all(each.quantity in QUANTITIES for each in found)


def test_nothing_is_said_about_what_was_not_measured():
    document = inspection(2, 2)
    table, blocks = pandas.DataFrame(document["heads"]), pandas.DataFrame(document["layers"])
    for column in set(table) - {"stack", "layer", "head", "name"}:
        table[column] = math.nan
    for column in set(blocks) - {"stack", "layer", "name"}:
        blocks[column] = None
    assert findings(table, blocks, document["facts"]) == []
    assert findings(table[["stack", "layer", "head"]], None, {}) == []
    assert findings(pandas.DataFrame(), pandas.DataFrame(), {}) == []


def test_rows_without_a_value_are_left_out():
    table = heads(sink_mass=[np.nan, 0.9, np.inf, 0.1])
    assert titled("Attention sinks", table, None, FACTS).sentence.startswith("1 of 2 heads puts more than")


def test_an_expansion_within_its_error_is_not_clear():
    columns = {"expansion": [1.30], "expansion_control": [1.20], "expansion_control_se": [0.01]}
    assert titled("Expanding layers", heads(entropy=[1.0]), layers(**columns, expansion_se=[0.02]), FACTS) is not None
    assert titled("Expanding layers", heads(entropy=[1.0]), layers(**columns, expansion_se=[0.06]), FACTS) is None


def test_layers_of_one_temperature_are_not_compared():
    assert titled("Cold and warm layers", heads(entropy=[2.83, 2.83, 2.84, 2.83]), None, FACTS) is None
    assert titled("Cold and warm layers", heads(entropy=[2.83, 2.83, 3.84, 2.83]), None, FACTS) is not None


def test_layers_that_differ_are_not_hidden_behind_their_median():
    table = layers(field_symmetry=[0.9, 0.51, 0.5], field_symmetry_control=[0.5] * 3)
    sentence = titled("What the theory predicts", heads(entropy=[1.0]), table, FACTS).sentence
    assert "(median symmetry 0.51, from 0.50 to 0.90, control 0.50, theory 1)" in sentence
