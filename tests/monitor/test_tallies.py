"""What the sums of a pass become where they are few, and where tokens stand in another sequence."""

from __future__ import annotations

import pytest
import torch
from taps.families import build
from torch.testing import assert_close

import massieu
from massieu.inspection.rows import scores_at
from massieu.monitor import Reading

WORDS = torch.randint(10, (2, 8), generator=torch.Generator().manual_seed(0))


def read(model, *args, **kwargs) -> Reading:
    with massieu.watch(model.train(), every=1) as watched:
        model(*args, **kwargs)
    return watched.readings[0]


@pytest.mark.parametrize(("heads", "tokens"), [(1, 8), (4, 1), (4, 2)])
def test_a_head_without_another_to_compare_with_has_no_likeness(heads, tokens):
    torch.manual_seed(0)
    model = massieu.nn.Transformer(16, num_layers=2, num_heads=heads, vocabulary=10)
    reading = read(model, WORDS[:, :tokens])
    assert bool(reading.heads["likeness"].isnan().all())
    assert reading.to_dict()["heads"]["likeness"] == [[None] * heads] * 2


def test_likeness_in_cross_attention_counts_the_first_token_and_elsewhere_does_not(monkeypatch):
    monkeypatch.setattr(massieu.monitor.tallies, "ROWS", 1000)
    model, inputs = build("t5", padding="none")
    for module in model.modules():  # without dropout, of which T5 has two kinds
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0
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
