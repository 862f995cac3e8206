"""Keys through the mean of a measure: against eager attention, against affine layers, and as a gradient of log Z."""

import pytest
import torch
from draws import randn
from torch.testing import assert_close

import massieu
from massieu import Gaussian, Hypercube, Laplace, Points, Poisson, Sphere
from massieu.checks import UserError
from massieu.nn import MeasureAttention


def build(activation=None, tying="free", **options) -> MeasureAttention:
    generator = torch.Generator().manual_seed(1)
    return MeasureAttention(
        12, 3, activation=activation, tying=tying, dtype=torch.float64, generator=generator, **options
    )


MAPS = {
    "hypercube": (Hypercube(4), torch.tanh),
    "poisson": (Poisson(torch.tensor([0.5, 1.0, 2.0, 3.0])), lambda k: torch.tensor([0.5, 1.0, 2.0, 3.0]) * k.exp()),
    "laplace": (
        Laplace(torch.full((4,), 0.01, dtype=torch.float64)),
        lambda k: 2 * 0.01**2 * k / (1 - 0.01**2 * k.square()),
    ),
}


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("causal", [False, True])
def test_keys_pass_through_the_mean_before_the_inner_product(name, causal):
    measure, written = MAPS[name]
    layer, x = build(measure, causal=causal), randn(2, 7, 12)
    query, key, value = (
        each(x).unflatten(-1, (3, 4)).transpose(1, 2) for each in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    scores = query @ written(key).mT / 2
    if causal:
        scores = scores.masked_fill(torch.ones(7, 7, dtype=torch.bool).triu(1), -torch.inf)
    expected = layer.out_proj((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))
    assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)


def test_a_gaussian_activation_is_an_affine_map_of_the_keys():
    location, root = randn(4), randn(4, 4, seed=1)
    covariance = root @ root.T + torch.eye(4, dtype=torch.float64)
    active, plain, x = build(Gaussian(location, covariance)), build(), randn(2, 7, 12)
    plain.load_state_dict(active.state_dict())
    assert not torch.allclose(active(x), plain(x), atol=1e-3)
    with torch.no_grad():
        plain.k_proj.weight.copy_(
            torch.einsum("de,hex->hdx", covariance, plain.k_proj.weight.unflatten(0, (3, 4))).flatten(0, 1)
        )
        plain.k_proj.bias.copy_((plain.k_proj.bias.unflatten(0, (3, 4)) @ covariance + location).flatten())
    assert_close(active(x), plain(x), rtol=1e-11, atol=1e-11)


def test_short_keys_see_the_fisher_matrix():
    measure = Sphere(4)
    active, plain, x = build(measure, bias=False), build(bias=False), randn(2, 7, 12)
    with torch.no_grad():
        active.k_proj.weight.mul_(1e-4)
    plain.load_state_dict(active.state_dict())
    fisher = measure.fisher(torch.zeros(1, 4, dtype=torch.float64))[0]
    with torch.no_grad():
        plain.k_proj.weight.copy_(
            torch.einsum("de,hex->hdx", fisher, plain.k_proj.weight.unflatten(0, (3, 4))).flatten(0, 1)
        )
    assert_close(active(x), plain(x), rtol=0, atol=1e-11)


@pytest.mark.parametrize("measure", [Hypercube(4), Sphere(4), Points(randn(9, 4))], ids=repr)
def test_gradients_are_those_of_finite_differences(measure):
    layer = build(measure)
    assert torch.autograd.gradcheck(layer, randn(1, 3, 12).requires_grad_())


def test_a_tied_layer_stays_a_gradient_in_the_query_token():
    layer, x = build(Hypercube(4), tying="tied"), randn(2, 5, 12).requires_grad_()
    output, statistics = layer(x, context=x.detach(), return_statistics=True)
    (slope,) = torch.autograd.grad(statistics.log_normalizer.sum(), x)
    assert_close(output, slope, rtol=1e-11, atol=1e-11)


@torch.no_grad()
def test_a_cache_holds_activated_keys():
    layer, x = build(Hypercube(4), causal=True, rotary=100.0), randn(2, 6, 12)
    cache = layer.new_cache()
    parts = [layer(x[:, start:stop], cache=cache) for start, stop in ((0, 4), (4, 5), (5, 6))]
    assert_close(torch.cat(parts, 1), layer(x), rtol=1e-12, atol=1e-12)


def test_float32_layers_take_measures_in_float64():
    layer = MeasureAttention(12, 3, activation=Gaussian(randn(4), torch.eye(4, dtype=torch.float64)))
    assert layer(torch.randn(2, 5, 12)).dtype == torch.float32


def test_the_activation_shows():
    assert "activation=Hypercube(dim=4)" in repr(build(Hypercube(4)))
    assert "activation" not in repr(build())


@pytest.mark.parametrize(
    ("activation", "words"),
    [
        (torch.tanh, "must be a massieu.Measure"),
        (Hypercube, "must be a massieu.Measure, got Hypercube"),
        (Hypercube(3), "dimension head_dim = 4"),
        (massieu.Points(randn(2, 9, 4)), r"batch \(2,\)"),
    ],
)
def test_what_is_no_measure_of_a_head_is_refused(activation, words):
    with pytest.raises(UserError, match=words):
        build(activation)


def test_keys_outside_the_natural_domain_are_refused():
    with pytest.raises(UserError, match="natural of Laplace must lie in"):
        build(Laplace(torch.ones(4)))(100 * randn(1, 5, 12))
