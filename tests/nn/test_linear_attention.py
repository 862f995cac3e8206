"""Linear attention: against a sum written as a loop, and as gradient descent on the examples of its context."""

from __future__ import annotations

import pytest
import torch
from draws import randn
from torch import Tensor
from torch.nn import functional
from torch.testing import assert_close

from massieu.checks import UserError
from massieu.nn import LinearAttention, Transformer, rotate
from massieu.nn.linear_attention import CHUNK

FORMS = ["sum", "mean", "elu"]


def build(form: str = "sum", **options) -> LinearAttention:
    generator = torch.Generator().manual_seed(1)
    layer = LinearAttention(8, 4, form=form, bias=True, dtype=torch.float64, generator=generator, **options)
    with torch.no_grad():
        for seed, projection in enumerate((layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj)):
            projection.bias.copy_(randn(*projection.bias.shape, seed=seed))
    return layer


def by_loop(layer: LinearAttention, x: Tensor, context: Tensor, weight: Tensor, rotary: float | None = None) -> Tensor:
    """The formula of the docstring, one pair of tokens at a time; weight is ``(batch, heads, queries, atoms)``."""
    share = layer.num_heads // layer.num_key_heads
    query, key, value = (
        projection(tokens).unflatten(-1, (-1, layer.head_dim)).transpose(1, 2)
        for projection, tokens in ((layer.q_proj, x), (layer.k_proj, context), (layer.v_proj, context))
    )
    if rotary:
        query, key = rotate(query, base=rotary), rotate(key, base=rotary)
    heads = torch.zeros_like(query)
    for b, h, i in ((b, h, i) for b in range(x.shape[0]) for h in range(layer.num_heads) for i in range(x.shape[1])):
        total, divisor = torch.zeros(layer.head_dim, dtype=x.dtype), 0.0
        for j in range(context.shape[1]):
            q, k, v = query[b, h, i], key[b, h // share, j], value[b, h // share, j]
            if layer.form == "elu":
                q, k = 1 + functional.elu(q), 1 + functional.elu(k)
            product = layer.scale * (q * k).sum()
            total = total + weight[b, h, i, j] * product * v
            divisor = divisor + weight[b, h, i, j] * (product if layer.form == "elu" else 1.0)
        heads[b, h, i] = total if layer.form == "sum" or divisor == 0 else total / divisor
    return layer.out_proj(heads.transpose(1, 2).flatten(2))


def visible(queries: int, atoms: int, *, causal: bool = False, window: int | None = None) -> Tensor:
    seen = torch.zeros(2, 4, queries, atoms, dtype=torch.float64)
    for i in range(queries):
        for j in range(atoms):
            behind = i + atoms - queries - j
            seen[..., i, j] = (not causal or behind >= 0) and (window is None or abs(behind) < window)
    return seen


@torch.no_grad()
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "options", [{}, {"causal": True, "num_key_heads": 2}, {"window": 2, "scale": 0.3}, {"causal": True, "window": 3}]
)
def test_the_layer_is_the_sum_it_says(form, options):
    layer, x = build(form, **options), randn(2, 6, 8)
    shown = {name: options[name] for name in ("causal", "window") if name in options}
    assert_close(layer(x), by_loop(layer, x, x, visible(6, 6, **shown)), rtol=0, atol=1e-13)
    context = randn(2, 7, 8, seed=2)
    assert_close(layer(x, context), by_loop(layer, x, context, visible(6, 7, **shown)), rtol=0, atol=1e-13)


@torch.no_grad()
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(6,), (2, 1, 1, 6), (4, 6, 6), (2, 4, 6, 6)])
def test_log_weights_weigh_the_atoms(form, causal, shape):
    layer, x, log_weight = build(form, causal=causal), randn(2, 6, 8), randn(*shape, seed=3)
    lengths = torch.tensor([6, 4])
    weight = log_weight.exp() * visible(6, 6, causal=causal) * (torch.arange(6) < lengths[:, None, None, None])
    expected = by_loop(layer, x, x, weight)
    assert_close(layer(x, log_weight=log_weight, lengths=lengths), expected, rtol=0, atol=1e-12)
    mask = log_weight > 0
    expected = by_loop(layer, x, x, mask * visible(6, 6, causal=causal))
    assert_close(layer(x, log_weight=mask), expected, rtol=0, atol=1e-12)


@torch.no_grad()
def test_rotary_positions_turn_queries_and_keys():
    layer, x = build(causal=True, rotary=100.0), randn(2, 6, 8)
    assert_close(layer(x), by_loop(layer, x, x, visible(6, 6, causal=True), rotary=100.0), rtol=0, atol=1e-13)


