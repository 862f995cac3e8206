"""The claims about trained models: expected on the embedded one, other on a model that fulfils the theory."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from massieu.claims import Verdict, examine, select
from massieu.claims.models import states
from massieu.claims.models import trained as models

# What is wrong: a function and the factor on its numbers.
BREAKS = [
    (models, "held_out_r2", 0.8, ["C44"]),
    (models, "projection_kurtosis", 30.0, ["C46", "X5"]),
    (models, "synthetic", None, ["X1", "X3", "X6"]),  # free heads in the place of tied ones
    (nn.functional, "layer_norm", None, ["C22"]),  # without the mean taken away
]
# A table and a column of an inspection, and the factor on it.
COLUMNS = [("experiments", "value", 0.7, ["C47"]), ("layers", "corollary_r2", 0.9, ["X7"])]
WRONG = {
    "synthetic": lambda seed, attention: FREE(seed, "free"),
    "layer_norm": lambda x, *_, **__: x / x.square().mean(-1, keepdim=True).sqrt(),
}
FREE = models.synthetic

KEYS = ["C22", "C44", "C46", "C47", "X1", "X3", "X5", "X6", "X7"]


@pytest.fixture(scope="module")
def results():
    return {claim.key: examine(claim) for claim in select(KEYS)}


@pytest.mark.parametrize("key", KEYS)
def test_the_verdict_on_the_embedded_model_is_the_expected_one(key, results):
    found = results[key]
    assert found.claim.on_model
    assert found.verdict is found.claim.expected, (found.reason, found.evidence)


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
    monkeypatch.setattr(models, "inspection", lambda name: wrong)
    assert [claim.key for claim in select(keys) if not examine(claim).surprises] == []


def test_a_model_with_tied_heads_fulfils_the_theory(monkeypatch):
    tied = models.synthetic(7, "tied")
    monkeypatch.setattr(models, "inspection", lambda name: tied)
    (claim,) = select(["X1"])
    assert examine(claim).verdict is Verdict.HOLDS


def test_without_a_model_that_fulfils_the_theory_nothing_is_decided(monkeypatch):
    embedded = models.inspection(None)
    monkeypatch.setattr(models, "synthetic", lambda seed, attention: embedded)
    for claim in select(["X1", "X3", "X6"]):
        found = examine(claim)
        assert found.verdict is Verdict.UNDECIDED
        assert "what is true instead did not come out" in found.reason


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
