"""Calls are observed in every way in which models run, and leave the model unchanged."""

import pytest
import torch
from taps.families import BATCH, build, mask, words
from taps.weights import output, rows
from torch.testing import assert_close

from massieu.taps import tap
from massieu.taps.call_statistics import call_statistics

pytest.importorskip("transformers")


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", ["llama", "bloom", "gemma2", "massieu"])
def test_any_grad_mode(name, mode):
    model, inputs = build(name)
    calls = []
    with mode(), tap(model, lambda call: calls.append((call, torch.is_grad_enabled()))) as found:
        model(**inputs)
    assert found.missing == []
    if name != "bloom":
        assert calls[0][0].query.requires_grad == (mode is torch.enable_grad)
    assert not any(enabled for _, enabled in calls)


@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_a_receiver_that_asks_for_gradients_gets_those_of_the_written_out_attention(name):
    model, inputs = build(name, attn_implementation="eager")
    model = model.double()
    found = []
    with tap(model, lambda call: found.append(call_statistics(call).entropy.sum()), gradients=True):
        weights = model(**inputs, output_attentions=True).attentions
    expected = sum(torch.special.entr(weight[weight > 0]).sum() for weight in weights)
    parameters = [parameter for key, parameter in model.named_parameters() if ".0." in key and parameter.dim() == 2]
    pairs = zip(
        torch.autograd.grad(sum(found), parameters, retain_graph=True, allow_unused=True),
        torch.autograd.grad(expected, parameters, allow_unused=True),
        strict=True,
    )
    own, other = zip(*((a, b) for a, b in pairs if b is not None), strict=True)
    assert any(gradient.abs().max() > 1e-6 for gradient in other)
    assert_close(own, other, rtol=1e-4, atol=1e-6)  # these families compute softmax in float32


