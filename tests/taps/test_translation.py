"""The scores that are handed out are those that the function computes."""

import pytest
import torch
from taps.weights import output, weights
from torch import nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from torch.testing import assert_close

from massieu.taps import AttentionCall
from massieu.taps.translation import from_attend, from_interface, from_sdpa, from_softmax


def tensors(queries, atoms, heads=4, key_heads=4, dim=8):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, queries, dim), (2, key_heads, atoms, dim), (2, key_heads, atoms, dim)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def call(scores):
    return AttentionCall(name="a", number=0, layer=0, stack="encoder", module=nn.Identity(), **vars(scores))


@pytest.mark.parametrize(("queries", "atoms"), [(5, 5), (3, 7), (7, 3), (1, 4)])
@pytest.mark.parametrize("causal", [True, False])
def test_causality_of_sdpa_is_aligned_with_the_first_atoms(queries, atoms, causal):
    query, key, value = tensors(queries, atoms)
    result = scaled_dot_product_attention(query, key, value, is_causal=causal)
    found = call(from_sdpa(query, key, value, is_causal=causal, result=result))
    assert_close(output(found), result.double(), rtol=0, atol=1e-6)


def test_arguments_of_sdpa_may_come_by_position_or_name():
    query, key, value = tensors(5, 7, key_heads=2)
    mask = torch.rand(5, 7) < 0.7
    result = scaled_dot_product_attention(query, key, value, mask, 0.0, False, scale=0.3, enable_gqa=True)
    found = call(from_sdpa(query, key, value, mask, 0.0, False, scale=0.3, enable_gqa=True, result=result))
    assert found.key.shape[1] == 2
    assert_close(output(found), result.double(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("axes", [2, 3, 5])
def test_sdpa_takes_any_number_of_axes(axes):
    shape = (2, 3, 2, 4, 8)[-axes:]
    query, key, value = torch.randn(3, *shape).unbind(0)
    result = scaled_dot_product_attention(query, key, value)
    found = call(from_sdpa(query, key, value, result=result))
    assert found.query.dim() == 4
    assert_close(output(found), found.output.double(), rtol=0, atol=1e-6)


def test_masks_without_entries_are_filled_in():
    query, key, value = tensors(3, 5)
    mask = causal_lower_right(3, 5)
    result = scaled_dot_product_attention(query, key, value, attn_mask=mask)
    found = call(from_sdpa(query, key, value, attn_mask=mask, result=result))
    assert found.causal
    assert_close(output(found), result.double(), rtol=0, atol=1e-6)


class Layer(nn.Module):
    is_causal = True
    num_key_value_groups = 2


@pytest.mark.parametrize(("queries", "atoms"), [(5, 5), (4, 9), (1, 9)])
@pytest.mark.parametrize("is_causal", [None, True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_the_interface_cuts_off_what_a_static_cache_has_not_filled(queries, atoms, is_causal, biased):
    interface = pytest.importorskip("transformers.integrations.sdpa_attention").sdpa_attention_forward
    query, key, value = tensors(queries, atoms, key_heads=2)
    bias = torch.randn(1, 4, queries, atoms) if biased else None
    kwargs = {"scaling": 0.4, "is_causal": is_causal, "position_bias": bias, "s_aux": torch.ones(4)}
    result = interface(Layer(), query, key, value, None, **kwargs)
    found = call(from_interface("sdpa", interface, (Layer(), query, key, value, None), kwargs, result))
    assert found.sink is None
    assert_close(output(found), result[0].transpose(1, 2).double(), rtol=0, atol=1e-6)


def flash(module, query, key, value, attention_mask, dropout=0.0, scaling=None, sliding_window=None, **kwargs):
    return query.transpose(1, 2), None


def test_flash_functions_align_with_the_last_atoms_and_read_the_window():
    query, key, value = tensors(4, 9)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, :3] = 0
    kwargs = {"sliding_window": 5, "softcap": 30.0, "s_aux": torch.ones(4)}
    found = from_interface("flash_attention_2", flash, (Layer(), query, key, value, mask), kwargs, (None,))
    assert (found.causal, found.window, found.softcap, found.scale) == (True, 5, 30.0, 8**-0.5)
    assert torch.equal(found.log_weight, mask[:, None, None].bool())
    assert torch.equal(found.sink, torch.ones(4))
    assert found.output is None
    alone = from_interface(
        "flash_attention_2", flash, (Layer(), query, key, value, None), {"is_causal": False}, (None,)
    )
    assert (alone.causal, alone.window, alone.log_weight) == (False, None, None)


def test_a_function_written_out_does_what_the_mask_says_and_no_more():
    query, key, value = tensors(4, 4)

    def plain(module, query, key, value, attention_mask, **kwargs):
        return torch.softmax(query @ key.mT * kwargs["scaling"], -1) @ value, None

    kwargs = {"scaling": 0.5, "softcap": 3.0, "position_bias": torch.ones(1)}
    found = from_interface("eager", plain, (Layer(), query, key, value, None), kwargs, (None,))
    assert (found.causal, found.softcap, found.log_weight, found.scale) == (False, None, None, 0.5)


def test_masks_of_flex_attention_are_functions_of_the_indices():
    from torch.nn.attention.flex_attention import create_block_mask

    query, key, value = tensors(6, 6)
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 6, 6, device="cpu")
    found = from_interface("flex_attention", flash, (Layer(), query, key, value, mask), {}, (None,))
    assert (found.causal, found.log_weight) == (True, None)


def test_lengths_become_a_mask_of_atoms():
    import massieu

    query, key, value = tensors(3, 5, key_heads=2)
    for weight in (None, torch.rand(2, 1, 3, 5) < 0.8, torch.randn(2, 4, 3, 5)):
        options = {"lengths": torch.tensor([5, 3]), "causal": True, "scale": 0.2, "window": 4, "sink": 0.5}
        result = massieu.attend(query, key, value, weight, **options)
        found = call(from_attend(query, key, value, weight, **options, result=result))
        assert_close(output(found), result.output.double(), rtol=0, atol=1e-6)
        assert_close(weights(found).sum(-1) < 1, torch.ones(2, 4, 3, dtype=torch.bool))


def test_a_softmax_counts_only_over_atoms():
    layer = nn.Module()
    assert from_softmax(torch.randn(2, 4, 3, 5), 1, layer, None) is None
    assert from_softmax(torch.randn(2, 4, 3, 5), None, layer, None) is None
    assert from_softmax(torch.randn(8, 3, 5), -1, layer, None) is None
    assert from_softmax(torch.randn(6, 5), -1, layer, None) is None
    assert from_softmax(torch.randn(2, 4, 3, 5), -1, layer, 6) is not None
    layer.num_heads = 4
    assert from_softmax(torch.randn(8, 3, 5), 2, layer, None).scores.shape == (2, 4, 3, 5)
    assert from_softmax(torch.randn(7, 3, 5), 2, layer, None) is None
    assert from_softmax(torch.randn(2, 3, 4, 5), -1, layer, None) is None
    assert from_softmax(torch.randn(2, 4, 3, 5), -1, layer, 24) is None


def test_the_smallest_number_of_a_half_precision_model_means_absent():
    layer = nn.Linear(2, 2, dtype=torch.float16)
    scores = torch.zeros(1, 1, 2, 2)
    scores[..., 1] = torch.finfo(torch.float16).min
    assert from_softmax(scores, -1, layer, None).scores[0, 0, 0].tolist() == [0.0, -torch.inf]
    scores[..., 0] = torch.finfo(torch.float16).min
    assert from_softmax(scores, -1, layer, None).present.tolist() == [[False, False]]
    assert from_softmax(scores, -1, layer.float(), None).scores.isfinite().all()
