"""Transformers: with and without a cache, as encoders and decoders, compiled and not."""

from __future__ import annotations

import copy

import pytest
import torch
from draws import generator, randn
from torch import Tensor
from torch.testing import assert_close

from massieu import statistics
from massieu.checks import UserError
from massieu.nn import LinearAttention, MeasureAttention, Transformer
from massieu.nn.sampling import draw


def words(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(50, shape, generator=generator(seed))


def build(num_layers: int = 2, **options) -> Transformer:
    """A small language model in float64 whose weights are large enough to matter."""
    options = {"vocabulary": 50, "dtype": torch.float64, "generator": generator(1), **options}
    model = Transformer(16, num_layers, 4, **options)
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            parameter.add_(0.3 * randn(*parameter.shape, seed=seed))
    return model.eval()


DECODERS = {
    "rotary": {},
    "learned": {"positions": "learned", "max_length": 30},
    "no positions": {"positions": None, "norm": None},
    "rms, swiglu, grouped": {"norm": "rms", "activation": "swiglu", "num_key_heads": 2, "bias": False},
    "post-norm": {"pre_norm": False, "tie_embedding": False},
    "window": {"window": 3},
    "tied": {"attention": "tied"},
    "source": {"attention": "source", "positions": None},
    "linear": {"attention": "linear", "norm": "rms"},
    "mixed": {"attention": ["linear", "source"]},
    "shared": {"shared_layers": True, "num_layers": 3},
}


@pytest.fixture(params=DECODERS.values(), ids=list(DECODERS))
def decoder(request):
    return build(**request.param)


@torch.no_grad()
def test_decoding_step_by_step_equals_the_whole_forward(decoder):
    tokens = words(2, 12)
    whole = decoder(tokens)
    cache = decoder.new_cache()
    parts = [decoder(tokens[:, a:b], cache=cache) for a, b in [(0, 5), *((i, i + 1) for i in range(5, 10)), (10, 12)]]
    assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-10)
    single, cache = copy.deepcopy(decoder).float(), decoder.new_cache(4)
    parts = [single(tokens[:, i : i + 1], cache=cache) for i in range(12)]
    assert_close(torch.cat(parts, 1), single(tokens), rtol=0, atol=1e-5 * float(whole.abs().max()))


@torch.no_grad()
def test_later_words_do_not_change_earlier_logits(decoder):
    tokens = words(2, 12)
    changed = tokens.clone()
    changed[:, 8:] = (changed[:, 8:] + 1) % 50
    before, after = decoder(tokens), decoder(changed)
    assert_close(before[:, :8], after[:, :8], rtol=0, atol=1e-12)
    assert float((before[:, 8:] - after[:, 8:]).abs().min(-1).values.max()) > 0
    encoder = build(causal=False)
    assert float((encoder(tokens) - encoder(changed))[:, :8].abs().max()) > 1e-3


@torch.no_grad()
def test_greedy_words_are_the_most_likely_ones(decoder):
    prompt = words(3, 4)
    found = decoder.generate(prompt, 8, temperature=0)
    assert torch.equal(found[:, :4], prompt)
    assert torch.equal(found[:, 4:], decoder(found).argmax(-1)[:, 3:-1])


@torch.no_grad()
def test_words_are_drawn_with_the_probabilities_of_the_logits():
    model = build(1)
    prompt = words(1, 3).expand(20000, 3)
    found = model.generate(prompt, 1, temperature=2.0, generator=generator())[:, -1]
    expected = torch.softmax(model(prompt[:1])[0, -1] / 2, -1)
    share = torch.bincount(found, minlength=50) / 20000
    # Five standard errors of a share.
    assert bool(((share - expected).abs() <= 5 * (expected / 20000).sqrt() + 1e-4).all())
    again = model.generate(prompt, 1, temperature=2.0, generator=generator())[:, -1]
    assert torch.equal(found, again)


def test_top_k_leaves_only_the_most_likely_words():
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0]]).expand(500, 4)
    assert set(draw(logits, 5.0, 2, generator()).tolist()) == {1, 2}
    assert set(draw(logits, 5.0, 9, generator()).tolist()) == {0, 1, 2, 3}


