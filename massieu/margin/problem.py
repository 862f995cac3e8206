"""Token selection: sequences of tokens, a query for each, and the score of attending to one token alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, softplus

from massieu.checks import UserError, check_choice, check_floating, check_shape
from massieu.margin.conversions import as_double, as_head, check_sizes, padded, per_token, whole_numbers

__all__ = ["Assumptions", "TokenSelection"]

Head = Tensor | Sequence[float] | Sequence[Sequence[float]] | Callable[[Tensor], Tensor]

LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "logistic": lambda score: softplus(-score),
    "exponential": lambda score: torch.exp(-score),
    "linear": lambda score: -score,
}
TIE = 1e-9
"""Scores of a sequence that differ by less than this part of their range are tied."""


@dataclass(frozen=True)
class Assumptions:
    """Assumptions of theorems about token selection, checked.

    Attributes:
        unique: every sequence has one best token.
        tied: the sequences that have several.
        equal_scores: in every sequence, all tokens that are not best have the same score; gradients are then conic
            combinations of the constraints, and no finite stationary point exists.
        coherence: the largest absolute inner product of two different tokens over the smallest squared norm.
        near_orthogonal: (tokens - 1) coherence < 1, so that the Gram matrix of all tokens is diagonally dominant. The
            sources assume something of this kind without a constant; this one makes the tokens independent.
        independent: queries are linearly independent, and so are the differences of each sequence's tokens: the
            margin constraints of every selection can then be met.
    """

    unique: bool
    tied: tuple[int, ...]
    equal_scores: bool
    coherence: float
    near_orthogonal: bool
    independent: bool


class TokenSelection:
    r"""Sequences of tokens :math:`x_{it}`, each with a query :math:`z_i` that is to select one of them.

    .. math:: s_i = \mathrm{softmax}(X_i W z_i), \qquad
        L(W) = \frac1n \sum_i \ell\Big(\sum_t s_{it} \gamma_{it}\Big)
        \quad\text{or}\quad -\frac1n \sum_i \sum_t p_{it} \log s_{it}.

    The score :math:`\gamma_{it}` is the value of attending to token t alone. Scores are given or come from a head: with
    a vector, :math:`\gamma_{it} = y_i \langle v, x_{it} \rangle`; a matrix ``(classes, dim)`` or any function makes the
    loss one of the head at the attention output, and the score of a token is minus its loss. With ``targets`` the loss
    is the cross-entropy of the attention map itself. All tensors are held in float64.

    Args:
        tokens: ``(sequences, length, dim)``, or one tensor ``(length_i, dim)`` for each sequence.
        queries: ``(sequences, query_dim)``.
        scores: ``(sequences, length)``, or one tensor ``(length_i,)`` for each sequence.
        labels: -1 and 1 for a head with one output, classes from 0 for one with several; shape ``(sequences,)``.
        head: ``(dim,)``, ``(classes, dim)``, or a function of ``(..., dim)`` with one output or several. A module is
            copied, in float64 and in evaluation mode, and not trained.
        targets: distributions :math:`p_i` over the tokens, shaped as ``scores``.
        loss: of a score: "logistic", "exponential" or "linear".
        lengths: tokens of each sequence that are present, where ``tokens`` is one padded tensor.

    Source:
        The slides' "attention as an SVM"; logits are X W z, so that :math:`W = W_K W_Q^\top`, the transpose of the
        slides' matrix in :math:`S(X W_Q W_K^\top X^\top)`.

    Example:
        >>> tokens = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
        >>> problem = TokenSelection(tokens, torch.tensor([[1.0, 0.0]]), scores=torch.tensor([[1.0, 0.0]]))
        >>> problem.selection(), problem.margins(torch.eye(2, dtype=torch.float64))
        (tensor([0]), tensor([1.], dtype=torch.float64))
    """

    def __init__(
        self,
        tokens: Tensor | Sequence[Tensor],
        queries: Tensor,
        *,
        scores: Tensor | Sequence[Tensor] | None = None,
        labels: Tensor | None = None,
        head: Head | None = None,
        targets: Tensor | Sequence[Tensor] | None = None,
        loss: str = "logistic",
        lengths: Tensor | None = None,
    ) -> None:
        check_choice(loss, "loss", LOSSES)
        ways = {"scores": scores is not None, "head": head is not None, "targets": targets is not None}
        if sum(ways.values()) != 1 or (head is None) != (labels is None):
            given = [*(name for name, there in ways.items() if there), *(["labels"] if labels is not None else [])]
            raise UserError(f"give scores, or labels and head, or targets; got {', '.join(given) or 'none of them'}")
        self.tokens, self.present = padded(tokens, lengths)
        self.queries = check_sizes(as_double(queries, "queries", len(self.tokens), "query_dim"), "queries")
        self.loss, self.labels, self.targets = loss, labels, None
        self.head = None if head is None else as_head(head, self.tokens.shape[-1])
        if targets is not None:
            self.targets = per_token(targets, "targets", self.present)
            total = self.targets.sum(-1)
            if (self.targets < 0).any() or (total - 1).abs().max() > 1e-6:
                raise UserError("targets must be distributions: not negative, with sum one over each sequence")
            self.targets = self.targets / total[:, None]
            self.scores = self.targets
        elif scores is not None:
            self.scores = per_token(scores, "scores", self.present)
        else:
            self.scores = self._scores_of_head()

    @property
    def lengths(self) -> Tensor:
        """Tokens of each sequence, shape ``(sequences,)``."""
        return self.present.sum(-1)

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the weights, ``(dim, query_dim)``."""
        return self.tokens.shape[-1], self.queries.shape[-1]

    @property
    def linear(self) -> bool:
        """True if the loss depends on the attention map through the scores alone."""
        return self.targets is None and (self.head is None or (isinstance(self.head, Tensor) and self.head.ndim == 1))

    @property
    def best(self) -> Tensor:
        """Flags of the best tokens: highest score, or any mass in the targets; ``(sequences, length)``."""
        if self.targets is not None:
            return self.targets > 0
        high = self.scores.masked_fill(~self.present, -torch.inf).amax(-1, keepdim=True)
        return self.present & (high - self.scores <= TIE * self._range())

    def selection(self) -> Tensor:
        """Return the best token of every sequence, shape ``(sequences,)``; raise if one has several."""
        tied = (self.best.sum(-1) > 1).nonzero().flatten().tolist()
        if tied:
            raise UserError(
                f"every sequence must have one best token, but sequence {tied[0]} has {int(self.best[tied[0]].sum())}"
                f" ({len(tied)} sequences of {len(self.tokens)} are tied); break the ties, or let max_margin pick"
            )
        return self.best.int().argmax(-1)

    def picked(self, selection: Tensor | Sequence[int]) -> Tensor:
        """Return the given tokens of the sequences, shape ``(sequences,)``; raise if one is not present."""
        chosen, count = torch.as_tensor(selection), len(self.tokens)
        inside = chosen.shape == (count,) and bool(((chosen >= 0) & (chosen < self.lengths)).all())
        if not inside or chosen.dtype.is_floating_point or chosen.dtype == torch.bool:
            raise UserError(
                f"selection must be the index of a token for each of the {count} sequences, got {chosen.tolist()}"
            )
        return chosen.long()

    def tied(self, selection: Tensor | Sequence[int]) -> Tensor:
        """Return flags of the tokens as good as the selected ones, these included, ``(sequences, length)``.

        They have the same score up to rounding, or mass in the targets if the selected one has some.
        """
        chosen = self.picked(selection)[:, None]
        alone = torch.zeros_like(self.present).scatter(1, chosen, True)
        if self.targets is not None:
            return alone | (self.best & self.best.gather(1, chosen))
        away = (self.scores - self.scores.gather(1, chosen)).abs()
        return self.present & (away <= TIE * self._range())

    def assumptions(self) -> Assumptions:
        """Check the assumptions of theorems."""
        tied = tuple((self.best.sum(-1) > 1).nonzero().flatten().tolist())
        others = self.present & ~self.best
        rest = self.scores.masked_fill(~others, torch.nan).nan_to_num(nan=-torch.inf).amax(-1)
        least = self.scores.masked_fill(~others, torch.inf).amin(-1)
        span = self.scores.masked_fill(~self.present, -torch.inf).amax(-1) - least
        flat = self.tokens[self.present]
        gram = flat @ flat.mT
        norms = gram.diagonal().clone()
        different = gram.fill_diagonal_(0.0).abs().max().item()
        coherence = different / norms.min().item() if norms.min() > 0 else float("inf")
        return Assumptions(
            unique=not tied,
            tied=tied,
            equal_scores=bool(((rest - least) <= TIE * span).logical_or(~others.any(-1)).all()),
            coherence=coherence,
            near_orthogonal=(len(flat) - 1) * coherence < 1,
            independent=self._independent(),
        )

    def as_weights(self, weights: Tensor) -> Tensor:
        """Return the weights in float64, with their derivatives; raise unless they have the shape of this problem."""
        weights = torch.as_tensor(weights)
        check_shape(weights, "weights", *self.shape)
        if not weights.is_complex():
            weights = weights.double()
        check_floating(weights, "weights")
        return weights

    def logits(self, weights: Tensor) -> Tensor:
        r"""Return :math:`X_i W z_i`, shape ``(sequences, length)``; minus infinity where no token is present."""
        logits = torch.einsum("ntd,nd->nt", self.tokens, self.queries @ self.as_weights(weights).mT)
        return logits.masked_fill(~self.present, -torch.inf)

    def attention(self, weights: Tensor) -> Tensor:
        """Return the attention maps, shape ``(sequences, length)``."""
        return self.logits(weights).softmax(-1)

    def losses(self, attention: Tensor) -> Tensor:
        """Return the loss of every sequence at given attention maps, shape ``(sequences,)``; differentiable."""
        if self.targets is not None:
            # An absent token has no mass and no attention: its derivative would be 0 / 0.
            return -torch.xlogy(self.targets, attention.masked_fill(self.targets == 0, 1.0)).sum(-1)
        if self.linear:
            return LOSSES[self.loss]((attention * self.scores).sum(-1))
        return self._losses_of_head(torch.einsum("nt,ntd->nd", attention, self.tokens))

    def objective(self, weights: Tensor) -> Tensor:
        """Return the mean loss at the weights, a scalar; differentiable."""
        if self.targets is not None:
            log_attention = self.logits(weights).log_softmax(-1).masked_fill(self.targets == 0, 0.0)
            return -(self.targets * log_attention).sum(-1).mean()
        return self.losses(self.attention(weights)).mean()

    def selected(self, weights: Tensor) -> Tensor:
        """Return the token of highest logit in every sequence, shape ``(sequences,)``."""
        return self.logits(weights).argmax(-1)

    def loss_of(self, selection: Tensor | Sequence[int]) -> float:
        """Return the mean loss if all attention is on one token of each sequence: a limit of the objective."""
        alone = torch.nn.functional.one_hot(self.picked(selection), self.tokens.shape[1]).to(self.tokens)
        return float(self.losses(alone).mean())

    def margins(self, weights: Tensor, selection: Tensor | Sequence[int] | None = None) -> Tensor:
        """Return the least lead of the selected token's logit over all others, ``(sequences,)``."""
        chosen = (self.selection() if selection is None else self.picked(selection))[:, None]
        logits = self.logits(weights)
        return logits.gather(1, chosen)[:, 0] - logits.scatter(1, chosen, -torch.inf).amax(-1)

    def differences(self, selection: Tensor | Sequence[int]) -> Tensor:
        r""":math:`x_{i\alpha_i} - x_{it}`, shape ``(sequences, length, dim)``; zero at the selected and absent ones."""
        chosen = self.tokens.gather(1, self.picked(selection)[:, None, None].expand(-1, 1, self.tokens.shape[-1]))
        return (chosen - self.tokens) * self.present[..., None]

    def __repr__(self) -> str:
        lengths = self.lengths
        length = str(int(lengths[0])) if (lengths == lengths[0]).all() else f"{lengths.min()} to {lengths.max()}"
        goal = "targets" if self.targets is not None else "scores" if self.head is None else "a head"
        tied = int((self.best.sum(-1) > 1).sum())
        return (
            f"TokenSelection({len(self.tokens)} sequences of {length} tokens, dim {self.shape[0]},"
            f" query_dim {self.shape[1]}, by {goal}, {tied} tied)"
        )

    def _range(self) -> Tensor:
        """Return the highest score of every sequence minus its lowest, shape ``(sequences, 1)``."""
        low = self.scores.masked_fill(~self.present, torch.inf).amin(-1, keepdim=True)
        return self.scores.masked_fill(~self.present, -torch.inf).amax(-1, keepdim=True) - low

    def _scores_of_head(self) -> Tensor:
        labels = whole_numbers(self.labels, "labels", len(self.tokens))
        with torch.no_grad():
            outputs = self._outputs(self.tokens)
        if outputs.shape[:2] != self.present.shape or outputs.ndim > 3:
            raise UserError(
                f"head must turn {tuple(self.tokens.shape)} into {tuple(self.present.shape)}, with classes as a last"
                f" axis if there are several, got {tuple(outputs.shape)}"
            )
        if not outputs[self.present].isfinite().all():
            raise UserError("head must give finite numbers for all tokens, but some are nan or infinite")
        if outputs.ndim == 2 and not (labels.abs() == 1).all():
            raise UserError("labels must be -1 and 1 for a head with one output")
        if outputs.ndim == 3 and not ((labels >= 0) & (labels < outputs.shape[-1])).all():
            raise UserError(f"labels must be classes from 0 to {outputs.shape[-1] - 1} for this head")
        self.labels = labels.to(self.tokens) if outputs.ndim == 2 else labels
        if self.linear:
            scores = self.labels[:, None] * outputs
        else:
            length = self.tokens.shape[1]
            with torch.no_grad():
                scores = -torch.stack([self._losses_of_head(self.tokens[:, t]) for t in range(length)], 1)
        return scores.masked_fill(~self.present, 0.0)

    def _outputs(self, states: Tensor) -> Tensor:
        """Return the outputs of the head: ``(...)`` for one output, else ``(..., classes)``."""
        if isinstance(self.head, Tensor):
            return states @ self.head.mT if self.head.ndim == 2 else states @ self.head
        assert self.head is not None
        try:
            outputs = self.head(states)
        except (RuntimeError, TypeError) as error:
            raise UserError(f"head must take a float64 tensor of shape {tuple(states.shape)}, but: {error}") from error
        if not isinstance(outputs, Tensor):
            raise UserError(f"head must give a tensor, got {type(outputs).__name__}")
        outputs = outputs.double()
        return outputs[..., 0] if outputs.ndim == states.ndim and outputs.shape[-1] == 1 else outputs

    def _losses_of_head(self, states: Tensor) -> Tensor:
        outputs = self._outputs(states)
        assert self.labels is not None
        if outputs.ndim == 1:
            return LOSSES[self.loss](self.labels * outputs)
        return cross_entropy(outputs, self.labels, reduction="none")

    def _independent(self) -> bool:
        if len(self.queries) > self.queries.shape[1]:
            return False
        if int(torch.linalg.matrix_rank(self.queries)) < len(self.queries):
            return False
        edges = self.differences(torch.zeros_like(self.lengths))
        return all(
            int(torch.linalg.matrix_rank(rows[1:count])) == count - 1
            for rows, count in zip(edges, self.lengths.tolist(), strict=True)
        )
