"""Gradients and gaps of token selection: autograd where it can, many digits where it cannot."""

import math

import mpmath
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from massieu.checks import UserError
from massieu.margin import TokenSelection, log_gap, log_gradient, misalignment

LENGTHS = torch.tensor([6, 4, 6, 2, 5])


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mlp(states: Tensor) -> Tensor:
    return torch.relu(states @ normal(7, 9, seed=5)) @ normal(9, seed=6)


def targets(count: int) -> Tensor:
    mass = normal(5, 6, seed=7).exp() * (torch.arange(6) < count)
    return mass / mass.sum(-1, keepdim=True)


SIGNS = torch.tensor([1, -1, 1, 1, -1])
LOSSES = {
    "logistic": {"scores": normal(5, 6, seed=1)},
    "exponential": {"scores": normal(5, 6, seed=1), "loss": "exponential"},
    "linear": {"scores": normal(5, 6, seed=1), "loss": "linear"},
    "linear head": {"labels": SIGNS, "head": normal(7, seed=2)},
    "multi-class head": {"labels": torch.tensor([0, 1, 2, 0, 1]), "head": normal(3, 7, seed=3)},
    "mlp": {"labels": SIGNS, "head": mlp},
    "one target": {"targets": targets(1)},
    "two targets": {"targets": targets(2)},
}


@pytest.fixture(params=LOSSES)
def problem(request: pytest.FixtureRequest) -> TokenSelection:
    return TokenSelection(normal(5, 6, 7), normal(5, 3, seed=9), lengths=LENGTHS, **LOSSES[request.param])


@pytest.mark.parametrize("scale", [0.0, 0.3, 2.0])
def test_the_gradient_is_that_of_autograd(problem, scale):
    weights = (scale * normal(7, 3, seed=11)).requires_grad_()
    (expected,) = torch.autograd.grad(problem.objective(weights), weights)
    found = log_gradient(problem, weights.detach())
    assert_close(found.dense(), expected, rtol=1e-12, atol=1e-12 * float(expected.norm()))
    assert found.log_norm == pytest.approx(math.log(expected.norm()), abs=1e-12)


@pytest.mark.parametrize("scale", [0.0, 0.3, 2.0])
def test_the_gap_is_a_difference_of_losses(problem, scale):
    weights = scale * normal(7, 3, seed=11)
    if problem.targets is None:
        rest = problem.loss_of(problem.selected(weights))
    else:
        rest = float(torch.special.entr(problem.targets).sum(-1).mean())
    assert log_gap(problem, weights).value == pytest.approx(float(problem.objective(weights)) - rest, rel=1e-11)


def exact(problem: TokenSelection, weights: Tensor) -> tuple[mpmath.matrix, mpmath.mpf]:
    """Gradient and gap of the linear loss, or of the cross-entropy with one target, in pairs, which do not cancel."""
    count, length = problem.present.shape
    total, gap = mpmath.matrix(*problem.shape), mpmath.mpf(0)
    for i in range(count):
        tokens, query = mpmath.matrix(problem.tokens[i].tolist()), mpmath.matrix(problem.queries[i].tolist())
        logits = tokens * (mpmath.matrix(weights.tolist()) * query)
        powers = [mpmath.exp(logits[t]) for t in range(length)]
        s = [power / mpmath.fsum(powers) for power in powers]
        g = [mpmath.mpf(score) for score in problem.scores[i].tolist()]
        if problem.targets is None:
            slopes = [-mpmath.fsum(s[t] * s[u] * (g[t] - g[u]) for u in range(length)) for t in range(length)]
            top = max(range(length), key=lambda t: logits[t])
            gap += mpmath.fsum(s[t] * (g[top] - g[t]) for t in range(length)) / count
        else:
            rest = mpmath.fsum(s[t] for t in range(length) if g[t] == 0)
            slopes = [s[t] if g[t] == 0 else -rest for t in range(length)]
            gap -= mpmath.log1p(-rest) / count
        for t in range(length):
            total += slopes[t] / count * tokens[t, :].T * query.T
    return total, gap


