"""Training of attention weights on token selection: what grows, in which direction, and how near it comes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from massieu.margin.gradients import Landscape, LogGradient
from massieu.margin.problem import TokenSelection
from massieu.margin.trajectory import Trajectory, approached, measured, table

__all__ = ["METHODS", "descend", "spaced"]

METHODS = ("gd", "ngd", "polyak", "adam", "sign")

Start = Tensor | tuple[Tensor, Tensor] | float | None
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
    generator: torch.Generator | int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Trajectory:
    r"""Train attention weights by full-batch descent, with gradients that do not underflow.

    .. math:: W_{k+1} = W_k - \eta_k \nabla L(W_k), \qquad \eta_k = \eta,\quad \frac{\eta}{\|\nabla L\|},\quad
        \eta\, \frac{L - L^*}{\|\nabla L\|^2}

    for "gd", "ngd" and "polyak". :math:`L^*` is the loss of the tokens of highest logit at that step; where the loss is
    below it already, that of the best tokens; and no Polyak step is longer than ``cap``, whose natural unit is the norm
    of the max-margin solution. "sign" moves every entry by the step, "adam" is torch's.

    Args:
        problem: what to train on.
        method: one of the names, or a function from a list of parameters to a torch optimizer, which then has its own
            step and sees plain gradients.
        step: :math:`\eta`.
        steps: how many.
        start: weights, or a pair K, Q; a number draws independent normal entries of that scale. Zero if omitted, which
            factors cannot leave, so they need one.
        parametrization: "W", or "KQ" for :math:`W = K Q^\top`, whose steps are normalised jointly.
        rank: of drawn factors; full if omitted.
        norm: of the max-margin solutions to compare with, "fro" or "nuc"; by default the one that vanishing
            regularisation of the parametrization leads to, which is "nuc" for factors.
        record: how many steps of each decade to measure, or the steps. The first and the last always are.
        cap: length of the longest Polyak step.
        generator: of a drawn start, or a seed for one.
        progress: called with the step and their number at every measured step.

    Source:
        The slides' GD, normalised GD and Polyak steps; that Polyak needs the loss of the tokens really selected was
        found here: with the global one, runs that settle elsewhere diverge.

    Example:
        >>> problem = massieu.margin.random_problem(4, 3, 12, kind="equal")
        >>> run = descend(problem, "ngd", steps=300, record=[30, 300])
        >>> run.history.step.tolist(), bool(run.history.misalignment_best.iloc[-1] < 1e-3), run.finished
        ([0, 30, 300], True, True)
    """
    parameters = _start(problem, start, parametrization, rank, generator)
    update = _update(problem, method, parameters, step, cap)
    moments = _moments(record, steps)
    norm = norm or ("fro" if parametrization == "W" else "nuc")
    best = approached(problem, norm)
    snapshots, at = [_product(parameters).clone()], [0]
    finished, ended = True, f"all {steps} steps were made"
    for k in range(1, steps + 1):
        trouble = update()
        if trouble:
            finished, ended = False, f"stopped at step {k}: {trouble}"
            break
        if k == moments[len(at)]:
            snapshots.append(_product(parameters).clone())
            at.append(k)
            if progress is not None:
                progress(k, steps)
    weights = snapshots[-1] if finished else _product(parameters).clone()
    selection = problem.selected(weights.nan_to_num())
    local = approached(problem, norm, selection, best)
    rows = [measured(problem, k, one, local, best, norm) for k, one in zip(at, snapshots, strict=True)]
    factors = (parameters[0].detach(), parameters[1].detach()) if len(parameters) == 2 else None
    return Trajectory(weights, factors, table(rows), torch.stack(snapshots), selection, local, best, finished, ended)


def spaced(steps: int, per_decade: int = 20) -> list[int]:
    """Whole numbers from 1 to ``steps``, about so many in each decade, with 1 and ``steps``.

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
    if parametrization not in ("W", "KQ"):
        raise ValueError(f"parametrization must be W or KQ, got {parametrization!r}")
    if start is None and parametrization == "KQ":
        raise ValueError("factors need a start, because zero is one that they cannot leave; give start=0.1 or (K, Q)")
    shapes = [(rows, columns)]
    if parametrization == "KQ":
        given = start[0].shape[-1] if isinstance(start, tuple) else min(rows, columns) if rank is None else rank
        shapes = [(rows, given), (columns, given)]
    if isinstance(start, (int, float)):
        draw = torch.Generator().manual_seed(generator) if isinstance(generator, int) else generator
        return [start * torch.randn(*shape, generator=draw, dtype=torch.float64) for shape in shapes]
    if start is None:
        return [torch.zeros(*shapes[0], dtype=torch.float64)]
    parts = list(start) if isinstance(start, tuple) else [start]
    if [tuple(part.shape) for part in parts] != shapes:
        got = " and ".join(str(tuple(part.shape)) for part in parts)
        raise ValueError(f"start must have shape {' and '.join(map(str, shapes))}, got {got}")
    if not all(part.isfinite().all() for part in parts):
        raise ValueError("start must be finite, but some of it is nan or infinite")
    return [part.detach().double().clone() for part in parts]


