"""Options and precisions of the Hopfield layers: against torch's attention, plain matrices and finite differences."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from associations import RAW, STATIC, build, by_heads, generator, randn, update
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close

from massieu.checks import UserError
from massieu.nn import EnergyTransformer, Hopfield, HopfieldEncoderLayer, HopfieldLayer, HopfieldPooling

# The association space


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("steps", [0, 2])
def test_the_norm_of_the_association_space_acts_on_states_and_keys_of_every_head(affine, steps):
    options = {"normalize_hopfield_space": True, "normalize_hopfield_space_affine": affine}
    options |= {"normalize_hopfield_space_eps": 0.1, "update_steps_max": steps, "update_steps_eps": 0.0}
    layer, x = build(8, 3, num_heads=2, **options, **RAW), randn(2, 5, 8)
    weight, bias = (layer.norm_hopfield_space.weight, layer.norm_hopfield_space.bias) if affine else (1.0, 0.0)
    assert sum("norm_hopfield_space" in name for name, _ in layer.named_parameters()) == 2 * affine

    def normed(y: Tensor) -> Tensor:
        return (y - y.mean(-1, keepdim=True)) / (y.var(-1, correction=0, keepdim=True) + 0.1).sqrt() * weight + bias

    state, key, value = (by_heads(getattr(layer, f"{name}_proj"), x, 2) for name in "qkv")
    state, key = normed(state), normed(key)
    for _ in range(steps):
        state = update(state, key, 3**-0.5)  # not normalized again
    heads = update(state, key, 3**-0.5, value)
    assert_close(layer(x), layer.out_proj(heads.transpose(1, 2).flatten(2)), rtol=0, atol=1e-12)


def test_static_patterns_are_normalized_in_the_association_space_too():
    layer = Hopfield(4, scaling=0.7, normalize_hopfield_space=True, **STATIC)
    x, value = randn(1, 5, 4), randn(1, 5, 4, seed=1)
    normed = functional.layer_norm(x, (4,))
    assert_close(layer((x, x, value)), update(normed, normed, 0.7, value), rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", ["stored_pattern", "state_pattern", "pattern_projection"])
def test_the_floor_of_a_norm_can_be_chosen(name):
    layer = Hopfield(8, **{f"normalize_{name}_eps": 0.25})
    floors = {key: getattr(layer, f"norm_{key}").eps for key in ("stored_pattern", "state_pattern")}
    floors["pattern_projection"] = layer.norm_pattern_projection.eps
    assert floors == dict.fromkeys(floors, 1e-5) | {name: 0.25}


# Values


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("key_static", [False, True])
def test_connected_values_go_through_the_projection_of_the_stored_patterns(static, key_static):
    options = {"pattern_projection_as_static": static, "stored_pattern_as_static": key_static} | RAW
    layer = build(6, 6, num_heads=2, pattern_projection_as_connected=True, **options)
    stored, state, values = randn(2, 7, 6), randn(2, 5, 6, seed=1), randn(2, 7, 6, seed=2)
    query = by_heads(layer.q_proj, state, 2)
    key = stored[:, None] if key_static else by_heads(layer.k_proj, stored, 2)
    value = values
    for linear in (layer.k_proj, layer.v_proj):
        value = value if linear is None else linear(value)
    value = values[:, None] if static and key_static else value.reshape(2, 7, 2, -1).transpose(1, 2)
    heads = update(query, key, 6**-0.5, value)
    output = layer((stored, state, values))
    assert_close(output, layer.out_proj(heads.transpose(1, 2).flatten(2)), rtol=0, atol=1e-12)
    if not key_static:
        weights = layer.get_association_matrix((stored, state, values))
        apart = build(6, 6, num_heads=2, **options)
        assert apart.get_association_matrix((stored, state, values)).shape == weights.shape
        assert float((apart((stored, state, values)) - output).detach().abs().max()) > 1e-3  # the control


@pytest.mark.parametrize("masks", [False, True])
def test_a_bias_pattern_is_that_of_torchs_attention(masks):
    theirs = nn.MultiheadAttention(8, 2, batch_first=True, add_bias_kv=True, dtype=torch.float64)
    ours = Hopfield(8, num_heads=2, concat_bias_pattern=True, dtype=torch.float64, **RAW)
    with torch.no_grad():
        theirs.in_proj_bias.copy_(randn(24))
        for name, weight, bias in zip("qkv", theirs.in_proj_weight.chunk(3), theirs.in_proj_bias.chunk(3), strict=True):
            getattr(ours, f"{name}_proj").weight.copy_(weight)
            getattr(ours, f"{name}_proj").bias.copy_(bias)
        ours.bias_k.copy_(theirs.bias_k.reshape(2, 4))
        ours.bias_v.copy_(theirs.bias_v.reshape(2, 4))
    ours.out_proj.load_state_dict(theirs.out_proj.state_dict())
    x = randn(3, 5, 8)
    padding = torch.arange(5) >= torch.tensor([[5], [3], [1]]) if masks else None
    mask = torch.ones(5, 5, dtype=torch.bool).triu(1) if masks else None
    expected, weights = theirs(x, x, x, key_padding_mask=padding, attn_mask=mask, average_attn_weights=False)
    assert_close(ours(x, padding, mask), expected, rtol=0, atol=1e-13)
    found = ours.get_association_matrix(x, padding, mask)
    assert_close(found, weights[..., :-1], rtol=0, atol=1e-13)
    if masks:
        numbers = torch.zeros(5, 5, dtype=torch.float64).masked_fill(mask, -torch.inf)
        assert_close(ours(x, padding, numbers), expected, rtol=0, atol=1e-13)


def test_a_bias_pattern_takes_part_in_the_updates_and_learns():
    layer = build(8, num_heads=2, concat_bias_pattern=True, update_steps_max=2, update_steps_eps=0.0, **RAW)
    x = randn(2, 5, 8)
    query, key, value = (by_heads(getattr(layer, f"{name}_proj"), x, 2) for name in "qkv")
    key = torch.cat([key, layer.bias_k[:, None].expand(2, 2, 1, 4)], 2)
    value = torch.cat([value, layer.bias_v[:, None].expand(2, 2, 1, 4)], 2)
    for _ in range(2):
        query = update(query, key, 0.5)
    heads = update(query, key, 0.5, value)
    output = layer(x)
    assert_close(output, layer.out_proj(heads.transpose(1, 2).flatten(2)), rtol=0, atol=1e-12)
    slopes = torch.autograd.grad(output.square().sum(), [layer.bias_k, layer.bias_v])
    assert all(float(slope.abs().min()) > 0 for slope in slopes)


@pytest.mark.parametrize("name", ["relu", "gelu", "silu", "selu", "celu", "tanh", "sigmoid"])
def test_an_activation_acts_on_the_output(name):
    plain, layer, x = build(8, num_heads=2), build(8, num_heads=2, association_activation=name), randn(2, 5, 8)
    assert_close(layer(x), getattr(functional, name)(plain(x)), rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"association_activation": "cat"}, "association_activation must"),
        ({"normalize_hopfield_space_affine": True}, "normalize_hopfield_space_affine needs normalize_hopfield_space"),
        (
            {"concat_bias_pattern": True, "stored_pattern_as_static": True},
            "concat_bias_pattern needs projected stored patterns and projections, got static ones; append",
        ),
        (
            {"concat_bias_pattern": True, "pattern_projection_as_static": True},
            "concat_bias_pattern needs projected stored patterns and projections, got static ones; append",
        ),
        (
            {"pattern_projection_as_connected": True, "pattern_projection_size": 5},
            "needs stored patterns and projections of one size, got 8 and 5; both go through one projection",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        Hopfield(8, **options)


def test_wrong_patterns_to_pool_are_refused():
    x = randn(1, 5, 8)
    with pytest.raises(UserError, match="input must"):
        build(8, kind=HopfieldPooling)((x, x, x))
    with pytest.raises(UserError, match="input must"):
        build(8, kind=HopfieldPooling)(None)


# Heads and derivatives


@pytest.mark.parametrize("steps", [0, 3])
def test_one_beta_per_head_is_one_layer_per_head(steps):
    beta, x = torch.tensor([0.2, 2.5], dtype=torch.float64), randn(2, 6, 8)
    options = {"update_steps_max": steps, "disable_out_projection": True} | RAW
    both = build(8, num_heads=2, scaling=beta, **options)
    outputs = []
    for head in range(2):
        alone = build(8, 4, num_heads=1, scaling=float(beta[head]), **options)
        rows = slice(4 * head, 4 * head + 4)
        for name in ("q_proj", "k_proj", "v_proj"):
            alone.get_submodule(name).load_state_dict(
                {key: weight[rows] for key, weight in both.get_submodule(name).state_dict().items()}
            )
        outputs.append(alone(x))
    assert_close(both(x), torch.cat(outputs, -1), rtol=0, atol=1e-13)
    assert float((both(x) - torch.cat(outputs[::-1], -1)).detach().abs().max()) > 1e-3  # the control


@pytest.mark.parametrize("beta", [0.3, 1.5])
def test_both_derivatives_of_a_fixed_point_are_finite_differences(beta):
    stored, state = randn(1, 6, 4), randn(1, 3, 4, seed=1)
    direction, weight, h = randn(1, 6, 4, seed=2), randn(1, 3, 4, seed=3), 1e-3

    def loss(gradient: str, moved: Tensor, scaling: Tensor) -> Tensor:
        options = {"update_steps_max": 3000, "update_steps_eps": 1e-15, "gradient": gradient}
        layer = Hopfield(scaling=nn.Parameter(scaling), **options, **STATIC)
        found = layer.associate((moved, state, moved))
        assert float(found.residual.max()) < 1e-13
        total = (found.output * weight).sum()
        slopes = torch.autograd.grad(total, [moved, layer.scaling]) if moved.requires_grad else ()
        return total if not slopes else torch.stack([(slopes[0] * direction).sum(), slopes[1].sum()])

    at = torch.tensor([beta], dtype=torch.float64)
    unrolled, implicit = (loss(kind, stored.clone().requires_grad_(), at) for kind in ("unroll", "implicit"))
    assert_close(implicit, unrolled, rtol=0, atol=1e-8)
    # Four points: the error is of fourth order in h.
    points, weights = (-2, -1, 1, 2), (1 / 12, -2 / 3, 2 / 3, -1 / 12)
    along = sum(w * loss("unroll", stored + p * h * direction, at) for p, w in zip(points, weights, strict=True)) / h
    in_beta = sum(w * loss("unroll", stored, at + p * h) for p, w in zip(points, weights, strict=True)) / h
    assert_close(implicit, torch.stack([along, in_beta]).detach(), rtol=0, atol=1e-8)


# Inside torch


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("nested", [False, True])
def test_an_encoder_in_evaluation_does_not_pass_by_the_layer(nested):
    layer = HopfieldEncoderLayer(Hopfield(8, num_heads=2, scaling=torch.tensor([0.3, 4.0]), update_steps_max=3), 16)
    encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=nested)
    x, padding = randn(3, 5, 8, dtype=torch.float32), torch.arange(5) >= torch.tensor([[5], [3], [2]])
    calls = []
    for each in encoder.layers:
        each.self_attn.register_forward_hook(lambda module, given, output: calls.append(output.detach()))
    with torch.inference_mode():
        found = encoder.eval()(x, src_key_padding_mask=padding)
    assert len(calls) == 2
    for each in encoder.layers:
        for parameter in each.parameters():
            assert parameter.requires_grad  # with derivatives torch has no fast path
    assert_close(found, encoder(x, src_key_padding_mask=padding).detach(), rtol=0, atol=1e-6)
    with torch.no_grad():
        for each in encoder.layers:
            each.self_attn.scaling.fill_(0.01)
        assert float((encoder(x, src_key_padding_mask=padding) - found).abs().max()) > 1e-2  # the control


LAYERS = {
    "plain": (Hopfield, {}),
    "everything": (
        Hopfield,
        {
            "normalize_hopfield_space": True,
            "normalize_hopfield_space_affine": True,
            "pattern_projection_as_connected": True,
            "concat_bias_pattern": True,
            "add_zero_association": True,
            "association_activation": "tanh",
            "update_steps_max": 3,
        },
    ),
    "beta": (Hopfield, {"scaling": torch.tensor([0.3, 1.0]), "update_steps_max": 3}),
    "learned beta": (Hopfield, {"scaling": nn.Parameter(torch.tensor([0.3, 1.0])), "gradient": "implicit"}),
    "static": (Hopfield, {"stored_pattern_as_static": True, "update_steps_max": 2}),
    "pooling": (HopfieldPooling, {"quantity": 3, "update_steps_max": 2}),
    "lookup": (HopfieldLayer, {"quantity": 7, "lookup_weights_as_separated": True, "gradient": "implicit"}),
    "energy": (EnergyTransformer, {"scaling": torch.tensor([0.3, 1.0])}),
}


def layer_of(name: str, seed: int = 0) -> nn.Module:
    kind, options = LAYERS[name]
    return kind(8, num_heads=2, generator=generator(seed), **copy.deepcopy(options))


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_saved_loaded_and_copied(name):
    layer, x = layer_of(name), randn(2, 5, 8, dtype=torch.float32)
    other = layer_of(name, seed=1)
    with torch.no_grad():
        for tensor in (*other.parameters(), *other.buffers()):
            tensor.mul_(1.5)
    assert not torch.equal(other(x), layer(x))  # the control
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file))
    assert torch.equal(other(x), layer(x))
    copied = copy.deepcopy(layer)
    assert torch.equal(copied(x), layer(x))
    before = layer(x)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.add_(0.1)
    assert torch.equal(layer(x), before)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x), before)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_half_precision_stays_near_single(name, autocast):
    layer, x = layer_of(name), randn(2, 5, 8, dtype=torch.float32)
    padding = torch.arange(5) >= torch.tensor([[5], [3]])
    given = () if name == "lookup" else (padding,)
    expected = layer(x, *given)
    if autocast:
        with torch.autocast("cpu", torch.bfloat16):
            found = layer(x, *given)
    else:
        layer = layer.bfloat16()
        found = layer(x.bfloat16(), *given)
    error = float((found.float() - expected).detach().abs().max() / expected.detach().abs().max())
    assert 1e-6 < error < 0.05  # rounding to eight bits, measured up to 0.02
    found.float().square().sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters() if parameter.requires_grad)
    assert all(bool(p.grad.isfinite().all()) for p in layer.parameters() if p.grad is not None)


def test_states_in_half_precision_come_to_rest():
    options = {"update_steps_max": 200, "update_steps_eps": 1e-5, "scaling": 0.3}
    layer, x = build(8, num_heads=2, dtype=torch.bfloat16, **options), randn(2, 5, 8).bfloat16()
    found = layer.associate(x)
    assert found.state.dtype == torch.float32
    assert found.output.dtype == torch.bfloat16
    assert bool(found.converged.all())


# Torch looks at the gradients of intermediate results after each graph break, and hides its warning from users only.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("name", ["everything", "learned beta", "pooling", "lookup", "energy"])
def test_compiled_layers_find_the_same_with_masks(name):
    layer, x = layer_of(name), randn(2, 5, 8, dtype=torch.float32)
    padding = () if name == "lookup" else (torch.arange(5) >= torch.tensor([[5], [3]]),)
    torch.compiler.reset()
    outputs = [each(x, *padding) for each in (torch.compile(layer, backend="aot_eager"), layer)]
    assert_close(*outputs, rtol=0, atol=1e-6)
    parameters = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    slopes = [torch.autograd.grad(output.square().sum(), parameters) for output in outputs]
    for compiled, plain in zip(*slopes, strict=True):
        assert_close(compiled, plain, rtol=1e-4, atol=1e-5)


def test_the_energy_is_exact_enough_to_check_the_descent_in_half_precision():
    block, x = EnergyTransformer(8, num_heads=2, step=0.02, generator=generator()), randn(3, 6, 8).float()
    with torch.autocast("cpu", torch.bfloat16):
        found = block.descend(x)
    assert found.energy.dtype == torch.float32
    assert_close(found.energy[0], block.energy(x), rtol=1e-6, atol=0)
    assert bool(found.descended.all())
    assert block.bfloat16().energy(x.bfloat16()).dtype == torch.float32


def test_tokens_of_an_entry_that_are_all_absent_are_refused():
    block, padding = EnergyTransformer(8, num_heads=2), torch.tensor([[False] * 5, [True] * 5])
    with pytest.raises(UserError, match="must leave something in every entry of the batch, got nothing in 1; take"):
        block(randn(2, 5, 8).float(), padding)
