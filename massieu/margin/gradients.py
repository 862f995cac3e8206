"""Gradients and loss gaps of token selection, held as logarithms so that large weights do not make them zero."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from massieu.margin.problem import TokenSelection

__all__ = ["LogGap", "LogGradient", "log_gap", "log_gradient", "misalignment"]

NEAR = 1e-5
"""Mass off the reference token below which a head's loss gap is the derivative half-way; above, a difference."""


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
        norm = size_of(self.matrix)
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

    with :math:`g_{it} = -\partial\ell_i / \partial s_{it}`: scores times :math:`|\ell'|`, itself as a logarithm, for a
    linear head, else the derivative of the head at the attention output, by autograd. With targets, c = p - s.
    Coefficients are taken relative to the token of highest logit and share one factor :math:`e^\sigma`, so that only
    the spread between sequences can underflow. Three things are beyond this: a head that is flat at the attention
    output (a dead ReLU) has no direction to keep; the loss of a head that is not linear is itself below the smallest
    number at scores beyond 700; and where targets share their mass among several tokens, p - s is lost once it falls
    below the rounding of p.

    Args:
        problem: tokens, queries and the loss.
        weights: ``(dim, query_dim)``.

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
    return Landscape(problem).gradient(checked(problem, weights))


def log_gap(problem: TokenSelection, weights: Tensor, selection: Tensor | None = None) -> LogGap:
    r"""By how much the objective exceeds what it would be with attention at rest on the selection.

    .. math:: L(W) - \frac1n \sum_i \ell_i(e_{\alpha_i})
        \qquad\text{or, with targets,}\qquad \frac1n \sum_i \mathrm{KL}(p_i \,\|\, s_i)

    Args:
        problem: tokens, queries and the loss.
        weights: ``(dim, query_dim)``.
        selection: :math:`\alpha`, shape ``(sequences,)``; the tokens of highest logit if omitted. Without effect on
            targets, whose gap is the one to their own entropy.

    Example:
        >>> problem = massieu.margin.TokenSelection(
        ...     torch.eye(2)[None], torch.tensor([[1.0]]), scores=torch.tensor([[1.0, 0.0]]), loss="linear"
        ... )
        >>> log_gap(problem, torch.tensor([[3e4], [0.0]], dtype=torch.float64))
        LogGap(sign=1, log=-30000.0)
    """
    return Landscape(problem).gap(checked(problem, weights), selection)


def misalignment(first: Tensor, second: Tensor) -> float:
    r"""One minus the correlation (the cosine) of two matrices, without its cancellation.

    .. math:: 1 - \frac{\langle U, V \rangle}{\|U\| \|V\|}
        = \frac12 \left\| \frac{U}{\|U\|} - \frac{V}{\|V\|} \right\|^2,

    whatever their scale; nan where one of them is zero or not finite.

    Example:
        >>> misalignment(torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 0.0]]))
        0.0
        >>> math.isnan(misalignment(torch.zeros(2, 2), torch.eye(2)))
        True
    """
    if first.shape != second.shape:
        raise ValueError(f"matrices must have one shape, got {tuple(first.shape)} and {tuple(second.shape)}")
    units = []
    for matrix in (first.double(), second.double()):
        largest = matrix.abs().max()
        if not 0 < largest < torch.inf:
            return math.nan
        matrix = matrix / largest
        units.append(matrix / matrix.norm())
    return float((units[0] - units[1]).square().sum()) / 2


def size_of(matrix: Tensor, norm: str = "fro") -> float:
    """A norm, "fro" or "nuc", whose squares neither overflow nor underflow; infinite or nan if an entry is."""
    largest = float(matrix.abs().max())
    if not 0 < largest < math.inf:
        return largest
    return largest * float(torch.linalg.matrix_norm(matrix / largest, norm))


def checked(problem: TokenSelection, weights: Tensor) -> Tensor:
    """Weights in float64, of the problem's shape."""
    if tuple(weights.shape) != problem.shape:
        raise ValueError(f"weights must have shape {problem.shape}, got {tuple(weights.shape)}")
    return weights.detach().double()


