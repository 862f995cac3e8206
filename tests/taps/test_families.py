"""Every family is observed completely, unchanged, and with its own weights."""

import pytest
import torch
from taps.families import BATCH, BYPASSING, NAMES, PADDED, PLAIN, SHORT, TABLE, TOKENS, build
from taps.weights import output, own_weights, prediction, rows, weights
from torch.testing import assert_close

from massieu.taps import tap

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # DeBERTa, when it is imported

CASES = [(name, padding) for name in NAMES for padding in (("none", "right", "left") if name in PADDED else ("none",))]


@pytest.fixture(autouse=True)
def _without_the_fast_path():
    # Its last digits differ, and taps turn it off.
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(enabled)


def observe(model, inputs):
    calls = []
    with torch.no_grad(), tap(model, calls.append) as found:
        result = prediction(model(**inputs))
    return calls, found, result


@pytest.mark.parametrize(("name", "padding"), CASES)
def test_every_call_is_heard_and_nothing_changes(name, padding):
    model, inputs = build(name, padding=padding)
    with torch.no_grad():
        before = prediction(model(**inputs))
    calls, found, result = observe(model, inputs)
    assert torch.equal(result, before)
    assert list(found.observed) == [name for name in found.expected if name in found.observed]
    assert found.missing == found.idle == []
    layers = 6 if name in ("t5", "bart", "marian", "whisper", "torch_transformer") else 1 if name == "multihead" else 2
    assert len(calls) == layers
    assert set(found.bypassed) == (set(found.observed) if name in (*BYPASSING, *PLAIN[2:]) else set())
    modules = dict(model.named_modules())
    assert all(call.module is modules.get(call.name, model) for call in calls)
    assert len({(call.stack, call.layer) for call in calls}) == layers
    with torch.no_grad():
        assert torch.equal(prediction(model(**inputs)), before)
    assert len(calls) == layers


def compare(calls, own):
    """How many calls have the weights that the model tells."""
    compared = 0
    for call in calls:
        expected = own.get((call.stack, call.layer), own.get(("", call.layer)))
        if expected is not None:
            assert_close(rows(weights(call), call), rows(expected.double(), call), rtol=0, atol=1e-5)
            compared += 1
    return compared


# With ALiBi, eager Falcon adds the bias twice (transformers 5.22): it agrees with itself, in the next test, only.
@pytest.mark.parametrize(("name", "padding"), [(n, p) for n, p in CASES if n in TABLE and n != "falcon_alibi"])
def test_the_weights_are_those_of_the_eager_model(name, padding):
    model, inputs = build(name, padding=padding)
    eager, _ = build(name, padding=padding, attn_implementation="eager")
    eager.load_state_dict(model.state_dict())
    own = own_weights(eager, inputs)
    calls, _, _ = observe(model, inputs)
    assert compare(calls, own) == len(own) == len(calls) - (name == "swinv2")


@pytest.mark.parametrize(("name", "padding"), [(n, p) for n, p in CASES if n in TABLE])
def test_an_eager_model_is_heard_through_its_own_function(name, padding):
    model, inputs = build(name, padding=padding, attn_implementation="eager")
    own = own_weights(model, inputs)
    calls, found, _ = observe(model, inputs)
    assert (found.bypassed == {}) == (name not in BYPASSING)
    assert compare(calls, own) == len(own) == len(calls) - (name == "swinv2")


@pytest.mark.parametrize(("name", "padding"), CASES)
def test_weights_times_values_are_the_output(name, padding):
    calls, _, _ = observe(*build(name, padding=padding))
    for call in calls:
        assert (call.output is None) == (call.query is None)
        if call.output is not None:
            assert call.output.shape[:3] == call.query.shape[:3]
            assert_close(rows(output(call), call), rows(call.output.double(), call), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("name", PADDED)
def test_padded_queries_are_not_present(name, padding):
    calls, _, _ = observe(*build(name, padding=padding))
    for call in calls:
        tokens = [7, 5] if call.stack != "encoder" and TABLE[name][3] == "pairs" else [TOKENS, SHORT]
        assert call.present.sum(1).tolist() == tokens
        assert bool(call.present[1, -1]) == (padding == "left" and tokens[0] == TOKENS)


@pytest.mark.parametrize("name", ["gpt2", "bert", "mistral", "gemma2", "modernbert"])
@pytest.mark.parametrize("padding", ["none", "right", "left"])
def test_masks_are_said_in_words(name, padding):
    model, inputs = build(name, padding=padding)
    calls, _, _ = observe(model, inputs)
    for call in calls:
        assert call.causal == (call.stack == "decoder")
        assert (call.log_weight is None) if padding == "none" else (call.log_weight.shape == (BATCH, 1, 1, TOKENS))
    windows = {"mistral": [8, 8], "gemma2": [8, None], "modernbert": [None, 5]}.get(name, [None, None])
    assert [call.window for call in calls] == windows


def test_what_is_special_arrives():
    calls, _, _ = observe(*build("gemma2"))
    assert calls[0].softcap == 2.0
    calls, _, _ = observe(*build("gpt_oss"))
    assert calls[0].sink.shape == (4,)
    calls, _, _ = observe(*build("deepseek_v3"))
    assert (calls[0].key.shape[-1], calls[0].value.shape[-1]) == (12, 6)
    calls, _, _ = observe(*build("llama"))
    assert (calls[0].query.shape[1], calls[0].key.shape[1]) == (4, 2)
    calls, _, _ = observe(*build("opt"))
    assert calls[0].scale == 1.0
