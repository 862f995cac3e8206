"""Layers whose tokens see each other by a pattern."""

import pytest
import torch

from massieu.checks import UserError
from massieu.nn import MeasureAttention, Transformer
from massieu.patterns import (
    bigbird,
    fixed,
    from_mask,
    powers_of_two,
    random_regular,
    reach_by_layer,
    ring,
    star_ring,
    strided,
    window,
)


def layer(**options):
    return MeasureAttention(16, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64, **options)


def tokens(length=12):
    return torch.randn(2, length, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("tying", ["free", "tied", "source"])
def test_a_pattern_is_the_mask_that_it_stands_for(tying):
    x, pattern = tokens(), bigbird(1, 1, 2, seed=2)
    expected = layer(tying=tying)(x, log_weight=pattern.mask(12))
    assert torch.allclose(layer(tying=tying, pattern=pattern)(x), expected, atol=1e-12)
    assert not torch.allclose(layer(tying=tying, pattern=window(1))(x), expected, atol=1e-3)


def test_a_pattern_meets_masks_biases_causality_and_lengths():
    x, pattern = tokens(), star_ring()
    bias = torch.randn(12, 12, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    whole = pattern.log_weights(12, torch.float64)
    sparse, plain = layer(pattern=pattern, causal=True), layer(causal=True)
    assert torch.allclose(sparse(x, log_weight=bias), plain(x, log_weight=bias + whole), atol=1e-12)
    assert torch.allclose(
        sparse(x, log_weight=bias > 0), plain(x, log_weight=pattern.mask(12) & (bias > 0)), atol=1e-12
    )
    assert torch.allclose(sparse(x, lengths=7), plain(x, log_weight=whole, lengths=7), atol=1e-12)


@pytest.mark.parametrize(
    "pattern",
    [
        window(2, causal=True),
        powers_of_two(),
        strided(3)[1],
        fixed(3)[1],
        bigbird(1, 1, 2).laid_out(12),
        from_mask(star_ring().mask(12)).laid_out(12),
    ],
    ids=repr,
)
@torch.no_grad()
def test_a_cache_sees_the_rows_of_the_last_tokens(pattern):
    x, sparse = tokens(), layer(pattern=pattern, causal=True)
    whole = sparse(x)
    cache = sparse.new_cache()
    parts = [sparse(x[:, :5], cache=cache), sparse(x[:, 5:6], cache=cache), sparse(x[:, 6:], cache=cache)]
    assert torch.allclose(torch.cat(parts, 1), whole, atol=1e-12)


@pytest.mark.parametrize(
    "pattern", [bigbird(1, 1, 2), strided()[0], fixed()[1], ring(), star_ring(), random_regular(4)], ids=repr
)
@torch.no_grad()
def test_a_cache_is_refused_where_rows_change_as_tokens_come(pattern):
    sparse = layer(pattern=pattern, causal=True)
    with pytest.raises(
        UserError, match="a cache needs a pattern whose rows do not depend on the length, got"
    ) as raised:
        sparse(tokens()[:, :1], cache=sparse.new_cache())
    assert "pattern.laid_out(length)" in str(raised.value)
    model = Transformer(16, 2, 2, vocabulary=5, pattern=pattern, generator=torch.Generator().manual_seed(0))
    with pytest.raises(UserError, match="a cache needs a pattern whose rows do not depend"):
        model.generate(torch.zeros(1, 2, dtype=torch.long), 3)


def test_layers_of_a_transformer_take_the_patterns_of_a_schedule_in_turn():
    schedule = strided(4)
    model = Transformer(16, 3, 2, causal=False, pattern=schedule, generator=torch.Generator().manual_seed(0))
    assert [block.attention.pattern for block in model.blocks] == [schedule[0], schedule[1], schedule[0]]
    assert "pattern=strided(4)[1]" in repr(model)


def test_a_token_depends_on_the_tokens_that_the_pattern_reaches():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 16, 16, dtype=torch.float64, generator=generator)
    for layers in (1, 2, 3):
        model = Transformer(16, layers, 2, causal=False, pattern=strided(4), dtype=torch.float64, generator=generator)
        slopes = torch.autograd.functional.jacobian(model, x)[0, :, 0, 0].abs().sum(-1)
        assert torch.equal(slopes > 0, reach_by_layer(strided(4), 16, layers)[-1].mask())
    assert bool((slopes > 0).all())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: layer(pattern=strided(4)), "pattern must"),
        (lambda: layer(pattern=window(1))(tokens(), tokens()), "a pattern is for self-attention"),
        (lambda: Transformer(8, 2, 2, pattern=strided(2), shared_layers=True), "shared layers have one pattern"),
        (lambda: Transformer(8, 2, 2, pattern=window(2), attention="linear"), "linear attention has no pattern"),
        (lambda: layer(pattern=from_mask(torch.eye(5, dtype=torch.bool)))(tokens()), "5 tokens, got 12"),
    ],
)
def test_bad_input_is_answered_with_one_sentence(call, message):
    with pytest.raises(ValueError, match=message):
        call()
