"""Best sizes of several steps of gradient descent in a context, from the eigenvalues of its second moments."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from massieu.checks import check_choice, check_count, check_number

__all__ = ["Schedule", "StepSizes", "descent_loss", "moment_eigenvalues", "optimal_step_sizes"]

Schedule = Literal["shared", "per_layer", "curvature"]


@dataclass(frozen=True)
class StepSizes:
    """Best step sizes, and the outcome of the search for them.

    Attributes:
        step_sizes: one for each layer.
        curvature: of GD++, otherwise zero.
        loss: expected squared error against the target without noise, over the sampled contexts.
        standard_error: of ``loss`` as an estimate for all contexts.
        converged: the slope of the loss is below a millionth of the loss.
        residual: that slope, the largest absolute derivative.
        steps: evaluations of loss and slope.
    """

    step_sizes: tuple[float, ...]
    curvature: float
    loss: float
    standard_error: float
    converged: bool
    residual: float
    steps: int

    @property
    def message(self) -> str:
        """The outcome, in a sentence."""
        outcome = "converged" if self.converged else "stopped before it converged"
        return f"{outcome} after {self.steps} evaluations, with a slope of {self.residual:.2g} at loss {self.loss:.4g}"


def optimal_step_sizes(
    dim: int,
    *,
    examples: int,
    layers: int,
    schedule: Schedule = "shared",
    noise: float = 0.0,
    samples: int = 4000,
    generator: torch.Generator | None = None,
) -> StepSizes:
    r"""Search the sizes of ``layers`` steps from zero that are best on average, for standard normal inputs and tasks.

    ``"shared"``
        One size for all steps.
    ``"per_layer"``
        A size for each. Without noise they are the inverses of the Gauss nodes of the measure
        :math:`\lambda \, d\mu(\lambda)`, with :math:`\mu` the law of the eigenvalues: the roots of the polynomial with
        value one at zero and the least square integral.
    ``"curvature"``
        GD++ with a step size and a curvature for all layers.

    Args:
        dim: size of an input.
        examples: number of examples in a context.
        layers: number of steps.
        schedule: see above.
        noise: standard deviation of the noise in the targets of the examples.
        samples: number of contexts whose eigenvalues are drawn.
        generator: draws them.

    Source:
        von Oswald et al. 2022, who scan or train these sizes.

    Example:
        >>> found = optimal_step_sizes(2, examples=20, layers=2, schedule="per_layer", samples=500)
        >>> found.converged, len(found.step_sizes)
        (True, 2)
    """
    check_choice(schedule, "schedule", get_args(Schedule))
    check_count(layers, "layers")
    check_number(noise, "noise", least=0)
    values = moment_eigenvalues(dim, examples=examples, samples=samples, generator=generator)
    ratio = noise**2 / examples
    first = dim / float(values.square().sum(-1).mean() + ratio * values.sum(-1).mean())
    if schedule == "per_layer":
        start = torch.cat([1 / _gauss_nodes(values.flatten(), layers), values.new_zeros(1)])
        return _search(values, ratio, start, layers, schedule)
    found = _search(values, ratio, values.new_tensor([first, 0.0]), 1, schedule)
    for depth in range(2, layers + 1):  # each depth starts at the solution of the one before
        found = _search(values, ratio, values.new_tensor([found.step_sizes[0], found.curvature]), depth, schedule)
    return found


def moment_eigenvalues(dim: int, *, examples: int, samples: int, generator: torch.Generator | None = None) -> Tensor:
    r"""Draw eigenvalues of :math:`\frac1N \sum_i x_i x_i^\top` for standard normal inputs, ``(samples, dim)``, double.

    Example:
        >>> moment_eigenvalues(3, examples=2, samples=5).shape
        torch.Size([5, 3])
    """
    for value, name in ((dim, "dim"), (examples, "examples"), (samples, "samples")):
        check_count(value, name)
    inputs = torch.randn(samples, examples, dim, generator=generator, dtype=torch.float64)
    # Singular values: a context with fewer examples than dimensions has eigenvalues that are exactly zero.
    values = torch.linalg.svdvals(inputs).square() / examples
    return torch.nn.functional.pad(values, (0, dim - values.shape[-1]))


def descent_loss(
    eigenvalues: Tensor, steps: Tensor, curvature: Tensor | float = 0.0, *, noise_ratio: float = 0.0
) -> Tensor:
    r"""Return the expected squared error of descent from zero in each context.

    Along an eigenvector the residual is multiplied by :math:`1 - \eta_k \lambda_k` in each layer, and GD++ takes
    :math:`\lambda_{k+1} = \lambda_k (1 - \gamma \lambda_k)^2`. With their product :math:`p`,

    .. math:: \mathrm{loss} = \sum_\lambda p(\lambda)^2 + \frac{\sigma^2}{N} \frac{(1 - p(\lambda))^2}{\lambda}

    Args:
        eigenvalues: shape ``(..., dim)``.
        steps: shape ``(layers,)``.
        curvature: :math:`\gamma`.
        noise_ratio: :math:`\sigma^2 / N`.

    Returns:
        Losses, shape ``(...)``.

    Example:
        >>> descent_loss(torch.tensor([0.5, 1.0]), torch.tensor([1.0, 1.0]))
        tensor(0.0625)
    """
    value, product = eigenvalues, torch.ones_like(eigenvalues)
    for step in steps:
        product = product * (1 - step * value)
        value = value * (1 - curvature * value).square()
    loss = product.square()
    if noise_ratio:
        loss = loss + noise_ratio * (1 - product).square() / eigenvalues.clamp(min=1e-12)
    return loss.sum(-1)


def _search(values: Tensor, ratio: float, start: Tensor, layers: int, schedule: Schedule) -> StepSizes:
    """Minimize the loss by quasi-Newton steps in double, from the step sizes and then the curvature in ``start``."""
    sizes = start[:-1].clone().requires_grad_()
    curvature = start[-1].clone().requires_grad_(schedule == "curvature")
    free = [sizes, curvature] if curvature.requires_grad else [sizes]
    evaluations = 0

    def losses() -> Tensor:
        return descent_loss(values, sizes.expand(layers), curvature, noise_ratio=ratio)

    def evaluate() -> Tensor:
        nonlocal evaluations
        evaluations += 1
        for parameter in free:
            parameter.grad = None
        loss = losses().mean()
        loss.backward()
        return loss

    with torch.enable_grad():  # also inside of torch.no_grad
        torch.optim.LBFGS(
            free, max_iter=200, tolerance_grad=1e-9, tolerance_change=0.0, line_search_fn="strong_wolfe"
        ).step(evaluate)
        loss = float(evaluate().detach())
    residual = max(float(parameter.grad.abs().max()) for parameter in free if parameter.grad is not None)
    with torch.no_grad():
        spread = float(losses().std()) / math.sqrt(len(values)) if len(values) > 1 else math.inf
    found, converged = tuple(sizes.detach().expand(layers).tolist()), residual <= 1e-6 * max(loss, 1e-6)
    return StepSizes(found, float(curvature.detach()), loss, spread, converged, residual, evaluations)


def _gauss_nodes(values: Tensor, count: int) -> Tensor:
    """Return the nodes of the Gauss rule for values weighted by themselves, from their Jacobi matrix."""
    weight = values / values.sum()
    basis = [weight.sqrt()]  # orthonormal polynomials times the root of the weight
    diagonal, beside = [], []
    for _ in range(count):
        diagonal.append((values * basis[-1].square()).sum())
        rest = values * basis[-1]
        for _ in range(2):  # twice is enough against the loss of orthogonality
            rest = rest - sum((known * (known @ rest) for known in basis), torch.zeros_like(rest))
        beside.append(rest.norm())
        basis.append(rest / beside[-1])
    jacobi = torch.diag(torch.stack(diagonal))
    if count > 1:
        off = torch.stack(beside[: count - 1])
        jacobi = jacobi + torch.diag(off, 1) + torch.diag(off, -1)
    nodes: Tensor = torch.linalg.eigvalsh(jacobi)
    return nodes