@torch.no_grad()
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rotary", [None, 100.0])
def test_chunks_and_caches_change_nothing(form, rotary):
    if form == "elu" and rotary:
        return
    tokens = 2 * CHUNK + 10
    layer, x = build(form, causal=True, rotary=rotary), randn(2, tokens, 8)
    whole = layer(x)
    pattern = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    assert_close(whole, layer(x, log_weight=pattern), rtol=0, atol=1e-11)
    cache = layer.new_cache()
    parts = [layer(x[:, a:b], cache=cache) for a, b in [(0, 5), (5, 6), (6, 7), (7, tokens)]]
    assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-11)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_are_exact(form, causal):
    layer = build(form, causal=causal)
    names, weights = zip(
        *((name, weight.detach().requires_grad_()) for name, weight in layer.named_parameters()), strict=True
    )

    def run(x: Tensor, *weights: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(names, weights, strict=True)), (x,))

    assert torch.autograd.gradcheck(run, (randn(1, 3, 8).requires_grad_(), *weights), fast_mode=True)


def test_a_row_without_atoms_gives_zero():
    for form in FORMS:
        layer = build(form)
        output = layer(randn(1, 3, 8), lengths=0)
        assert_close(output, layer.out_proj.bias.expand(1, 3, 8))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": 2}])
def test_what_lies_in_absent_atoms_does_not_leak(form, options):
    layer, x = build(form, **options), randn(2, 6, 8)
    spoiled = x.clone()
    spoiled[:, 4:] = torch.tensor([torch.nan, torch.inf])[:, None]
    spoiled[:, 4:, 3] = -torch.inf
    mask = torch.arange(6) < 4
    pattern = mask & torch.ones(6, 6, dtype=torch.bool).tril(4)
    log_weight = torch.zeros(6, dtype=torch.float64).masked_fill(~mask, -torch.inf)
    expected = layer(x[:, :4])
    for given in ({"lengths": 4}, {"log_weight": mask}, {"log_weight": log_weight}, {"log_weight": pattern}):
        assert_close(layer(spoiled, **given)[:, :4], expected, rtol=0, atol=1e-13)
    assert_close(
        layer(x[:, :4], spoiled, lengths=4), layer(x[:, :4], torch.cat([x[:, :4], 0 * x[:, 4:]], 1), lengths=4)
    )


def test_there_are_no_statistics():
    output, found = build()(randn(1, 3, 8), return_statistics=True)
    assert output.shape == (1, 3, 8)
    assert found is None


def descent(x: Tensor, y: Tensor, start: Tensor, rate: float, steps: int) -> list[Tensor]:
    """The iterates of gradient descent on the half mean squared error, by autograd."""
    weights = [start]
    for _ in range(steps):
        weight = weights[-1].detach().requires_grad_()
        loss = (x @ weight.T - y).square().sum() / (2 * len(x))
        weights.append(weight.detach() - rate * torch.autograd.grad(loss, weight)[0])
    return weights


@torch.no_grad()
def test_layers_with_set_weights_are_steps_of_gradient_descent():
    dims, outs, examples, steps, rate = 5, 3, 12, 6, 0.4
    size = dims + outs
    x, start = randn(examples, dims), randn(outs, dims, seed=2)
    y, query = x @ randn(outs, dims, seed=3).T, randn(1, dims, seed=4)
    with torch.enable_grad():
        weights = descent(x, y, start, rate, steps)
    model = Transformer(
        size,
        steps,
        num_heads=1,
        attention="linear",
        causal=False,
        positions=None,
        norm=None,
        hidden_dim=0,
        bias=False,
        shared_layers=True,
        dtype=torch.float64,
    )
    layer = model.blocks[0].attention
    keys = torch.diag(torch.tensor([1.0] * dims + [0.0] * outs, dtype=torch.float64))
    layer.q_proj.weight.copy_(keys)
    layer.k_proj.weight.copy_(keys)
    layer.v_proj.weight.zero_()
    layer.v_proj.weight[dims:, :dims] = start
    layer.v_proj.weight[dims:, dims:] = -torch.eye(outs)
    layer.out_proj.weight.copy_(rate / examples * torch.eye(size, dtype=torch.float64))
    tokens = torch.cat([torch.cat([x, y], 1), torch.cat([query, -query @ start.T], 1)])[None]

    found = model(tokens, lengths=examples)[0]
    assert_close(-found[-1, dims:], (query @ weights[-1].T)[0], rtol=0, atol=1e-13)
    assert_close(found[:-1, dims:], y - x @ (weights[-1] - start).T, rtol=0, atol=1e-13)
    # With the query among the keys this is another algorithm.
    assert float((model(tokens)[0, -1, dims:] - found[-1, dims:]).abs().max()) > 1e-3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"form": "softmax"}, "form must"),
        ({"form": "elu", "rotary": 100.0}, 'form="elu" needs positive features, got rotary=100.0; use form="sum"'),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        build(**options)


@pytest.mark.parametrize(
    ("options", "given"), [({}, {"lengths": 2}), ({}, {"log_weight": torch.zeros(3)}), ({"window": 2}, {})]
)
def test_weights_with_a_cache_are_refused(options, given):
    layer = build(causal=True, **options)
    with pytest.raises(UserError, match="must see every token alike, got log_weight, lengths or a window; its sums"):
        layer(randn(1, 3, 8), cache=layer.new_cache(), **given)


def test_the_layer_prints_its_form():
    assert "form='mean', num_heads=4" in repr(build("mean"))
