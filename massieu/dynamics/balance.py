"""Doubly stochastic attention: log weights with which every key receives the same attention."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from massieu.checks import check_count, check_number
from massieu.dynamics.maps import check_cloud
from massieu.measures.measure import common_batch
from massieu.statistics import row_statistics

__all__ = ["Balance", "balance"]


class Balance(NamedTuple):
    """Log weights of keys, and the outcome of the search for them.

    Attributes:
        log_weight: of every key, shape ``(..., 1, keys)``, as :func:`massieu.attend` takes it.
        residual: largest relative error of the attention that a key receives, shape ``(...)``.
        steps: updates done.
        converged: the residual is below the tolerance everywhere.
        message: the outcome, in a sentence.
    """

    log_weight: Tensor
    residual: Tensor
    steps: int
    converged: bool
    message: str


def balance(
    query: Tensor, key: Tensor, *, scale: float = 1.0, tolerance: float | None = None, max_steps: int = 1000
) -> Balance:
    r"""Find the log weights of keys with which softmax attention is doubly stochastic, by Sinkhorn's algorithm.

    .. math:: p_{ij} = \frac{h_j e^{\beta q_i \cdot k_j}}{Z(q_i)}, \qquad \sum_i p_{ij} = \frac{n}{m}
              \quad \text{for every key } j

    Sinkhorn attention is thus softmax attention with an intrinsic measure :math:`h` that is found from all queries.
    Each step sets :math:`\log h_j = \log\frac{n}{m} - \log \sum_i e^{\beta q_i \cdot k_j} / Z(q_i)`; no matrix of
    queries by keys is held. Derivatives pass through the steps.

    Args:
        query: :math:`q`, shape ``(..., n, dim)``.
        key: :math:`k`, shape ``(..., m, dim)``.
        scale: :math:`\beta`.
        tolerance: bound of the residual; by default the square root of the rounding of the dtype.
        max_steps: updates at most; 0 leaves softmax attention.

    Source:
        Sander et al. 2022, "Sinkformers: Transformers with doubly stochastic attention", which take a few steps.

    Example:
        >>> x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
        >>> found = balance(x, x)
        >>> received = massieu.attend(x, x, torch.eye(5), found.log_weight, scale=1.0).output.sum(0)
        >>> found.converged, bool((received - 1).abs().max() < 1e-3)
        (True, True)
    """
    check_cloud(query, "query", least=1)
    check_cloud(key, "key", least=1)
    scale, max_steps = check_number(scale, "scale"), check_count(max_steps, "max_steps", least=0)
    rounding = math.sqrt(torch.finfo(query.dtype).eps)
    tolerance = rounding if tolerance is None else check_number(tolerance, "tolerance", least=0.0)
    share = math.log(query.shape[-2] / key.shape[-2])
    batch = common_batch(tuple(query.shape[:-2]), tuple(key.shape[:-2]))
    log_weight = key.new_zeros(*batch, 1, key.shape[-2])
    for steps in range(max_steps + 1):
        rows = row_statistics(query, key, log_weight, scale=scale).log_normalizer
        received = row_statistics(key, query, -rows[..., None, :], scale=scale).log_normalizer
        found = (share - received)[..., None, :]
        residual = torch.expm1(log_weight.detach() - found.detach()).abs().amax((-2, -1))
        converged = bool((residual <= tolerance).all())
        if converged or steps == max_steps:
            break
        log_weight = found
    outcome = "converged" if converged else "stopped at max_steps"
    message = f"{outcome} after {steps} steps; a key receives its share to {float(residual.max()):.2g}"
    return Balance(log_weight, residual, steps, converged, message)
