"""Claims on parts of models: wrong code changes their verdicts, and their measurements are right."""

import pytest
import torch

pytest.importorskip("transformers")
from massieu.claims import Verdict, examine, select
from massieu.claims.models import cross_attention, feed_forward, key_laws, primer, sensitivity
from massieu.claims.models.hidden_clouds import reader, through


def test_states_that_carry_their_positions_otherwise_change_the_verdict(monkeypatch):
    kind = type(reader(None)[0])
    own = kind.forward

    def shifted(self, input_ids, position_ids, **options):
        moved = position_ids + torch.arange(position_ids.shape[1]) // 60  # the last tokens carry their positions
        return own(self, input_ids=input_ids, position_ids=moved, **options)

    monkeypatch.setattr(kind, "forward", shifted)
    assert examine(*select(["A1"])).verdict is Verdict.FAILS


def test_key_projections_that_are_not_tied_change_the_verdict(monkeypatch):
    monkeypatch.setattr(torch.nn.Linear, "load_state_dict", lambda self, state: None)
    assert examine(*select(["X17"])).verdict is Verdict.FAILS


def test_updates_that_do_not_come_to_rest_change_the_verdict(monkeypatch):
    own = cross_attention.Continuous.retrieve
    monkeypatch.setattr(cross_attention.Continuous, "retrieve", lambda self, state, steps: own(self, state, steps=2))
    assert examine(*select(["X17"])).verdict is Verdict.FAILS


def test_projections_read_in_the_wrong_order_change_the_verdict(monkeypatch):
    monkeypatch.setattr(sensitivity, "FUSED", "vqk")
    assert examine(*select(["X19"])).verdict is not Verdict.HOLDS


def test_weights_that_were_redrawn_come_back_and_turned_heads_change_nothing():
    model, tokens = sensitivity.embedded()
    usual, generator = sensitivity.loss_of(model, tokens[:2]), torch.Generator().manual_seed(0)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with sensitivity.redrawn(model.h[1], "t", generator):
        assert not torch.equal(model.h[1].attn.c_proj.weight, before["h.1.attn.c_proj.weight"])
        assert sensitivity.loss_of(model, tokens[:2]) == pytest.approx(usual, abs=1e-5)
    with sensitivity.redrawn(model.h[1], "kf", generator):
        changed = {name for name, weight in model.state_dict().items() if not torch.equal(weight, before[name])}
    assert changed == {f"h.1.{name}.weight" for name in ("attn.c_attn", "mlp.c_fc", "mlp.c_proj")}
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_what_heads_leave_of_the_stream_is_the_bias_of_the_output_projection():
    model, tokens = reader(None)
    double = model.double()
    for layer, found in enumerate(primer.residual_sums(double, tokens[:2])):
        rest = (found.added - found.heads.sum(0)).flatten(0, 1)
        bias = double.get_submodule(
            f"transformer.h.{layer}.attn.c_proj" if hasattr(double, "transformer") else f"h.{layer}.attn.c_proj"
        ).bias
        torch.testing.assert_close(rest, bias.expand_as(rest), atol=1e-10, rtol=0)


def test_symmetry_is_that_of_the_written_out_jacobian():
    model, tokens = reader(None)
    paths = [name for name, _ in model.named_modules() if name.endswith("h.3.mlp")]
    ((start, update),) = through(model, tokens[:1, :6], paths).values()
    jacobian = torch.stack(
        [torch.autograd.grad(update[..., each].sum(), start, retain_graph=True)[0] for each in range(128)], -2
    ).double()
    exact = (jacobian + jacobian.mT).square().sum() / (4 * jacobian.square().sum())
    found = [feed_forward.symmetry(start, update, torch.Generator().manual_seed(each)).symmetry for each in range(8)]
    assert sum(found) / 8 == pytest.approx(float(exact), abs=0.02)


def test_a_mixture_of_one_component_is_the_gaussian_of_torch():
    x = torch.randn(2, 200, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = key_laws.fit(x, 1, 5, torch.Generator())
    for head in range(2):
        law = torch.distributions.MultivariateNormal(found.location[head, 0], scale_tril=found.root[head])
        torch.testing.assert_close(found.log_density(x)[head], law.log_prob(x[head]))
    torch.testing.assert_close(
        found.root @ found.root.mT, torch.stack([torch.cov(each.T) for each in x]), rtol=0.02, atol=0.02
    )


def test_expectation_maximization_never_lowers_the_likelihood_and_finds_clusters_from_some_start():
    generator = torch.Generator().manual_seed(1)
    center = 6 * torch.randn(1, 3, 4, generator=generator, dtype=torch.float64)
    law = key_laws.KeyMixture(torch.zeros(1, 3), center, torch.eye(4, dtype=torch.float64)[None])
    x = law.sample(600, generator)
    steps = [key_laws.fit(x, 3, count, torch.Generator().manual_seed(2)).log_density(x).mean() for count in range(12)]
    assert torch.stack(steps).diff().min() > -1e-3  # the ridge is no part of the likelihood
    ends = [key_laws.fit(x, 3, 12, torch.Generator().manual_seed(each)).log_density(x).mean() for each in range(8)]
    assert float(max(ends)) == pytest.approx(float(law.log_density(x).mean()), abs=0.1)


def test_a_model_without_words_or_norms_is_undecided_with_a_sentence(monkeypatch):
    monkeypatch.setattr(primer, "residual_sums", lambda *_: iter(()))
    assert "no block of the model has a norm" in examine(*select(["A2"])).reason
