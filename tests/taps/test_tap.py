"""What a tap promises about any model: names, numbers, and that everything is as before."""

import contextlib
import subprocess
import sys
import threading

import pytest
import torch
from taps.families import build, words
from taps.weights import output, rows, weights
from torch import nn
from torch.nn import functional
from torch.testing import assert_close

from massieu import statistics
from massieu.nn import Transformer
from massieu.taps import tap
from massieu.taps.sources import without_fast_path


def ignore(call):
    return None


def places():
    """Everything that a tap changes while it is open."""
    found = [statistics.attend, torch.backends.mha.get_fastpath_enabled(), torch._C._len_torch_function_stack()]
    found.append(getattr(sys.modules.get("torch._dynamo.eval_frame"), "_stance", None))
    interface = getattr(sys.modules.get("transformers.modeling_utils"), "AttentionInterface", None)
    if interface is not None:
        found += [dict(interface._global_mapping), interface.get_interface]
    return found


def hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


class Attention(nn.Module):
    """Written as in a tutorial."""

    def __init__(self, how, dim=16, heads=4):
        super().__init__()
        self.how, self.num_heads = how, heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        query, key, value = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        if self.how == "sdpa":
            heads = functional.scaled_dot_product_attention(query, key, value)
        else:
            heads = self.softmax(query @ key.mT / 2) @ value
        return self.out(heads.transpose(1, 2).flatten(2))

    def softmax(self, scores):
        if self.how == "merged":
            return torch.softmax(scores.flatten(0, 1), -1).view_as(scores)
        return {
            "torch": lambda: torch.softmax(scores, -1),
            "method": lambda: scores.softmax(-1),
            "functional": lambda: functional.softmax(scores, dim=-1),
            "module": lambda: nn.Softmax(-1)(scores),
        }[self.how]()


class Block(nn.Module):
    """Attention, and a router with a softmax of its own."""

    def __init__(self, attention):
        super().__init__()
        self.attention, self.router = attention, nn.Linear(16, 3)

    def forward(self, x):
        share = torch.softmax(self.router(x), -1)
        wide = functional.softmax(self.router(x)[:, None], -1).sum(1)
        return x + self.attention(x) * (share + wide).amax(-1, keepdim=True)


def model_of(*hows):
    torch.manual_seed(0)
    return nn.Sequential(*(Block(Attention(how)) for how in hows)).eval()


@pytest.mark.parametrize("how", ["sdpa", "torch", "method", "functional", "module", "merged"])
def test_a_plain_model_is_heard_and_its_router_is_not(how):
    model, x, calls = model_of(how, how), torch.randn(2, 5, 16), []
    before = model(x)
    with tap(model, calls.append) as found:
        assert torch.equal(model(x), before)
    assert [call.name for call in calls] == ["0.attention", "1.attention"]
    assert found.observed == {"0.attention": 1, "1.attention": 1}
    assert found.sentence == "observed 2 of 2 attention modules"
    assert weights(calls[0]).shape == (2, 4, 5, 5)


def test_sdpa_is_heard_wherever_it_is_called():
    class Mixer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(16, 16)

        def forward(self, x):
            return functional.scaled_dot_product_attention(x, self.inner(x), x)

    model, calls = nn.Sequential(Mixer(), Mixer()), []
    with tap(model, calls.append) as found:
        model(torch.randn(2, 5, 16))
    assert [(call.name, call.layer) for call in calls] == [("0", 0), ("1", 1)]
    assert found.expected == ["0", "1"]


def test_what_is_not_understood_is_missing():
    class OddAttention(Attention):
        def softmax(self, scores):
            return torch.softmax(scores.unsqueeze(-1), -2).squeeze(-1)

    model = nn.Sequential(Block(Attention("torch")), Block(OddAttention("odd")))
    with tap(model, ignore) as found:
        model(torch.randn(2, 5, 16))
    assert found.missing == ["1.attention"]
    assert found.idle == []
    assert found.sentence == "observed 1 of 2 attention modules"


