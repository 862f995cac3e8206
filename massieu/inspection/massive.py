"""Tokens with massive activations: found passage by passage, and summed apart from the tokens that count."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from massieu.accumulators.moments import HashSample, Mean, Moments
from massieu.accumulators.regression import Regression
from massieu.accumulators.serialization import stored
from massieu.inspection.tokens import Tokens

__all__ = ["MASSIVE", "MassiveSums", "TokenFilter", "norm_ratio"]

MASSIVE = 20.0
"""A token is massive if its norm exceeds the median norm of its passage by more than this factor."""


class TokenFilter:
    """The tokens that count in each block of one forward pass: the one place where this is decided.

    A token whose norm exceeds the median of its passage by more than the factor ``MASSIVE`` is set apart from the block
    on in which this is first seen, because later blocks take a massive activation away step by step. The decision
    depends on the passage alone, not on the batch or the rest of the corpus. The only token of a passage has nothing to
    be compared with, so it is never massive.

    Args:
        tokens: the tokens of a stack by document.
        alone: the same with each passage as a document of its own, if wanted.

    Attributes:
        tokens: the tokens as they count now.
        alone: the same by passage.
        order: numbers of the present tokens in the order of ``tokens``; None if that is their own.
        largest: largest norm of a content token in the last block, as a multiple of the median of its passage.

    Example:
        >>> tokens = Tokens.of(torch.ones(1, 5, dtype=torch.bool), ["a"])
        >>> counted = TokenFilter(tokens)
        >>> counted.look([torch.tensor([[90.0], [1.0], [2.0], [0.5], [1.0]])])
        >>> counted.order, counted.tokens.num_content, counted.tokens.num_massive, counted.largest
        (tensor([1, 2, 3, 4, 0]), 4, 1, 90.0)
    """

    def __init__(self, tokens: Tokens, alone: Tokens | None = None) -> None:
        self.tokens, self.alone = tokens, alone
        self.order: Tensor | None = None
        self.largest = 0.0
        self._whole = tokens, alone
        self._massive = torch.zeros(len(tokens.index), dtype=torch.bool)

    def look(self, streams: Iterable[Tensor]) -> None:
        """Judge the tokens by the states of one block, each ``(present tokens, dim)``."""
        massive, self.largest = self._massive, 0.0
        content, sequences = self._whole[0].num_content, self._whole[0].sequence
        for stream in streams:
            norm = torch.linalg.vector_norm(stream, dim=-1, dtype=torch.float64).cpu()
            ratio = norm_ratio(norm[:content], sequences, self._whole[0].num_sequences)
            massive = massive | torch.nn.functional.pad(ratio > MASSIVE, (0, len(norm) - content))
            self.largest = max(self.largest, float(ratio.nan_to_num(0.0).amax()) if content else 0.0)
        if not torch.equal(massive, self._massive):
            self._massive = massive
            self.tokens, self.order = self._whole[0].part(massive)
            self.alone = None if self._whole[1] is None else self._whole[1].part(massive)[0]


def norm_ratio(norm: Tensor, sequence: Tensor, num_sequences: int) -> Tensor:
    """Norms as multiples of the median norm of their sequence, of two medians the lower one.

    Args:
        norm: shape ``(tokens,)``; what is not finite does not count.
        sequence: ascending number of the sequence of each token, ``(tokens,)``.
        num_sequences: how many there are.

    Returns:
        Shape ``(tokens,)``, nan where the norm is not finite or the median is zero.

    Example:
        >>> norm_ratio(torch.tensor([8.0, 2.0, 4.0, 1.0, 3.0]), torch.tensor([0, 0, 0, 1, 1]), 2)
        tensor([2.0000, 0.5000, 1.0000, 1.0000, 3.0000])
    """
    finite = norm.isfinite()
    by_norm = torch.sort(norm.masked_fill(~finite, torch.inf), stable=True).indices
    order = by_norm[torch.sort(sequence[by_norm], stable=True).indices]
    total, known = (torch.bincount(own, minlength=num_sequences) for own in (sequence, sequence[finite]))
    middle = (total.cumsum(0) - total + (known - 1).clamp_min(0) // 2).clamp_max(max(len(norm) - 1, 0))
    median = norm[order[middle]][sequence] if len(norm) else norm
    return torch.where(finite & (median > 0), norm / median, torch.nan)


@stored("count", "first", "largest", "clouds", "fits", "sample", "means")
class MassiveSums:
    """Sums over the massive tokens of one block; with those over the other tokens they give the values of all.

    Massive tokens are few, so their moments are mostly kept as rows.

    Args:
        size: rows of the sample for the kurtosis.
        width: size of these rows.

    Attributes:
        count: massive tokens.
        first: those among them that are the first token of their passage that counts.
        largest: largest norm of any token, as a multiple of the median of its passage.
        clouds: moments of their states, by the names of :class:`~massieu.inspection.layer_statistics.States`.
        fits: inputs and updates of the MLP, by half of the documents.
        sample: their outputs.
        means: of the similarity over all tokens, and of the squared MLP update over the massive ones.
    """

    def __init__(self, size: int, width: int) -> None:
        self.count = self.first = 0
        self.largest = 0.0
        self.clouds: dict[str, Moments] = {}
        self.fits = (Regression(0, 0), Regression(0, 0))
        self.sample = HashSample(size, width)
        self.means = {"token_cosine": Mean(), "mlp_square": Mean()}

    def merge(self, other: MassiveSums) -> None:
        """Add what another has seen of the same block."""
        self.count += other.count
        self.first += other.first
        self.largest = max(self.largest, other.largest)
        for name, cloud in other.clouds.items():
            self.clouds.setdefault(name, Moments(0)).merge(cloud)
        for mine, theirs in zip(self.fits, other.fits, strict=True):
            mine.merge(theirs)
        self.sample.merge(other.sample)
        for name, mean in self.means.items():
            mean.merge(other.means[name])
