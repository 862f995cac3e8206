"""Caches of keys and values, apart from layers."""

import pytest
import torch
from torch.testing import assert_close

from massieu.checks import UserError
from massieu.nn import KeyValueCache, LinearAttention


def test_growing_buffers_keep_every_token():
    key, value = torch.randn(2, 3, 50, 4), torch.randn(2, 3, 50, 5)
    cache = KeyValueCache(capacity=2)
    for start, stop in [(0, 1), (1, 2), (2, 3), (3, 20), (20, 50)]:
        found = cache.append(key[:, :, start:stop], value[:, :, start:stop])
        assert cache.length == stop
        assert torch.equal(found[0], key[:, :, :stop])
        assert torch.equal(found[1], value[:, :, :stop])


def test_a_cache_with_room_does_not_move():
    cache = KeyValueCache(capacity=10)
    places = {cache.append(torch.randn(1, 1, 1, 4))[0].data_ptr() for _ in range(10)}
    assert len(places) == 1
    assert cache.append(torch.randn(1, 1, 1, 4))[0].data_ptr() not in places


def test_values_that_are_the_keys_are_stored_once():
    key, value = KeyValueCache().append(torch.randn(1, 2, 3, 4))
    assert key.data_ptr() == value.data_ptr()


def test_another_batch_is_refused():
    cache = KeyValueCache()
    cache.append(torch.randn(2, 1, 3, 4))
    with pytest.raises(UserError, match=r"the cache holds .*got .*; use a new cache for another batch or layer"):
        cache.append(torch.randn(1, 1, 3, 4))


def test_gradients_through_a_cache_are_refused():
    with pytest.raises(
        RuntimeError, match="must be filled without gradients, got .*; call the model under torch.no_grad"
    ):
        KeyValueCache().append(torch.randn(1, 1, 3, 4, requires_grad=True))
    layer = LinearAttention(4, causal=True)
    with pytest.raises(RuntimeError, match="must be filled without gradients"):
        layer(torch.randn(1, 3, 4), cache=layer.new_cache())


def test_linear_attention_carries_a_state_of_fixed_size():
    layer = LinearAttention(4, causal=True)
    cache = layer.new_cache()
    with torch.no_grad():
        for tokens in (1, 7, 300):
            layer(torch.ones(2, tokens, 4), cache=cache)
            assert cache.state.shape == (2, 1, 4, 4)
    assert cache.length == 308
    one = torch.einsum("d,v->dv", layer.k_proj(torch.ones(4)), layer.v_proj(torch.ones(4)))
    assert_close(cache.state[0, 0], 308 * one, rtol=1e-4, atol=1e-4)
