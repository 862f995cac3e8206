"""Trajectories: what moves, what is recorded, what the sentence says, and how much memory it takes."""

import subprocess
import sys

import pytest
import torch
from torch.testing import assert_close

from massieu import Gaussian, Sphere
from massieu.checks import UserError
from massieu.dynamics import CONTRACTIONS, OBSERVABLES, CloudTrajectory, ascend, evolve, layer_norm, rms_norm


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def block(cloud, keys, step, beta, causal, residual):
    """One block by the whole matrix."""
    seen = cloud if keys is None else keys
    scores = beta * cloud @ seen.mT
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    return residual * cloud + step * scores.softmax(-1) @ seen


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_blocks_are_applied_one_after_the_other(frozen, causal, residual):
    cloud = randn(2, 9, 3)
    keys = cloud.clone() if frozen else None
    expected = cloud
    for _ in range(3):
        expected = layer_norm(block(expected, keys, 0.5, 0.8, causal, residual))
    found = evolve(
        cloud, steps=3, step=0.5, beta=0.8, keys=keys, causal=causal, residual=residual, contraction="layer_norm"
    )
    assert_close(found.cloud, expected)


def test_start_and_end_are_always_recorded():
    found = evolve(randn(8, 2), steps=7, every=3, observe=["mean", "clusters"], contraction=rms_norm)
    assert found.steps.tolist() == [0, 3, 6, 7]
    assert {name: tuple(values.shape) for name, values in found.observables.items()} == {
        "mean": (4, 2),
        "clusters": (4,),
    }
    assert_close(found.observables["mean"][0], randn(8, 2).mean(0))
    assert_close(found.observables["mean"][-1], found.cloud.mean(0))
    still = evolve(randn(8, 2), steps=0)
    assert still.steps.tolist() == [0]
    assert_close(still.cloud, randn(8, 2))


def test_every_observable_and_contraction_has_its_name():
    for name in CONTRACTIONS:
        found = evolve(randn(2, 12, 3), steps=2, contraction=name, observe=list(OBSERVABLES))
        assert name in found.regime
        assert set(found.observables) == set(OBSERVABLES)
        assert all(values.shape[:2] == (3, 2) for values in found.observables.values())


def test_other_observables_come_as_a_mapping():
    watched = {"keys": lambda cloud, regime: torch.tensor(regime.keys is None), "mean": OBSERVABLES["mean"]}
    found = evolve(randn(5, 2), steps=1, observe=watched)
    assert found.observables["keys"].tolist() == [True, True]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, "residual attention with step 1 at beta 1 over moving keys (the tokens themselves), not causal, then no contraction"),
        ({"keys": torch.ones(4, 2).double(), "step": 0.5, "contraction": "zca"}, "residual attention with step 0.5 at beta 1 over 4 frozen keys, not causal, then zca"),
        ({"causal": True, "residual": False, "beta": 2.0}, "attention without residual times 1 at beta 2 over moving keys (the tokens themselves), causal, then no contraction"),
        ({"contraction": torch.tanh}, "residual attention with step 1 at beta 1 over moving keys (the tokens themselves), not causal, then tanh"),
    ],
)  # fmt: skip
def test_a_trajectory_says_what_was_frozen_and_what_moved(options, sentence):
    found = evolve(randn(5, 2), steps=2, observe=["mean"], **options)
    assert isinstance(found, CloudTrajectory)
    assert found.regime == sentence
    assert repr(found) == f"CloudTrajectory(2 steps of a cloud (5, 2): {sentence}; [mean])"


@pytest.mark.parametrize("scale", [0.3, 1.0, 2.0])
def test_both_lyapunov_functions_rise_with_moving_keys(scale):
    found = evolve(scale * randn(30, 3), steps=10, step=0.3, observe=["sum_log_normalizer", "log_sum_normalizer"])
    for values in found.observables.values():
        assert bool((values.diff() >= 0).all())


