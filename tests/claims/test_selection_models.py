"""Claims about selection in trained models: their measurements, and cases in which they come out otherwise."""

import itertools

import pytest
import torch

pytest.importorskip("transformers")
from massieu.claims import Verdict, examine, select
from massieu.claims.margin import selection_models


def test_of_all_orders_of_the_checkpoints_only_exchanges_of_near_equals_pass():
    norms = selection_models.score_norms().mean(-1)
    shares, _ = selection_models.sparsity(0, 12)
    for rising in (norms, -shares.mean(-1)):
        orders = itertools.permutations(range(4))
        passing = {o for o in orders if selection_models.setback(rising[list(o)]) <= selection_models.SETBACK}
        assert passing == {(0, 1, 2, 3), (1, 0, 2, 3), (0, 1, 3, 2), (1, 0, 3, 2)}


def test_a_setback_is_a_part_of_the_whole_change_column_by_column():
    values = torch.tensor([[0.0, 1.0], [4.0, 2.0], [3.0, 3.0], [5.0, 9.0]])
    assert selection_models.setback(values).tolist() == pytest.approx([0.2, 0.0])
    assert selection_models.setback(values.flip(0)).tolist() == pytest.approx([1.0, 1.0])


def test_effective_shares_are_those_of_the_written_out_weights():
    shares, peaks = selection_models.sparsity(3, 5)
    model = selection_models.load(str(selection_models.assets.MODEL)).model
    model.set_attn_implementation("eager")
    order = torch.randperm(len(selection_models.passages()), generator=torch.Generator().manual_seed(3))
    tokens = selection_models.passages()[order[:5]]
    with torch.no_grad():
        maps = torch.stack(model(input_ids=tokens, output_attentions=True).attentions).double()
    maps = maps[..., selection_models.EARLY :, :]
    seen = torch.arange(selection_models.EARLY, maps.shape[-1]) + 1
    effective = torch.special.entr(maps).sum(-1).exp() / seen
    torch.testing.assert_close(shares[-1], effective.mean((1, 3)).flatten(), atol=1e-4, rtol=0)
    torch.testing.assert_close(peaks[-1], maps.amax(-1).mean((1, 3)).flatten(), atol=1e-4, rtol=0)


def test_norms_are_those_of_the_projections_that_the_checkpoint_holds():
    model = selection_models.checkpoint(selection_models.assets.MODEL).model
    fused = model.h[2].attn.c_attn.weight.detach().double()
    query, key, _ = fused.split(128, 1)
    expected = [float((query[:, h : h + 32] @ key[:, h : h + 32].T).norm()) / 32**0.5 for h in range(0, 128, 32)]
    assert selection_models.score_norms()[-1].view(5, 4)[2].tolist() == pytest.approx(expected, rel=1e-5)


def test_with_the_checkpoints_in_reverse_no_claim_comes_out(monkeypatch):
    folder = selection_models.assets.CHECKPOINTS
    monkeypatch.setattr(selection_models.assets, "CHECKPOINTS", (*folder[::-1],))
    for cached in (selection_models.sparsity, selection_models.score_norms):
        cached.cache_clear()
    found = {claim.key: examine(claim).verdict for claim in select(["S1", "S2", "S3"])}
    for cached in (selection_models.sparsity, selection_models.score_norms):
        cached.cache_clear()
    assert all(verdict is Verdict.UNDECIDED for verdict in found.values()), found


def test_a_head_that_follows_the_margin_would_pass(monkeypatch):
    report = selection_models.margin_report

    def aligned(*given, **options):
        return report(*given, **options).assign(span_correlation=0.99)

    monkeypatch.setattr(selection_models, "margin_report", aligned)
    assert examine(*select(["X13"])).verdict is Verdict.HOLDS


def test_a_model_without_one_matrix_per_head_is_undecided_with_a_sentence(monkeypatch):
    report = selection_models.margin_report

    def turned(*given, **options):
        return report(*given, **options).drop(columns="span_correlation")

    monkeypatch.setattr(selection_models, "margin_report", turned)
    assert "no head of the model scores by one matrix" in examine(*select(["X13"])).reason
