"""The closed-form optimum against Monte Carlo, exact quadrature and least squares on samples."""

import itertools
import math

import pytest
import torch

from massieu.checks import UserError
from massieu.context import gradient_step_layer, optimal_linear_attention
from massieu.context.context_descent import regression_tokens
from massieu.context.optimum import gaussian_moment, independent_moment, isotropic_optimum, sampled_moment
from massieu.nn import LinearAttention

# (seed, dim, examples, noise): five settings with random covariance and prior
SETTINGS = [(0, 2, 3, 0.0), (1, 3, 10, 0.5), (2, 4, 6, 1.0), (3, 5, 20, 0.3), (4, 6, 4, 2.0)]


def covariances(seed, dim, count=2):
    generator = torch.Generator().manual_seed(seed)
    roots = torch.randn(count, dim, dim, generator=generator, dtype=torch.float64)
    return roots @ roots.mT / dim + 0.1 * torch.eye(dim).double()


def drawn(seed, sigma, psi, noise, examples, tasks):
    """Inputs, noisy targets, queries and clean answers of many tasks."""
    generator = torch.Generator().manual_seed(seed + 100)
    root, prior = torch.linalg.cholesky(sigma), torch.linalg.cholesky(psi)
    dim = len(sigma)
    inputs = torch.randn(tasks, examples + 1, dim, generator=generator, dtype=torch.float64) @ root.mT
    weights = torch.randn(tasks, dim, 1, generator=generator, dtype=torch.float64)
    clean = inputs @ (prior @ weights)
    targets = clean + noise * torch.randn(clean.shape, generator=generator, dtype=torch.float64)
    return inputs[:, :-1], targets[:, :-1], inputs[:, -1:], clean[:, -1, 0]


def squared_errors(matrix, inputs, targets, query, answer):
    field = (targets * inputs).mean(1)
    return (torch.einsum("ti,ij,tj->t", field, matrix, query[:, 0]) - answer).square()


@pytest.mark.parametrize(("seed", "dim", "examples", "noise"), SETTINGS)
def test_the_loss_is_that_of_simulated_tasks_within_three_standard_errors(seed, dim, examples, noise):
    sigma, psi = covariances(seed, dim)
    found = optimal_linear_attention(sigma, psi, noise=noise, examples=examples)
    tasks = drawn(seed, sigma, psi, noise, examples, 400_000)
    other = found.matrix + 0.3 * torch.eye(dim)
    for matrix, loss in ((found.matrix, found.loss), (other, float(found.loss_of(other)))):
        errors = squared_errors(matrix, *tasks)
        assert abs(float(errors.mean()) - loss) < 3 * float(errors.std()) / math.sqrt(len(errors))
    # The control: without the noise and the fourth moments the loss is far away.
    naive = optimal_linear_attention(sigma, psi, examples=examples, fourth_moment=lambda psi: sigma @ psi @ sigma)
    errors = squared_errors(found.matrix, *tasks)
    far = abs(float(errors.mean()) - float(naive.loss_of(found.matrix)))
    assert far > 10 * float(errors.std()) / math.sqrt(len(errors))


def test_the_optimum_is_that_of_exact_quadrature():
    """Three Gauss-Hermite nodes per coordinate are exact for the fourth moments of N inputs of two coordinates."""
    (sigma, psi), noise, examples = covariances(7, 2), 0.4, 3
    nodes, weights = torch.tensor([[-math.sqrt(3), 0.0, math.sqrt(3)], [1 / 6, 2 / 3, 1 / 6]], dtype=torch.float64)
    grid = torch.tensor(list(itertools.product(range(3), repeat=2 * examples)))
    inputs = nodes[grid].unflatten(-1, (examples, 2)) @ torch.linalg.cholesky(sigma).mT
    mass = weights[grid].prod(-1)
    moment = inputs.mT @ inputs / examples
    # E over tasks and noise of z z^T in each context, with z = moment w + mean of noise times input.
    second = torch.einsum("n,nij->ij", mass, moment @ psi @ moment + noise**2 / examples * moment)
    found = optimal_linear_attention(sigma, psi, noise=noise, examples=examples)
    exact = 1e-12
    torch.testing.assert_close(found.second_moment, second, rtol=exact, atol=exact)
    expected = torch.linalg.solve(second, sigma @ psi)
    torch.testing.assert_close(found.matrix, expected, rtol=exact, atol=exact)


