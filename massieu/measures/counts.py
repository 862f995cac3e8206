"""Counts of a fixed number of draws: Multinomial and the over-dispersed DirichletMultinomial."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from massieu.checks import check_count
from massieu.measures.elementary import as_coordinates
from massieu.measures.measure import Measure, as_log_weight
from massieu.measures.remainders import cumulant_remainder

__all__ = ["DirichletMultinomial", "Multinomial"]


class Multinomial(Measure):
    r"""Counts of ``count`` independent draws from cells of given weights: attention over one-hot tokens, summed.

    .. math:: h(x) = \frac{n!}{\prod_k x_k!} \prod_k w_k^{x_k}, \qquad
              G(\eta) = n \log \sum_k w_k e^{\eta_k}, \qquad m(\eta) = n\, \mathrm{softmax}(\log w + \eta)

    The weights need not sum to one: h then has mass :math:`(\sum_k w_k)^n`. The family is not minimal, since
    the counts sum to n. The entropy is relative to h.

    Args:
        log_weight: :math:`\log w`, shape ``(dim,)``; minus infinity marks an absent cell.
        count: :math:`n`, the number of draws.

    Source:
        "A Probabilistic Interpretation of Transformers", eq. 4: softmax is the mean map of one draw.

    Example:
        >>> Multinomial(torch.zeros(4), count=8).mean(torch.zeros(1, 4))
        tensor([[2., 2., 2., 2.]])
    """

    def __init__(self, log_weight: Tensor, count: int) -> None:
        self.log_weight = as_log_weight(log_weight, getattr(log_weight, "shape", (0,))[-1], flat=True)
        self.dim = len(self.log_weight)
        self.count = check_count(count, "count", least=0)

    def log_normalizer(self, natural: Tensor) -> Tensor:
        return self.count * torch.logsumexp(self._scores(natural), dim=-1)

    def mean(self, natural: Tensor) -> Tensor:
        return self.count * torch.softmax(self._scores(natural), dim=-1)

    def fisher(self, natural: Tensor) -> Tensor:
        r""":math:`n (\mathrm{diag}(p) - p p^\top)`, shape ``(..., queries, dim, dim)``."""
        probability = torch.softmax(self._scores(natural), dim=-1)
        return self.count * _balanced(-probability[..., :, None] * probability[..., None, :])

    def remainder(self, natural: Tensor, step: Tensor) -> Tensor:
        """``count`` times that of one draw, shape ``(..., queries)``."""
        return self.count * cumulant_remainder(torch.log_softmax(self._scores(natural), dim=-1), step)

    def _draw(self, natural: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
        """Multinomial counts, drawn cell by cell as binomials, shape ``(count, ..., queries, dim)``."""
        probability = torch.softmax(self._scores(natural), dim=-1)
        rest = probability.flip(-1).cumsum(-1).flip(-1)
        # After the last present cell the ratio is 0/0, but no draws are left there.
        ratio = (probability / rest).nan_to_num().expand(count, *rest.shape)
        left = torch.full_like(ratio[..., 0], self.count)
        cells = []
        for cell in range(self.dim):
            cells.append(torch.binomial(left, ratio[..., cell], generator=generator))
            left = left - cells[-1]
        return torch.stack(cells, dim=-1)

    def support_function(self, direction: Tensor) -> Tensor:
        r""":math:`n \max_k u_k` over the cells that are present, shape ``(..., queries)``."""
        absent = self.log_weight.to(direction.device).isneginf()
        return self.count * direction.masked_fill(absent, -torch.inf).amax(-1)

    def affine_span(self, at: Tensor | None = None) -> Tensor:
        """The differences of present cells."""
        return _differences(~self.log_weight.isneginf(), self.count)

    def _scores(self, natural: Tensor) -> Tensor:
        natural = self.expect(natural)
        return self.log_weight.to(natural) + natural


class DirichletMultinomial(Measure):
    r"""Counts of ``count`` draws whose cell probabilities are themselves Dirichlet: over-dispersed attention.

    .. math:: h(x) = \frac{n!\, \Gamma(A)}{\Gamma(n + A)}
              \prod_k \frac{\Gamma(\alpha_k + x_k)}{x_k!\, \Gamma(\alpha_k)}, \qquad
              G(\eta) = \sum_{j=0}^{n-1} \log \sum_k e^{\eta_k} \frac{\alpha_k + m_k^{(j)}}{A + j}

    with :math:`A = \sum_k \alpha_k` and :math:`m^{(j)}` the mean for j draws. It is the urn of Polya with every
    color boosted by :math:`e^{\eta_k}` and its content replaced by the expected one:

    .. math:: m_k^{(j+1)} = (j + 1) \frac{e^{\eta_k} (\alpha_k + m_k^{(j)})}{\sum_l e^{\eta_l} (\alpha_l + m_l^{(j)})}

    All terms are positive, so nothing cancels, and the cost is linear in n. The family is not minimal, since the
    counts sum to n. The entropy is relative to h.

    Args:
        concentration: :math:`\alpha`, positive, a number or ``(dim,)``.
        count: :math:`n`, the number of draws.

    Source:
        Mosimann 1962 for h. The recursion follows from
        :math:`Z \propto f_n = [t^n] \prod_k (1 - t e^{\eta_k})^{-\alpha_k}`: the sum
        :math:`m_k^{(n)} f_n = \alpha_k \sum_{i \ge 1} e^{i \eta_k} f_{n-i}` loses its first term when n falls by
        one, and :math:`\sum_k m_k^{(n)} = n` gives the ratio :math:`f_n / f_{n-1}`.

    Example:
        >>> measure = DirichletMultinomial(torch.tensor([1.0, 1.0]), count=2)
        >>> measure.mean(torch.tensor([[0.0, 0.0], [1.0, 0.0]]))
        tensor([[1.0000, 1.0000],
                [1.5752, 0.4248]])
    """

    def __init__(self, concentration: float | Tensor, count: int) -> None:
        (self.concentration,) = as_coordinates(concentration=concentration)
        self.count = check_count(count, "count", least=0)
        self.dim = len(self.concentration)

    def log_normalizer(self, natural: Tensor) -> Tensor:
        natural = self.expect(natural)
        size = self.concentration.to(natural).sum()
        value = torch.zeros_like(natural[..., 0])
        for drawn, (log_total, _, _) in enumerate(self._urn(natural)):
            value = value + log_total - torch.log(size + drawn)
        return value

    def mean(self, natural: Tensor) -> Tensor:
        r"""Expected content of the boosted urn, shape ``(..., queries, dim)``."""
        natural = self.expect(natural)
        mean = torch.zeros_like(natural)
        for _, _, later in self._urn(natural):
            mean = later
        return mean

    def fisher(self, natural: Tensor) -> Tensor:
        """Derivative of the recursion for the mean, shape ``(..., queries, dim, dim)``."""
        natural = self.expect(natural)
        covariance = torch.diag_embed(torch.zeros_like(natural))
        for drawn, (_, gain, mean) in enumerate(self._urn(natural), start=1):
            moved = torch.diag_embed(mean) + drawn * gain[..., :, None] * covariance
            share = mean[..., :, None] / drawn
            covariance = _balanced(moved - share * moved.sum(-2, keepdim=True))
        return covariance

    def _draw(self, natural: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
        """Exact draws, cell by cell given the number of draws left, shape ``(count, ..., queries, dim)``."""
        natural = self.expect(natural).detach()
        # In float64: log factorials of a thousand leave float32 three digits.
        eta, size = natural.double(), torch.arange(self.count + 1, device=natural.device)
        earlier = torch.ones(self.dim, self.dim, dtype=torch.bool, device=natural.device).tril(-1)
        tails = self._urn(eta[..., None, :].masked_fill(earlier, -torch.inf))
        log_ratios = torch.stack([torch.zeros_like(eta), *(log_total for log_total, _, _ in tails)], dim=-1)
        log_tail = log_ratios.cumsum(-1) - torch.lgamma(size + 1.0)
        alpha = self.concentration.to(eta)[:, None]
        log_cell = torch.lgamma(alpha + size) - torch.lgamma(alpha) - torch.lgamma(size + 1.0) + size * eta[..., None]
        left = torch.full((count, *eta.shape[:-1]), self.count, device=natural.device)
        cells = []
        for cell in range(self.dim - 1):
            rest = left[..., None] - size
            log_rest = log_tail[..., cell + 1, :].expand(rest.shape).gather(-1, rest.clamp_min(0))
            scores = (log_cell[..., cell, :] + log_rest).masked_fill(rest < 0, -torch.inf)
            rows = scores.softmax(-1).flatten(end_dim=-2)
            cells.append(torch.multinomial(rows, 1, generator=generator).view(left.shape))
            left = left - cells[-1]
        return torch.stack([*cells, left], dim=-1).to(natural)

    def support_function(self, direction: Tensor) -> Tensor:
        r""":math:`n \max_k u_k`, shape ``(..., queries)``."""
        return self.count * direction.amax(-1)

    def affine_span(self, at: Tensor | None = None) -> Tensor:
        """The differences of cells."""
        return _differences(torch.ones(self.dim, dtype=torch.bool), self.count)

    def _urn(self, natural: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield for each draw the log of the total weight, the boosts over that total, and the mean after it."""
        alpha = self.concentration.to(natural)
        peak = natural.detach().amax(-1, keepdim=True)
        boost = torch.exp(natural - peak)
        mean = torch.zeros_like(natural)
        for drawn in range(1, self.count + 1):
            weight = boost * (alpha + mean)
            total = weight.sum(-1, keepdim=True)
            mean = drawn * weight / total
            yield (total.log() + peak)[..., 0], boost / total, mean


def _differences(present: Tensor, count: int) -> Tensor:
    """Projector on the differences of the present cells: the counts of all cells sum to a constant."""
    cells = present.double() * (count > 0)
    return torch.diag(cells) - torch.outer(cells, cells) / cells.sum().clamp(min=1)


def _balanced(matrix: Tensor) -> Tensor:
    """Return the matrix with the diagonal for which its rows sum to zero: the total count is fixed."""
    # p (1 - p) as a sum over the other cells: the difference cancels when one cell takes nearly everything.
    others = matrix - torch.diag_embed(matrix.diagonal(dim1=-2, dim2=-1))
    return others - torch.diag_embed(others.sum(-1))
