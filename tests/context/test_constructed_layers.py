"""Layers whose weights are set against gradient descent written out, and against autograd."""

import pytest
import torch

from massieu.checks import UserError
from massieu.context import gradient_descent_transformer, gradient_step_layer, softmax_step_layer
from massieu.context.context_descent import descent_gaps, gradient_descent, predict, regression_tokens, token_states
from massieu.nn import LinearAttention, MeasureAttention, Transformer

D, O, N = 5, 3, 12  # sizes of input and output, number of examples

# Rounding of a hundred layers in float64; measured 1e-14.
EXACT = 1e-12


@pytest.fixture
def problem():
    generator = torch.Generator().manual_seed(3)
    shapes = ((4, N, D), (4, N, O), (4, 2, D), (O, D))
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]


def loss(weights, inputs, targets):
    """As the source writes it, summed over a batch of independent problems."""
    return (torch.einsum("boi,bni->bno", weights, inputs) - targets).square().sum() / (2 * inputs.shape[1])


def descend(inputs, targets, weights, step, steps):
    """Gradient descent by autograd."""
    for _ in range(steps):
        weights = weights.detach().requires_grad_()
        weights = weights - step * torch.autograd.grad(loss(weights, inputs, targets), weights)[0]
    return weights.detach()


@pytest.mark.parametrize("examples", [N, None])
@pytest.mark.parametrize("from_zero", [True, False])
def test_a_hundred_layers_are_a_hundred_steps_for_every_token(problem, examples, from_zero):
    inputs, targets, query, start = problem
    start = None if from_zero else start
    model = gradient_descent_transformer(D, O, step=0.3, layers=100, examples=examples, start=start)
    gaps = descent_gaps(model, inputs, targets, query, step=0.3, start=start)
    assert gaps.shape == (100,)
    assert gaps.max() <= EXACT
    assert descent_gaps(model, inputs, targets, query, step=0.31, start=start).min() > 1e-3  # the control


def test_the_iterates_are_those_of_autograd(problem):
    inputs, targets, _, start = problem
    found = gradient_descent(inputs, targets, step=0.3, steps=7, start=start)
    assert found.shape == (8, 4, O, D)
    expected = descend(inputs, targets, start.expand(4, O, D), 0.3, 7)
    torch.testing.assert_close(found[-1], expected, rtol=0, atol=EXACT)


def test_predictions_are_those_of_descent_by_autograd(problem):
    inputs, targets, query, start = problem
    model = gradient_descent_transformer(D, O, step=0.2, layers=9, examples=N, start=start)
    weights = descend(inputs, targets, start.expand(4, O, D), 0.2, 9)
    expected = torch.einsum("boi,bqi->bqo", weights, query)
    found = predict(model, inputs, targets, query, start)
    torch.testing.assert_close(found, expected, rtol=0, atol=EXACT)
    assert (found + expected).abs().max() > 1  # the sign matters


def test_with_the_query_among_the_keys_one_layer_from_zero_is_the_same_and_two_are_not(problem):
    inputs, targets, query, _ = problem
    model = gradient_descent_transformer(D, O, step=0.3, layers=5, examples=N)
    gaps = descent_gaps(model, inputs, targets, query, step=0.3, query_is_key=True)
    assert gaps[0] <= EXACT
    assert gaps[1:].min() > 1e-2


def test_with_the_query_among_the_keys_the_first_layer_from_elsewhere_is_wrong_already(problem):
    inputs, targets, query, start = problem
    model = gradient_descent_transformer(D, O, step=0.3, layers=1, examples=N, start=start)
    assert descent_gaps(model, inputs, targets, query, step=0.3, start=start, query_is_key=True).item() > 1e-1


def test_each_layer_may_have_its_own_step_and_their_order_does_not_matter_in_the_end(problem):
    inputs, targets, query, start = problem
    steps = [0.1, 0.4, 0.2]
    model = gradient_descent_transformer(D, O, step=steps, layers=3, examples=N, start=start)
    assert descent_gaps(model, inputs, targets, query, step=steps, start=start).max() <= EXACT
    backwards = descent_gaps(model, inputs, targets, query, step=steps[::-1], start=start)
    assert backwards[:2].min() > 1e-2  # the control
    assert backwards[2] <= EXACT


def test_a_preconditioner_multiplies_the_slope_from_the_right(problem):
    inputs, targets, query, start = problem
    matrix = torch.randn(D, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64) / 4
    model = gradient_descent_transformer(D, O, step=0.3, layers=3, examples=N, start=start, preconditioner=matrix)
    options = {"step": 0.3, "start": start}
    assert descent_gaps(model, inputs, targets, query, preconditioner=matrix, **options).max() <= EXACT
    assert descent_gaps(model, inputs, targets, query, preconditioner=matrix.T, **options).min() > 1e-2
    first = gradient_descent(inputs, targets, steps=1, preconditioner=matrix, **options)[1]
    slope = (start - descend(inputs, targets, start.expand(4, O, D), 0.3, 1)) / 0.3
    torch.testing.assert_close(first, start - 0.3 * slope @ matrix, rtol=0, atol=EXACT)


