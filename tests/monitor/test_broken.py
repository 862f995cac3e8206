"""Attention with nan or infinity: the training goes on unchanged, and readings hold nan."""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import replace

import pytest
import torch
from taps.families import build
from torch import nn
from torch.nn import functional

import massieu
from massieu.monitor import Reading, collect, entropy_floor, logit_bound, z_loss
from massieu.taps import sources
from massieu.taps.call_statistics import call_statistics, sampled_rows

WORDS = torch.randint(10, (2, 8), generator=torch.Generator().manual_seed(0))


def own() -> nn.Module:
    torch.manual_seed(0)
    return massieu.nn.Transformer(16, num_layers=2, num_heads=4, vocabulary=40)


def gpt2() -> nn.Module:
    return build("gpt2", padding="none")[0]


def multihead() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Embedding(40, 16), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))


QUERY = {own: "blocks.0.attention.q_proj.weight", gpt2: "transformer.h.0.attn.c_attn.weight"}
QUERY |= {multihead: "1.layers.0.self_attn.in_proj_weight"}


def spoil(model: nn.Module, how: str, name: str) -> None:
    with torch.no_grad():
        if how == "one nan weight":
            model.get_parameter(name)[0, 0] = math.nan
        for weight in model.parameters():
            if how == "nan weights":
                weight.fill_(math.nan)
            elif how == "inf row" and weight.dim() > 1:
                weight[0] = math.inf
            elif how == "large weights":
                weight.mul_(1e18)


