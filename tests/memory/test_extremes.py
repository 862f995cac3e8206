"""Memories at the ends of their range: almost no and almost infinite temperatures, large scores, overflowing powers."""

import time

import mpmath
import numpy as np
import pytest
import torch
from torch.testing import assert_close

from massieu.checks import UserError
from massieu.memory import Classical, Continuous, Dense, Exponential, Kernel, Sparse, entmax

CONVEX = {
    "softmax": Continuous,
    "entmax 1": lambda x, beta, **options: Sparse(x, beta, 1.0, **options),
    "entmax 1.3": lambda x, beta, **options: Sparse(x, beta, 1.3, **options),
    "sparsemax": lambda x, beta, **options: Sparse(x, beta, 2.0, **options),
    "entmax 3": lambda x, beta, **options: Sparse(x, beta, 3.0, **options),
    "mean shift": lambda x, beta, **options: Kernel(x, "l2", beta, **options),
}
ALL = {
    **CONVEX,
    "l1": lambda x, beta, **options: Kernel(x, "l1", beta, **options),
    "cosine": lambda x, beta, **options: Kernel(x, "cosine", beta, **options),
}
BETAS = [1e-300, 1e-15, 1e-9, 1e-4, 0.03, 3.0]


def randn(seed, *shape, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def signs(seed, *shape):
    return torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed)) * 2.0 - 1


def conjugate(scores, alpha):
    """The largest value of p . z + H(p), with as many digits as mpmath is told."""
    if alpha == 1:
        return mpmath.log(mpmath.fsum(mpmath.exp(z) for z in scores))
    order = alpha - 1

    def weights(tau):
        return [max(order * z - tau, mpmath.mpf(0)) ** (1 / order) for z in scores]

    low, high = order * max(scores) - 1, order * max(scores)
    for _ in range(60 if alpha <= 2 else 1200):
        if alpha <= 2:  # the sum is convex, and Newton comes from the left
            p = weights(low)
            low += (mpmath.fsum(p) - 1) / mpmath.fsum(x ** (2 - alpha) / order for x in p if x > 0)
            continue
        middle = (low + high) / 2
        low, high = (middle, high) if mpmath.fsum(weights(middle)) >= 1 else (low, middle)
    p = weights(low)
    return mpmath.fsum(x * z + (x - x**alpha) / (alpha * order) for x, z in zip(p, scores, strict=True))


def exact_energy(patterns, state, beta, alpha, log_weight):
    """The definition, with 330 digits."""
    with mpmath.workdps(330):
        own, beta, alpha = [mpmath.mpf(x) for x in log_weight.tolist()], mpmath.mpf(beta), mpmath.mpf(alpha)
        xi, x = [mpmath.mpf(v) for v in state.tolist()], [[mpmath.mpf(v) for v in row] for row in patterns.tolist()]
        inner = [mpmath.fsum(a * b for a, b in zip(row, xi, strict=True)) for row in x]
        scores = [beta * s + w for s, w in zip(inner, own, strict=True)]
        potential = (conjugate(scores, alpha) - conjugate(own, alpha)) / beta
        longest = max(mpmath.fsum(v * v for v in row) for row in x)
        return float(-potential + (mpmath.fsum(v * v for v in xi) + longest) / 2)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("name", "alpha"), [("softmax", 1), ("entmax 1", 1), ("entmax 1.3", 1.3), ("sparsemax", 2), ("entmax 3", 3)]
)
def test_energies_have_all_their_digits_at_any_temperature(name, alpha, weighted):
    patterns, state = randn(0, 6, 4), randn(1, 1, 4)
    log_weight = 0.7 * randn(2, 6) if weighted else torch.zeros(6).double()
    for beta in BETAS:
        memory = CONVEX[name](patterns, beta, log_weight=log_weight if weighted else None)
        exact = [exact_energy(patterns, row, beta, alpha, log_weight) for row in state]
        assert_close(memory.energy(state), torch.tensor(exact, dtype=torch.float64), rtol=0, atol=2e-14)