@pytest.mark.parametrize("examples", [N, None])
def test_curvature_moves_inputs_and_targets_as_written_out(problem, examples):
    inputs, targets, query, _ = problem
    model = gradient_descent_transformer(D, O, step=0.4, layers=3, examples=examples, curvature=0.1)
    tokens = regression_tokens(inputs, targets, query)
    found = token_states(model, tokens, N)[-1]
    for batch in range(4):
        points, values = tokens[batch, :, :D], tokens[batch, :, D:]
        for _ in range(3):
            moment = sum(torch.outer(x, x) for x in points[:N]) / N
            product = sum(torch.outer(y, x) for x, y in zip(points[:N], values[:N], strict=True)) / N
            points, values = points - 0.1 * points @ moment, values - 0.4 * points @ product.T
        torch.testing.assert_close(found[batch], torch.cat([points, values], -1), rtol=0, atol=EXACT)
    assert (found[..., :D] - tokens[..., :D]).abs().max() > 1e-2


def test_constructions_are_layers_of_the_package_and_can_be_trained_on(problem):
    inputs, targets, query, _ = problem
    assert isinstance(gradient_step_layer(D, step=0.3), LinearAttention)
    assert isinstance(softmax_step_layer(D, step=0.3, beta=0.1), MeasureAttention)
    model = gradient_descent_transformer(D, O, step=0.3, layers=2)
    assert isinstance(model, Transformer)
    predict(model, inputs, targets, query).square().sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())


def test_a_layer_in_float_is_a_step_to_float_precision(problem):
    inputs, targets, query, start = (each.float() for each in problem)
    model = gradient_descent_transformer(D, O, step=0.3, layers=3, examples=N, start=start, dtype=torch.float32)
    assert descent_gaps(model, inputs, targets, query, step=0.3, start=start).max() < 1e-5


def centered_step(inputs, targets, query, start, step):
    """A step on the centered examples by autograd; what it adds to the prediction."""
    inputs, targets = (each - each.mean(1, keepdim=True) for each in (inputs, targets))
    weights = start.expand(len(inputs), *start.shape)
    return torch.einsum("boi,bqi->bqo", descend(inputs, targets, weights, step, 1) - weights, query)


def test_two_softmax_heads_are_a_step_on_centered_examples_up_to_the_square_of_beta(problem):
    inputs, targets, query, start = problem
    expected = centered_step(inputs, targets, query, start, 0.5)
    tokens = regression_tokens(inputs, targets, query, start)

    def gap(beta):
        layer = softmax_step_layer(D, O, step=0.5, beta=beta, start=start)
        change = layer(tokens, lengths=N).detach()
        assert change[..., :D].abs().max() == 0
        return float((change[:, N:, D:] + expected).abs().max())

    # A central difference: twice the temperature, a quarter of the error; a single head would give a half.
    assert gap(0.01) / gap(0.005) == pytest.approx(4, rel=0.02)
    assert gap(1e-4) < 1e-6 < 1e-2 < gap(0.3)


BAD = [("input_dim", 0), ("output_dim", -1), ("examples", 0), ("step", float("nan")), ("step", "fast")]
BAD += [("curvature", float("inf")), ("start", torch.zeros(D, O)), ("preconditioner", torch.zeros(D))]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_a_layer_that_cannot_be_built_is_refused(name, value):
    with pytest.raises(UserError, match=name):
        gradient_step_layer(**{"input_dim": D, "output_dim": O, "step": 0.3, name: value})


def test_moving_inputs_need_a_start_at_zero():
    with pytest.raises(UserError, match="curvature"):
        gradient_step_layer(D, O, step=0.3, start=torch.zeros(O, D), curvature=0.1)


@pytest.mark.parametrize("beta", [0.0, -1.0, float("nan")])
def test_a_temperature_that_is_not_positive_is_refused(beta):
    with pytest.raises(UserError, match="beta"):
        softmax_step_layer(D, step=0.3, beta=beta)


def test_steps_that_do_not_fit_the_layers_are_refused():
    with pytest.raises(UserError, match="step"):
        gradient_descent_transformer(D, step=[0.1, 0.2], layers=3)
    with pytest.raises(UserError, match="layers"):
        gradient_descent_transformer(D, step=0.1, layers=0)


def test_tokens_of_shapes_that_do_not_fit_are_refused(problem):
    inputs, targets, query, start = problem
    with pytest.raises(UserError, match="inputs, targets and query"):
        regression_tokens(inputs, targets[..., 0], query)
    with pytest.raises(UserError, match="inputs, targets and query"):
        regression_tokens(inputs, targets, query[..., :2])
    with pytest.raises(UserError, match="start"):
        regression_tokens(inputs, targets, query, start.T)
    with pytest.raises(UserError, match="targets"):
        regression_tokens(inputs, targets.long(), query)
    with pytest.raises(UserError, match="steps"):
        gradient_descent(inputs, targets, step=0.1, steps=-1)
