r"""Maps of an attention head, :math:`A = \mathrm{scale}\, W_Q^\top W_K` and :math:`B = W_O W_V`, by their factors.

Both are as large as the tokens on each side and have at most the rank of a head. All values are computed from the
factors and from matrices of the size of a head, without matrices of size dim x dim, except with a covariance. They are
float64 whatever the weights are, and nan where undefined (a map that is zero has no direction).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from massieu.checks import UserError

__all__ = [
    "LowRank",
    "score_map",
    "output_map",
    "singular_values",
    "effective_rank",
    "symmetric_fraction",
    "cosine",
    "Spectrum",
    "floored_spectrum",
    "WhitenedHead",
    "whiten",
    "whitened_head",
    "power_cosine",
    "random_maps",
    "projector_maps",
]


@dataclass(frozen=True)
class LowRank:
    r"""Matrices :math:`L^\top R`, shape ``(..., rows, columns)``, as their factors.

    Attributes:
        left: :math:`L`, shape ``(..., rank, rows)``.
        right: :math:`R`, shape ``(..., rank, columns)``.

    Example:
        >>> LowRank(torch.ones(1, 3), torch.tensor([[1.0, 2.0, 3.0]])).trace()
        tensor(6.)
    """

    left: Tensor
    right: Tensor

    @property
    def mT(self) -> LowRank:
        """The transposed matrices."""
        return LowRank(self.right, self.left)

    def dense(self) -> Tensor:
        """Matrices ``(..., rows, columns)``, for tests and small cases."""
        return self.left.mT @ self.right

    def inner(self, other: LowRank) -> Tensor:
        r"""The Frobenius product :math:`\mathrm{tr}(X^\top Y)`, shape ``(...)``."""
        return ((self.left @ other.left.mT) * (self.right @ other.right.mT)).sum((-2, -1))

    def trace(self) -> Tensor:
        """The trace of square matrices, shape ``(...)``."""
        return (self.left * self.right).sum((-2, -1))

    @cached_property
    def core(self) -> Tensor:
        """Small matrices with the same singular values, ``(..., min(rank, rows), min(rank, columns))``."""
        if self.left.shape[-2] >= max(self.left.shape[-1], self.right.shape[-1]):
            return self.dense()
        return _triangle(self.left) @ _triangle(self.right).mT

    @cached_property
    def norm(self) -> Tensor:
        """The Frobenius norm, shape ``(...)``; zero where it is lost in the rounding of the factors."""
        # By the core: the root of inner(self) would lose half of the digits where the factors cancel.
        norm = torch.linalg.matrix_norm(self.core)
        largest = torch.linalg.matrix_norm(self.left) * torch.linalg.matrix_norm(self.right)
        return torch.where(norm <= 16 * torch.finfo(norm.dtype).eps * largest, 0, norm)


def score_map(query: Tensor, key: Tensor, scale: float = 1.0) -> LowRank:
    r"""Score matrix :math:`A = \mathrm{scale}\, W_Q^\top W_K`: tokens i and j score :math:`x_i^\top A x_j`.

    Args:
        query: :math:`W_Q`, shape ``(..., head_dim, dim)``, rows are outputs as in ``nn.Linear``.
        key: :math:`W_K`, shape ``(..., head_dim, context_dim)``.
        scale: factor of the inner products.

    Source:
        "A Probabilistic Interpretation of Transformers", section 3.2, with the weights written out.

    Example:
        >>> score_map(torch.eye(2)[:1], torch.eye(2)[1:], scale=0.5).dense()
        tensor([[0.0000, 0.5000],
                [0.0000, 0.0000]], dtype=torch.float64)
    """
    return LowRank(scale * _wide(query), _wide(key))


def output_map(value: Tensor, output: Tensor) -> LowRank:
    r"""Output matrix :math:`B = W_O W_V`: a head adds :math:`B \sum_j p_{ij} x_j` to token i.

    Args:
        value: :math:`W_V`, shape ``(..., value_dim, context_dim)``.
        output: :math:`W_O`, shape ``(..., dim, value_dim)``.

    Example:
        >>> output_map(torch.eye(2)[:1], torch.eye(2)[:, 1:]).dense()
        tensor([[0., 0.],
                [1., 0.]], dtype=torch.float64)
    """
    return LowRank(_wide(output).mT, _wide(value))


def singular_values(matrix: LowRank) -> Tensor:
    r"""Singular values, largest first, shape ``(..., min(rank, rows, columns))``.

    With :math:`L^\top = Q_L T_L` and :math:`R^\top = Q_R T_R` they are those of the small :math:`T_L T_R^\top`. Factors
    that are not finite give nan.

    Example:
        >>> singular_values(LowRank(torch.eye(2, 4), 3 * torch.eye(2, 5)))
        tensor([3., 3.])
    """
    core = matrix.core
    finite = core.isfinite().all(-1).all(-1)[..., None]
    return torch.where(finite, torch.linalg.svdvals(torch.where(finite[..., None], core, 0)), torch.nan)


def effective_rank(singular: Tensor) -> Tensor:
    r"""Effective number of singular values, the exponential of their entropy.

    .. math:: r = \exp\Big(-\sum_i p_i \log p_i\Big), \qquad p_i = \sigma_i / \sum_j \sigma_j

    Between 1 and the rank; nan for a matrix of zeros. The singular values are not squared: for those of a cloud of
    tokens see :func:`massieu.geometry.clouds.effective_dimension`.

    Args:
        singular: :math:`\sigma`, shape ``(..., rank)``.

    Source:
        Roy and Vetterli 2007, "The effective rank: a measure of effective dimensionality", definition 1.

    Example:
        >>> effective_rank(torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]]))
        tensor([2., 1.])
    """
    share = singular / singular.sum(-1, keepdim=True)
    entropy: Tensor = torch.special.entr(share).sum(-1)
    return entropy.exp()


def symmetric_fraction(matrix: LowRank) -> Tensor:
    r"""Share of the symmetric part in the squared Frobenius norm, in [0, 1].

    .. math:: \frac{\|A + A^\top\|^2}{4 \|A\|^2} = \frac12 + \frac{\mathrm{tr}(A A)}{2 \|A\|^2}

    One for a symmetric matrix, such as tied queries and keys; zero for an antisymmetric one; ``1/2 + 1/(2 dim)`` on
    average for independent factors. nan for a matrix of zeros and for one that is not square.

    Example:
        >>> symmetric_fraction(LowRank(torch.eye(2), torch.tensor([[0.0, 1.0], [-1.0, 0.0]])))
        tensor(0.)
    """
    square = matrix.norm.square()
    if matrix.left.shape[-1] != matrix.right.shape[-1]:
        return torch.full_like(square, torch.nan)
    return _defined((0.5 + matrix.inner(matrix.mT) / (2 * square)).clamp(0, 1), square)


def cosine(first: LowRank, second: LowRank) -> Tensor:
    r"""Cosine :math:`\langle X, Y \rangle_F / (\|X\| \|Y\|)`, shape ``(...)``.

    Of :math:`B` and :math:`A` it is one exactly if :math:`B = c A` with :math:`c > 0`: then, with keys held fixed, the
    head's output is :math:`c\, \nabla_{x_i} \log Z(x_i)`. For random heads it is of order one over ``dim``. nan if a
    matrix is zero or the shapes differ.

    Source:
        "A Probabilistic Interpretation of Transformers", Proposition 1a, which takes values = keys; with weights the
        field is a gradient for every set of tokens only if :math:`B = cA` (rank two or more).

    Example:
        >>> tied = score_map(torch.eye(2, 3), torch.ones(2, 3))
        >>> cosine(tied, LowRank(2 * tied.left, tied.right))
        tensor(1., dtype=torch.float64)
    """
    if first.left.shape[-1] != second.left.shape[-1] or first.right.shape[-1] != second.right.shape[-1]:
        return torch.full_like(first.norm, torch.nan)
    product = first.norm * second.norm
    return _defined((first.inner(second) / product).clamp(-1, 1), product)


class Spectrum(NamedTuple):
    """Eigenvalues of a covariance, floored, and its eigenvectors (columns)."""

    values: Tensor
    vectors: Tensor

    def powers(self, exponent: float) -> Tensor:
        """Powers of the eigenvalues, ``(dim,)``; infinite for a negative power of zero."""
        return self.values**exponent

    def power(self, exponent: float) -> Tensor:
        r"""The symmetric power :math:`\Lambda^p`, ``(dim, dim)``."""
        return (self.vectors * self.powers(exponent)) @ self.vectors.mT


def floored_spectrum(covariance: Tensor, floor: float = 1e-3) -> Spectrum:
    r"""Eigenvalues and eigenvectors of a covariance, no eigenvalue below ``floor`` times their mean.

    A layer norm, or fewer tokens than dimensions, leaves directions without variance. Unfloored, they alone would make
    :math:`\Lambda^{-1}`.

    Args:
        covariance: :math:`\Lambda`, shape ``(dim, dim)``.
        floor: smallest eigenvalue, as a share of the mean eigenvalue.

    Example:
        >>> floored_spectrum(torch.diag(torch.tensor([0.0, 2.0])), floor=0.5).values
        tensor([0.5000, 2.0000], dtype=torch.float64)
    """
    if covariance.dim() != 2 or covariance.shape[0] != covariance.shape[1]:
        raise UserError(
            f"covariance must have shape (dim, dim), got {tuple(covariance.shape)}; pass the one of a layer's inputs"
        )
    if not 0 <= floor <= 1:
        raise UserError(f"floor must be in [0, 1], got {floor}; it is a share of the mean eigenvalue")
    wide = _wide(covariance)
    if not wide.isfinite().all():
        return Spectrum(torch.full_like(wide[0], torch.nan), torch.full_like(wide, torch.nan))
    values, vectors = torch.linalg.eigh((wide + wide.mT) / 2)
    return Spectrum(torch.maximum(values, floor * values.mean().clamp(min=0)).clamp(min=0), vectors)


class WhitenedHead(NamedTuple):
    r"""Statistics of :math:`M = \Lambda^{1/2} A \Lambda^{1/2}`; every field has shape ``(...)``, one value per head.

    If the score map inverts the covariance on the subspace of the head, :math:`M` is an orthogonal projector of rank
    ``head_dim``.

    Attributes:
        trace: :math:`\mathrm{tr} M`; of the projector, ``head_dim``.
        cosine: of M with the identity; of the projector, ``(head_dim / dim) ** 0.5``.
        idempotency: :math:`\|M^2 - M\| / \|M\|`; of the projector, zero.
        logit_sd: :math:`\|M\|`, the standard deviation of the scores of two independent centered tokens of covariance
            :math:`\Lambda`; of the projector, ``head_dim ** 0.5``.
    """

    trace: Tensor
    cosine: Tensor
    idempotency: Tensor
    logit_sd: Tensor


def whiten(matrix: LowRank, spectrum: Spectrum) -> LowRank:
    r"""Maps between whitened tokens, :math:`\Lambda^{1/2} A \Lambda^{1/2}`, in the basis of the eigenvectors.

    Traces, norms and products are the same in every basis, and this one needs no matrix of size dim x dim.
    """
    root = spectrum.powers(0.5)
    return LowRank((matrix.left @ spectrum.vectors) * root, (matrix.right @ spectrum.vectors) * root)


def whitened_head(matrix: LowRank, spectrum: Spectrum) -> WhitenedHead:
    r"""Compare a score map with an inverse covariance of its inputs, on the subspace of its rank.

    .. math:: T = T \Lambda T \iff M = \Lambda^{1/2} T \Lambda^{1/2} = M^2

    Args:
        matrix: :math:`A` of the heads, ``(..., dim, dim)`` by its factors.
        spectrum: of the covariance :math:`\Lambda` of the input tokens of the layer.

    Source:
        "A Probabilistic Interpretation of Transformers", section 3.2, expects the inverse covariance for
        :math:`W_Q^\top W_K`; asking that the Jacobian of the mean map be the key map gives :math:`T = T \Lambda T`,
        which :math:`\Lambda^{-1/2} P \Lambda^{-1/2}` solves for every orthogonal projector P.

    Example:
        >>> spectrum = floored_spectrum(torch.diag(torch.tensor([1.0, 2.0, 3.0, 4.0])))
        >>> found = whitened_head(projector_maps(spectrum, rank=1), spectrum)
        >>> [round(value.item(), 6) + 0.0 for value in found]
        [1.0, 0.5, 0.0, 1.0]
    """
    whitened = whiten(matrix, spectrum)
    norm, trace = whitened.norm, whitened.trace()
    dim, rank = whitened.left.shape[-1], whitened.left.shape[-2]
    # M^2 - M = L'(RL' - 1)R.
    small = whitened.right @ whitened.left.mT - torch.eye(rank, dtype=norm.dtype, device=norm.device)
    residue = LowRank(small.mT @ whitened.left, whitened.right)
    return WhitenedHead(trace, _defined(trace / (norm * dim**0.5), norm), _defined(residue.norm / norm, norm), norm)


def power_cosine(matrix: LowRank, spectrum: Spectrum, exponents: Sequence[float]) -> Tensor:
    r"""Cosine of the symmetric part of :math:`\sum_h A_h` with powers :math:`\Lambda^p` of the covariance.

    Args:
        matrix: :math:`A` of the heads of one layer, ``(heads, dim, dim)`` by its factors.
        spectrum: of the covariance :math:`\Lambda` of the input tokens of the layer.
        exponents: the powers :math:`p`; the theory predicts that -1 fits best.

    Returns:
        One cosine per power.

    Example:
        >>> spectrum = floored_spectrum(torch.diag(torch.tensor([1.0, 2.0])))
        >>> heads = LowRank(torch.eye(2, dtype=torch.float64)[None], spectrum.power(-1)[None])
        >>> power_cosine(heads, spectrum, [-1, 1])
        tensor([1.0000, 0.8000], dtype=torch.float64)
    """
    # The sum over heads is one more product, with the heads side by side as its rank.
    total = LowRank(matrix.left.flatten(0, -2), matrix.right.flatten(0, -2))
    symmetric = total.norm * symmetric_fraction(total).sqrt()
    diagonal = ((total.left @ spectrum.vectors) * (total.right @ spectrum.vectors)).sum(0)
    powers = torch.stack([spectrum.powers(exponent) for exponent in exponents])
    product = symmetric * torch.linalg.vector_norm(powers, dim=-1)
    return _defined((powers @ diagonal / product).clamp(-1, 1), product)


def random_maps(like: LowRank, generator: torch.Generator | None = None) -> LowRank:
    """Draw maps with independent Gaussian factors, of the same shapes and Frobenius norms.

    Example:
        >>> like = score_map(torch.eye(3)[:2], torch.eye(3)[1:])
        >>> torch.allclose(random_maps(like).norm, like.norm)
        True
    """
    left, right = (_normal(x, generator) for x in (like.left, like.right))
    drawn = LowRank(left, right)
    return LowRank((like.norm / drawn.norm)[..., None, None] * left, right)


def projector_maps(
    spectrum: Spectrum, rank: int, heads: tuple[int, ...] = (), generator: torch.Generator | None = None
) -> LowRank:
    r"""Draw score maps :math:`\Lambda^{-1/2} P \Lambda^{-1/2}` with random projectors P, as the theory predicts them.

    Args:
        spectrum: of the covariance :math:`\Lambda`, ``(dim, dim)``.
        rank: of the projectors, the ``head_dim`` of a head.
        heads: leading shape of the result.
        generator: draws the projectors.

    Example:
        >>> spectrum = floored_spectrum(torch.eye(3))
        >>> matrix = projector_maps(spectrum, rank=2).dense()
        >>> torch.allclose(matrix @ matrix, matrix)
        True
    """
    like = spectrum.values.new_empty(*heads, spectrum.values.shape[0], rank)
    frame = torch.linalg.qr(_normal(like, generator)).Q
    # The distribution of a random projector is the same in every basis, also that of the eigenvectors.
    factor = (frame.mT * spectrum.powers(-0.5)) @ spectrum.vectors.mT
    return LowRank(factor, factor)


def _wide(tensor: Tensor) -> Tensor:
    # Apple's devices have no float64; the matrices of a head are small enough for the processor.
    return (tensor.detach().cpu() if tensor.device.type == "mps" else tensor.detach()).double()


def _triangle(factor: Tensor) -> Tensor:
    triangle: Tensor = torch.linalg.qr(factor.mT, mode="r").R
    return triangle


def _defined(value: Tensor, norm: Tensor) -> Tensor:
    return torch.where(norm > 0, value, torch.nan)


def _normal(like: Tensor, generator: torch.Generator | None) -> Tensor:
    device = like.device if generator is None else generator.device
    return torch.randn(like.shape, generator=generator, dtype=like.dtype, device=device).to(like.device)
