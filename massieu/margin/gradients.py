"""Gradients and loss gaps of token selection as logarithms, so that large weights do not make them zero."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import softplus

from massieu.checks import UserError
from massieu.margin.problem import TokenSelection

__all__ = ["LogGap", "LogGradient", "log_gap", "log_gradient", "misalignment"]

Floats = NDArray[np.float64]
_quiet = np.errstate(divide="ignore", over="ignore", invalid="ignore")
"""Logarithms of zero are intended, and callers handle weights that are no longer finite."""

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
    r"""Return the gradient of the objective, computed from log attention.

    .. math:: \nabla L = -\frac1n \sum_{it} c_{it}\, x_{it} z_i^\top, \qquad
        c_{it} = \sum_\tau e^{\log s_{it} + \log s_{i\tau}} (g_{it} - g_{i\tau})

    with :math:`g_{it} = -\partial\ell_i / \partial s_{it}`: scores times :math:`|\ell'|`, itself as a logarithm, for a
    linear head, else the derivative of the head at the attention output, by autograd. With targets, c = p - s.
    Coefficients are relative to the token of highest logit and share one factor :math:`e^\sigma`, so that only the
    spread between sequences can underflow. There are three limits: a head that is flat at the attention output (a dead
    ReLU) has no direction; the loss of a nonlinear head underflows at scores beyond 700; and where targets share their
    mass among several tokens, p - s is lost once it falls below the rounding of p.

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
    return Landscape(problem).gradient(problem.as_weights(weights).detach())


def log_gap(problem: TokenSelection, weights: Tensor, selection: Tensor | None = None) -> LogGap:
    r"""Return the excess of the objective over its value with all attention on the selection.

    .. math:: L(W) - \frac1n \sum_i \ell_i(e_{\alpha_i})
        \qquad\text{or, with targets,}\qquad \frac1n \sum_i \mathrm{KL}(p_i \,\|\, s_i)

    Args:
        problem: tokens, queries and the loss.
        weights: ``(dim, query_dim)``.
        selection: :math:`\alpha`, shape ``(sequences,)``; the tokens of highest logit if omitted. Without effect on
            targets, whose gap is to their own entropy.

    Example:
        >>> problem = massieu.margin.TokenSelection(
        ...     torch.eye(2)[None], torch.tensor([[1.0]]), scores=torch.tensor([[1.0, 0.0]]), loss="linear"
        ... )
        >>> log_gap(problem, torch.tensor([[3e4], [0.0]], dtype=torch.float64))
        LogGap(sign=1, log=-30000.0)
    """
    return Landscape(problem).gap(problem.as_weights(weights).detach(), selection)


def misalignment(first: Tensor, second: Tensor) -> float:
    r"""Return one minus the correlation (the cosine) of two matrices, without cancellation.

    .. math:: 1 - \frac{\langle U, V \rangle}{\|U\| \|V\|}
        = \frac12 \left\| \frac{U}{\|U\|} - \frac{V}{\|V\|} \right\|^2,

    at any size of the matrices; nan where one of them is zero or not finite.

    Example:
        >>> misalignment(torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 0.0]]))
        0.0
        >>> math.isnan(misalignment(torch.zeros(2, 2), torch.eye(2)))
        True
    """
    if first.shape != second.shape:
        raise UserError(f"matrices must have one shape, got {tuple(first.shape)} and {tuple(second.shape)}")
    units = []
    for matrix in (first.double(), second.double()):
        largest = matrix.abs().max()
        if not 0 < largest < torch.inf:
            return math.nan
        matrix = matrix / largest
        units.append(matrix / matrix.norm())
    return float((units[0] - units[1]).square().sum()) / 2


def size_of(matrix: Tensor, norm: str = "fro") -> float:
    """Return a norm, "fro" or "nuc", whose squares neither overflow nor underflow; infinite or nan if an entry is."""
    largest = float(matrix.abs().max())
    if not 0 < largest < math.inf:
        return largest
    return largest * float(torch.linalg.matrix_norm(matrix / largest, norm))