@pytest.mark.parametrize("similarity", ["l2", "l1", "cosine"])
def test_energies_by_similarity_have_all_their_digits_at_any_temperature(similarity):
    patterns, state, log_weight = randn(0, 6, 4), randn(1, 3, 4), 0.7 * randn(2, 6)
    scores = {
        "l2": lambda: -0.5 * (state[:, None] - patterns).square().sum(-1),
        "l1": lambda: -(state[:, None] - patterns).abs().sum(-1),
        "cosine": lambda: torch.nn.functional.cosine_similarity(state[:, None], patterns, dim=-1),
    }[similarity]()
    for beta in BETAS:
        energy = Kernel(patterns, similarity, beta, log_weight=log_weight).energy(state)
        with mpmath.workdps(330):
            for row, found in zip(scores.tolist(), energy.tolist(), strict=True):
                parts = [
                    mpmath.exp(w) * mpmath.exp(mpmath.mpf(beta) * s)
                    for w, s in zip(log_weight.tolist(), row, strict=True)
                ]
                total = mpmath.fsum(mpmath.exp(w) for w in log_weight.tolist())
                exact = float(-mpmath.log(mpmath.fsum(parts) / total) / mpmath.mpf(beta))
                assert found == pytest.approx(exact, rel=1e-14, abs=1e-14)


@pytest.mark.parametrize("name", CONVEX)
@pytest.mark.parametrize("beta", [1e-300, 1e-15, 1e-9, 1e-4])
@pytest.mark.parametrize("weighted", [False, True])
def test_every_update_descends_at_high_temperature_too(name, beta, weighted):
    memory = CONVEX[name](randn(0, 50, 4), beta, log_weight=randn(2, 50) if weighted else None)
    state = 3 * randn(1, 8, 4)
    moved = memory.update(state)
    fall = memory.energy(state) - memory.energy(moved)
    assert float((fall - 0.5 * (moved - state).square().sum(-1)).min()) >= -1e-13


@pytest.mark.parametrize("name", CONVEX)
def test_energies_at_high_temperature_have_derivatives(name):
    patterns, state = randn(0, 5, 3).requires_grad_(), (0.4 * randn(1, 2, 3)).requires_grad_()
    weights = (0.3 * randn(2, 5)).requires_grad_()
    beta = torch.tensor(0.05, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x, xi, b, w: CONVEX[name](x, b, log_weight=w).energy(xi), (patterns, state, beta, weights), atol=1e-6
    )


def test_weights_enter_the_constant_of_the_energy():
    patterns, state, log_weight = randn(0, 6, 4), randn(1, 5, 4), 2 * randn(2, 6) + 5
    plain, sparse = (
        make(patterns, 2.5, log_weight=log_weight) for make in (Continuous, lambda *a, **k: Sparse(*a, 1.0, **k))
    )
    assert_close(sparse.energy(state), plain.energy(state))
    for alpha in (1.0, 1.3, 1.5, 2.0, 3.0):
        memory = Sparse(patterns, 2.5, alpha, log_weight=log_weight)
        length, longest = state.norm(dim=-1), patterns.norm(dim=-1).max()
        assert bool((memory.energy(state) >= 0.5 * (length - longest) ** 2 - 1e-13).all())


# Cold


@pytest.mark.parametrize("name", ALL)
def test_a_beta_beyond_single_precision_is_the_limit_of_zero_temperature(name):
    patterns, state = randn(0, 7, 4, dtype=torch.float32), randn(1, 5, 4, dtype=torch.float32)
    cold = ALL[name](patterns, 1e39)
    found = cold.retrieve(state)
    expected = ALL[name](patterns.double(), 1e10).retrieve(state.double())
    assert torch.equal(found.state.double(), expected.state)
    assert torch.equal(found.index, expected.index)
    assert bool(found.energy.isfinite().all())
    heads = ALL[name](patterns, torch.tensor([[1e39], [1e39]], dtype=torch.float64))
    assert torch.equal(heads.update(state), cold.update(state).expand(2, 5, 4))


