"""What the sums of a pass become where they are few, and where tokens stand in another sequence."""

from __future__ import annotations

import pytest
import torch
from attention_calls import call_of
from taps.families import build
from torch.testing import assert_close

import massieu
from massieu.monitor import Reading
from massieu.monitor.reading import Place
from massieu.monitor.sums import ROWS, PlaceSums, add_call
from massieu.taps.call_statistics import sampled_rows, scores_at

WORDS = torch.randint(10, (2, 8), generator=torch.Generator().manual_seed(0))


def read(model, *args, **kwargs) -> Reading:
    with massieu.watch(model.train(), every=1) as watched:
        model(*args, **kwargs)
    return watched.readings[0]


def quiet(name: str):
    """A tiny model without dropout, and its inputs."""
    model, inputs = build(name, padding="none")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0
    return model, inputs


@pytest.mark.parametrize(("heads", "tokens"), [(1, 8), (4, 1), (4, 2)])
def test_a_head_without_another_to_compare_with_has_no_likeness(heads, tokens):
    torch.manual_seed(0)
    model = massieu.nn.Transformer(16, num_layers=2, num_heads=heads, vocabulary=10)
    reading = read(model, WORDS[:, :tokens])
    assert bool(reading.heads["likeness"].isnan().all())
    assert reading.to_dict()["heads"]["likeness"] == [[None] * heads] * 2


def test_likeness_in_cross_attention_counts_the_first_token_and_elsewhere_does_not(monkeypatch):
    monkeypatch.setattr(massieu.monitor.sums, "ROWS", 1000)
    model, inputs = quiet("t5")
    calls = []
    with massieu.taps.tap(model, calls.append), torch.no_grad():
        model(**inputs)
    reading = read(model, **inputs)
    found = {
        (place.stack, place.layer): row for place, row in zip(reading.places, reading.heads["likeness"], strict=True)
    }
    assert {call.stack for call in calls} == {"encoder", "decoder", "cross"}
    for call in calls:
        batch, heads, queries, _ = call.shape
        scores = scores_at(call, torch.arange(queries).expand(batch, -1)).double()
        if call.stack != "cross":
            scores[..., 0] = -torch.inf
        weights = scores.softmax(-1).nan_to_num()
        seen = scores > -torch.inf
        departure = (weights - seen / seen.sum(-1, keepdim=True).clamp_min(1)).transpose(0, 1).flatten(1)
        cosine = torch.nn.functional.cosine_similarity(departure[:, None], departure[None], dim=-1)
        best = cosine.masked_fill(torch.eye(heads, dtype=torch.bool), -1).amax(-1)
        assert_close(found[call.stack, call.layer], best, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_weights_that_no_token_distinguishes_are_not_known(name, dtype):
    model, inputs = quiet(name)
    model, words = model.to(dtype), inputs["input_ids"]
    for name, module in model.named_modules():
        if name.endswith("wpe"):
            torch.nn.init.zeros_(module.weight)
    for alike in (words[:, :1], words[:1, :1].expand(2, 8)):
        heads = read(model, alike).heads
        assert bool(heads["qk_norm"].isnan().all() & heads["qk_size"].isnan().all())
    assert bool(read(model, words).heads["qk_norm"].isfinite().all())


def test_heads_with_shared_weights_are_known():
    torch.manual_seed(0)
    model = massieu.nn.MeasureAttention(8, num_heads=2)
    with torch.no_grad():
        for part in (model.q_proj, model.k_proj):
            part.weight[4:] = part.weight[:4]
    norm = read(model, torch.randn(2, 5, 8)).heads["qk_norm"][0]
    query, key = (part.weight.detach().double()[:4] for part in (model.q_proj, model.k_proj))
    assert_close(norm, (torch.linalg.matrix_norm(query.mT @ key, 2) / 2).expand(2), rtol=1e-3, atol=1e-5)


def test_tokens_that_are_nearly_alike_tell_the_weights():
    torch.manual_seed(0)
    model = massieu.nn.MeasureAttention(16, num_heads=2)
    far, near = torch.randn(2, 8, 16), torch.randn(16) + 0.01 * torch.randn(2, 8, 16)
    assert_close(read(model, near).heads["qk_norm"], read(model, far).heads["qk_norm"], rtol=1e-3, atol=1e-5)


def test_sampled_rows_weigh_sequences_by_their_length():
    query, key = torch.randn(2, 2, 1, 300, 4, generator=torch.Generator().manual_seed(0))
    query[1] *= 5  # in the short sequence scores have a larger range
    present = torch.arange(300) < torch.tensor([[300], [40]])
    call = call_of(query, key, present=present)
    sums = PlaceSums(Place("decoder", 0, "a", 1))
    add_call(sums, call, frozenset({"score_range"}))
    ranges = sampled_rows(call, torch.arange(300).expand(2, -1))["score_range"][:, 0]
    mean, error = ranges[present].mean().item(), ranges[present].std().item() / (2 * ROWS) ** 0.5
    assert abs(sums.value("score_range").item() - mean) < 3 * error
    assert abs(ranges[0].mean() + ranges[1, :40].mean() - 2 * mean) > 6 * error  # what equal weights would give
