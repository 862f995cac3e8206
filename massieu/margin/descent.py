"""Training of attention weights on token selection: what grows, in which direction, and how near it comes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral

import torch
from torch import Tensor

from massieu.margin.finite import finite_component, tied_sets
from massieu.margin.gradients import Landscape, LogGap
from massieu.margin.graph import GraphMargin
from massieu.margin.problem import TokenSelection
from massieu.margin.solver import MaxMargin
from massieu.margin.trajectory import Trajectory, best_solution, comparison, measured, table

__all__ = ["METHODS", "descend", "spaced"]

METHODS = ("gd", "ngd", "polyak", "adam", "sign")

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
    (:func:`massieu.margin.finite_component`); it is not known, and Polyak is refused, where the tokens with mass
    cannot all be put first. "sign" moves every entry by the step, "adam" is torch's with its own constants.

    Args:
        problem: what to train on.
        method: one of the names, or a function from a list of parameters to a torch optimizer, which then has its own
            step and sees plain gradients.
        step: :math:`\eta`.
        steps: how many.
        start: weights, or a pair K, Q; a number draws independent normal entries of that scale. Zero if omitted, which
            factors cannot leave, so they need one.
        parametrization: "W", or "KQ" for :math:`W = K Q^\top`, whose steps are normalized jointly.
        rank: of drawn factors; full if omitted.
        norm: of the max-margin solutions to compare with, "fro" or "nuc"; by default the one that vanishing
            regularization of the parametrization leads to, which is "nuc" for factors.
        record: how many steps of each decade to measure, or the steps. The first and the last made always are.
        cap: length of the longest Polyak step.
        solution: to compare with as that of the best tokens, instead of the one of the problem.
        tied: with targets, the tokens that share the first place in the end, boolean, ``(sequences, length)``, where
            they are more than those with mass; needs ``solution``. Next-token data have both in their
            :func:`massieu.margin.next_token_component`.
        compare: with max-margin solutions at all; without, what needs them is nan.
        limit: programs to solve for the best way to pick from tied tokens, before its columns are left nan.
        generator: of a drawn start, or a seed for one.
        progress: called with the step and their number at every measured step.

    Source:
        The slides' GD, normalized GD and Polyak steps; that Polyak needs the loss of the tokens really selected was
        found here: with the global one, runs that settle elsewhere diverge.

    Example:
        >>> problem = massieu.margin.random_problem(4, 3, 12, kind="equal")
        >>> run = descend(problem, "ngd", steps=300, record=[30, 300])
        >>> run.history.step.tolist(), bool(run.history.misalignment_best.iloc[-1] < 1e-3), run.finished
        ([0, 30, 300], True, True)
    """
    parameters = _start(problem, start, parametrization, rank, generator)
    norm = _norm(norm, parametrization)
    moments = _moments(record, steps)
    ties = tied_sets(problem, tied, solution) if tied is not None else problem.best
    if solution is not None and tuple(solution.weights.shape) != problem.shape:
        raise ValueError(f"solution must have weights of shape {problem.shape}, got {tuple(solution.weights.shape)}")
    best = best_solution(problem, norm, limit) if compare and solution is None else solution
    update = _update(problem, method, parameters, step, cap, lambda: _limit(problem, tied, best))
    snapshots, at = [_product(parameters).clone()], [0]
    finished, ended, made = True, f"all {steps} steps were made", 0
    for k in range(1, steps + 1):
        trouble = update()
        if trouble:
            finished, ended = False, f"stopped at step {k}: {trouble}"
            break
        made = k
        if k == moments[len(at)]:
            snapshots.append(_product(parameters).clone())
            at.append(k)
            if progress is not None:
                progress(k, steps)
    weights = _product(parameters).detach().clone()
    if made > at[-1]:
        snapshots.append(weights)
        at.append(made)
    if finished and not weights.isfinite().all():
        finished, ended = False, f"all {steps} steps were made, but the weights are no longer finite"
    selection = problem.selected(weights.nan_to_num())
    compared = comparison(problem, selection, ties, best, norm, compare)
    landscape = Landscape(problem)
    rows = [measured(landscape, k, one, compared) for k, one in zip(at, snapshots, strict=True)]
    factors = (parameters[0].detach(), parameters[1].detach()) if len(parameters) == 2 else None
    return Trajectory(weights, factors, table(rows), torch.stack(snapshots), selection, compared, finished, ended)


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
    if rank is not None and (parametrization == "W" or not isinstance(rank, Integral) or rank < 1):
        raise ValueError(f"rank must be a whole number from 1, and belongs to KQ; got {rank} with {parametrization}")
    if parametrization == "KQ" and (start is None or (isinstance(start, (int, float)) and start == 0)):
        raise ValueError("factors need a start, because zero is one that they cannot leave; give start=0.1 or (K, Q)")
    parts = None if start is None or isinstance(start, (int, float)) else _parts(start)
    shapes = [(rows, columns)]
    if parametrization == "KQ":
        given = min(rows, columns) if rank is None else int(rank)
        if parts is not None and parts[0].ndim == 2 and rank is None:
            given = parts[0].shape[-1]
        shapes = [(rows, given), (columns, given)]
    if isinstance(start, (int, float)):
        if not math.isfinite(start):
            raise ValueError("start must be finite, but some of it is nan or infinite")
        draw = torch.Generator().manual_seed(generator) if isinstance(generator, int) else generator
        return [start * torch.randn(*shape, generator=draw, dtype=torch.float64) for shape in shapes]
    if parts is None:
        return [torch.zeros(*shapes[0], dtype=torch.float64)]
    if [tuple(part.shape) for part in parts] != shapes:
        got = " and ".join(str(tuple(part.shape)) for part in parts)
        raise ValueError(f"start must have shape {' and '.join(map(str, shapes))}, got {got}")
    if not all(part.isfinite().all() for part in parts):
        raise ValueError("start must be finite, but some of it is nan or infinite")
    return [part.detach().double().clone() for part in parts]