@pytest.mark.parametrize(("seed", "dim", "examples", "noise"), SETTINGS)
def test_no_other_matrix_has_a_smaller_loss(seed, dim, examples, noise):
    sigma, psi = covariances(seed, dim)
    found = optimal_linear_attention(sigma, psi, noise=noise, examples=examples)
    matrix = found.matrix.clone().requires_grad_()
    (slope,) = torch.autograd.grad(found.loss_of(matrix), matrix)
    assert slope.abs().max() < 1e-10
    around = found.matrix + 0.1 * torch.randn(200, dim, dim, generator=torch.Generator().manual_seed(seed)).double()
    assert found.loss_of(around).shape == (200,)
    assert (found.loss_of(around) > found.loss).all()
    steps = torch.linspace(-1, 3, 4001).double()
    scan = found.loss_of(steps[:, None, None] * torch.eye(dim).double())
    if 0 < found.step < 3:
        assert found.step == pytest.approx(float(steps[scan.argmin()]), abs=1e-3)
    assert found.loss < found.step_loss <= float(scan.min()) + 1e-12


def test_the_closed_form_of_gaussian_inputs_is_the_one_of_the_notes():
    (sigma, psi), noise, n = covariances(5, 4), 0.7, 9
    middle = (n + 1) / n * psi @ sigma + ((psi @ sigma).trace() + noise**2) / n * torch.eye(4).double()
    found = optimal_linear_attention(sigma, psi, noise=noise, examples=n)
    torch.testing.assert_close(found.matrix, torch.linalg.solve(middle, psi), rtol=1e-10, atol=1e-12)


def test_figures_of_the_notes_come_out():
    spectrum = torch.diag(torch.tensor([1.0, 1.0, 0.25, 2.25, 1.0])).double()
    plain = optimal_linear_attention(spectrum, examples=20)
    assert plain.loss == pytest.approx(1.200139, abs=1e-6)
    values = torch.linalg.eigvalsh(plain.matrix)
    torch.testing.assert_close(
        values[[0, 1, -1]], torch.tensor([0.379147, 0.754717, 1.860465]).double(), rtol=0, atol=1e-6
    )
    whitened = optimal_linear_attention(spectrum, torch.linalg.inv(spectrum), examples=20)
    assert whitened.loss == pytest.approx(1.153846, abs=1e-6)
    torch.testing.assert_close(whitened.matrix, 20 / 26 * torch.linalg.inv(spectrum))
    for width, step, half in ((0.5, 6.0606, 0.206229), (1.0, 1.51515, 0.824916)):
        variance, fourth = torch.full((10,), width**2 / 3).double(), torch.full((10,), width**4 / 5).double()
        found = optimal_linear_attention(
            torch.diag(variance), examples=10, fourth_moment=independent_moment(variance, fourth)
        )
        assert found.step == pytest.approx(step, rel=1e-4)
        assert found.loss / 2 == pytest.approx(half, rel=1e-5)


@pytest.mark.parametrize("options", [{}, {"noise": 0.5}, {"noise": 0.5, "variance": 2.0, "prior": 0.3}])
def test_the_isotropic_shortcut_is_the_general_optimum(options):
    eye = torch.eye(10).double()
    short = isotropic_optimum(10, examples=20, **options)
    sigma, psi = options.get("variance", 1.0) * eye, options.get("prior", 1.0) * eye
    found = optimal_linear_attention(sigma, psi, noise=options.get("noise", 0.0), examples=20)
    assert (found.step, found.loss) == pytest.approx(tuple(short))
    torch.testing.assert_close(found.matrix, short.step * eye)
    assert found.step_loss == pytest.approx(found.loss)


def test_only_isotropic_tasks_are_solved_by_a_plain_step():
    skew = optimal_linear_attention(torch.diag(torch.tensor([4.0, 1.0, 0.25])).double(), examples=20)
    assert skew.step_loss > 1.3 * skew.loss


def test_fourth_moments_of_three_kinds_agree_where_they_must():
    generator = torch.Generator().manual_seed(0)
    psi = covariances(3, 3, 1)[0]
    signs = torch.tensor(list(itertools.product([-1.0, 1.0], repeat=3))).double() * torch.tensor([1.0, 2.0, 0.5])
    variance = signs.square().mean(0)
    expected = torch.stack([torch.outer(x, x) @ psi @ torch.outer(x, x) for x in signs]).mean(0)
    torch.testing.assert_close(sampled_moment(signs)(psi), expected)
    torch.testing.assert_close(independent_moment(variance, variance.square())(psi), expected)
    assert not torch.allclose(gaussian_moment(torch.diag(variance))(psi), expected, rtol=0.1)
    normal = torch.randn(400_000, 3, generator=generator, dtype=torch.float64) * variance.sqrt()
    expected = independent_moment(variance, 3 * variance.square())(psi)
    torch.testing.assert_close(gaussian_moment(torch.diag(variance))(psi), expected)
    torch.testing.assert_close(sampled_moment(normal)(psi), expected, rtol=0.05, atol=0.05)


