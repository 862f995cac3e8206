"""Helpers of experiments: random tensors of a trial, gaps between tensors, derivatives and minimizers by autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from massieu.claims.claim import Gap, Trial
from massieu.measures.measure import gradient

__all__ = ["TIGHT", "above", "apart", "fit", "jacobian", "linspace", "minimized", "normals", "one", "widest"]

TIGHT = 1e-9  # of closed forms against each other in float64


def normals(trial: Trial) -> Callable[..., Tensor]:
    """Return a function that draws standard normal tensors of a given shape in float64, one after the other."""
    generator = trial.generator
    return lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)


def apart(found: Tensor, expected: Tensor, allowed: float = TIGHT) -> Gap:
    """Return the largest difference between two tensors."""
    return Gap(float((found - expected).abs().max()), allowed)


def above(found: Tensor, bound: Tensor, allowed: float = TIGHT) -> Gap:
    """Return the largest excess of a tensor over its bound."""
    return Gap(float((found - bound).max().clamp(min=0)), allowed)


def widest(*gaps: Gap) -> Gap:
    """Return the gap that exceeds its bound most."""
    return max(gaps, key=lambda gap: gap.share)


def linspace(first: float, last: float, count: int) -> Tensor:
    """Return equally spaced nodes in float64: the trapezoidal rule on them is exact for smooth decaying functions."""
    return torch.linspace(first, last, count, dtype=torch.float64)


def jacobian(field: Callable[[Tensor], Tensor], point: Tensor) -> Tensor:
    """Return derivatives of a field at each query by autograd, shape ``(..., queries, outputs, dim)``."""

    def output(index: int) -> Callable[[Tensor], Tensor]:
        return lambda each: field(each)[..., index]

    return torch.stack([gradient(output(index), point) for index in range(field(point).shape[-1])], -2)


def one(number: float) -> Tensor:
    """Return a single natural parameter of a family in one dimension."""
    return torch.full((1, 1), number, dtype=torch.float64)


def fit(loss: Callable[[], Tensor], parameters: Iterable[Tensor], **options: Any) -> None:
    """Minimize a smooth function of parameters in place, by L-BFGS."""
    solver = torch.optim.LBFGS(parameters, line_search_fn="strong_wolfe", **options)

    def closure() -> Tensor:
        solver.zero_grad()
        value = loss()
        value.backward()
        return value

    solver.step(closure)


def minimized(loss: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """Return the minimizer of a smooth function, by L-BFGS from a start."""
    point = start.clone().requires_grad_()
    fit(lambda: loss(point), [point], max_iter=500, tolerance_grad=1e-12, tolerance_change=1e-15)
    return point.detach()
