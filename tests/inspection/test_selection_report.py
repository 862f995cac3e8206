"""Heads built to select with the largest margin are found to, others are not, and every sample is what the model reads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")
from taps.families import build

from massieu.checks import UserError
from massieu.inspection import margin_report, selection_report
from massieu.inspection.selection_report import NOT_READ, head_rows
from massieu.margin import max_margin, report
from massieu.margin.head_rows import BIAS, NOT_ONE_MATRIX
from massieu.nn import Transformer

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
DIM, LENGTH = 16, 10


def vectors(count=6):
    return torch.randn(count, LENGTH, DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def encoder(**options):
    """One head as wide as the tokens, so that its W can be any matrix."""
    generator = torch.Generator().manual_seed(0)
    options = {"causal": False, "positions": None, "norm": None, "bias": False, **options}
    return Transformer(DIM, 1, 1, **options, generator=generator, dtype=torch.float64).eval()


def with_weights(model, weights):
    """The model with W = scale W_K' W_Q."""
    attention = model.blocks[0].attention
    with torch.no_grad():
        attention.q_proj.weight.copy_(weights * DIM**0.5)
        attention.k_proj.weight.copy_(torch.eye(DIM))
    return model


@pytest.mark.parametrize("first", [True, False])
def test_a_head_built_as_the_max_margin_solution_is_found_to_be_one(first):
    given = {"inputs": [{"inputs": vectors()}], "rows": 6}
    sample = head_rows(encoder(), layer=0, **given)
    drawn = torch.randint(1, LENGTH, (6,), generator=torch.Generator().manual_seed(2))
    chosen = torch.zeros_like(drawn) if first else drawn
    best = max_margin(sample.problem, selection=chosen)
    assert best.feasible
    (head,) = margin_report(with_weights(encoder(), 3 * best.weights), **given).to_dict("records")
    for name in ("margin_ratio", "correlation", "span_share", "span_correlation", "span_bound"):
        assert head[name] == pytest.approx(1, abs=1e-6), name
    assert head["best_margin"] == pytest.approx(best.margin, rel=1e-6)
    assert head["first_share"] == float(first)
    assert (head["rows"], head["constraints"], head["reproduced"]) == (6, 6 * (LENGTH - 1), 1.0)
    # The controls are no such thing.
    assert head["random_span_correlation"] < 0.8
    assert abs(head["shuffled_span_correlation"]) < 0.5


@pytest.mark.parametrize("padding", ["none", "right", "left"])
def test_tokens_queries_and_selection_are_those_of_the_models_own_weights(padding):
    model, inputs = build("gpt2", padding=padding, attn_implementation="eager")
    for block in model.transformer.h:
        torch.nn.init.normal_(block.attn.c_attn.bias, generator=torch.Generator().manual_seed(3))
    read = []
    handle = model.transformer.h[1].attn.register_forward_pre_hook(
        lambda _, args, kwargs: read.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    with torch.no_grad():
        own = model(**inputs, output_attentions=True).attentions[1].double()
    handle.remove()
    sample = head_rows(model, layer=1, rows=12, inputs=[inputs])
    assert sample.problem.queries.shape[-1] == 33  # the bias
    assert BIAS in sample.note
    assert sample.whole.all()
    states = read[0].double()
    for row, query in enumerate(sample.problem.queries[:, :-1]):
        batch, at = (states - query).abs().amax(-1).flatten().argmin().item() // states.shape[1], None
        at = (states[batch] - query).abs().amax(-1).argmin()
        visible = own[batch, 0, at] > 0
        count = int(sample.problem.lengths[row])
        assert count == int(visible.sum())
        torch.testing.assert_close(sample.problem.tokens[row, :count], states[batch][visible], atol=1e-6, rtol=0)
        weights = own[batch][:, at][:, visible]
        assert torch.equal(sample.selection[:, row], weights.argmax(-1))
        torch.testing.assert_close(sample.peak[:, row], weights.amax(-1), atol=1e-4, rtol=0)
        assert torch.equal(sample.first[:, row], weights.argmax(-1) == 0)
        for head, weight in enumerate(sample.maps):
            torch.testing.assert_close(sample.problem.attention(weight)[row, :count], weights[head], atol=1e-4, rtol=0)
    # Without the column of the bias other tokens win.
    plain = torch.cat([sample.maps[..., :-1], torch.zeros_like(sample.maps[..., -1:])], -1)
    assert any(not torch.equal(sample.problem.selected(w), s) for w, s in zip(plain, sample.selection, strict=True))


def test_correlations_are_at_least_the_margin_ratios():
    table = margin_report(build("gpt2")[0], inputs=[build("gpt2")[1]], rows=8)
    assert len(table) == 8
    assert (table["margin_ratio"] > 0).all()
    for prefix in ("", "random_"):
        assert (table[f"{prefix}correlation"] >= table[f"{prefix}margin_ratio"] - 1e-6).all()
        assert (table[f"{prefix}span_correlation"] >= table[f"{prefix}span_bound"] - 1e-6).all()
        ratio = table[f"{prefix}correlation"] / table[f"{prefix}span_correlation"]
        assert (ratio**2 - table[f"{prefix}span_share"]).abs().max() < 1e-6
    assert (table["gap"] < 1e-8).all()
    # A head that selects other tokens than these has no such promise.
    assert (table["shuffled_correlation"] < table["correlation"]).all()


def test_a_selection_that_no_matrix_makes_is_not_feasible_and_one_of_a_matrix_is():
    tokens = vectors(40)
    tokens[:, :, 2:] = 0
    given = {"inputs": [{"inputs": tokens}], "rows": 60}
    turned, plain = (margin_report(encoder(positions=each), **given).iloc[0] for each in ("rotary", None))
    assert not turned["feasible"]
    assert turned["best_margin"] == 0
    assert 0 <= turned["first_share"] < 1  # the selection is reported all the same
    assert plain["feasible"]
    assert plain["margin_ratio"] > 0
    # Tokens drawn at random are selected by no matrix either.
    assert plain["shuffled_correlation"] != plain["shuffled_correlation"]


def test_rotary_positions_leave_selection_and_feasibility_and_a_sentence():
    table = margin_report(encoder(positions="rotary"), inputs=[{"inputs": vectors()}], rows=6)
    head = table.iloc[0]
    assert NOT_ONE_MATRIX in head["note"]
    assert head["feasible"]
    assert head["reproduced"] < 1
    assert "correlation" not in table.columns or table["correlation"].isna().all()


def test_heads_whose_keys_read_another_stream_get_a_sentence():
    model, inputs = build("bart")
    table = margin_report(model, inputs=[inputs], rows=4)
    cross = table["stack"] == "cross"
    assert cross.any()
    assert table[cross]["note"].str.contains(NOT_READ).all()
    assert table[~cross]["feasible"].all()


def test_the_seed_decides_everything_and_other_layers_nothing():
    model, inputs = build("gpt2")
    whole, again = (margin_report(model, inputs=[inputs], rows=5, seed=4) for _ in range(2))
    assert whole.equals(again)
    part = margin_report(model, inputs=[inputs], rows=5, seed=4, layers=[1], heads=[2])
    names = ["constraints", "peak", "margin", "best_margin", "correlation", "span_share"]
    names += ["random_correlation", "shuffled_correlation"]
    same = whole[(whole["layer"] == 1) & (whole["head"] == 2)]
    assert same[names].to_numpy()[0] == pytest.approx(part[names].to_numpy(dtype=float)[0])
    other = margin_report(model, inputs=[inputs], rows=5, seed=5, layers=[1], heads=[2])
    for name in ("constraints", "peak", "random_correlation"):
        assert other[name].item() != part[name].item()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"rows": 0}, "rows"),
        ({"layers": [3]}, "layers"),
        ({"layers": []}, "layers"),
        ({"layers": 0}, "layers"),
        ({"heads": [3]}, "heads"),
        ({"heads": [0, 9]}, "heads"),
        ({"heads": 0}, "heads"),
        ({"heads": [-1]}, "heads"),
        ({"heads": [0.5]}, "heads"),
        ({"inputs": []}, "inputs"),
    ],
)
def test_bad_requests_get_a_sentence(options, sentence):
    with pytest.raises(UserError, match=sentence):
        margin_report(encoder(), **{"inputs": [{"inputs": vectors()}], **options})


