"""Sums that can be merged: means with their standard errors by document, extremes, and medians from fixed bins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from massieu.accumulators.serialization import stored

__all__ = ["Extremes", "Means", "Shares"]


@stored("documents", "sum", "count", "sum_squared", "sum_count", "count_squared", "shift", "_open")
class Means:
    r"""Means of several series over all rows, with standard errors that treat a document as one draw.

    Rows of a document resemble each other, so they do not count as independent. With sums :math:`S_d` and counts
    :math:`n_d` of document d, the mean is the ratio :math:`m = \sum_d S_d / \sum_d n_d` and its squared standard error

    .. math:: \frac{D}{D - 1} \frac{\sum_d (S_d - m n_d)^2}{(\sum_d n_d)^2}.

    Only sums over documents are kept, whatever their number; the parts of a document may come in any order.

    Args:
        shape: shape of one set of series, such as ``(statistics, heads)``.

    Source:
        Linearization of a ratio of two sums over clusters: Cochran, Sampling Techniques, 3rd ed., chapter 6.

    Example:
        >>> means = Means((1,))
        >>> for document, rows in enumerate([[1.0, 3.0], [2.0, 4.0]]):
        ...     means.add(document, torch.tensor([sum(rows)]), torch.tensor([len(rows)]))
        >>> means.mean(), means.standard_error()
        (tensor([2.5000], dtype=torch.float64), tensor([0.5000], dtype=torch.float64))
    """

    def __init__(self, shape: Sequence[int]) -> None:
        zero = torch.zeros(tuple(shape), dtype=torch.float64)
        self.documents = 0
        self.sum, self.count = zero.clone(), zero.clone()
        self.sum_squared, self.sum_count, self.count_squared = zero.clone(), zero.clone(), zero.clone()
        self.shift: Tensor | None = None
        self._open: dict[int, tuple[int, Tensor, Tensor]] = {}

    def add(self, document: int, total: Tensor, count: Tensor, *, parts: int = 1) -> None:
        """Add sums and counts of one part of a document that has so many ``parts``."""
        seen, before, had = self._open.pop(document, (0, 0.0, 0.0))
        seen, total, count = seen + 1, before + total.double(), had + count.double()
        if seen < parts:
            self._open[document] = (seen, total, count)
        else:
            self._close(total, count)

    def close(self) -> None:
        """End all documents that are still open, for when the text was cut short."""
        for _, total, count in self._open.values():
            self._close(total, count)
        self._open.clear()

    def _close(self, total: Tensor, count: Tensor) -> None:
        # Sums of deviations from the mean of the first document: squares of log Z near 1000 would cancel.
        if self.shift is None:
            self.shift = torch.where(count > 0, total / count, 0.0)
        total = total - self.shift * count
        self.documents += 1
        self.sum += total
        self.count += count
        self.sum_squared += total * total
        self.sum_count += total * count
        self.count_squared += count * count

    def merge(self, other: Means) -> None:
        """Add what another stream found on other documents."""
        self._open |= other._open
        if other.shift is None:
            return
        if self.shift is None:
            self.shift = other.shift
        move = other.shift - self.shift
        self.documents += other.documents
        self.sum += other.sum + move * other.count
        self.sum_squared += other.sum_squared + move * (2 * other.sum_count + move * other.count_squared)
        self.sum_count += other.sum_count + move * other.count_squared
        self.count += other.count
        self.count_squared += other.count_squared

    def mean(self) -> Tensor:
        """The means; nan for a series without rows."""
        return (0.0 if self.shift is None else self.shift) + self.sum / self.count

    def standard_error(self) -> Tensor:
        """The standard errors of the means; nan with fewer than two documents."""
        mean = self.sum / self.count
        spread = self.sum_squared - 2 * mean * self.sum_count + mean.square() * self.count_squared
        factor = self.documents / (self.documents - 1) if self.documents > 1 else torch.nan
        return (factor * spread.clamp_min(0)).sqrt() / self.count


@stored()
@dataclass
class Extremes:
    """Largest and smallest value of a series so far; nan counts as absent."""

    largest: Tensor
    smallest: Tensor

    @classmethod
    def none(cls, shape: Sequence[int]) -> Extremes:
        """Before anything was seen."""
        infinite = torch.full(tuple(shape), torch.inf, dtype=torch.float64)
        return cls(-infinite, infinite)

    def add(self, values: Tensor) -> None:
        """Take in values ``(*shape, rows)``."""
        if values.shape[-1]:
            values, absent = values.double(), values.isnan()
            self.largest = torch.maximum(self.largest, values.masked_fill(absent, -torch.inf).amax(-1))
            self.smallest = torch.minimum(self.smallest, values.masked_fill(absent, torch.inf).amin(-1))

    def merge(self, other: Extremes) -> None:
        """Take in what another stream found."""
        self.largest = torch.maximum(self.largest, other.largest)
        self.smallest = torch.minimum(self.smallest, other.smallest)


@stored("counts")
class Shares:
    r"""The median of numbers in (0, 1], from counts in bins whose edges are :math:`2^{-i/64}`.

    The edges hold 1/2, 1/8 and 1/32, so whether the median exceeds one of them is known exactly; the median itself is
    rounded up to the next edge, by at most 1.1 %.

    Example:
        >>> shares = Shares((1,))
        >>> shares.add(torch.tensor([[0.02, 0.5, 0.75]]))
        >>> shares.exceeds(0.5), round(shares.median().item(), 2)
        (tensor([False]), 0.5)
    """

    BINS, PER_HALVING = 1536, 64
    UNITS = 2**16

    def __init__(self, shape: Sequence[int]) -> None:
        self.counts = torch.zeros(*shape, self.BINS, dtype=torch.float64)

    def add(self, values: Tensor, weight: Tensor | float = 1.0) -> None:
        """Take in values ``(*shape, rows)``, each with a weight that broadcasts to them; nan counts as absent."""
        # Bin i holds what lies in (2^-((i + 1) / 64), 2^-(i / 64)]; rounding must not push a power of two over.
        steps = (-self.PER_HALVING * values.double().clamp_min(1e-300).log2() + 1e-9).floor()
        index = steps.nan_to_num(0.0).clamp(0, self.BINS - 1).long()
        # Multiples of a power of two: sums of weights are exact, so that the order of additions does not matter.
        weight = (torch.as_tensor(weight, dtype=torch.float64) * self.UNITS).round() / self.UNITS
        self.counts.scatter_add_(-1, index, weight * ~values.isnan())

    def merge(self, other: Shares) -> None:
        """Add the counts of another stream."""
        self.counts += other.counts

    def exceeds(self, edge: float) -> Tensor:
        """Return True where more than half of the values are larger than the edge, a power of two."""
        bins = round(-self.PER_HALVING * torch.tensor(edge).log2().item())
        return self.counts[..., :bins].sum(-1) > self.counts.sum(-1) / 2

    def median(self) -> Tensor:
        """The median, rounded up to the next edge; nan before anything was seen."""
        total = self.counts.sum(-1)
        below = self.counts.flip(-1).cumsum(-1).flip(-1)  # how many values lie in this bin or lower
        index = ((below >= total[..., None] / 2).sum(-1) - 1).clamp_min(0)
        return torch.where(total > 0, torch.exp2(-index.double() / self.PER_HALVING), torch.nan)