def test_nothing_is_generated_for_no_words():
    assert torch.equal(build().generate(words(2, 3), 0), words(2, 3))


def test_vectors_go_in_and_out():
    model = Transformer(16, 2, 4, input_dim=3, output_dim=2, causal=False, dtype=torch.float64)
    assert model(randn(2, 5, 3)).shape == (2, 5, 2)
    bare = Transformer(16, 2, 4, dtype=torch.float64)
    assert bare(randn(2, 5, 16)).shape == (2, 5, 16)
    assert not any(name.startswith(("embedding", "head")) for name in bare.state_dict())
    classes = Transformer(16, 2, 4, vocabulary=50, output_dim=7)
    assert classes(words(2, 5)).shape == (2, 5, 7)


@pytest.mark.parametrize("options", [{"norm": "zca"}, {"norm": "layer", "positions": None}, {"pre_norm": False}])
def test_padding_does_not_change_an_encoder(options):
    model = build(causal=False, **options)
    tokens = words(2, 12)
    found = model(tokens, lengths=torch.tensor([12, 7]))
    assert_close(found[0], model(tokens[:1])[0], rtol=0, atol=1e-9)
    assert_close(found[1, :7], model(tokens[1:, :7])[0], rtol=0, atol=1e-9)


def test_an_encoder_without_positions_does_not_know_the_order():
    tokens, order = words(1, 9), torch.randperm(9, generator=generator())
    model = build(causal=False, positions=None)
    assert_close(model(tokens)[:, order], model(tokens[:, order]), rtol=0, atol=1e-11)
    for options in ({}, {"positions": "learned", "max_length": 9}):
        model = build(causal=False, **options)
        assert float((model(tokens)[:, order] - model(tokens[:, order])).detach().abs().max()) > 0.01


def test_log_weights_reach_every_layer():
    model, tokens = build(causal=False, positions=None), words(2, 6)
    causal = build(causal=True, positions=None)
    causal.load_state_dict(model.state_dict())
    pattern = torch.ones(6, 6, dtype=torch.bool).tril()
    assert_close(model(tokens, pattern), causal(tokens), rtol=0, atol=1e-12)


def test_statistics_are_one_per_layer_and_those_of_attend(monkeypatch):
    model, tokens, observed, attend = build(3, attention=["free", "linear", "tied"]), words(2, 6), [], statistics.attend

    def observe(*tensors, **options):
        observed.append(attend(*tensors, **options))
        return observed[-1]

    monkeypatch.setattr(statistics, "attend", observe)
    logits, found = model(tokens, return_statistics=True)
    assert [rows is None for rows in found] == [False, True, False]
    assert found[0] is observed[0].statistics
    assert found[2] is observed[1].statistics
    assert found[0].entropy.shape == (2, 4, 6)
    assert torch.equal(logits, model(tokens))
    sum(rows.entropy.sum() for rows in found if rows is not None).backward()
    assert bool((model.embedding.weight.grad != 0).any())


def test_shared_layers_are_one_block_applied_again():
    shared, apart = build(3, shared_layers=True), build(3)
    assert len(shared.blocks) == 1
    block = {name: value for name, value in shared.state_dict().items() if name.startswith("blocks.0.")}
    state = {
        **shared.state_dict(),
        **{name.replace("blocks.0.", f"blocks.{i}."): v for i in (1, 2) for name, v in block.items()},
    }
    apart.load_state_dict(state)
    assert_close(shared(words(2, 6)), apart(words(2, 6)), rtol=0, atol=1e-12)
    assert len(shared(words(2, 6), return_statistics=True)[1]) == 3


def test_a_state_dict_restores_the_model(decoder):
    other = copy.deepcopy(decoder)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.load_state_dict(decoder.state_dict())
    assert torch.equal(other(words(2, 5)), decoder(words(2, 5)))
    places = [value.data_ptr() for value in decoder.state_dict().values()]
    assert len(set(places)) == len(places), "tensors that share memory cannot be saved as safetensors"


