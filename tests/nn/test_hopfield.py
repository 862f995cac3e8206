"""Hopfield layers: against torch's attention, against updates written as a loop, and alone against in a batch."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from associations import RAW, STATIC, build, by_heads, generator, randn, update
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close

from massieu.checks import UserError
from massieu.nn import Hopfield, HopfieldEncoderLayer, HopfieldLayer, HopfieldPooling
from massieu.nn.association import settle

# Attention


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("masks", ["none", "padding", "boolean", "numbers", "all"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
def test_one_association_is_the_attention_of_torch(batch_first, masks, dtype, bound):
    theirs = nn.MultiheadAttention(32, 4, batch_first=batch_first, dtype=dtype)
    ours = Hopfield(32, num_heads=4, batch_first=batch_first, dtype=dtype, **RAW)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(randn(96, 32, dtype=dtype) / 4)
        theirs.in_proj_bias.copy_(randn(96, dtype=dtype))
        theirs.out_proj.bias.copy_(randn(32, dtype=dtype))
        for name, weight, bias in zip("qkv", theirs.in_proj_weight.chunk(3), theirs.in_proj_bias.chunk(3), strict=True):
            getattr(ours, f"{name}_proj").weight.copy_(weight)
            getattr(ours, f"{name}_proj").bias.copy_(bias)
    ours.out_proj.load_state_dict(theirs.out_proj.state_dict())
    state, stored, value = (randn(3, size, 32, seed=i, dtype=dtype) for i, size in enumerate((5, 7, 7)))
    padding = torch.arange(7) >= torch.tensor([[7], [4], [1]]) if masks in ("padding", "all") else None
    mask = {"boolean": randn(5, 7) > 0.5, "numbers": randn(5, 7, dtype=dtype), "all": randn(12, 5, 7) > 1.0}.get(masks)
    if masks in ("boolean", "all"):
        mask[..., 0] = False
    if not batch_first:
        state, stored, value = (x.transpose(0, 1) for x in (state, stored, value))
    expected, _ = theirs(state, stored, value, key_padding_mask=padding, attn_mask=mask, need_weights=False)
    assert_close(ours((stored, state, value), padding, mask), expected, rtol=0, atol=bound)


def test_norms_and_sizes_of_their_own_reach_the_reference():
    layer = build(12, 5, 7, 3, num_heads=2, stored_pattern_size=9, pattern_projection_size=4)
    state, stored, value = randn(2, 6, 12), randn(2, 8, 9, seed=1), randn(2, 8, 4, seed=2)
    query = by_heads(layer.q_proj, layer.norm_state_pattern(state), 2)
    key = by_heads(layer.k_proj, layer.norm_stored_pattern(stored), 2)
    values = by_heads(layer.v_proj, layer.norm_pattern_projection(value), 2)
    assert (query.shape[-1], values.shape[-1]) == (5, 3)
    heads = update(query, key, 5**-0.5, values)
    expected = layer.out_proj(heads.permute(0, 2, 1, 3).reshape(2, 6, 6))
    assert expected.shape == (2, 6, 7)
    assert_close(layer((stored, state, value)), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_the_number_of_updates_is_update_steps_max(steps):
    layer = Hopfield(scaling=0.5, update_steps_max=steps, update_steps_eps=0.0, **STATIC)
    stored, state, value = randn(2, 9, 4), randn(2, 3, 4, seed=1), randn(2, 9, 5, seed=2)
    found, expected = layer.associate((stored, state, value)), state
    for _ in range(steps):
        expected = update(expected, stored, 0.5)
    assert_close(found.state[:, 0], expected, rtol=0, atol=1e-13)
    assert_close(found.output, update(expected, stored, 0.5, value), rtol=0, atol=1e-13)
    assert bool((found.steps == steps).all())


# Beta


def per_head(layer: Hopfield, x: Tensor, beta: Tensor, steps: int = 0) -> Tensor:
    """Heads one after the other, each with its own beta."""
    query, key, value = (by_heads(getattr(layer, f"{n}_proj"), x, layer.num_heads) for n in "qkv")
    outputs = []
    for head, own in enumerate(beta):
        state = query[:, head]
        for _ in range(steps):
            state = update(state, key[:, head], own)
        outputs.append(update(state, key[:, head], own, value[:, head]))
    return layer.out_proj(torch.cat(outputs, -1))


@pytest.mark.parametrize("steps", [0, 2])
def test_one_beta_per_head_is_one_call_per_head(steps):
    beta, x = torch.tensor([0.1, 3.0], dtype=torch.float64), randn(2, 6, 8)
    layer = build(8, num_heads=2, scaling=beta, update_steps_max=steps, update_steps_eps=0.0, **RAW)
    assert_close(layer(x), per_head(layer, x, beta, steps), rtol=0, atol=1e-13)
    assert float((layer(x) - per_head(layer, x, beta.flip(0), steps)).detach().abs().max()) > 1e-3  # the control


@pytest.mark.parametrize("shape", [(), (1,), (2,)])
def test_beta_may_be_learned(shape):
    beta = nn.Parameter(torch.full(shape, 0.7, dtype=torch.float64))
    x, layer = randn(2, 6, 8), build(8, num_heads=2, scaling=beta, update_steps_max=2, update_steps_eps=0.0, **RAW)
    assert "scaling" in dict(layer.named_parameters())
    assert (layer.scaling is beta) == (shape != ())
    own = layer.scaling.detach().expand(2).clone().requires_grad_()
    (expected,) = torch.autograd.grad(per_head(layer, x, own, 2).square().sum(), own)
    (found,) = torch.autograd.grad(layer(x).square().sum(), layer.scaling)
    assert_close(found.reshape(-1).sum(), expected.sum(), rtol=1e-10, atol=0)
    copied = build(8, num_heads=2, scaling=nn.Parameter(torch.ones_like(layer.scaling)), **RAW)
    copied.load_state_dict(layer.state_dict())
    assert_close(copied.scaling, layer.scaling)


def test_beta_as_a_tensor_moves_and_is_saved_with_the_layer():
    layer = Hopfield(8, num_heads=2, scaling=torch.tensor([1.0, 2.0]))
    assert "scaling" in layer.state_dict()
    assert layer.double().scaling.dtype == torch.float64
    assert "scaling" not in dict(layer.named_parameters())
    assert layer(randn(1, 3, 8)).dtype == torch.float64


# Stopping


def test_a_state_stops_by_itself_in_any_batch():
    layer = Hopfield(scaling=1.0, update_steps_max=None, update_steps_eps=0.05, **STATIC)
    stored = torch.tensor([[[1.02, 0.0], [-1.02, 0.0]]], dtype=torch.float64)
    one, other = (torch.tensor([[[size, 0.0]]], dtype=torch.float64) for size in (0.9, 5.0))
    alone, mate = (layer.associate((stored, state, stored)) for state in (one, other))
    assert int(alone.steps) != int(mate.steps)  # else stopping together would be no different
    batched = layer.associate((stored, torch.cat([one, other]), stored))
    as_set = layer.associate((stored, torch.cat([one, other], 1), stored))
    for both in (batched.output.flatten(0, 1), as_set.output[0]):
        assert_close(both, torch.cat([alone.output, mate.output])[:, 0], rtol=0, atol=1e-15)
    assert batched.steps.flatten().tolist() == [int(alone.steps), int(mate.steps)]
    assert bool(batched.converged.all())
    assert bool((batched.residual <= 0.05).all())


def test_a_layer_says_how_it_ended():
    stored, state = randn(1, 5, 3), randn(1, 4, 3, seed=1)
    found = Hopfield(scaling=4.0, update_steps_max=2, update_steps_eps=1e-9, **STATIC).associate(
        (stored, state, stored)
    )
    assert bool((found.steps == 2).all())
    assert not bool(found.converged.any())
    assert found.message == "0 of 4 states converged, in at most 2 steps"
    found = Hopfield(scaling=4.0, **STATIC).associate((stored, state, stored))
    assert bool(found.residual.isinf().all())
    found = Hopfield(scaling=4.0, update_steps_max=None, update_steps_eps=1e-12, **STATIC).associate(
        (stored, state, stored)
    )
    assert bool(found.converged.all())
    assert_close(found.state[:, 0], update(found.state[:, 0], stored, 4.0), rtol=0, atol=1e-11)
    poisoned = torch.cat([state, state * torch.nan], 1)
    found = Hopfield(scaling=4.0, update_steps_max=9, **STATIC).associate((stored, poisoned, stored))
    assert not bool(found.converged[..., 4:].any())
    assert bool(found.output[:, :4].isfinite().all())


# Derivatives


def settled_slope(
    gradient: str, stored: Tensor, state: Tensor, beta: Tensor, steps: int | None, eps: float
) -> list[Tensor]:
    layer = Hopfield(
        scaling=nn.Parameter(beta), update_steps_max=steps, update_steps_eps=eps, gradient=gradient, **STATIC
    )
    tensors = [stored.clone().requires_grad_(), state.clone().requires_grad_()]
    output = layer((tensors[0], tensors[1], tensors[0]))
    return list(torch.autograd.grad((output * randn(*output.shape, seed=7)).sum(), [*tensors, layer.scaling]))


def test_unrolled_derivatives_are_those_of_the_loop():
    stored, state, beta = randn(2, 9, 4), randn(2, 3, 4, seed=1), torch.tensor([0.8], dtype=torch.float64)
    found = settled_slope("unroll", stored, state, beta, 3, 0.0)
    tensors = [x.clone().requires_grad_() for x in (stored, state, beta)]
    moved = tensors[1]
    for _ in range(4):
        moved = update(moved, tensors[0], tensors[2])
    expected = torch.autograd.grad((moved * randn(2, 3, 4, seed=7)).sum(), tensors)
    for mine, other in zip(found, expected, strict=True):
        assert_close(mine, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("beta", [0.3, 1.5])
def test_implicit_derivatives_are_those_of_a_long_loop(beta):
    stored, state = randn(2, 6, 4), randn(2, 5, 4, seed=1)
    both = [
        settled_slope(kind, stored, state, torch.tensor([beta]).double(), 3000, 1e-14)
        for kind in ("unroll", "implicit")
    ]
    for unrolled, implicit in zip(*both, strict=True):
        assert_close(implicit, unrolled, rtol=1e-8, atol=1e-9)
    assert float(both[1][1].abs().max()) == 0.0  # the start only chooses the fixed point
    early = settled_slope("unroll", stored, state, torch.tensor([beta]).double(), 1, 0.0)
    assert float((early[0] - both[1][0]).abs().max()) > 1e-3  # the control


def test_small_gradients_do_not_vanish_in_single_precision():
    layer = Hopfield(scaling=0.5, update_steps_max=500, update_steps_eps=1e-6, gradient="implicit", **STATIC)
    stored = randn(1, 6, 4, dtype=torch.float32).requires_grad_()
    output = layer((stored, randn(1, 2, 4, seed=1, dtype=torch.float32), stored)).sum()
    slopes = [
        torch.autograd.grad(output, stored, torch.tensor(size), retain_graph=True)[0] for size in (1.0, 2.0**-100)
    ]
    assert_close(slopes[1] * 2.0**100, slopes[0], rtol=1e-5, atol=1e-6)


def test_implicit_derivatives_respect_masks_and_heads():
    padding = torch.arange(6) >= torch.tensor([[6], [3]])
    slopes = []
    for gradient in ("unroll", "implicit"):
        beta = nn.Parameter(torch.tensor([0.4, 1.3], dtype=torch.float64))
        options = {"update_steps_max": 3000, "update_steps_eps": 1e-14, "add_zero_association": True}
        layer = build(8, num_heads=2, scaling=beta, gradient=gradient, **options)
        loss = layer(randn(2, 6, 8), padding).square().sum()
        slopes.append(torch.autograd.grad(loss, list(layer.parameters())))
    for unrolled, implicit in zip(*slopes, strict=True):
        assert_close(implicit, unrolled, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("steps", [0, 1])
def test_a_row_that_did_not_converge_is_unrolled(steps):
    near = torch.tensor([[5.0, 0.0, 0.0, 0.0], [0.0, 5.0, 0.0, 0.0], [-2.0, -1.0, 0.5, 1.0]], dtype=torch.float64)
    state = torch.stack([near[0], torch.tensor([0.5, 0.1, 0.3, -0.2]).double()])[None]  # the first is at rest at once
    beta = torch.tensor([0.7], dtype=torch.float64)
    both = [settled_slope(kind, near[None], state, beta, steps, 1e-7) for kind in ("unroll", "implicit")]
    for unrolled, implicit in zip(*both, strict=True):
        assert_close(implicit, unrolled, rtol=1e-6, atol=1e-6)
    assert float(both[1][1][0, 1].abs().max()) > 1e-3  # it does depend on where it started


def test_a_scaling_belongs_to_its_layer():
    given = torch.tensor([1.0, 2.0])
    layer = Hopfield(8, num_heads=2, scaling=given)
    given.fill_(9.0)
    assert_close(layer.scaling, torch.tensor([1.0, 2.0]))


def test_implicit_derivatives_end_in_a_sentence_where_they_do_not_exist():
    options = {"update_steps_max": 50, "gradient": "implicit"} | STATIC
    layer = Hopfield(scaling=1.0, **options)
    pair = torch.tensor([[[2.0, 0.0], [-2.0, 0.0]]], dtype=torch.float64, requires_grad=True)
    output = layer((pair, torch.tensor([[[0.0, 5.0]]], dtype=torch.float64), pair))  # falls on the saddle at zero
    with pytest.raises(
        RuntimeError, match="needs a minimum of the energy, got 1 rows at a saddle or nearly degenerate"
    ):
        output[..., 0].sum().backward()
    stored = randn(1, 6, 4).requires_grad_()
    output = layer((stored, randn(1, 2, 4), stored))
    with pytest.raises(RuntimeError, match='gradient="implicit" has first derivatives only'):
        torch.autograd.grad(output.sum(), stored, create_graph=True)


def test_without_derivatives_nothing_is_attached():
    with torch.no_grad():
        settled = settle(lambda x: 0.5 * x, randn(2, 3), steps=99, tolerance=1e-9, gradient="implicit")
    assert not settled.state.requires_grad
    assert bool(settled.converged.all())


# Rows that see nothing


@pytest.mark.parametrize("gradient", ["unroll", "implicit"])
def test_a_state_that_sees_nothing_retrieves_zero(gradient):
    layer = build(8, num_heads=2, update_steps_max=5, gradient=gradient)
    x, padding = randn(2, 4, 8), torch.tensor([[False] * 4, [False, False, True, True]])
    mask = torch.zeros(4, 4, dtype=torch.bool)
    mask[1], mask[3, :2] = True, True
    output = layer(x, padding, mask)
    assert_close(output[:, 1], layer.out_proj.bias.expand(2, 8))
    assert_close(output[1, 3], layer.out_proj.bias)
    slopes = torch.autograd.grad(output.square().sum(), list(layer.parameters()))
    assert all(bool(slope.isfinite().all()) for slope in slopes)
    matrix = layer.get_association_matrix(x, padding, mask)
    assert_close(matrix.sum(-1)[:, 0], torch.tensor([[1.0, 0.0, 1.0, 1.0], [1.0, 0.0, 1.0, 0.0]]).double())


@pytest.mark.parametrize("numbers", [False, True])
def test_an_entry_without_patterns_is_refused_unless_there_is_one_for_all(numbers):
    x, padding = randn(2, 4, 8), torch.tensor([[True] * 4, [False, False, True, True]])
    if numbers:
        padding = torch.zeros(2, 4, dtype=torch.float64).masked_fill(padding, torch.finfo(torch.float64).min)
    sentence = "the padding mask must leave"
    encoder = nn.TransformerEncoder(HopfieldEncoderLayer(build(8)), num_layers=1, enable_nested_tensor=False).double()
    calls = [build(8), build(8, kind=HopfieldPooling), lambda *given: encoder(given[0], src_key_padding_mask=given[1])]
    for call in calls:
        with pytest.raises(UserError, match=sentence):
            call(x, padding)
    for option in ("add_zero_association", "concat_bias_pattern"):
        layer = build(8, update_steps_max=2, **{option: True})
        value = layer.bias_v if option == "concat_bias_pattern" else torch.zeros(1, 8).double()
        assert_close(layer(x, padding)[0], layer.out_proj(value).expand(4, 8), rtol=0, atol=1e-13)


@pytest.mark.parametrize("numbers", [False, True])
def test_a_masked_pattern_is_no_pattern(numbers):
    layer, x = build(8, num_heads=2, update_steps_max=3), randn(1, 6, 8)
    padding = torch.arange(6)[None] >= 4
    expected = layer((x[:, :4], x, x[:, :4]))
    if numbers:
        padding = torch.zeros(1, 6).masked_fill(padding, -torch.inf)
    assert_close(layer(x, padding), expected, rtol=0, atol=1e-13)


def test_a_zero_association_is_a_pattern_of_zeros():
    layer = Hopfield(scaling=2.0, update_steps_max=2, update_steps_eps=0.0, add_zero_association=True, **STATIC)
    stored, state = randn(1, 4, 3), randn(1, 2, 3, seed=1)
    more = torch.cat([stored, torch.zeros(1, 1, 3)], 1)
    plain = Hopfield(scaling=2.0, update_steps_max=2, update_steps_eps=0.0, **STATIC)
    assert_close(layer((stored, state, stored)), plain((more, state, more)), rtol=0, atol=1e-13)
    matrix = plain.get_association_matrix((more, state, more))
    assert_close(layer.get_association_matrix((stored, state, stored)), matrix[..., :-1], rtol=0, atol=1e-13)


@pytest.mark.parametrize("mask", [None, "boolean", "numbers"])
def test_the_association_matrix_makes_the_output(mask):
    layer = Hopfield(scaling=1.5, update_steps_max=2, **STATIC)
    stored, state, value = randn(2, 6, 3), randn(2, 4, 3, seed=1), randn(2, 6, 5, seed=2)
    given = {"boolean": randn(4, 6) > 0.8, "numbers": randn(4, 6)}.get(mask)
    matrix = layer.get_association_matrix((stored, state, value), association_mask=given)
    output = layer((stored, state, value), association_mask=given)
    assert_close(matrix[:, 0] @ value, output, rtol=0, atol=1e-13)


# Pooling and lookup


@pytest.mark.parametrize("batch_first", [True, False])
def test_pooling_associates_trained_states_with_the_input(batch_first):
    pool = build(8, kind=HopfieldPooling, num_heads=2, quantity=3, output_size=5, batch_first=batch_first)
    x, padding = randn(4, 6, 8), torch.arange(6) >= torch.tensor([[6], [3], [1], [2]])
    given = x if batch_first else x.transpose(0, 1)
    found = pool(given, padding)
    assert found.shape == (4, 15)
    same = copy.deepcopy(pool.hopfield)
    same.batch_first = True
    expected = same((x, pool.pooling_weights.expand(4, 3, 8), x), padding)
    assert_close(found, expected.flatten(1), rtol=0, atol=1e-13)
    assert_close(pool((given, given), padding), found)
    assert pool.get_association_matrix(given, padding).shape == (4, 2, 3, 6)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("separated", [True, False])
def test_lookup_associates_the_input_with_trained_patterns(batch_first, separated):
    options = {"quantity": 7, "batch_first": batch_first, "lookup_weights_as_separated": separated}
    layer = build(8, kind=HopfieldLayer, num_heads=2, update_steps_max=2, **options)
    x = randn(4, 6, 8)
    found = layer(x if batch_first else x.transpose(0, 1))
    same = copy.deepcopy(layer.hopfield)
    same.batch_first = True
    values = layer.target_weights if separated else layer.lookup_weights
    expected = same((layer.lookup_weights[None], x, values[None]))
    assert_close(found if batch_first else found.transpose(0, 1), expected, rtol=0, atol=1e-13)
    assert layer.get_association_matrix(x if batch_first else x.transpose(0, 1)).shape == (4, 2, 6, 7)


def test_patterns_of_a_layer_are_trained_unless_they_are_not_to_be():
    for kind, name in ((HopfieldPooling, "pooling_weights"), (HopfieldLayer, "lookup_weights")):
        for trainable in (True, False):
            layer = build(8, kind=kind, quantity=2, trainable=trainable)
            layer(randn(1, 3, 8)).square().sum().backward()
            assert (getattr(layer, name).grad is not None) == trainable
    layer = build(
        8, kind=HopfieldLayer, quantity=2, lookup_weights_as_separated=True, lookup_targets_as_trainable=False
    )
    assert not layer.target_weights.requires_grad


def test_the_seed_decides_the_weights():
    for kind in (Hopfield, HopfieldPooling, HopfieldLayer):
        first, second, third = (kind(8, generator=generator(seed)).state_dict() for seed in (0, 0, 1))
        assert all(torch.equal(first[name], second[name]) for name in first)
        assert any(not torch.equal(first[name], third[name]) for name in first)


# Inside torch


@pytest.mark.parametrize(("norm_first", "batch_first"), list(itertools.product([True, False], repeat=2)))
def test_an_encoder_of_torch_takes_the_layer(norm_first, batch_first):
    association = Hopfield(8, num_heads=2, update_steps_max=3, batch_first=batch_first)
    layer = HopfieldEncoderLayer(association, 16, dropout=0.0, norm_first=norm_first)
    encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
    x, padding = randn(3, 5, 8, dtype=torch.float32), torch.arange(5) >= torch.tensor([[5], [3], [2]])
    mask = torch.ones(5, 5, dtype=torch.bool).triu(1)
    given = x if batch_first else x.transpose(0, 1)
    for mode in (encoder.train(), encoder.eval()):
        found = mode(given, mask=mask, src_key_padding_mask=padding, is_causal=True)
        expected = given
        for each in encoder.layers:
            expected = each(expected, mask, padding)
        assert_close(found, expected, rtol=0, atol=1e-6)
    found.square().sum().backward()
    assert all(parameter.grad is not None for parameter in encoder.parameters())


def test_an_encoder_layer_is_that_of_torch_with_its_weights():
    theirs = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, dtype=torch.float64)
    ours = HopfieldEncoderLayer(
        Hopfield(8, num_heads=2, dtype=torch.float64, **RAW), 16, dropout=0.0, dtype=torch.float64
    )
    state = {name: weight for name, weight in theirs.state_dict().items() if name.startswith(("norm", "self_attn.out"))}
    for kind in ("weight", "bias"):
        parts = getattr(theirs.self_attn, f"in_proj_{kind}").chunk(3)
        state |= {f"self_attn.{name}_proj.{kind}": part for name, part in zip("qkv", parts, strict=True)}
        state |= {f"feed_forward.up.{kind}": getattr(theirs.linear1, kind)}
        state |= {f"feed_forward.down.{kind}": getattr(theirs.linear2, kind)}
    ours.load_state_dict(state)
    x = randn(3, 5, 8)
    assert_close(ours(x), theirs(x), rtol=0, atol=1e-13)


def test_dropout_acts_on_the_output_in_training_alone():
    layer, x = Hopfield(8, dropout=0.5), randn(2, 50, 8, dtype=torch.float32)
    assert 0.3 < float((layer(x) == 0).float().mean()) < 0.7
    assert torch.equal(layer.eval()(x), functional.dropout(layer(x), 0.5, training=False))


# Torch looks at the gradients of intermediate results after each graph break, and hides its warning from users only.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("gradient", ["unroll", "implicit"])
def test_a_compiled_layer_finds_the_same(gradient):
    layer, x = build(8, num_heads=2, update_steps_max=3, gradient=gradient), randn(2, 5, 8)
    torch.compiler.reset()
    outputs = [each(x) for each in (torch.compile(layer, backend="eager"), layer)]
    assert_close(*outputs)
    slopes = [torch.autograd.grad(output.square().sum(), layer.k_proj.weight)[0] for output in outputs]
    assert_close(*slopes)


# Mistakes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 3}, "input_size must be a multiple"),
        ({"num_heads": 0}, "num_heads must"),
        ({"hidden_size": 0}, "hidden_size must"),
        ({"scaling": 0.0}, "scaling must"),
        ({"scaling": torch.tensor([1.0, -1.0]), "num_heads": 2}, "scaling must be positive"),
        ({"scaling": torch.ones(3), "num_heads": 2}, "scaling must have shape"),
        ({"scaling": "1"}, "scaling must"),
        ({"pattern_size": 0}, "pattern_size must"),
        ({"output_size": 0}, "output_size must"),
        ({"input_size": -8}, "input_size must"),
        ({"stored_pattern_size": "a"}, "stored_pattern_size must"),
        ({"gradient": "none"}, "gradient must"),
        ({"update_steps_max": -1}, "update_steps_max must"),
        ({"update_steps_eps": -1.0}, "update_steps_eps must"),
        ({"hidden_size": 5, "state_pattern_as_static": True}, "hidden_size must be the size of static"),
        ({"input_size": None}, "input_size must be given"),
    ],
)
def test_a_layer_that_cannot_be_is_refused(options, message):
    with pytest.raises(UserError, match=message):
        Hopfield(**{"input_size": 8} | options)


X = randn(2, 5, 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((X[0],), "state must"),
        ((X.float(),), "state must have the dtype"),
        (((X, X),), "input must"),
        (((X, X, X[:, :4]),), "stored and projection must have as many patterns, .* got 5 and 4 patterns of size 4"),
        (((X, X[:1].expand(3, 5, 8), X),), "input must have one batch size"),
        ((X, torch.zeros(5, 2, dtype=torch.bool)), "the padding mask must"),
        ((X, torch.zeros(2, 5, dtype=torch.uint8)), "the padding mask must be a boolean"),
        ((X, None, torch.zeros(3, 5, 5)), "the association mask must"),
    ],
)
def test_wrong_input_is_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        build(8, num_heads=2)(*arguments)


def test_wrong_parts_are_refused():
    with pytest.raises(UserError, match="quantity must"):
        HopfieldPooling(8, quantity=0)
    with pytest.raises(UserError, match="quantity must"):
        HopfieldLayer(8, quantity=0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'quantaty'"):
        HopfieldLayer(8, quantaty=2)
    with pytest.raises(UserError, match="hopfield_association must"):
        HopfieldEncoderLayer(8)
    with pytest.raises(
        UserError, match="hopfield_association must map a size to itself, got 8 to 3; the output is added"
    ):
        HopfieldEncoderLayer(Hopfield(8, output_size=3))