class Landscape:
    """A problem prepared for many gradients: what does not depend on the weights is computed once.

    Args:
        problem: tokens, queries and the loss.
        limit: with targets, attention maps of the least loss, ``(sequences, length)``, above which gaps are then taken,
            zero where attention is to vanish; the targets if omitted.
    """

    def __init__(self, problem: TokenSelection, limit: Tensor | None = None) -> None:
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
            limit = self.targets if limit is None else limit
            self.kept, self.log_limit = limit > 0, limit.log()

    def log_attention(self, weights: Tensor) -> Tensor:
        """Logarithms of the attention maps, shape ``(sequences, length)``."""
        logits = torch.bmm(self.problem.tokens, (self.problem.queries @ weights.mT)[..., None])[..., 0]
        if self.absent is not None:
            logits.masked_fill_(self.absent, -torch.inf)
        return logits.log_softmax(-1)

    def gradient(self, weights: Tensor) -> LogGradient:
        """As :func:`log_gradient`."""
        return self.gradient_at(self.log_attention(weights))

    def gap(self, weights: Tensor, selection: Tensor | None = None) -> LogGap:
        """As :func:`log_gap`."""
        return self.gap_at(self.log_attention(weights), selection)

    def gradient_at(self, log_attention: Tensor) -> LogGradient:
        """The gradient where attention has these logarithms."""
        if self.problem.targets is not None:
            sign, log_size = self._excess_of_targets(log_attention)
            shift = _finite(log_size.amax())
            coefficients = sign * torch.exp(log_size - shift)
            coefficients.scatter_add_(1, self.anchor, -coefficients.sum(-1, keepdim=True))
        else:
            attention = log_attention.exp()
            rise, log_slope = self._slopes(attention)
            rise = rise - rise.gather(1, log_attention.argmax(-1, keepdim=True))
            log_size = rise.abs().log_().add_(log_attention)
            # A sequence without slope has only logarithms of zero, from which nothing infinite may be subtracted.
            largest = log_size.amax(-1, keepdim=True).clamp_(min=-1e300)
            parts = log_size.sub_(largest).exp_().mul_(rise.sign_())
            if log_slope is not None:
                largest = largest + log_slope
            shift = _finite(largest.amax())
            mean = parts.sum(-1, keepdim=True)
            coefficients = parts.sub_(attention.mul_(mean)).mul_((largest - shift).exp_())
        pulled = torch.bmm(coefficients[:, None], self.problem.tokens)[:, 0]
        return LogGradient(pulled.mT @ self.scaled_queries, shift)

    def gap_at(self, log_attention: Tensor, selection: Tensor | None = None) -> LogGap:
        """The gap where attention has these logarithms."""
        if self.problem.targets is not None:
            sign, log_size = self._divergence(log_attention)
        else:
            chosen = (log_attention.argmax(-1) if selection is None else selection)[:, None]
            rises = self._rises if self.problem.linear else self._secants
            sign, log_size = rises(log_attention, chosen)
        shift = _finite(log_size.amax())
        total = float((sign * torch.exp(log_size - shift)).mean())
        if total == 0:
            return LogGap(0, -math.inf)
        return LogGap(1 if total > 0 else -1, math.log(abs(total)) + shift)

    def _slopes(self, attention: Tensor) -> tuple[Tensor, Tensor | None]:
        """Minus the derivative of every sequence's loss by its attention, and the logarithm of a factor of it."""
        problem = self.problem
        if not problem.linear:
            with torch.enable_grad():
                attention = attention.detach().requires_grad_()
                (slopes,) = torch.autograd.grad(problem.losses(attention).sum(), attention)
            return -slopes, None
        if problem.loss == "linear":
            return self.scores, None
        return self.scores, _log_slope(problem.loss, (attention * self.scores).sum(-1, keepdim=True))

    def _rises(self, log_attention: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Sign and logarithm of each sequence's loss above that of the chosen token, ``(sequences,)``, from scores.

        With a score g, that of the chosen token h and D = h - g, the losses differ by D, by exp(-h) (exp(D) - 1) or,
        the logistic ones, by log(1 + sigmoid(-h) (exp(D) - 1)).
        """
        score = self.scores.gather(1, chosen)
        sign, log_drop = _signed_sum(log_attention, score - self.scores)
        if self.problem.loss == "linear":
            return sign, log_drop
        score = score[:, 0]
        drop = sign * log_drop.clamp(max=700.0).exp()
        log_power = torch.where(drop > 40.0, drop, torch.expm1(drop.clamp(max=40.0)).abs().log())
        log_size = torch.where(log_drop < -40.0, log_drop, log_power) + _log_slope(self.problem.loss, score)
        if self.problem.loss == "exponential":
            return sign, log_size
        lost = torch.where(sign > 0, softplus(log_size), -torch.log1p(-log_size.clamp(max=-0.5).exp()))
        # Close to the logarithm of zero only the difference of losses is left, which is large there.
        far = (sign < 0) & (log_size > -0.5)
        lost = torch.where(far, softplus(-score) - softplus(drop - score), lost)
        return sign, torch.where(log_size < -40.0, log_size, lost.log())

    def _secants(self, log_attention: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """The same for a head: its derivative half-way, or a difference of losses."""
        attention = log_attention.exp()
        alone = torch.zeros_like(attention).scatter_(1, chosen, 1.0)
        rise, _ = self._slopes((attention + alone) / 2)
        sign, log_size = _signed_sum(log_attention, rise.gather(1, chosen) - rise)
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
        """Sign and logarithm of KL(p | s) above that of the limit: within the kept tokens, and for leaving them."""
        inside = log_attention.masked_fill(~self.kept, -torch.inf).logsumexp(-1, keepdim=True)
        outside = log_attention.masked_fill(self.kept, -torch.inf).logsumexp(-1)
        ratio = outside - inside[:, 0]
        lost = torch.where(ratio < -40.0, ratio, softplus(ratio).log())
        parts = torch.where(self.targets > 0, self.targets * (self.log_limit - log_attention + inside), 0.0)
        # The mean is not negative, even where that of a sequence is, whose limit is not its own targets.
        within = parts.sum(-1).mean().clamp(min=0.0).log()
        log_size = torch.logaddexp(within, lost)
        return torch.ones_like(log_size), log_size


def _log_slope(loss: str, score: Tensor) -> Tensor:
    """Logarithm of minus the derivative of a loss that is not linear."""
    return logsigmoid(-score) if loss == "logistic" else -score


def _signed_sum(log_weights: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Sign and logarithm of sums over the last axis of values, each times the exponential of its log weight."""
    log_size = log_weights + values.abs().log()
    largest = log_size.amax(-1, keepdim=True).clamp_(min=-1e300)
    total = (values.sign() * torch.exp(log_size - largest)).sum(-1)
    return total.sign(), total.abs().log() + largest[:, 0]


def _finite(largest: Tensor) -> float:
    """A shift, none where there is nothing to shift."""
    shift = float(largest)
    return shift if -1e300 < shift < math.inf else 0.0