def test_every_parameter_learns(decoder):
    decoder(words(2, 9)).square().mean().backward()
    for name, parameter in decoder.named_parameters():
        # A bias of the keys shifts all scores of a row alike, unless the keys are the values too.
        if not name.endswith("k_proj.bias") or "linear" in type(decoder.blocks[0].attention).__name__.lower():
            assert parameter.grad is not None, name
            assert float(parameter.grad.abs().max()) > 1e-9, name


def test_training_on_a_copying_task_lowers_the_loss():
    torch.manual_seed(0)
    model = Transformer(32, 2, 4, vocabulary=8, generator=generator())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    half = torch.randint(8, (64, 6), generator=generator())
    tokens = torch.cat([half, half], 1)
    losses = []
    for _ in range(60):
        logits = model(tokens[:, :-1])[:, 5:]
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, 8), tokens[:, 6:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[0] > 1.9
    assert losses[-1] < 0.5


def test_weights_start_as_in_gpt2_and_follow_the_generator():
    options = {"vocabulary": 200, "positions": "learned", "max_length": 200}
    first, second = (Transformer(128, 8, 4, generator=generator(3), **options) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    block = first.blocks[0]
    for weight in (
        first.embedding.weight,
        first.positions.weight,
        block.attention.q_proj.weight,
        block.feed_forward.up.weight,
    ):
        assert float(weight.detach().std()) == pytest.approx(0.02, rel=0.05)
    for weight in (block.attention.out_proj.weight, block.feed_forward.down.weight):
        assert float(weight.detach().std()) == pytest.approx(0.02 / 16**0.5, rel=0.05)
    assert bool((block.attention.q_proj.bias == 0).all())


def test_every_layer_has_the_attention_of_its_name():
    model = build(4, attention=["free", "tied", "source", "linear"])
    assert [getattr(block.attention, "tying", "linear") for block in model.blocks] == [
        "free",
        "tied",
        "source",
        "linear",
    ]


def test_a_module_of_your_own_keeps_its_weights():
    given = [MeasureAttention(16, 2, causal=True), LinearAttention(16, 1, form="elu", causal=True)]
    before = [copy.deepcopy(module.state_dict()) for module in given]
    model = Transformer(16, 2, 4, vocabulary=50, attention=given)
    for block, module, state in zip(model.blocks, given, before, strict=True):
        assert block.attention is module
        assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
    assert model.generate(words(2, 3), 4, generator=generator()).shape == (2, 7)


def test_dropout_acts_in_training_only():
    model, tokens = build(dropout=0.3), words(2, 6)
    whole = model(tokens)
    assert torch.equal(model(tokens), whole)
    torch.manual_seed(0)
    model.train()
    assert not torch.equal(model(tokens), model(tokens))
    plain = build()
    plain.load_state_dict(model.state_dict())
    assert torch.equal(plain.train()(tokens), whole)


def test_the_embedding_is_dropped_out_too():
    model, seen = build(dropout=0.3).train(), []
    model.blocks[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    torch.manual_seed(0)
    model(words(8, 20))
    assert float((seen[0] == 0).double().mean()) == pytest.approx(0.3, abs=0.05)


def test_a_tied_embedding_learns_from_the_words_that_do_not_occur():
    for tie_embedding in (True, False):
        model, tokens = build(tie_embedding=tie_embedding), words(1, 5)
        model(tokens).logsumexp(-1).sum().backward()
        absent = [word for word in range(50) if word not in tokens]
        assert bool((model.embedding.weight.grad[absent] != 0).any()) is tie_embedding


def test_a_bfloat16_model_keeps_two_digits():
    model, tokens = build(), words(2, 12)
    low = copy.deepcopy(model).bfloat16()
    logits, found = low(tokens, return_statistics=True)
    exact, rows = model(tokens, return_statistics=True)
    assert logits.dtype == torch.bfloat16
    # Measured: 0.033 of the spread of the logits, and 0.017 nats of entropy.
    assert float((logits.detach().double() - exact.detach()).abs().max() / exact.detach().std()) < 0.1
    assert_close(found[1].entropy.detach().double(), rows[1].entropy.detach(), rtol=0, atol=0.05)
    assert low.generate(tokens, 3, generator=generator()).shape == (2, 15)


COMPILED = {
    "decoder": {},
    "mixed": {"attention": ["linear", "source"], "norm": "rms", "activation": "swiglu"},
    "encoder": {"causal": False, "norm": "zca", "attention": "tied"},
}


# Torch looks at the gradients of intermediate results after each graph break, and hides its warning from users only.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("options", COMPILED.values(), ids=list(COMPILED))
def test_a_compiled_model_gives_the_same_outputs_and_gradients(options, monkeypatch, caplog):
    model, tokens, observed, attend = build(**options), words(2, 7), [], statistics.attend
    expected, _ = model(tokens, return_statistics=True)
    (slope,) = torch.autograd.grad(expected.square().sum(), model.embedding.weight)

    def observe(*tensors, **options):
        observed.append(attend(*tensors, **options))
        return observed[-1]

    monkeypatch.setattr(statistics, "attend", observe)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        logits, found = compiled(tokens, return_statistics=True)
        assert_close(logits, expected, rtol=0, atol=1e-12)
        (again,) = torch.autograd.grad(logits.square().sum(), model.embedding.weight)
        assert_close(again, slope, rtol=0, atol=1e-9)
    assert len(observed) == 2 * sum(rows is not None for rows in found)
    with torch.no_grad():
        assert_close(compiled(tokens), expected, rtol=0, atol=1e-12)
    assert [record for record in caplog.records if record.levelname != "DEBUG"] == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input_dim": 3}, "inputs are words or vectors, got vocabulary=50 and input_dim=3; pass only one"),
        ({"positions": "sine"}, "positions must"),
        ({"positions": "learned"}, "learned positions need max_length, got None; pass the length of the longest"),
        ({"norm": "zca"}, 'norm="zca" depends on all tokens, got causal=True; pass causal=False, or norm="layer"'),
        ({"norm": "batch"}, "norm must"),
        ({"attention": "softmax"}, "attention must"),
        ({"attention": ["free"]}, "one name or one entry for each of the 2 blocks, got 1 entries; shared layers are"),
        (
            {"attention": ["free"] * 2, "shared_layers": True},
            "one entry for each of the 1 blocks, got 2 entries; shared",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        Transformer(16, 2, 4, vocabulary=50, **options)


@pytest.mark.parametrize(
    ("options", "inputs", "message"),
    [
        ({}, words(5), r"word numbers of shape \(batch, tokens\), got torch.int64 \(5,\); .* pass inputs\[None\]"),
        ({}, randn(1, 5), r"word numbers of shape \(batch, tokens\), got torch.float64 \(1, 5\)"),
        ({"vocabulary": None}, randn(5, 16), "inputs must"),
        ({"vocabulary": None, "input_dim": 3}, randn(1, 5, 16), "inputs must"),
        ({"max_length": 4}, words(1, 5), "sequences must"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(options, inputs, message):
    with pytest.raises(UserError, match=message):
        build(**options)(inputs)


@pytest.mark.parametrize(
    ("options", "arguments", "message"),
    [
        ({"causal": False}, {}, "a causal model with a vocabulary, got causal=False; build one with both"),
        ({"vocabulary": None}, {}, "a causal model with a vocabulary, got vectors as inputs; build one with both"),
        ({}, {"tokens": words(1, 0)}, "generate needs a prompt"),
        ({"max_length": 6}, {}, "must fit max_length 6, got 5 and 3 words; generate fewer"),
        ({}, {"temperature": -1.0}, "temperature must"),
        ({}, {"top_k": 0}, "top_k must"),
    ],
)
def test_generation_that_cannot_work_is_refused(options, arguments, message):
    with pytest.raises(UserError, match=message):
        build(**options).generate(**{"tokens": words(1, 5), "max_new_tokens": 3, **arguments})
