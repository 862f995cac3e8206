"""The Boltzmann operator of Kajitsuka and Sato: the mean score of a row, a derivative of its log normalizer."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from massieu.checks import check_count
from massieu.statistics import row_statistics
from massieu.universal.multisets import ROWS, multisets

__all__ = ["boltz", "boltz_bound", "boltz_gap", "theorem_spacing"]


def boltz(scores: Tensor) -> Tensor:
    r"""The mean of scores under their own softmax.

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
    if not isinstance(scores, Tensor) or not scores.is_floating_point() or scores.dim() == 0 or scores.shape[-1] == 0:
        got = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise ValueError(f"scores must be floating with shape (..., atoms), got {got}; pass a row of numbers")
    one = torch.ones(*scores.shape[:-1], 1, 1, dtype=scores.dtype, device=scores.device)
    return row_statistics(one, scores[..., None]).score_mean[..., 0]


def theorem_spacing(length: int) -> float:
    r"""The least distance between scores that the separation lemma asks for, :math:`2 \log T + 3`.

    Example:
        >>> round(theorem_spacing(3), 4)
        5.1972
    """
    check_count(length, "length", remedy="it is the number of tokens of a sequence")
    return 2 * math.log(length) + 3


def boltz_bound(length: int, largest: float) -> float:
    r"""What the separation lemma promises, :math:`(\log T)^2 e^{-2 r_{\max}}`, for scores up to :math:`r_{\max}`.

    Example:
        >>> f"{boltz_bound(2, 3 * theorem_spacing(2)):.1e}"
        '1.8e-12'
    """
    check_count(length, "length", remedy="it is the number of tokens of a sequence")
    return math.log(length) ** 2 * math.exp(-2 * largest)


def boltz_gap(vocabulary: int, length: int, *, limit: int = ROWS) -> float:
    """The least distance of ``boltz`` between two sets of scores at the spacing of the theorem, in float64.

    Scores are the multiples of :func:`theorem_spacing`, one to ``vocabulary``, none twice in a set. A head of the
    theorem is worse off: its scores grow with the token that asks. More than ``limit`` sets are refused.

    Example:
        >>> f"{boltz_gap(3, 2):.1e} {boltz_gap(5, 3):.1e} {boltz_gap(9, 3):.1e}"
        '5.3e-02 2.6e-06 0.0e+00'
    """
    scores = theorem_spacing(length) * (1.0 + multisets(vocabulary, length, duplicates=False, limit=limit).double())
    if len(scores) < 2:
        raise ValueError(
            f"there must be two sets to compare, got {len(scores)} of {length} out of {vocabulary} tokens; take more"
            " tokens"
        )
    return float(boltz(scores).sort().values.diff().min())
