"""Log normalizers over all atoms but one's own, with memory linear in the batch."""

from __future__ import annotations

import torch
from torch import Tensor

from massieu.statistics import row_statistics

__all__ = ["log_normalizer", "log_normalizer_of_others"]


def log_normalizer(natural: Tensor, support: Tensor, log_weight: Tensor | None = None, causal: bool = False) -> Tensor:
    r"""Return :math:`\log \sum_j w_j e^{x_j \cdot \eta}`, ``(..., queries)``; minus infinity without atoms."""
    found = row_statistics(natural, support, log_weight, causal=causal).log_normalizer
    if log_weight is None and support.shape[-2]:
        return found
    # Rows without atoms are nan there, and so are rows with nan among their inputs: only the first become -inf.
    sound = torch.isfinite(natural).all() & torch.isfinite(support).all()
    return torch.where(found.isnan() & sound, -torch.inf, found)


def log_normalizer_of_others(natural: Tensor, support: Tensor, log_weight: Tensor | None = None) -> Tensor:
    r"""Return the log normalizer of row i over all atoms but atom i, by tiles.

    .. math:: G_{-i}(\eta_i) = \log \sum_{j \ne i} w_{ij} e^{x_j \cdot \eta_i}

    Atom i often outweighs all others, so that subtracting it from the finished sum would leave rounding. The atoms
    before it and those after it are the two causal halves of the matrix, the second one read backwards: together they
    cost as much as the whole.

    Args:
        natural: :math:`\eta`, shape ``(..., atoms, dim)``.
        support: :math:`x`, the same shape.
        log_weight: :math:`\log w`, broadcasting to ``(..., atoms, atoms)``; minus infinity means absent.

    Returns:
        Shape ``(..., atoms)``; minus infinity where no atom is left.
    """
    before = _before(natural, support, log_weight)
    if log_weight is not None:
        axes = [axis for axis in (-2, -1) if -axis <= log_weight.dim() and log_weight.shape[axis] > 1]
        log_weight = log_weight.flip(axes)
    after = _before(natural.flip(-2), support.flip(-2), log_weight).flip(-1)
    return torch.logaddexp(before, after)


def _before(natural: Tensor, support: Tensor, log_weight: Tensor | None) -> Tensor:
    """Return the log normalizer over the atoms before one's own, minus infinity in the first row."""
    none = natural.new_full((*natural.shape[:-2], min(1, natural.shape[-2])), -torch.inf)
    if natural.shape[-2] < 2:
        return none
    if log_weight is not None:
        log_weight = log_weight.reshape((1,) * (2 - log_weight.dim()) + tuple(log_weight.shape))
        rows = slice(1, None) if log_weight.shape[-2] > 1 else slice(None)
        atoms = slice(None, -1) if log_weight.shape[-1] > 1 else slice(None)
        log_weight = log_weight[..., rows, atoms]
    rest = log_normalizer(natural[..., 1:, :], support[..., :-1, :], log_weight, causal=True)
    return torch.cat([none, rest], -1)
