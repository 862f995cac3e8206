"""Readings come when they should, and their values are those of the model's own attention."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import torch.utils.checkpoint
from dense import dense
from monitor.expected_messages import logs
from taps.families import build
from torch import nn
from torch.nn import functional
from torch.testing import assert_close

import massieu
from massieu.checks import UserError
from massieu.inspection import NotObservable
from massieu.models.head_weights import head_weights
from massieu.monitor import Reading, step_counter
from massieu.taps import sources

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "watch.md").read_text(encoding="utf-8")
WORDS = torch.randint(10, (2, 8), generator=torch.Generator().manual_seed(0))


def small(**options) -> nn.Module:
    torch.manual_seed(0)
    return massieu.nn.Transformer(16, num_layers=2, num_heads=4, vocabulary=10, **options)


def loop(model, count, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with massieu.watch(model, **options) as watched:
        for _ in range(count):
            model(WORDS).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return watched


def read(model, *args, **kwargs) -> Reading:
    """One reading of one training pass."""
    model.train()
    with massieu.watch(model, every=1) as watched:
        model(*args, **kwargs)
    return watched.readings[0]


def quiet(name, padding="none", **options):
    """A tiny model without dropout, and its inputs."""
    model, inputs = build(name, padding=padding, **options)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for rate in ("attention_dropout", "dropout", "attn_pdrop", "dropout_prob"):
            if isinstance(getattr(module, rate, None), float):
                setattr(module, rate, 0.0)
    return model, inputs


def from_weights(weights, present):
    """Means over rows of what a matrix of weights says; rows that see one atom only have no normalized entropy."""
    p = weights.double()
    log_p = p.log()
    mean = torch.special.entr(p).sum(-1)
    atoms = (p > 0).sum(-1)
    first = present.to(torch.uint8).argmax(-1)
    behind = torch.arange(p.shape[-2]) > first[:, None]
    sink = p.take_along_dim(first[:, None, None, None], -1).squeeze(-1)
    inner = torch.where(p > 0, log_p, 0.0)
    mean_log = (p * inner).sum(-1, keepdim=True)
    found = {
        "entropy": mean,
        "normalized_entropy": torch.where(atoms > 1, mean / atoms.double().log(), torch.nan),
        "perplexity": mean.exp(),
        "effective_atoms": 1 / p.square().sum(-1),
        "score_variance": (p * (inner - mean_log).square()).sum(-1),
        "peak": p.amax(-1),
        "sink_mass": sink.masked_fill(~behind[:, None], torch.nan),
        "score_range": log_p.amax(-1) - log_p.masked_fill(p == 0, torch.inf).amin(-1),
    }
    rows = present[:, None].expand_as(mean)
    return {
        name: values.masked_fill(~rows, torch.nan).transpose(0, 1).flatten(1).nanmean(-1)
        for name, values in found.items()
    }


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "gpt_neox", "opt", "bloom"])
@pytest.mark.parametrize("padding", ["none", "right", "left"])
def test_figures_are_those_of_the_models_own_attention(name, padding, monkeypatch):
    monkeypatch.setattr(massieu.monitor.sums, "ROWS", 1000)
    model, inputs = quiet(name, padding)
    eager, _ = quiet(name, padding, attn_implementation="eager")
    eager.load_state_dict(model.state_dict())
    weights = eager(**inputs, output_attentions=True).attentions
    reading = read(model, **inputs)
    mask = inputs.get("attention_mask")
    present = torch.ones(weights[0].shape[0], weights[0].shape[2]) if mask is None else mask
    assert len(reading.places) == len(weights) == 2
    for layer, own in enumerate(weights):
        for quantity, values in from_weights(own.detach(), present.bool()).items():
            # Float32 weights of the model; ranges are differences of logarithms of the smallest ones.
            assert_close(
                reading.heads[quantity][layer], values, rtol=1e-3, atol=1e-4, msg=f"{quantity} of layer {layer}"
            )


def test_log_normalizer_and_largest_score_are_those_of_the_written_out_scores():
    model, inputs = quiet("gpt2")
    found = {}
    attention = model.transformer.h[0].attn
    attention.c_attn.register_forward_hook(lambda module, args, output: found.update(out=output.detach()))
    reading = read(model, **inputs)
    query, key, _ = (part.unflatten(-1, (4, -1)).transpose(1, 2).double() for part in found["out"].chunk(3, -1))
    scores = query @ key.mT / query.shape[-1] ** 0.5
    scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -torch.inf)
    assert_close(reading.heads["log_normalizer"][0], scores.logsumexp(-1).mean((0, 2)), rtol=1e-4, atol=1e-5)
    assert_close(reading.heads["score_max"][0], scores.amax((0, 2, 3)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options", [{}, {"attention": "tied"}, {"num_key_heads": 2, "window": 3}, {"causal": False, "norm": "rms"}]
)
def test_layers_of_ours_by_their_own_statistics_and_by_the_written_out_softmax(options):
    model = small(positions=None, dtype=torch.float64, **options)
    projected = {}
    for layer, block in enumerate(model.blocks):
        for name, part in (("query", block.attention.q_proj), ("key", block.attention.k_proj)):
            part.register_forward_hook(lambda _, args, out, at=(layer, name): projected.update({at: out.detach()}))
    reading = read(model, WORDS)
    for layer, own in enumerate(model(WORDS, return_statistics=True)[1]):
        query, key = (projected[layer, name].unflatten(-1, (-1, 4)).transpose(1, 2) for name in ("query", "key"))
        written = dense(query, key, key, causal=model.causal, window=options.get("window"))
        for name in ("log_normalizer", "entropy", "score_variance", "peak"):
            found = reading.heads[name][layer]
            assert_close(found, getattr(own, name).detach().mean((0, 2)), rtol=1e-12, atol=1e-14, msg=name)
            assert_close(found, getattr(written, name).mean((0, 2)), rtol=1e-9, atol=1e-12, msg=name)


def test_layers_of_ours_with_rotary_positions_by_their_own_statistics():
    model = small(dtype=torch.float64)
    reading = read(model, WORDS)
    own = torch.stack([rows.entropy.detach().mean((0, 2)) for rows in model(WORDS, return_statistics=True)[1]])
    assert_close(reading.heads["entropy"], own, rtol=1e-12, atol=0)


@pytest.mark.parametrize("batch_first", [True, False])
def test_layers_of_torch(batch_first):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=batch_first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    tokens = torch.randn(2, 9, 16) if batch_first else torch.randn(9, 2, 16)
    reading = read(model, tokens)
    with torch.no_grad():
        _, weights = model.layers[0].self_attn(tokens, tokens, tokens, average_attn_weights=False)
        behind = model.layers[0](tokens)
    behind = behind if batch_first else behind.transpose(0, 1)
    for quantity, values in from_weights(weights, torch.ones(2, 9, dtype=torch.bool)).items():
        assert_close(reading.heads[quantity][0], values, rtol=1e-4, atol=1e-5, msg=quantity)
    cosine = functional.cosine_similarity(behind[:, :, None], behind[:, None], dim=-1).double()
    assert_close(reading.layers["token_cosine"][0], (cosine.sum() - 18) / (2 * 9 * 8), rtol=1e-5, atol=1e-6)


def test_a_single_multihead_attention():
    torch.manual_seed(0)
    model, tokens = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(3, 5, 8)
    reading = read(model, tokens, tokens, tokens)
    weights = model(tokens, tokens, tokens, average_attn_weights=False)[1].detach()
    expected = from_weights(weights, torch.ones(3, 5, dtype=torch.bool))
    assert_close(reading.heads["entropy"][0], expected["entropy"], rtol=1e-4, atol=1e-5)
    query, key, _ = model.in_proj_weight.detach().double().unflatten(0, (3, 2, 4)).unbind(0)
    assert_close(reading.heads["qk_norm"][0], torch.linalg.matrix_norm(query.mT @ key, 2) / 2, rtol=1e-3, atol=1e-5)


def test_encoder_decoder_and_cross_attention_are_kept_apart():
    model, inputs = quiet("t5")
    reading = read(model, **inputs)
    assert {place.stack for place in reading.places} == {"encoder", "decoder", "cross"}
    assert "entropy/cross.layer01/median" in reading.series()
    assert not any(reading.heads["entropy"].isnan().flatten())


def test_layers_with_different_numbers_of_heads():
    torch.manual_seed(0)
    first, second = (massieu.nn.MeasureAttention(8, num_heads=heads) for heads in (2, 4))
    model = nn.Sequential(first, second)
    reading = read(model, torch.randn(1, 5, 8))
    assert [place.heads for place in reading.places] == [2, 4]
    assert reading.heads["entropy"].isnan().sum() == 2
    series = reading.series(per_head=True)
    assert "entropy/layer00/head01" in series
    assert "entropy/layer00/head02" not in series


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "gpt_neox", "opt", "t5", "massieu", "roberta", "vit"])
def test_singular_values_are_those_of_the_differentiated_weights(name):
    model, inputs = quiet(name)
    reading = read(model, **inputs)
    weights = {(found.stack, found.layer): found for found in head_weights(model, inputs)}
    for row, place in enumerate(reading.places):
        score = weights[place.stack, place.layer].score_map.dense()
        norm, size = torch.linalg.matrix_norm(score, 2), torch.linalg.matrix_norm(score)
        assert_close(reading.heads["qk_norm"][row], norm, rtol=2e-3, atol=1e-4)
        assert_close(reading.heads["qk_size"][row], size, rtol=2e-3, atol=1e-4)


def test_singular_values_follow_weights_that_turn_between_readings():
    torch.manual_seed(0)
    model, tokens = massieu.nn.MeasureAttention(16, num_heads=2), torch.randn(2, 6, 16)
    with massieu.watch(model, every=1) as watched:
        for _ in range(3):
            with torch.no_grad():
                for projection in (model.q_proj, model.k_proj):
                    one = torch.randn(2, 8, 1) * torch.randn(2, 1, 16)  # which dominates
                    projection.weight.copy_((torch.randn(2, 8, 16) + 5 * one).flatten(0, 1))
            model(tokens)
            query, key = (each.weight.detach().double().unflatten(0, (2, 8)) for each in (model.q_proj, model.k_proj))
            true = torch.linalg.matrix_norm(query.mT @ key, 2) / 8**0.5
            assert_close(watched.readings[-1].heads["qk_norm"][0], true, rtol=1e-3, atol=1e-5)


def test_weights_behind_a_norm_are_not_known():
    model, inputs = quiet("qwen3")
    assert bool(read(model, **inputs).heads["qk_norm"].isnan().all())


def test_effective_rank_and_similarity_of_the_stream_behind_each_block():
    model, inputs = quiet("gpt2", "right")
    reading = read(model, **inputs)
    stream = model(**inputs, output_hidden_states=True).hidden_states[1].detach().double()
    ranks, cosines = [], []
    for tokens, length in zip(stream, inputs["attention_mask"].sum(-1), strict=True):
        unit = tokens[:length] / tokens[:length].norm(dim=-1, keepdim=True)
        share = torch.linalg.eigvalsh(torch.cov(unit.T)).clamp_min(0)
        ranks.append(torch.special.entr(share / share.sum()).sum().exp())
        gram = unit @ unit.T
        cosines.append((gram.sum() - length) / (length * (length - 1)))
    assert_close(reading.layers["effective_rank"][0], torch.stack(ranks).mean(), rtol=1e-4, atol=1e-5)
    assert_close(reading.layers["token_cosine"][0], torch.stack(cosines).mean(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("every", [1, 3])
def test_update_ratio_is_that_of_the_last_step(every):
    model, old = small(), {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ratios = {}
    with massieu.watch(model, every=every) as watched:
        for step in range(4):
            weights = [p.detach().clone() for p in model.blocks[1].attention.parameters() if p.dim() > 1]
            if old:
                change = sum((x - y).square().sum() for x, y in zip(weights, old, strict=True))
                ratios[step] = (change / sum(x.square().sum() for x in old)).sqrt().double()
            old = weights
            model(WORDS).square().mean().backward()
            optimizer.step()
    assert watched.readings[0].layers["update_ratio"].isnan().all()
    for reading in watched.readings[1:]:
        assert_close(reading.layers["update_ratio"][1], ratios[reading.step], rtol=1e-5, atol=0)
    assert len(watched.readings) == math.ceil(4 / every)


def test_two_halves_of_a_batch_merge_into_the_whole():
    model, inputs = quiet("gpt2", "right")
    kept = []

    def first_half(all_sums):
        kept.append(all_sums)
        return all_sums

    def joined(all_sums):
        for sums, other in zip(all_sums, kept[0], strict=True):
            sums.merge(other)
        return all_sums

    parts = [{name: values[i : i + 1] for name, values in inputs.items()} for i in range(2)]
    model.train()
    with massieu.watch(model, every=1, gather=first_half):
        model(**parts[0])
    with massieu.watch(model, every=1, gather=joined) as watched:
        model(**parts[1])
    whole, merged = read(model, **inputs), watched.readings[0]
    for name, values in {**whole.heads, **whole.layers}.items():
        assert_close({**merged.heads, **merged.layers}[name], values, rtol=1e-6, atol=1e-6, equal_nan=True)


def test_only_what_was_asked_for_is_computed():
    watched = loop(small(), 1, every=1, quantities=("log_normalizer", "entropy"))
    assert set(watched.readings[0].heads) == {"log_normalizer", "entropy"}
    assert watched.readings[0].layers == {}


def test_steps_are_counted_by_changes_of_the_weights():
    model, training = small(), []
    optimizer = torch.optim.AdamW(model.parameters())
    with massieu.watch(model, 2, lambda _: training.append(model.training and torch.is_grad_enabled())) as watched:
        for _ in range(6):
            model.eval()(WORDS)  # evaluation
            model.train()
            with torch.no_grad():
                model(WORDS)
            for _ in range(3):  # gradients are accumulated
                model(WORDS).square().mean().backward()
            optimizer.step()
    assert [reading.step for reading in watched.readings] == [0, 2, 4]
    assert training == [True] * 3


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_model_that_is_checkpointed_as_a_whole_is_not_read_in_its_second_run(reentrant):
    model, tokens = massieu.nn.MeasureAttention(8, num_heads=2), torch.randn(1, 5, 8, requires_grad=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with massieu.watch(model, every=1) as watched:
        for _ in range(3):
            torch.utils.checkpoint.checkpoint(model, tokens, use_reentrant=reentrant).square().mean().backward()
            assert sources._OBSERVERS == []
            optimizer.step()
    # The first run of the older kind has no gradients: to a watch of this module it looks like evaluation.
    assert [reading.step for reading in watched.readings] == ([] if reentrant else [0, 1, 2])


def test_an_update_that_leaves_no_version_is_seen_from_the_optimizer():
    class Quiet(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {})

        def step(self):
            for group in self.param_groups:
                for p in group["params"]:
                    p.data = p.data - 0.01 * p.grad

    model = small()
    optimizer = Quiet(model.parameters())
    with massieu.watch(model, every=1) as watched:
        for _ in range(3):
            model(WORDS).square().mean().backward()
            optimizer.step()
    assert [reading.step for reading in watched.readings] == [0, 1, 2]


def test_steps_can_be_counted_by_hand():
    model = small()
    with massieu.watch(model, every=2) as watched:
        for number in range(8):
            model(WORDS)
            if number % 2:
                watched.step()
    assert [reading.step for reading in watched.readings] == [0, 2]


def test_weights_that_never_change_are_mentioned(monkeypatch):
    monkeypatch.setattr(step_counter, "PATIENCE", 3)
    model = small()
    with massieu.watch(model):
        for _ in range(3):
            model(WORDS)
        with logs("have not changed in 3 training passes"):
            model(WORDS)
        model(WORDS)


def test_no_hooks_stay_between_readings():
    model = small()
    hooks = lambda: sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())  # noqa: E731
    counts = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.blocks[0].register_forward_hook(lambda *_: counts.append((hooks(), len(sources._OBSERVERS))))
    with massieu.watch(model, every=2):
        for _ in range(3):
            model(WORDS).square().mean().backward()
            optimizer.step()
            assert (hooks(), len(sources._OBSERVERS)) == (3, 0)
    assert counts[0][1] == counts[2][1] == 1
    assert counts[1] == (3, 0)
    assert hooks() == 1


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.fails = small(), True

    def forward(self, ids):
        found = self.inner(ids)
        if self.fails:
            raise ArithmeticError("a bad batch")
        return found


def test_hooks_are_gone_after_an_exception_inside_the_loop():
    model = Broken()
    with pytest.raises(ArithmeticError, match="a bad batch"), massieu.watch(model, every=1) as watched:
        model(WORDS)
    assert watched.readings == []
    assert sources._OBSERVERS == []
    assert torch._C._len_torch_function_stack() == 0
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    massieu.watch(model).close()


def test_a_loop_that_goes_on_after_a_bad_batch_is_read_again():
    model = Broken()
    with massieu.watch(model, every=1) as watched:
        with pytest.raises(ArithmeticError):
            model(WORDS)
        model.fails = False
        model.eval()(WORDS)  # the pass that did not end is not completed by another
        model.train()
        assert watched.readings == sources._OBSERVERS == []
        watched.step()
        model(WORDS)
    assert [reading.step for reading in watched.readings] == [1]


def test_a_log_gets_every_reading_and_history_is_a_table():
    seen, more = [], []
    watched = loop(small(), 4, every=2, log=[seen.append, more.append], heads=True)
    assert seen == more == watched.readings
    table = watched.history
    assert table.index.tolist() == [0, 2]
    assert table.loc[2, "entropy/layer01/head03"] == seen[1].heads["entropy"][1, 3]


def test_a_reading_survives_a_line_of_json():
    reading = loop(small(), 1, every=1).readings[0]
    again = Reading.from_dict(json.loads(json.dumps(reading.to_dict(), allow_nan=False)))
    assert (again.step, again.places, again.flags) == (reading.step, reading.places, reading.flags)
    for own, other in ((reading.heads, again.heads), (reading.layers, again.layers)):
        assert own.keys() == other.keys()
        assert all(torch.equal(own[name].nan_to_num(7), other[name].nan_to_num(7)) for name in own)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_numbers_that_json_has_not_survive_too(value):
    place = massieu.monitor.Place("decoder", 0, "attention", 1)
    flag = massieu.monitor.Flag("logit growth", "decoder", 0, 0, value, 1.0, "because", "me")
    reading = Reading(0, (place,), {"score_max": torch.tensor([[value]])}, {}, (flag,))
    again = Reading.from_dict(json.loads(json.dumps(reading.to_dict(), allow_nan=False)))
    for own in (again.heads["score_max"].item(), again.flags[0].value):
        assert own == value or (math.isnan(own) and math.isnan(value))


def test_a_line_of_something_else_is_refused():
    with pytest.raises(UserError):
        Reading.from_dict({"step": 1})


@pytest.mark.parametrize("every", [0, -1, 1.5, True, "often"])
def test_every_is_a_positive_whole_number(every):
    with pytest.raises(UserError):
        massieu.watch(small(), every=every)


def test_a_run_that_is_continued_keeps_its_numbers(tmp_path):
    path = tmp_path / "run.jsonl"
    loop(small(), 3, every=2, log=path)
    loop(small(), 3, every=2, log=str(path), start=3)
    lines = [Reading.from_dict(json.loads(line)) for line in path.read_text().splitlines()]
    assert [reading.step for reading in lines] == [0, 2, 4]


def test_the_watch_has_the_number_of_the_step():
    model = small()
    with massieu.watch(model, every=10, start=7) as watched:
        assert watched.number == 6
        for _ in range(3):
            model(WORDS)
            watched.step()
        assert watched.number == 9


@pytest.mark.parametrize("start", [-1, 0.5, True])
def test_start_is_a_number_of_a_step(start):
    with pytest.raises(UserError):
        massieu.watch(small(), start=start)


def test_the_model_is_a_module():
    with pytest.raises(UserError, match="model"):
        massieu.watch("gpt2")


def test_a_model_is_watched_once():
    model = small()
    with massieu.watch(model), pytest.raises(UserError, match="watched already"):
        massieu.watch(model)
    massieu.watch(model).close()


@pytest.mark.parametrize("names", [("entropy", "entropie"), (), "entropie", 3, None, [["entropy"]]])
def test_quantities_have_names(names):
    with pytest.raises(UserError, match="quantities"):
        massieu.watch(small(), quantities=names)


def test_a_model_without_attention_says_so_at_its_first_pass():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with pytest.raises(NotObservable, match="no attention in Sequential"), massieu.watch(model):
        model(torch.randn(2, 4))
    assert not model._forward_hooks


def test_the_page_names_every_quantity_and_every_flag():
    names = [*massieu.monitor.WATCHED, *(rule.name for rule in massieu.monitor.RULES)]
    assert [name for name in names if f"`{name}`" not in PAGE] == []
    for rule in massieu.monitor.RULES:
        (row,) = (line for line in PAGE.splitlines() if line.startswith(f"| `{rule.name}`"))
        assert f"{rule.threshold:g} | {rule.back:g} |" in row
