"""Geometry of token clouds: volume, dimension, similarity, groups, Gaussianity, and motion by a sublayer."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

__all__ = [
    "FLOOR",
    "centered",
    "distance_ratio",
    "effective_dimension",
    "gaussian_band",
    "groups",
    "half_log_det",
    "mean_cosine",
    "monotone",
    "projection_kurtosis",
]

FLOOR = 1e-6
"""Least eigenvalue of a covariance, as a share of the mean."""

BLUR = 1e-3
"""Pairs with a smaller cosine count in part as positive, so that rounding has no large effect on a share."""

APART, TOGETHER = 0.8, 0.9
"""Cosine below which two tokens are unlike, and cosine above which they are in one group."""

DIRECTIONS = 64
SIMULATIONS = 16


def distance_ratio(before: Tensor, after: Tensor) -> Tensor:
    r"""Ratio of the distances of pairs of tokens, :math:`|y_i - y_j| / |x_i - x_j|`.

    Args:
        before: differences :math:`x_i - x_j`, shape ``(pairs, dim)``.
        after: differences :math:`y_i - y_j` of the same pairs.

    Returns:
        Shape ``(pairs,)``, nan for pairs at distance zero before.

    Example:
        >>> distance_ratio(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 3.0]]))
        tensor([3.])
    """
    old = before.norm(dim=-1)
    return torch.where(old > 0, after.norm(dim=-1) / old, torch.nan)


def monotone(before: Tensor, update: Tensor) -> Tensor:
    r"""One for pairs that the update moves apart, :math:`(x_i - x_j) \cdot (a_i - a_j) > 0`, else zero; continuous.

    Differences as in :func:`distance_ratio`. A gradient of a convex function gives 1 for every pair.

    Example:
        >>> x = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> monotone(x, torch.tensor([[-1.0, 0.0], [0.0, 2.0]]))
        tensor([0., 1.])
    """
    size = before.norm(dim=-1) * update.norm(dim=-1)
    cosine = (before * update).sum(-1) / size.clamp_min(torch.finfo(size.dtype).tiny)
    return torch.clamp(0.5 + cosine / (2 * BLUR), 0, 1)


def half_log_det(covariance: Tensor) -> float:
    r"""Log volume of a Gaussian cloud up to a constant, :math:`\tfrac12 \log\det C`, with floored spectrum.

    Example:
        >>> round(half_log_det(4 * torch.eye(3, dtype=torch.float64)) / 3, 4)
        0.6931
    """
    spectrum = torch.linalg.eigvalsh(covariance)
    floor = FLOOR * float(spectrum.mean())
    return 0.5 * float(spectrum.clamp_min(floor).log().sum()) if floor > 0 else float("nan")


def effective_dimension(covariance: Tensor) -> float:
    r"""Number of directions in which a cloud extends, :math:`e^H` of its eigenvalues as a distribution.

    Source:
        Roy and Vetterli 2007, "The effective rank", with eigenvalues of the covariance in place of singular values.

    Example:
        >>> effective_dimension(torch.diag(torch.tensor([1.0, 1.0, 0.0])).double())
        2.0
    """
    spectrum = torch.linalg.eigvalsh(covariance).clamp_min(0)
    share = spectrum / spectrum.sum()
    return float(torch.special.entr(share).sum().exp())


def mean_cosine(x: Tensor, sequence: Tensor, num_sequences: int) -> Tensor:
    r"""Mean cosine between different tokens of a sequence, from the length of the sum of their directions.

    .. math:: \frac{|\sum_i \hat x_i|^2 - n}{n (n - 1)}

    Args:
        x: shape ``(tokens, dim)``.
        sequence: number of the sequence of each token, ``(tokens,)``.
        num_sequences: number of sequences.

    Returns:
        Shape ``(sequences,)``, nan for those with fewer than two tokens.

    Example:
        >>> mean_cosine(torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]]), torch.zeros(3, dtype=torch.long), 1)
        tensor([0.3333], dtype=torch.float64)
    """
    direction = torch.nn.functional.normalize(x.double(), dim=-1)
    total = direction.new_zeros(num_sequences, x.shape[-1]).index_add_(0, sequence, direction)
    squares = direction.new_zeros(num_sequences).index_add_(0, sequence, direction.square().sum(-1))
    count = torch.bincount(sequence, minlength=num_sequences)
    pairs = count * (count - 1)
    return torch.where(pairs > 0, (total.square().sum(-1) - squares) / pairs, torch.nan)


def centered(x: Tensor, sequence: Tensor, num_sequences: int) -> Tensor:
    """Tokens minus the mean of their sequence.

    Args:
        x: shape ``(tokens, dim)``.
        sequence: number of the sequence of each token, ``(tokens,)``.
        num_sequences: number of sequences.

    Example:
        >>> centered(torch.tensor([[1.0], [3.0], [5.0]]), torch.tensor([0, 0, 1]), 2)
        tensor([[-1.],
                [ 1.],
                [ 0.]])
    """
    count = torch.bincount(sequence, minlength=num_sequences).clamp_min(1)
    total = x.new_zeros(num_sequences, x.shape[-1]).index_add_(0, sequence, x)
    return x - (total / count[:, None])[sequence]


def groups(x: Tensor, present: Tensor) -> Tensor:
    r"""Effective number of groups of similar tokens, :math:`\sum_i 1 / \sum_j s_{ij}`.

    The similarity :math:`s_{ij}` rises from 0 to 1 between two cosines: tokens that agree are one group, and a token
    unlike all others is a group of its own. It is continuous in the tokens, the diversity of order zero of Leinster and
    Cobbold 2012, "Measuring diversity: the importance of species similarity".

    Args:
        x: shape ``(sequences, tokens, dim)``.
        present: boolean, ``(sequences, tokens)``.

    Returns:
        Shape ``(sequences,)``.

    Example:
        >>> x = torch.tensor([[[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]]])
        >>> groups(x, torch.ones(1, 3, dtype=torch.bool))
        tensor([2.])
    """
    direction = torch.nn.functional.normalize(x, dim=-1)
    cosine = torch.einsum("sid,sjd->sij", direction, direction)
    similar = ((cosine - APART) / (TOGETHER - APART)).clamp(0, 1) * present[:, None, :]
    # The similarity of a token with itself is one, for the zero vector too.
    similar = similar.diagonal_scatter(present.to(similar.dtype), dim1=1, dim2=2)
    return (present / similar.sum(-1).clamp_min(1)).sum(-1)


def projection_kurtosis(rows: Tensor, mean: Tensor, covariance: Tensor) -> float:
    r"""Mean excess kurtosis of random projections of whitened tokens, zero for a Gaussian cloud.

    .. math:: \frac1m \sum_k \frac{E[p_k^4]}{E[p_k^2]^2} - 3, \qquad p_k = u_k^\top C^{-1/2} (x - \bar x)

    Without whitening the few directions of largest variance would dominate every projection.

    Args:
        rows: a sample, ``(tokens, dim)``.
        mean: mean of the whole cloud, ``(dim,)``.
        covariance: covariance of the whole cloud, ``(dim, dim)``; directions below the floor are omitted.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> x = torch.randn(4000, 8, generator=generator, dtype=torch.float64)
        >>> abs(projection_kurtosis(x, x.mean(0), torch.cov(x.T))) < 0.1
        True
    """
    if len(rows) < 4:
        return float("nan")
    spectrum, basis = torch.linalg.eigh(covariance)
    kept = spectrum > FLOOR * spectrum.mean()
    white = (rows.double() - mean) @ (basis[:, kept] / spectrum[kept].sqrt())
    # Directions are drawn in the coordinates of the tokens: the sign of an eigenvector is arbitrary.
    drawn = basis[:, kept].T @ _directions(len(covariance))
    projected = white @ drawn
    square = projected.square()
    return float((square.square().mean(0) / square.mean(0).square()).mean() - 3)


@functools.lru_cache(maxsize=32)
def gaussian_band(num_rows: int, num_tokens: int, dim: int) -> float:
    """Half width of the band of :func:`projection_kurtosis` for Gaussian tokens, by simulation.

    The bias of whitening with the tokens' own covariance plus two standard deviations. The simulated tokens are
    independent; for dependent tokens of one text the band is somewhat wider.

    Args:
        num_rows: size of the sample.
        num_tokens: number of tokens of the covariance.
        dim: size of the tokens.

    Example:
        >>> gaussian_band(1000, 1000, 4) > gaussian_band(4000, 4000, 4)
        True
    """
    if num_rows < 4 or num_tokens < 2:
        return float("nan")
    generator = torch.Generator().manual_seed(num_rows)
    # Beyond four tokens for every direction, more of them do not change the effect of whitening.
    others = max(min(num_tokens, num_rows + 4 * dim), num_rows) - num_rows
    found = []
    for _ in range(SIMULATIONS):
        x = torch.randn(num_rows + others, dim, generator=generator, dtype=torch.float64)
        found.append(projection_kurtosis(x[:num_rows], x.mean(0), torch.cov(x.T, correction=0)))
    values = torch.tensor(found, dtype=torch.float64)
    return float(values.mean().abs() + 2 * values.std())


@functools.lru_cache(maxsize=8)
def _directions(dim: int) -> Tensor:
    return torch.randn(dim, DIRECTIONS, generator=torch.Generator().manual_seed(dim), dtype=torch.float64)
