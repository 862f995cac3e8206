"""Flags are raised where a model goes wrong, stay until it is clearly better, and not where nothing is wrong."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import massieu
from massieu.checks import UserError
from massieu.monitor import RULES, Place, Reading, Rule
from massieu.monitor.flags import Flags

WORDS = torch.randint(10, (4, 24), generator=torch.Generator().manual_seed(0))
PLACE = Place("decoder", 1, "blocks.1.attention", heads=3)


def reading(quantity: str, *values: float) -> Reading:
    table = {quantity: torch.tensor([values])} if len(values) > 1 else {}
    return Reading(0, (PLACE,), table, {} if table else {quantity: torch.tensor(values)})


def raised(model: nn.Module, *inputs: torch.Tensor) -> list[tuple[str, int, int | None]]:
    model.train()
    with massieu.watch(model, every=1) as watched:
        model(*inputs)
    return sorted((flag.name, flag.layer, flag.head) for flag in watched.flags)


def small() -> nn.Module:
    torch.manual_seed(0)
    return massieu.nn.Transformer(32, num_layers=2, num_heads=4, vocabulary=10)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_flag_comes_at_its_threshold_and_goes_behind_another(rule):
    flags, between = Flags(), (rule.threshold + rule.back) / 2
    bad = rule.threshold * (0.5 if rule.sign == "<" else 1.01)
    good = rule.back * (1.5 if rule.sign == "<" else 0.5)
    states = []
    for value in (good, between, bad, between, bad, good, between):
        states.append([flag.state for flag in flags.update(reading(rule.quantity, value))])
    assert states == [[], [], ["raised"], [], [], ["cleared"], []]
    assert flags.active == ()


def test_a_value_that_is_not_known_changes_nothing():
    flags = Flags()
    flags.update(reading("score_max", 1.0, 200.0, 1.0))
    assert flags.update(reading("score_max", float("nan"), float("nan"), 1.0)) == ()
    assert [flag.head for flag in flags.active] == [1]


def test_an_infinite_score_is_growth():
    (flag,) = Flags().update(reading("score_max", 1.0, float("inf"), 1.0))
    assert (flag.name, flag.head) == ("logit growth", 1)


def test_one_sharp_head_is_no_collapse_of_its_layer():
    flags = Flags()
    assert flags.update(reading("normalized_entropy", 0.01, 0.5, 0.6)) == ()
    (flag,) = flags.update(reading("normalized_entropy", 0.01, 0.05, 0.6))
    assert (flag.name, flag.head, flag.value) == ("entropy collapse", None, pytest.approx(0.05))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_flag_gives_its_value_threshold_reason_and_reference(rule):
    value = 0.0 if rule.sign == "<" else 1e6
    (flag,) = Flags().update(reading(rule.quantity, value))
    assert (flag.value, flag.threshold, flag.layer) == (value, rule.threshold, 1)
    assert rule.reason in flag.reason
    assert "arXiv" in flag.reference
    assert str(flag).startswith(f"{rule.name} raised in decoder layer 1: ")


def test_a_new_model_raises_nothing():
    assert raised(small(), WORDS) == []


def test_large_query_weights_are_entropy_collapse_and_logit_growth():
    model = small()
    with torch.no_grad():
        model.blocks[1].attention.q_proj.weight *= 3000
    found = raised(model, WORDS)
    assert ("entropy collapse", 1, None) in found
    assert {name for name, *_ in found} == {"entropy collapse", "logit growth"}
    assert all(layer == 1 for _, layer, _ in found)


def test_a_head_that_says_nothing_is_dead():
    model = small()
    with torch.no_grad():
        model.blocks[0].attention.v_proj.weight[8:16] = 0
        if model.blocks[0].attention.v_proj.bias is not None:
            model.blocks[0].attention.v_proj.bias[8:16] = 0
    assert raised(model, WORDS) == [("dead head", 0, 1)]


def test_a_head_with_the_weights_of_another_is_a_duplicate():
    model = small()
    attention = model.blocks[1].attention
    with torch.no_grad():
        for projection in (attention.q_proj, attention.k_proj):
            projection.weight[16:24] = projection.weight[0:8]
            if projection.bias is not None:
                projection.bias[16:24] = projection.bias[0:8]
    assert raised(model, WORDS) == [("duplicate head", 1, 0), ("duplicate head", 1, 2)]


def test_two_heads_that_rest_on_the_first_token_are_no_duplicates():
    torch.manual_seed(0)
    model, tokens = massieu.nn.MeasureAttention(8, num_heads=2, causal=True), torch.randn(4, 20, 8)
    with torch.no_grad():
        tokens[..., 0], tokens[:, 0] = 1.0, 0.0
        tokens[:, 0, :2] = torch.tensor([1.0, 100.0])
        for projection, column in ((model.q_proj, 0), (model.k_proj, 1)):
            projection.weight[0, column] = projection.weight[4, column] = 3.0
    model.train()
    with massieu.watch(model, every=1) as watched:
        model(tokens)
    found = watched.readings[0].heads
    assert bool((found["sink_mass"] > 0.9).all())
    assert "duplicate head" not in {flag.name for flag in watched.flags}


def test_tokens_that_became_the_same_are_rank_collapse():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    with torch.no_grad():
        model.layers[1].linear2.bias[0] = 200.0
    assert raised(model, torch.randn(2, 10, 16)) == [("rank collapse", 1, None)]


def test_tokens_that_share_a_direction_are_no_rank_collapse():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    with torch.no_grad():
        model.layers[1].linear2.bias[0] = 50.0
    model.train()
    with massieu.watch(model, every=1) as watched:
        model(torch.randn(2, 10, 16))
    assert 0.99 < float(watched.readings[0].layers["token_cosine"][1]) < 0.998
    assert watched.flags == ()


def test_rules_can_be_replaced():
    rule = Rule("warm", "entropy", ">", 0.5, 0.4, "it is warm", "nobody")
    model = small()
    with massieu.watch(model, every=1, rules=[rule]) as watched:
        model(WORDS)
    assert {flag.name for flag in watched.flags} == {"warm"}
    assert watched.readings[0].flags == watched.flags


def test_a_rule_that_clears_where_it_raises_is_refused():
    with pytest.raises(UserError, match="back"):
        Rule("growth", "score_max", ">", 100.0, 120.0, "", "")


def test_a_rule_compares_in_one_of_two_directions():
    with pytest.raises(UserError, match="sign"):
        Rule("growth", "score_max", "==", 100.0, 80.0, "", "")


def rule(**changes):
    usual = {"name": "warm", "quantity": "entropy", "sign": ">", "threshold": 0.5, "back": 0.4, "reason": "it is warm"}
    return Rule(**{**usual, "reference": "nobody", **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"quantity": "entropyy"},
        {"quantity": ["entropy"]},
        {"each": "foo"},
        {"threshold": math.nan},
        {"back": math.nan},
        {"threshold": "0.5"},
    ],
)
def test_a_rule_that_could_never_be_raised_is_refused(changes):
    (name,) = changes
    with pytest.raises(UserError, match=f"^{name} must"):
        rule(**changes)


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ([1], "got a list with int"),
        ("none", "got str"),
        (None, "got NoneType"),
        (RULES[0], "got Rule"),
        ([rule(), rule(quantity="peak")], "'warm' twice"),
    ],
)
def test_rules_are_checked_when_the_watch_is_made(rules, words):
    with pytest.raises(UserError, match=f"rules must .*{words}"):
        massieu.watch(small(), rules=rules)


def test_a_rule_for_what_is_not_computed_is_refused():
    with pytest.raises(UserError, match="not computed"):
        massieu.watch(small(), quantities=("peak",), rules=[rule()])


def test_usual_rules_for_what_is_not_computed_are_named():
    with massieu.watch(small(), quantities=("score_max", "entropy")) as watched:
        assert watched.notes == [
            "not flagged, since the quantity is not computed: not finite (broken_rows), entropy collapse"
            " (normalized_entropy), rank collapse (token_cosine), dead head (output_share), duplicate head (likeness)"
        ]
    with massieu.watch(small(), quantities=("score_max",), rules=[]) as watched:
        assert watched.notes == []


@pytest.mark.parametrize(
    ("quantity", "each", "whose"),
    [
        ("peak", "layer", "the median head of layer01 has peak"),
        ("peak", "head", "head 0 of layer01 has peak"),
        ("token_cosine", "layer", "layer01 has token cosine"),
    ],
)
def test_a_reason_says_whose_figure_it_is(quantity, each, whose):
    own = rule(quantity=quantity, each=each)
    values = (0.9,) if quantity == "token_cosine" else (0.9, 0.9, 0.9)
    assert f"it is warm ({whose}" in Flags([own]).update(reading(quantity, *values))[0].reason
