"""Flow on the sphere and resampling, against enumeration and against the moments that draws must have."""

import pytest
import torch
from moments import assert_moments
from torch.testing import assert_close

from massieu import Points
from massieu.dynamics import particles, resample, sphere_flow


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(("beta", "expected"), [(1.0, 1), (4.0, 2), (9.0, 3)])
def test_points_on_the_circle_gather_in_more_clusters_at_lower_temperature(beta, expected):
    starts = torch.stack([randn(32, 2, seed=seed) for seed in range(5)])
    found = sphere_flow(starts, beta=beta, steps=400, every=400)
    assert found.observables["clusters"][-1].tolist() == 5 * [expected]
    assert "moving keys" in found.regime
    assert "not causal" in found.regime


def test_in_sixteen_dimensions_cold_points_stay_apart():
    start = 4 * randn(40, 16)  # on the unit sphere, beta is that of the radius four times sixteen
    counts = [
        int(sphere_flow(start, beta=16 * b, steps=400, every=400).observables["clusters"][-1]) for b in (1.0, 0.25)
    ]
    assert counts[0] > 30
    assert counts[1] == 1


def test_the_flow_on_the_sphere_follows_its_velocity():
    start = torch.nn.functional.normalize(randn(6, 3), dim=-1)
    found = sphere_flow(start, beta=2.0, steps=1, step_size=1e-6).cloud
    pull = (2 * start @ start.T).softmax(-1) @ start
    velocity = pull - (pull * start).sum(-1, keepdim=True) * start
    assert_close((found - start) / 1e-6, velocity, rtol=0, atol=1e-5)
    assert_close(found.norm(dim=-1), torch.ones(6, dtype=torch.float64))
    long = sphere_flow(start, beta=2.0, steps=1, step_size=0.5).cloud
    assert_close(long, torch.nn.functional.normalize(start + 0.5 * velocity, dim=-1))


def test_causal_points_follow_those_before_them():
    found = sphere_flow(randn(12, 3), beta=1.0, steps=3000, step_size=0.5, causal=True, every=3000)
    first = torch.nn.functional.normalize(randn(12, 3), dim=-1)[0]
    assert_close(found.cloud[0], first)
    assert_close(found.cloud, first.expand(12, 3), rtol=0, atol=1e-6)


@pytest.mark.parametrize("causal", [False, True])
def test_draws_have_the_mean_of_attention_and_the_covariance_of_the_fisher_matrix(causal, monkeypatch):
    monkeypatch.setattr(particles, "TILE_NUMBERS", 25)  # several tiles
    cloud, queries, beta = randn(2, 6, 3), randn(2, 4, 3, seed=1), 0.8
    mask = torch.ones(4, 6, dtype=torch.bool).tril(2) if causal else torch.ones(4, 6, dtype=torch.bool)
    measure = Points(cloud, torch.where(mask, 0.0, -torch.inf).double())
    draws = resample(cloud, queries, generator=seeded(), beta=beta, causal=causal, count=40_000)
    assert draws.shape == (40_000, 2, 4, 3)
    assert_moments(draws, measure.mean(beta * queries), measure.fisher(beta * queries))
    # The moments of another temperature are told apart.
    with pytest.raises(AssertionError):
        assert_moments(draws, measure.mean(queries), measure.fisher(queries))


def test_resampling_the_cloud_returns_its_tokens_and_is_reproducible():
    cloud = randn(50, 2)
    first, second = (resample(cloud, generator=seeded(3)) for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first, resample(cloud, generator=seeded(4)))
    assert bool((torch.cdist(first, cloud, compute_mode="donot_use_mm_for_euclid_dist").amin(-1) == 0).all())


def test_draws_at_the_edges():
    cloud = randn(5, 2)
    assert resample(cloud, cloud[:0]).shape == (0, 2)
    assert resample(cloud, cloud[:2], count=0).shape == (0, 2, 2)
    assert torch.equal(resample(cloud[:1], cloud), cloud[:1].expand(5, 2))
    assert torch.equal(resample(cloud, causal=True, generator=seeded(), count=9)[:, 0], cloud[:1].expand(9, 2))
    # Scores far beyond the largest exponent, in float32.
    assert torch.equal(resample(torch.eye(3), 1e6 * torch.eye(3)), torch.eye(3))
    # Tokens of no weight behind the last one are not drawn, however the levels round.
    far = torch.tensor([[0.0], [-1e4]])
    assert not resample(far, torch.ones(1, 1), count=10_000, generator=seeded()).any()


@pytest.mark.parametrize(("level", "cloud"), [(0.0, [[-1e4], [0.0]]), (1.0, [[0.0], [-1e4]])])
def test_no_level_draws_a_token_without_weight(level, cloud, monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda *shape, dtype, **_: torch.full(shape, level, dtype=dtype))
    assert resample(torch.tensor(cloud), torch.ones(1, 1)).tolist() == [[0.0]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: sphere_flow(0 * x), "points"),
        (lambda x: sphere_flow(x[0]), "points"),
        (lambda x: sphere_flow(x, step_size=-1.0), "step_size"),
        (lambda x: resample(x[:0]), "cloud"),
        (lambda x: resample(x, x[0]), "queries"),
        (lambda x: resample(x, x, count=-1), "count"),
        (lambda x: resample(x[:2], x, causal=True), "causal"),
        (lambda x: resample(x.expand(2, 3, 2), x.expand(5, 3, 2)), "leading axes that broadcast"),
        (lambda x: resample(x, torch.ones(3, 4)), "queries"),
    ],
)  # fmt: skip
def test_mistakes_end_in_one_sentence(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.ones(3, 2))