@pytest.mark.parametrize("name", ALL)
def test_scores_beyond_double_precision_are_refused(name):
    memory = ALL[name](100 * randn(0, 7, 4), 1e308)
    if name == "cosine":  # never above beta
        assert bool(memory.update(randn(1, 2, 4)).isfinite().all())
        return
    for method in ("update", "energy", "retrieve"):
        with pytest.raises(UserError, match="beta"):
            getattr(memory, method)(100 * randn(1, 2, 4))


@pytest.mark.parametrize("name", ALL)
def test_large_scores_in_single_precision_are_exact_between_patterns_too(name):
    """beta |x|^2 = 1e4, cues midway between two patterns."""
    patterns = 100 * torch.nn.functional.normalize(randn(0, 10, 8), dim=-1).float()
    cue = (0.5 * (patterns[:-1] + patterns[1:])).float()
    beta = 1.0 if name != "cosine" else 1e4
    found, exact = (ALL[name](x, beta).update(y) for x, y in ((patterns, cue), (patterns.double(), cue.double())))
    assert found.dtype == torch.float32
    assert_close(found.double(), exact, rtol=0, atol=2e-5)  # 2e-7 of the length of a pattern


@pytest.mark.parametrize("scale", [1e-10, 1e10])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_cosine_knows_no_scale(scale, dtype):
    patterns = randn(0, 20, 8)
    plain = Kernel(patterns, "cosine", 50.0).retrieve(patterns[:3])
    for first, second in ((scale, scale), (scale, 1.0), (1.0, scale), (scale**15, scale**15)):
        if dtype == torch.float32 and first == scale**15:
            continue
        memory = Kernel((first * patterns).to(dtype), "cosine", 50.0)
        found = memory.retrieve((second * patterns[:3]).to(dtype), steps=0)
        assert found.index.tolist() == [0, 1, 2]
        expected = Kernel(patterns, "cosine", 50.0).energy(patterns[:3])
        assert_close(found.energy.double(), expected, rtol=0, atol=1e-6 if dtype == torch.float32 else 1e-13)
    assert plain.index.tolist() == [0, 1, 2]


@pytest.mark.parametrize("similarity", ["l2", "l1", "cosine"])
@pytest.mark.parametrize("masked", [False, True])
def test_the_growth_of_a_similarity_is_that_of_the_jacobian(similarity, masked):
    memory, state = Kernel(randn(0, 9, 5), similarity, 4.0), 0.5 * randn(1, 12, 5)
    observed = torch.rand(12, 5, generator=torch.Generator().manual_seed(2)) < 0.7
    observed[:, 0] = True
    held = torch.rand(12, 5, generator=torch.Generator().manual_seed(3)) < 0.3
    conditions = {"observed": observed} if masked else {}
    growth = memory._growth(state, held if masked else None, **conditions)
    above = 0
    for row, value in enumerate(growth):
        own = {name: tensor[row : row + 1] for name, tensor in conditions.items()}
        jacobian = torch.autograd.functional.jacobian(
            lambda xi, own=own: memory._read(xi[None], memory.patterns, **own)[0], state[row]
        )
        free = observed[row] & ~held[row] if masked else torch.ones(5, dtype=torch.bool)
        eigenvalues = torch.linalg.eigvals(jacobian[free][:, free]).abs()
        largest = eigenvalues.max() if free.any() else torch.tensor(0.0)
        above += bool(largest > 1)
        if largest > 1 or value > 1:
            assert_close(value, largest.double(), rtol=1e-9, atol=1e-9)
    assert above > 0


@pytest.mark.parametrize(("similarity", "beta"), [("l2", 1.0), ("l1", 0.1), ("cosine", 20.0)])
def test_the_kind_of_a_state_costs_little_beside_the_retrieval(similarity, beta):
    patterns = torch.rand(500, 784, generator=torch.Generator().manual_seed(0)).double()
    memory, cue = Kernel(patterns, similarity, beta), patterns[:4] + 0.1 * randn(1, 4, 784)
    state = memory.retrieve(cue).state
    start = time.perf_counter()
    memory._kind(state, None)
    assert time.perf_counter() - start < 1.0  # measured 0.1; row by row through autograd it was 3 to 8


