"""Renormalization undoes Gaussian attention exactly, and every contraction does what its name says."""

import itertools
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from massieu import Gaussian
from massieu.checks import MissingPackageError
from massieu.dynamics import (
    CONTRACTIONS,
    ascend,
    batch_norm,
    clip_to_ball,
    global_rms,
    halve,
    layer_norm,
    normal_ranks,
    normal_scores,
    renormalization,
    renormalize,
    rms_norm,
    squash,
    zca,
)


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def after_attention(location, covariance, step):
    """Moments of tokens N(m, covariance^-1) after a step of attention over keys N(m, covariance)."""
    transfer = torch.eye(len(location), dtype=torch.float64) + step * covariance
    mean = transfer @ location + step * location
    return mean, transfer @ torch.linalg.inv(covariance) @ transfer


@settings(derandomize=True, deadline=None, database=None, max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 6), st.sampled_from([0.1, 1.0, 10.0]))
def test_renormalization_after_gaussian_attention_is_the_identity_of_every_token(seed, dim, step):
    root = randn(dim, dim, seed=seed)
    covariance, location = root @ root.T + 0.1 * torch.eye(dim), randn(dim, seed=seed + 1)
    inverse = torch.linalg.inv(covariance)
    inverse = 0.5 * (inverse + inverse.T)
    tokens = location + randn(20, dim, seed=seed + 2)
    moved = tokens + step * Gaussian(location, covariance).mean(tokens)
    mean, spread = after_attention(location, covariance, step)
    back = renormalization(mean, 0.5 * (spread + spread.T), location, inverse)(moved)
    assert_close(back, tokens, rtol=1e-9, atol=1e-9)
    # The printed second moment in place of the covariance does not undo it.
    second = spread + mean[:, None] * mean
    literal = renormalization(mean, 0.5 * (second + second.T), location, inverse)(moved)
    if float(mean @ torch.linalg.solve(spread, mean)) > 0.1:
        assert not torch.allclose(literal, tokens, rtol=1e-3, atol=1e-3)


def test_the_printed_second_moment_gives_the_covariance_of_the_erratum():
    location, covariance = torch.tensor([1.0, -1.0]).double(), torch.tensor([[2.0, 1.0], [1.0, 2.0]]).double()
    mean, spread = after_attention(location, covariance, 1.0)
    target = torch.tensor([[2.0, -1.0], [-1.0, 2.0]]).double() / 3
    for used, expected in (
        (spread, target),
        (spread + mean[:, None] * mean, torch.tensor([[17.0, 5.0], [5.0, 17.0]]).double() / 66),
    ):
        matrix = renormalization(mean, used, location, target).matrix
        assert_close(matrix @ spread @ matrix.T, expected)


def test_renormalize_sets_both_moments_by_a_symmetric_root():
    root = randn(4, 4, seed=1)
    cloud, location, covariance = 5 + randn(3, 50, 4) @ randn(4, 4, seed=2), randn(4, seed=3), root @ root.T
    found = renormalize(cloud, location, covariance)
    assert_close(found.mean(1), location.expand(3, 4))
    assert_close(torch.cov(found[1].T, correction=0), covariance)
    # Symmetric roots do not turn: whitening a white cloud changes nothing.
    white = renormalize(cloud, torch.zeros(4), torch.eye(4))
    assert_close(renormalize(white, torch.zeros(4), torch.eye(4)), white)


def test_norms_agree_with_torch():
    cloud = randn(2, 30, 8)
    assert_close(layer_norm(cloud), torch.nn.functional.layer_norm(cloud, (8,), eps=0.0))
    assert_close(rms_norm(cloud), torch.nn.functional.rms_norm(cloud, (8,), eps=0.0))
    expected = torch.nn.functional.batch_norm(cloud[0], None, None, training=True, eps=1e-300)
    assert_close(batch_norm(cloud[0]), expected)


def test_the_other_contractions_do_what_they_say():
    cloud = randn(2, 30, 8)
    assert_close(halve(cloud), cloud / 2)
    assert_close(squash(cloud), cloud.tanh())
    assert_close(global_rms(cloud).square().mean((1, 2)), torch.ones(2, dtype=torch.float64))
    assert_close(global_rms(cloud)[0] / cloud[0], (global_rms(cloud)[0, 0, 0] / cloud[0, 0, 0]).expand(30, 8))
    clipped = clip_to_ball(cloud, 2.0)
    assert_close(clipped.norm(dim=-1), cloud.norm(dim=-1).clamp_max(2.0))
    assert_close(torch.nn.functional.normalize(clipped, dim=-1), torch.nn.functional.normalize(cloud, dim=-1))
    assert float(clip_to_ball(10 * cloud).norm(dim=-1).max()) == pytest.approx(8**0.5)
    assert_close(zca(cloud), renormalize(cloud, torch.zeros(8), torch.eye(8)))