def _moments(record: int | Iterable[int], steps: int) -> list[int]:
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    wanted = spaced(steps, record) if isinstance(record, int) else [*record, steps]
    return [0, *sorted({k for k in wanted if 1 <= k <= steps})]


def _update(
    problem: TokenSelection, method: Method, parameters: list[Tensor], step: float, cap: float
) -> Callable[[], str]:
    """One step of the method, made in place; says what is wrong if it cannot be made."""
    if isinstance(method, str) and method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)} or make a torch optimizer, got {method!r}")
    if not (step > 0 and cap > 0 and math.isfinite(step)):
        raise ValueError(f"step and cap must be positive, got {step} and {cap}")
    landscape = Landscape(problem)
    if method == "adam":
        return _optimizer_update(problem, landscape, parameters, torch.optim.Adam(parameters, lr=step))
    if not isinstance(method, str):
        return _optimizer_update(problem, landscape, parameters, method(parameters))
    reference = problem.best.int().argmax(-1)

    def factor(gradient: LogGradient, length: float) -> float:
        if method == "gd":
            return step * math.exp(min(gradient.log_scale, 700.0))
        if method == "ngd":
            return step / length
        gap = landscape.gap(_product(parameters))
        if gap.sign <= 0:
            gap = landscape.gap(_product(parameters), reference)
        if gap.sign <= 0:
            return cap / length
        log_length = math.log(step) + gap.log - gradient.log_scale - math.log(length)
        return math.exp(min(log_length, math.log(cap))) / length

    @torch.no_grad()
    def update() -> str:
        gradient = landscape.gradient(_product(parameters))
        parts = _pulled(parameters, gradient.matrix)
        length = math.hypot(*(float(torch.linalg.vector_norm(part)) for part in parts))
        if not 0 < length < math.inf:
            return "the gradient is zero" if length == 0 else "the weights are no longer finite"
        if method == "sign":
            parts, size = [part.sign() for part in parts], step
        else:
            size = factor(gradient, length)
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.sub_(part, alpha=size)
        return ""

    return update


def _optimizer_update(
    problem: TokenSelection, landscape: Landscape, parameters: list[Tensor], optimizer: torch.optim.Optimizer
) -> Callable[[], str]:
    def closure() -> float:
        weights = _product(parameters)
        for parameter, part in zip(parameters, _pulled(parameters, landscape.gradient(weights).dense()), strict=True):
            parameter.grad = part
        return float(problem.objective(weights))

    def update() -> str:
        with torch.no_grad():
            optimizer.step(closure)
            finite = all(bool(parameter.isfinite().all()) for parameter in parameters)
        return "" if finite else "the weights are no longer finite"

    return update


def _product(parameters: Sequence[Tensor]) -> Tensor:
    return parameters[0] if len(parameters) == 1 else parameters[0] @ parameters[1].mT


def _pulled(parameters: Sequence[Tensor], matrix: Tensor) -> list[Tensor]:
    """The gradient of the weights as one of the parameters."""
    return [matrix] if len(parameters) == 1 else [matrix @ parameters[1], matrix.mT @ parameters[0]]
