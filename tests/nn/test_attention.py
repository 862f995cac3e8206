"""Softmax attention as a layer: against torch's own, against the dense reference, and as a gradient of log Z."""

from __future__ import annotations

import copy

import pytest
import torch
from associations import by_heads
from dense import dense
from draws import generator, randn
from torch import Tensor, nn
from torch.testing import assert_close

import massieu
from massieu import row_statistics, statistics
from massieu.checks import UserError
from massieu.nn import MeasureAttention, rotate

TYINGS = ["free", "tied", "source"]


def build(dim: int = 16, num_heads: int = 4, *, dtype: torch.dtype = torch.float64, **options) -> MeasureAttention:
    """A layer without zeros or ones left in it: biases, coefficients and sources are random too."""
    layer = MeasureAttention(dim, num_heads, dtype=dtype, generator=generator(1), **options)
    with torch.no_grad():
        for seed, parameter in enumerate(layer.parameters()):
            if parameter.dim() == 1 or parameter is getattr(layer, "source", None):
                parameter.copy_(randn(*parameter.shape, seed=seed, dtype=dtype))
    return layer


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
def test_free_attention_equals_that_of_torch(causal, padded, dtype, bound):
    theirs = nn.MultiheadAttention(32, 4, batch_first=True, dtype=dtype)
    ours = MeasureAttention(32, 4, causal=causal, dtype=dtype)
    with torch.no_grad():
        theirs.in_proj_bias.copy_(randn(96, dtype=dtype))
        theirs.out_proj.bias.copy_(randn(32, dtype=dtype))
        for name, weight, bias in zip("qkv", theirs.in_proj_weight.chunk(3), theirs.in_proj_bias.chunk(3), strict=True):
            getattr(ours, f"{name}_proj").weight.copy_(weight)
            getattr(ours, f"{name}_proj").bias.copy_(bias)
    ours.out_proj.load_state_dict(theirs.out_proj.state_dict())
    x, lengths = randn(3, 20, 32, dtype=dtype), torch.tensor([20, 7, 1])
    absent = torch.arange(20) >= lengths[:, None]
    mask = torch.ones(20, 20, dtype=torch.bool).triu(1) if causal else None
    expected, _ = theirs(x, x, x, key_padding_mask=absent if padded else None, attn_mask=mask, need_weights=False)
    assert_close(ours(x, lengths=lengths if padded else None), expected, rtol=0, atol=bound)
    if padded:
        assert_close(ours(x, log_weight=~absent[:, None, None]), expected, rtol=0, atol=bound)


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True, "num_key_heads": 2},
        {"causal": True, "window": 3, "rotary": 100.0},
        {"window": 2, "num_key_heads": 1, "head_dim": 6, "bias": False},
        {"scale": 0.7, "rotary": 10000.0, "head_dim": 8, "num_key_heads": 2},
    ],
)
def test_options_reach_the_dense_reference(options):
    layer, x, log_weight = build(**options), randn(2, 9, 16), randn(4, 9, 9, seed=5)
    lengths = torch.tensor([9, 6])
    key_heads = options.get("num_key_heads", 4)
    query = by_heads(layer.q_proj, x, 4)
    key, value = (by_heads(projection, x, key_heads) for projection in (layer.k_proj, layer.v_proj))
    if "rotary" in options:
        query, key = (rotate(heads, base=options["rotary"]) for heads in (query, key))
    shown = {name: options[name] for name in ("causal", "window", "scale") if name in options}
    expected = dense(query, key, value, log_weight, lengths=lengths, **shown)
    output, found = layer(x, log_weight=log_weight, lengths=lengths, return_statistics=True)
    merged = expected.output.permute(0, 2, 1, 3).reshape(2, 9, -1)
    assert_close(output, layer.out_proj(merged), rtol=0, atol=1e-13)
    for name, field in found._asdict().items():
        assert_close(field, getattr(expected, name), rtol=1e-12, atol=1e-12, equal_nan=True)
    assert torch.equal(output, layer(x, log_weight=log_weight, lengths=lengths))