@pytest.mark.parametrize("reentrant", [True, False, None])
def test_a_receiver_that_asks_for_gradients_gets_none_where_the_model_has_none(reentrant):
    model, inputs = build("llama")
    model.train().enable_input_require_grads()
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    found = []
    with tap(model, lambda call: found.append((torch.is_grad_enabled(), call.query.requires_grad)), gradients=True):
        model(**inputs)
        assert found == [(not reentrant, not reentrant)] * 2
        model.gradient_checkpointing_disable()
        with torch.no_grad():
            model(**inputs)
    assert found[2:] == [(False, False)] * 2


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "gemma3", "gptj", "bloom", "t5"])
def test_generation_with_a_cache(name, cache):
    if cache == "static" and name in ("gptj", "bloom"):
        pytest.skip("this family has no static cache")
    model, _ = build(name)
    inputs = {"input_ids": words(12), "attention_mask": mask("left", 12, 8)}
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    if cache == "static":
        options["cache_implementation"] = "static"
    before = model.generate(**inputs, **options)
    seen = []

    def receive(call):
        present = None if call.present is None else call.present.sum(1).tolist()
        if call.output is not None:
            assert_close(rows(output(call), call), rows(call.output.double(), call), rtol=1e-5, atol=1e-5)
        queries = (call.query if call.scores is None else call.scores).shape[2]
        seen.append((call.stack, call.layer, call.number, queries, present))

    with tap(model, receive) as found:
        assert torch.equal(model.generate(**inputs, **options), before)
    assert found.missing == []
    prompt = "encoder" if name == "t5" else "decoder"
    assert seen[:2] == [(prompt, 0, 0, 12, [12, 8]), (prompt, 1, 0, 12, [12, 8])]
    steps = [row for row in seen[2:] if row[0] == "decoder"]
    assert [row[1] for row in steps] == [0, 1] * (len(steps) // 2)
    assert all(row[3] == 1 and row[2] == 0 and row[4] in ([1, 1], None) for row in steps)
    assert len(steps) == (12 if name == "t5" else 10)


def test_a_continuation_has_the_weights_of_the_whole():
    model, inputs = build("llama")
    with torch.no_grad():
        whole, parts = [], []
        with tap(model, whole.append):
            model(**inputs)
        with tap(model, parts.append):
            first = model(inputs["input_ids"][:, :16], use_cache=True)
            model(inputs["input_ids"][:, 16:], past_key_values=first.past_key_values)
    for all_, late in zip(whole, parts[2:], strict=True):
        assert late.causal
        assert late.number == 0
        assert_close(output(late), output(all_)[:, :, 16:], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gptj", "massieu"])
def test_a_compiled_model(name):
    model, inputs = build(name, **({} if name == "massieu" else {"use_cache": False}))
    compiled = torch.compile(model, backend="eager", fullgraph=name == "llama")
    calls = []
    with torch.no_grad():
        compiled(**inputs)
        with tap(compiled, calls.append) as found:
            compiled(**inputs)
        assert found.missing == []
        assert found.notes == ["the model is compiled; inside the tap it runs uncompiled: every call can be observed"]
        assert [call.layer for call in calls] == [0, 1]
        assert "_orig_mod" not in calls[0].name
        compiled(**inputs)
    assert len(calls) == 2
    torch.compiler.reset()


@pytest.mark.parametrize("stance", ["force_eager", "default"])
def test_a_compiled_function_around_a_model(stance):
    model, inputs = build("llama" if stance == "default" else "gemma2", padding="left", use_cache=False)
    step = torch.compile(lambda: model(**inputs).logits, backend="eager")
    calls = []
    with torch.no_grad():
        before = model(**inputs).logits
        step()
        with tap(model, calls.append) as found, torch.compiler.set_stance(stance):
            assert torch.equal(step(), before)
            assert torch.equal(step(), before)
        assert found.missing == []
        assert [(call.layer, call.number) for call in calls] == [(0, 0), (1, 0)] * 2
        assert torch.equal(step(), before)
    assert len(calls) == 4
    torch.compiler.reset()


def test_a_model_that_compiled_itself():
    model, inputs = build("gpt2", use_cache=False)
    model.compile(backend="eager")
    with torch.no_grad():
        model(**inputs)
        with tap(model, lambda call: None) as found:
            model(**inputs)
    assert found.missing == []
    assert found.compiled
    torch.compiler.reset()


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_checkpointed_layers_are_heard_once(name, reentrant):
    model, inputs = build(name)
    model.train()
    model(**inputs, labels=inputs["input_ids"]).loss.backward()
    before = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    calls = []
    with tap(model, calls.append):
        model(**inputs, labels=inputs["input_ids"]).loss.backward()
    assert [(call.layer, call.number) for call in calls] == [(0, 0), (1, 0)]
    for parameter, gradient in zip(model.parameters(), before, strict=True):
        assert_close(parameter.grad, gradient)
    assert torch._C._len_torch_function_stack() == 0


@pytest.mark.parametrize("name", ["llama", "gemma2", "bloom", "bert"])
def test_bfloat16(name):
    model, inputs = build(name, padding="right")
    model, calls = model.bfloat16(), []
    with torch.no_grad(), tap(model, calls.append) as found:
        model(**inputs)
    assert found.missing == []
    for call in calls:
        if call.output is not None:
            assert call.query.dtype == torch.bfloat16
            # Eight bits of mantissa in the weights and the values.
            assert_close(rows(output(call), call), rows(call.output.double(), call), rtol=0.02, atol=0.05)
        else:
            assert bool((call.scores == -torch.inf).any())


def test_receivers_compute_without_autocast():
    model, inputs = build("llama")
    kinds = []

    def receive(call):
        kinds.append((torch.eye(2) @ torch.eye(2)).dtype)

    with torch.autocast("cpu", torch.bfloat16), tap(model, receive):
        model(**inputs)
    assert kinds == [torch.float32, torch.float32]


@pytest.mark.parametrize("padding", ["right", "left"])
def test_masks_may_come_by_position(padding):
    model, inputs = build("bert", padding=padding)
    calls = []
    with torch.no_grad(), tap(model, calls.append):
        model(inputs["input_ids"], inputs["attention_mask"])
    assert all(torch.equal(call.present, inputs["attention_mask"].bool()) for call in calls)


def test_a_decoder_without_a_mask_does_not_take_that_of_the_encoder():
    model, inputs = build("bart")
    inputs = {"input_ids": words(), "decoder_input_ids": words(seed=2), "attention_mask": mask("right")}
    calls = []
    with torch.no_grad(), tap(model, calls.append):
        model(**inputs)
    assert [call.present is None for call in calls] == [False, False, True, True, True, True]
    assert calls[0].present.shape == (BATCH, 24)


def test_a_part_that_did_not_run_is_said_to_be_idle():
    model, inputs = build("t5")
    with torch.no_grad(), tap(model, lambda call: None) as found:
        model.encoder(inputs["input_ids"])
    assert found.sentence == "observed 2 of 6 attention modules; 4 did not run"
    assert len(found.idle) == len(found.missing) == 4
