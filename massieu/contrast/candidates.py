"""Losses on the choice of a partner among candidates: InfoNCE, N-pair and NT-Xent; the negatives are the measure."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import normalize as to_sphere

from massieu.checks import UserError, check_count, check_floating, check_number, check_shape
from massieu.contrast.others import log_normalizer, log_normalizer_of_others
from massieu.contrast.reductions import Reduction, reduce, widened
from massieu.measures import Measure

__all__ = ["info_nce", "mutual_information_bound", "n_pair", "nt_xent"]


def info_nce(
    query: Tensor,
    positive: Tensor,
    negatives: Tensor | Measure | None = None,
    *,
    temperature: float | Tensor = 1.0,
    log_weight: Tensor | None = None,
    symmetric: bool = False,
    normalize: bool = False,
    reduction: Reduction = "mean",
) -> Tensor:
    r"""InfoNCE: the query is the natural parameter, the candidates are the measure, the loss is minus a log density.

    .. math:: L_i = \log Z(q_i / t) - \frac{q_i \cdot k_i}{t}, \qquad Z(\eta) = \sum_j w_j e^{k_j \cdot \eta}

    At its minimum :math:`q \cdot k / t` is the log density ratio of partners to negatives plus a function of the query,
    so that the conditional law of the partner is the negatives' law, tilted: the negatives are the intrinsic measure.
    Nothing of size queries x candidates is kept beyond one tile, forward or backward. The loss is computed from the
    candidates other than the partner, and keeps its digits where it is tiny.

    Args:
        query: :math:`q`, shape ``(..., pairs, dim)``.
        positive: :math:`k`, the partners, the same shape.
        negatives: None: the partners of the other rows. Shape ``(..., atoms, dim)``: candidates shared by all queries.
            Shape ``(..., pairs, atoms, dim)``: candidates of each query. A :class:`~massieu.Measure`: its own
            normalizer is Z, and the partner is not counted again; ``Sphere(dim)`` is the limit of uniform negatives.
        temperature: :math:`t`, a positive number or a tensor that holds one.
        log_weight: :math:`\log w`. In a batch it broadcasts to ``(..., pairs, pairs)`` and weighs the partner too; with
            negatives it weighs these, ``(..., pairs, atoms)``, and the partner has weight one. Minus infinity means
            absent. The density is taken against the weighted measure, so the partner's weight stands in Z alone.
        symmetric: the mean of both directions, query to positive and back, as for images and their captions.
        normalize: project query, positive and negatives on the unit sphere first, where scores are cosines.
        reduction: "mean", "sum" or "none" for shape ``(..., pairs)``.

    Source:
        van den Oord et al. 2018, eq. 4; "A Probabilistic Interpretation of Transformers", section 2.

    Example:
        >>> info_nce(torch.eye(4), torch.eye(4), temperature=0.1, reduction="none")
        tensor([0.0001, 0.0001, 0.0001, 0.0001])
    """
    _check_pairs(query, positive, ("query", "positive"))
    _check_temperature(temperature)
    if symmetric and (negatives is not None or log_weight is not None):
        given = "negatives" if negatives is not None else "log_weight"
        raise UserError(
            f"symmetric must be False with negatives or log_weight, got {given}; call once per direction and average"
        )
    if isinstance(negatives, Measure) and log_weight is not None:
        raise UserError("log_weight must be None when negatives are a Measure, got one; give the measure its weights")
    query, positive = widened(query, positive)
    if normalize:
        query, positive = to_sphere(query, dim=-1), to_sphere(positive, dim=-1)
        if isinstance(negatives, Tensor):
            negatives = to_sphere(negatives, dim=-1)
    natural = query / temperature
    score = torch.linalg.vecdot(natural, positive)
    if isinstance(negatives, Measure):
        return reduce(negatives.log_normalizer(natural) - score, reduction)
    own = torch.zeros_like(score)
    if log_weight is not None:
        log_weight = _as_log_weight(log_weight, natural, negatives)
    if negatives is None:
        rest = log_normalizer_of_others(natural, positive, log_weight)
        if log_weight is not None:
            own = log_weight.expand(*score.shape, score.shape[-1]).diagonal(dim1=-2, dim2=-1).to(own)
    else:
        rest = _over_negatives(natural, negatives, log_weight)
    loss = torch.logaddexp(rest - score, own)
    if symmetric:
        back = log_normalizer_of_others(positive / temperature, query)
        loss = (loss + torch.logaddexp(back - score, own)) / 2
    return reduce(loss, reduction)


def n_pair(anchor: Tensor, positive: Tensor, *, normalize: bool = False, reduction: Reduction = "mean") -> Tensor:
    r"""Multi-class N-pair loss: :func:`info_nce` in a batch, at temperature one.

    .. math:: L_i = \log \Bigl( 1 + \sum_{j \ne i} e^{a_i \cdot k_j - a_i \cdot k_i} \Bigr)

    Args:
        anchor: :math:`a`, shape ``(..., pairs, dim)``.
        positive: :math:`k`, the same shape.
        normalize: project both on the unit sphere first.
        reduction: "mean", "sum" or "none" for shape ``(..., pairs)``.

    Source:
        Sohn 2016, eq. 6, without the penalty on the norms of the embeddings.

    Example:
        >>> n_pair(torch.zeros(3, 2), torch.eye(3)[:, :2])  # log 3
        tensor(1.0986)
    """
    _check_pairs(anchor, positive, ("anchor", "positive"))
    return info_nce(anchor, positive, normalize=normalize, reduction=reduction)


def nt_xent(
    first: Tensor,
    second: Tensor,
    *,
    temperature: float | Tensor,
    normalize: bool = True,
    reduction: Reduction = "mean",
) -> Tensor:
    r"""NT-Xent: the loss on finding the second view of an image among all other views of the batch.

    .. math:: L_i = \log \sum_{j \ne i} e^{z_i \cdot z_j / t} - \frac{z_i \cdot z_{i'}}{t}

    over the :math:`2B` views z, with i' the other view of i. A view is absent from its own measure; no mask is made.

    Args:
        first: one view of each image, shape ``(..., pairs, dim)``.
        second: the other view, the same shape.
        temperature: :math:`t`, a positive number or a tensor that holds one.
        normalize: project on the unit sphere first, as in the source.
        reduction: "mean", "sum" or "none" for shape ``(2, ..., pairs)``, first views and second views.

    Source:
        Chen et al. 2020, eq. 1.

    Example:
        >>> nt_xent(torch.eye(2), torch.eye(2), temperature=0.5)
        tensor(0.2395)
    """
    _check_pairs(first, second, ("first", "second"))
    _check_temperature(temperature)
    views = torch.stack(widened(first, second))
    if normalize:
        views = to_sphere(views, dim=-1)
    partners, natural = views.flip(0), views / temperature
    rest = torch.logaddexp(log_normalizer_of_others(natural, views), log_normalizer_of_others(natural, partners))
    gap = rest - torch.linalg.vecdot(natural, partners)
    return reduce(torch.logaddexp(gap, torch.zeros_like(gap)), reduction)


def mutual_information_bound(loss: Tensor | float, num_candidates: int) -> Tensor:
    r"""Return the lower bound on the mutual information of queries and partners by an InfoNCE loss.

    .. math:: I(q; k) \ge \log K - L

    It holds for the expected loss, with :math:`K - 1` independent negatives of the law of the partners, and never
    exceeds :math:`\log K`.

    Args:
        loss: :math:`L` in nats, any shape.
        num_candidates: :math:`K`, the partner and its negatives; in a batch the number of pairs.

    Source:
        van den Oord et al. 2018, appendix A.1.

    Example:
        >>> mutual_information_bound(0.5, num_candidates=256)
        tensor(5.0452)
    """
    return math.log(check_count(num_candidates, "num_candidates")) - torch.as_tensor(loss)


def _check_pairs(first: Tensor, second: Tensor, names: tuple[str, str]) -> None:
    for tensor, name in zip((first, second), names, strict=True):
        check_floating(tensor, name)
        check_shape(tensor, name, "...", "pairs", "dim")
    if first.shape != second.shape:
        raise UserError(
            f"{names[0]} and {names[1]} must have the same shape (..., pairs, dim), got {tuple(first.shape)}"
            f" and {tuple(second.shape)}; give every row its partner"
        )


def _check_temperature(temperature: float | Tensor) -> None:
    """Raise unless the temperature is one positive number, learned or not."""
    if isinstance(temperature, Tensor) and temperature.numel() == 1:
        temperature = float(temperature.detach())
    check_number(temperature, "temperature", above=0)


def _as_log_weight(log_weight: Tensor, natural: Tensor, negatives: Tensor | None) -> Tensor:
    """Return log weights of the candidates; a boolean mask is True where one is present."""
    if getattr(log_weight, "dtype", None) == torch.bool:
        log_weight = natural.new_zeros(log_weight.shape).masked_fill(~log_weight, -torch.inf)
    check_floating(log_weight, "log_weight", "for a mask of zeros and ones pass mask.bool()")
    atoms = natural.shape[-2] if not isinstance(negatives, Tensor) or negatives.dim() < 2 else negatives.shape[-2]
    full = (*natural.shape[:-1], atoms)
    sizes = (1,) * (len(full) - log_weight.dim()) + tuple(log_weight.shape)
    if len(sizes) > len(full) or any(own not in (1, whole) for own, whole in zip(sizes, full, strict=False)):
        raise UserError(
            f"log_weight must broadcast to {full} = (..., pairs, candidates), got {tuple(log_weight.shape)};"
            " insert axes of size 1 where it should broadcast"
        )
    return log_weight


def _over_negatives(natural: Tensor, negatives: Tensor, log_weight: Tensor | None) -> Tensor:
    """Return the log normalizer over negatives that are shared by all queries, or over those of each query."""
    check_floating(negatives, "negatives")
    check_shape(negatives, "negatives", "...", "atoms", "dim")
    lead, dim = tuple(natural.shape[:-2]), natural.shape[-1]
    if negatives.shape[-1] != dim or tuple(negatives.shape[:-2]) not in (lead, tuple(natural.shape[:-1])):
        shared, own = (", ".join(map(str, (*axes, "atoms", dim))) for axes in (lead, natural.shape[:-1]))
        raise UserError(
            f"negatives must have shape ({shared}) to be shared, or ({own}) for each query its own,"
            f" got {tuple(negatives.shape)}; check the axes"
        )
    negatives = negatives.to(natural)
    if negatives.dim() == natural.dim():
        return log_normalizer(natural, negatives, log_weight)
    if log_weight is not None:
        log_weight = log_weight.expand(*natural.shape[:-1], negatives.shape[-2]).unsqueeze(-2)
    return log_normalizer(natural.unsqueeze(-2), negatives, log_weight).squeeze(-1)
