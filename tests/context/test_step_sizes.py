"""The best rates against scans, against simulation layer by layer, and against the exact first step."""

import math

import pytest
import torch

from massieu.checks import UserError
from massieu.context import gradient_descent_transformer
from massieu.context.context_descent import predict
from massieu.context.optimum import isotropic_optimum
from massieu.context.step_sizes import descent_loss, moment_eigenvalues, optimal_step_sizes


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def best(layers, schedule="shared", dim=4, examples=8, **options):
    return optimal_step_sizes(
        dim, examples=examples, layers=layers, schedule=schedule, samples=1000, generator=seeded(), **options
    )


def simulated(found, dim, examples, noise=0.0, tasks=20_000, curvature=None):
    """Squared errors of the constructed transformer on fresh tasks: their mean and its standard error."""
    generator = seeded(9)
    inputs = torch.randn(tasks, examples, dim, generator=generator, dtype=torch.float64)
    weights = torch.randn(tasks, dim, 1, generator=generator, dtype=torch.float64)
    query = torch.randn(tasks, 1, dim, generator=generator, dtype=torch.float64)
    targets = inputs @ weights + noise * torch.randn(tasks, examples, 1, generator=generator, dtype=torch.float64)
    model = gradient_descent_transformer(
        dim,
        step=found.step_sizes,
        layers=len(found.step_sizes),
        examples=examples,
        curvature=found.curvature if curvature is None else curvature,
    )
    with torch.no_grad():
        errors = (predict(model, inputs, targets, query) - query @ weights).square().flatten()
    return float(errors.mean()), float(errors.std()) / math.sqrt(tasks)


@pytest.mark.parametrize("noise", [0.0, 1.0])
@pytest.mark.parametrize("schedule", ["shared", "per_layer", "curvature"])
def test_the_loss_is_that_of_the_constructed_transformer(schedule, noise):
    found = best(3, schedule, noise=noise)
    assert found.converged
    assert found.message.startswith(f"converged after {found.steps} evaluations")
    mean, error = simulated(found, 4, 8, noise)
    assert abs(mean - found.loss) < 4 * math.hypot(error, found.standard_error)
    if schedule == "curvature":  # the control
        assert abs(simulated(found, 4, 8, noise, curvature=0.0)[0] - found.loss) > 10 * error


@pytest.mark.parametrize("schedule", ["shared", "per_layer", "curvature"])
@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_one_step_has_the_closed_form(schedule, noise):
    found, exact = best(1, schedule, noise=noise), isotropic_optimum(4, examples=8, noise=noise)
    assert found.step_sizes[0] == pytest.approx(exact.step, rel=0.03)
    assert abs(found.loss - exact.loss) < 4 * found.standard_error


def test_a_shared_rate_is_the_best_of_a_scan():
    found = best(3)
    values = moment_eigenvalues(4, examples=8, samples=1000, generator=seeded())
    scan = torch.linspace(0.1, 1.2, 1101).double()
    losses = torch.stack([descent_loss(values, step.expand(3)).mean() for step in scan])
    assert found.step_sizes == pytest.approx([float(scan[losses.argmin()])] * 3, abs=1e-3)
    assert found.loss <= float(losses.min())


def test_rates_of_each_layer_are_the_roots_of_the_best_polynomial():
    """Least squares over polynomials that are one at zero, which knows nothing of rates."""
    found = best(4, "per_layer")
    values = moment_eigenvalues(4, examples=8, samples=1000, generator=seeded()).flatten()
    powers = torch.stack([values**k for k in range(1, 5)], -1)
    solution = torch.linalg.lstsq(powers, -torch.ones_like(values)[:, None])
    least = float((1 + powers @ solution.solution).square().mean()) * 4
    assert found.loss == pytest.approx(least, rel=1e-9)
    residuals = sum(float(found.step_sizes[k]) for k in range(4))  # minus the first coefficient, by Vieta
    assert residuals == pytest.approx(-float(solution.solution[0]), rel=1e-6)


def test_curvature_is_the_best_of_a_scan_in_the_plane():
    found = best(2, "curvature")
    values = moment_eigenvalues(4, examples=8, samples=1000, generator=seeded())
    step, curvature = torch.meshgrid(torch.linspace(0.2, 3, 57), torch.linspace(-0.2, 0.5, 57), indexing="ij")
    scan = [
        float(descent_loss(values, torch.tensor([s, s]).double(), c).mean())
        for s, c in zip(step.flatten().tolist(), curvature.flatten().tolist(), strict=True)
    ]
    assert found.loss <= min(scan) <= 1.02 * found.loss


def test_depth_and_freedom_help_in_the_order_of_the_table():
    shared, free, curved = (
        [best(k, schedule).loss for k in (1, 2, 3)] for schedule in ("shared", "per_layer", "curvature")
    )
    assert shared[0] == pytest.approx(free[0]) == pytest.approx(curved[0])
    for losses in (shared, free, curved):
        assert losses == sorted(losses, reverse=True)
    assert all(c < f < s for s, f, c in zip(shared[1:], free[1:], curved[1:], strict=True))


def test_the_table_of_the_notes_comes_out():
    # Other samples than those of the notes: within five standard errors of either.
    for schedule, losses in {
        "shared": (2.117, 1.473),
        "per_layer": (1.698, 0.924),
        "curvature": (0.920, 0.293),
    }.items():
        for layers, loss in zip((2, 3), losses, strict=True):
            found = optimal_step_sizes(10, examples=20, layers=layers, schedule=schedule, generator=seeded())
            assert abs(found.loss - loss) < 5 * found.standard_error


def test_few_examples_leave_directions_that_no_step_reaches():
    values = moment_eigenvalues(5, examples=2, samples=10, generator=seeded())
    assert (values[:, 2:] == 0).all()
    found = optimal_step_sizes(5, examples=2, layers=30, noise=0.1, samples=200, generator=seeded())
    assert 3 < found.loss < 5
    assert math.isfinite(found.standard_error)


def test_the_same_generator_gives_the_same_rates():
    assert best(2, "curvature") == best(2, "curvature")


BAD = {"dim": 0, "examples": 0, "layers": 0, "samples": 0, "noise": -1.0, "schedule": "free"}


@pytest.mark.parametrize(("name", "value"), BAD.items())
def test_step_sizes_of_nothing_are_refused(name, value):
    with pytest.raises(UserError, match=name):
        optimal_step_sizes(**{"dim": 3, "examples": 5, "layers": 2, name: value})
