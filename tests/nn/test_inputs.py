"""Validators of the arguments of layers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from massieu.checks import UserError
from massieu.nn import (
    Block,
    FeedForward,
    KeyValueCache,
    LinearAttention,
    LinearCache,
    MeasureAttention,
    Renormalization,
    Transformer,
    rotate,
)

INF, NAN = math.inf, math.nan
ATTENTIONS = {
    "free": lambda **options: MeasureAttention(8, 2, **options),
    "source": lambda **options: MeasureAttention(8, 2, tying="source", **options),
    "linear": lambda **options: LinearAttention(8, 2, **options),
}
LAYERS = {
    **ATTENTIONS,
    "block": lambda: Block(8, MeasureAttention(8, 2), FeedForward(8)),
    "feed-forward": lambda: FeedForward(8),
    "norm": lambda: Renormalization(8),
    "model": lambda: Transformer(8, 1, 2),
}


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=dtype)


@pytest.fixture(params=ATTENTIONS.values(), ids=list(ATTENTIONS))
def attention(request):
    return request.param


@pytest.fixture(params=LAYERS.values(), ids=list(LAYERS))
def layer(request):
    return request.param()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "must be a floating-point tensor, got NoneType; convert it with torch.as_tensor"),
        ([[[0.0] * 8]], "must be a floating-point tensor, got list; convert it with torch.as_tensor"),
        (torch.ones(1, 3, 8, dtype=torch.int64), "tensor, got torch.int64; embed word numbers"),
        (torch.ones(1, 3, 8, dtype=torch.bool), "tensor, got torch.bool; a mask goes in as log_weight"),
        (randn(1, 3, 7), r", 8\), got \(1, 3, 7\); project it to size 8, or build the layer for size 7"),
        (torch.tensor(1.0), r"must have shape \(.*, 8\), got \(\); "),
    ],
)
def test_what_is_no_tensor_of_tokens_is_refused(layer, given, message):
    with pytest.raises(UserError, match=message):
        layer(given)


def test_tokens_without_a_batch_are_refused(layer):
    if isinstance(layer, FeedForward):
        assert layer(randn(3, 8)).shape == (3, 8)
        return
    with pytest.raises(UserError, match=r"\(batch, tokens, 8\), got \(3, 8\); for a single sequence pass .*\[None\]"):
        layer(randn(3, 8))
    with pytest.raises(UserError, match=r"got \(1, 2, 3, 8\); flatten its leading axes into one"):
        layer(randn(1, 2, 3, 8))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_dtype_that_is_not_that_of_the_weights_is_refused(layer, dtype):
    if isinstance(layer, Renormalization):  # computes in float32 anyway
        return
    message = f"must have the dtype of the weights, torch.float32, got {dtype}; convert it or the layer with .to"
    with pytest.raises(UserError, match=message):
        layer(randn(1, 3, 8, dtype=dtype))


def test_autocast_may_bring_dtypes_together(attention):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attention()(randn(1, 3, 8, dtype=torch.bfloat16)).shape == (1, 3, 8)
        with pytest.raises(UserError, match=r"must have the dtype of the weights, torch.float32, got torch.float64"):
            attention()(randn(1, 3, 8, dtype=torch.float64))


@pytest.mark.parametrize(
    ("context", "message"),
    [
        ([1.0], "context must"),
        (torch.ones(2, 3, dtype=torch.bool), "got torch.bool; a mask goes in as log_weight"),
        (randn(2, 3, 9), "context must have shape"),
        (randn(2, 3, 8, dtype=torch.float64), "context must have the dtype"),
        (randn(3, 4, 8), "context must have the batch size"),
    ],
)
def test_a_context_that_does_not_fit_is_refused(attention, context, message):
    with pytest.raises(UserError, match=message):
        attention()(randn(2, 5, 8), context)
    assert attention()(randn(2, 5, 8), randn(1, 4, 8)).shape == (2, 5, 8)


@pytest.mark.parametrize("window", [0, -3, 2.0, "3", True])
def test_a_window_must_be_a_count(attention, window):
    message = "window must"
    with pytest.raises(UserError, match=message):
        attention(window=window)
    with pytest.raises(UserError, match=message):
        Transformer(8, 1, 2, window=window)
    layer = attention()
    layer.window = window
    if window is not True:
        with pytest.raises(UserError, match="window must"):
            layer(randn(1, 3, 8))


@pytest.mark.parametrize("name", ["dim", "num_heads", "num_key_heads", "head_dim", "context_dim"])
@pytest.mark.parametrize("value", [0, -1, 4.0, "4"])
def test_sizes_of_an_attention_must_be_counts(name, value):
    for kind in (MeasureAttention, LinearAttention):
        with pytest.raises(UserError, match=f"{name} must"):
            kind(**{"dim": 8, "num_heads": 2, name: value})


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        (2.0, "lengths must hold whole numbers"),
        (torch.tensor([1, 2, 3]), "lengths must match"),
        (6, "lengths must lie"),
        (torch.tensor([-1, 2]), "lengths must lie"),
    ],
)
@pytest.mark.parametrize("kind", [*ATTENTIONS, "norm"])
def test_lengths_are_checked(kind, lengths, message):
    with pytest.raises(UserError, match=message):
        LAYERS[kind]()(randn(2, 5, 8), lengths=lengths)


@pytest.mark.parametrize(
    ("log_weight", "message"),
    [
        ([0.0] * 5, "log_weight must"),
        (torch.ones(5, dtype=torch.int64), r"got torch.int64; for a mask of zeros and ones pass mask.bool()"),
        (torch.zeros(2, 5), "log_weight must broadcast"),
        (torch.zeros(1, 1, 1, 1, 5), "log_weight must"),
        (torch.tensor([0, 0, 0, 0, NAN]), "log_weight must be finite"),
        (torch.tensor([0, 0, 0, 0, INF]), "log_weight must"),
    ],
)
def test_log_weights_are_checked(attention, log_weight, message):
    with pytest.raises(UserError, match=message):
        attention()(randn(2, 5, 8), log_weight=log_weight)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_layers": 0}, "num_layers must"),
        ({"num_layers": 2.0}, "num_layers must"),
        ({"head_dim": 0}, "head_dim must"),
        ({"vocabulary": 0}, "vocabulary must"),
        ({"max_length": 0}, "max_length must"),
        ({"hidden_dim": -1}, "hidden_dim must"),
        ({"vocabulary": None, "input_dim": 0}, "input_dim must"),
        ({"output_dim": 0}, "output_dim must"),
        ({"dim": 0}, "dim must"),
        (
            {"attention": [MeasureAttention(8, 2), "free"]},
            "a causal model needs causal attention, got a MeasureAttention with causal=False; build it with causal=True",
        ),
        ({"attention": [LinearAttention(8, 2), "free"]}, "got a LinearAttention with causal=False; build it with"),
    ],
)
def test_models_that_cannot_be_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        Transformer(**{"dim": 8, "num_layers": 2, "num_heads": 2, "vocabulary": 5, **options})


@pytest.mark.parametrize("attention", [MeasureAttention(8, 2, causal=True), None, 3])
def test_attention_must_be_a_name_or_a_list(attention):
    message = "attention must"
    with pytest.raises(UserError, match=message):
        Transformer(8, 1, 2, attention=attention)


def test_modules_that_fit_are_taken():
    own = nn.ModuleList([MeasureAttention(8, 2, causal=True)])
    assert Transformer(8, 1, 2, attention=own).blocks[0].attention is own[0]
    assert Transformer(8, 1, 2, attention=[MeasureAttention(8, 2)], causal=False)(randn(1, 3, 8)).shape == (1, 3, 8)


@pytest.mark.parametrize("parts", [(None, None), (MeasureAttention(8, 2), 4), (MeasureAttention, None)])
def test_a_block_is_made_of_modules(parts):
    with pytest.raises(UserError, match="must be a module.*, got .*; build it first"):
        Block(8, *parts)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (None, "inputs must"),
        ([[1, 2]], "inputs must"),
        (torch.tensor([[0, 5]]), "word numbers from 0 to 4, got 0 to 5; build the model with a larger"),
        (torch.tensor([[-1, 3]]), "word numbers from 0 to 4, got -1 to 3; .* pass lengths"),
        (torch.ones(1, 2, dtype=torch.bool), r"got torch.bool \(1, 2\); convert them with .long()"),
        (torch.ones(1, 2, dtype=torch.int16), r"got torch.int16 \(1, 2\); convert them with .long()"),
        (torch.ones(1, 2, 3).long(), r"got torch.int64 \(1, 2, 3\); flatten its leading axes into one"),
    ],
)
def test_what_is_no_sequence_of_known_words_is_refused(words, message):
    model = Transformer(8, 1, 2, vocabulary=5)
    with pytest.raises(UserError, match=message):
        model(words)
    with pytest.raises(UserError, match=message):
        model.generate(words, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens must"),
        ({"max_new_tokens": 2.0}, "max_new_tokens must"),
        ({"max_new_tokens": None}, "max_new_tokens must"),
        ({"temperature": NAN}, "temperature must"),
        ({"temperature": -0.5}, "temperature must"),
        ({"temperature": INF}, "temperature must"),
        ({"temperature": None}, "temperature must"),
        ({"top_k": 1.5}, "top_k must"),
    ],
)
def test_options_of_a_generation_are_checked(arguments, message):
    model = Transformer(8, 1, 2, vocabulary=5)
    with pytest.raises(UserError, match=message):
        model.generate(torch.tensor([[1, 2]]), **{"max_new_tokens": 2, **arguments})


def test_caches_of_another_kind_are_refused():
    model = Transformer(8, 2, 2, attention=["free", "linear"])
    cases = [
        ({}, "one cache for each of the 2 layers, got dict; make one with new_cache"),
        (KeyValueCache(), "one cache for each of the 2 layers, got KeyValueCache; make"),
        ([], "one cache for each of the 2 layers, got 0 entries; make one with new_cache"),
        (Transformer(8, 3, 2).new_cache(), "one cache for each of the 2 layers, got 3 entries; make"),
        ([KeyValueCache(), None], "cache must"),
        (Transformer(8, 2, 2).new_cache(), "cache must"),
    ]
    for cache, message in cases:
        with torch.no_grad(), pytest.raises(UserError, match=message):
            model(randn(1, 3, 8), cache=cache)
    for layer in (MeasureAttention(8, 2, causal=True), LinearAttention(8, 2, causal=True)):
        for cache in ([], {}, model.new_cache()):
            with torch.no_grad(), pytest.raises(UserError, match="cache must"):
                layer(randn(1, 3, 8), cache=cache)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["free", "linear"])
def test_the_cache_of_another_model_is_refused(kind):
    model, other = (Transformer(8, 2, heads, attention=kind) for heads in (2, 4))
    cache = other.new_cache()
    other(randn(1, 3, 8), cache=cache)
    with pytest.raises(UserError, match="the cache holds .*, got .*; use a new cache for another batch or layer"):
        model(randn(1, 3, 8), cache=cache)
    with pytest.raises(UserError, match="the cache holds .*, got .*; use a new cache for another batch or layer"):
        other(randn(2, 3, 8), cache=cache)


@torch.no_grad()
def test_layers_must_have_seen_the_same_tokens():
    model = Transformer(8, 2, 2)
    cache = model.new_cache()
    model(randn(1, 3, 8), cache=cache)
    cache[1] = KeyValueCache()
    with pytest.raises(UserError, match=r"every layer must have seen the same tokens, got lengths \[3, 0\]; make"):
        model(randn(1, 1, 8), cache=cache)


def test_the_capacity_of_a_cache_is_a_count():
    with pytest.raises(UserError, match="capacity must"):
        KeyValueCache(-1)
    assert LinearCache().length == 0


def test_rotation_needs_pairs_of_coordinates():
    with pytest.raises(UserError, match="x must"):
        rotate(None)
    for shape in [(5, 3), (4,)]:
        with pytest.raises(UserError, match="x must"):
            rotate(randn(*shape))


def test_a_compiled_linear_model_stays_one_graph():
    model, words = Transformer(8, 1, 2, vocabulary=5, attention="linear"), torch.tensor([[1, 2, 3]])
    torch.compiler.reset()
    found = torch.compile(model, backend="eager", fullgraph=True)(words, lengths=torch.tensor([2]))
    torch.testing.assert_close(found, model(words, lengths=2))


def test_gradients_of_each_sequence_alone_go_through_the_checks():
    model = Transformer(8, 1, 2, vocabulary=5, attention="linear")
    weights, words = dict(model.named_parameters()), torch.tensor([[1, 2, 3], [4, 4, 0]])

    def loss(weights: dict[str, Tensor], words: Tensor) -> Tensor:
        return torch.func.functional_call(model, weights, (words[None],)).square().sum()

    found = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, words)["embedding.weight"]
    alone = torch.func.grad(loss)(weights, words[1])["embedding.weight"]
    torch.testing.assert_close(found[1], alone)
