"""AdaBoost's step as the minimizer of a log normalizer."""

import math

import pytest
import torch
from agreement import randn
from scipy.optimize import minimize_scalar
from torch.testing import assert_close

from massieu import Points
from massieu.checks import UserError
from massieu.contrast import adaboost_step

DOUBLE = torch.float64


def weights(count: int) -> torch.Tensor:
    return randn(count, seed=3, dtype=DOUBLE)


def test_for_plus_and_minus_one_alpha_is_the_closed_form():
    margins, log_weight = randn(50, dtype=DOUBLE).sign(), weights(50)
    error = float(log_weight.softmax(-1)[margins < 0].sum())
    step = adaboost_step(margins, log_weight)
    assert float(step.alpha) == pytest.approx(0.5 * math.log((1 - error) / error), rel=1e-13)
    assert float(step.log_normalizer) == pytest.approx(math.log(2 * math.sqrt(error * (1 - error))), rel=1e-12)
    assert float(step.residual) < 1e-15
    assert bool(step.converged)
    # dlogZ/dalpha vanishes, and does not beside alpha.
    measure = Points(-margins[:, None], log_weight)
    natural = torch.stack([step.alpha, step.alpha + 0.1])[:, None]
    assert_close(measure.mean(natural)[0].abs() < 1e-15, torch.tensor([True]))
    assert float(measure.mean(natural)[1].abs()) > 1e-2


@pytest.mark.parametrize("seed", range(3))
def test_for_real_valued_learners_alpha_minimizes_the_log_normalizer(seed):
    margins, log_weight = randn(40, seed=seed, dtype=DOUBLE) + 0.3, weights(40)
    step = adaboost_step(margins, log_weight)

    def exponential_loss(alpha: float) -> float:
        return float(torch.logsumexp(log_weight - alpha * margins, -1))

    best = minimize_scalar(exponential_loss, bracket=(-1, 1), tol=1e-12)
    assert float(step.alpha) == pytest.approx(best.x, abs=1e-6)
    assert float(step.log_normalizer) == pytest.approx(best.fun - exponential_loss(0.0), abs=1e-13)
    assert float(step.residual) < 1e-13
    assert bool(step.converged)
    assert int(step.steps) > 0


def test_the_new_weights_are_the_tilt_and_leave_the_learner_worthless():
    margins, log_weight = randn(2, 40, dtype=DOUBLE) + 0.2, weights(40)
    step = adaboost_step(margins, log_weight)
    new = step.log_weight.exp()
    assert_close(new.sum(-1), torch.ones(2, dtype=DOUBLE), rtol=1e-14, atol=0)
    assert float((new * margins).sum(-1).abs().max()) < 1e-13
    expected = torch.softmax(log_weight - step.alpha[:, None] * margins, -1)
    assert_close(new, expected, rtol=1e-12, atol=0)
    again = adaboost_step(margins, step.log_weight)
    assert float(again.alpha.abs().max()) < 1e-12


@pytest.mark.parametrize("size", [1.0, 2.5])
def test_the_closed_form_and_the_solver_agree(size):
    margins = size * torch.tensor([1.0, 1.0, -1.0, 1.0, -1.0], dtype=DOUBLE)
    log_weight = weights(5)
    closed = adaboost_step(margins, log_weight)
    solved = adaboost_step(torch.cat([margins, torch.zeros(1, dtype=DOUBLE)]), torch.cat([log_weight, weights(1)]))
    assert int(closed.steps) == 0
    assert_close(closed.alpha, solved.alpha, rtol=1e-10, atol=0)


def test_gradients_flow_to_the_weights():
    margins, log_weight = randn(8, dtype=DOUBLE), weights(8).requires_grad_()
    for own in (margins, margins.sign()):
        assert torch.autograd.gradcheck(lambda w, m=own: adaboost_step(m, w).alpha, (log_weight,), atol=1e-6)


@pytest.mark.parametrize(
    ("margins", "alpha", "fall"),
    [
        ([1.0, 1.0], math.inf, -math.inf),
        ([-1.0, -1.0], -math.inf, -math.inf),
        ([1.0, 2.0], math.inf, -math.inf),
        ([1.0, 0.0], math.inf, -math.log(2)),
        ([-3.0, -1.0], -math.inf, -math.inf),
    ],
)
def test_a_learner_without_errors_has_no_finite_step(margins, alpha, fall):
    step = adaboost_step(torch.tensor(margins, dtype=DOUBLE))
    assert float(step.alpha) == alpha
    assert not bool(step.converged)
    assert step.message.startswith("0 of 1 steps are finite")
    assert float(step.log_normalizer) == pytest.approx(fall)
    assert step.log_weight.exp().tolist() == pytest.approx([0.5, 0.5])


def test_a_learner_that_says_nothing_gets_no_vote():
    assert float(adaboost_step(torch.zeros(4, dtype=DOUBLE)).alpha) == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((torch.zeros(0),), "margins"),
        ((torch.ones(3).long(),), "margins"),
        ((torch.tensor([1.0, torch.inf]),), "finite"),
        ((torch.ones(3), torch.zeros(2)), "broadcast"),
        ((torch.ones(2), torch.full((2,), -torch.inf)), "finite entry"),
        ((torch.ones(2), torch.ones(2).long()), "log_weight"),
    ],
)
def test_a_mistake_is_told_in_one_sentence(arguments, sentence):
    with pytest.raises(UserError, match=sentence):
        adaboost_step(*arguments)
