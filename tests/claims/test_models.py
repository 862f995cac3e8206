"""The claims about trained models: expected on the embedded one, other on a model that fulfills the theory."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from massieu.claims import Verdict, examine, select
from massieu.claims.models import feed_forward, states
from massieu.claims.models import trained as models
from massieu.claims.sources import OURS, PAPER

# What is wrong: a function and the factor on its numbers.
BREAKS = [
    (feed_forward, "held_out_r2", 0.8, ["C44"]),
    (models, "projection_kurtosis", 30.0, ["C46", "X5"]),
    (models, "synthetic", None, ["X1", "X3", "X6"]),  # free heads in the place of tied ones
    (nn.functional, "layer_norm", None, ["C22"]),  # without the mean taken away
]
# A table and a column of an inspection, and the factor on it.
COLUMNS = [
    ("experiments", "value", 9.0, ["C47"]),
    ("layers", "corollary_r2", 0.9, ["X7"]),
    ("layers", "fc_linear_r2", 2.0, ["C44"]),
    ("layers", "kurtosis", 0.1, ["X5"]),
]
WRONG = {
    "synthetic": lambda seed, attention: FREE(seed, "free"),
    "layer_norm": lambda x, *_, **__: x / x.square().mean(-1, keepdim=True).sqrt(),
}
FREE = models.synthetic

KEYS = ["C22", "C44", "C46", "C47", "X1", "X3", "X5", "X6", "X7"]
OWN = {"C44", "C46", "C47", "X5", "X7"}  # The paper asks, suggests or assumes; the statements are ours.


@pytest.fixture(scope="module")
def results():
    return {claim.key: examine(claim) for claim in select(KEYS)}


@pytest.mark.parametrize("key", KEYS)
def test_the_verdict_on_the_embedded_model_is_the_expected_one(key, results):
    found = results[key]
    assert found.claim.on_model
    assert found.verdict is found.claim.expected, (found.reason, found.evidence)


def test_a_wish_of_the_paper_is_not_quoted_as_a_statement_of_it():
    assert {claim.key: claim.source for claim in select(KEYS)} == {key: OURS if key in OWN else PAPER for key in KEYS}


@pytest.mark.parametrize("claim", select(KEYS), ids=KEYS)
def test_a_control_that_is_the_real_case_leaves_the_claim_undecided(claim):
    found = examine(claim, harmless=True)
    assert found.verdict is Verdict.UNDECIDED
    assert "the control did not break" in found.reason


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("key", ["C22", "C46", "X1", "X3", "X5", "X6"])
def test_other_seeds_of_the_synthetic_cases_change_nothing(key, seed):
    (claim,) = select([key])
    assert examine(claim, seed=seed).verdict is claim.expected


def test_every_claim_is_broken_by_wrong_code():
    assert {key for *_, keys in [*BREAKS, *COLUMNS] for key in keys} == set(KEYS)


@pytest.mark.parametrize(("owner", "name", "factor", "keys"), BREAKS)
def test_code_that_is_wrong_changes_the_verdict(owner, name, factor, keys, unmoved, monkeypatch):
    models.inspection(None)  # read by the right code
    if factor is None:
        monkeypatch.setattr(owner, name, WRONG[name])
    assert unmoved(owner, name, factor or 1.0, keys) == []


@pytest.mark.parametrize(("table", "column", "factor", "keys"), COLUMNS)
def test_numbers_of_an_inspection_that_are_wrong_change_the_verdict(table, column, factor, keys, monkeypatch):
    own = models.inspection(None)
    rows = getattr(own, table)
    wrong = replace(own, **{table: rows.assign(**{column: factor * rows[column]})})
    for owner in (models, feed_forward):
        monkeypatch.setattr(owner, "inspection", lambda name: wrong)
    assert [claim.key for claim in select(keys) if not examine(claim).surprises] == []


def test_a_model_with_tied_heads_fulfills_the_theory(monkeypatch):
    tied = models.synthetic(7, "tied")
    monkeypatch.setattr(models, "inspection", lambda name: tied)
    (claim,) = select(["X1"])
    assert examine(claim).verdict is Verdict.HOLDS


def test_without_a_model_that_meets_the_condition_the_statements_fail(monkeypatch):
    embedded = models.inspection(None)
    monkeypatch.setattr(models, "synthetic", lambda seed, attention: embedded)
    assert {claim.key: examine(claim).verdict for claim in select(["X1", "X3", "X6"])} == dict.fromkeys(
        ["X1", "X3", "X6"], Verdict.FAILS
    )


def test_statements_about_trained_models_fail_on_a_model_of_which_they_are_not_true(monkeypatch):
    own = models.inspection(None)
    linear = own.layers.assign(fc_linear_r2=1.0, fc_identity_r2=1.0, kurtosis=0.0 * own.layers["kurtosis"] + 1e-3)
    ideal = own.experiments.assign(value=own.experiments["predicted"])
    for owner in (models, feed_forward):
        monkeypatch.setattr(owner, "inspection", lambda name: replace(own, layers=linear, experiments=ideal))
    keys = ["C44", "C47", "X5", "X16"]
    assert {claim.key: examine(claim).verdict for claim in select(keys)} == dict.fromkeys(keys, Verdict.FAILS)


def test_layers_that_change_nothing_keep_a_cloud_gaussian(monkeypatch):
    usual = states.hidden_states
    monkeypatch.setattr(states, "hidden_states", lambda *args: usual(*args)[:1] * 5)
    (claim,) = select(["C46"])
    assert examine(claim).verdict is Verdict.FAILS


def test_a_cloud_goes_through_the_layers_in_the_place_of_the_text():
    model, tokens = states.reader(None)
    usual = states.hidden_states(model, tokens)
    again = states.hidden_states(model, tokens, usual[0])
    for one, other in zip(usual, again, strict=True):
        assert torch.equal(one, other)
    moved = states.hidden_states(model, tokens, usual[0] + 1)
    assert not torch.allclose(moved[1], usual[1], atol=1e-2)


def test_a_model_without_words_is_undecided_with_a_sentence(monkeypatch):
    monkeypatch.setattr(states, "load", lambda name: type("L", (), {"model": None, "tokenizer": None})())
    (claim,) = select(["C22"])
    assert "has no tokenizer" in examine(claim, model="some/vision-model").reason


def test_a_model_without_diffuse_layers_says_nothing_about_the_linear_response(monkeypatch):
    monkeypatch.setattr(models, "DIFFUSE", 1.0)
    (claim,) = select(["X7"])
    assert "no layer of the model has diffuse attention" in examine(claim).reason
