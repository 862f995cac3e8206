"""One block, against torch's encoder layer, and its feed-forward net."""

from __future__ import annotations

import pytest
import torch
from draws import randn
from torch import nn
from torch.nn import functional
from torch.testing import assert_close

from massieu.checks import UserError
from massieu.nn import Block, FeedForward, LinearAttention, MeasureAttention, Renormalization


def copy_encoder_layer(theirs: nn.TransformerEncoderLayer, ours: Block) -> None:
    attention, feed_forward = ours.attention, ours.feed_forward
    with torch.no_grad():
        weights, biases = theirs.self_attn.in_proj_weight.chunk(3), theirs.self_attn.in_proj_bias.chunk(3)
        for projection, weight, bias in zip(
            (attention.q_proj, attention.k_proj, attention.v_proj), weights, biases, strict=True
        ):
            projection.weight.copy_(weight)
            projection.bias.copy_(bias)
    for mine, other in (
        (attention.out_proj, theirs.self_attn.out_proj),
        (feed_forward.up, theirs.linear1),
        (feed_forward.down, theirs.linear2),
        (ours.attention_norm, theirs.norm1),
        (ours.feed_forward_norm, theirs.norm2),
    ):
        mine.load_state_dict(other.state_dict())


@pytest.mark.parametrize("pre_norm", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("padded", [False, True])
def test_a_block_equals_the_encoder_layer_of_torch(pre_norm, activation, padded):
    torch.manual_seed(0)
    theirs = nn.TransformerEncoderLayer(
        16, 4, 24, dropout=0.0, activation=activation, batch_first=True, norm_first=pre_norm, dtype=torch.float64
    )
    for parameter in theirs.parameters():  # norms and biases start at one and zero
        nn.init.normal_(parameter, std=0.5)
    attention = MeasureAttention(16, 4, dtype=torch.float64)
    feed_forward = FeedForward(16, 24, activation=activation, dtype=torch.float64)
    ours = Block(16, attention, feed_forward, pre_norm=pre_norm, dtype=torch.float64)
    copy_encoder_layer(theirs, ours)
    x, lengths = randn(2, 9, 16), torch.tensor([9, 4])
    absent = torch.arange(9) >= lengths[:, None]
    expected = theirs(x, src_key_padding_mask=absent if padded else None)
    assert_close(ours(x, lengths=lengths if padded else None), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("activation", "formula"),
    [
        ("relu", lambda x: x.clamp_min(0)),
        ("gelu", lambda x: 0.5 * x * (1 + torch.erf(x / 2**0.5))),
        ("gelu_tanh", lambda x: 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))),
    ],
)
def test_a_feed_forward_net_is_its_formula(activation, formula):
    net, x = FeedForward(6, 10, activation=activation, dtype=torch.float64), randn(2, 3, 6)
    hidden = formula(x @ net.up.weight.T + net.up.bias)
    assert_close(net(x), hidden @ net.down.weight.T + net.down.bias, rtol=0, atol=1e-14)


def test_swiglu_gates_the_hidden_units():
    net, x = FeedForward(6, 10, activation="swiglu", bias=False, dtype=torch.float64), randn(2, 3, 6)
    gate = x @ net.gate.weight.T
    expected = (gate * torch.sigmoid(gate) * (x @ net.up.weight.T)) @ net.down.weight.T
    assert_close(net(x), expected, rtol=0, atol=1e-14)
    assert FeedForward(6).up.out_features == 24


def test_a_block_without_feed_forward_is_attention_and_residual():
    attention = LinearAttention(8, 2, dtype=torch.float64)
    block, x = Block(8, attention, None, norm=None), randn(2, 5, 8)
    assert_close(block(x), x + attention(x), rtol=0, atol=0)
    assert not any(name.startswith("feed_forward") for name in Block(8, attention, None).state_dict())


@pytest.mark.parametrize("pre_norm", [False, True])
def test_padding_does_not_shape_the_renormalized_cloud(pre_norm):
    attention, net = MeasureAttention(8, 2, dtype=torch.float64), FeedForward(8, dtype=torch.float64)
    block = Block(8, attention, net, norm="zca", pre_norm=pre_norm, dtype=torch.float64)
    assert isinstance(block.feed_forward_norm, Renormalization)
    x = randn(1, 20, 8)
    padded = torch.cat([x, 50 + randn(1, 5, 8, seed=1)], 1)
    assert_close(block(padded, lengths=20)[:, :20], block(x), rtol=0, atol=1e-10)


def test_statistics_come_along():
    attention = MeasureAttention(8, 2, dtype=torch.float64)
    block, x = Block(8, attention, FeedForward(8, dtype=torch.float64), dtype=torch.float64), randn(2, 5, 8)
    output, found = block(x, return_statistics=True)
    assert torch.equal(output, block(x))
    inner = functional.layer_norm(x, (8,))
    assert_close(found.entropy, attention(inner, return_statistics=True).statistics.entropy, rtol=0, atol=1e-12)


def test_an_unknown_activation_is_refused():
    with pytest.raises(UserError, match="activation must"):
        FeedForward(8, activation="tanh")
