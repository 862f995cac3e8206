"""Fixed points: the search, its steps and outcome, and derivatives."""

import subprocess
import sys

import pytest
import torch
from torch.testing import assert_close

from massieu import Points
from massieu.checks import UserError, pip_install
from massieu.dynamics import clusters, fixed_points, hopfield_step


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def unrolled(patterns, beta, start, steps=2000):
    for _ in range(steps):
        start = hopfield_step(start, patterns, beta=beta)
    return start


def test_a_memory_has_one_fixed_point_when_hot_and_one_for_each_pattern_when_cold():
    patterns = randn(8, 6, seed=63)
    counts = []
    for scale in (0.5, 1.0, 2.0, 3.0, 4.0):
        found = fixed_points((scale * patterns, 1.0), scale * patterns, memory=0, max_steps=3000)
        assert bool(found.converged.all())
        counts.append(int(clusters(found.state, 1e-4)))
    assert counts == [1, 2, 8, 8, 8]


@pytest.mark.parametrize("memory", [0, 1, 5])
def test_fixed_points_rest(memory):
    patterns, start = randn(8, 16, seed=4) / 2, randn(20, 16, seed=5) / 2
    found = fixed_points((patterns, 1.0), start, memory=memory, max_steps=2000)
    assert bool(found.converged.all())
    assert_close(hopfield_step(found.state, patterns), found.state, rtol=0, atol=1e-11)
    assert_close(found.residual, (hopfield_step(found.state, patterns) - found.state).norm(dim=-1))
    assert "8 frozen keys, not causal" in found.regime


def test_acceleration_saves_steps_where_plain_iteration_is_slow():
    patterns = 0.32 * torch.tensor([[3.0, 0.0], [-3.0, 0.0], [0.0, 1.0]]).double()
    start = torch.tensor([[0.5, 0.4]], dtype=torch.float64)
    plain = fixed_points((patterns, 1.0), start, memory=0, max_steps=5000)
    fast = fixed_points((patterns, 1.0), start, max_steps=5000)
    assert bool(plain.converged & fast.converged)
    assert int(fast.steps) < 0.7 * int(plain.steps)
    assert_close(fast.state, plain.state, rtol=0, atol=1e-10)


@pytest.mark.parametrize("seed", [0, 4, 5])
def test_acceleration_is_not_drawn_back_to_points_that_repel(seed):
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.randn(8, 16, generator=generator, dtype=torch.float64) / 2
    start = torch.cat([patterns, torch.randn(30, 16, generator=generator, dtype=torch.float64) / 2])
    # From some of these starts, keeping every gain of acceleration took thousands of steps.
    assert bool(fixed_points((patterns, 1.0), start).converged.all())


def test_plain_steps_approach_at_the_rate_of_the_fisher_matrix():
    patterns = randn(8, 6, seed=63)
    (point,) = fixed_points((patterns, 0.5), patterns[:1]).state[None]
    rate = torch.linalg.eigvalsh(0.5 * Points(patterns).fisher(0.5 * point))[0, -1]
    state, errors = point + 1e-3, []
    for _ in range(40):
        state = hopfield_step(state, patterns, beta=0.5)
        errors.append(float((state - point).norm()))
    assert errors[30] / errors[29] == pytest.approx(float(rate), rel=1e-3)


def test_derivatives_agree_with_finite_differences_and_with_the_unrolled_iteration():
    patterns, start = randn(5, 3).requires_grad_(), randn(2, 3, seed=1)

    def solved(patterns):
        return fixed_points((patterns, 0.6), start, tolerance=1e-15, max_steps=3000).state

    assert torch.autograd.gradcheck(solved, patterns, atol=1e-6)
    weight = randn(2, 3, seed=2)
    (implicit,) = torch.autograd.grad((weight * solved(patterns)).sum(), patterns)
    (explicit,) = torch.autograd.grad((weight * unrolled(patterns, 0.6, start, 300)).sum(), patterns)
    assert_close(implicit, explicit, rtol=1e-8, atol=1e-9)
    # One step alone, the derivative without the linear system, is another one.
    (single,) = torch.autograd.grad(
        (weight * hopfield_step(solved(patterns).detach(), patterns, beta=0.6)).sum(), patterns
    )
    assert float((single - explicit).norm() / explicit.norm()) > 0.05


def test_a_function_may_couple_rows_and_carry_any_parameter():
    mix = (0.3 * randn(4, 4)).requires_grad_()
    shift = randn(4, 2, seed=1).requires_grad_()

    def step(state):
        return torch.tanh(mix @ state + shift)

    found = fixed_points(step, torch.zeros(4, 2, dtype=torch.float64))
    assert bool(found.converged.all())
    assert found.regime == "iteration of step, all rows as one system"
    state = torch.zeros(4, 2, dtype=torch.float64)
    for _ in range(500):
        state = step(state)
    assert_close(found.state, state, rtol=0, atol=1e-10)
    implicit = torch.autograd.grad(found.state.square().sum(), [mix, shift])
    assert_close(implicit, torch.autograd.grad(state.square().sum(), [mix, shift]), rtol=1e-8, atol=1e-9)