@pytest.mark.parametrize("tying", TYINGS)
def test_statistics_are_those_of_attend(tying, monkeypatch):
    calls = []

    def observe(*tensors, **options):
        calls.append((tensors, options))
        return massieu.attend(*tensors, **options)

    layer, x = build(tying=tying, causal=True), randn(2, 5, 16)
    attend = statistics.attend
    massieu.attend  # looked up before the module attribute changes  # noqa: B018
    monkeypatch.setattr(statistics, "attend", observe)
    output, found = layer(x, return_statistics=True)
    ((tensors, options),) = calls
    assert all(torch.equal(a, b) for a, b in zip(found, attend(*tensors, **options).statistics, strict=True))
    assert torch.equal(layer(x), output)
    assert [options["statistics"] for _, options in calls] == ["full", None]


POTENTIALS = [
    {},
    {"causal": True, "num_key_heads": 2},
    {"causal": True, "window": 3, "rotary": 100.0},
    {"bias": False, "head_dim": 6, "num_key_heads": 1, "scale": 0.7},
]


@pytest.mark.parametrize("options", POTENTIALS)
def test_tied_attention_is_the_gradient_of_its_log_normalizers(options):
    layer, x, context = build(tying="tied", **options), randn(2, 7, 16).requires_grad_(), randn(2, 7, 16)
    log_weight = randn(7, 7, seed=5)
    query = by_heads(layer.q_proj, x, 4)
    key = by_heads(layer.k_proj, context, options.get("num_key_heads", 4))
    if "rotary" in options:
        query, key = (rotate(heads, base=options["rotary"]) for heads in (query, key))
    rows = row_statistics(
        query,
        key,
        log_weight,
        scale=options.get("scale", query.shape[-1] ** -0.5),
        causal=options.get("causal", False),
        window=options.get("window"),
    )
    potential = torch.einsum("h,bhq->", layer.coefficient, rows.log_normalizer)
    (slope,) = torch.autograd.grad(potential, x)
    assert_close(layer(x, context, log_weight), slope, rtol=0, atol=1e-13)


def asymmetry(layer: MeasureAttention) -> float:
    """Share of the Jacobian of one token's output in that token, the context held fixed, that is antisymmetric."""
    context = randn(1, 20, 16, seed=3)
    jacobian = torch.autograd.functional.jacobian(lambda x: layer(x[None, None], context)[0, 0], randn(16))
    return float((jacobian - jacobian.T).norm() / (2 * jacobian.norm()))


def test_tied_attention_is_a_gradient_field_and_free_attention_is_not():
    assert asymmetry(build(tying="tied")) < 1e-14
    assert asymmetry(build(tying="tied", rotary=100.0)) < 1e-14
    # A random matrix has sqrt(1/2).
    assert asymmetry(build(tying="free")) > 0.5
    assert asymmetry(build(tying="source")) > 0.5


def test_free_attention_is_a_gradient_field_when_its_maps_are_set_to_tied_ones():
    free, tied = build(tying="free", bias=False), build(tying="tied", bias=False)
    with torch.no_grad():
        for name in ("q_proj", "k_proj"):
            getattr(free, name).weight.copy_(getattr(tied, name).weight)
        free.v_proj.weight.copy_(tied.k_proj.weight)
        scale = tied.scale * tied.coefficient.repeat_interleave(4)
        free.out_proj.weight.copy_(tied.q_proj.weight.T * scale)
    assert asymmetry(free) < 1e-14
    x = randn(2, 5, 16)
    assert_close(free(x), tied(x), rtol=0, atol=1e-14)
    for ours, theirs in zip(free.matrices(), tied.matrices(), strict=True):
        assert_close(ours, theirs, rtol=0, atol=1e-14)


