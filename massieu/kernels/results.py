"""Results of kernels, and the coefficients of their backward pass."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["Best", "Found", "Gradients", "Slope"]


class Best(NamedTuple):
    """The highest scores of every row, best first, and their atoms, each ``(batch, groups, queries, top)``.

    Of equal scores the earlier atom comes first. Scores are float64; where a row has fewer atoms they are minus
    infinity, and the atom is -1.
    """

    score: Tensor
    atom: Tensor


class Found(NamedTuple):
    """Output ``(*batch, *groups, queries, value_dim)``, the fields of ``RowStatistics`` in order, and the moments.

    The output has the axes of the query, often in its order in memory; statistics have one axis for all of the batch
    and one for all groups. The backward pass starts from the moments, ``(2 or 3, batch, groups, queries)``: the
    largest score in base 2, the sum of :math:`2^u` with u the base-2 scores minus it, and with statistics
    :math:`E_p[u]`. A row without atoms has nan.
    """

    output: Tensor | None
    statistics: tuple[Tensor | None, ...]
    moments: Tensor
    best: Best | None = None


class Slope(NamedTuple):
    r"""Gradient of a loss in the scores, as coefficients per row, each ``(batch, groups, queries)``.

    .. math:: ds_j = p_j (g \cdot (v_j - o) + constant + linear\, c_j + quadratic\, c_j^2 + weight\, p_j),
              \qquad c_j = s_j - E[s]

    with g the gradient in the output o.
    """

    constant: Tensor | None
    linear: Tensor | None
    quadratic: Tensor | None
    weight: Tensor | None


class Gradients(NamedTuple):
    """Gradients in the tensors of a call, of their shapes."""

    query: Tensor
    key: Tensor
    value: Tensor | None
    log_weight: Tensor | None