def test_a_model_without_attention_gets_a_sentence():
    with pytest.raises(UserError, match="observed"):
        margin_report(torch.nn.Linear(DIM, DIM).double(), inputs=[{"input": vectors()}])


@pytest.mark.parametrize("causal", [True, False])
def test_copies_of_the_selected_token_have_no_constraint(causal):
    options = {"positions": None, "causal": causal, "generator": torch.Generator().manual_seed(0)}
    model = Transformer(16, num_layers=1, num_heads=2, vocabulary=9, **options)
    text, again = torch.tensor([[1, 2, 1, 3, 4, 5, 6, 7]]), torch.tensor([[1, 1, 1, 1]])
    table = margin_report(model, inputs=[{"inputs": text}], rows=8)
    assert table["feasible"].all()
    assert (table["correlation"] >= table["margin_ratio"] - 1e-6).all()
    assert table["reproduced"].eq(1).all()
    assert table["note"].str.contains("have copies of the selected token").any()
    nothing = margin_report(model, inputs=[{"inputs": again}], rows=2)
    assert nothing["note"].str.contains(report.NO_CONSTRAINTS).all()
    assert nothing["correlation"].isna().all()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert margin_report(model, inputs=[{"inputs": text}], rows=4)["note"].str.contains(report.NO_CONSTRAINTS).all()


def test_the_report_of_a_head_is_that_of_its_matrix():
    model = encoder()
    given = {"inputs": [{"inputs": vectors()}], "rows": 6}
    sample = head_rows(model, layer=0, **given)
    head = margin_report(model, **given).iloc[0]
    alone = report.selection_report(sample.maps[0].float(), sample.problem)
    for name in (
        "margin",
        "best_margin",
        "correlation",
        "span_correlation",
        "shuffled_correlation",
        "random_correlation",
    ):
        assert head[name] == pytest.approx(getattr(alone, name), abs=1e-5), name


def test_options_of_loading_are_for_names():
    with pytest.raises(UserError, match="dtype"):
        margin_report(encoder(), inputs=[{"inputs": vectors()}], dtype="float32")


def test_one_token_alone_is_no_selection():
    with pytest.raises(UserError, match="two tokens"):
        margin_report(encoder(), inputs=[{"inputs": vectors()[:, :1]}])


def test_a_sample_of_a_layer_that_cannot_be_read_is_refused(monkeypatch):
    monkeypatch.setattr(selection_report, "_read", lambda *_: None)
    with pytest.raises(UserError, match="layer 0"):
        head_rows(encoder(), layer=0, inputs=[{"inputs": vectors()}])


def test_a_solver_that_stopped_early_leaves_a_note(monkeypatch):
    stopped = lambda *given, **options: replace(max_margin(*given, **options), converged=False)  # noqa: E731
    monkeypatch.setattr(report, "max_margin", stopped)
    table = margin_report(encoder(), inputs=[{"inputs": vectors()}], rows=4)
    assert report.NOT_CERTAIN in table["note"].item()
