"""The block of one energy: its force against autograd and a loop, and the fall of the energy."""

from __future__ import annotations

import copy

import pytest
import torch
from draws import generator, randn
from torch import Tensor, nn
from torch.testing import assert_close

from massieu.checks import UserError
from massieu.nn import EnergyTransformer


def build(dim: int = 8, num_heads: int = 2, dtype: torch.dtype = torch.float64, **options) -> EnergyTransformer:
    """A block whose norm has a gain and a shift."""
    block = EnergyTransformer(dim, num_heads, generator=generator(1), dtype=dtype, **options)
    with torch.no_grad():
        block.gain.fill_(1.3)
        block.shift.copy_(0.3 * randn(dim, seed=2, dtype=dtype))
    return block


def rising(**options) -> EnergyTransformer:
    """Keys opposite to queries and no memories: the energy is a bowl, and a long step lands high on its other side."""
    block = build(**options)
    with torch.no_grad():
        block.key_weight.copy_(-block.query_weight)
        block.memories.zero_()
    return block


def by_hand(block: EnergyTransformer, g: Tensor, padding: Tensor | None = None) -> Tensor:
    """The energy, token by token."""
    beta = block.scaling if isinstance(block.scaling, Tensor) else torch.full((block.num_heads,), block.scaling)
    energies = []
    for entry, tokens in enumerate(g):
        present = [i for i in range(len(tokens)) if padding is None or not padding[entry, i]]
        total = torch.zeros((), dtype=g.dtype)
        for i in present:
            total = total - 0.5 * (block.memories @ tokens[i]).clamp(min=0).square().sum()
            keys = [j for j in present if j != i or not block.exclude_self]
            for head, own in enumerate(beta.expand(block.num_heads)):
                if keys:
                    query = block.query_weight[head] @ tokens[i]
                    scores = torch.stack([own * query @ (block.key_weight[head] @ tokens[j]) for j in keys])
                    total = total - scores.logsumexp(0) / own
        energies.append(total)
    return torch.stack(energies)


CASES = [
    {},
    {"exclude_self": True},
    {"head_dim": 3, "num_memories": 5, "scaling": torch.tensor([0.3, 2.0], dtype=torch.float64)},
]
PADDING = torch.arange(5) >= torch.tensor([[5], [3], [1]])


@pytest.mark.parametrize("options", CASES)
@pytest.mark.parametrize("padding", [None, PADDING])
def test_the_force_is_minus_the_gradient_of_the_energy(options, padding):
    block, x = build(**options), randn(3, 5, 8)
    g = block.activations(x).detach().requires_grad_()
    energy = by_hand(block, g, padding)
    assert_close(block.energy(x, padding), energy, rtol=1e-12, atol=1e-12)
    (slope,) = torch.autograd.grad(energy.sum(), g)
    assert_close(block.force(x, padding), -slope, rtol=1e-10, atol=1e-12)


def test_ordinary_attention_lacks_the_key_side():
    block, x = build(), randn(2, 5, 8)
    g = block.activations(x).detach()
    moving = g.clone().requires_grad_()
    query = torch.einsum("bnd,hkd->bhnk", moving, block.query_weight)
    key = torch.einsum("bnd,hkd->bhnk", g, block.key_weight)
    energy = -(block.scaling * query @ key.mT).logsumexp(-1).sum() / block.scaling
    energy = energy - 0.5 * (moving @ block.memories.mT).clamp(min=0).square().sum()
    (slope,) = torch.autograd.grad(energy, moving)
    assert float((block.force(x) + slope).abs().max().detach()) > 0.1


def test_the_activations_are_the_gradient_of_their_lagrangian():
    block, x = build(), randn(2, 5, 8).requires_grad_()
    variance = x.var(-1, correction=0) + block.eps
    lagrangian = 8 * block.gain * variance.sqrt() + x @ block.shift
    (slope,) = torch.autograd.grad(lagrangian.sum(), x)
    assert_close(block.activations(x), slope, rtol=0, atol=1e-12)


@pytest.mark.parametrize("options", CASES)
def test_the_energy_falls_as_fast_as_the_lagrangian_says(options):
    block, x = build(**options), randn(2, 5, 8)
    force, h = block.force(x), 1e-5
    rate = (block.energy(x + h * force) - block.energy(x - h * force)) / (2 * h)
    _, moved = torch.autograd.functional.jvp(block.activations, x, force.detach())
    assert_close(rate, -(force * moved).sum((1, 2)), rtol=1e-6, atol=1e-6)
    assert bool((rate < 0).all())