def test_the_flow_is_the_gradient_of_the_sum_of_normalizers_in_a_metric_and_not_of_their_logarithms():
    cloud = randn(6, 3).requires_grad_()
    update = ascend(cloud, step=1.0) - cloud
    normalizer = (cloud @ cloud.T).exp().sum(-1)
    (slope,) = torch.autograd.grad(0.5 * normalizer.sum(), cloud, retain_graph=True)
    assert_close(update, slope / normalizer[:, None])
    (other,) = torch.autograd.grad(normalizer.log().sum(), cloud)
    assert float(((other - update).norm() / update.norm()).detach()) > 0.3


def test_without_residual_moving_keys_collapse_and_fixed_ones_need_not():
    cloud = randn(20, 3)
    moving = evolve(cloud, steps=10, residual=False, observe=["max_distance"])
    fixed = evolve(2 * cloud, steps=100, keys=2 * cloud, residual=False, observe=["max_distance"])
    assert float(moving.observables["max_distance"][-1]) < 1e-6
    assert float(fixed.observables["max_distance"][-1]) > 1


def test_layer_norm_undoes_attention_for_a_rotation_invariant_law():
    cloud = rms_norm(randn(40, 8))
    for measure in (Sphere(8), Gaussian(torch.zeros(8).double(), torch.eye(8).double())):
        assert_close(rms_norm(cloud + measure.mean(cloud)), cloud)


def test_entropy_of_gaussian_tokens_grows_by_the_predicted_amount():
    covariance = torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
    cloud = randn(50_000, 2) @ torch.linalg.cholesky(torch.linalg.inv(covariance)).T
    moved = cloud + Gaussian(torch.tensor([1.0, -1.0]).double(), covariance).mean(cloud)
    gain = OBSERVABLES["entropy_logdet"](moved, None) - OBSERVABLES["entropy_logdet"](cloud, None)
    assert float(gain) == pytest.approx(2.0794415, abs=1e-6)  # log det (I + covariance), whatever the sample


def test_many_particles_hold_no_matrix():
    program = """
import torch
from pathlib import Path
from massieu.dynamics import evolve, resample, clusters
torch.set_num_threads(1)
def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024
generator = torch.Generator().manual_seed(0)
evolve(torch.randn(500, 3, generator=generator), steps=1)
cloud = torch.randn(8000, 3, generator=generator)
before = peak()
evolve(cloud, steps=1, contraction="layer_norm", observe=["median_distance", "sum_log_normalizer"])
resample(cloud, generator=generator)
clusters(cloud, 0.5)
print(peak() - before)
"""
    if not sys.platform.startswith("linux"):
        pytest.skip("the peak of a process is read from /proc")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    # The matrix of scores alone would take 244 MB in float32, and 488 MB where the draws need float64.
    assert float(done.stdout) < 190


BAD = {"steps": -1, "every": 0, "contraction": "layernorm", "observe": ["mean", "entropy"], "step": float("inf")}


@pytest.mark.parametrize(("name", "value"), BAD.items())
def test_mistakes_end_in_one_sentence(name, value):
    with pytest.raises(UserError, match=name):
        evolve(randn(4, 2), **{"steps": 1, name: value})


def test_an_empty_cloud_does_not_evolve():
    with pytest.raises(UserError, match="cloud"):
        evolve(torch.empty(0, 2), steps=1)


@pytest.mark.parametrize("observe", [("clusters",), ("median_distance", "excess_kurtosis", "sum_log_normalizer")])
def test_a_cloud_that_overflows_ends_at_its_last_finite_state(observe):
    cloud = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    found = evolve(cloud, steps=300, every=50, observe=observe)
    last = int(found.steps[-1])
    assert 10 < last < 300
    assert found.regime.endswith(f"; it left the range of float32 after {last} steps")
    assert found.cloud.isfinite().all()
    assert found.steps.tolist()[:-1] == list(range(0, last, 50))
    assert not ascend(found.cloud).isfinite().all()
    assert "range" not in evolve(cloud, steps=5, observe=observe).regime