def train(make, how: str, watched: bool, log=None):
    model = make().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with massieu.watch(model, every=1, log=log) if watched else contextlib.nullcontext() as found:
        for step in range(4):
            if step == 1:
                spoil(model, how, QUERY[make])
            scores = model(WORDS)
            scores = getattr(scores, "logits", scores)
            loss = functional.cross_entropy(scores.flatten(0, 1), WORDS.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return torch.tensor(losses), model.state_dict(), torch.random.get_rng_state(), found.readings if watched else []


def bits(values: torch.Tensor) -> list[int]:
    return values.float().view(torch.int32).flatten().tolist()


@pytest.mark.parametrize("how", ["nan weights", "inf row", "one nan weight", "large weights"])
@pytest.mark.parametrize("make", [gpt2, own, multihead])
def test_the_training_is_that_of_an_unwatched_run_and_the_figures_are_nan(make, how, tmp_path):
    losses, state, numbers, _ = train(make, how, False)
    own_losses, own_state, own_numbers, readings = train(make, how, True, tmp_path / "run.jsonl")
    assert bits(losses) == bits(own_losses)
    assert all(bits(value) == bits(own_state[name]) for name, value in state.items())
    assert torch.equal(numbers, own_numbers)
    assert sources._OBSERVERS == []
    assert [reading.step for reading in readings] == [0, 1, 2, 3]
    assert bool(readings[0].heads["entropy"].isfinite().all())
    if how != "large weights":
        for name in ("log_normalizer", "entropy", "perplexity", "score_max", "score_range", "peak", "likeness"):
            assert bool(readings[1].heads[name][0, 0].isnan()), name
    assert all(reading.places == readings[0].places for reading in readings)
    if how == "nan weights":  # fused attention makes zeros of one head with nan, and the stream stays finite
        assert bool(readings[1].layers["token_cosine"].isnan().all())
        assert bool(readings[1].layers["effective_rank"].isnan().all())
    for line in (tmp_path / "run.jsonl").read_text().splitlines():
        Reading.from_dict(json.loads(line))


def test_heads_beside_one_with_nan_keep_their_figures():
    before, after = (train(own, how, True)[3][1] for how in ("nothing", "one nan weight"))
    for name, values in after.heads.items():
        assert bool(values[0, 0].isnan()) or name in ("qk_norm", "qk_size", "broken_rows"), name
        if name in ("entropy", "score_max", "score_range", "sink_mass"):
            assert torch.equal(values[0, 1:], before.heads[name][0, 1:]), name


@pytest.mark.parametrize("name", ["t5", "gemma2", "gpt_oss", "bert"])
def test_biases_softcaps_and_sinks_that_are_nan(name):
    model, inputs = build(name, padding="right" if name == "bert" else "none")
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(math.nan)
    with massieu.watch(model.train(), every=1) as watched:
        model(**inputs)
    reading = watched.readings[0]
    broken = reading.heads["broken_rows"]
    assert bool(((broken == 1) | broken.isnan()).all())  # places may have different numbers of heads
    others = [values for name, values in reading.heads.items() if name != "broken_rows"]
    assert all(bool(values.isnan().all()) for values in (*others, *reading.layers.values()))


def test_one_nan_in_a_sequence_is_not_averaged_away():
    model = own().train()
    with torch.no_grad():
        model.embedding.weight[11] = math.nan
    words = WORDS.clone()
    words[1, 7] = 11
    with massieu.watch(model, every=1) as watched:
        model(words)
    reading = watched.readings[0]
    for name in ("entropy", "score_max", "sink_mass", "output_share", "likeness"):
        assert bool(reading.heads[name].isnan().all()), name
    # Attention is causal: the rows of the second sequence from the eighth on see the bad token.
    bad = (words.shape[1] - 7) / words.numel()
    assert reading.heads["broken_rows"][0].tolist() == pytest.approx([bad] * 4)
    assert all(bool(reading.layers[name].isnan().all()) for name in ("token_cosine", "effective_rank"))


def test_weights_that_become_numbers_again_are_measured_again():
    model, tokens = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(3, 5, 8)
    good = model.in_proj_weight.detach().clone()
    with massieu.watch(model, every=1) as watched:
        for weight in (good, good * math.nan, good):
            with torch.no_grad():
                model.in_proj_weight.copy_(weight)
            model(tokens, tokens, tokens)
    flags = [[(flag.name, flag.head, flag.state) for flag in reading.flags] for reading in watched.readings]
    assert flags == [[], *([("not finite", head, state) for head in (0, 1)] for state in ("raised", "cleared"))]
    norm = [reading.heads["qk_norm"] for reading in watched.readings]
    assert bool(norm[1].isnan().all())
    torch.testing.assert_close(norm[2], norm[0])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_rows_with_a_bad_log_weight_are_nan_and_the_others_are_not(value):
    model, inputs = build("t5", padding="none")
    calls = []
    with massieu.taps.tap(model, calls.append), torch.no_grad():
        model(**inputs)
    call = next(call for call in calls if call.log_weight is not None and call.log_weight.dtype != torch.bool)
    good = call_statistics(call)
    batch, heads, rows, atoms = call.shape
    weight = call.log_weight.expand(batch, heads, rows, atoms).clone()
    weight[0, 1, 2, 0] = value
    position = torch.arange(rows).expand(batch, -1)
    bad = replace(call, log_weight=weight)
    where = torch.zeros(batch, heads, rows, dtype=torch.bool)
    where[0, 1, 2] = True
    for field in ("log_normalizer", "entropy", "peak"):
        found = getattr(call_statistics(bad), field)
        assert torch.equal(found.isnan(), where)
        torch.testing.assert_close(found[~where], getattr(good, field)[~where])
    found, expected = sampled_rows(bad, position), sampled_rows(call, position)
    for name in ("mass90", "score_range"):
        assert torch.equal(found[name].isnan(), where)
        assert torch.equal(found[name][~where], expected[name][~where])


PENALTIES = {
    "floor": lambda attention: entropy_floor(attention, 1.0),
    "normalized floor": lambda attention: entropy_floor(attention, 0.5, normalized=True),
    "z": z_loss,
    "bound": lambda attention: logit_bound(attention, 5.0),
}


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("name", ["gpt2", "t5", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("how", ["nan weights", "one nan weight"])
def test_penalties_of_attention_with_nan_are_nan(name, how, penalty):
    model, inputs = build(name, padding="right" if name == "gpt2" else "none")
    own = next(
        key for key, weight in model.named_parameters() if ".c_attn.w" in key or "q_proj.w" in key or ".q.w" in key
    )
    spoil(model, how, own)
    with collect(model) as attention:
        model(**inputs)
    assert bool(PENALTIES[penalty](attention).isnan())


def test_rows_without_atoms_are_not_rows_with_nan():
    torch.manual_seed(0)
    attention = massieu.nn.MeasureAttention(8, num_heads=2)
    mask = torch.ones(5, 5, dtype=torch.bool)
    mask[1] = False
    with massieu.watch(attention, every=1) as watched, collect(attention) as collected:
        attention(torch.randn(2, 5, 8), log_weight=mask)
    assert all(bool(values.isfinite().all()) for values in watched.readings[0].heads.values())
    assert all(bool(penalty(collected).isfinite()) for penalty in PENALTIES.values())
