"""A watch around evaluation and generation: it reads them on request, and says so where it does not."""

from __future__ import annotations

import pytest
import torch
from monitor.expected_messages import logs
from torch import nn
from torch.testing import assert_close

import massieu

transformers = pytest.importorskip("transformers")
WORDS = torch.tensor([[3, 1, 4, 1, 5]])
NEW = 4


def tiny() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=32, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=None
    )
    return transformers.GPT2LMHeadModel(config).eval()


def generate(model, **options):
    mask = torch.ones_like(WORDS)
    return model.generate(
        WORDS, attention_mask=mask, max_new_tokens=NEW, do_sample=False, pad_token_id=0, use_cache=True, **options
    )


@pytest.mark.parametrize("closing", [True, False])
def test_a_watch_around_generate_says_once_that_nothing_was_read_and_how_to_read_it(closing):
    model = tiny()
    sentence = (
        rf"^nothing was read in {2 * NEW} passes of GPT2LMHeadModel, which were evaluation or generation;"
        r" massieu.watch\(model, every=1, training=False\) reads every pass$"
    )
    with logs(sentence if closing else "") as said:
        watched = massieu.watch(model)
        generate(model)
        generate(model)
        assert "no reading yet" in repr(watched)
        assert f"{2 * NEW} passes of evaluation or generation not read" in repr(watched)
        if closing:
            watched.close()
            watched.close()
    assert len(said) == closing
    watched.close()


def test_evaluation_beside_training_is_not_mentioned():
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with logs() as _, massieu.watch(model, every=1, console=False) as watched:
        generate(model)
        model.train()
        for _ in range(2):
            model(WORDS, labels=WORDS).loss.backward()
            optimizer.step()
        model.eval()
        generate(model)
    assert [reading.step for reading in watched.readings] == [0, 1]


def test_every_token_of_generate_is_read_on_request_and_nothing_else_changes():
    model = tiny()
    before = generate(model)
    with massieu.watch(model, every=1, training=False) as watched:
        after = generate(model)
    assert torch.equal(before, after)
    assert [reading.step for reading in watched.readings] == list(range(NEW))

    # The attention of the whole text, by the model's own function without a cache.
    model.set_attn_implementation("eager")
    weights = model(before[:, :-1], output_attentions=True).attentions
    entropy = [torch.special.entr(layer[0]).sum(-1) for layer in weights]  # (heads, queries)
    for reading in watched.readings:
        first = 0 if reading.step == 0 else WORDS.shape[1] + reading.step - 1
        rows = slice(first, WORDS.shape[1] + reading.step)
        expected = torch.stack([layer[:, rows].mean(-1) for layer in entropy])
        assert_close(reading.heads["entropy"].float(), expected, rtol=0, atol=1e-5)


def test_flags_of_training_are_not_raised_by_generation():
    model = tiny()
    for block in model.transformer.h:  # heads look at single tokens
        block.attn.c_attn.weight.data.mul_(300)
    with massieu.watch(model, every=1, training=False) as watched:
        generate(model)
    assert [flag.name for reading in watched.readings for flag in reading.flags] == []
    with massieu.watch(model, every=1, training=False, rules=list(massieu.monitor.RULES), console=False) as watched:
        generate(model)
    assert {flag.name for reading in watched.readings for flag in reading.flags} >= {"entropy collapse"}


def test_generation_that_is_not_finite_is_flagged(capsys):
    model = tiny()
    nn.init.constant_(model.transformer.h[1].attn.c_attn.weight, torch.nan)
    with massieu.watch(model, every=1, training=False) as watched:
        model(WORDS)
    assert {flag.name for flag in watched.flags} == {"not finite"}
    assert "massieu: step 0: not finite in layer01 (heads 0, 1)" in capsys.readouterr().err


def test_evaluation_is_read_on_request_in_either_mode():
    model = tiny()
    with massieu.watch(model, every=2, training=False) as watched:
        with torch.no_grad():
            model(WORDS)
            model(WORDS)
        model.train()
        model(WORDS)
    assert [reading.step for reading in watched.readings] == [0, 2]
    assert "update_ratio" not in watched.readings[0].layers
