"""Boosting: the weights of the examples as an intrinsic measure, a step as its tilt."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from massieu.checks import UserError, check_floating
from massieu.duality import natural_from_mean
from massieu.measures import Points

__all__ = ["BoostingStep", "adaboost_step"]


class BoostingStep(NamedTuple):
    r"""Result of :func:`adaboost_step`; all but the weights have shape ``(...)``.

    Attributes:
        alpha: the step :math:`\alpha`; infinite where the learner makes no error, or only errors.
        log_weight: log weights for the next step, which add up to one, ``(..., examples)``. Where alpha is infinite
            no step follows, and they are the given ones, normalized.
        log_normalizer: :math:`\log Z(\alpha) - \log Z(0)`, the factor by which the bound on the training error falls.
        converged: alpha is finite and solves :math:`E[u] = 0`.
        residual: :math:`|E[u]|` under the new weights.
        steps: Newton steps taken, zero for the closed form.
    """

    alpha: Tensor
    log_weight: Tensor
    log_normalizer: Tensor
    converged: Tensor
    residual: Tensor
    steps: Tensor

    @property
    def message(self) -> str:
        """The outcome, in a sentence."""
        found = f"{int(self.converged.sum())} of {self.converged.numel()} steps are finite and minimize log Z"
        return f"{found}; the largest residual is {float(self.residual.max()):.2g}"


def adaboost_step(margins: Tensor, log_weight: Tensor | None = None) -> BoostingStep:
    r"""Take one step of AdaBoost: the minimum of the log normalizer of the weighted examples.

    .. math:: \alpha = \arg\min_\alpha \log \sum_i w_i e^{\alpha u_i}, \qquad u_i = -t_i h(x_i), \qquad
              w_i \leftarrow \frac{w_i e^{\alpha u_i}}{Z(\alpha)}

    The examples are atoms :math:`u_i` of an intrinsic measure with weights w, and the new weights are its tilt. At the
    minimum :math:`E[u] = 0`: under the new weights the learner is worthless. Attention moves the other way, up the log
    normalizer. Where all :math:`|u_i|` are equal, as for :math:`h = \pm 1`, :math:`\alpha = \tfrac12 \log
    \frac{1 - \epsilon}{\epsilon}`; otherwise Newton steps solve for it. Gradients flow to margins and log weights.

    Args:
        margins: :math:`t_i h(x_i)`, positive where the learner is right, shape ``(..., examples)``.
        log_weight: :math:`\log w`, the same shape or broadcasting to it; equal weights if None.

    Source:
        Freund and Schapire 1997; Schapire and Singer 1999, section 3, for real-valued learners.

    Example:
        >>> step = adaboost_step(torch.tensor([1.0, 1.0, 1.0, -1.0]))
        >>> step.alpha, step.log_weight.exp()  # half of log 3; the error then weighs as much as all the rest
        (tensor(0.5493), tensor([0.1667, 0.1667, 0.1667, 0.5000]))
    """
    margins, log_weight = _checked(margins, log_weight)
    log_weight = log_weight.log_softmax(-1)
    measure = Points(-margins[..., None], log_weight[..., None, :])
    size = margins.detach().abs()
    if bool((size == size.amax()).all()) and bool(size.amax() > 0):
        right, wrong = (torch.logsumexp(log_weight.masked_fill(hidden, -torch.inf), -1) for hidden in _sides(margins))
        alpha = (right - wrong) / (2 * size[..., 0])
        steps = torch.zeros_like(alpha, dtype=torch.int64)
        converged = torch.isfinite(alpha)
    else:
        found = natural_from_mean(measure, margins.new_zeros(*margins.shape[:-1], 1, 1))
        alpha, converged, steps = found.natural[..., 0, 0], found.converged[..., 0], found.steps[..., 0]
        direction = (log_weight.exp() * margins).sum(-1).sign().detach()
        endless = (found.boundary | found.outside)[..., 0] & (direction != 0)
        alpha = torch.where(endless, direction * torch.inf, alpha.to(margins.dtype))
    finite = torch.where(torch.isfinite(alpha), alpha, 0.0)
    natural = finite[..., None, None]
    fall = torch.where(torch.isfinite(alpha), measure.log_normalizer(natural)[..., 0], _limit(margins, log_weight))
    tilted = (log_weight - finite[..., None] * margins).log_softmax(-1)
    return BoostingStep(alpha, tilted, fall, converged, measure.mean(natural)[..., 0, 0].abs(), steps)


def _sides(margins: Tensor) -> tuple[Tensor, Tensor]:
    """Return a mask of the errors, and one of the other examples with a margin."""
    return margins < 0, margins > 0


def _limit(margins: Tensor, log_weight: Tensor) -> Tensor:
    """Return the limit of a log normalizer that falls without end: the log weight of examples of margin zero."""
    return torch.logsumexp(log_weight.masked_fill(margins != 0, -torch.inf), -1)


def _checked(margins: Tensor, log_weight: Tensor | None) -> tuple[Tensor, Tensor]:
    check_floating(margins, "margins")
    if margins.dim() < 1 or margins.shape[-1] == 0:
        raise UserError(
            f"margins must have shape (..., examples) with at least one example, got {tuple(margins.shape)};"
            " pass label times prediction of every example"
        )
    if not bool(torch.isfinite(margins).all()):
        raise UserError("margins must be finite, got nan or infinity; clip the predictions of the learner")
    if log_weight is None:
        return margins, torch.zeros_like(margins)
    check_floating(log_weight, "log_weight", "take the logarithm of the weights")
    try:
        log_weight = log_weight.to(margins).expand(margins.shape)
    except RuntimeError:
        raise UserError(
            f"log_weight must broadcast to {tuple(margins.shape)} = (..., examples), got {tuple(log_weight.shape)};"
            " give every example its weight"
        ) from None
    if bool((log_weight.isnan() | (log_weight == torch.inf)).any()) or bool(log_weight.isneginf().all(-1).any()):
        raise UserError(
            "log_weight must be finite or minus infinity with one finite entry in each row, got nan, infinity"
            " or no example at all; leave out examples without weight"
        )
    return margins, log_weight
