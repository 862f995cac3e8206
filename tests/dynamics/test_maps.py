"""Residual attention expands and ascends, and is a Hopfield step after a layer norm: theorems, over random inputs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from massieu import Points, prox
from massieu.checks import UserError
from massieu.dynamics import ascend, hopfield_step, hopfield_time, layer_norm

STEPS = st.sampled_from([0.01, 0.3, 1.0, 7.0, 1000.0])
MANY = settings(derandomize=True, deadline=None, database=None, max_examples=100)


@st.composite
def clouds(draw, least_dim=1):
    """A cloud in float64 from a seed, off center, of any size between a grain and large scores."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    shape = draw(st.integers(2, 12)), draw(st.integers(least_dim, 6))
    scale = draw(st.sampled_from([0.1, 1.0, 3.0, 20.0]))
    shift = draw(st.sampled_from([0.0, 1.0]))
    return scale * (torch.randn(shape, generator=generator, dtype=torch.float64) + shift)


def differences(cloud):
    return cloud[:, None] - cloud[None]


@MANY
@given(clouds(), STEPS, st.sampled_from([0.1, 1.0]), st.booleans())
def test_no_pair_of_tokens_comes_closer_when_all_see_the_same_keys(cloud, step, beta, moving):
    keys = None if moving else cloud.flip(0) * 0.7 + 0.3
    moved = ascend(cloud, keys, step=step, beta=beta)
    mean = (moved - cloud) / step
    bound = differences(cloud).square().sum(-1) + step**2 * differences(mean).square().sum(-1)
    slack = differences(moved).square().sum(-1) - bound
    # Differences of numbers as large as the tokens: each rounds at that size.
    assert bool((slack >= -1e-13 * (moved.abs().max() + cloud.abs().max()) ** 2).all())


def test_a_causal_mask_lets_tokens_come_closer():
    cloud = torch.tensor([[3.0], [0.0], [0.2]], dtype=torch.float64)
    apart = {causal: float(ascend(cloud, causal=causal)[1:].diff(dim=0).abs()) for causal in (True, False)}
    assert apart[True] == pytest.approx(0.1690, abs=5e-5)
    assert apart[False] == pytest.approx(0.6023, abs=5e-5)


@MANY
@given(clouds(), STEPS, st.sampled_from([0.2, 1.0]))
def test_every_step_ascends_by_at_least_its_slope(cloud, step, beta):
    keys, natural = cloud, cloud.flip(-1) * 0.5
    measure = Points(beta * keys)

    def potential(eta):
        return measure.log_normalizer(eta) / beta

    slope = measure.mean(natural) / beta
    moved = ascend(natural, keys, step=step, beta=beta)
    gain = potential(moved) - potential(natural)
    rounding = 1e-13 * (potential(moved).abs() + potential(natural).abs() + 1)
    assert bool((gain >= step * slope.square().sum(-1) - rounding).all())


def test_a_step_against_the_gradient_does_not_ascend():
    keys = torch.tensor([[1.0], [2.0]], dtype=torch.float64)
    moved = ascend(torch.zeros(1, 1, dtype=torch.float64), keys, step=-1.0)
    assert Points(keys).log_normalizer(moved) < Points(keys).log_normalizer(0 * moved)


@MANY
@given(clouds(least_dim=3), st.floats(0.01, 100), st.sampled_from([0.2, 1.0]))
def test_residual_attention_and_a_hopfield_step_agree_after_layer_norm(cloud, step, beta):
    state, patterns = cloud, cloud.flip(0)
    residual = layer_norm(ascend(state, patterns, step=step, beta=beta))
    tau = hopfield_time(step)
    assert_close(layer_norm(hopfield_step(state, patterns, tau=tau, beta=beta)), residual, rtol=0, atol=1e-11)


