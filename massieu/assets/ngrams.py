"""What counting runs of tokens predicts: the baselines that a language model has to beat."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["ngram_losses"]

DISCOUNTS = (0.3, 0.5, 0.7, 0.8, 0.9)


def ngram_losses(learned: Tensor, rows: list[Tensor], vocabulary: int) -> dict[str, float]:
    """Nats per token of unigram, bigram and trigram models on the tokens after the first of each row.

    The discount is the one that serves each order best on the rows themselves: the baselines err to their advantage.

    Args:
        learned: tokens to count, shape ``(tokens,)``.
        rows: tokens to predict, each of shape ``(tokens,)``.
        vocabulary: number of different tokens.

    Example:
        >>> losses = ngram_losses(torch.tensor([0, 1, 2] * 50), [torch.tensor([0, 1, 2, 0])], vocabulary=3)
        >>> {name: round(loss, 2) for name, loss in losses.items()}
        {'unigram': 1.1, 'bigram': 0.0, 'trigram': 0.0}
    """
    # Padding lies to the right of every token that counts, so it is never the context of one.
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)
    wanted = padded[:, 1:] >= 0
    names = ("unigram", "bigram", "trigram")
    seen = [counts(learned, padded, order, vocabulary) for order in range(1, len(names) + 1)]
    losses = [
        [float(-probability[:, 1:][wanted].log().mean()) for probability in interpolated(seen, vocabulary, discount)]
        for discount in DISCOUNTS
    ]
    return {name: min(column) for name, column in zip(names, zip(*losses, strict=True), strict=True)}


class Counts(NamedTuple):
    """How often the runs that end at the asked tokens were seen; each of shape ``(rows, tokens - order + 1)``."""

    run: Tensor  # N(cw)
    context: Tensor  # N(c)
    followers: Tensor  # N_+(c), the different tokens after the context


def counts(learned: Tensor, asked: Tensor, order: int, vocabulary: int) -> Counts:
    """Count the runs of ``order`` tokens in ``learned`` that are needed for ``asked``."""
    runs, times = run_numbers(learned, order, vocabulary).unique(return_counts=True)
    contexts, place, followers = (runs // vocabulary).unique(return_inverse=True, return_counts=True)
    totals = torch.zeros_like(contexts).index_add(0, place, times)
    run = run_numbers(asked, order, vocabulary)
    context = run // vocabulary
    return Counts(look_up(run, runs, times), look_up(context, contexts, totals), look_up(context, contexts, followers))


def interpolated(seen: list[Counts], vocabulary: int, discount: float) -> Iterator[Tensor]:
    r"""Probability of each asked token by models of order one, two, three and so on, ``(rows, tokens)``.

    .. math:: p_n(w \mid c) = \frac{\max(N(cw) - D, 0) + D \, N_{+}(c) \, p_{n-1}(w \mid c')}{N(c)}

    where :math:`N_{+}(c)` counts the different tokens seen after :math:`c`, and :math:`c'` is :math:`c` without its
    first token; :math:`p_0` is uniform. A context that was never seen, or that would begin before the row, leaves the
    lower order as it is.

    Source:
        Ney, Essen and Kneser 1994: absolute discounting, interpolated.
    """
    probability = torch.full(seen[0].run.shape, 1 / vocabulary, dtype=torch.float64)
    for shorter, (run, context, followers) in enumerate(seen):
        lower = probability[:, shorter:]
        mixed = ((run - discount).clamp_min(0) + discount * followers * lower) / context
        probability = torch.cat([probability[:, :shorter], torch.where(context > 0, mixed, lower)], dim=-1)
        yield probability


def run_numbers(tokens: Tensor, order: int, vocabulary: int) -> Tensor:
    """Every run of ``order`` tokens as one number whose last digit is the last token, ``(..., tokens - order + 1)``.

    Example:
        >>> run_numbers(torch.tensor([1, 2, 3]), order=2, vocabulary=10)
        tensor([12, 23])
    """
    if tokens.shape[-1] < order:
        return tokens[..., :0]
    powers = vocabulary ** torch.arange(order - 1, -1, -1)
    return (tokens.unfold(-1, order, 1) * powers).sum(-1)


def look_up(asked: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """The value that belongs to each asked key, zero where there is none; keys are sorted.

    Example:
        >>> look_up(torch.tensor([3, 4, 9]), torch.tensor([3, 9]), torch.tensor([30, 90]))
        tensor([30,  0, 90])
    """
    place = torch.searchsorted(keys, asked).clamp_max(len(keys) - 1)
    return torch.where(keys[place] == asked, values[place], 0)
