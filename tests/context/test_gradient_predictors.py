"""Predictors by gradient descent against autograd, tokens and the best rate on a sample."""

import pytest
import torch
from torch.testing import assert_close

from massieu.checks import UserError
from massieu.context import LeastSquares, task_named
from massieu.context.gradient_predictors import GradientDescent, GradientDescentPlus, best_step_size
from massieu.context.predictors import Averaging


def drawn(noise=0.4):
    task = task_named("linear", dim=4, noise=noise)
    return task.draw(20, 9, torch.Generator().manual_seed(0), torch.float64)


def test_steps_descend_along_the_gradient_of_autograd():
    prompts = drawn()
    expected = torch.zeros_like(prompts.targets)
    for t in range(prompts.tasks):
        for i in range(1, prompts.examples):
            x, y, w = prompts.inputs[t, :i], prompts.targets[t, :i], torch.zeros(4, dtype=torch.float64)
            for _ in range(3):
                w.requires_grad_()
                loss = (x @ w - y).square().sum() / (2 * i)
                w = w.detach() - 0.2 * torch.autograd.grad(loss, w)[0]
            expected[t, i] = prompts.queries[t, i] @ w
    assert_close(GradientDescent(3, step_size=0.2)(prompts), expected)
    assert_close(GradientDescentPlus(3, step_size=0.2, curvature=0.0)(prompts), expected)
    assert not torch.allclose(GradientDescent(2, step_size=0.2)(prompts), expected, rtol=1e-2)


def test_steps_at_the_inverse_curvature_end_at_least_squares():
    prompts = drawn(noise=0.0)
    exact = LeastSquares()(prompts, [2, 8])  # near dim examples the curvature is too small for any number of steps
    few, many = ((GradientDescent(steps)(prompts, [2, 8]) - exact).square().mean() for steps in (5, 500))
    assert many < 1e-3 * few


def test_moving_inputs_is_what_tokens_do():
    """GD++ token by token: inputs and targets of examples and query are replaced in each layer."""
    prompts = drawn()
    expected = torch.zeros_like(prompts.targets)
    for t in range(prompts.tasks):
        for i in range(1, prompts.examples):
            x, y = torch.cat([prompts.inputs[t, :i], prompts.queries[t, i : i + 1]]), torch.zeros(i + 1).double()
            y[:i] = prompts.targets[t, :i]
            for _ in range(3):
                keys, values = x[:i], y[:i]
                moment, slope = keys.T @ keys / i, values @ keys / i
                x, y = x - 0.05 * x @ moment, y - 0.4 * x @ slope
            expected[t, i] = -y[i]
    assert_close(GradientDescentPlus(3, step_size=0.4, curvature=0.05)(prompts), expected)


@pytest.mark.parametrize(
    "options", [{}, {"noise": 0.7}, {"covariance": [2.0, 0.5, 1.0], "prior": [1.0, 3.0, 0.2], "noise": 0.5}]
)
def test_no_other_rate_is_better(options):
    task = task_named("linear", dim=3, **options)
    prompts = task.draw(100_000, 9, torch.Generator().manual_seed(0), torch.float64)
    step = Averaging()(prompts, [8])  # with rate 1
    answers = prompts.answers[:, [8]]
    fitted = float((step * answers).sum() / step.square().sum())
    assert best_step_size(8, 3, **options) == pytest.approx(fitted, rel=0.02)
    isotropic = 8 / (8 + 3 + 1 + options.get("noise", 0.0) ** 2)
    assert (best_step_size(8, 3, **options) == pytest.approx(isotropic)) == ("prior" not in options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GradientDescent(-1), "steps"),
        (lambda: GradientDescent(1, step_size=0.0), "step_size"),
        (lambda: GradientDescentPlus(1, 0.1, -0.1), "curvature"),
        (lambda: best_step_size(1, 3, noise=-1.0), "noise"),
        (lambda: best_step_size(-1, 3), "length"),
    ],
)
def test_what_cannot_descend_is_refused_in_one_sentence(make, message):
    with pytest.raises(UserError, match=message):
        make()


def test_weights_in_directions_without_inputs_leave_no_rate_to_choose():
    assert best_step_size(3, 2, covariance=[1.0, 0.0], prior=[0.0, 1.0]) == 0.0
    assert best_step_size(3, 2, covariance=[1.0, 0.0], prior=[1.0, 1.0]) > 0