@pytest.mark.parametrize("kind", ["scores", "targets", "ties"])
def test_the_direction_survives_where_autograd_gives_zero(kind):
    scores = torch.tensor([[1.0, 0.25, 0.5, 0.125], [0.25, 1.0, 0.5, 0.5], [0.5, 0.0, 1.0, 0.75]])
    if kind == "ties":
        scores = scores.round()
    given = {"targets": scores.floor()} if kind == "targets" else {"scores": scores, "loss": "linear"}
    problem = TokenSelection(normal(3, 4, 3, seed=1), normal(3, 3, seed=2), **given)
    weights = torch.zeros(3, 3, dtype=torch.float64)
    for _ in range(200):  # toward saturation at the best tokens
        gradient = log_gradient(problem, weights).matrix
        weights -= 0.1 * gradient / gradient.norm()
    weights = (3e4 / weights.norm() * weights).requires_grad_()
    (plain,) = torch.autograd.grad(problem.objective(weights), weights)
    weights = weights.detach()
    with mpmath.workdps(50):
        gradient, gap = exact(problem, weights)
    size = mpmath.norm(gradient)
    expected = torch.tensor([[float(gradient[i, j] / size) for j in range(3)] for i in range(3)], dtype=torch.float64)
    found = log_gradient(problem, weights)
    # Logits near 3e4 are rounded at 4e-12, and so are exponentials, relatively.
    assert_close(found.matrix / found.matrix.norm(), expected, rtol=1e-9, atol=1e-10)
    assert found.log_norm == pytest.approx(float(mpmath.log(size)), rel=1e-13)
    assert log_gap(problem, weights).log == pytest.approx(float(mpmath.log(gap)), rel=1e-13)
    assert found.log_norm < -800
    assert not plain.any()


def test_scores_that_are_tied_up_to_rounding_do_not_pull():
    tokens, queries = normal(1, 3, 3), normal(1, 3, seed=1)
    scores = torch.tensor([[1.0, 1.0, 0.0]], dtype=torch.float64)
    rounded = scores + torch.tensor([[0.0, -1e-16, 0.0]], dtype=torch.float64)
    weights = (
        1000 * TokenSelection(tokens, queries, scores=scores).differences(torch.tensor([2]))[0, :2].sum(0)[:, None]
    )
    weights = -weights * queries
    assert rounded[0, 1] < 1
    gradients = [log_gradient(TokenSelection(tokens, queries, scores=given), weights) for given in (scores, rounded)]
    assert gradients[0].log_scale == gradients[1].log_scale < -700
    assert_close(gradients[0].matrix, gradients[1].matrix)


def test_a_head_that_is_flat_has_no_direction():
    problem = TokenSelection(
        normal(2, 3, 4), normal(2, 4), labels=torch.ones(2), head=lambda x: 0 * torch.relu(x).sum(-1)
    )
    found = log_gradient(problem, normal(4, 4))
    assert not found.matrix.any()
    assert found.log_norm == -math.inf
    assert log_gap(problem, normal(4, 4)).sign == 0


def test_the_gap_to_a_better_selection_is_positive_and_to_a_worse_one_negative():
    problem = TokenSelection(normal(4, 5, 6), normal(4, 6), scores=normal(4, 5, seed=3))
    weights = normal(6, 6, seed=4)
    assert log_gap(problem, weights, problem.selection()).sign == 1
    assert log_gap(problem, weights, problem.scores.argmin(-1)).sign == -1


def test_misalignment_keeps_the_digits_that_a_cosine_loses():
    first = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    second = torch.tensor([[3.0, 3e-9]], dtype=torch.float64)
    assert misalignment(first, second) == pytest.approx(5e-19, rel=1e-6, abs=0.0)
    assert 1 - float(torch.cosine_similarity(first, second)) == 0.0
    assert math.isnan(misalignment(first, 0 * second))


