"""The Boltzmann operator of Kajitsuka and Sato: the mean score of a row, a derivative of its log normalizer."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from massieu.checks import UserError, check_count, check_floating
from massieu.statistics import row_statistics
from massieu.universal.multisets import ROWS, multisets

__all__ = ["boltz", "boltz_bound", "boltz_gap", "theorem_spacing"]


def boltz(scores: Tensor) -> Tensor:
    r"""Return the mean of scores under their own softmax.

    .. math:: \mathrm{boltz}(a) = \sum_j a_j \, \mathrm{softmax}(a)_j = \log Z(a) - H(a)
              = \left. \frac{d}{d\beta} \log Z(\beta a) \right|_{\beta = 1}

    Args:
        scores: :math:`a`, shape ``(..., atoms)``.

    Returns:
        Shape ``(...)``.

    Source:
        Kajitsuka and Sato 2023.

    Example:
        >>> boltz(torch.tensor([0.0, 1.0], dtype=torch.float64))
        tensor(0.7311, dtype=torch.float64)
    """
    check_floating(scores, "scores")
    if scores.dim() == 0 or scores.shape[-1] == 0:
        raise UserError(f"scores must have shape (..., atoms), got {tuple(scores.shape)}; pass a row of numbers")
    one = torch.ones(*scores.shape[:-1], 1, 1, dtype=scores.dtype, device=scores.device)
    return row_statistics(one, scores[..., None]).score_mean[..., 0]


def theorem_spacing(length: int) -> float:
    r"""Return the least distance between scores in the separation lemma, :math:`2 \log T + 3`.

    Example:
        >>> round(theorem_spacing(3), 4)
        5.1972
    """
    return 2 * math.log(check_count(length, "length")) + 3


def boltz_bound(length: int, largest: float) -> float:
    r"""Return the bound of the separation lemma, :math:`(\log T)^2 e^{-2 r_{\max}}`, for scores up to :math:`r_{\max}`.

    Example:
        >>> f"{boltz_bound(2, 3 * theorem_spacing(2)):.1e}"
        '1.8e-12'
    """
    return math.log(check_count(length, "length")) ** 2 * math.exp(-2 * largest)


def boltz_gap(vocabulary: int, length: int, *, limit: int = ROWS) -> float:
    """Return the least distance of ``boltz`` between two sets of scores at the spacing of the theorem, in float64.

    Scores are the multiples of :func:`theorem_spacing`, one to ``vocabulary``, without repetition in a set. The gap of
    a head of the theorem is smaller: its scores grow with the query. More than ``limit`` sets raise an error.

    Example:
        >>> f"{boltz_gap(3, 2):.1e} {boltz_gap(5, 3):.1e} {boltz_gap(9, 3):.1e}"
        '5.3e-02 2.6e-06 0.0e+00'
    """
    scores = theorem_spacing(length) * (1.0 + multisets(vocabulary, length, duplicates=False, limit=limit).double())
    if len(scores) < 2:
        raise UserError(f"there must be two sets of {length} out of {vocabulary} tokens, got {len(scores)}")
    return float(boltz(scores).sort().values.diff().min())
