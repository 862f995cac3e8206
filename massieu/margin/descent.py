"""Training of attention weights on token selection, compared with the max-margin direction."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from massieu.checks import UserError, check_choice, check_count, check_floating, check_number, check_shape
from massieu.margin.conversions import as_generator
from massieu.margin.finite import finite_component, tied_sets
from massieu.margin.gradients import Landscape, LogGap, size_of
from massieu.margin.graph import GraphMargin
from massieu.margin.problem import TokenSelection
from massieu.margin.solver import MaxMargin
from massieu.margin.trajectory import Trajectory, best_solution, comparison, measured, table

__all__ = ["METHODS", "descend", "spaced"]

METHODS = ("gd", "ngd", "polyak", "adam", "sign")

NOT_FINITE = "the weights are no longer finite"
AT_REST = ("the gradient is zero", "the loss is the least one, to rounding")

Start = Tensor | Sequence[Tensor] | float | None
Method = str | Callable[[list[Tensor]], torch.optim.Optimizer]


def descend(
    problem: TokenSelection,
    method: Method = "gd",
    *,
    step: float = 1.0,
    steps: int,
    start: Start = None,
    parametrization: str = "W",
    rank: int | None = None,
    norm: str | None = None,
    record: int | Iterable[int] = 20,
    cap: float = 10.0,
    solution: MaxMargin | GraphMargin | None = None,
    tied: Tensor | None = None,
    compare: bool = True,
    limit: int = 100,
    generator: torch.Generator | int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Trajectory:
    r"""Train attention weights by full-batch descent, with gradients that do not underflow.

    .. math:: W_{k+1} = W_k - \eta_k \nabla L(W_k), \qquad \eta_k = \eta,\quad \frac{\eta}{\|\nabla L\|},\quad
        \eta\, \frac{L - L^*}{\|\nabla L\|^2}

    for "gd", "ngd" and "polyak". :math:`L^*` is the loss of the tokens of highest logit at that step; where the loss is
    below it already, that of the best tokens; and no Polyak step is longer than ``cap``, whose natural unit is the norm
    of the max-margin solution. With targets, :math:`L^*` is the least loss that weights can approach: the entropy of
    the targets, or where targets contradict each other the loss at the finite component
    (:func:`massieu.margin.finite_component`); it is unknown, and Polyak raises, where no weights put all tokens with
    mass first. "sign" moves every entry by the step, "adam" is that of torch with its default constants.

    Args:
        problem: training data.
        method: one of the names, or a function from a list of parameters to a torch optimizer, which then has its own
            step size and plain gradients.
        step: step size :math:`\eta`.
        steps: number of steps.
        start: weights, or a pair K, Q; a number draws independent normal entries of that standard deviation. Zero if
            omitted; factors cannot leave zero, so they need a start.
        parametrization: "W", or "KQ" for :math:`W = K Q^\top`, whose steps are normalized jointly.
        rank: of drawn factors; full if omitted.
        norm: of the max-margin solutions to compare with, "fro" or "nuc"; by default the norm that the parametrization
            minimizes implicitly, which is "nuc" for factors.
        record: number of measured steps in each decade, or the steps. The first and the last step are always measured.
        cap: length of the longest Polyak step.
        solution: max-margin solution of the best tokens, instead of the one of the problem.
        tied: with targets, the tokens that share the first place in the end, boolean, ``(sequences, length)``, where
            they are more than those with mass; needs ``solution``. Next-token data have both in their
            :func:`massieu.margin.next_token_component`.
        compare: compare with max-margin solutions; otherwise the columns that need them are nan.
        limit: programs to solve for the best way to pick from tied tokens; beyond it the columns are nan.
        generator: of a drawn start, or a seed for one.
        progress: called with the step and the number of steps at every measured step.

    Source:
        The slides' GD, normalized GD and Polyak steps. Polyak needs the loss of the tokens really selected: with the
        global one, runs that settle elsewhere diverge (found here).

    Example:
        >>> problem = massieu.margin.random_problem(4, 3, 12, kind="equal")
        >>> run = descend(problem, "ngd", steps=300, record=[30, 300])
        >>> run.history.step.tolist(), bool(run.history.misalignment_best.iloc[-1] < 1e-3), run.finished
        ([0, 30, 300], True, True)
    """
    check_choice(parametrization, "parametrization", ("W", "KQ"))
    check_choice(norm, "norm", (None, "fro", "nuc"))
    norm = norm or ("fro" if parametrization == "W" else "nuc")
    parameters = _start(problem, start, parametrization, rank, generator)
    moments = _moments(record, check_count(steps, "steps"))
    ties = tied_sets(problem, tied, solution) if tied is not None else problem.best
    if solution is not None:
        check_shape(solution.weights, "weights of the solution", *problem.shape)
    best = best_solution(problem, norm, limit) if compare and solution is None else solution
    update = _update(problem, method, parameters, step, cap, lambda: _limit(problem, tied, best))
    snapshots, weights, trouble = _train(parameters, update, moments, steps, progress)
    made, finite = max(snapshots), bool(weights.isfinite().all())
    message = f"stopped at step {made + 1}: {trouble}" if trouble else f"all {steps} steps were made"
    selection = problem.selected(weights.nan_to_num())
    compared = comparison(problem, selection, ties, best, norm, compare)
    landscape = Landscape(problem)
    return Trajectory(
        weights=weights,
        factors=(parameters[0].detach(), parameters[1].detach()) if len(parameters) == 2 else None,
        history=table([measured(landscape, k, one, compared) for k, one in snapshots.items()]),
        snapshots=torch.stack([*snapshots.values()]),
        selection=selection,
        compared=compared,
        finished=finite and not trouble,
        converged=trouble in AT_REST,
        residual=size_of(landscape.gradient(weights).dense()) if finite else math.nan,
        steps=made,
        message=message if finite or trouble else f"{message}, but {NOT_FINITE}",
    )


def spaced(steps: int, per_decade: int = 20) -> list[int]:
    """Return whole numbers from 1 to ``steps``, both included, about ``per_decade`` in each decade.

    Example:
        >>> spaced(100, 3)
        [1, 2, 5, 10, 22, 46, 100]
    """
    count = math.ceil(math.log10(max(steps, 1)) * per_decade)
    return sorted({round(steps ** (i / count)) for i in range(count + 1)}) if count else [1]


def _start(
    problem: TokenSelection, start: Start, parametrization: str, rank: int | None, generator: torch.Generator | int
) -> list[Tensor]:
    rows, columns = problem.shape
    factored = parametrization == "KQ"
    if rank is not None:
        check_count(rank, "rank")
        if not factored:
            raise UserError('rank belongs to factors; leave it out, or set parametrization="KQ"')
    if factored and (start is None or (isinstance(start, (int, float)) and start == 0)):
        raise UserError("factors need a start, because they cannot leave zero; give start=0.1 or (K, Q)")
    if start is None or isinstance(start, (int, float)):
        parts = []
    else:
        parts = [start] if isinstance(start, Tensor) else list(start)
    shapes = [(rows, columns)]
    if factored:
        own = parts[0].shape[-1] if parts and isinstance(parts[0], Tensor) and parts[0].ndim else min(rows, columns)
        shapes = [(rows, rank or own), (columns, rank or own)]
    if isinstance(start, (int, float)):
        size, draw = check_number(start, "start"), as_generator(generator)
        return [size * torch.randn(*shape, generator=draw, dtype=torch.float64) for shape in shapes]
    if start is None:
        return [torch.zeros(*shapes[0], dtype=torch.float64)]
    if len(parts) != len(shapes):
        raise UserError(f"start must have {len(shapes)} tensors with {parametrization}, got {len(parts)}")
    for part, shape in zip(parts, shapes, strict=True):
        check_floating(part, "start", finite=True)
        check_shape(part, "start", *shape)
    return [part.detach().double().clone() for part in parts]


def _moments(record: int | Iterable[int], steps: int) -> set[int]:
    """Return the steps to measure."""
    if isinstance(record, Iterable):
        wanted = [*record, steps]
    else:
        wanted = spaced(steps, check_count(record, "record", remedy="or pass a list of steps"))
    return {k for k in wanted if 1 <= k <= steps}


def _train(
    parameters: list[Tensor],
    update: Callable[[], str],
    moments: set[int],
    steps: int,
    progress: Callable[[int, int], None] | None,
) -> tuple[dict[int, Tensor], Tensor, str]:
    """Make the steps; return the weights at the moments, the last weights, and the reason to stop."""
    snapshots, made, trouble = {0: _product(parameters).clone()}, 0, ""
    while made < steps and not trouble:
        trouble = update()
        made += not trouble
        if made in moments and made not in snapshots:
            snapshots[made] = _product(parameters).clone()
            if progress is not None:
                progress(made, steps)
    weights = _product(parameters).detach().clone()
    snapshots.setdefault(made, weights)
    return snapshots, weights, trouble


def _limit(problem: TokenSelection, tied: Tensor | None, best: MaxMargin | GraphMargin | None) -> Tensor | None:
    """Return the attention maps of the least loss of targets, which Polyak steps need; None for scores."""
    if problem.targets is None:
        return None
    finite = finite_component(problem, tied=tied, solution=best)
    if not finite.solution.feasible:
        raise UserError(
            "Polyak steps need the least loss, which is known only where the tokens with mass in the targets can all be"
            " put first, but no weights do that here; use gd or ngd, or give tied and solution"
        )
    return finite.attention


def _update(
    problem: TokenSelection,
    method: Method,
    parameters: list[Tensor],
    step: float,
    cap: float,
    limit: Callable[[], Tensor | None],
) -> Callable[[], str]:
    """Return a function that makes one step in place; it returns an empty string, or the reason to stop."""
    if not callable(method):
        check_choice(method, "method", METHODS)
    check_number(step, "step", above=0)
    if not cap > 0:
        raise UserError(f"cap must be positive, got {cap}; it may be infinite")
    landscape = Landscape(problem, limit() if method == "polyak" else None)
    if callable(method):
        return _optimizer_update(problem, landscape, parameters, method(parameters))
    if method == "adam":
        return _adam_update(landscape, parameters, step)
    reference = problem.best.int().argmax(-1)

    def gap(log_attention: Tensor) -> LogGap:
        found = landscape.gap_at(log_attention)
        return found if found.sign > 0 or problem.targets is not None else landscape.gap_at(log_attention, reference)

    @torch.no_grad()
    def update() -> str:
        log_attention = landscape.log_attention(_product(parameters))
        gradient = landscape.gradient_at(log_attention)
        parts = _pulled(parameters, gradient.matrix)
        length = math.hypot(*(float(torch.linalg.vector_norm(part)) for part in parts))
        if not 0 < length < math.inf:
            return AT_REST[0] if length == 0 else NOT_FINITE
        if method == "sign":
            parts, size = [part.sign() for part in parts], step
        elif method == "gd":
            size = step * math.exp(min(gradient.log_scale, 700.0))
        elif method == "ngd":
            size = step / length
        else:
            above = gap(log_attention)
            if above.sign == 0 and problem.targets is not None:
                return AT_REST[1]
            log_length = math.log(step) + above.log - gradient.log_scale - math.log(length)
            size = (math.exp(min(log_length, math.log(cap))) if above.sign > 0 else cap) / length
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.sub_(part, alpha=size)
        return ""

    return update


def _adam_update(landscape: Landscape, parameters: list[Tensor], step: float) -> Callable[[], str]:
    """Return a step of Adam with the constants of torch, without the overhead of an optimizer."""
    first, second = ([torch.zeros_like(parameter) for parameter in parameters] for _ in range(2))
    fade = [1.0, 1.0]

    @torch.no_grad()
    def update() -> str:
        fade[0], fade[1] = 0.9 * fade[0], 0.999 * fade[1]
        scale = math.sqrt(1 - fade[1])
        gradient = landscape.gradient(_product(parameters)).dense()
        parts = _pulled(parameters, gradient)
        for parameter, part, mean, square in zip(parameters, parts, first, second, strict=True):
            mean.lerp_(part, 0.1)
            square.mul_(0.999).addcmul_(part, part, value=0.001)
            parameter.addcdiv_(mean, (square.sqrt() / scale).add_(1e-8), value=-step / (1 - fade[0]))
        return "" if gradient.isfinite().all() else NOT_FINITE

    return update


def _optimizer_update(
    problem: TokenSelection, landscape: Landscape, parameters: list[Tensor], optimizer: torch.optim.Optimizer
) -> Callable[[], str]:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(f"method must make a torch optimizer from parameters, got {type(optimizer).__name__}")

    @torch.no_grad()
    def closure() -> float:
        weights = _product(parameters)
        for parameter, part in zip(parameters, _pulled(parameters, landscape.gradient(weights).dense()), strict=True):
            parameter.grad = part
        return float(problem.objective(weights))

    def update() -> str:
        with torch.no_grad():
            optimizer.step(closure)
            finite = all(bool(parameter.isfinite().all()) for parameter in parameters)
        return "" if finite else NOT_FINITE

    return update


def _product(parameters: Sequence[Tensor]) -> Tensor:
    return parameters[0] if len(parameters) == 1 else parameters[0] @ parameters[1].mT


def _pulled(parameters: Sequence[Tensor], matrix: Tensor) -> list[Tensor]:
    """Return the gradient by the parameters from that by the weights."""
    return [matrix] if len(parameters) == 1 else [matrix @ parameters[1], matrix.mT @ parameters[0]]