def test_acceleration_reaches_what_plain_steps_run_away_from():
    repelling = torch.diag(torch.tensor([-1.5, 0.5])).double()
    shift = torch.tensor([[1.0, 1.0]]).double()

    def step(state):
        return state @ repelling + shift

    found = fixed_points(step, torch.zeros(1, 2).double(), plain_steps=0)
    assert bool(found.converged)
    assert_close(found.state, torch.tensor([[0.4, 2.0]]).double())
    assert not bool(fixed_points(step, torch.zeros(1, 2).double(), memory=0, max_steps=50).converged)


def test_a_search_that_did_not_converge_says_so_and_has_no_derivative_there():
    patterns = randn(8, 3).requires_grad_()
    # The last row starts at rest; the others have one step.
    rest = fixed_points((patterns.detach(), 0.3), randn(1, 3)).state
    found = fixed_points((patterns, 0.3), torch.cat([5 * randn(3, 3), rest]), max_steps=1, memory=0)
    assert found.converged.tolist() == [False, False, False, True]
    assert found.message.startswith("1 of 4 rows converged after at most ")
    assert found.steps.tolist() == [1, 1, 1, 0]
    assert bool((found.residual[:3] > 1e-6).all())
    (gradient,) = torch.autograd.grad(found.state[:3].sum(), patterns, retain_graph=True)
    assert not gradient.any()
    (gradient,) = torch.autograd.grad(found.state[3:].sum(), patterns)
    assert gradient.any()


def test_a_function_that_leaves_the_numbers_ends_without_converging():
    found = fixed_points(lambda x: x * x * 1e200, torch.full((1, 2), 1e10, dtype=torch.float64))
    assert not bool(found.converged.any())


def test_batches_single_patterns_and_nothing_at_all():
    patterns, start = randn(2, 6, 3), randn(2, 4, 3, seed=1)
    found = fixed_points((patterns, 0.7), start)
    for i in range(2):
        assert_close(found.state[i], fixed_points((patterns[i], 0.7), start[i]).state, rtol=0, atol=1e-10)
    assert found.steps.shape == (2, 4)
    single = fixed_points((patterns[0, :1], 1.0), start[0])
    assert_close(single.state, patterns[0, :1].expand(4, 3))
    assert fixed_points((patterns[0], 1.0), start[0, :0]).state.shape == (0, 3)
    assert fixed_points(torch.tanh, start[0, :0]).converged.shape == (0,)


def test_float32_converges_as_far_as_it_can():
    patterns, start = randn(8, 6, dtype=torch.float32), randn(10, 6, seed=1, dtype=torch.float32)
    found = fixed_points((patterns, 1.0), start)
    assert found.state.dtype == torch.float32
    assert bool(found.converged.all())
    expected = unrolled(patterns.double(), 1.0, start.double(), 3000)
    assert_close(found.state.double(), expected, rtol=0, atol=1e-4)


def test_no_graph_is_kept_when_nobody_wants_derivatives():
    patterns = randn(5, 3).requires_grad_()
    with torch.no_grad():
        assert not fixed_points((patterns, 1.0), randn(1, 3)).state.requires_grad
    assert not fixed_points((patterns.detach(), 1.0), randn(1, 3).requires_grad_()).state.requires_grad


def test_second_derivatives_are_refused():
    patterns = randn(5, 3).requires_grad_()
    state = fixed_points((patterns, 0.5), randn(1, 3)).state
    with pytest.raises(
        RuntimeError, match="fixed_points has first derivatives only, got a backward pass with create_graph=True"
    ):
        torch.autograd.grad(state.sum(), patterns, create_graph=True)


def test_a_degenerate_fixed_point_has_no_derivative():
    shift = torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)
    turn = torch.tensor([[1.0, 1.0], [0.0, 1.0]], dtype=torch.float64)
    state = fixed_points(lambda x: x @ turn + shift, torch.zeros(1, 2, dtype=torch.float64)).state
    with pytest.raises(
        RuntimeError,
        match="the derivative of the fixed point must solve a linear system, got a residual of .* nearly degenerate",
    ):
        torch.autograd.grad(state.sum(), shift)


def test_without_scipy_acceleration_says_what_to_install():
    program = """
import sys, torch
sys.modules["scipy"] = None
from massieu.dynamics import fixed_points
pair = torch.eye(2), 1.0
assert bool(fixed_points(pair, torch.eye(2), memory=0).converged.all())
try:
    fixed_points(pair, torch.eye(2), plain_steps=0)
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "memory > 0" in done.stdout
    assert f"which is not installed; {pip_install('verify')}" in done.stdout


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: fixed_points((x, 1.0), x[0]), "start"),
        (lambda x: fixed_points((x[0], 1.0), x), "patterns"),
        (lambda x: fixed_points((x[:0], 1.0), x), "patterns"),
        (lambda x: fixed_points((x, x[0, 0]), x), "beta"),
        (lambda x: fixed_points(x, x), "function"),
        (lambda x: fixed_points(lambda y: y[:1], x), "function"),
        (lambda x: fixed_points(lambda y: y.double(), x), "function"),
        (lambda x: fixed_points((x, 1.0), x, memory=-1), "memory"),
        (lambda x: fixed_points((x, 1.0), x, max_steps=0), "max_steps"),
        (lambda x: fixed_points((x, 1.0), x, plain_steps=-1), "plain_steps"),
        (lambda x: fixed_points((x, 1.0), x, tolerance=-1.0), "tolerance"),
    ],
)  # fmt: skip
def test_mistakes_end_in_one_sentence(call, message):
    with pytest.raises(UserError, match=message):
        call(torch.ones(3, 2))