class Landscape:
    """Problem prepared for many gradients: terms that do not depend on the weights are computed once.

    Args:
        problem: tokens, queries and the loss.
        limit: with targets, attention maps of the least loss, from which gaps are taken, ``(sequences, length)``; zero
            where attention is to vanish; the targets if omitted.
    """

    def __init__(self, problem: TokenSelection, limit: Tensor | None = None) -> None:
        self.problem = problem
        self.scaled_queries = problem.queries / -len(problem.queries)
        self.rows = np.arange(len(problem.queries))
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
        """Return the logarithms of the attention maps, shape ``(sequences, length)``."""
        logits = torch.bmm(self.problem.tokens, (self.problem.queries @ weights.mT)[..., None])[..., 0]
        if self.absent is not None:
            logits.masked_fill_(self.absent, -torch.inf)
        return logits.log_softmax(-1)

    def gradient(self, weights: Tensor) -> LogGradient:
        return self.gradient_at(self.log_attention(weights))

    def gap(self, weights: Tensor, selection: Tensor | None = None) -> LogGap:
        return self.gap_at(self.log_attention(weights), selection)

    def gradient_at(self, log_attention: Tensor) -> LogGradient:
        """Return the gradient where attention has these logarithms."""
        if self.problem.targets is not None:
            sign, log_size = self._excess_of_targets(log_attention)
            shift = _finite(log_size.amax())
            coefficients = sign * torch.exp(log_size - shift)
            coefficients.scatter_add_(1, self.anchor, -coefficients.sum(-1, keepdim=True))
        else:
            found, shift = self._pulls(log_attention)
            coefficients = torch.from_numpy(found)
        pulled = torch.bmm(coefficients[:, None], self.problem.tokens)[:, 0]
        return LogGradient(pulled.mT @ self.scaled_queries, shift)

    def gap_at(self, log_attention: Tensor, selection: Tensor | None = None) -> LogGap:
        """Return the gap where attention has these logarithms."""
        if self.problem.targets is not None:
            log_size = self._divergence(log_attention)
            sign = np.ones(())
        else:
            chosen = (log_attention.argmax(-1) if selection is None else selection)[:, None]
            sign, log_size = (self._rises if self.problem.linear else self._secants)(log_attention, chosen)
        shift = _finite(log_size.max())
        total = float((sign * np.exp(log_size - shift)).sum()) / len(log_size)
        if total == 0:
            return LogGap(0, -math.inf)
        return LogGap(1 if total > 0 else -1, math.log(abs(total)) + shift)

    def _slopes(self, attention: Tensor) -> Tensor:
        """Return minus the derivative of every sequence's loss by its attention: of the head, or of the score alone."""
        if self.problem.linear:
            return self.scores
        with torch.enable_grad():
            attention = attention.detach().requires_grad_()
            (slopes,) = torch.autograd.grad(self.problem.losses(attention).sum(), attention)
        return -slopes

    @_quiet
    def _pulls(self, log_attention: Tensor) -> tuple[Floats, float]:
        """Return the coefficients c of all tokens over a common factor, and its logarithm.

        Arrays of numpy, whose operations on a few numbers start faster than those of torch.
        """
        attention = log_attention.exp()
        rise, log_weights, weights = self._slopes(attention).numpy(), log_attention.numpy(), attention.numpy()
        rise = rise - rise[self.rows, log_weights.argmax(-1)][:, None]
        log_size = np.log(np.abs(rise)) + log_weights
        # A sequence without slope has only logarithms of zero, from which nothing infinite may be subtracted.
        largest = np.maximum(log_size.max(-1, keepdims=True), -1e300)
        parts = np.copysign(np.exp(log_size - largest), rise)
        parts -= weights * parts.sum(-1, keepdims=True)
        if self.problem.linear and self.problem.loss != "linear":
            score = (weights * self.scores.numpy()).sum(-1, keepdims=True)
            largest = largest + _log_slope(self.problem.loss, score)
        shift = _finite(largest.max())
        return parts * np.exp(largest - shift), shift

    @_quiet
    def _rises(self, log_attention: Tensor, chosen: Tensor) -> tuple[Floats, Floats]:
        """Return sign and logarithm of each sequence's loss above that of the chosen token, ``(sequences,)``.

        With a score g, that of the chosen token h and D = h - g, the losses differ by D, by exp(-h) (exp(D) - 1) or,
        the logistic ones, by log(1 + sigmoid(-h) (exp(D) - 1)).
        """
        scores = self.scores.numpy()
        score = scores[self.rows, chosen.numpy()[:, 0]]
        sign, log_drop = _signed_sum(log_attention.numpy(), score[:, None] - scores)
        if self.problem.loss == "linear":
            return sign, log_drop
        drop = sign * np.exp(np.minimum(log_drop, 700.0))
        log_power = np.where(drop > 40.0, drop, np.log(np.abs(np.expm1(np.minimum(drop, 40.0)))))
        log_size = np.where(log_drop < -40.0, log_drop, log_power) + _log_slope(self.problem.loss, score)
        if self.problem.loss == "exponential" or log_size.max() < -40.0:
            return sign, log_size
        lost = np.where(sign > 0, np.logaddexp(0.0, log_size), -np.log1p(-np.exp(np.minimum(log_size, -0.5))))
        # Close to the logarithm of zero the difference of losses itself is exact, which is large there.
        far = (sign < 0) & (log_size > -0.5)
        lost = np.where(far, np.logaddexp(0.0, -score) - np.logaddexp(0.0, drop - score), lost)
        return sign, np.where(log_size < -40.0, log_size, np.log(lost))

    @_quiet
    def _secants(self, log_attention: Tensor, chosen: Tensor) -> tuple[Floats, Floats]:
        """Return the same for a head: its derivative half-way, or a difference of losses."""
        attention = log_attention.exp()
        alone = torch.zeros_like(attention).scatter_(1, chosen, 1.0)
        rise = self._slopes((attention + alone) / 2)
        sign, log_size = _signed_sum(log_attention.numpy(), (rise.gather(1, chosen) - rise).numpy())
        far = (attention.scatter(1, chosen, 0.0).sum(-1) > NEAR).numpy()
        if far.any():
            with torch.no_grad():
                difference = (self.problem.losses(attention) - self.problem.losses(alone)).numpy()
            sign = np.where(far, np.sign(difference), sign)
            log_size = np.where(far, np.log(np.abs(difference)), log_size)
        return sign, log_size

    def _excess_of_targets(self, log_attention: Tensor) -> tuple[Tensor, Tensor]:
        """Return sign and logarithm of p - s, zero at each sequence's anchor, which later balances the sum."""
        inside = self.targets * torch.expm1(log_attention - self.log_targets)
        wanted = self.targets > 0
        sign = torch.where(wanted, -inside.sign(), -1.0)
        log_size = torch.where(wanted, inside.abs().log(), log_attention)
        return sign, log_size.scatter(1, self.anchor, -torch.inf)

    def _divergence(self, log_attention: Tensor) -> Floats:
        """Return the logarithm of KL(p | s) above that of the limit: within the kept tokens, and for leaving them."""
        inside = log_attention.masked_fill(~self.kept, -torch.inf).logsumexp(-1, keepdim=True)
        outside = log_attention.masked_fill(self.kept, -torch.inf).logsumexp(-1)
        ratio = outside - inside[:, 0]
        lost = torch.where(ratio < -40.0, ratio, softplus(ratio).log())
        parts = torch.where(self.targets > 0, self.targets * (self.log_limit - log_attention + inside), 0.0)
        # The mean is not negative, even where that of a sequence is, whose limit is not its own targets.
        within = parts.sum(-1).mean().clamp(min=0.0).log()
        log_size: Floats = torch.logaddexp(within, lost).numpy()
        return log_size


def _log_slope(loss: str, score: Floats) -> Floats:
    """Return the logarithm of minus the derivative of a nonlinear loss."""
    return -np.logaddexp(0.0, score) if loss == "logistic" else -score


def _signed_sum(log_weights: Floats, values: Floats) -> tuple[Floats, Floats]:
    """Return sign and logarithm of the sums of values times exponentials of log weights over the last axis."""
    log_size = np.log(np.abs(values)) + log_weights
    largest = np.maximum(log_size.max(-1, keepdims=True), -1e300)
    total = np.copysign(np.exp(log_size - largest), values).sum(-1)
    return np.sign(total), np.log(np.abs(total)) + largest[:, 0]


def _finite(largest: Any) -> float:
    """Return a shift, zero for infinite or absent values."""
    shift = float(largest)
    return shift if -1e300 < shift < math.inf else 0.0
