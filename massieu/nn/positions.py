"""Rotary positions: queries and keys rotated by angles proportional to their positions."""

from __future__ import annotations

import torch
from torch import Tensor

from massieu.checks import UserError, check_floating

__all__ = ["rotate"]


def rotate(x: Tensor, offset: int = 0, *, base: float = 10000.0, inverse: bool = False) -> Tensor:
    r"""Rotate each token by its position, so that inner products depend on differences of positions only.

    .. math:: (x_m, x_{m + d/2}) \mapsto R(i \, b^{-2m/d}) (x_m, x_{m + d/2}), \qquad m < d/2

    with :math:`R` the rotation of the plane, :math:`i` the position and :math:`b` the base.

    Args:
        x: queries or keys, shape ``(..., tokens, dim)``, dim even.
        offset: position of the first token, such as the number of tokens in a cache.
        base: :math:`b`; the larger, the slower the slowest plane rotates.
        inverse: rotate back instead.

    Returns:
        The same shape and dtype; the angles are computed in float64.

    Source:
        Su et al. 2021. The planes pair the first half of the coordinates with the second, as Llama does; the
        paper pairs neighbors, which is the same map after a permutation of the coordinates.

    Example:
        >>> x = torch.randn(5, 4, dtype=torch.float64)
        >>> torch.allclose(rotate(rotate(x, 7), 7, inverse=True), x)
        True
    """
    check_floating(x, "x")
    if x.dim() < 2 or x.shape[-1] % 2:
        raise UserError(
            f"x must have shape (..., tokens, dim) with dim even, got {tuple(x.shape)};"
            " coordinates rotate in pairs, and for a single vector pass x[None]"
        )
    tokens, half = x.shape[-2], x.shape[-1] // 2
    exponent = torch.arange(half, device=x.device, dtype=torch.float64) / half
    place = torch.arange(offset, offset + tokens, device=x.device, dtype=torch.float64)
    angle = place[:, None] * base**-exponent
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    if inverse:
        sin = -sin
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
