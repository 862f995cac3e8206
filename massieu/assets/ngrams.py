"""N-gram models, the baselines of the language model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["ngram_losses"]

DISCOUNTS = (0.3, 0.5, 0.7, 0.8, 0.9)


def ngram_losses(learned: Tensor, rows: list[Tensor], vocabulary: int) -> dict[str, float]:
    """Return the nats per token of unigram, bigram and trigram models on the tokens after the first of each row.

    The discount of each order is the best one for the rows themselves, so the baselines are optimistic.

    Args:
        learned: training tokens, shape ``(tokens,)``.
        rows: tokens to predict, each of shape ``(tokens,)``.
        vocabulary: number of different tokens.

    Example:
        >>> losses = ngram_losses(torch.tensor([0, 1, 2] * 50), [torch.tensor([0, 1, 2, 0])], vocabulary=3)
        >>> {name: round(loss, 2) for name, loss in losses.items()}
        {'unigram': 1.1, 'bigram': 0.0, 'trigram': 0.0}
    """
    # Padding is to the right of all tokens, so it is never a context.
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)
    valid = padded[:, 1:] >= 0
    names = ("unigram", "bigram", "trigram")
    seen = [counts(learned, padded, order, vocabulary) for order in range(1, len(names) + 1)]
    losses = [
        [float(-probability[:, 1:][valid].log().mean()) for probability in interpolated(seen, vocabulary, discount)]
        for discount in DISCOUNTS
    ]
    return {name: min(column) for name, column in zip(names, zip(*losses, strict=True), strict=True)}


class NgramCounts(NamedTuple):
    """Counts of the runs that end at each token, each of shape ``(rows, tokens - order + 1)``."""

    run: Tensor  # N(cw)
    context: Tensor  # N(c)
    followers: Tensor  # N_+(c), the different tokens after the context


def counts(learned: Tensor, tokens: Tensor, order: int, vocabulary: int) -> NgramCounts:
    """Return the counts in ``learned`` of all runs of ``order`` tokens in ``tokens``."""
    runs, times = run_numbers(learned, order, vocabulary).unique(return_counts=True)
    contexts, place, followers = (runs // vocabulary).unique(return_inverse=True, return_counts=True)
    totals = torch.zeros_like(contexts).index_add(0, place, times)
    run = run_numbers(tokens, order, vocabulary)
    context = run // vocabulary
    return NgramCounts(
        look_up(run, runs, times), look_up(context, contexts, totals), look_up(context, contexts, followers)
    )


def interpolated(seen: list[NgramCounts], vocabulary: int, discount: float) -> Iterator[Tensor]:
    r"""Yield the probabilities of the tokens for models of order one, two, three and so on, ``(rows, tokens)``.

    .. math:: p_n(w \mid c) = \frac{\max(N(cw) - D, 0) + D \, N_{+}(c) \, p_{n-1}(w \mid c')}{N(c)}

    where :math:`N_{+}(c)` counts the different tokens after :math:`c`, and :math:`c'` is :math:`c` without its first
    token; :math:`p_0` is uniform. An unseen context, or one that starts before the row, gives the lower order.

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
    """Return runs of ``order`` tokens as numbers with the last token as last digit, ``(..., tokens - order + 1)``.

    Example:
        >>> run_numbers(torch.tensor([1, 2, 3]), order=2, vocabulary=10)
        tensor([12, 23])
    """
    if tokens.shape[-1] < order:
        return tokens[..., :0]
    powers = vocabulary ** torch.arange(order - 1, -1, -1)
    return (tokens.unfold(-1, order, 1) * powers).sum(-1)


def look_up(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Return the value of each query among sorted keys, zero for unknown ones.

    Example:
        >>> look_up(torch.tensor([3, 4, 9]), torch.tensor([3, 9]), torch.tensor([30, 90]))
        tensor([30,  0, 90])
    """
    place = torch.searchsorted(keys, queries).clamp_max(len(keys) - 1)
    return torch.where(keys[place] == queries, values[place], 0)