@pytest.mark.parametrize("name", CONTRACTIONS)
def test_contractions_keep_batches_apart_and_stay_finite(name):
    contraction = CONTRACTIONS[name]
    cloud = randn(2, 6, 3)
    assert_close(contraction(cloud), torch.stack([contraction(cloud[0]), contraction(cloud[1])]))
    single = contraction(cloud[0, :1])
    assert single.shape == (1, 3)
    same = torch.full((4, 3), 0.1)  # a number that rounds
    for hard in (single, contraction(same), contraction(0 * same), contraction(1e15 * torch.eye(3))):
        assert bool(torch.isfinite(hard).all())
    assert (
        name in ("zca", "normal_scores")  # which has none
        or torch.isfinite(torch.autograd.grad(contraction(x := (0 * same).requires_grad_()).sum(), x)[0]).all()
    )


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "global_rms", "squash", "batch_norm", "zca"])
def test_contractions_carry_derivatives(name):
    assert torch.autograd.gradcheck(CONTRACTIONS[name], randn(6, 3).requires_grad_())


@pytest.mark.parametrize("name", ["layer_norm", "batch_norm", "zca"])
def test_rounding_of_equal_numbers_is_not_blown_up(name):
    for value in (0.1, 0.3, 0.7, 1.1):
        for size in (3, 5, 7, 11, 13):
            assert not CONTRACTIONS[name](torch.full((size, size), value)).any()


def test_zca_whitens_on_the_span():
    found = zca(randn(3, 5))  # three tokens span two directions
    values = torch.linalg.eigvalsh(torch.cov(found.T, correction=0))
    assert_close(values, torch.tensor([0.0, 0.0, 0.0, 1.0, 1.0]).double(), rtol=0, atol=1e-12)


def test_ranks_become_the_quantiles_of_scipy():
    norm = pytest.importorskip("scipy.stats").norm
    cloud = randn(2, 9, 3).exp()
    found = normal_scores(cloud)
    for batch, feature in ((0, 0), (1, 2)):
        ranks = [sum(bool(other < each) for other in cloud[batch, :, feature]) for each in cloud[batch, :, feature]]
        assert found[batch, :, feature].tolist() == pytest.approx(norm.ppf([(rank + 0.5) / 9 for rank in ranks]))


def test_normal_points_are_assigned_at_least_cost_and_kept_apart_in_batches():
    pytest.importorskip("scipy")
    cloud = randn(2, 5, 3)
    found = normal_ranks(cloud)
    points = found[0].sort(0).values
    assert_close(found[1].sort(0).values, points)
    for each, moved in zip(cloud, found, strict=True):
        cost = (each * moved).sum()
        others = [(each * moved[list(order)]).sum() for order in itertools.permutations(range(5))]
        assert cost >= max(others) - 1e-12
    assert_close(zca(normal_ranks(randn(50, 3))), normal_ranks(randn(50, 3)))
    assert_close(normal_ranks(cloud[..., :1]), normal_scores(cloud[..., :1]))
    assert normal_ranks(torch.empty(0, 3)).shape == (0, 3)


def test_residual_attention_is_undone_token_by_token_by_normal_ranks_unless_values_are_free():
    pytest.importorskip("scipy")
    start = normal_ranks(randn(40, 3))
    for step in (0.1, 1.0, 100.0):
        assert torch.equal(normal_ranks(ascend(start, step=step)), start)
        assert torch.equal(normal_ranks(ascend(start, randn(7, 3), step=step)), start)
    assert not torch.equal(normal_ranks(start + 100.0 * (ascend(start) - start) @ randn(3, 3)), start)


def test_normal_ranks_name_the_package_that_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(MissingPackageError, match="normal_ranks needs scipy"):
        normal_ranks(randn(4, 2))


def test_empty_clouds_stay_empty():
    for name in (
        "normal_scores",
        "layer_norm",
        "rms_norm",
        "global_rms",
        "batch_norm",
        "halve",
        "squash",
        "clip_to_ball",
    ):
        assert CONTRACTIONS[name](torch.empty(0, 3)).shape == (0, 3)


IDENTITY, ZERO = torch.eye(2), torch.zeros(2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: renormalize(torch.ones(5, 2), ZERO, IDENTITY), "full rank 2, got rank 0"),
        (lambda: renormalize(0.1 + torch.zeros(5, 2), ZERO, IDENTITY), "got rank 0"),
        (lambda: renormalize(torch.tensor([[0.0, 0.0], [1.0, 1.0]]), ZERO, IDENTITY), "got rank 1"),
        (lambda: renormalize(torch.empty(0, 2), ZERO, IDENTITY), "cloud"),
        (lambda: renormalize(torch.randn(9, 2), torch.zeros(3), IDENTITY), "location"),
        (lambda: renormalize(torch.randn(9, 2), ZERO, -IDENTITY), "covariance"),
        (lambda: layer_norm(torch.ones(3)), "cloud"),
        (lambda: clip_to_ball(IDENTITY, -1.0), "radius"),
    ],
)  # fmt: skip
def test_mistakes_end_in_one_sentence(call, message):
    with pytest.raises(ValueError, match=message):
        call()
