"""Data against noise by logistic regression: noise-contrastive estimation and negative sampling."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from torch.nn.functional import normalize as to_sphere

from massieu.checks import UserError, check_floating, check_number
from massieu.contrast.reductions import Reduction, reduce, widened

__all__ = ["nce_loss", "negative_sampling"]


def nce_loss(
    log_model: Tensor,
    log_noise: Tensor,
    model_on_noise: Tensor,
    noise_on_noise: Tensor,
    *,
    ratio: float | None = None,
) -> Tensor:
    r"""Loss of noise-contrastive estimation: classify data against noise, with the log normalizer as a parameter.

    .. math:: L = -E_{data} \log \sigma(g(x)) - \nu\, E_{noise} \log \sigma(-g(y)), \qquad
              g = \log p_{model} - \log p_{noise} - \log \nu

    The model need not be normalized: let :math:`\log p_{model} = \eta \cdot u(x) - c` with c free, and at the minimum
    :math:`c = \log Z(\eta)`. The loss is convex in :math:`(\eta, c)`.

    Args:
        log_model: :math:`\log p_{model}` of the data, shape ``(..., data)``.
        log_noise: :math:`\log p_{noise}` of the data, normalized, the same shape.
        model_on_noise: :math:`\log p_{model}` of the noise, shape ``(..., noise)``; leading axes broadcast.
        noise_on_noise: :math:`\log p_{noise}` of the noise, the same shape.
        ratio: :math:`\nu`, noise samples per datum; by default the ratio of the sizes.

    Returns:
        Means over the last axes, shape ``(...)``.

    Source:
        Gutmann and Hyvärinen 2010, eq. 8 to 10.

    Example:
        >>> zero = torch.zeros(4)  # a model that equals the noise: twice log 2
        >>> nce_loss(zero, zero, zero, zero)
        tensor(1.3863)
    """
    pairs = {"log_model": log_model, "log_noise": log_noise}
    pairs |= {"model_on_noise": model_on_noise, "noise_on_noise": noise_on_noise}
    for name, tensor in pairs.items():
        check_floating(tensor, name)
        if tensor.dim() < 1 or tensor.shape[-1] == 0:
            raise UserError(
                f"{name} must have shape (..., samples) with at least one sample, got {tuple(tensor.shape)};"
                f" for a single one pass {name}[None]"
            )
    _check_broadcast(log_model, log_noise, ("log_model", "log_noise"))
    _check_broadcast(model_on_noise, noise_on_noise, ("model_on_noise", "noise_on_noise"))
    ratio = model_on_noise.shape[-1] / log_model.shape[-1] if ratio is None else check_number(ratio, "ratio", above=0)
    log_model, log_noise, model_on_noise, noise_on_noise = widened(*pairs.values())
    data = logsigmoid(log_model - log_noise - math.log(ratio)).mean(-1)
    noise = logsigmoid(noise_on_noise - model_on_noise + math.log(ratio)).mean(-1)
    return -data - ratio * noise


def negative_sampling(
    context: Tensor, positive: Tensor, negatives: Tensor, *, normalize: bool = False, reduction: Reduction = "mean"
) -> Tensor:
    r"""Loss of skip-gram with negative sampling: classify words of the context against words of the noise.

    .. math:: L = -\log \sigma(c \cdot u) - \sum_{j=1}^k \log \sigma(-c \cdot u_j)

    At the minimum :math:`c \cdot u = \mathrm{PMI} - \log k`, while the scores of the softmax,
    :func:`massieu.contrast.skip_gram`, are log probabilities up to a constant of the context.

    Args:
        context: :math:`c`, shape ``(..., dim)``.
        positive: :math:`u`, the word that occurred, the same shape.
        negatives: :math:`u_j`, k words drawn from the noise, shape ``(..., k, dim)``.
        normalize: project all vectors on the unit sphere first.
        reduction: "mean", "sum" or "none" for shape ``(...)``.

    Source:
        Mikolov et al. 2013, eq. 4; Levy and Goldberg 2014 for the optimum.

    Example:
        >>> negative_sampling(torch.zeros(1, 2), torch.ones(1, 2), torch.ones(1, 3, 2))  # four times log 2
        tensor(2.7726)
    """
    for tensor, name in ((context, "context"), (positive, "positive"), (negatives, "negatives")):
        check_floating(tensor, name)
    if context.dim() < 1 or context.shape != positive.shape:
        raise UserError(
            f"context and positive must have the same shape (..., dim), got {tuple(context.shape)}"
            f" and {tuple(positive.shape)}; give every context its word"
        )
    if negatives.dim() != context.dim() + 1 or negatives.shape[:-2] + negatives.shape[-1:] != context.shape:
        expected = ", ".join(map(str, (*context.shape[:-1], "k", context.shape[-1])))
        raise UserError(
            f"negatives must have shape ({expected}), got {tuple(negatives.shape)}; give every context its k words"
        )
    context, positive, negatives = widened(context, positive, negatives)
    if normalize:
        context, positive, negatives = (to_sphere(x, dim=-1) for x in (context, positive, negatives))
    against = torch.einsum("...d,...kd->...k", context, negatives)
    loss = -logsigmoid(torch.linalg.vecdot(context, positive)) - logsigmoid(-against).sum(-1)
    return reduce(loss, reduction)


def _check_broadcast(first: Tensor, second: Tensor, names: tuple[str, str]) -> None:
    try:
        np.broadcast_shapes(first.shape, second.shape)
    except ValueError:
        raise UserError(
            f"{names[0]} and {names[1]} must have shapes that broadcast, got {tuple(first.shape)}"
            f" and {tuple(second.shape)}; evaluate both at the same samples"
        ) from None
