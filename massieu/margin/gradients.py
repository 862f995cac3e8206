"""Gradients and loss gaps of token selection, held as logarithms so that large weights do not make them zero."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from massieu.margin.problem import TokenSelection

__all__ = ["LogGap", "LogGradient", "log_gap", "log_gradient", "misalignment"]

NEAR = 1e-5
"""Mass off the reference token below which a loss gap is the derivative half-way; above, a difference of losses."""


@dataclass(frozen=True)
class LogGradient:
    r"""A gradient :math:`e^{\sigma} G`, whose direction survives where the gradient itself underflows.

    Attributes:
        matrix: :math:`G`, shape ``(dim, query_dim)``, of moderate size; zero where the objective is flat.
        log_scale: :math:`\sigma`.
    """

    matrix: Tensor
    log_scale: float

    @property
    def log_norm(self) -> float:
        """Logarithm of the gradient's Frobenius norm."""
        norm = float(self.matrix.norm())
        return math.log(norm) + self.log_scale if norm > 0 else -math.inf

    def dense(self) -> Tensor:
        """The gradient itself; zero where it underflows."""
        return self.matrix * math.exp(min(self.log_scale, 700.0))


@dataclass(frozen=True)
class LogGap:
    r"""A difference of losses :math:`\pm e^{\lambda}`: its sign (0 if there is none) and its logarithm."""

    sign: int
    log: float

    @property
    def value(self) -> float:
        """The difference itself; zero where it underflows."""
        return self.sign * math.exp(min(self.log, 700.0))


def log_gradient(problem: TokenSelection, weights: Tensor) -> LogGradient:
    r"""Gradient of the objective, computed from log attention.

    .. math:: \nabla L = -\frac1n \sum_{it} c_{it}\, x_{it} z_i^\top, \qquad
        c_{it} = \sum_\tau e^{\log s_{it} + \log s_{i\tau}} (g_{it} - g_{i\tau})

    with :math:`g_{it} = -\partial\ell_i / \partial s_{it}`: scores times :math:`|\ell'|` for a linear head, else the
    derivative of the head at the attention output, by autograd. With targets, c = p - s. Coefficients are taken
    relative to the token of highest logit and share one factor :math:`e^\sigma`, so that only the spread between
    sequences can underflow. Two things are beyond this: a head that is flat at the attention output (a dead ReLU) has
    no direction to keep; and where targets share their mass among several tokens, p - s is lost once it falls below
    the rounding of p.

    Args:
        problem: tokens, queries and the loss.
        weights: ``(dim, query_dim)``, float64.

    Source:
        The softmax derivative written in pairs, which is antisymmetric.

    Example:
        >>> problem = massieu.margin.TokenSelection(
        ...     torch.eye(2)[None], torch.tensor([[1.0]]), scores=torch.tensor([[1.0, 0.0]]), loss="linear"
        ... )
        >>> far = log_gradient(problem, torch.tensor([[3e4], [0.0]], dtype=torch.float64))
        >>> far.log_scale, far.matrix.flatten(), far.dense().flatten()
        (-30000.0, tensor([-1.,  1.], dtype=torch.float64), tensor([-0., 0.], dtype=torch.float64))
    """
    return Landscape(problem).gradient(weights)


def log_gap(problem: TokenSelection, weights: Tensor, selection: Tensor | None = None) -> LogGap:
    r"""By how much the objective exceeds what it would be with attention at rest on the selection.

    .. math:: L(W) - \frac1n \sum_i \ell_i(e_{\alpha_i})
        \qquad\text{or, with targets,}\qquad \frac1n \sum_i \mathrm{KL}(p_i \,\|\, s_i)

    Args:
        problem: tokens, queries and the loss.
        weights: ``(dim, query_dim)``, float64.
        selection: :math:`\alpha`, shape ``(sequences,)``; the tokens of highest logit if omitted. Without effect on
            targets, whose gap is the one to their own entropy.

    Example:
        >>> problem = massieu.margin.TokenSelection(
        ...     torch.eye(2)[None], torch.tensor([[1.0]]), scores=torch.tensor([[1.0, 0.0]]), loss="linear"
        ... )
        >>> log_gap(problem, torch.tensor([[3e4], [0.0]], dtype=torch.float64))
        LogGap(sign=1, log=-30000.0)
    """
    return Landscape(problem).gap(weights, selection)


def misalignment(first: Tensor, second: Tensor) -> float:
    r"""One minus the cosine of two matrices, without its cancellation: :math:`\|u - v\|^2 / 2` of the unit matrices.

    Example:
        >>> misalignment(torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 0.0]]))
        0.0
        >>> math.isnan(misalignment(torch.zeros(2, 2), torch.eye(2)))
        True
    """
    first, second = first.double(), second.double()
    lengths = first.norm(), second.norm()
    if not (lengths[0] > 0 and lengths[1] > 0):
        return math.nan
    return float((first / lengths[0] - second / lengths[1]).square().sum()) / 2