def _parts(start: Tensor | Sequence[Tensor]) -> list[Tensor]:
    parts = [start] if isinstance(start, Tensor) else list(start)
    if not parts or not all(isinstance(part, Tensor) for part in parts):
        raise ValueError(f"start must be a tensor, a pair of them or a number, got {type(start).__name__} of others")
    return parts


def _norm(norm: str | None, parametrization: str) -> str:
    if norm not in (None, "fro", "nuc"):
        raise ValueError(f"norm must be 'fro' or 'nuc', got {norm!r}")
    return norm or ("fro" if parametrization == "W" else "nuc")


def _moments(record: int | Iterable[int], steps: int) -> list[int]:
    if not isinstance(steps, Integral) or steps < 1:
        raise ValueError(f"steps must be a whole number, at least 1, got {steps}")
    if isinstance(record, Integral):
        if record < 1:
            raise ValueError(f"record must be at least 1 for each decade, or a list of steps, got {record}")
        wanted = spaced(steps, int(record))
    elif isinstance(record, Iterable):
        wanted = [*record, steps]
    else:
        raise ValueError(f"record must be a whole number for each decade, or a list of steps, got {record}")
    return [0, *sorted({k for k in wanted if 1 <= k <= steps})]


def _limit(problem: TokenSelection, tied: Tensor | None, best: MaxMargin | GraphMargin | None) -> Tensor | None:
    """Attention maps of the least loss of targets, which Polyak steps need; none for scores."""
    if problem.targets is None:
        return None
    finite = finite_component(problem, tied=tied, solution=best)
    if not finite.solution.feasible:
        raise ValueError(
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
    """One step of the method, made in place; says what is wrong if it cannot be made."""
    if method not in METHODS if isinstance(method, str) else not callable(method):
        raise ValueError(f"method must be one of {', '.join(METHODS)} or make a torch optimizer, got {method!r}")
    if not (step > 0 and cap > 0 and math.isfinite(step)):
        raise ValueError(f"step and cap must be positive, got {step} and {cap}")
    landscape = Landscape(problem, limit() if method == "polyak" else None)
    if not isinstance(method, str):
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
            return "the gradient is zero" if length == 0 else "the weights are no longer finite"
        if method == "sign":
            parts, size = [part.sign() for part in parts], step
        elif method == "gd":
            size = step * math.exp(min(gradient.log_scale, 700.0))
        elif method == "ngd":
            size = step / length
        else:
            above = gap(log_attention)
            if above.sign == 0 and problem.targets is not None:
                return "the loss is the least one, to rounding"
            log_length = math.log(step) + above.log - gradient.log_scale - math.log(length)
            size = (math.exp(min(log_length, math.log(cap))) if above.sign > 0 else cap) / length
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.sub_(part, alpha=size)
        return ""

    return update


def _adam_update(landscape: Landscape, parameters: list[Tensor], step: float) -> Callable[[], str]:
    """Adam as torch has it, without what an optimizer does besides at every step."""
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
        return "" if gradient.isfinite().all() else "the weights are no longer finite"

    return update


def _optimizer_update(
    problem: TokenSelection, landscape: Landscape, parameters: list[Tensor], optimizer: torch.optim.Optimizer
) -> Callable[[], str]:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"method must make a torch optimizer from parameters, got {type(optimizer).__name__}")

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
        return "" if finite else "the weights are no longer finite"

    return update


def _product(parameters: Sequence[Tensor]) -> Tensor:
    return parameters[0] if len(parameters) == 1 else parameters[0] @ parameters[1].mT


def _pulled(parameters: Sequence[Tensor], matrix: Tensor) -> list[Tensor]:
    """The gradient of the weights as one of the parameters."""
    return [matrix] if len(parameters) == 1 else [matrix @ parameters[1], matrix.mT @ parameters[0]]