def test_inputs_that_are_not_gaussian_have_another_optimum_which_simulation_confirms():
    generator = torch.Generator().manual_seed(5)
    dim, n, tasks = 3, 6, 100_000
    inputs = torch.rand(tasks, n + 1, dim, generator=generator, dtype=torch.float64) - 0.5
    clean = inputs @ torch.randn(tasks, dim, 1, generator=generator, dtype=torch.float64)
    targets = clean + 0.2 * torch.randn(clean.shape, generator=generator, dtype=torch.float64)
    variance = torch.full((dim,), 1 / 12).double()
    moment = independent_moment(variance, torch.full((dim,), 1 / 80).double())
    found = optimal_linear_attention(torch.diag(variance), noise=0.2, examples=n, fourth_moment=moment)
    errors = squared_errors(found.matrix, inputs[:, :-1], targets[:, :-1], inputs[:, -1:], clean[:, -1, 0])
    error = float(errors.std()) / math.sqrt(tasks)
    assert abs(float(errors.mean()) - found.loss) < 3 * error
    gaussian = optimal_linear_attention(torch.diag(variance), noise=0.2, examples=n)
    assert abs(float(errors.mean()) - float(gaussian.loss_of(found.matrix))) > 3 * error


def test_the_layer_computes_the_predictor():
    (sigma, psi), n = covariances(2, 4), 7
    found = optimal_linear_attention(sigma, psi, noise=0.3, examples=n)
    inputs, targets, query, _ = drawn(0, sigma, psi, 0.3, n, 5)
    layer = found.layer()
    assert isinstance(layer, LinearAttention)
    read = -layer(regression_tokens(inputs, targets, query), lengths=n)[:, -1, -1]
    expected = sum(targets[:, i] * (inputs[:, i] @ found.matrix * query[:, 0]).sum(-1, keepdim=True) for i in range(n))
    torch.testing.assert_close(read, expected[:, 0] / n)
    plain = gradient_step_layer(4, step=found.step, examples=n)
    assert not torch.allclose(-plain(regression_tokens(inputs, targets, query), lengths=n)[:, -1, -1], read)


def test_a_prior_without_some_directions_gives_the_smallest_matrix():
    prior = torch.diag(torch.tensor([1.0, 0.0])).double()
    found = optimal_linear_attention(torch.eye(2).double(), prior, examples=4)
    assert found.matrix[1].abs().max() == 0
    assert found.matrix[0, 0] == pytest.approx(4 / (4 + 1 + 1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"covariance": torch.ones(3)}, "covariance"),
        ({"covariance": torch.zeros(0, 0)}, "dim"),
        ({"covariance": -torch.eye(3)}, "covariance must be symmetric and positive semidefinite"),
        ({"covariance": torch.ones(3, 3)}, "singular"),
        ({"prior": torch.eye(2)}, "prior"),
        ({"prior": torch.eye(3).cumsum(0)}, "prior must be symmetric"),
        ({"noise": -0.1}, "noise"),
        ({"noise": float("nan")}, "noise"),
        ({"examples": 0}, "examples"),
        ({"fourth_moment": lambda psi: psi[0]}, "fourth_moment"),
    ],
)
def test_a_problem_without_an_optimum_says_why(options, message):
    with pytest.raises(UserError, match=message):
        optimal_linear_attention(**{"covariance": torch.eye(3), "examples": 5, **options})


def test_other_bad_input_gets_a_sentence():
    with pytest.raises(UserError, match="covariance"):
        optimal_linear_attention([[1.0]], examples=5)
    with pytest.raises(UserError, match="variance"):
        isotropic_optimum(3, examples=5, variance=0)
    with pytest.raises(UserError, match="dim"):
        isotropic_optimum(0, examples=5)
    with pytest.raises(UserError, match="fourth must have shape"):
        independent_moment(torch.ones(2), torch.ones(3))
    with pytest.raises(UserError, match="fourth"):
        independent_moment(torch.ones(2), 0.5 * torch.ones(2))
    with pytest.raises(UserError, match="inputs"):
        sampled_moment(torch.ones(2))