def test_last_digits_that_alternate_are_no_cycle():
    seen = set()
    for name, make in ALL.items():
        for seed in range(6):
            patterns = randn(seed, 12, 5, dtype=torch.float32)
            found = make(patterns, 2.0).retrieve(randn(seed + 99, 25, 5, dtype=torch.float32), tolerance=0.0, steps=300)
            small = found.residual <= 1e-4 * float(patterns.norm(dim=-1).max())
            seen |= {(name, kind) for kind in found.kind[small.numpy()].tolist()}
    assert not {name for name, kind in seen if kind == "cycle"}
    assert Classical(torch.tensor([[1.0, -1.0]]), "sync").retrieve(torch.tensor([[1.0, 1.0]])).kind.tolist() == [
        "cycle"
    ]


# Polar states


def test_kinds_are_right_where_the_energy_overflows():
    patterns = signs(0, 5, 1000)
    found = Dense(patterns, 150).retrieve(patterns)
    assert set(found.kind.tolist()) == {"minimum"}
    assert bool(found.energy.isneginf().all())
    assert torch.equal(found.state, patterns.double())
    # The same kinds as by the cost itself, where that is in range.
    small = Dense(signs(1, 40, 20), 3)
    state = small.retrieve(signs(2, 60, 20)).state
    cost = small.flip_cost(state)
    expected = np.where(
        (cost < -1e-6).any(-1), "saddle", np.where((cost.abs() < 1e-6).any(-1), "metastable", "minimum")
    )
    assert small.retrieve(state, steps=0).kind.tolist() == expected.tolist()


def test_the_index_is_the_pattern_of_most_weight_whatever_its_sign():
    patterns, order = signs(0, 5, 200), list(range(5))
    for memory in (Dense(patterns, 4, rectified=False), Classical(patterns)):
        for sign in (1, -1):
            assert memory.retrieve(sign * patterns).index.tolist() == order
    # A rectified power and the exponential do not store the negative.
    for memory in (Dense(patterns, 4), Exponential(patterns)):
        assert memory.retrieve(patterns).index.tolist() == order
        away = memory.retrieve(-patterns, steps=0).index
        assert away.tolist() == (-patterns @ patterns.T).argmax(-1).tolist()


def test_states_may_be_integers_like_patterns():
    patterns = signs(0, 3, 40)
    for make in (Classical, lambda x: Dense(x, 3), Exponential):
        found, other = make(patterns.long()).retrieve(patterns.long()), make(patterns).retrieve(patterns)
        assert torch.equal(found.state, other.state)


def test_a_long_seed_serves():
    patterns = signs(0, 3, 40)
    for seed in (2**45, 2**200):
        assert torch.equal(Classical(patterns, generator=seed).retrieve(patterns).state, patterns.double())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: entmax(torch.full((1, 3), -torch.inf), 1.5), "scores"),
        (lambda: entmax(torch.full((1, 3), -torch.inf), 1.0), "scores"),
        (lambda: entmax(torch.tensor([1.0, torch.inf]), 2.0), "scores"),
        (lambda: entmax(torch.tensor([1.0, torch.nan]), 1.0), "scores"),
        (lambda: entmax(torch.zeros(2, 0), 2.0), "scores"),
        (lambda: Continuous(torch.eye(2), torch.zeros(0)), "beta"),
        (lambda: Classical(torch.ones(1, 2), bias=torch.full((2,), torch.nan)), "bias"),
    ],
)
def test_bad_input_gets_a_sentence(call, message):
    with pytest.raises(UserError, match=message):
        call()


def test_numbers_of_numpy_are_numbers():
    for kind in (np.float32, np.float64, np.int64):
        assert Continuous(torch.eye(2), kind(2)).beta == 2.0