def test_linear_attention_is_said_to_have_no_softmax():
    model = Transformer(16, 2, 4, vocabulary=60, attention=["free", "linear"])
    with tap(model, ignore) as found:
        model(words())
    assert found.missing == []
    assert found.sentence == "observed 1 of 2 attention modules; blocks.1.attention without softmax"


def test_lengths_tell_which_queries_are_tokens():
    model, calls = Transformer(16, 2, 4, vocabulary=60), []
    with tap(model, calls.append):
        model(words(6), lengths=torch.tensor([6, 4]))
    assert calls[0].present.sum(1).tolist() == [6, 4]
    assert_close(rows(output(calls[0]), calls[0]), rows(calls[0].output.double(), calls[0]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_multihead_attention_of_torch(need_weights, batch_first):
    torch.manual_seed(0)
    model, calls = nn.MultiheadAttention(16, 4, batch_first=batch_first).eval(), []
    x = torch.randn(2, 5, 16)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    tokens = x if batch_first else x.transpose(0, 1)
    with torch.no_grad(), tap(model, calls.append):
        model(tokens, tokens, tokens, key_padding_mask=padding, need_weights=need_weights)
    with torch.no_grad():
        own = model(tokens, tokens, tokens, key_padding_mask=padding, average_attn_weights=False)[1]
    (call,) = calls
    assert (call.name, call.stack) == ("MultiheadAttention", "encoder")
    assert torch.equal(call.present, ~padding)
    assert_close(rows(weights(call), call), rows(own.double(), call), rtol=0, atol=1e-6)


def test_multihead_attention_to_others_is_cross():
    model, calls = nn.MultiheadAttention(16, 4, batch_first=True), []
    with tap(model, calls.append):
        memory = torch.randn(2, 7, 16)
        model(torch.randn(2, 5, 16), memory, memory)
    assert calls[0].stack == "cross"


def test_the_fast_path_of_torch_is_off_until_the_last_of_overlapping_blocks_ends():
    before = torch.backends.mha.get_fastpath_enabled()
    for first_out in (True, False):
        with contextlib.ExitStack() as other, contextlib.ExitStack() as own:
            other.enter_context(without_fast_path())  # as an inspection in another thread does
            own.enter_context(tap(torch.nn.Linear(2, 2), print))
            (other if first_out else own).close()
            assert not torch.backends.mha.get_fastpath_enabled()
        assert torch.backends.mha.get_fastpath_enabled() == before


@pytest.mark.parametrize("grad", [True, False])
def test_the_fast_path_of_torch_is_off_only_inside(grad):
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    model, x, calls = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval(), torch.randn(2, 5, 16), []
    assert torch.backends.mha.get_fastpath_enabled()
    with torch.set_grad_enabled(grad):
        before = model(x)
        with tap(model, calls.append):
            assert not torch.backends.mha.get_fastpath_enabled()
            assert_close(model(x), before, rtol=0, atol=1e-6)
    assert len(calls) == 2
    assert torch.backends.mha.get_fastpath_enabled()


def test_numbers_start_again_in_every_pass():
    model, calls = build("massieu_shared")[0], []
    with tap(model, calls.append) as found:
        model(words())
        model(words())
    assert [(call.layer, call.number) for call in calls] == [(0, 0), (1, 1)] * 2
    assert found.observed == {"blocks.0.attention": 4}


def test_layers_keep_their_number_if_the_first_pass_leaves_some_out():
    model, calls = model_of("torch", "sdpa", "torch"), []
    with tap(model, calls.append):
        model[2](torch.randn(2, 5, 16))
        model(torch.randn(2, 5, 16))
    assert [call.layer for call in calls] == [2, 0, 1, 2]


@pytest.mark.parametrize("name", ["llama", "gemma2", "bloom", "massieu", "torch_encoder"])
@pytest.mark.parametrize("where", ["receiver", "model", "block"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_everything_is_restored_after_an_exception(name, where, error):
    if name in ("llama", "gemma2", "bloom"):
        pytest.importorskip("transformers")
    model, inputs = build(name)
    before, forwards = places(), hooks(model)

    def fail(*args):
        raise error("on purpose")

    if where == "model":
        deepest = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
        deepest.register_forward_pre_hook(fail)
        forwards += 1

    def run():
        with tap(model, fail if where == "receiver" else ignore):
            assert places() != before
            model(**inputs)
            fail()

    with pytest.raises(error, match="on purpose"):
        run()
    assert places() == before
    assert hooks(model) == forwards


def test_an_interrupted_pass_does_not_count():
    model, x, calls = model_of("sdpa", "torch"), torch.randn(2, 5, 16), []

    def receive(call):
        calls.append(call)
        if len(calls) == 2:
            raise KeyboardInterrupt

    with tap(model, receive):
        with pytest.raises(KeyboardInterrupt):
            model(x)
        model(x)
    assert [(call.name, call.number) for call in calls] == [("0.attention", 0), ("1.attention", 0)] * 2
    assert torch._C._len_torch_function_stack() == 0


def test_taps_may_be_nested_and_close_in_any_order():
    model, x, before = model_of("sdpa", "torch"), torch.randn(2, 5, 16), places()
    first, second = [], []
    one, two = tap(model, first.append), tap(model, second.append)
    one.__enter__()
    two.__enter__()
    model(x)
    one.__exit__(None, None, None)
    assert places() != before
    model(x)
    two.__exit__(None, None, None)
    model(x)
    assert (len(first), len(second)) == (2, 4)
    assert places() == before


def test_taps_hear_only_their_own_model():
    pytest.importorskip("transformers")
    (one, inputs), (two, _), calls = build("llama"), build("llama", seed=1), []
    with torch.no_grad(), tap(one, calls.append):
        two(**inputs)
        assert calls == []
        one(**inputs)
    assert len(calls) == 2


def test_taps_in_threads_do_not_mix():
    models, counts = [model_of("sdpa", "torch", "merged") for _ in range(4)], [0] * 4
    before = places()

    def work(index):
        def receive(call):
            assert call.number == 0
            counts[index] += 1

        for _ in range(5):
            with tap(models[index], receive):
                models[index](torch.randn(2, 5, 16))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == [15] * 4
    assert places() == before


def test_receivers_may_use_attention_themselves():
    model, calls = Transformer(16, 2, 4, vocabulary=60), []

    def receive(call):
        statistics.attend(call.query, call.key, call.value)
        torch.softmax(torch.randn(2, 4, 3, 3), -1)
        calls.append(call)

    with tap(model, receive):
        model(words())
    assert len(calls) == 2


def test_the_eager_function_is_the_one_that_the_caller_names():
    modeling = pytest.importorskip("transformers.modeling_utils", reason="it needs Python 3.11")
    interface, before = modeling.AttentionInterface(), places()

    def own(module, *args, **kwargs):
        return "own"

    with tap(nn.Linear(2, 2), ignore):
        found = interface.get_interface("eager", own)
        assert found is not own
        assert found.__wrapped__ is own
    assert "eager" not in interface
    assert interface.get_interface("eager", own) is own
    assert places() == before


def test_a_function_registered_inside_stays():
    modeling = pytest.importorskip("transformers.modeling_utils", reason="it needs Python 3.11")
    mapping = modeling.AttentionInterface._global_mapping
    own = mapping["sdpa"]
    try:
        with tap(nn.Linear(2, 2), ignore):
            modeling.AttentionInterface.register("sdpa", ignore)
        assert mapping["sdpa"] is ignore
    finally:
        mapping["sdpa"] = own


def test_plain_models_do_not_need_transformers():
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "import torch; from torch import nn; from massieu.taps import tap\n"
        "model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2).eval()\n"
        "with torch.no_grad(), tap(model, print) as found: model(torch.randn(2, 5, 16))\n"
        "assert found.sentence == 'observed 2 of 2 attention modules', found"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, stdout=subprocess.DEVNULL)