class Landscape:
    """A problem prepared for many gradients: what does not depend on the weights is computed once."""

    def __init__(self, problem: TokenSelection) -> None:
        self.problem = problem
        self.scaled_queries = problem.queries / -len(problem.queries)
        self.absent = ~problem.present if not problem.present.all() else None
        # Scores that are tied up to rounding are equal: at large weights a difference of 1e-17 would drive the descent.
        best = problem.scores.masked_fill(~problem.best, -torch.inf).amax(-1, keepdim=True)
        self.scores = torch.where(problem.best, best, problem.scores)
        if problem.targets is not None:
            self.targets = problem.targets
            self.log_targets = self.targets.log()
            self.anchor = self.targets.argmax(-1, keepdim=True)

    def log_attention(self, weights: Tensor) -> Tensor:
        """Logarithms of the attention maps, shape ``(sequences, length)``."""
        logits = torch.bmm(self.problem.tokens, (self.problem.queries @ weights.mT)[..., None])[..., 0]
        if self.absent is not None:
            logits.masked_fill_(self.absent, -torch.inf)
        return logits.log_softmax(-1)

    def gradient(self, weights: Tensor) -> LogGradient:
        """As :func:`log_gradient`."""
        log_attention = self.log_attention(weights)
        if self.problem.targets is not None:
            sign, log_size = self._excess_of_targets(log_attention)
            shift = _finite(log_size.amax())
            coefficients = sign * torch.exp(log_size - shift)
            coefficients.scatter_add_(1, self.anchor, -coefficients.sum(-1, keepdim=True))
        else:
            rise = self._slopes(log_attention.exp())
            rise = rise - rise.gather(1, log_attention.argmax(-1, keepdim=True))
            log_size = log_attention + rise.abs().log_()
            # A sequence without slope has only logarithms of zero, from which nothing infinite may be subtracted.
            largest = log_size.amax(-1, keepdim=True).clamp_(min=-1e300)
            shift = _finite(largest.amax())
            parts = torch.exp(log_size - largest).mul_(rise.sign_())
            mean = parts.sum(-1, keepdim=True)
            coefficients = parts.sub_(log_attention.exp().mul_(mean)).mul_((largest - shift).exp_())
        pulled = torch.bmm(coefficients[:, None], self.problem.tokens)[:, 0]
        return LogGradient(pulled.mT @ self.scaled_queries, shift)

    def gap(self, weights: Tensor, selection: Tensor | None = None) -> LogGap:
        """As :func:`log_gap`."""
        log_attention = self.log_attention(weights)
        if self.problem.targets is not None:
            sign, log_size = self._divergence(log_attention)
        else:
            if selection is None:
                selection = log_attention.argmax(-1)
            sign, log_size = self._secant(log_attention, selection[:, None])
        shift = _finite(log_size.amax())
        total = float((sign * torch.exp(log_size - shift)).mean())
        if total == 0:
            return LogGap(0, -math.inf)
        return LogGap(1 if total > 0 else -1, math.log(abs(total)) + shift)

    def _slopes(self, attention: Tensor) -> Tensor:
        """Minus the derivative of every sequence's loss by its attention, up to a constant for each sequence."""
        problem = self.problem
        if not problem.linear:
            with torch.enable_grad():
                attention = attention.detach().requires_grad_()
                (slopes,) = torch.autograd.grad(problem.losses(attention).sum(), attention)
            return -slopes
        if problem.loss == "linear":
            return self.scores
        score = (attention * self.scores).sum(-1, keepdim=True)
        return self.scores * (torch.sigmoid(-score) if problem.loss == "logistic" else torch.exp(-score))

    def _secant(self, log_attention: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Sign and logarithm of each sequence's loss above that of the chosen token, shape ``(sequences,)``."""
        attention = log_attention.exp()
        alone = torch.zeros_like(attention).scatter_(1, chosen, 1.0)
        rise = self._slopes((attention + alone) / 2)
        rise = rise.gather(1, chosen) - rise
        log_size = log_attention + rise.abs().log_()
        largest = log_size.amax(-1, keepdim=True).clamp_(min=-1e300)
        near = (rise.sign_() * torch.exp(log_size - largest)).sum(-1)
        sign, log_size = near.sign(), near.abs().log_() + largest[:, 0]
        far = attention.scatter(1, chosen, 0.0).sum(-1) > NEAR
        if far.any():
            with torch.no_grad():
                difference = self.problem.losses(attention) - self.problem.losses(alone)
            sign = torch.where(far, difference.sign(), sign)
            log_size = torch.where(far, difference.abs().log(), log_size)
        return sign, log_size

    def _excess_of_targets(self, log_attention: Tensor) -> tuple[Tensor, Tensor]:
        """Sign and logarithm of p - s, with nothing at each sequence's anchor, which takes what makes the sum zero."""
        inside = self.targets * torch.expm1(log_attention - self.log_targets)
        wanted = self.targets > 0
        sign = torch.where(wanted, -inside.sign(), -1.0)
        log_size = torch.where(wanted, inside.abs().log(), log_attention)
        return sign, log_size.scatter(1, self.anchor, -torch.inf)

    def _divergence(self, log_attention: Tensor) -> tuple[Tensor, Tensor]:
        """Sign and logarithm of KL(p | s): that within the tokens that have mass, plus minus the log of their share."""
        wanted = self.targets > 0
        inside = log_attention.masked_fill(~wanted, -torch.inf).logsumexp(-1, keepdim=True)
        outside = log_attention.masked_fill(wanted, -torch.inf).logsumexp(-1)
        ratio = outside - inside[:, 0]
        lost = torch.where(ratio < -40.0, ratio, torch.nn.functional.softplus(ratio).log())
        parts = torch.where(wanted, self.targets * (self.log_targets - log_attention + inside), 0.0)
        log_size = torch.logaddexp(parts.sum(-1).clamp(min=0.0).log(), lost)
        return torch.ones_like(log_size), log_size


def _finite(largest: Tensor) -> float:
    """A shift, none where there is nothing to shift."""
    shift = float(largest)
    return shift if -1e300 < shift < math.inf else 0.0