def distant(loss: str, level: float) -> tuple[TokenSelection, Tensor]:
    scores = level * torch.tensor([[1.0, 0.25, 0.5], [0.5, 1.0, 0.125]], dtype=torch.float64)
    return TokenSelection(normal(2, 3, 4), normal(2, 4, seed=1), scores=scores, loss=loss), normal(4, 4, seed=2)


@pytest.mark.parametrize("level", [1e3, -3e3, 5.0])
@pytest.mark.parametrize("loss", ["logistic", "exponential"])
@pytest.mark.parametrize("scale", [1.0, 3.0, 300.0])
def test_derivatives_of_the_loss_beyond_the_range_of_numbers_are_those_of_many_digits(loss, level, scale):
    problem, weights = distant(loss, level)
    weights = scale * weights
    with mpmath.workdps(3000):
        total, gap = mpmath.matrix(4, 4), {"highest": mpmath.mpf(0), "last": mpmath.mpf(0)}
        for i in range(2):
            tokens, query = mpmath.matrix(problem.tokens[i].tolist()), mpmath.matrix(problem.queries[i].tolist())
            logits = tokens * (mpmath.matrix(weights.tolist()) * query)
            powers = [mpmath.exp(logits[t]) for t in range(3)]
            s = [power / mpmath.fsum(powers) for power in powers]
            g = [mpmath.mpf(score) for score in problem.scores[i].tolist()]
            score = mpmath.fsum(a * b for a, b in zip(s, g, strict=True))

            def value(at):
                return mpmath.log(1 + mpmath.exp(-at)) if loss == "logistic" else mpmath.exp(-at)

            slope = -mpmath.exp(-score) / (1 + mpmath.exp(-score) if loss == "logistic" else 1)
            for t in range(3):
                total += slope * s[t] * (g[t] - score) / 2 * tokens[t, :].T * query.T
            gap["highest"] += (value(score) - value(g[max(range(3), key=lambda t: logits[t])])) / 2
            gap["last"] += (value(score) - value(g[2])) / 2
        size = mpmath.norm(total)
        expected = torch.tensor([[float(total[a, b] / size) for b in range(4)] for a in range(4)], dtype=torch.float64)
        log_norm = float(mpmath.log(size))
        logs = {name: (int(mpmath.sign(one)), float(mpmath.log(abs(one)))) for name, one in gap.items()}
    found = log_gradient(problem, weights)
    assert found.log_norm == pytest.approx(log_norm, rel=1e-11, abs=1e-9)
    assert_close(found.matrix / found.matrix.norm(), expected, rtol=1e-7, atol=1e-8)
    for name, selection in {"highest": None, "last": torch.tensor([2, 2])}.items():
        there = log_gap(problem, weights, selection)
        assert there.sign == logs[name][0]
        assert there.log == pytest.approx(logs[name][1], rel=1e-11, abs=1e-9)


@pytest.mark.parametrize("scale", [1e-200, 1e200])
def test_misalignment_does_not_depend_on_the_scale(scale):
    expected = misalignment(torch.ones(2, 2), torch.eye(2))
    assert expected == pytest.approx(1 - math.sqrt(0.5))
    assert misalignment(scale * torch.ones(2, 2).double(), torch.eye(2)) == pytest.approx(expected, rel=1e-12)
    assert math.isnan(misalignment(torch.full((2, 2), torch.inf), torch.eye(2)))


def test_weights_of_another_precision_are_taken_and_of_another_shape_are_not():
    problem, weights = distant("logistic", 1.0)
    assert_close(log_gradient(problem, weights.float()).matrix, log_gradient(problem, weights.float().double()).matrix)
    assert log_gap(problem, weights.float()) == log_gap(problem, weights.float().double())
    for refused in (log_gradient, log_gap):
        with pytest.raises(UserError, match="weights"):
            refused(problem, weights[:3])
    with pytest.raises(UserError, match="matrices"):
        misalignment(weights[:3], weights)