def test_another_time_does_not_agree_after_layer_norm():
    cloud = torch.randn(10, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    residual = layer_norm(ascend(cloud, cloud, step=1.0))
    for tau, agrees in ((0.5, True), (1.0, False), (0.45, False)):
        error = (layer_norm(hopfield_step(cloud, cloud, tau=tau)) - residual).abs().max()
        assert bool(error < 1e-14 if agrees else error > 1e-2), tau


def test_keys_with_a_spread_have_their_own_time():
    cloud = torch.randn(10, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    step, spread = 0.8, 0.6
    residual = ascend(cloud, cloud, step=step) + step * spread * cloud
    moved = hopfield_step(cloud, cloud, tau=hopfield_time(step, spread))
    assert_close((1 + step + step * spread) * moved, residual, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(("tau", "falls"), [(0.5, True), (1.0, True), (1.9, True), (2.3, False)])
def test_the_energy_falls_up_to_time_two(tau, falls):
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randn(8, 3, generator=generator, dtype=torch.float64)
    state = 2 * torch.randn(2000, 3, generator=generator, dtype=torch.float64)

    def energy(x):
        return 0.5 * x.square().sum(-1) - Points(patterns).log_normalizer(x)

    change = energy(hopfield_step(state, patterns, tau=tau)) - energy(state)
    slope = state - Points(patterns).mean(state)
    bound = -tau * (1 - tau / 2) * slope.square().sum(-1)
    assert bool((change <= bound + 1e-12).all())
    assert bool((change <= 1e-12).all()) == falls


@pytest.mark.parametrize("step", [1.0, 10.0, 100.0])
def test_the_proximal_map_undoes_residual_attention(step):
    generator = torch.Generator().manual_seed(1)
    keys = torch.randn(20, 3, generator=generator, dtype=torch.float64)
    natural = torch.randn(50, 3, generator=generator, dtype=torch.float64)
    found = prox(Points(keys), ascend(natural, keys, step=step), step=step)
    assert bool(found.converged.all())
    assert_close(found.natural, natural, rtol=0, atol=1e-12)
    # With keys that moved along, the inverse has the wrong ones.
    assert not torch.allclose(prox(Points(natural), ascend(natural, keys, step=step), step=step).natural, natural)


def test_ascend_takes_log_weights_batches_and_single_tokens():
    generator = torch.Generator().manual_seed(2)
    natural = torch.randn(2, 5, 3, generator=generator, dtype=torch.float64)
    keys = torch.randn(7, 3, generator=generator, dtype=torch.float64)
    log_weight = torch.randn(7, generator=generator, dtype=torch.float64)
    expected = natural + 0.5 * Points(keys, log_weight).mean(natural)
    assert_close(ascend(natural, keys[None], step=0.5, log_weight=log_weight), expected)
    # A token alone sees itself.
    assert_close(ascend(natural[0, :1]), 2 * natural[0, :1])
    assert ascend(natural[0, :0], keys).shape == (0, 3)


def test_large_scores_in_float32_go_to_the_largest_key():
    keys = torch.tensor([[1e3, 0.0], [0.0, 1e3]])
    assert_close(ascend(keys, keys), 2 * keys)


def test_ascend_carries_derivatives():
    cloud = torch.randn(4, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: ascend(x, step=0.7, beta=0.5, causal=True), cloud)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: ascend(x[0]), "natural"),
        (lambda x: ascend(x[:, :0]), "natural"),
        (lambda x: ascend(x.long()), "natural"),
        (lambda x: ascend([1.0]), "natural"),
        (lambda x: ascend(x, step=float("nan")), "step"),
        (lambda x: ascend(x, step=x[0, 0]), "step"),
        (lambda x: ascend(x, beta=float("inf")), "beta"),
        (lambda x: hopfield_step(x[0], x), "state"),
        (lambda x: hopfield_step(x, x, tau=True), "tau"),
        (lambda x: hopfield_time(-1.0), "step"),
        (lambda x: hopfield_time(1.0, -1.0), "spread"),
    ],
)  # fmt: skip
def test_mistakes_end_in_one_sentence(call, message):
    with pytest.raises(UserError, match=message):
        call(torch.ones(3, 2))
