"""Neighborhood components analysis: an exponential family with distances, by its carrier, for inner products."""

from __future__ import annotations

import torch
from torch import Tensor

from massieu.checks import UserError, check_floating, check_shape
from massieu.contrast.others import log_normalizer_of_others
from massieu.contrast.reductions import Reduction, reduce, widened
from massieu.measures import Points

__all__ = ["nca", "neighbor_probabilities"]


def nca(points: Tensor, labels: Tensor, transform: Tensor | None = None, *, reduction: Reduction = "mean") -> Tensor:
    r"""Loss of neighborhood components analysis: minus the log probability of a neighbor of the own class.

    .. math:: L_i = -\log \sum_{j \ne i,\, l_j = l_i} p_{ij}, \qquad
              p_{ij} = \frac{e^{-\|A x_i - A x_j\|^2}}{\sum_{k \ne i} e^{-\|A x_i - A x_k\|^2}}

    Row i is the member of an exponential family with natural parameter :math:`2 A x_i` over the atoms :math:`A x_j`
    with the carrier :math:`h_j = e^{-\|A x_j\|^2}`, atom i absent. Both sums are log normalizers, over all others and
    over those of the class: memory is linear in the points.

    Args:
        points: :math:`x`, shape ``(points, dim)``.
        labels: :math:`l`, whole numbers, shape ``(points,)``.
        transform: :math:`A`, shape ``(out_dim, dim)``; the identity if None.
        reduction: "none" for shape ``(points,)``, where a point alone in its class has infinite loss; "mean" and "sum"
            leave such a point out, though it stays a neighbor of the others.

    Source:
        Goldberger et al. 2004, eq. 1 to 3 and the logarithmic objective after eq. 5; its first objective, the expected
        number of points classified correctly, is ``nca(..., reduction="none").neg().exp().sum()``.
        "A Probabilistic Interpretation of Transformers" has no carrier and sums over non-neighbors only.

    Example:
        >>> points, labels = torch.tensor([[0.0], [1.0], [3.0], [4.0]]), torch.tensor([0, 0, 1, 1])
        >>> nca(points, labels, reduction="none")
        tensor([0.0003, 0.0489, 0.0489, 0.0003])
    """
    mapped = _mapped(points, transform)
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.is_complex():
        got = labels.dtype if isinstance(labels, Tensor) else type(labels).__name__
        raise UserError(f"labels must be a tensor of whole numbers, got {got}; number the classes")
    check_shape(labels, "labels", points.shape[0])
    carrier = -mapped.square().sum(-1)
    total = log_normalizer_of_others(2 * mapped, mapped, carrier)
    order, sizes = labels.argsort(stable=True), labels.unique(return_counts=True)[1].tolist()
    classes = zip(mapped[order].split(sizes), carrier[order].split(sizes), strict=True)
    same = torch.cat([log_normalizer_of_others(2 * own, own, weight) for own, weight in classes])[order.argsort()]
    loss = total - same
    if reduction != "none":
        loss = loss[torch.isfinite(same) | loss.isnan()]
        if not loss.numel():
            raise UserError("labels must put two points into some class, got none; draw batches with several of each")
    return reduce(loss, reduction)


def neighbor_probabilities(points: Tensor, transform: Tensor | None = None, *, carrier: bool = True) -> Tensor:
    r"""Return the whole matrix :math:`p_{ij}` of :func:`nca`, shape ``(points, points)``, for small problems.

    Args:
        points: :math:`x`, shape ``(points, dim)``.
        transform: :math:`A`, shape ``(out_dim, dim)``; the identity if None.
        carrier: False leaves :math:`e^{-\|A x_j\|^2}` out: then atoms far from the origin attract all others.

    Example:
        >>> neighbor_probabilities(torch.tensor([[0.0], [1.0], [2.0]]))[1]
        tensor([0.5000, 0.0000, 0.5000])
    """
    mapped = _mapped(points, transform, centered=carrier)
    weight = torch.zeros_like(mapped[:, 0])
    if carrier:
        weight = weight - mapped.square().sum(-1)
    oneself = torch.eye(len(mapped), dtype=torch.bool, device=mapped.device)
    return Points(mapped, weight.expand(len(mapped), -1).masked_fill(oneself, -torch.inf)).probabilities(2 * mapped)


def _mapped(points: Tensor, transform: Tensor | None, *, centered: bool = True) -> Tensor:
    """Map points to :math:`A x`, centered: distances do not change, and large norms do not cancel."""
    check_floating(points, "points")
    if points.dim() != 2 or points.shape[0] < 2:
        raise UserError(
            f"points must have shape (points, dim) with at least two points, got {tuple(points.shape)};"
            " a point needs another one as neighbor"
        )
    if transform is not None:
        check_floating(transform, "transform")
        check_shape(transform, "transform", "out_dim", points.shape[-1])
        points, transform = widened(points, transform)
    (points,) = widened(points)
    if centered:
        points = points - points.mean(0)
    return points if transform is None else points @ transform.mT
