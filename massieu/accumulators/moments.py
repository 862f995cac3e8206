"""Sufficient statistics that can be added up batch by batch and merged across machines."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from massieu.accumulators.serialization import stored

__all__ = [
    "GROUPS",
    "HashSample",
    "LogHistogram",
    "Mean",
    "Moments",
    "document_hash",
    "jackknife",
    "shuffled",
    "token_hash",
]

GROUPS = 8
"""Documents are put into so many groups; what changes if one group is left out gives standard errors."""


def jackknife(without: Sequence[float]) -> float:
    r"""Standard error of a figure from its values without one group of documents each.

    .. math:: \left( \frac{g - 1}{g} \sum_k (\theta_{-k} - \bar\theta)^2 \right)^{1/2}

    It is nan for fewer than two groups.

    Source:
        Delete-a-group jackknife: Kott 2001, "The delete-a-group jackknife", Journal of Official Statistics 17.

    Example:
        >>> jackknife([1.0, 3.0])
        1.0
    """
    groups = len(without)
    if groups < 2:
        return float("nan")
    values = torch.tensor(without, dtype=torch.float64)
    return float(((groups - 1) * values.var(correction=0)).sqrt())


@stored("totals", "counts")
class Mean:
    """Mean of numbers, as sums and counts by group of documents.

    Example:
        >>> mean = Mean()
        >>> mean.update(torch.tensor([1.0, 2.0]), torch.tensor([0, 1]))
        >>> mean.update(torch.tensor([6.0]), torch.tensor([1]))
        >>> mean.value, mean.standard_error
        (3.0, 1.5)
    """

    def __init__(self) -> None:
        self.totals, self.counts = torch.zeros(2, GROUPS, dtype=torch.float64)

    def update(self, values: Tensor, group: Tensor) -> None:
        """Add numbers with the groups of their documents, both ``(numbers,)``."""
        self.totals.index_add_(0, group, values.double().cpu())
        self.counts += torch.bincount(group, minlength=GROUPS)

    def merge(self, other: Mean) -> None:
        """Add what another has seen."""
        self.totals += other.totals
        self.counts += other.counts

    @property
    def value(self) -> float:
        """The mean, nan if nothing was seen."""
        return float(self.totals.sum() / self.counts.sum())

    @property
    def standard_error(self) -> float:
        """The standard error of the mean, nan for fewer than two groups."""
        seen = self.counts > 0
        without = (self.totals.sum() - self.totals[seen]) / (self.counts.sum() - self.counts[seen])
        return jackknife(without.tolist())


@stored("count", "mean", "other_mean", "rows", "other_rows", "_scatter")
class Moments:
    r"""Count, means and centered second moments of pairs :math:`(x, y)`; y defaults to x.

    .. math:: S_{xy} = \sum_i (x_i - \bar x)(y_i - \bar y)^\top

    Two sets merge through the difference of their means, which stays exact where plain sums of squares cancel.
    Few rows are kept as they are: they take less memory than :math:`S_{xy}`.

    Args:
        dim: size of x; 0 if the first update is to say it.
        other_dim: size of y; None if y is x.

    Attributes:
        count: number of pairs.
        mean: mean of x.
        other_mean: mean of y.
        rows: the x of few pairs; None for no pairs, and for many.
        other_rows: their y; None if y is x.

    Source:
        Chan, Golub and LeVeque 1983, "Algorithms for computing the sample variance".

    Example:
        >>> x = torch.randn(100, 3, dtype=torch.float64) + 1e6
        >>> moments = Moments(3)
        >>> moments.update(x[:40])
        >>> moments.update(x[40:])
        >>> torch.allclose(moments.covariance, torch.cov(x.T, correction=0))
        True
    """

    def __init__(self, dim: int, other_dim: int | None = None) -> None:
        self.count = 0
        self.mean = torch.zeros(dim, dtype=torch.float64)
        self.other_mean = self.mean if other_dim is None else torch.zeros(other_dim, dtype=torch.float64)
        self.rows: Tensor | None = None
        self.other_rows: Tensor | None = None
        self._scatter = torch.zeros(dim, dim if other_dim is None else other_dim, dtype=torch.float64)

    @property
    def scatter(self) -> Tensor:
        """:math:`S_{xy}`, ``(dim, other_dim)``."""
        if self.rows is None:
            return self._scatter
        x = self.rows.double() - self.mean
        return x.T @ (x if self.other_rows is None else self.other_rows.double() - self.other_mean)

    @property
    def covariance(self) -> Tensor:
        r""":math:`S_{xy} / n`."""
        return self.scatter / max(self.count, 1)

    def update(self, x: Tensor, y: Tensor | None = None) -> None:
        """Add the rows of ``(tokens, dim)`` and of ``(tokens, other_dim)``."""
        if not len(x):
            return
        if (self.rows is not None or not self.count) and self.count + len(x) <= x.shape[1] // 2:
            self._keep(x.cpu(), None if y is None else y.cpu())
            return
        x = x.double()
        y = None if y is None else y.double()
        mean, other = x.mean(0), None if y is None else y.mean(0)
        centered = x - mean
        scatter = centered.T @ (centered if y is None or other is None else y - other)
        self._add(len(x), mean.cpu(), mean.cpu() if other is None else other.cpu(), scatter.cpu())

    def merge(self, other: Moments) -> None:
        """Add what another has seen."""
        if other.rows is not None:
            self.update(other.rows, other.other_rows)
        elif other.count:
            self._add(other.count, other.mean, other.other_mean, other.scatter)

    def copy(self) -> Moments:
        """The same moments, to be merged without changing these."""
        found = Moments(0)
        found.merge(self)
        return found

    def with_scatter(self, scatter: Tensor) -> Moments:
        """Moments with the same count and means and another :math:`S_{xy}`."""
        found = Moments(0)
        found._add(self.count, self.mean, self.other_mean, scatter)
        return found

    def _keep(self, x: Tensor, y: Tensor | None) -> None:
        self.rows = x if self.rows is None else torch.cat([self.rows, x])
        if y is not None:
            self.other_rows = y if self.other_rows is None else torch.cat([self.other_rows, y])
        self.count, self._scatter = len(self.rows), self._scatter.new_zeros(0, 0)
        self.mean = self.rows.double().mean(0)
        self.other_mean = self.mean if self.other_rows is None else self.other_rows.double().mean(0)

    def _add(self, count: int, mean: Tensor, other_mean: Tensor, scatter: Tensor) -> None:
        if not self.count:
            self.count, self.mean, self.other_mean, self._scatter = count, mean, other_mean, scatter
            return
        total = self.count + count
        step, other_step = mean - self.mean, other_mean - self.other_mean
        self._scatter = self.scatter + scatter
        self.rows = self.other_rows = None
        # The root goes to both sides, so that what is symmetric stays so to the last bit.
        root = math.sqrt(self.count * count / total)
        self._scatter.addr_(root * step, root * other_step)
        self.mean = self.mean + step * (count / total)
        self.other_mean = self.other_mean + other_step * (count / total)
        self.count = total


@stored("counts")
class LogHistogram:
    """Histogram of positive numbers on a logarithmic axis, for quantiles of a stream.

    A number is shared between the two nearest bins in proportion to its distance, so that a quantile moves by a last
    digit when a number does. Numbers beyond the ends count at the ends.

    Example:
        >>> histogram = LogHistogram()
        >>> histogram.update(torch.linspace(0.5, 1.5, 1001), torch.zeros(1001, dtype=torch.long))
        >>> round(histogram.quantile(0.5), 2)
        1.0
    """

    REACH = 12.0
    STEPS = 200  # of one unit of the logarithm: neighboring bins differ by half a percent
    BINS = int(2 * REACH * STEPS) + 2

    def __init__(self) -> None:
        self.counts = torch.zeros(GROUPS, self.BINS, dtype=torch.float64)

    def update(self, values: Tensor, group: Tensor) -> None:
        """Add every entry that is a number, with the group of its document; zero counts at the lower end."""
        logs = values.double().cpu().log()
        known = ~logs.isnan()
        place = (logs[known].clamp(-self.REACH, self.REACH) + self.REACH) * self.STEPS
        lower = place.floor()
        share = place - lower
        bins = group[known] * self.BINS + lower.long()
        counts = self.counts.view(-1)
        counts.index_add_(0, bins, 1 - share)
        counts.index_add_(0, bins + 1, share)

    def merge(self, other: LogHistogram) -> None:
        """Add what another has seen."""
        self.counts += other.counts

    def quantile(self, level: float) -> float:
        """The number below which the given share lies, nan if nothing was seen."""
        return self._quantile(self.counts.sum(0), level)

    def standard_error(self, level: float) -> float:
        """The standard error of a quantile, nan for fewer than two groups."""
        together = self.counts.sum(0)
        return jackknife([self._quantile(together - own, level) for own in self.counts if bool(own.any())])

    def _quantile(self, counts: Tensor, level: float) -> float:
        total = float(counts.sum())
        if not total:
            return float("nan")
        # Half of a bin's count lies below its center.
        below = counts.cumsum(0) - counts / 2
        wanted = torch.tensor(level * total, dtype=torch.float64)
        upper = int(torch.searchsorted(below, wanted).clamp(1, len(below) - 1))
        first, last = float(below[upper - 1]), float(below[upper])
        share = (level * total - first) / (last - first) if last > first else 0.5
        return float(torch.tensor((upper - 1 + share) / self.STEPS - self.REACH, dtype=torch.float64).exp())


@stored("size", "hashes", "rows")
class HashSample:
    """The rows with the smallest hashes: a sample that does not depend on the order in which rows arrive.

    Example:
        >>> sample = HashSample(size=2, dim=1)
        >>> sample.update(torch.tensor([9, 1, 5]), torch.tensor([[9.0], [1.0], [5.0]]))
        >>> sample.rows
        tensor([[1.],
                [5.]])
    """

    def __init__(self, size: int, dim: int) -> None:
        self.size = size
        self.hashes = torch.zeros(0, dtype=torch.int64)
        self.rows = torch.zeros(0, dim)

    def update(self, hashes: Tensor, rows: Tensor) -> None:
        """Add rows ``(tokens, dim)`` with their hashes ``(tokens,)``."""
        if len(self.hashes) == self.size:
            low = hashes < self.hashes[-1]
            hashes, rows = hashes[low], rows[low.to(rows.device)]
        hashes = torch.cat([self.hashes, hashes.cpu()])
        rows = torch.cat([self.rows, rows.float().cpu()])
        order = torch.sort(hashes, stable=True).indices[: self.size]
        self.hashes, self.rows = hashes[order], rows[order]

    def merge(self, other: HashSample) -> None:
        """Add what another has seen."""
        self.update(other.hashes, other.rows)


def document_hash(key: object) -> int:
    """A number in 63 bits that depends on nothing but the text of the key.

    Example:
        >>> document_hash("a") == document_hash("a"), document_hash("a") == document_hash("b")
        (True, False)
    """
    return int.from_bytes(hashlib.blake2b(str(key).encode(), digest_size=8).digest(), "big") >> 1


def token_hash(documents: Tensor, positions: Tensor, salt: int = 0) -> Tensor:
    """Non-negative int64 hashes of ``(document, position)``, the same wherever the document was batched.

    Args:
        documents: int64 hash of the document of each token, ``(tokens,)``.
        positions: number of the token among those that count, broadcasts against ``documents``.
        salt: another one gives independent hashes.

    Source:
        The finaliser of splitmix64 (Steele, Lea and Flood 2014), in arithmetic modulo 2^64.
    """
    x = documents + _signed(0x9E3779B97F4A7C15) * (positions + 1) + _signed(0xD1B54A32D192ED03 * salt)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ _shift(x, shift)) * _signed(factor)
    return _shift(x ^ _shift(x, 31), 1)


def shuffled(sequence: Tensor, hashes: Tensor) -> Tensor:
    """Indices that permute tokens within their sequences, by the order of their hashes.

    Args:
        sequence: ascending number of the sequence of each token, ``(tokens,)``.
        hashes: ``(tokens,)``.

    Returns:
        For each token another one (or itself) of the same sequence, ``(tokens,)``.

    Example:
        >>> shuffled(torch.tensor([0, 0, 0, 1, 1]), torch.tensor([5, 3, 9, 2, 1]))
        tensor([1, 0, 2, 4, 3])
    """
    by_hash = torch.sort(hashes, stable=True).indices
    return by_hash[torch.sort(sequence[by_hash], stable=True).indices]


def _signed(x: int) -> int:
    """The 64-bit integer with the same last bits."""
    return (x + (1 << 63)) % (1 << 64) - (1 << 63)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right; torch's own copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
