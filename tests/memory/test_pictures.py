"""Drawings to store, and what memories make of them and of digits."""

import numpy as np
import pytest
import torch

from massieu.memory import Classical, Continuous, Dense, Exponential, Kernel, drawings

load_digits = pytest.importorskip("sklearn.datasets").load_digits


def images():
    return torch.stack(list(drawings().values()))


def digits():
    """Digits in the order in which the shares below were first measured."""
    order = np.random.default_rng(0).permutation(1797)
    return torch.as_tensor(load_digits().data / 16)[torch.as_tensor(order)]


def fixed(memory, patterns):
    return float((memory.update(patterns) == patterns).all(-1).double().mean())


def test_drawings_are_states_that_differ_in_ten_pixels_at_least():
    states = images()
    assert states.shape == (10, 64)
    assert set(states.unique().tolist()) == {-1.0, 1.0}
    overlap = (states @ states.T).fill_diagonal_(0)
    assert float(overlap.max()) == 64 - 2 * 10
    assert float(overlap.sum()) / 90 / 64 == pytest.approx(0.0854, abs=1e-4)


@pytest.mark.parametrize(("hidden", "classical", "exponential"), [(0, 0.3, 1.0), (24, 0.0, 1.0), (32, 0.0, 0.8)])
def test_drawings_from_masks(hidden, classical, exponential):
    states = images()
    cues = torch.where(torch.arange(64) < 64 - hidden, states, -1.0)
    for memory, expected in ((Classical(states), classical), (Exponential(states), exponential)):
        found = (memory.retrieve(cues).state == states).all(-1).double().mean()
        assert float(found) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("build", "shares"),
    [
        (Classical, [0.2, 0.1, 0.0, 0.0]),
        (lambda patterns: Dense(patterns, 3), [0.6, 0.1, 0.05, 0.0]),
        (lambda patterns: Dense(patterns, 10), [0.8, 0.7, 0.85, 0.86]),
        (Exponential, [1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_shares_of_black_and_white_digits_that_are_fixed_points(build, shares):
    patterns = torch.where(digits() >= 0.5, 1.0, -1.0)
    assert [fixed(build(patterns[:n]), patterns[:n]) for n in (5, 10, 20, 50)] == pytest.approx(shares)


def test_shares_of_digits_that_are_found_from_a_half_and_under_noise():
    stored = digits()[:100].float()
    known = (torch.arange(64) < 32).expand(100, 64)
    noise = torch.as_tensor(np.random.default_rng(1).standard_normal((100, 64))).float()
    half, noisy = torch.where(known, stored, 0.0), stored + 0.5 * noise

    def right(state):
        return float(((state - stored).abs().amax(-1) < 1e-3).double().mean())

    found = [
        right(Continuous(stored, 1e4).update(half)),
        right(Kernel(stored, "l2", 1e4).update(half)),
        right(Kernel(stored, "l1", 1e4).update(half)),
        right(Kernel(stored, "l2", 1e4).update(noisy)),
        right(Kernel(stored, "l2", 1e4).update(half, observed=known)),
    ]
    assert found == pytest.approx([0.22, 0.26, 0.69, 0.85, 1.0], abs=0.02)


def test_shares_that_come_back_among_as_many_patterns_as_the_exponential_holds():
    generator = torch.Generator().manual_seed(0)
    patterns = 2.0 * torch.randint(0, 2, (1024, 20), generator=generator, dtype=torch.float64) - 1
    memory, found = Exponential(patterns), []
    for flips in (0, 1, 2, 4):
        order = torch.rand(patterns.shape, generator=generator).argsort(-1)
        cues = torch.where(order < flips, -patterns, patterns)
        back = torch.where(memory.flip_cost(cues) < 0, -cues, cues)
        found.append(float((back == patterns).all(-1).double().mean()))
    assert found == pytest.approx([0.995, 0.85, 0.27, 0.0], abs=0.06)