@pytest.mark.parametrize("num_key_heads", [4, 2])
@pytest.mark.parametrize("tying", TYINGS)
def test_matrices_give_the_scores_and_the_output(tying, num_key_heads):
    layer, x = build(tying=tying, bias=False, num_key_heads=num_key_heads), randn(1, 6, 16)
    score, output = layer.matrices()
    scores = torch.einsum("qd,hde,ne->hqn", x[0], score, x[0])
    if tying == "source":
        value = by_heads(layer.v_proj, x, num_key_heads)[0].repeat_interleave(4 // num_key_heads, 0)
        scores = scores + torch.einsum("hk,hnk->hn", layer.source, value)[:, None]
    expected = torch.einsum("hqn,hde,ne->qd", scores.softmax(-1), output, x[0])
    assert_close(layer(x)[0], expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("num_key_heads", [4, 2])
def test_a_source_head_is_the_gradient_of_log_z_in_its_source(num_key_heads):
    layer, x, log_weight = build(tying="source", num_key_heads=num_key_heads), randn(2, 7, 16), randn(7, 7, seed=5)
    query = by_heads(layer.q_proj, x, 4)
    key, value = (
        by_heads(projection, x, num_key_heads).repeat_interleave(4 // num_key_heads, 1)
        for projection in (layer.k_proj, layer.v_proj)
    )
    source = layer.source.detach()[None, :, None].expand(2, 4, 7, 4).requires_grad_()
    tilt = torch.einsum("bhqk,bhnk->bhqn", source, value)
    rows = row_statistics(query, key, log_weight + tilt, scale=layer.scale)
    (slope,) = torch.autograd.grad(rows.log_normalizer.sum(), source)
    expected = layer.out_proj(slope.permute(0, 2, 1, 3).reshape(2, 7, 16))
    assert_close(layer(x, log_weight=log_weight), expected, rtol=0, atol=1e-13)


def test_without_a_source_the_attention_is_free():
    layer, x, mask = build(tying="source"), randn(2, 7, 16), torch.rand(2, 1, 7, 7, generator=generator()) < 0.7
    free = build(tying="free")
    free.load_state_dict({name: weight for name, weight in layer.state_dict().items() if name != "source"})
    assert float((layer(x) - free(x)).detach().abs().max()) > 0.01
    nn.init.zeros_(layer.source)
    assert_close(layer(x, log_weight=mask), free(x, log_weight=mask), rtol=0, atol=1e-14)
    fresh = MeasureAttention(16, 4, tying="source")
    assert bool((fresh.source == 0).all())


@pytest.mark.parametrize("tying", TYINGS)
@pytest.mark.parametrize(
    "options", [{}, {"rotary": 100.0, "num_key_heads": 2}, {"rotary": 100.0, "window": 3}, {"sink": True}]
)
def test_a_cache_changes_nothing(tying, options):
    layer, x = build(tying=tying, causal=True, **options), randn(2, 9, 16)
    whole, rows = layer(x, return_statistics=True)
    cache = layer.new_cache()
    with torch.no_grad():
        parts = [
            layer(x[:, start:stop], cache=cache, return_statistics=True)
            for start, stop in [(0, 4), (4, 5), (5, 6), (6, 9)]
        ]
    assert_close(torch.cat([part.output for part in parts], 1), whole, rtol=0, atol=1e-13)
    entropy = torch.cat([part.statistics.entropy for part in parts], -1)
    assert_close(entropy, rows.entropy, rtol=0, atol=1e-13)


def test_the_query_token_can_be_left_out_of_its_keys():
    layer, x = build(), randn(2, 6, 16)
    moved = torch.cat([x[:, :-1], x[:, -1:] + 1], 1)
    assert_close(layer(x, lengths=5), layer(x, x[:, :5]), rtol=0, atol=1e-14)
    assert torch.equal(layer(x, lengths=5)[:, :5], layer(moved, lengths=5)[:, :5])
    assert not torch.equal(layer(x)[:, :5], layer(moved)[:, :5])


def with_sink(layer: MeasureAttention, x: Tensor, log_weight: Tensor, lengths: Tensor):
    """Free or source attention over the tokens and one more atom of value zero, from the whole matrix."""
    query, key, value = (by_heads(projection, x, 4) for projection in (layer.q_proj, layer.k_proj, layer.v_proj))
    if layer.tying == "source":
        log_weight = log_weight + torch.einsum("hk,bhnk->bhn", layer.source, value)[:, :, None]
    found = dense(query, key, value, log_weight, causal=layer.causal, lengths=lengths, sink=layer.sink)
    return layer.out_proj(found.output.permute(0, 2, 1, 3).reshape(*x.shape[:2], -1)), found


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tying", ["free", "source"])
def test_a_sink_is_one_more_atom_of_value_zero(tying, causal):
    layer, x, log_weight = build(tying=tying, causal=causal, sink=True), randn(2, 9, 16), randn(4, 9, 9, seed=5)
    lengths = torch.tensor([9, 0])
    output, found = layer(x, log_weight=log_weight, lengths=lengths, return_statistics=True)
    expected, rows = with_sink(layer, x, log_weight, lengths)
    assert_close(output, expected, rtol=0, atol=1e-13)
    for name, field in found._asdict().items():
        assert_close(field, getattr(rows, name), rtol=1e-12, atol=1e-12)
    names = ["sink", "q_proj.weight", "v_proj.weight"]
    weights = [layer.get_parameter(name) for name in names]
    ours, theirs = (torch.autograd.grad(result.square().sum(), weights) for result in (output, expected))
    for name, one, other in zip(names, ours, theirs, strict=True):
        assert_close(one, other, rtol=0, atol=1e-11, msg=name)


def test_a_fresh_sink_is_the_zero_atom_of_torch():
    theirs = nn.MultiheadAttention(16, 4, batch_first=True, add_zero_attn=True, dtype=torch.float64)
    ours, x = MeasureAttention(16, 4, sink=True, dtype=torch.float64), randn(2, 5, 16)
    with torch.no_grad():
        for name, weight in zip("qkv", theirs.in_proj_weight.chunk(3), strict=True):
            getattr(ours, f"{name}_proj").weight.copy_(weight)
    ours.out_proj.load_state_dict(theirs.out_proj.state_dict())
    assert ours.sink.shape == (4,)
    assert_close(ours(x), theirs(x, x, x, need_weights=False)[0], rtol=0, atol=1e-14)


def test_tied_attention_with_a_sink_is_still_a_gradient():
    layer, x, context = build(tying="tied", sink=True), randn(2, 7, 16).requires_grad_(), randn(2, 7, 16)
    output, found = layer(x, context, return_statistics=True)
    (slope,) = torch.autograd.grad(torch.einsum("h,bhq->", layer.coefficient, found.log_normalizer), x)
    assert_close(output, slope, rtol=0, atol=1e-13)
    assert float((output - build(tying="tied")(x, context)).detach().abs().max()) > 0.01


@pytest.mark.parametrize("tying", TYINGS)
def test_only_a_layer_with_a_sink_stores_one(tying):
    plain, other = build(tying=tying), build(tying=tying, sink=True)
    assert set(other.state_dict()) - set(plain.state_dict()) == {"sink"}
    assert "sink" not in plain.state_dict()
    fresh, x = MeasureAttention(16, 4, tying=tying, sink=True, dtype=torch.float64), randn(2, 5, 16)
    assert bool((fresh.sink == 0).all())
    fresh.load_state_dict(other.state_dict())
    assert torch.equal(fresh(x), other(x))
    assert "sink=True" in repr(fresh)
    nn.init.constant_(other.sink, -torch.inf)  # an absent sink
    plain.load_state_dict({name: weight for name, weight in other.state_dict().items() if name != "sink"})
    assert_close(other(x), plain(x), rtol=0, atol=1e-14)


@pytest.mark.parametrize("tying", TYINGS)
def test_what_lies_beyond_the_lengths_does_not_leak(tying):
    layer, x = build(tying=tying), randn(2, 6, 16)
    spoiled = x.clone()
    spoiled[:, 4:] = torch.tensor([torch.nan, torch.inf])[:, None]
    assert_close(layer(spoiled, lengths=4)[:, :4], layer(x[:, :4]), rtol=0, atol=1e-13)


def test_a_context_may_have_a_size_and_a_length_of_its_own():
    layer = build(context_dim=5)
    assert layer(randn(2, 3, 16), randn(2, 8, 5)).shape == (2, 3, 16)


@pytest.mark.parametrize("tying", TYINGS)
def test_gradients_are_exact(tying):
    layer = build(8, 4, tying=tying, causal=True, num_key_heads=2, rotary=100.0)
    names, weights = zip(
        *((name, weight.detach().requires_grad_()) for name, weight in layer.named_parameters()), strict=True
    )

    def run(x: Tensor, log_weight: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip(names, weights, strict=True))
        output, found = torch.func.functional_call(
            layer, given, (x,), {"log_weight": log_weight, "return_statistics": True}
        )
        return output, found.entropy, found.log_normalizer

    inputs = (randn(1, 3, 8).requires_grad_(), randn(3, 3, seed=4).requires_grad_(), *weights)
    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)


@pytest.mark.parametrize("tying", TYINGS)
def test_bfloat16_keeps_two_digits(tying):
    layer, x = build(tying=tying, causal=True, rotary=100.0), randn(2, 9, 16)
    low = copy.deepcopy(layer).bfloat16()
    output, found = low(x.bfloat16(), return_statistics=True)
    assert output.dtype == torch.bfloat16
    assert found.entropy.dtype == torch.float32
    expected = layer(x).detach()
    # Measured: at most 0.012 of the largest output, three roundings of 2^-8.
    assert float((output.detach().double() - expected).abs().max() / expected.abs().max()) < 0.03


@pytest.mark.parametrize("tying", TYINGS)
def test_autocast_runs_a_single_precision_layer(tying):
    layer, x = build(tying=tying, causal=True, rotary=100.0, dtype=torch.float32), randn(2, 9, 16, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = layer(x, log_weight=torch.ones(9, dtype=torch.bool))
    assert_close(output.float(), layer(x), rtol=0, atol=0.03 * float(layer(x).detach().abs().max()))


@pytest.mark.parametrize("tying", TYINGS)
def test_dropout_acts_on_the_output_in_training_only(tying):
    layer, x = build(tying=tying, dropout=0.5), randn(2, 50, 16)
    torch.manual_seed(0)
    output = layer(x)
    dropped = output == 0
    assert 0.4 < float(dropped.double().mean()) < 0.6
    whole = layer.eval()(x)
    assert_close(output[~dropped], 2 * whole[~dropped], rtol=0, atol=1e-13)


@pytest.mark.parametrize("tying", TYINGS)
def test_a_state_dict_restores_the_layer(tying):
    layer, other = build(tying=tying), MeasureAttention(16, 4, tying=tying, dtype=torch.float64)
    assert other.load_state_dict(layer.state_dict()).missing_keys == []
    x = randn(1, 5, 16)
    assert torch.equal(layer(x), other(x))


def test_a_generator_decides_the_weights():
    first, second = (MeasureAttention(16, 4, generator=generator(7)).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    other = MeasureAttention(16, 4, generator=generator(8)).state_dict()
    assert not torch.equal(first["q_proj.weight"], other["q_proj.weight"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim": 10}, "dim must be a multiple"),
        ({"num_key_heads": 3}, "multiple of num_key_heads, got 4 and 3; each key head serves"),
        ({"num_heads": 0}, "num_heads must"),
        ({"tying": "half"}, "tying must"),
        ({"rotary": True}, "rotary must"),
        ({"rotary": 100.0, "head_dim": 3}, "rotary must"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        MeasureAttention(**{"dim": 16, "num_heads": 4, **options})


@pytest.mark.parametrize(
    ("shapes", "message"), [([(5, 16)], "x must"), ([(1, 5, 11)], "x must"), ([(1, 5, 16), (5, 16)], "context must")]
)
def test_shapes_that_do_not_fit_are_refused(shapes, message):
    with pytest.raises(UserError, match=message):
        build()(*(randn(*shape) for shape in shapes))


def test_a_missing_context_is_refused():
    with pytest.raises(UserError, match="context must"):
        build(context_dim=5)(randn(2, 3, 16))


@pytest.mark.parametrize(
    ("causal", "context", "message"),
    [
        (False, None, "got causal=False; build the layer with"),
        (True, randn(1, 5, 16), "got a context; build the layer"),
    ],
)
def test_a_cache_without_an_order_of_tokens_is_refused(causal, context, message):
    layer = build(causal=causal)
    with pytest.raises(UserError, match="a cache needs causal self-attention, " + message):
        layer(randn(1, 5, 16), context, cache=layer.new_cache())


def test_the_layer_prints_its_options():
    shown = "tying='tied', num_heads=4, num_key_heads=2, causal=True, window=3, rotary=None"
    assert shown in repr(build(tying="tied", num_key_heads=2, causal=True, window=3))
