"""Prediction of words from their context: the softmax over a vocabulary as an exponential family."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize as to_sphere

from massieu.checks import UserError, check_floating, check_shape
from massieu.contrast.reductions import Reduction, reduce, widened
from massieu.statistics import row_statistics

__all__ = ["skip_gram"]


def skip_gram(
    context: Tensor,
    word_vectors: Tensor,
    targets: Tensor,
    log_weight: Tensor | None = None,
    *,
    normalize: bool = False,
    reduction: Reduction = "mean",
) -> Tensor:
    r"""Softmax loss of word2vec over the whole vocabulary, with memory linear in it.

    .. math:: L_i = \log \sum_w h_w e^{c_i \cdot u_w} - c_i \cdot u_{w_i}, \qquad
              \nabla_{c} L_i = \mathrm{attn}(c_i) - u_{w_i}

    The gradient is the attention output over the words minus the word that occurred.

    Args:
        context: :math:`c`, shape ``(..., contexts, dim)``.
        word_vectors: :math:`u`, shape ``(words, dim)``.
        targets: :math:`w_i`, int64, shape ``(..., contexts)``.
        log_weight: :math:`\log h`, such as log counts of the words, broadcasting to ``(..., contexts, words)``; the
            density of the word is taken against it.
        normalize: project contexts and words on the unit sphere first.
        reduction: "mean", "sum" or "none" for shape ``(..., contexts)``.

    Source:
        Mikolov et al. 2013, eq. 2.

    Example:
        >>> skip_gram(torch.zeros(2, 3), torch.eye(5)[:, :3], torch.tensor([0, 4]))  # log 5
        tensor(1.6094)
    """
    for tensor, name in ((context, "context"), (word_vectors, "word_vectors")):
        check_floating(tensor, name)
    check_shape(context, "context", "...", "contexts", "dim")
    check_shape(word_vectors, "word_vectors", "words", context.shape[-1])
    if not isinstance(targets, Tensor) or targets.dtype not in (torch.int64, torch.int32):
        got = targets.dtype if isinstance(targets, Tensor) else type(targets).__name__
        raise UserError(f"targets must be a tensor of whole numbers, got {got}; convert it with .long()")
    words = word_vectors.shape[0]
    check_shape(targets, "targets", *context.shape[:-1])
    if targets.numel() and not bool(((targets >= 0) & (targets < words)).all()):
        raise UserError(
            f"targets must lie between 0 and {words - 1}, got {targets.min()} to {targets.max()};"
            " drop padding before the loss"
        )
    context, word_vectors = widened(context, word_vectors)
    if normalize:
        context, word_vectors = to_sphere(context, dim=-1), to_sphere(word_vectors, dim=-1)
    log_normalizer = row_statistics(context, word_vectors, log_weight).log_normalizer
    return reduce(log_normalizer - torch.linalg.vecdot(context, word_vectors[targets]), reduction)
