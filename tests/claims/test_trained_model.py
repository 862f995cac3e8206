"""Claims about trained models: their verdicts on models of which the theory is true, or other things are."""

from dataclasses import replace

import torch

from massieu.claims import Verdict, examine, select
from massieu.claims.models import feed_forward, hidden_clouds
from massieu.claims.models import trained_model as models


def test_a_model_with_tied_heads_fulfills_the_theory(monkeypatch):
    tied = models.synthetic(7, "tied")
    monkeypatch.setattr(models, "inspection", lambda name: tied)
    assert examine(*select(["X1"])).verdict is Verdict.HOLDS


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
    usual = hidden_clouds.hidden_states
    monkeypatch.setattr(hidden_clouds, "hidden_states", lambda *args: usual(*args)[:1] * 5)
    assert examine(*select(["C46"])).verdict is Verdict.FAILS


def test_a_cloud_goes_through_the_layers_in_the_place_of_the_text():
    model, tokens = hidden_clouds.reader(None)
    usual = hidden_clouds.hidden_states(model, tokens)
    again = hidden_clouds.hidden_states(model, tokens, usual[0])
    for one, other in zip(usual, again, strict=True):
        assert torch.equal(one, other)
    moved = hidden_clouds.hidden_states(model, tokens, usual[0] + 1)
    assert not torch.allclose(moved[1], usual[1], atol=1e-2)


def test_a_model_without_words_is_undecided_with_a_sentence(monkeypatch):
    monkeypatch.setattr(hidden_clouds, "load", lambda name: type("L", (), {"model": None, "tokenizer": None})())
    assert "has no tokenizer" in examine(*select(["C22"]), model="some/vision-model").reason


def test_a_model_without_diffuse_layers_says_nothing_about_the_linear_response(monkeypatch):
    monkeypatch.setattr(models, "DIFFUSE", 1.0)
    assert "no layer of the model has diffuse attention" in examine(*select(["X7"])).reason
