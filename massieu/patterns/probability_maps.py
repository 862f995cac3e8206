"""Test whether a map from scores to attention weights tends to hardmax as scores grow."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from massieu.checks import UserError, check_number

__all__ = ["MapCondition", "ProbabilityMap", "probability_condition"]

ProbabilityMap = str | float | Callable[[Tensor], Tensor]
OFFSETS = (-10.0, -1.0, 0.0, 1.0, 10.0)
LARGEST = 2.0**14
ATOMS = 8


@dataclass(frozen=True)
class MapCondition:
    """Verdict on a probability map: True if it tends to hardmax.

    Attributes:
        name: of the map.
        holds: the verdict; exact for maps known by name, by probes for a function.
        factor: sufficient factor t of the scores for the given lead and rest; None without one.
        message: reason of the verdict.
    """

    name: str
    holds: bool
    factor: float | None
    message: str


def probability_condition(
    probability_map: ProbabilityMap, length: int, *, lead: float = 1.0, rest: float = 0.1
) -> MapCondition:
    r"""Test whether for all :math:`\zeta > 0` and :math:`\eta \in (0, 1]` there is a factor t of the scores with

    .. math:: v_{j^*} - \max_{j \ne j^*} v_j \ge \zeta \quad \Rightarrow \quad \rho(t v)_{j^*} \ge 1 - \eta

    Softmax needs :math:`t = \log((T - 1)(1 - \eta) / \eta) / \zeta`. Alpha-entmax (sparsemax at 2) puts all weight on a
    score that leads by :math:`1 / (\alpha - 1)`, hardmax on any that leads. A function is evaluated on scores with
    leads of 1 and 0.1, shifted up and down, for factors up to 16384: this can refute the condition, not prove it.

    Args:
        probability_map: ``"softmax"``, ``"sparsemax"``, ``"entmax"`` (alpha 1.5), ``"hardmax"``, an alpha of at least
            1, or a function of scores ``(..., atoms)`` that returns weights of the same shape.
        length: number of tokens T, on which the factor of softmax depends.
        lead: :math:`\zeta` for the returned factor.
        rest: :math:`\eta` for the returned factor.

    Source:
        Yun et al. 2020, assumption 2.

    Example:
        >>> round(probability_condition("softmax", 256).factor, 2)
        7.74
        >>> probability_condition(lambda scores: torch.softmax(30 * torch.tanh(scores / 30), -1), 256).holds
        False
    """
    check_number(lead, "lead", above=0)
    if check_number(rest, "rest", above=0) > 1:
        raise UserError(f"rest must be at most 1, got {rest}; it is the weight left for all other scores")
    if callable(probability_map):
        return _probe(probability_map, lead, rest)
    if probability_map == "hardmax":
        return MapCondition("hardmax", True, 1.0, "hardmax chooses whatever leads")
    known: dict[Any, Any] = {"softmax": 1.0, "sparsemax": 2.0, "entmax": 1.5}
    alpha = known.get(probability_map, probability_map) if isinstance(probability_map, str) else probability_map
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 1 <= alpha < math.inf:
        raise UserError(
            "probability_map must be 'softmax', 'sparsemax', 'entmax', 'hardmax', an alpha of at least 1 or a function,"
            f" got {probability_map!r}; alpha 1 is softmax and 2 is sparsemax"
        )
    if alpha == 1:
        factor = max(0.0, math.log(max(1, length - 1) * (1 - rest) / rest)) / lead if rest < 1 else 0.0
        return MapCondition("softmax", True, factor, "softmax tends to hardmax as scores grow")
    name = probability_map if isinstance(probability_map, str) else f"{alpha:g}-entmax"
    message = f"{name} puts all weight on a score that leads by {1 / (alpha - 1):g}"
    return MapCondition(name, True, 1 / ((alpha - 1) * lead), message)


def _probe(function: Callable[[Tensor], Tensor], lead: float, rest: float) -> MapCondition:
    name = getattr(function, "__name__", type(function).__name__)
    sufficient = None
    for own_lead, own_rest in ((lead, rest), (1.0, 0.5), (1.0, 0.01), (0.1, 0.01)):
        scores, best = _scores(own_lead)
        factor, share = 1.0, _least_share(function, scores, best)
        while share < 1 - own_rest and factor < LARGEST:
            factor *= 2
            share = _least_share(function, factor * scores, best)
        if share < 1 - own_rest:
            message = f"a score that leads by {own_lead:g} has at most {share:.2g} of the weight at factor {factor:g}"
            return MapCondition(name, False, None, message)
        sufficient = factor if sufficient is None else sufficient
    return MapCondition(name, True, sufficient, "the best of all tested scores gets the weight as they grow")


def _scores(lead: float) -> tuple[Tensor, Tensor]:
    """Return scores ``(cases, atoms)`` and the leading atoms ``(cases,)``: every atom, over equal or random others."""
    generator = torch.Generator().manual_seed(0)
    others = torch.cat([torch.zeros(1, ATOMS), -torch.rand(4, ATOMS, generator=generator)]).double()
    best = torch.arange(ATOMS)
    shift = torch.tensor(OFFSETS, dtype=torch.float64)
    cases = others[:, None, None] + shift[None, :, None, None] + torch.zeros(ATOMS, ATOMS, dtype=torch.float64)
    ahead = shift[None, :, None] + lead + others.amax(-1)[:, None, None]
    cases[..., best, best] = ahead.expand(cases.shape[:-1])
    return cases.reshape(-1, ATOMS), best.expand(cases.shape[:-1]).reshape(-1)


def _least_share(function: Callable[[Tensor], Tensor], scores: Tensor, best: Tensor) -> float:
    weights: Any = function(scores)
    if not isinstance(weights, Tensor) or weights.shape != scores.shape:
        got = tuple(weights.shape) if isinstance(weights, Tensor) else type(weights).__name__
        raise UserError(
            f"probability_map must return weights of the shape of its scores, {tuple(scores.shape)}, got {got};"
            " normalize over the last axis"
        )
    total, least = float(weights.sum(-1).nan_to_num(0.0).max()), float(weights.nan_to_num(0.0).min())
    if total > 1 + 1e-6 or least < -1e-6:
        raise UserError(
            f"probability_map must return weights of at least 0 with a sum of at most 1, got {least:.2g} and"
            f" {total:.2g}; normalize over the last axis"
        )
    return float(weights.gather(-1, best[:, None]).nan_to_num(0.0).min())
