"""Contractions of an expanded cloud: renormalization of the whole, norms of single tokens, and others."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from massieu.checks import UserError, check_number, check_shape, optional_package
from massieu.dynamics.maps import check_cloud
from massieu.measures.gaussian import checked_covariance
from massieu.measures.measure import as_parameter

__all__ = [
    "CONTRACTIONS",
    "Affine",
    "CloudSpectrum",
    "batch_norm",
    "clip_to_ball",
    "global_rms",
    "halve",
    "layer_norm",
    "moments",
    "normal_ranks",
    "normal_scores",
    "renormalization",
    "renormalize",
    "rms_norm",
    "spectrum",
    "squash",
    "zca",
]


class Affine(NamedTuple):
    """Affine map :math:`x \\mapsto M x + b` of tokens, as a function of clouds ``(..., tokens, dim)``.

    Attributes:
        matrix: M, shape ``(..., dim, dim)``.
        offset: b, shape ``(..., dim)``.
    """

    matrix: Tensor
    offset: Tensor

    def __call__(self, cloud: Tensor) -> Tensor:
        return torch.einsum("...de,...ne->...nd", self.matrix.to(cloud), cloud) + self.offset.to(cloud)[..., None, :]


def renormalize(cloud: Tensor, location: Tensor, covariance: Tensor) -> Tensor:
    r"""Give the cloud a mean and a covariance, by the affine map with symmetric roots.

    .. math:: \eta_i \mapsto \mu + \Lambda^{1/2} C^{-1/2} (\eta_i - \bar\eta), \qquad
              C = \tfrac1n \sum_i (\eta_i - \bar\eta)(\eta_i - \bar\eta)^\top

    Args:
        cloud: :math:`\eta`, shape ``(..., tokens, dim)``, with a covariance of full rank.
        location: :math:`\mu`, shape ``(dim,)``.
        covariance: :math:`\Lambda`, positive definite, shape ``(dim, dim)``.

    Returns:
        The cloud with these moments, same shape.

    Source:
        "A Probabilistic Interpretation of Transformers", Theorem 1, the operator RN. It is printed with the second
        moment :math:`E[\eta\eta^\top]` in place of C, with which the theorem holds only for centered clouds.

    Example:
        >>> cloud = renormalize(torch.tensor([[0.0], [2.0]]), torch.tensor([5.0]), torch.tensor([[9.0]]))
        >>> cloud
        tensor([[2.],
                [8.]])
    """
    check_cloud(cloud, least=1)
    return _transport(spectrum(cloud), location, covariance)(cloud)


def renormalization(from_location: Tensor, from_covariance: Tensor, location: Tensor, covariance: Tensor) -> Affine:
    r"""Return the map RN between laws of given moments, :math:`x \mapsto \mu + \Lambda^{1/2} C^{-1/2} (x - m)`.

    For Gaussian keys :math:`N(\mu, \Sigma)` residual attention is the affine map
    :math:`A(\eta) = \eta + s(\mu + \Sigma \eta)`. On tokens of covariance :math:`\Sigma^{-1}` all roots commute, and
    RN after A is the identity of every single token, not only stationary in law as in Theorem 1.

    Args:
        from_location: m, shape ``(..., dim)``.
        from_covariance: C, positive definite, shape ``(..., dim, dim)``.
        location: :math:`\mu`, shape ``(dim,)``.
        covariance: :math:`\Lambda`, positive definite, shape ``(dim, dim)``.

    Example:
        >>> one = torch.ones(1)
        >>> renormalization(0 * one, 4 * one[None], one, one[None])(torch.tensor([[6.0]]))
        tensor([[4.]])
    """
    from_covariance = as_parameter(from_covariance, "from_covariance")
    values, vectors = torch.linalg.eigh(from_covariance)
    source = CloudSpectrum(from_location.to(from_covariance), values, vectors, values > _rounding(values))
    return _transport(source, location, covariance)


def layer_norm(cloud: Tensor) -> Tensor:
    r"""Center the features of every token and give it the length :math:`\sqrt{D}`, without gain and bias.

    It does not center the cloud. A token of equal features becomes zero.

    Example:
        >>> layer_norm(torch.tensor([[1.0, 3.0], [2.0, 2.0]]))
        tensor([[-1.,  1.],
                [ 0.,  0.]])
    """
    check_cloud(cloud)
    centered = cloud - cloud.mean(-1, keepdim=True)
    return _scaled(centered, (-1,), cloud.abs().amax(-1, keepdim=True))


def rms_norm(cloud: Tensor) -> Tensor:
    r"""Give every token the length :math:`\sqrt{D}`; zero stays zero.

    Example:
        >>> rms_norm(torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
        tensor([[1.4142, 0.0000],
                [0.0000, 0.0000]])
    """
    check_cloud(cloud)
    return _scaled(cloud, (-1,), 0.0)


def halve(cloud: Tensor) -> Tensor:
    """Halve every token, the inverse of a residual step along the token itself."""
    check_cloud(cloud)
    return 0.5 * cloud


def global_rms(cloud: Tensor) -> Tensor:
    """Divide the whole cloud by the root mean square of its entries; a cloud of zeros stays.

    Example:
        >>> global_rms(torch.tensor([[3.0], [4.0]])).square().mean()
        tensor(1.)
    """
    check_cloud(cloud)
    return _scaled(cloud, (-2, -1), 0.0)


def squash(cloud: Tensor) -> Tensor:
    """Apply the hyperbolic tangent to every entry."""
    check_cloud(cloud)
    return torch.tanh(cloud)


def batch_norm(cloud: Tensor) -> Tensor:
    """Center every feature over the tokens and give it variance one; a feature without variance becomes zero.

    Example:
        >>> batch_norm(torch.tensor([[1.0, 5.0], [3.0, 5.0]]))
        tensor([[-1.,  0.],
                [ 1.,  0.]])
    """
    check_cloud(cloud)
    if not cloud.shape[-2]:
        return cloud
    return _scaled(cloud - cloud.mean(-2, keepdim=True), (-2,), cloud.abs().amax(-2, keepdim=True))


def clip_to_ball(cloud: Tensor, radius: float | None = None) -> Tensor:
    r"""Shorten tokens outside of the ball to its radius, by default :math:`\sqrt{D}`.

    Example:
        >>> clip_to_ball(torch.tensor([[3.0, 4.0], [0.1, 0.0]]), radius=1.0)
        tensor([[0.6000, 0.8000],
                [0.1000, 0.0000]])
    """
    check_cloud(cloud)
    radius = math.sqrt(cloud.shape[-1]) if radius is None else check_number(radius, "radius", least=0.0)
    size = cloud.norm(dim=-1, keepdim=True)
    return torch.where(size > radius, cloud * (radius / torch.where(size > radius, size, 1.0)), cloud)


def zca(cloud: Tensor) -> Tensor:
    """Center and whiten the cloud by the symmetric root of its covariance, on the span of the tokens.

    Where the covariance has full rank, :func:`renormalize` to mean zero and the identity.

    Example:
        >>> zca(torch.tensor([[1.0, 5.0], [3.0, 5.0]]))
        tensor([[-1.,  0.],
                [ 1.,  0.]])
    """
    check_cloud(cloud, least=1)
    source = spectrum(cloud)
    return (cloud - source.mean[..., None, :]) @ source.inverse_root()


def normal_scores(cloud: Tensor) -> Tensor:
    r"""Replace every feature by the normal quantiles of its ranks over the tokens.

    .. math:: \eta_{id} \mapsto \Phi^{-1}\Big(\frac{r_{id} - 1/2}{n}\Big), \qquad
              r_{id} = 1 + \#\{j : \eta_{jd} < \eta_{id}\}

    Every feature is then as normal as n tokens can be; the cloud as a whole need not be. In one dimension residual
    attention keeps the order of the tokens, so that this map undoes it token by token. Ties count in the order of the
    tokens. Without derivatives: the result is constant under small changes of the cloud.

    Source:
        Van der Waerden's scores, instead of the renormalization of "A Probabilistic Interpretation of Transformers",
        Theorem 1.

    Example:
        >>> normal_scores(torch.tensor([[3.0], [1.0], [100.0]]))
        tensor([[ 0.0000],
                [-0.9674],
                [ 0.9674]])
    """
    check_cloud(cloud)
    ranks = torch.argsort(torch.argsort(cloud.detach(), dim=-2, stable=True), dim=-2)
    levels = (ranks.double() + 0.5) / max(cloud.shape[-2], 1)
    quantiles: Tensor = torch.special.ndtri(levels)
    return quantiles.to(cloud.dtype)


def normal_ranks(cloud: Tensor) -> Tensor:
    r"""Move the tokens to fixed normal points, by the assignment of least cost.

    .. math:: \eta_i \mapsto z_{\pi(i)}, \qquad \pi = \arg\max_\pi \sum_i \eta_i \cdot z_{\pi(i)}

    Ranks and normal quantiles in several dimensions; in one, :func:`normal_scores`. The points :math:`z` are a
    scrambled Sobol sequence under the normal quantile function, brought to mean zero and the identity as covariance.
    A cloud on these points returns to them after residual attention over any keys that are its values:
    :math:`\eta + s \nabla G(\eta)` is the gradient of a convex function, and pairs of points and images under such a
    gradient are an optimal assignment. The cloud hence stays as normal as the points, for any number of blocks.
    Without derivatives. The time grows with the third power of the number of tokens.

    Args:
        cloud: finite, shape ``(..., tokens, dim)``.

    Source:
        Vector ranks by optimal transport, Chernozhukov et al. 2017, "Monge-Kantorovich depth, quantiles, ranks and
        signs"; the theorem is Brenier's.

    Example:
        >>> from massieu.dynamics import ascend
        >>> start = normal_ranks(torch.randn(50, 2, generator=torch.Generator().manual_seed(0)))
        >>> torch.equal(normal_ranks(ascend(start)), start)
        True
    """
    check_cloud(cloud)
    tokens, dim = cloud.shape[-2:]
    if dim == 1 or not cloud.numel():
        return normal_scores(cloud)
    linear_sum_assignment = optional_package("scipy.optimize", "normal_ranks", "verify").linear_sum_assignment
    uniform = torch.quasirandom.SobolEngine(dim, scramble=True, seed=0).draw(tokens, dtype=torch.float64)
    points = zca(torch.special.ndtri(uniform.clamp(1e-12, 1 - 1e-12)))
    flat = cloud.detach().reshape(-1, tokens, dim).double().cpu()
    chosen = [linear_sum_assignment((each @ points.T).numpy(), maximize=True)[1] for each in flat]
    return torch.stack([points[torch.from_numpy(each)] for each in chosen]).reshape(cloud.shape).to(cloud)


CONTRACTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "halve": halve,
    "global_rms": global_rms,
    "squash": squash,
    "batch_norm": batch_norm,
    "clip_to_ball": clip_to_ball,
    "zca": zca,
    "normal_scores": normal_scores,
}
"""Contractions by name, each a function of a cloud ``(..., tokens, dim)``."""


class CloudSpectrum(NamedTuple):
    """Mean ``(..., dim)`` of a cloud, eigenvalues and eigenvectors of its covariance, and a mask of those to keep."""

    mean: Tensor
    values: Tensor
    vectors: Tensor
    kept: Tensor

    def inverse_root(self) -> Tensor:
        """Return the symmetric inverse root of the covariance on its span, ``(..., dim, dim)``."""
        roots = torch.where(self.kept, torch.where(self.kept, self.values, 1.0).rsqrt(), 0.0)
        return (self.vectors * roots[..., None, :]) @ self.vectors.mT


def moments(cloud: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean ``(..., dim)`` and population covariance ``(..., dim, dim)`` of the tokens."""
    mean = cloud.mean(-2)
    centered = cloud - mean[..., None, :]
    return mean, centered.mT @ centered / cloud.shape[-2]


def spectrum(cloud: Tensor) -> CloudSpectrum:
    """Decompose the covariance of the tokens."""
    mean, covariance = moments(cloud)
    values, vectors = torch.linalg.eigh(covariance)
    # The covariance of coinciding tokens is rounding, relative to their length.
    noise = (8 * torch.finfo(cloud.dtype).eps) ** 2 * cloud.square().sum(-1).amax(-1)
    return CloudSpectrum(mean, values, vectors, values > torch.maximum(_rounding(values), noise[..., None]))


def _transport(source: CloudSpectrum, location: Tensor, covariance: Tensor) -> Affine:
    """Return the map with symmetric roots from the moments of the source to the given ones."""
    location, dim = as_parameter(location, "location"), source.values.shape[-1]
    check_shape(location, "location", dim)
    covariance, _ = checked_covariance(covariance, (dim, dim))
    if not bool(source.kept.all()):
        rank = int(source.kept.sum(-1).min())
        raise UserError(
            f"the cloud must have a covariance of full rank {dim}, got rank {rank};"
            " use more tokens than dimensions, or zca, which whitens on the span"
        )
    values, axes = torch.linalg.eigh(covariance.to(source.values))
    matrix = (axes * values.sqrt()) @ axes.mT @ source.inverse_root()
    return Affine(matrix, location.to(matrix) - torch.einsum("...de,...e->...d", matrix, source.mean))


def _rounding(values: Tensor) -> Tensor:
    """Return the eigenvalue up to which eigenvalues are rounding, ``(..., 1)``."""
    return values.shape[-1] * torch.finfo(values.dtype).eps * values[..., -1:].clamp_min(0)


def _scaled(numbers: Tensor, axes: tuple[int, ...], scale: Tensor | float) -> Tensor:
    """Scale to root mean square one over the axes; zero for numbers that are rounding relative to ``scale``."""
    if not numbers.numel():
        return numbers
    largest = numbers.abs().amax(axes, keepdim=True)
    real = largest > 4 * torch.finfo(numbers.dtype).eps * scale
    # Relative to the largest one, squares can neither overflow nor vanish.
    relative = numbers / torch.where(real, largest, 1.0)
    square = torch.where(real, relative, 1.0).square().mean(axes, keepdim=True)
    return torch.where(real, relative * square.rsqrt(), 0.0)
