"""Normalizations of single tokens or of the cloud of all tokens."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from massieu.checks import check_choice
from massieu.kernels.graphs import call_eagerly
from massieu.nn.inputs import check_measure, check_tokens

__all__ = ["Norm", "Renormalization", "build_norm", "normalize"]

Norm = Literal["layer", "rms", "zca"]


class Renormalization(nn.Module):
    r"""Center and whiten the tokens of each sequence as a cloud, by the symmetric root of their covariance (ZCA).

    .. math:: x_i \mapsto b + g \odot (C + \epsilon I)^{-1/2} (x_i - \bar x), \qquad
              C = \tfrac1n \sum_i (x_i - \bar x)(x_i - \bar x)^\top

    Every token depends on all others: for encoders, not for causal models. With fewer tokens than dimensions the
    cloud is whitened on its span.

    Args:
        dim: size of the tokens.
        eps: :math:`\epsilon`, positive unless there are more tokens than dimensions.
        affine: whether :math:`g` (``weight``) and :math:`b` (``bias``) are learned.

    Source:
        "A Probabilistic Interpretation of Transformers", Theorem 1, the operator RN, with target covariance
        :math:`\mathrm{diag}(g)^2`. Printed with the second moment :math:`E[\eta\eta^\top]`, for which the theorem is
        false; this is the covariance.

    Example:
        >>> x = 3 + torch.randn(1, 500, 4, dtype=torch.float64) @ torch.randn(4, 4, dtype=torch.float64)
        >>> y = Renormalization(4, eps=0.0, affine=False)(x)[0]
        >>> torch.allclose(torch.cov(y.T, correction=0), torch.eye(4, dtype=torch.float64))
        True
    """

    def __init__(
        self,
        dim: int,
        eps: float = 1e-5,
        *,
        affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.eps = dim, eps
        self.weight = nn.Parameter(torch.ones(dim, device=device, dtype=dtype)) if affine else None
        self.bias = nn.Parameter(torch.zeros(dim, device=device, dtype=dtype)) if affine else None

    def extra_repr(self) -> str:
        """Size and floor of the spectrum."""
        return f"{self.dim}, eps={self.eps}"

    def forward(self, x: Tensor, lengths: Tensor | int | None = None) -> Tensor:
        """Renormalize each sequence.

        Args:
            x: shape ``(batch, tokens, dim)``.
            lengths: number of tokens that form the cloud, from the first, ``(batch,)`` or one for all; the others
                are mapped along with it.

        Returns:
            The same shape.
        """
        check_tokens(x, "x", self.dim)
        check_measure(x, x, None, lengths)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        count = torch.as_tensor(x.shape[1] if lengths is None else lengths, device=x.device).reshape(-1, 1, 1)
        outside = torch.arange(x.shape[1], device=x.device)[:, None] >= count
        count = count.clamp_min(1)
        centered = wide - wide.masked_fill(outside, 0.0).sum(1, keepdim=True) / count
        cloud = centered.masked_fill(outside, 0.0)
        covariance = torch.einsum("bnd,bne->bde", cloud, cloud) / count
        root: Tensor = call_eagerly(_InverseRoot.apply, covariance, self.eps)[0]
        white = torch.einsum("bnd,bde->bne", centered, root).to(x.dtype)
        if self.weight is None or self.bias is None:
            return white
        return self.bias + self.weight * white


def build_norm(
    kind: Norm | None, dim: int, eps: float, device: torch.device | str | None, dtype: torch.dtype | None
) -> nn.Module:
    """Build the norm of that name; None is the identity."""
    check_choice(kind, "norm", (*get_args(Norm), None))
    if kind is None:
        return nn.Identity()
    if kind == "layer":
        return nn.LayerNorm(dim, eps=eps, device=device, dtype=dtype)
    if kind == "rms":
        return nn.RMSNorm(dim, eps=eps, device=device, dtype=dtype)
    return Renormalization(dim, eps=eps, device=device, dtype=dtype)


def normalize(norm: nn.Module, x: Tensor, lengths: Tensor | int | None) -> Tensor:
    """Apply a norm; :class:`Renormalization` takes the lengths too."""
    result: Tensor = norm(x, lengths) if isinstance(norm, Renormalization) else norm(x)
    return result


class _InverseRoot(torch.autograd.Function):
    r"""The symmetric :math:`(C + \epsilon I)^{-1/2}`.

    The derivative of ``eigh`` divides by differences of eigenvalues, and a short sequence has many equal ones; the
    divided differences of :math:`\lambda^{-1/2}` need no such division.
    """

    @staticmethod
    def forward(covariance: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        values, vectors = torch.linalg.eigh(covariance)
        roots = (values.clamp_min(0.0) + eps).rsqrt()
        return (vectors * roots[..., None, :]) @ vectors.mT, roots, vectors

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*output[1:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor, None]:
        roots, vectors = ctx.saved_tensors
        squares = roots.square()
        slope = -squares[..., :, None] * squares[..., None, :] / (roots[..., :, None] + roots[..., None, :])
        inner = vectors.mT @ (0.5 * (grad + grad.mT)) @ vectors
        return vectors @ (slope * inner) @ vectors.mT, None