def test_small_steps_go_down_and_large_ones_are_found_out():
    x = randn(6, 5, 8)
    small = build(step=0.01, steps=30).descend(x)
    assert small.energy.shape == (31, 6)
    assert small.descended.shape == (30, 6)
    assert bool(small.descended.all())
    assert bool((small.energy[-1] < small.energy[0] - 1).all())
    large = rising(step=300.0, steps=30).descend(x)
    assert not bool(large.descended.all())
    assert torch.equal(
        large.descended, large.energy[1:] <= large.energy[:-1] + 16 * 2.3e-16 * (1 + large.energy[:-1].abs())
    )


def test_every_entry_descends_by_itself():
    block, x = rising(step=300.0, steps=10), randn(6, 5, 8)
    whole = block.descend(x)
    for entry in range(6):
        alone = block.descend(x[entry : entry + 1])
        assert_close(alone.energy[:, 0], whole.energy[:, entry], rtol=1e-9, atol=1e-9)


def test_forward_makes_the_steps_of_the_descent():
    block, x = build(steps=4), randn(2, 5, 8)
    assert torch.equal(block(x), block.descend(x).state)
    assert len(block.descend(x, steps=7).descended) == 7
    assert torch.equal(build(steps=0)(x), x)


@pytest.mark.parametrize("options", CASES)
def test_training_differentiates_the_force_exactly(options):
    block, x = build(steps=2, **options), randn(2, 4, 8)
    parameters = [*block.parameters()]
    found = torch.autograd.grad(block(x).square().sum(), parameters)
    moved = x
    for _ in range(2):
        g = block.activations(moved)
        (slope,) = torch.autograd.grad(by_hand(block, g).sum(), g, create_graph=True)
        moved = moved - block.step * slope
    expected = torch.autograd.grad(moved.square().sum(), parameters)
    for mine, other in zip(found, expected, strict=True):
        assert_close(mine, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("exclude_self", [False, True])
def test_an_absent_token_neither_moves_nor_moves_others(exclude_self):
    block, x = build(exclude_self=exclude_self), randn(3, 5, 8)
    found = block(x, PADDING)
    for entry, count in enumerate((5, 3, 1)):
        assert_close(found[entry, :count], block(x[entry : entry + 1, :count])[0], rtol=0, atol=1e-12)
        assert torch.equal(found[entry, count:], x[entry, count:])
    slopes = torch.autograd.grad(found.square().sum(), list(block.parameters()))
    assert all(bool(slope.isfinite().all()) for slope in slopes)


def test_beta_may_be_learned_one_per_head():
    beta = nn.Parameter(torch.tensor([0.5, 2.0], dtype=torch.float64))
    block = build(scaling=beta)
    block(randn(1, 4, 8)).square().sum().backward()
    assert block.scaling is beta
    assert bool((beta.grad != 0).all())


def test_single_precision_stays_near_double():
    block, x = build(steps=12), randn(4, 20, 8)
    single = copy.deepcopy(block).float()
    assert_close(single(x.float()).double(), block(x), rtol=0, atol=1e-4)  # measured 4e-6 after twelve steps


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 3}, "dim must be a multiple"),
        ({"num_heads": 0}, "num_heads must"),
        ({"head_dim": 0}, "head_dim must"),
        ({"num_memories": 0}, "num_memories must"),
        ({"steps": -1}, "steps must"),
        ({"step": 0.0}, "step must"),
        ({"scaling": -1.0}, "scaling must"),
    ],
)
def test_a_block_that_cannot_be_is_refused(options, message):
    with pytest.raises(UserError, match=message):
        build(**options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((randn(5, 8),), "x must"),
        ((randn(1, 5, 8).float(),), "x must have the dtype"),
        ((randn(1, 5, 8), torch.zeros(1, 5)), "key_padding_mask must"),
        ((randn(1, 5, 8), torch.zeros(1, 4, dtype=torch.bool)), "the padding mask must"),
    ],
)
def test_wrong_tokens_are_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        build()(*arguments)
